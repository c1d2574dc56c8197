"""SmolLM2's tokenizer against an independent BPE, and chat templates against transformers' renderer."""

import json
from pathlib import Path

import pytest

from specjax.weights.chat_template import render_chat
from specjax.weights.gguf import GGUFFile
from specjax.weights.gguf_tokenizer import gguf_tokenizer
from specjax.weights.names import resolve
from specjax.weights.tokenizer import read_tokenizer

GOLDEN = json.loads((Path(__file__).parent / "goldens" / "tokenizer.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def smollm2():
    return gguf_tokenizer(GGUFFile(resolve("smollm2-135m").path).metadata)


@pytest.mark.parametrize("case", GOLDEN["strings"], ids=lambda case: ascii(case["text"])[:24])
def test_ids_of_strings(smollm2, case):
    assert smollm2.encode(case["text"]) == case["ids"]
    assert smollm2.decode(case["ids"], skip_special_tokens=False) == case["text"]


@pytest.mark.parametrize("case", GOLDEN["chats"])
def test_chats(smollm2, case):
    given = case["messages"], case["add_generation_prompt"]
    assert smollm2.apply_chat_template(*given) == case["text"]
    assert smollm2.encode_chat(*given) == case["ids"]


@pytest.mark.parametrize("case", GOLDEN["templates"], ids=lambda case: case["name"])
def test_templates(case):
    special = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}

    def render():
        return render_chat(case["template"], case["messages"], special_tokens=special, tools=case["tools"])

    if "error" in case:
        with pytest.raises(ValueError, match=case["error"]):
            render()
    else:
        assert render() == case["text"]


def test_a_saved_tokenizer_is_the_same_to_us_and_to_transformers(smollm2, tmp_path):
    from transformers import AutoTokenizer

    smollm2.save(tmp_path)
    ours, theirs = read_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert ours.fingerprint() == smollm2.fingerprint() and ours.eos_ids == smollm2.eos_ids == (2,)
    assert (theirs.bos_token_id, theirs.eos_token_id) == (ours.bos_id, 2)
    for case in GOLDEN["strings"]:
        assert ours.encode(case["text"]) == theirs.encode(case["text"]) == case["ids"]
    for case in GOLDEN["chats"]:
        given = case["messages"]
        text = theirs.apply_chat_template(given, tokenize=False, add_generation_prompt=case["add_generation_prompt"])
        assert text == case["text"]


def test_golden_strings_tell_tokenizers_apart(smollm2):
    """The digits of SmolLM2 are split one by one and its special tokens are recognised: both show in the goldens."""
    ids = {case["text"]: case["ids"] for case in GOLDEN["strings"]}
    assert len(ids["1234567890"]) == 10
    assert ids["<|endoftext|>text<|endoftext|>"][0] == ids["<|endoftext|>text<|endoftext|>"][-1] == 0
    assert smollm2.decode(ids["<|im_start|>user\nhi<|im_end|>\n"]) == "user\nhi\n"
