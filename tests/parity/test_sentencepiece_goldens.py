"""SentencePiece BPE rebuilt from a GGUF file's pieces and scores, against the sentencepiece library itself."""

import json
from pathlib import Path

import pytest

from specjax.weights.gguf_tokenizer import gguf_tokenizer

MODELS = json.loads((Path(__file__).parent / "goldens" / "sentencepiece.json").read_text(encoding="utf-8"))
CASES = [(model, case) for model in MODELS for case in model["strings"]]


def build(model, **changes):
    names = ("tokens", "scores", "token_type", "add_space_prefix")
    metadata = {f"tokenizer.ggml.{name}": model[name] for name in names}
    fixed = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}
    return gguf_tokenizer(metadata | fixed | {f"tokenizer.ggml.{name}": value for name, value in changes.items()})


@pytest.fixture(scope="module")
def built():
    return [build(model) for model in MODELS]


@pytest.mark.parametrize(
    "number", range(len(MODELS)), ids=lambda number: f"prefix={MODELS[number]['add_space_prefix']}"
)
def test_ids_and_text(built, number):
    for case in MODELS[number]["strings"]:
        assert built[number].encode(case["text"], add_special_tokens=False) == case["ids"], case["text"]
        assert built[number].decode(case["ids"]) == case["decoded"]


def test_the_goldens_hold_merges_byte_fallback_and_both_kinds_of_blank():
    assert {model["add_space_prefix"] for model in MODELS} == {True, False}
    for model in MODELS:
        used = {index for case in model["strings"] for index in case["ids"]}
        assert any(model["token_type"][index] == 6 for index in used)
        assert any(len(model["tokens"][index]) > 3 and model["token_type"][index] == 1 for index in used)


def test_a_beginning_token_is_added_unless_told_not_to(built):
    assert built[0].encode("a")[0] == 1 and built[0].encode("a", add_special_tokens=False)[0] != 1
    assert build(MODELS[0], add_bos_token=False).encode("a")[0] != 1
    assert build(MODELS[0], add_eos_token=True).encode("a")[-1] == 2


def test_special_tokens_in_the_text_are_recognised(built):
    ids = built[1].encode("a</s>a", add_special_tokens=False)
    assert ids[1] == 2 and ids[0] == ids[2] and built[1].decode(ids) == "aa"


def test_scores_are_needed():
    with pytest.raises(ValueError, match="needs a score for each of its 420 tokens"):
        build(MODELS[0], scores=[0.0])
