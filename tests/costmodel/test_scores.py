"""The map from a drafter's chances to what is accepted: it learns, keeps its order, and knows temperatures apart."""

import numpy as np
import pytest

from specjax.costmodel.scores import Nodes, ScoreMap

ONE = np.array([1])


def chain(*chances):
    """One chain of nodes with these chances."""
    scores = np.concatenate([[0.0], np.cumsum(np.log(chances))])
    return Nodes(scores[None], np.arange(-1, len(chances))[None])


def teach(scores, said, truth, times, *, heat=0, seed=0):
    """Drafts of one node, announced with `said`, that are accepted with `truth`."""
    hits = np.random.default_rng(seed).random(times) < truth
    for hit in hits:
        path = np.array([[True, hit]])
        scores.observe("ngram", np.array([heat]), chain(said), np.array([2]), path)


def test_at_first_the_drafter_is_believed():
    chances = ScoreMap(["ngram"], 3).chances("ngram", np.array([0]), chain(0.5, 0.5, 0.9), np.array([3]))
    assert chances[0].tolist() == pytest.approx([0.5, 0.25, 0.225], rel=0.05)


def test_siblings_share_their_parents_path():
    tree = Nodes(np.log([[1, 0.6, 0.3, 0.3]]), np.array([[-1, 0, 0, 1]]))
    assert tree.chances[0].tolist() == pytest.approx([0.6, 0.3, 0.5])
    assert tree.along(np.array([[0.5, 0.4, 0.9]]))[0].tolist() == pytest.approx([0.5, 0.4, 0.4])  # never rises


@pytest.mark.parametrize("truth", [0.1, 0.9])
def test_what_came_of_a_score_decides_in_the_end(truth):
    scores = ScoreMap(["ngram"], 3)
    teach(scores, 0.5, truth, 400)
    learned = scores.chances("ngram", np.array([0]), chain(0.5), ONE)[0, 0]
    assert learned == pytest.approx(truth, abs=0.07)
    # Another temperature has its own map.
    assert scores.chances("ngram", np.array([2]), chain(0.5), ONE)[0, 0] == pytest.approx(0.5, abs=0.05)


def test_a_better_score_is_never_a_worse_chance():
    scores = ScoreMap(["ngram"], 1)
    teach(scores, 0.3, 0.8, 200)
    teach(scores, 0.7, 0.2, 200)
    made = [scores.chances("ngram", np.array([0]), chain(said), ONE)[0, 0] for said in np.linspace(0.02, 0.98, 60)]
    assert (np.diff(made) > -1e-3).all()
    assert made[20] < 0.75  # the two are pooled
    assert made[40] > 0.3


def test_doubt_takes_off_what_is_not_known():
    scores = ScoreMap(["ngram"], 1)
    before = scores.chances("ngram", np.array([0]), chain(0.5), ONE, doubt=1.0)[0, 0]
    teach(scores, 0.5, 0.5, 300)
    after = scores.chances("ngram", np.array([0]), chain(0.5), ONE, doubt=1.0)[0, 0]
    assert before < 0.4 < after < 0.52


def test_only_nodes_below_an_accepted_one_are_judged():
    scores = ScoreMap(["ngram"], 1)
    # The first node misses, so of the second (and of the padding behind it) nothing is learned.
    scores.observe("ngram", np.array([0]), chain(0.2, 0.8, 0.8), np.array([3]), np.array([[True, False, False, False]]))
    ((said, _, trials),) = scores.table("ngram")
    assert (said, trials) == (pytest.approx(0.2, abs=0.01), 1.0)


def test_old_observations_fade():
    scores = ScoreMap(["ngram"], 1)
    teach(scores, 0.5, 1.0, 100)
    for _ in range(2000):
        scores.age(1 - 1 / 400)
    assert scores.chances("ngram", np.array([0]), chain(0.5), ONE)[0, 0] == pytest.approx(0.5, abs=0.05)


def test_chains_are_reckoned_as_trees_are():
    """Without looking up parents: what a tree of the same nodes has, to the last bit."""
    rng = np.random.default_rng(0)
    scores, parents = -np.cumsum(rng.random((4, 6)), axis=1), np.tile(np.arange(-1, 5), (4, 1))
    plain = Nodes(scores, parents)
    # A fifth draft that is no chain makes a tree of all.
    other = Nodes(np.vstack([scores, scores[:1]]), np.vstack([parents, [[-1, 0, 0, 1, 1, 2]]]))
    assert (plain.chains, other.chains) == (True, False)
    assert (plain.chances == other.chances[:4]).all()
    chances = rng.random((5, 5))
    assert (plain.along(chances[:4]) == other.along(chances)[:4]).all()


@pytest.mark.parametrize("doubt", [0.0, 0.7])
@pytest.mark.parametrize("parents", [[-1, 0, 1, 2, 3, 4], [-1, 0, 0, 1, 1, 3]])
@pytest.mark.parametrize("drafts", [0, 1, 3, 5])
def test_one_request_is_reckoned_as_any_batch(doubt, parents, drafts):
    """Node by node: what two alike have, through the arithmetic for many; sure nodes and hopeless ones as well."""
    rng, scores = np.random.default_rng(drafts), ScoreMap(["ngram"], 1)
    teach(scores, 0.3, 0.8, 40)
    teach(scores, 0.7, 0.2, 40)
    said = np.array([0.0, 0.0, -12.0, *np.log(rng.random(3))]) * rng.permutation([1.0, 1, 1, 1, 1, 0])
    paths = np.zeros(6)
    for node in range(1, 6):
        paths[node] = paths[parents[node]] + said[node]
    one = Nodes(paths[None].astype(np.float32), np.array([parents]))
    two = Nodes(np.vstack([one.scores] * 2), np.vstack([one.parents] * 2))
    alone = scores.chances("ngram", np.array([0]), one, np.array([drafts]), doubt=doubt)
    both = scores.chances("ngram", np.array([0, 0]), two, np.array([drafts, drafts]), doubt=doubt)
    assert alone.shape == (1, 5)
    assert alone[0].tolist() == pytest.approx(both[1].tolist(), rel=1e-5)
    assert np.count_nonzero(alone) == drafts
