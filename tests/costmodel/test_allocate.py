"""Sharing verify rows out over a batch: against every way to share them."""

import itertools

import numpy as np
import pytest

from specjax.costmodel import allocate


def chances(requests, nodes, seed):
    return np.cumprod(np.random.default_rng(seed).random((requests, nodes)), axis=1)


@pytest.mark.parametrize("seed", range(5))
def test_no_other_sharing_gains_more(seed):
    given = chances(3, 4, seed)
    sums = np.concatenate([np.zeros((3, 1)), np.cumsum(given, axis=1)], axis=1)
    for rows in range(3, 16):
        best = max(
            3 + sum(sums[r, d] for r, d in enumerate(depths))
            for depths in itertools.product(range(5), repeat=3)
            if sum(depths) <= rows - 3
        )
        assert allocate.expected(given, [rows])[0] == pytest.approx(best)
        budgets = allocate.budgets(given, rows)
        assert budgets.sum() <= rows
        assert 3 + sum(sums[r, b - 1] for r, b in enumerate(budgets)) == pytest.approx(best)


@pytest.mark.parametrize("requests", [1, 4])
@pytest.mark.parametrize("seed", range(5))
def test_the_going_rate_and_the_ratio_choose_alike(seed, requests):
    """Dinkelbach: at the optimal rate the surplus is greatest, and zero, at the optimum of the ratio."""
    given, rows = chances(requests, 6, seed), requests * np.array([1, 2, 4, 7])
    seconds = 1 + rows * np.random.default_rng(seed).uniform(0.01, 0.1)
    rates = allocate.expected(given, rows) / seconds
    index, tokens, budgets = allocate.cut(given, rows, seconds, rates.max())
    assert index == rates.argmax()
    assert tokens - rates.max() * seconds[index] == pytest.approx(0)
    assert budgets.tolist() == allocate.budgets(given, int(rows[index])).tolist()


@pytest.mark.parametrize("rate", [0.0, 0.4, 0.9, 2.0, 9.0])
@pytest.mark.parametrize("seed", range(5))
def test_one_request_is_cut_as_any_batch(seed, rate):
    """In a plain loop: the same pass as by sorting, with nodes behind that have no chance, and passes too wide."""
    given, rows = chances(1, 6, seed), np.array([1, 2, 4, 7, 14])
    given[0, 4:] = 0.0
    seconds = 0.5 + np.array([0.5, 0.6, 0.7, 0.75, 3.0])
    index, tokens, budgets = allocate.cut(given, rows, seconds, rate)
    surplus = allocate.expected(given, rows) - rate * seconds
    assert index == surplus.argmax()
    assert tokens == pytest.approx(allocate.expected(given, rows)[index])
    assert budgets.tolist() == allocate.budgets(given, int(rows[index])).tolist()


def test_nodes_without_a_chance_get_no_row():
    given = np.array([[0.5, 0.2, 0.0], [0.0, 0.0, 0.0]])
    assert allocate.budgets(given, 8).tolist() == [3, 1]
    assert allocate.budgets(given, 3).tolist() == [2, 1]
    assert allocate.budgets(np.zeros((2, 0)), 8).tolist() == [1, 1]


def test_equal_chances_keep_trees_whole():
    given = np.full((2, 3), 0.5)  # each child as likely as its parent
    assert sorted(allocate.budgets(given, 4).tolist()) in ([1, 3], [2, 2])


@pytest.mark.parametrize("seed", range(20))
def test_of_equals_the_first_are_taken(seed):
    """Chances that often agree: as a stable sort of all nodes shares them out, and no node goes before its parent."""
    rng = np.random.default_rng(seed)
    given = np.minimum.accumulate(rng.choice([0.0, 0.25, 0.5, 0.75], (5, 6), p=[0.1, 0.3, 0.3, 0.3]), axis=1)
    for rows in range(5, 40):
        order = np.argsort(-given, axis=None, kind="stable")[: rows - 5]
        order = order[given.ravel()[order] > 0]
        assert allocate.budgets(given, rows).tolist() == (1 + np.bincount(order // 6, minlength=5)).tolist()
