"""Acceptance: outlines of trees, learning by depth, temperature and request, calibration, score maps."""

import itertools

import numpy as np
import pytest

from specjax.costmodel.acceptance import Acceptance
from specjax.costmodel.priors import PRIORS, SIBLING, Prior, outline
from specjax.draft import DraftShape

CHAIN = DraftShape.chain("mtp", 3)
PRIOR = Prior((0.6, 0.5, 0.5))


def rounds(acceptance, shape, rate, batch, count, seed=0, rows=None):
    """Verified rounds of whole chains whose drafts are each accepted with `rate`."""
    rng = np.random.default_rng(seed)
    rows = np.arange(batch) if rows is None else rows
    for _ in range(count):
        accepted = (rng.random((len(rows), shape.depth)) < rate).cumprod(axis=1).sum(axis=1)
        acceptance.age()
        acceptance.observe(shape, rows, np.full(len(rows), shape.rows - 1), accepted)


def rates(acceptance, batch, curve=0):
    """Of one curve, `[request, depth]`."""
    return acceptance.rates(np.arange(batch))[:, curve].T


def test_outline_of_a_chain():
    made = outline(CHAIN, PRIOR)
    assert made.parents.tolist() == [-1, 0, 1]
    assert made.depths.tolist() == [1, 2, 3]
    np.testing.assert_allclose(made.shares, 1)
    np.testing.assert_allclose(made.levels, [0.6, 0.5, 0.5])


def test_outline_of_a_tree_takes_the_likeliest_nodes():
    """Against all trees: every node of branching 3 and depth 2, its chance worked out, the best ones taken."""
    shape = DraftShape("eagle3", 2, 3, 7)
    ranks = [0.6, 0.4 * SIBLING, 0.4 * (1 - SIBLING) * SIBLING]
    deep = [0.5, 0.5 * SIBLING, 0.5 * (1 - SIBLING) * SIBLING]
    every = sorted(ranks + [a * b for a, b in itertools.product(ranks, deep)], reverse=True)[:6]
    made = outline(shape, PRIOR)
    mass = np.cumprod(made.levels)
    np.testing.assert_allclose(made.shares * mass[made.depths - 1], every)
    assert mass.sum() == pytest.approx(sum(every))
    assert all(parent < node for node, parent in enumerate(made.parents))
    assert (made.depths[made.parents[made.depths == 2]] == 1).all()


def test_a_depth_that_the_likeliest_nodes_do_not_reach_has_the_chains_acceptance():
    """With poor chances the five nodes are the root's four children and one below: depths 3 to 5 get none."""
    prior = Prior((0.3, 0.28, 0.26, 0.24, 0.22))
    shape = DraftShape("eagle3", depth=5, branching=4, rows=6)
    made = outline(shape, prior)
    assert made.depths.max() == 2
    np.testing.assert_allclose(made.levels[2:], [0.26, 0.24, 0.22])
    estimate = Acceptance([shape], 1, PRIORS | {"eagle3": prior})
    estimate.observe(shape, np.array([0]), np.array([5]), np.array([3]))
    assert np.isfinite(estimate.rates(np.array([0]))).all()


@pytest.mark.parametrize("kind", PRIORS)
def test_trees_gain_over_chains_and_priors_have_sources(kind):
    tree, chain = (outline(DraftShape(kind, 4, b, r), PRIORS[kind]) for b, r in ((3, 16), (1, 5)))
    assert np.cumprod(tree.levels).sum() > np.cumprod(chain.levels).sum()
    assert PRIORS[kind].source


def test_unseen_drafters_have_their_prior():
    acceptance = Acceptance([CHAIN], 2, {"mtp": PRIOR})
    acceptance.start(1, 1.0)
    cold, hot = rates(acceptance, 2)
    np.testing.assert_allclose(cold, [0.6, 0.5, 0.5])
    np.testing.assert_allclose(hot / (1 - hot), cold / (1 - cold) * 0.8)


def test_rates_are_learned_by_depth():
    acceptance = Acceptance([CHAIN], 32, {"mtp": PRIOR})
    rng = np.random.default_rng(0)
    truth = np.array([0.9, 0.8, 0.2])
    for _ in range(50):
        accepted = (rng.random((32, 3)) < truth).cumprod(axis=1).sum(axis=1)
        acceptance.age()
        acceptance.observe(CHAIN, np.arange(32), np.full(32, 3), accepted)
    np.testing.assert_allclose(rates(acceptance, 32).mean(axis=0), truth, atol=0.04)
    assert acceptance.calibration_error()["mtp"] < 0.05


def test_temperatures_are_learned_apart():
    acceptance = Acceptance([CHAIN], 32, {"mtp": PRIOR})
    rows = np.arange(32)
    for row in rows[16:]:
        acceptance.start(row, 1.0)
    for seed in range(40):
        rounds(acceptance, CHAIN, 0.9, 32, 1, seed, rows[:16])
        rounds(acceptance, CHAIN, 0.3, 32, 1, 100 + seed, rows[16:])
    found = rates(acceptance, 32)
    np.testing.assert_allclose(found[:16].mean(axis=0)[:2], 0.9, atol=0.06)
    np.testing.assert_allclose(found[16:].mean(axis=0)[:1], 0.3, atol=0.06)


def test_what_a_chain_teaches_moves_the_trees_of_the_same_drafter():
    tree = DraftShape("mtp", 3, 4, 8)
    acceptance = Acceptance([CHAIN, tree], 8, {"mtp": PRIOR})
    before = rates(acceptance, 8, acceptance.curve[tree]).mean()
    rounds(acceptance, CHAIN, 0.95, 8, 20)
    assert rates(acceptance, 8, acceptance.curve[tree]).mean() > before + 0.1


def test_requests_that_differ_are_told_apart_and_those_alike_are_not():
    def spread(truth):
        acceptance = Acceptance([CHAIN], 16, {"mtp": PRIOR})
        rng = np.random.default_rng(0)
        for _ in range(60):
            accepted = (rng.random((16, 3)) < truth[:, None]).cumprod(axis=1).sum(axis=1)
            acceptance.age()
            acceptance.observe(CHAIN, np.arange(16), np.full(16, 3), accepted)
        return rates(acceptance, 16)[:, 0]

    apart = spread(np.repeat([0.2, 0.9], 8))
    assert apart[:8].mean() < 0.3
    assert apart[8:].mean() > 0.7
    alike = spread(np.full(16, 0.55))
    assert alike.std() < 0.05


def test_a_new_request_starts_from_the_batch():
    acceptance = Acceptance([CHAIN], 2, {"mtp": PRIOR})
    for seed in range(30):
        rounds(acceptance, CHAIN, 0.95, 2, 1, seed, np.array([0]))
        rounds(acceptance, CHAIN, 0.2, 2, 1, seed, np.array([1]))
    bad = rates(acceptance, 2)[1, 0]
    acceptance.start(1, 0.0)
    assert rates(acceptance, 2)[1, 0] > bad + 0.1


@pytest.mark.parametrize("batch", [4, 256])
def test_old_traffic_is_forgotten(batch):
    acceptance = Acceptance([CHAIN], batch, {"mtp": PRIOR})
    rounds(acceptance, CHAIN, 0.9, batch, 200)
    rounds(acceptance, CHAIN, 0.3, batch, 20 if batch == 256 else 300, seed=1)
    assert rates(acceptance, batch)[:, 0].mean() == pytest.approx(0.3, abs=0.1)


def test_a_cut_tree_teaches_the_same_as_a_whole_one():
    """Requests that verify 3 of 7 nodes; accepted as the tree's own outline says."""
    shape = DraftShape("eagle3", 3, 4, 8)
    made = outline(shape, PRIOR)
    children = {(p, r): n for n, (p, r) in enumerate(zip(made.parents.tolist(), made.ranks.tolist(), strict=True))}
    rng = np.random.default_rng(0)
    chain = [0.66, 0.57, 0.57]  # better than the prior

    def accepted(cut: int) -> int:
        node, depth = -1, 0
        while depth < 3:
            rank, first = 0, chain[depth]
            if rng.random() >= first:
                rank = 1
                while rng.random() >= SIBLING and rank < 5:
                    rank += 1
            child = children.get((node, rank), 99)
            if child >= cut:
                break
            node, depth = child, depth + 1
        return depth

    found = []
    for cut in (3, 7):
        acceptance = Acceptance([shape], 64, {"eagle3": PRIOR})
        for _ in range(60):
            acceptance.age()
            acceptance.observe(shape, np.arange(64), np.full(64, cut), np.array([accepted(cut) for _ in range(64)]))
        levels = np.cumprod(rates(acceptance, 64).mean(axis=0))
        chances = levels[made.depths - 1] * made.shares
        found.append(chances[:3].sum())
    # What 3 nodes gain is told alike by both (the outline's shares are the prior's, so not to the last digit).
    truth = 0.66 + 0.66 * 0.57 + 0.66 * 0.57**2
    assert found[0] == pytest.approx(truth, abs=0.05)
    assert found[1] == pytest.approx(truth, abs=0.1)


def test_rounds_without_a_proposal_teach_how_often_there_is_one():
    shape = DraftShape.chain("ngram", 3)
    acceptance = Acceptance([shape], 4)
    before = rates(acceptance, 4)
    for _ in range(40):
        acceptance.observe(shape, np.arange(4), np.array([0, 0, 0, 3]), np.array([0, 0, 0, 3]))
    live = acceptance.live(np.arange(4))[0]
    assert live[:3].max() < 0.15
    assert live[3] > 0.8
    assert (rates(acceptance, 4) > before).all()


def test_what_is_kept_between_questions_is_forgotten_when_it_changes():
    """Rates that were asked for before are those of an estimate that was never asked."""
    asked, fresh = Acceptance([CHAIN], 3, {"mtp": PRIOR}), Acceptance([CHAIN], 3, {"mtp": PRIOR})
    rows, some = np.arange(3), np.array([0, 2])

    def ask():
        for which in (rows, some):
            whole = asked.rates(which)
            assert (asked.rates(which, curve=0) == whole[:, :1]).all()
            assert (asked.rates(which, optimism=1.0) > whole).all()

    for step in (
        lambda one: one.observe(CHAIN, rows, np.full(3, 3), np.array([3, 0, 1])),
        lambda one: one.age(),
        lambda one: one.start(2, 1.0),
        lambda one: one.observe(CHAIN, some, np.full(2, 3), np.array([0, 2])),
    ):
        ask()
        for one in (asked, fresh):
            step(one)
        assert (asked.rates(rows) == fresh.rates(rows)).all()
        fresh._asked = fresh._rates = None
