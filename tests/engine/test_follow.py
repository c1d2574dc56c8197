"""Drafts followed by the text: how deep they were right, and on which nodes, however the text arrives."""

import numpy as np
import pytest

from specjax.costmodel.scores import Nodes
from specjax.draft import DraftShape
from specjax.engine.follow import Followed
from specjax.engine.state import Emitted

TREE = DraftShape("eagle3", 3, 2, 6)
# Two children of the root, 4 and 5; 5 has the child 6, which has the child 7; the last node is padding.
TOKENS, PARENTS = np.array([9, 4, 5, 6, 7, 0]), np.array([-1, 0, 0, 2, 3, 0])


def followed(rows=(0,), live=5):
    count = len(rows)
    nodes = Nodes(np.zeros((count, 6)), np.tile(PARENTS, (count, 1)))
    return Followed(TREE, np.array(rows), np.full(count, live), np.tile(TOKENS, (count, 1)), nodes)


def emitted(said):
    """What a round emits: a list of tokens for each batch row."""
    counts = np.array([len(tokens) for tokens in said])
    tokens = np.zeros((len(said), max(1, counts.max())), int)
    for row, text in enumerate(said):
        tokens[row, : len(text)] = text
    return Emitted(tokens=tokens, counts=counts, finish=None, logprobs=None)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(
    ("text", "depth", "path"),
    [
        ([5, 6, 7, 1], 3, [0, 2, 3, 4]),
        ([5, 6, 1, 1], 2, [0, 2, 3]),
        ([4, 6, 7, 1], 1, [0, 1]),
        ([1, 5, 6, 7], 0, [0]),
        ([5, 7, 1, 1], 1, [0, 2]),  # a token of the draft, but a grandchild
        ([0, 5, 6, 7], 0, [0]),  # the padding's token
    ],
)
def test_a_draft_is_judged_by_its_text(text, depth, path, size):
    draft = followed()
    outcomes = []
    for start in range(0, len(text), size):
        draft.advance(emitted([text[start : start + size]]))
        outcomes.append(draft.outcome())
    (told,) = [outcome for outcome in outcomes if outcome is not None]
    assert draft.over
    assert told.path.sum(axis=1).tolist() == [1 + depth]
    assert told.drafts.tolist() == [4]
    assert np.flatnonzero(told.path[0]).tolist() == path


def test_rows_are_told_when_they_are_known():
    draft = followed(rows=(0, 2, 3))
    draft.advance(emitted([[5], [1, 1], [1], [5, 6]]))
    told = draft.outcome()
    assert told.rows.tolist() == [2]
    assert told.path.sum(axis=1).tolist() == [1]
    draft.drop(3)  # its request ended: how the text goes on is not known
    assert not draft.over
    draft.advance(emitted([[6, 7], [], [], []]))
    assert draft.outcome().rows.tolist() == [0]
    assert draft.over
    assert draft.outcome() is None


def test_nothing_proposed_is_known_at_once():
    draft = followed(live=1)
    told = draft.outcome()
    assert told.drafts.tolist() == [0]
    assert told.path.sum(axis=1).tolist() == [1]
    assert draft.over
