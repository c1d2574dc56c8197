"""Serving on paper: the simulator itself, and what the planner must reach in it.

The whole sweep, every device with every target from 1 to 512 requests, is `benchmarks/planner_sweep.py`.
"""

import numpy as np
import pytest

from specjax.costmodel import menu, published, tables
from specjax.costmodel.acceptance import Acceptance
from specjax.costmodel.facts import devices
from specjax.costmodel.plan import plan
from specjax.costmodel.planner import Planner
from specjax.costmodel.priors import PRIORS, Prior, outline
from specjax.costmodel.shapes import TARGETS
from specjax.costmodel.simulate import Load, Text, _uniform, compare, hidden_truth, simulate
from specjax.draft import PLAIN, DraftShape

KINDS = ("ngram", "eagle3", "dspark")


def shipped(device: str, target: str = "llama-3.1-8b") -> tables.Table:
    return tables.load(tables.shipped(device, target))


def test_every_token_is_served_whatever_the_policy():
    load = Load(4, 20, length=40)
    table, chain = shipped("h100"), DraftShape.chain("mtp", 3)
    plain, drafted = (simulate(load, shape, table) for shape in (PLAIN, chain))
    assert sum(plain.tokens) == sum(drafted.tokens)
    assert len(drafted.seconds) < len(plain.seconds)
    assert simulate(load, chain, table).seconds == drafted.seconds
    assert max(plain.live) == 4


@pytest.mark.parametrize("shape", [DraftShape.chain("mtp", 3), DraftShape("eagle3", 5, 4, 16)])
def test_tokens_a_round_are_those_of_the_prior(shape):
    run = simulate(Load(64, 200, length=4000), shape, shipped("h100"), rounds=150)
    expected = 1 + np.cumprod(outline(shape, PRIORS[shape.kind]).levels).sum()
    assert sum(run.tokens) / sum(run.live) == pytest.approx(expected, rel=0.02)


def test_lookup_proposes_as_often_as_its_text_says():
    shape = DraftShape.chain("ngram", 5)
    text = Text({"ngram": Prior((0.9,), 0.5)})
    run = simulate(Load(64, 200, length=4000, texts=(text,)), shape, shipped("h100"), rounds=150)
    assert sum(run.tokens) / sum(run.live) == pytest.approx(1 + 0.5 * sum(0.9**k for k in range(1, 6)), rel=0.03)


def test_rounds_cost_what_the_table_says():
    table, chain = shipped("h100"), DraftShape.chain("mtp", 3)
    run = simulate(Load(1, 1, length=1, prompt=1, seed=3), chain, table)
    assert run.tokens == [1]
    assert run.seconds == [table.round_time(chain, 1, 4, _prompt(3))]


def _prompt(seed: int) -> int:
    return max(int(-np.log1p(-_uniform(seed, np.array([0]), 2)[0])), 1)


def test_arrivals_leave_rows_free():
    table = shipped("h100")
    slow = simulate(Load(16, 60, length=30, rate=2.0), PLAIN, table)
    assert slow.idle > 0
    assert np.mean(slow.live) < 4
    busy = simulate(Load(16, 60, length=30, rate=1e6), PLAIN, table)
    assert np.mean(busy.live) > 8
    assert busy.idle == pytest.approx(0, abs=1e-3)


def score(load: Load, table: tables.Table, rounds: int, kinds=KINDS) -> tuple[float, float]:
    """The planner's rate over the best fixed shape's, and over plain's."""
    fixed, run, _ = compare(load, table, kinds, rounds=rounds)
    return run.rate / max(r.rate for r in fixed.values()), run.rate / fixed[PLAIN].rate


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(devices())), ids=list(devices()))
def test_never_below_the_best_fixed_shape(number):
    """Every shipped device, each with one of the targets, from 1 to 512 requests; the texts do as the priors say, so
    the best fixed shapes are those of the plan, and only they have to be run.
    """
    device, target = list(devices())[number], list(TARGETS)[number % len(TARGETS)]
    table, shapes = shipped(device, target), menu.shapes(KINDS)
    for requests, rounds in ((1, 1000), (32, 800), (512, 400)):
        load, counts = Load(requests, requests * 40, length=200), menu.widths(requests, 32)
        best = [o.shape for o in plan(table, shapes, requests, 600).outlooks[:2]]
        fixed = {s: simulate(load, s, table, counts=counts, rounds=rounds).rate for s in (PLAIN, *best)}
        rate = simulate(load, Planner(table, shapes, counts, requests), table, rounds=rounds).rate
        assert rate >= 0.97 * max(fixed.values()), requests
        assert rate >= 0.97 * fixed[PLAIN], requests


def test_a_busy_device_and_a_free_one():
    of_best, of_plain = score(Load(1, 20, length=200), shipped("h100"), 400)
    assert of_best >= 0.95  # a short run: what was tried is not earned back yet
    assert of_plain > 2
    of_best, of_plain = score(Load(256, 3000, length=200), shipped("tpu-v5e"), 300, ("eagle3",))
    assert of_best >= 0.97
    assert of_plain >= 0.97


def test_better_than_any_fixed_shape_where_the_load_varies():
    """Bursts of 128 requests, which drain to one: no one shape is best for both."""
    load = Load(128, 384, length=100, rate=20.0, burst=128, seed=1)
    of_best, of_plain = score(load, shipped("tpu-v5e"), 500)
    assert of_best > 1.05
    assert of_plain > 1.3


def published_run(requests: int, rounds: int):
    table, priors = published.table(), published.priors()
    counts = menu.widths(requests, 8)
    load = Load(requests, requests * 40, length=400, prompt=1024, texts=(Text(priors),))
    fixed = {s: simulate(load, s, table, counts=counts, rounds=rounds).rate for s in (PLAIN, *published.SHAPES)}
    planner = Planner(
        table, published.SHAPES, counts, requests, acceptance=Acceptance(published.SHAPES, requests, priors)
    )
    return fixed, simulate(load, planner, table, rounds=rounds).rate


def test_published_cells_are_what_the_table_says():
    fixed, _ = published_run(512, 60)
    assert fixed[PLAIN] == pytest.approx(21200, rel=0.01)
    assert fixed[published.SHAPES[0]] == pytest.approx(14200, rel=0.02)
    assert fixed[published.SHAPES[1]] == pytest.approx(16600, rel=0.02)


def test_on_published_cells_fixed_shapes_cross_below_plain_and_the_planner_never_does():
    crossed = set()
    for requests, rounds in ((1, 500), (16, 300), (64, 200), (128, 150), (256, 150), (512, 150)):
        fixed, rate = published_run(requests, rounds)
        assert rate >= 0.97 * max(fixed.values())
        assert rate >= 0.98 * fixed[PLAIN]
        crossed |= {shape.kind for shape in published.SHAPES if fixed[shape] < fixed[PLAIN]}
        if requests == 1:
            assert rate > 2.5 * fixed[PLAIN]
            assert not crossed
    assert crossed == {"dspark", "dflash"}


def against_hidden_truth(requests: int, seed: int, worse: float) -> tuple[float, float]:
    """After 200 rounds, the planner's rate over the best fixed shape's in hindsight; and the worst of its tokens so
    far over plain's, from the 50th round on, everything from the start counted.
    """
    table, shapes = shipped("h100"), menu.shapes(KINDS)
    counts, clock = menu.widths(requests, 32), hidden_truth(table, seed)
    text = Text(drift=requests * 100, worse=worse)
    load = Load(requests, requests * 16, length=200, texts=(text,), seed=seed)

    def late(run):
        return sum(run.tokens[200:]) / sum(run.seconds[200:])

    fixed = {s: simulate(load, s, clock, counts=counts, rounds=400) for s in shapes}
    run = simulate(load, Planner(table, shapes, counts, requests), clock, rounds=400, noise=0.02)
    summed = np.cumsum(run.tokens) / np.cumsum(run.seconds)
    return late(run) / max(late(r) for r in fixed.values()), summed[49:].min() / fixed[PLAIN].rate


@pytest.mark.parametrize(("requests", "seed", "worse"), [(16, 4, 1.0), (32, 1, 1.0)])
def test_against_a_hidden_truth(requests, seed, worse):
    """Costs off by up to 30 %, acceptance that drifts."""
    of_best, of_plain = against_hidden_truth(requests, seed, worse)
    assert of_best >= 0.95
    assert of_plain >= 0.95


@pytest.mark.slow
def test_against_many_hidden_truths():
    """Passes next to each other may differ by a factor of 1.9 here: what never looked promising is sometimes missed."""
    found = [against_hidden_truth(16 * 2 ** (seed % 4), seed, (4.0, 1.0, 0.4)[seed % 3]) for seed in range(12)]
    of_best, of_plain = np.array(found).T
    assert of_plain.min() >= 0.95
    assert np.median(of_best) >= 0.97
    assert (of_best >= 0.95).sum() >= 10
    assert of_best.min() >= 0.9


def test_where_nothing_is_worth_drafting_the_planner_costs_next_to_nothing():
    poor = {kind: Prior((0.02,), 0.5) for kind in KINDS}
    load = Load(16, 200, length=400, texts=(Text(poor),))
    table = shipped("tpu-v5e")
    plain = simulate(load, PLAIN, table, rounds=1000)
    planner = Planner(table, menu.shapes(KINDS), menu.widths(16, 32), 16)
    run = simulate(load, planner, table, rounds=1000)
    assert run.rate >= 0.97 * plain.rate
    late = sum(run.tokens[200:]) / sum(run.seconds[200:])
    assert late >= 0.985 * sum(plain.tokens[200:]) / sum(plain.seconds[200:])
