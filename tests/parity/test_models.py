"""Every decoder family against transformers: logits, and the greedy continuation through the engine."""

import dataclasses
import functools
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from tokenizers import models

from specjax.config import NgramConfig, RunConfig
from specjax.draft import Rows
from specjax.engine.engine import Engine
from specjax.sampling import SamplingParams
from specjax.targets import decoder
from specjax.weights.safetensors import read_config, read_tensors
from specjax.weights.tokenizer import Tokenizer

FOLDER = Path(__file__).parent / "goldens" / "models"
NAMES = sorted(path.name for path in FOLDER.iterdir())
THROUGH_THE_ENGINE = ("llama-gqa", "mistral-window", "qwen2-window", "qwen3-biases")
SLOTS, TILE = 256, 4

pytestmark = pytest.mark.parity


@functools.cache
def golden(name: str) -> dict[str, np.ndarray]:
    with np.load(FOLDER / name / "golden.npz") as arrays:
        return dict(arrays)


@functools.cache
def loaded(name: str):
    """`(target, params)`; dynamic rope is fixed for the whole text, as in the golden's continuation."""
    config = read_config(FOLDER / name)
    if config.rope.kind == "dynamic":
        whole = len(golden(name)["prompt"]) + len(golden(name)["tokens"])
        config = dataclasses.replace(config, max_position_embeddings=whole)
    return decoder.from_tensors(config, read_tensors(FOLDER / name, config))


def chain_rows(tokens, start) -> Rows:
    """Consecutive tokens of the only request, from position `start` on."""
    size = tokens.shape[0]
    index = jnp.arange(size, dtype=jnp.int32)
    return Rows(
        tokens=tokens,
        request=jnp.zeros((size,), jnp.int32),
        node=index,
        positions=start + index,
        slots=start + index,
        valid=jnp.ones((size,), bool),
        ancestors=None,
        starts=jnp.array([0, size], jnp.int32),
        width=size,
    )


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_continuation(name):
    """One pass over the prompt, then the golden's tokens four at a time on the cache that grew.

    If the argmax after every golden token is the next one, greedy decoding gives the golden's tokens. Their gaps are at
    least 0.005, far above the tolerance, so there is no near tie to excuse anything.
    """
    target, params = loaded(name)
    want = golden(name)

    @jax.jit
    def step(params, cache, tokens, start):
        out = target.forward(params, chain_rows(tokens, start), cache, start[None])
        return target.logits(params, out.hidden), out.cache

    text = np.concatenate([want["prompt"], want["tokens"]])
    size = len(want["prompt"])
    logits, cache = step(params, target.init_cache(1, SLOTS, jnp.float32), want["prompt"], np.int32(0))
    reference = want.get("logits_full_length", want["logits"])
    assert np.abs(np.asarray(logits) - reference).max() < 1e-4
    choices = [int(np.argmax(logits[-1]))]
    for start in range(size, len(text), TILE):
        logits, cache = step(params, cache, text[start : start + TILE], np.int32(start))
        choices += np.argmax(logits, axis=-1).tolist()
    assert want["gaps"].min() > 1e-3
    assert choices[: len(want["tokens"])] == want["tokens"].tolist()


@pytest.fixture
def folder(name, tmp_path):
    """A golden's folder with a tokenizer beside the weights, as a user would have it."""
    shutil.copytree(FOLDER / name, tmp_path / name)
    vocab = read_config(FOLDER / name).vocab_size
    backend = tokenizers.Tokenizer(models.WordLevel({f"t{i}": i for i in range(vocab)}, unk_token="t0"))
    Tokenizer(backend=backend).save(tmp_path / name)
    return tmp_path / name


@pytest.mark.slow
@pytest.mark.parametrize("name", THROUGH_THE_ENGINE)
def test_through_the_engine(name, folder):
    """`Engine.load` of the folder, plain, then with n-gram drafts on the same weights: the golden's tokens."""
    want = golden(name)
    params = SamplingParams(max_tokens=len(want["tokens"]))
    config = RunConfig(target=str(folder), context=96, prefill_chunk=32, warmup=False, compilation_cache=None)
    plain = Engine.load(config, quiet=True)
    drafting = plain.with_drafter(NgramConfig(num_speculative_tokens=3, prompt_lookup_min=1))
    assert plain.generate(want["prompt"].tolist(), params).token_ids == want["tokens"].tolist()
    result = drafting.generate(want["prompt"].tolist(), params)
    assert result.token_ids == want["tokens"].tolist()
    assert result.spec.drafted > 0
    assert drafting.params["target"] is plain.params["target"]


def test_every_family_and_rope_is_there():
    configs = [read_config(FOLDER / name) for name in NAMES]
    assert {c.family for c in configs} == {"llama", "mistral", "qwen2", "qwen3"}
    assert {c.rope.kind for c in configs} >= {"default", "linear", "dynamic", "llama3", "yarn"}
    assert any(any(c.windows) for c in configs)
    assert any(c.tie_word_embeddings for c in configs)
