"""The suffix drafter against suffix tries made of dicts, with exact fractions."""

import dataclasses
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.draft import DraftShape
from specjax.drafters.base import Context
from specjax.drafters.suffix import Suffix


class Node:
    """A node of a suffix trie: how often its path occurs, and where last."""

    def __init__(self):
        self.children, self.count, self.last = {}, 0, -1


def trie(texts, depth, starts=None):
    """The trie of all substrings of `texts` of at most `depth` tokens; `starts` restricts where they may start."""
    root, offset = Node(), 0
    for text in texts:
        for start in range(len(text)):
            if starts is None or offset + start in starts:
                node = root
                for token in text[start : start + depth]:
                    node = node.children.setdefault(token, Node())
                    node.count += 1
                    node.last = offset + start
        offset += len(text)
    return root


def candidates(root, text, drafter):
    """Score and draft of each match length, the longest first."""
    found = []
    for m in range(min(drafter.max_depth, len(text)), 0, -1):
        node = root
        for token in text[-m:]:
            node = node.children.get(token, Node())
        budget = math.floor(m * drafter.max_spec_factor + drafter.max_spec_offset)
        budget = min(budget, drafter.num_speculative_tokens)
        probability, score, draft = Fraction(1), Fraction(0), []
        while node.children and len(draft) < budget:
            token, child = max(node.children.items(), key=lambda item: (item[1].count, item[1].last))
            probability *= Fraction(child.count, sum(c.count for c in node.children.values()))
            if probability < drafter.min_token_prob:
                break
            score += probability
            draft.append(token)
            node = child
        found.append((score, draft))
    return found


def reference(text, past, drafter, eos=()):
    """The draft for `text` after the responses `past`: of the best scores the first; cut before an end token."""
    depth = drafter.max_depth + drafter.num_speculative_tokens
    found = candidates(trie([text], depth), text, drafter) + candidates(trie(past, depth), text, drafter)
    _, draft = max(found, key=lambda item: item[0])
    return draft[: next((i for i, token in enumerate(draft) if token in eos), len(draft))]


def context(texts, eos=(), capacity=64, poison=None):
    """A batch of `texts`; past their lengths lies `poison(text, size)`, by default the text again and again."""
    poison = poison or (lambda text, size: np.resize(text, size))
    tokens = [np.concatenate([t, poison(np.asarray(t), capacity - len(t))]) for t in texts]
    return Context(
        tokens=jnp.asarray(np.stack(tokens), jnp.int32),
        lengths=jnp.asarray([len(t) for t in texts], jnp.int32),
        prompt_lengths=jnp.asarray([(len(t) + 1) // 2 for t in texts], jnp.int32),
        active=jnp.ones((len(texts),), bool),
        eos=jnp.asarray([[*eos, *[-1] * (4 - len(eos))]] * len(texts), jnp.int32),
        sampling=None,  # read by sampled drafts only
    )


def proposals(draft):
    """The proposed tokens of each request, root left out."""
    tokens, lengths = np.asarray(draft.tokens), np.asarray(draft.lengths)
    return [row[1:n].tolist() for row, n in zip(tokens, lengths, strict=True)]


def remember(drafter, state, response, prompt=(0,)):
    """The state after a request with `prompt` and `response` has ended; junk lies behind it in its buffer."""
    tokens = np.concatenate([prompt, response, np.full(64 - len(prompt) - len(response), 77)]).astype(np.int32)
    length = np.int32(len(prompt) + len(response))
    return _finish(drafter, state, jnp.asarray(tokens), np.int32(len(prompt)), length)


@jax.jit(static_argnums=0)
def _finish(drafter, state, tokens, prompt_length, length):
    return drafter.finish(state, jnp.int32(0), tokens, prompt_length, length)


def drafted(drafter, ctx, past=()):
    state = drafter.init_state(1, 64)
    for response in past:
        state = remember(drafter, state, response)
    return _draft(drafter, state, ctx)


@jax.jit(static_argnums=0)
def _draft(drafter, state, ctx):
    return drafter.draft((), state, ctx, drafter.shape)[0]


LOCAL = Suffix(ring=0)
SMALL = Suffix(ring=16)


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        ([5, 6, 7], {}, []),
        ([4], {}, []),
        ([4, 4, 4], {}, [4]),
        ([1, 2, 3, 4, 5, 6, 9, 1, 2, 3], {}, [4, 5, 6]),  # as many as matched
        ([1, 2, 3, 4, 5, 6, 9, 1, 2, 3], {"max_spec_offset": 3}, [4, 5, 6, 9, 1]),  # at most 5
        ([1, 2, 3, 1], {"max_depth": 1, "max_spec_factor": 4}, [2, 3, 1]),  # to the end of the text
        ([1, 7, 1, 8, 1, 8, 1, 7, 1, 7, 1], {"max_depth": 1, "max_spec_factor": 4}, [7, 1, 7, 1]),  # most frequent
        ([1, 7, 1, 8, 1], {}, [8]),  # of equals the latest
        ([1, 7, 1, 8, 1, 9, 1], {}, [9]),
        ([1, 7, 1, 8, 1, 9, 1], {"min_token_prob": 0.34}, []),
        # After 2 1 came 10 or 11, after 1 alone 12 in half of all cases: equal scores, the longer match wins.
        ([2, 1, 10, 2, 1, 11, 3, 1, 12, 3, 1, 12, 2, 1], {"max_spec_factor": 0, "max_spec_offset": 1}, [11]),
        # A longer match is not always better: it wins because 10 is surer after 2 1 than 12 after 1.
        ([2, 1, 10, 3, 1, 12, 3, 1, 12, 2, 1], {"max_spec_factor": 0, "max_spec_offset": 1}, [10]),
    ],
)
def test_own_text(text, options, expected):
    draft = drafted(dataclasses.replace(LOCAL, **options), context([text]))
    assert proposals(draft) == [expected]
    assert draft.tokens.shape == (1, 6)
    assert draft.tokens[0, 0] == text[-1]
    assert draft.q is None


def test_past_responses():
    drafter = SMALL
    past = [[5, 1, 8, 9, 3], [1, 6]]
    assert proposals(drafted(drafter, context([[2, 1]]), past)) == [[6]]  # of equals the latest
    assert proposals(drafted(drafter, context([[5, 1]]), past)) == [[8, 9]]  # the longer match is worth two tokens
    assert proposals(drafted(drafter, context([[1, 7, 2, 1]]), past)) == [[7]]  # own text is surer
    assert proposals(drafted(drafter, context([[1, 7, 1]]), [[1, 6]])) == [[7]]  # of equals the own text
    assert proposals(drafted(drafter, context([[1, 7, 5, 1]]), past)) == [[8, 9]]  # a better score beats it
    assert proposals(drafted(drafter, context([[6]]), past)) == [[]]  # nothing follows the end of a response
    assert proposals(drafted(drafter, context([[3]]), past)) == [[]]  # nor does the next response
    assert proposals(drafted(drafter, context([[1]]), past)) == [[6]]
    assert proposals(drafted(drafter, context([[1]]))) == [[]]


def test_a_past_of_nothing_changes_nothing():
    text = [1, 7, 1, 8, 1]
    assert proposals(drafted(SMALL, context([text]))) == proposals(drafted(LOCAL, context([text]))) == [[8]]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_depth": 2, "num_speculative_tokens": 7, "max_spec_factor": 3.5},
        {"max_spec_factor": 0.6, "max_spec_offset": 0.5, "min_token_prob": 0.4, "num_speculative_tokens": 3},
        {"max_spec_offset": -1.0, "min_token_prob": 0.0, "max_depth": 40},
        {"num_speculative_tokens": 1, "max_depth": 1, "min_token_prob": 1.0},
    ],
)
def test_equals_suffix_tries(options):
    # The least probability of the default is changed for one that no product of shares equals, so that its rounding is
    # no matter.
    drafter = Suffix(**{"ring": 96, "min_token_prob": 0.1303, **options})
    rng = np.random.default_rng(3)
    poisons = [None, lambda text, size: np.full(size, text[-1])]
    lengths = []
    for alphabet, eos in ((2, ()), (3, (0,)), (8, (2, 4)), (8, ())):
        past = [rng.integers(0, alphabet, rng.integers(1, 24)).tolist() for _ in range(4)]
        texts = [rng.integers(0, alphabet, rng.integers(1, 49)).tolist() for _ in range(48)]
        expected = [reference(text, past, drafter, eos) for text in texts]
        for poison in poisons:
            assert proposals(drafted(drafter, context(texts, eos, poison=poison), past)) == expected
        lengths += [len(draft) for draft in expected]
    assert min(lengths) == 0
    assert max(lengths) == drafter.num_speculative_tokens


def test_beyond_its_occurrences_it_counts_the_longest_matches():
    drafter = Suffix(ring=0, occurrences=6, min_token_prob=0.1303, max_spec_factor=2.0)
    rng = np.random.default_rng(4)
    texts = [rng.integers(0, 3, 48).tolist() for _ in range(48)]
    got = proposals(drafted(drafter, context(texts)))

    def match(text, end):  # how many tokens before `end` equal the last ones of the text
        longest = min(end, drafter.max_depth)
        return next((n for n in range(longest, 0, -1) if text[end - n : end] == text[-n:]), 0)

    def limited(text):
        ends = sorted(range(1, len(text)), key=lambda end: (match(text, end), end), reverse=True)[: drafter.occurrences]
        found = []
        for m in range(drafter.max_depth, 0, -1):
            starts = {end - m for end in ends if match(text, end) >= m}
            found.append(candidates(trie([text], 64, starts), text, drafter)[-m] if starts else (0, []))
        return max(found, key=lambda item: item[0])[1]

    assert got == [limited(text) for text in texts]
    assert got != [reference(text, [], drafter) for text in texts]


def test_cut_before_any_end_token():
    for copied, expected in (([99, 5], []), ([5, 98, 6], [5]), ([5, 6, 7], [5, 6, 7])):
        text = [1, 2, 3, *copied, 1, 2, 3]
        assert proposals(drafted(LOCAL, context([text], eos=(99, 98)))) == [expected]


@pytest.mark.parametrize("ring", [2, 9, 40])
def test_the_ring_forgets_the_oldest_first(ring):
    drafter = Suffix(ring=ring)
    rng = np.random.default_rng(5)
    state, expected = drafter.init_state(1, 64), [-1] * ring
    for size in [0, 3, 1, 0, 12, 30, 2, 8, 39, 1, 5, 60]:
        response = rng.integers(0, 9, size).tolist()
        state = remember(drafter, state, response, prompt=[50, 51, 52])
        if response:  # one that does not fit loses its own beginning
            expected = (expected + response[-(ring - 1) :] + [-1])[-ring:]
        assert state.tolist() == expected


def test_the_next_request_in_a_slot_sees_the_response_only():
    # The first request's prompt has 1 2 3, its response 4 5 6.
    first = np.array([1, 2, 3, 4, 5, 6])
    for drafter, after_response in ((LOCAL, []), (SMALL, [5])):
        state = remember(drafter, drafter.init_state(1, 64), first[3:], prompt=first[:3])
        for text, expected in (([9, 1, 2], []), ([9, 2, 3], []), ([9, 8, 3, 4], after_response)):
            # The slot's buffer still holds the first request past the second's end.
            ctx = context([text], poison=lambda _, size: np.resize(first, size))
            assert proposals(_draft(drafter, state, ctx)) == [expected]


def test_inactive_and_empty_rows_propose_nothing():
    ctx = context([[1, 7, 1]] * 3)
    ctx = dataclasses.replace(ctx, active=jnp.array([True, False, True]), lengths=jnp.array([3, 3, 0], jnp.int32))
    assert proposals(drafted(SMALL, ctx, [[7, 7, 7]])) == [[7], [], []]


def test_a_row_equals_its_solo_run():
    rng = np.random.default_rng(1)
    past = [rng.integers(0, 3, 20).tolist() for _ in range(2)]
    texts = [rng.integers(0, 3, n).tolist() for n in (1, 7, 20, 33)]
    drafter = SMALL
    together = drafted(drafter, context(texts), past)
    assert len(set(together.lengths.tolist())) > 1
    for row, text in enumerate(texts):
        alone = drafted(drafter, context([text]), past)
        np.testing.assert_array_equal(alone.tokens[0], together.tokens[row])
        assert alone.lengths[0] == together.lengths[row]


def test_one_program_for_all_lengths():
    drafter = Suffix(ring=32)
    step = jax.jit(lambda state, ctx: drafter.draft((), state, ctx, drafter.shape)[0])
    end = jax.jit(drafter.finish)
    text, state, results = [1, 2, 3, 9, 1, 2, 3, 7, 5, 1, 2, 3], drafter.init_state(1, 16), set()
    for n in range(1, 13):
        ctx = context([text[:n]], capacity=64)
        results.add(tuple(proposals(step(state, ctx))[0]))
        state = end(state, jnp.int32(0), ctx.tokens[0], ctx.prompt_lengths[0], ctx.lengths[0])
    assert len(results) > 1
    assert step._cache_size() == end._cache_size() == 1


def test_is_static():
    assert Suffix(ring=8) == Suffix(ring=8)
    assert hash(Suffix(ring=8)) == hash(Suffix(ring=8))
    assert Suffix(num_speculative_tokens=3).shape == DraftShape.chain("suffix", 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_speculative_tokens": 0}, "num_speculative_tokens must be an integer of at least 1, got 0"),
        ({"max_depth": 0}, "max_depth must be"),
        ({"occurrences": 0}, "occurrences must be"),
        ({"ring": -1}, "ring must be an integer of at least 0"),
        ({"ring": 1}, "a ring of 1 holds a separator and no token"),
        ({"min_token_prob": 1.5}, r"min_token_prob must lie in \[0.0, 1.0\], got 1.5"),
        ({"min_token_prob": math.nan}, "min_token_prob must be a finite number"),
        ({"max_spec_factor": -1.0}, "max_spec_factor must lie in"),
        ({"max_spec_factor": "1"}, "max_spec_factor must be a finite number"),
        ({"max_spec_factor": 0.0}, "nothing could ever be drafted"),
        ({"max_spec_offset": -24.0}, "nothing could ever be drafted"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Suffix(**options)


@pytest.mark.parametrize(
    "shape", [DraftShape.chain("suffix", 6), DraftShape(), DraftShape(kind="suffix", depth=2, branching=2, rows=5)]
)
def test_shapes_it_cannot_fill_are_refused(shape):
    with pytest.raises(ValueError, match="drafts chains of 1 to num_speculative_tokens = 5"):
        LOCAL.draft((), LOCAL.init_state(1, 8), context([[1, 2, 1]]), shape)


def test_scores_hold_the_share_of_the_occurrences():
    """Two of three occurrences of "1 2" go on with 5, both with 6: shares 2/3 and 1, behind a match of two tokens."""
    text = [1, 2, 5, 6, 1, 2, 4, 3, 1, 2, 5, 6, 9, 1, 2]
    drafter = Suffix(num_speculative_tokens=2, max_depth=4)
    draft = drafted(drafter, context([text]))
    assert proposals(draft) == [[5, 6]]
    odds = (2 + np.arange(2) / 2) ** 2 / 4
    chances = odds / (1 + odds) * [2 / 3, 1]
    np.testing.assert_allclose(np.asarray(draft.scores)[0], np.cumsum([0, *np.log(chances)]), rtol=1e-5)
