"""One log-probability a returned token, whatever the rounds (case C19)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import tables, toy
from support.scripted import ScriptedRuns
from support.text import byte_level

from specjax.draft import Rows
from specjax.sampling import SamplingParams

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]
NEW, TOP = 24, 3


@functools.cache
def engine():
    """The tiny target, K = 4, batch 1, each of the 64 tokens spelled as one character."""
    tokenizer = byte_level([bytes([48 + i]) for i in range(toy.VOCAB)])
    return toy.engine(ScriptedRuns(4), script([], 0), tokenizer=tokenizer, context=64)


def script(tokens: list[int], most: int) -> dict:
    row = np.full((1, 128), -1, np.int32)
    row[0, len(PROMPT) : len(PROMPT) + len(tokens)] = tokens
    return {"script": jnp.asarray(row), "most": jnp.asarray([most], jnp.int32)}


def decode(params: SamplingParams, drafts: dict, streamed: bool = False):
    shared = engine()
    shared.params = shared.params | {"drafter": drafts}
    return list(shared.stream(PROMPT, params))[-1].result if streamed else shared.generate(PROMPT, params)


def parameters(temperature: float, **changes) -> SamplingParams:
    return SamplingParams(max_tokens=NEW, temperature=temperature, seed=11, logprobs=TOP, **changes)


@functools.cache
def plain(temperature: float):
    return decode(parameters(temperature), script([], 0))


def mixed(tokens: list[int]) -> dict:
    """Drafts of which every third is wrong."""
    return script([(token + (i % 3 == 2)) % toy.VOCAB for i, token in enumerate(tokens)], 4)


@functools.cache
def reference(tokens: tuple[int, ...]) -> np.ndarray:
    """Log-softmax after each token but the last, from one pass over the whole text, in float64."""
    target, params = toy.tiny()
    size = len(tokens)
    index = jnp.arange(size, dtype=jnp.int32)
    rows = Rows(
        tokens=jnp.asarray(tokens, jnp.int32),
        request=jnp.zeros((size,), jnp.int32),
        node=index,
        positions=index,
        slots=index,
        valid=jnp.ones((size,), bool),
        ancestors=None,
        starts=jnp.array([0, size], jnp.int32),
        width=size,
    )

    @jax.jit
    def logits(params):
        out = target.forward(params, rows, target.init_cache(1, 256, jnp.float32), jnp.zeros((1,), jnp.int32))
        return target.logits(params, out.hidden)

    raw = np.asarray(logits(params), np.float64)
    return raw - raw.max(-1, keepdims=True) - np.log(np.exp(raw - raw.max(-1, keepdims=True)).sum(-1, keepdims=True))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("streamed", [False, True])
def test_equal_to_plain(temperature, streamed):
    want = plain(temperature)
    got = decode(parameters(temperature), mixed(want.token_ids), streamed)
    assert got.token_ids == want.token_ids
    assert 0 < got.spec.accepted < got.spec.drafted
    assert [e.token for e in got.logprobs] == got.token_ids
    assert [e.rank for e in got.logprobs] == [e.rank for e in want.logprobs]
    for ours, theirs in zip(got.logprobs, want.logprobs, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-5)
        assert [t for t, _ in ours.top] == [t for t, _ in theirs.top]
        assert [x for _, x in ours.top] == pytest.approx([x for _, x in theirs.top], abs=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_raw_log_softmax(temperature):
    """Before temperature; the chosen token among the best, or behind them."""
    got = decode(parameters(temperature), mixed(plain(temperature).token_ids))
    want = reference((*PROMPT, *got.token_ids))[len(PROMPT) - 1 :]
    appended = 0
    for row, entry in zip(want, got.logprobs, strict=False):
        order = np.argsort(-row, kind="stable")
        best = [(int(t), row[t]) for t in order[:TOP]]
        if entry.token not in order[:TOP]:
            best.append((entry.token, row[entry.token]))
            appended += 1
        assert entry.logprob == pytest.approx(row[entry.token], abs=1e-5)
        assert entry.rank == 1 + list(order).index(entry.token)
        assert [t for t, _ in entry.top] == [t for t, _ in best]
        assert [x for _, x in entry.top] == pytest.approx([x for _, x in best], abs=1e-5)
        assert entry.logprob < 0
    assert len(got.logprobs) == NEW == len(want) - 1
    assert (appended > 0) == (temperature > 0)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("streamed", [False, True])
def test_trimmed_with_the_ids(temperature, streamed):
    want = plain(temperature)
    at = next(i for i in range(8, NEW - 4) if want.text.find(want.text[i : i + 2]) == i)
    params = parameters(temperature, stop=(want.text[at : at + 2],))
    got = decode(params, mixed(want.token_ids), streamed)
    assert got.token_ids == want.token_ids[: at + 2]
    assert got.text == want.text[:at]
    assert got.finish_reason == "stop"
    assert [e.token for e in got.logprobs] == got.token_ids
    assert [e.logprob for e in got.logprobs] == pytest.approx([e.logprob for e in want.logprobs[: at + 2]], abs=1e-5)


@pytest.mark.parametrize("most", [0, 4])
def test_ties_are_ranked_by_id(most):
    """Tokens 2, 5 and 9 tie: the smallest id is the argmax and comes first, in plain rounds and in drafted ones."""
    row = np.zeros(tables.VOCAB, np.float32)
    row[[2, 5, 9]] = 3.0
    row[7] = 1.0
    shared = tables.engine(np.tile(row, (tables.VOCAB, 1)), drafts=tables.scripts([[2] * 40, [5] * 40, [9] * 40], most))
    params = [
        SamplingParams(max_tokens=6, logprobs=2),
        *(SamplingParams(max_tokens=6, logprobs=2, logit_bias={token: 1.0}) for token in (5, 9)),
    ]
    for result, (chosen, rank) in zip(shared.generate([[1]] * 3, params), [(2, 1), (5, 2), (9, 3)], strict=True):
        assert result.token_ids == [chosen] * 6
        for entry in result.logprobs:
            assert (entry.token, entry.rank) == (chosen, rank)
            assert [t for t, _ in entry.top] == [2, 5] + ([9] if chosen == 9 else [])
            assert {x for _, x in entry.top} == {entry.logprob}  # the bias is not in it


def test_a_certain_token_and_an_almost_certain_one():
    """0.0 is said of a probability of 1 only; a vocabulary smaller than the list is listed whole."""
    row = np.full(tables.VOCAB, -60.0, np.float32)
    row[4] = 0.0
    result = tables.engine(np.tile(row, (tables.VOCAB, 1))).generate([1], SamplingParams(max_tokens=2, logprobs=20))
    for entry in result.logprobs:
        assert -1e-20 < entry.logprob < 0
        assert len(entry.top) == tables.VOCAB


def test_off_by_default_and_of_the_token_alone():
    shared = tables.engine()
    assert shared.generate([1], SamplingParams(max_tokens=2)).logprobs is None
    (entry,) = shared.generate([1], SamplingParams(max_tokens=1, logprobs=0)).logprobs
    assert entry.top == ((entry.token, entry.logprob),)
    with pytest.raises(ValueError, match="logprobs must be"):
        SamplingParams(logprobs=21)
