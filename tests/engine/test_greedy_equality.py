"""Speculation at temperature 0 says what plain decoding says, in the number of rounds that its drafts deserve."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import engines, toy
from support.forward import full_forward
from support.scripted import ScriptedChain

from specjax.drafters.draft_model import DraftModel
from specjax.drafters.ngram import NGram
from specjax.drafters.suffix import Suffix
from specjax.sampling import SamplingParams

PROMPT = [3, 41, 7, 22, 60, 13, 35, 2, 50]
NEW = SamplingParams(max_tokens=40)
WRONG_EVERY = {"oracle": 0, "wrong": 1, "third": 3}
SLOW = ("K=1", "K=7", "K=4 paged", "tree of 6", "K=4 batch paged", "tree of 6 batch", "tree of 17 batch paged")
SETUPS = [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in engines.SETUPS]


def prompts():
    """Three prompts of 9 tokens, so that rows of a batch differ."""
    return [PROMPT, engines.prompt(9, 1), engines.prompt(9, 3)]


def check(setup, most=7, device_rounds=None):
    """Three kinds of drafts: one request after the other, or as three rows of a batch of four."""
    drafter, options = engines.SETUPS[setup]
    texts = [engines.solo(p, NEW).token_ids for p in prompts()]
    assert all(len(set(text)) > 8 for text in texts), "the toy's text is too dull to tell anything"
    scripts = [
        engines.script(prompt, text, every)
        for prompt, text, every in zip(prompts(), texts, WRONG_EVERY.values(), strict=True)
    ]
    if options.get("batch", 1) > 1:
        results = engines.decode(engines.engine(setup, scripts, most), prompts(), NEW, device_rounds)
    else:
        results = [
            engines.decode(engines.engine(setup, [follows]), [prompt], NEW, device_rounds)[0]
            for prompt, follows in zip(prompts(), scripts, strict=True)
        ]
    for prompt, text, follows, result in zip(prompts(), texts, scripts, results, strict=True):
        assert result.token_ids == text
        assert result.finish_reason == "length"
        assert result.spec == engines.expected_stats(drafter, follows, prompt, text, most)
        assert result.spec.rounds + result.spec.accepted == len(text) - 1
        assert sum(result.spec.per_position) == pytest.approx(result.spec.acceptance_length - 1)
    return dict(zip(WRONG_EVERY, results, strict=True))


@pytest.mark.parametrize("setup", SETUPS)
def test_equal_to_plain(setup):
    check(setup)


@pytest.mark.parametrize("most", [1, 4])
def test_short_drafts_in_a_wide_program(most):
    check("K<=7 batch", most)


def test_rounds_of_a_chain_of_four():
    """39 tokens after the first: 5 a round with the oracle, 1 with wrong drafts."""
    results = check("K=4")
    assert results["oracle"].spec.rounds == 8
    assert results["oracle"].spec.acceptance_length == 1 + 31 / 8
    assert results["wrong"].spec.rounds == 39
    assert results["wrong"].spec.acceptance_length == 1
    assert results["wrong"].spec.per_position == []


@pytest.mark.parametrize("setup", ["K=4", pytest.param("tree of 6 batch paged", marks=pytest.mark.slow)])
@pytest.mark.parametrize("device_rounds", [7])
def test_rounds_on_the_device(setup, device_rounds):
    """`Engine.run` gives the ids and counters that `step` gives; 7 rounds at a time end in the middle of things."""
    check(setup, device_rounds=device_rounds)


def test_plain_decoding_counts_its_rounds():
    result = engines.solo(PROMPT, NEW)
    assert (result.spec.rounds, result.spec.drafted, result.spec.accepted) == (39, 0, 0)
    assert result.spec.per_position == []


# ---------------------------------------------------------------- bfloat16


def bfloat16_target():
    target, params = toy.tiny()
    return target, jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)


@functools.cache
def bfloat16_engine(speculative: bool):
    drafter = ScriptedChain(4) if speculative else None
    return toy.engine(drafter, np.full((1, engines.POSITIONS), -1, np.int32), bfloat16_target())


@pytest.mark.slow
def test_bfloat16_differs_only_in_near_ties():
    """A difference is allowed where plain's own two best logits lie within one bfloat16 ulp of the larger."""
    target, params = bfloat16_target()
    asked = SamplingParams(max_tokens=40, logprobs=2)
    for prompt in prompts():
        plain = bfloat16_engine(False).generate(prompt, asked)
        engine = bfloat16_engine(True)
        for every in WRONG_EVERY.values():
            follows = engines.script(prompt, plain.token_ids, every)
            engine.params = {**engine.params, "drafter": follows[None]}
            got = engine.generate(prompt, NEW).token_ids
            assert len(got) == 40
            differ = [i for i in range(40) if got[i] != plain.token_ids[i]]
            if not differ:
                continue
            first = differ[0]  # behind it the texts are two
            gap = plain.logprobs[first].top[0][1] - plain.logprobs[first].top[1][1]
            text = prompt + plain.token_ids[:first]
            largest = np.abs(full_forward(target.config, jax.device_get(params), text)[0][-1]).max()
            ulp = 2.0 ** (np.floor(np.log2(largest)) - 7)
            print(f"position {first}: gap {gap:.4f}, one ulp {ulp:.4f}")
            assert gap <= ulp, f"token {first} differs though the gap {gap} exceeds one ulp, {ulp}"


# ---------------------------------------------------------------- real drafters


REPEATING = [5, 9, 17, 30, 5, 9, 17, 30, 5, 9, 17, 30, 5, 9]


@pytest.mark.parametrize("drafter", [NGram(), Suffix()], ids=lambda d: d.kind)
def test_drafters_that_copy(drafter):
    """More requests than rows; drafts come from the texts themselves."""
    engine = engines.narrow(toy.engine(drafter, batch=2))
    asked = [REPEATING, PROMPT + PROMPT + PROMPT[:4], REPEATING[1:], [1]]
    for prompt, result in zip(asked, engines.decode(engine, asked, NEW), strict=True):
        assert result.token_ids == engines.solo(prompt, NEW).token_ids
        assert result.spec.rounds + result.spec.accepted == 39
    if drafter.kind == "suffix":
        # It has seen the answer before: the second time, whole runs of it are accepted.
        again = engines.decode(engine, [REPEATING], NEW)[0]
        assert again.token_ids == engines.solo(REPEATING, NEW).token_ids
        assert again.spec.accepted > 20


def test_draft_models():
    """The target as its own draft model is an oracle; another seed's weights guess, which costs rounds alone."""
    target, params = toy.tiny()
    engine = engines.narrow(toy.engine(DraftModel(target, 4), params, batch=2))
    asked = [*prompts(), [1], REPEATING * 2]
    for prompt, result in zip(asked, engines.decode(engine, asked, NEW), strict=True):
        assert result.token_ids == engines.solo(prompt, NEW).token_ids
        assert (result.spec.rounds, result.spec.accepted, result.spec.drafted) == (8, 31, 31)
    engine.params = {**engine.params, "drafter": toy.tiny(seed=7)[1]}
    for prompt, result in zip(asked, engines.decode(engine, asked, NEW), strict=True):
        assert result.token_ids == engines.solo(prompt, NEW).token_ids
        assert result.spec.rounds > 30
