"""The n-gram drafter against a naive loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.draft import DraftShape
from specjax.drafters.base import Context
from specjax.drafters.ngram import NGram


def reference(text, low, high, depth, eos=()):
    """Longest n first, of its occurrences the latest; cut before an end token."""
    text = list(text)
    for n in range(min(high, len(text) - 1), low - 1, -1):
        for end in range(len(text) - 1, n - 1, -1):  # an occurrence is text[end - n : end], and text[end] follows it
            if text[end - n : end] == text[-n:]:
                copied = text[end : end + depth]
                return copied[: next((i for i, token in enumerate(copied) if token in eos), depth)]
    return []


def context(texts, eos=(), capacity=40, poison=None, active=None):
    """A batch of `texts`; past their lengths lies `poison(text, size)`, by default the text again and again."""
    poison = poison or (lambda text, size: np.resize(text, size))
    tokens = [np.concatenate([t, poison(np.asarray(t), capacity - len(t))]) for t in texts]
    ends = [*eos, *[-1] * (4 - len(eos))]
    return Context(
        tokens=jnp.asarray(np.stack(tokens), jnp.int32),
        lengths=jnp.asarray([len(t) for t in texts], jnp.int32),
        prompt_lengths=jnp.asarray([(len(t) + 1) // 2 for t in texts], jnp.int32),
        active=jnp.asarray([True] * len(texts) if active is None else active),
        eos=jnp.asarray([ends] * len(texts), jnp.int32),
        sampling=None,  # read by sampled drafts only
    )


def proposals(draft):
    """The proposed tokens of each request, root left out."""
    tokens, lengths = np.asarray(draft.tokens), np.asarray(draft.lengths)
    return [row[1:n].tolist() for row, n in zip(tokens, lengths, strict=True)]


def drafted(drafter, ctx, depth=None):
    shape = drafter.shape if depth is None else DraftShape.chain("ngram", depth)
    return _draft(drafter, shape, ctx)


@jax.jit(static_argnums=(0, 1))
def _draft(drafter, shape, ctx):
    return drafter.draft((), (), ctx, shape)[0]


def ngram(low, high, depth):
    return NGram(prompt_lookup_min=low, prompt_lookup_max=high, num_speculative_tokens=depth)


REPEATED = [1, 2, 3, 9, 1, 2, 3, 7, 5, 1, 2, 3]


@pytest.mark.parametrize(
    ("text", "config", "expected"),
    [
        (REPEATED, (2, 3, 2), [7, 5]),
        (REPEATED, (2, 3, 6), [7, 5, 1, 2, 3]),  # stops at the end of the context
        ([5, 6, 7], (1, 3, 4), []),
        ([1, 2, 8, 2], (2, 3, 2), []),
        ([1, 2, 8, 2], (1, 3, 2), [8, 2]),
        ([4, 4, 4], (1, 3, 4), [4]),
        ([4], (1, 3, 4), []),
        ([4, 4], (1, 1, 4), [4]),
        ([1, 2, 9, 8, 2, 7, 1, 2], (1, 2, 1), [9]),  # two tokens before one, though one was seen later
    ],
)
def test_proposals(text, config, expected):
    draft = drafted(ngram(*config), context([text]))
    assert proposals(draft) == [expected]
    assert draft.tokens.shape == (1, config[2] + 1)
    assert draft.tokens[0, 0] == text[-1]
    assert draft.q is None


def test_cut_before_any_end_token():
    texts = [[1, 2, 99, 5, 1, 2], [1, 2, 5, 98, 6, 1, 2], [1, 2, 5, 6, 7, 1, 2]]
    assert proposals(drafted(ngram(1, 3, 3), context(texts, eos=(99, 98)))) == [[], [5], [5, 6, 7]]


def test_without_end_tokens_nothing_is_cut():
    assert proposals(drafted(ngram(1, 3, 4), context([[1, 2, 0, 5, 1, 2]]))) == [[0, 5, 1, 2]]


@pytest.mark.parametrize("config", [(1, 3, 4), (2, 5, 5), (1, 1, 1), (3, 3, 9), (2, 40, 5)])
def test_equals_a_naive_loop(config):
    rng = np.random.default_rng(0)
    poisons = [None, lambda text, size: np.full(size, text[-1])]
    found = 0
    for alphabet, eos in ((2, ()), (3, (0,)), (6, (2, 4))):
        texts = [rng.integers(0, alphabet, rng.integers(1, 33)).tolist() for _ in range(64)]
        expected = [reference(t, *config, eos) for t in texts]
        found += sum(bool(e) for e in expected)
        for poison in poisons:
            assert proposals(drafted(ngram(*config), context(texts, eos, poison=poison))) == expected
    assert 10 < found < 190


def test_a_shallower_shape_is_a_prefix():
    assert proposals(drafted(ngram(2, 3, 5), context([REPEATED]), depth=2)) == [[7, 5]]


def test_inactive_and_empty_rows_propose_nothing():
    ctx = context([REPEATED, REPEATED, REPEATED], active=[True, False, True])
    ctx = type(ctx)(**{**vars(ctx), "lengths": jnp.array([12, 12, 0], jnp.int32)})
    assert proposals(drafted(ngram(2, 3, 2), ctx)) == [[7, 5], [], []]


def test_a_buffer_filled_to_the_brim():
    assert proposals(drafted(ngram(2, 3, 6), context([REPEATED], capacity=len(REPEATED)))) == [[7, 5, 1, 2, 3]]


def test_a_row_equals_its_solo_run():
    rng = np.random.default_rng(1)
    texts = [rng.integers(0, 3, n).tolist() for n in (1, 7, 20, 33)]
    drafter = ngram(1, 4, 5)
    together = drafted(drafter, context(texts))
    for row, text in enumerate(texts):
        alone = drafted(drafter, context([text]))
        np.testing.assert_array_equal(alone.tokens[0], together.tokens[row])
        assert alone.lengths[0] == together.lengths[row]


def test_one_program_for_all_lengths():
    drafter = ngram(2, 3, 4)
    step = jax.jit(lambda c: drafter.draft((), (), c, drafter.shape)[0])
    results = {tuple(proposals(step(context([REPEATED[:n]])))[0]) for n in range(1, 13)}
    assert len(results) > 1
    assert step._cache_size() == 1


def test_is_static_and_stateless():
    assert hash(ngram(2, 3, 4)) == hash(ngram(2, 3, 4))
    assert ngram(2, 3, 4) == ngram(2, 3, 4)
    assert ngram(2, 3, 4).shape == DraftShape.chain("ngram", 4)
    assert ngram(2, 3, 4).init_state(2, 64) == ()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt_lookup_min": 4, "prompt_lookup_max": 3}, "prompt_lookup_min is 4 but prompt_lookup_max is 3"),
        ({"prompt_lookup_min": 0}, "prompt_lookup_min must be an integer of at least 1, got 0"),
        ({"prompt_lookup_max": 0}, "prompt_lookup_max must be"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens must be"),
        ({"num_speculative_tokens": 2.5}, "num_speculative_tokens must be"),
        ({"num_speculative_tokens": True}, "num_speculative_tokens must be"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        NGram(**options)


@pytest.mark.parametrize(
    "shape", [DraftShape.chain("ngram", 6), DraftShape(), DraftShape(kind="ngram", depth=2, branching=2, rows=5)]
)
def test_shapes_it_cannot_fill_are_refused(shape):
    drafter = NGram(num_speculative_tokens=5)
    with pytest.raises(ValueError, match="drafts chains of 1 to num_speculative_tokens = 5"):
        drafter.draft((), (), context([REPEATED]), shape)


def test_scores_grow_with_the_match():
    """Odds of (n + d / 2) ** 2 / 4 for the draft after d others, behind a match of n tokens; summed along the path."""
    texts = [[1, 2, 9, 8, 7, 6, 1, 2], [1, 2, 3, 4, 9, 8, 7, 1, 2, 3, 4]]
    scores = np.asarray(drafted(ngram(2, 5, 3), context(texts)).scores)
    for row, matched in enumerate((2, 4)):
        odds = (matched + np.arange(3) / 2) ** 2 / 4
        np.testing.assert_allclose(scores[row], np.cumsum([0, *np.log(odds / (1 + odds))]), rtol=1e-5)


def test_scores_are_finite_where_nothing_matches():
    assert np.isfinite(np.asarray(drafted(ngram(2, 5, 3), context([[1, 2, 3, 4]])).scores)).all()
