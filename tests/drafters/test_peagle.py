"""P-EAGLE: several tokens in one pass, against numpy and in the engine."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import blocks, laws, toy
from support.heads import (
    VOCAB,
    WIDTH,
    Reference,
    committed_rows,
    context,
    head_config,
    prefilled,
    random_tensors,
)

from specjax.draft import DraftShape
from specjax.drafters import learned

DEPTHS, MASK = 4, 5
TARGET = {"num_layers": 4, "windows": (None,) * 4}


def peagle_config(**changes):
    """Two layers that predict 4 tokens at once."""
    return head_config("peagle", **({"num_layers": 2, "depths": DEPTHS, "mask_token_id": MASK} | changes))


def logits_of_pass(reference, tokens, taps, mask: int):
    """Logits of the newest committed row and of the mask rows behind it."""
    out = [committed_rows(reference, tokens, taps)]
    unknown = reference.condition(reference.t["mask_hidden"])
    for step in range(DEPTHS - 1):
        out.append(reference.add(mask, unknown, len(tokens) - 1 + step))
    return np.stack([reference.logits(x) for x in out])


VARIANTS = {
    "plain": ({}, {"mask_token_id": 9, "num_layers": 1}),
    "normed": (
        {"fc_norm": True, "norm_before_residual": True, "windows": (4, None), "own_embedding": True},
        {"fc_norm": False, "norm_before_residual": False, "windows": (None, None)},
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_one_pass_equals_numpy(name):
    """The q of all slots, after a prefill in chunks and after a round that was accepted in part."""
    changes, others = VARIANTS[name]
    config = peagle_config(**changes)
    tensors = random_tensors(config, seed=3)
    model, weights = toy.tiny(**TARGET)
    drafter, params = learned.build(config, tensors, model, weights, jnp.float32, sampled=True)
    assert drafter.shape == DraftShape.chain("peagle", DEPTHS)
    reference = Reference(config, tensors, weights["embedding"], weights["head"]["weight"])
    rng = np.random.default_rng(0)
    tokens, taps = rng.integers(0, VOCAB, (2, 24)), rng.standard_normal((2, 24, 3 * WIDTH)).astype(np.float32)

    def both_rounds(params):
        state = prefilled(drafter, params, tokens, [9, 6], taps, chunk=4)
        first, state = drafter.draft(params, state, context(tokens, [10, 7], taps, [1, 1], rows=5), drafter.shape)
        now = context(tokens, [13, 8], taps, [3, 1], rows=5)
        return first, drafter.draft(params, state, now, drafter.shape)[0]

    for draft, lengths in zip(jax.jit(both_rounds)(params), ([10, 7], [13, 8]), strict=True):
        for b, length in enumerate(lengths):
            want = logits_of_pass(reference.copy(), tokens[b, :length], taps[b], MASK)
            got = np.asarray(draft.q)[b]
            np.testing.assert_allclose(got[:DEPTHS], np.asarray(jax.nn.softmax(want)), atol=2e-5)
            assert not got[DEPTHS].any()
            assert (got[np.arange(DEPTHS), np.asarray(draft.tokens)[b, 1:]] > 0).all()
            for field, value in others.items():
                wrong = reference.copy()
                wrong.c = dataclasses.replace(config, **{field: value})
                mask = value if field == "mask_token_id" else MASK
                there = logits_of_pass(wrong, tokens[b, :length], taps[b], mask)
                assert np.abs(there - want).max() > 1e-2, field


def test_fewer_drafts_are_the_first_of_more():
    """A menu's shorter chains; and a draft ends before an end token."""
    config = peagle_config()
    model, weights = toy.tiny(**TARGET)
    drafter, params = learned.build(config, random_tensors(config), model, weights, jnp.float32)
    rng = np.random.default_rng(1)
    tokens, taps = rng.integers(0, VOCAB, (1, 24)), rng.standard_normal((1, 24, 3 * WIDTH)).astype(np.float32)
    state = prefilled(drafter, params, tokens, [9], taps, chunk=16)
    run = jax.jit(drafter.draft, static_argnums=3)
    drafts = {
        depth: np.asarray(
            run(params, state, context(tokens, [10], taps, [1]), DraftShape.chain("peagle", depth))[0].tokens
        )[0]
        for depth in (1, 2, 4)
    }
    for depth, drafted in drafts.items():
        np.testing.assert_array_equal(drafted, drafts[4][: depth + 1])
    end = int(drafts[4][2])
    cut, _ = run(params, state, context(tokens, [10], taps, [1], eos=[end]), drafter.shape)
    assert int(cut.lengths[0]) == 1 + drafts[4][1:].tolist().index(end)


def small(dtype=jnp.float32, **options):
    """A random module on the small target: `(drafter, params, target)`."""
    model, weights = laws.small_target(dtype)
    config = peagle_config(taps=(0, 1), vocab_size=laws.SMALL_VOCAB, draft_vocab_size=laws.SMALL_VOCAB)
    drafter, params = learned.build(config, random_tensors(config), model, weights, dtype, **options)
    return drafter, params, (model, weights)


def test_greedy_text_and_drafts():
    laws.check_greedy(*small())


def test_bfloat16():
    laws.check_bfloat16(*small(jnp.bfloat16))


def test_sampled_drafts_follow_the_target():
    model, weights = blocks.feature_target(laws.VOCAB)
    config = peagle_config(
        taps=(0, 1), vocab_size=laws.VOCAB, draft_vocab_size=laws.VOCAB, own_head=True, mask_token_id=0, num_layers=1
    )
    tensors = random_tensors(config)
    drafter, params = learned.build(
        config, tensors, model, weights, jnp.float32, sampled=True, num_speculative_tokens=laws.DEPTH
    )
    laws.check_sampled(drafter, params, (model, weights), "block")


def test_a_head_is_not_asked_for_more_than_it_learned():
    config = peagle_config()
    tensors, parts = random_tensors(config), toy.tiny(**TARGET)
    with pytest.raises(ValueError, match="predict 4 tokens at once, 5 are asked for"):
        learned.build(config, tensors, *parts, jnp.float32, num_speculative_tokens=5)
    with pytest.raises(ValueError, match="mask token among the embedding's 64 rows, got 64"):
        learned.build(dataclasses.replace(config, mask_token_id=64), tensors, *parts, jnp.float32)
