"""MTP modules of the target families against numpy, and in the engine."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import blocks, heads, laws, toy
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

# What each family's wiring is, and for each choice in it the other one: every choice must show (traps 3, 4, 5, 7).
FAMILIES = {
    "deepseek, glm": (
        {"rope_interleaved": True, "rotary_dims": 4},
        {"hidden_first": True, "feedback_normed": False, "rope_interleaved": False, "blank_start": True},
    ),
    "qwen3-next": (
        {"norm_offset": True, "qk_norm": True, "attention_gate": True, "rotary_dims": 4},
        {
            "norm_offset": False,
            "rotary_dims": None,
            "feedback_normed": False,
            "attention_gate": False,
            "qk_norm": False,
        },
    ),
    "mimo": (
        {"hidden_first": True, "attention_bias": True, "blank_start": True},
        {"hidden_first": False, "attention_bias": False, "blank_start": False},
    ),
    "before the norms": (
        {"hidden_normed": False, "feedback_normed": False, "windows": (5,)},
        {"hidden_normed": True, "feedback_normed": True, "windows": (None,)},
    ),
}


def weights_with_a_norm():
    """The tiny target, the weight of its final norm no longer all ones."""
    model, weights = toy.tiny()
    factor = 0.5 + np.random.default_rng(7).random(WIDTH).astype(np.float32)
    return model, weights | {"norm": {"weight": jnp.asarray(factor)}}


def softmax(logits):
    mass = np.exp(logits - logits.max())
    return mass / mass.sum()


def q_of_chain(reference, tokens, hidden, drafted):
    """The q at the root and at the drafts, all but the last."""
    newest = committed_rows(reference, tokens, hidden)
    out, found = newest, [softmax(reference.logits(newest))]
    for step, token in enumerate(drafted[:-1]):
        out = reference.add(int(token), reference.feedback(out), len(tokens) - 1 + step)
        found.append(softmax(reference.logits(out)))
    return np.stack(found)


@pytest.mark.parametrize("name", FAMILIES)
def test_forward_equals_numpy(name):
    """After a prefill in chunks, and after a round that was accepted in part; the module is applied three times."""
    changes, others = FAMILIES[name]
    config = head_config("mtp", **changes)
    tensors = random_tensors(config, seed=2)
    model, weights = weights_with_a_norm()
    drafter, params = learned.build(config, tensors, model, weights, jnp.float32, sampled=True)
    assert drafter.shape == DraftShape.chain("mtp", 3) and drafter.wants_hidden and drafter.taps == ()
    reference = Reference(config, tensors, weights["embedding"], weights["head"]["weight"], weights["norm"]["weight"])
    rng = np.random.default_rng(0)
    tokens, hidden = rng.integers(0, VOCAB, (2, 24)), rng.standard_normal((2, 24, WIDTH)).astype(np.float32)
    prompts, accepted = [9, 6], [3, 1]

    def both_rounds(params):
        state = prefilled(drafter, params, tokens, prompts, hidden, chunk=4)
        now = context(tokens, [10, 7], hidden, [1, 1], hidden=True)
        first, state = drafter.draft(params, state, now, drafter.shape)
        after = context(tokens, [10 + accepted[0], 7 + accepted[1]], hidden, accepted, hidden=True)
        return first, drafter.draft(params, state, after, drafter.shape)[0]

    for draft, lengths in zip(jax.jit(both_rounds)(params), ([10, 7], [13, 8]), strict=True):
        for b, length in enumerate(lengths):
            drafted = np.asarray(draft.tokens)[b, 1:]
            want = q_of_chain(reference.copy(), tokens[b, :length], hidden[b], drafted)
            np.testing.assert_allclose(np.asarray(draft.q)[b, :3], want, atol=2e-5)
            for field, value in others.items():
                wrong = reference.copy()
                wrong.c = dataclasses.replace(config, **{field: value})
                there = q_of_chain(wrong, tokens[b, :length], hidden[b], drafted)
                assert np.abs(there - want).max() > 1e-3, field


def test_hidden_states_before_the_norm_are_the_targets_residual():
    """Undoing the norm's weight gives what the module makes of the raw residual (trap 3): its norm drops the scale."""
    config = head_config("mtp", hidden_normed=False)
    tensors = random_tensors(config)
    model, weights = weights_with_a_norm()
    drafter, params = learned.build(config, tensors, model, weights, jnp.float32)
    residual = 3 * np.random.default_rng(1).standard_normal((1, 1, WIDTH)).astype(np.float32)
    factor = np.asarray(weights["norm"]["weight"])
    normed = residual / np.sqrt((residual**2).mean(-1, keepdims=True) + 1e-5) * factor
    now = context(np.zeros((1, 8)), [3], np.repeat(normed, 8, axis=1), [1], hidden=True)
    embedded = jnp.zeros((1, 4, WIDTH))
    got = drafter.inputs(params, embedded, drafter.condition(params, now.features))[1][0, 0]
    want = drafter.inputs(params, embedded[:, :1], jnp.asarray(residual))[1][0, 0]
    np.testing.assert_allclose(got, want, atol=1e-4)
    gone = weights | {"norm": {"weight": weights["norm"]["weight"].at[3].set(0)}}
    with pytest.raises(ValueError, match="whose weight has zeros"):
        learned.build(config, tensors, model, gone, jnp.float32)


def test_another_width_than_the_targets_is_refused():
    config = head_config("mtp", hidden_size=16, own_embedding=True, own_head=True)
    with pytest.raises(ValueError, match="it has 16, the target 32"):
        learned.build(config, random_tensors(config), *toy.tiny(), jnp.float32)


def small(dtype=jnp.float32, **options):
    """A random module on the small target: `(drafter, params, target)`."""
    model, weights = laws.small_target(dtype)
    config = head_config("mtp", vocab_size=laws.SMALL_VOCAB, draft_vocab_size=laws.SMALL_VOCAB)
    drafter, params = learned.build(config, random_tensors(config), model, weights, dtype, **options)
    return drafter, params, (model, weights)


def test_greedy_text_and_trees():
    laws.check_greedy(*small(depth=3, branching=2))


def test_greedy_text_and_chains():
    """Drafts are those that numpy makes of the right hidden states: row i, after the target's final norm."""
    drafter, params, target = small()
    config, tensors = drafter.config, random_tensors(drafter.config)
    right = heads.expected_chain(config, tensors, target, 3)
    laws.check_greedy(drafter, params, target, right)
    late = heads.expected_chain(config, tensors, target, 3, shift=1)
    text = laws.PROMPTS[2]
    assert any(right(text[:n]) != late(text[:n]) for n in range(4, 10))


@pytest.mark.parametrize(("rule", "branching"), [("block", 1), ("recursive", 2)])
def test_sampled_drafts_follow_the_target(rule, branching):
    """The law of a request's texts, with drafts drawn from the module at the request's temperature and top-k."""
    target = blocks.feature_target(laws.VOCAB)
    config = head_config("mtp", vocab_size=laws.VOCAB, draft_vocab_size=laws.VOCAB, own_head=True)
    drafter, params = learned.build(
        config, random_tensors(config), *target, jnp.float32, depth=laws.DEPTH, branching=branching, sampled=True
    )
    laws.check_sampled(drafter, params, target, rule)
