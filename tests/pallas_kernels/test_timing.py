"""The search for the fastest choice, by a clock that is made up; and that what is timed is the kernel, interpreted."""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.pallas_kernels import timing
from specjax.pallas_kernels.decode_step import bench as step_bench
from specjax.pallas_kernels.decode_step.cut import Cut
from specjax.pallas_kernels.decode_step.tiles import ProductSizes, ProductTiles, StepSizes, StepTiles
from specjax.pallas_kernels.decode_step.weights import Plan
from specjax.pallas_kernels.tree_attention import bench as attention_bench
from specjax.pallas_kernels.tree_attention import reference
from specjax.pallas_kernels.tree_attention.tiles import MosaicTiles, Sizes, TpuTiles, TritonTiles
from specjax.pallas_kernels.tuning import Tiles


@dataclasses.dataclass(frozen=True)
class Pair(Tiles):
    """Two numbers; `sizes` is the largest sum."""

    kernel: ClassVar[str] = "toy/pair"
    a: int
    b: int

    @classmethod
    def rule(cls, sizes):
        return cls(4, 4)

    @classmethod
    def options(cls, sizes):
        return {"a": (1, 2, 4, 8), "b": (1, 2, 4, 8)}

    def problem(self, sizes):
        return None if self.a + self.b <= sizes else "too much"


class Clock:
    """Seconds by a formula, times whatever the order of the runs brings; a run is its tiles."""

    def __init__(self, cost, drift=lambda number: 1.0):
        self.cost, self.drift, self.seen = cost, drift, []

    def __call__(self, run, times):
        self.seen.append((run(times), times))
        return times * self.cost(run(times)) * self.drift(len(self.seen))


def make(tiles):
    return lambda times: tiles


def search(cost, sizes=100, made=make, **options):
    clock = Clock(cost, **options)
    return timing.search(Pair, sizes, made, clock), clock


def test_it_climbs_to_the_best_one_field_at_a_time():
    found, _ = search(lambda t: 1e-3 * (t.a + 1 / t.b))
    assert found.tiles == Pair(1, 8)
    assert found.seconds == pytest.approx(1.125e-3)
    assert found.rule_seconds == pytest.approx(4.25e-3)
    assert not found.refused


def test_another_choice_must_be_faster_by_the_margin():
    def cost(faster):
        return lambda t: 1e-3 * (1 - faster * (t.a == 8))

    assert search(cost(timing.MARGIN / 2))[0].tiles == Pair(4, 4)
    assert search(cost(timing.MARGIN * 2))[0].tiles == Pair(8, 4)


def test_candidates_take_turns_so_that_drift_favours_none():
    """A device that gets slower with every run: measured one after another, the first would win by far."""
    found, clock = search(lambda t: 1e-3, drift=lambda number: 1 + number / 50)
    assert found.tiles == Pair(4, 4)
    sampled = [tiles for tiles, times in clock.seen if times > 1]
    firsts = sampled[:: len(set(sampled))][: timing.TURNS]
    assert len(set(firsts)) > 2


def test_a_sample_is_long_enough_whatever_a_run_takes():
    _, clock = search(lambda t: 1e-5)
    assert {times for _, times in clock.seen} == {1, round(timing.SAMPLE / 1e-5)}
    _, clock = search(lambda t: 1.0)
    assert {times for _, times in clock.seen} == {1}


def test_what_does_not_compile_is_passed_over_and_what_is_not_allowed_never_tried():
    def made(tiles):
        if tiles.b == 8:
            raise RuntimeError("out of registers")
        return make(tiles)

    seen = []
    clock = Clock(lambda t: 1e-3 / t.b)
    found = timing.search(Pair, 11, made, clock, seen.append)
    assert found.tiles == Pair(4, 4)
    assert found.refused == {}  # 4 + 8 is more than 11
    found = timing.search(Pair, 12, made, clock, seen.append)
    assert found.refused == {Pair(4, 8): "RuntimeError: out of registers"}
    assert seen[-1] == found.tried + 1


def test_a_rule_that_does_not_run_is_replaced_and_where_nothing_runs_that_is_said():
    def made(tiles):
        if tiles == Pair(4, 4):
            raise NotImplementedError("55 MiB of VMEM")
        return make(tiles)

    found, _ = search(lambda t: 1e-3 * t.a * t.b, made=made)
    assert (found.tiles, found.rule_seconds) == (Pair(1, 1), None)

    def nothing(tiles):
        raise NotImplementedError("55 MiB of VMEM")

    with pytest.raises(RuntimeError, match="toy/pair does not run: NotImplementedError: 55 MiB of VMEM"):
        search(lambda t: 1.0, made=nothing)


# ---------------------------------------------------------------- what is timed


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Two layers' worth of keys and of weights."""
    monkeypatch.setattr(attention_bench, "COLD_BYTES", 2**20)
    monkeypatch.setattr(step_bench, "COLD_BYTES", 1)


SIZES = Sizes(2, 3, 4, 2, 32, 3, 64, 4, jnp.dtype("float32"), 100)


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        (TritonTiles, SIZES),
        (TpuTiles, dataclasses.replace(SIZES, page=256, columns=1)),
        (MosaicTiles, dataclasses.replace(SIZES, dtype=jnp.dtype("bfloat16"), capability=90)),
    ],
)
def test_what_is_timed_is_attention_over_and_over(kind, sizes):
    q, k, v, seen, k_pages, v_pages, tables, fills = attention_bench._arrays(sizes)
    assert len(tables) > 1
    want = q
    for i in range(2):
        position = fills[i][:, None] + jnp.arange(sizes.width)
        options = {"scale": sizes.dim**-0.5, "window": sizes.window}
        pages = [x[tables[i].reshape(-1)] for x in (k_pages, v_pages)]
        table = None if sizes.columns == 1 else jnp.arange(tables[i].size).reshape(tables[i].shape)
        want = reference.attend(want, k, v, seen, *pages, table, fills[i], position, **options)
    got = timing.bench(kind, sizes, interpret=True)(kind.rule(sizes))(2)
    tolerance = 2e-5 if sizes.dtype == jnp.float32 else 2e-2
    np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(want, np.float32), atol=tolerance)


PLAN = Plan.of(
    dtype="float32", layers=5, hidden=128, intermediate=128, heads=2, groups=1, dim=32, eps=1e-5, qk_norm=False
)


@pytest.mark.parametrize("matrix", ["qkv", "out", "gate_up", "down"])
def test_products_are_timed_over_several_layers(matrix):
    sizes = ProductSizes(PLAN, matrix, 3, True)
    made = timing.bench(ProductTiles, sizes, interpret=True)
    rule, narrow = ProductTiles.rule(sizes), ProductTiles(piece=16, inputs=16, warps=4, stages=2)
    once, twice, other = (np.asarray(made(tiles)(n)) for tiles, n in ((rule, 1), (rule, 2), (narrow, 2)))
    assert np.isfinite(twice).all()
    assert (once != twice).any()
    np.testing.assert_allclose(other, twice, rtol=1e-4, atol=1e-4)


def test_steps_are_timed_and_the_same_whatever_the_tiles():
    attention = Sizes(1, 8, 2, 1, 32, 8, 256, 1, jnp.dtype("float32"))
    sizes = StepSizes(PLAN, attention)
    made = timing.bench(StepTiles, sizes, interpret=True)
    rule = StepTiles.rule(sizes)
    want, got = (np.asarray(made(tiles)(2)) for tiles in (rule, dataclasses.replace(rule, banks=3, ahead=0)))
    assert np.isfinite(want).all()
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_cuts_are_timed_by_a_step_of_their_own(monkeypatch):
    monkeypatch.setattr(step_bench, "CUT_SLOTS", 256)
    seen = []
    real = step_bench.tpu.decode_step

    def decode_step(plan, *args, **options):
        seen.append((plan.rows, plan.columns))
        return real(plan, *args, **options)

    monkeypatch.setattr(step_bench.tpu, "decode_step", decode_step)
    made = timing.bench(Cut, PLAN.sizes, interpret=True)
    assert np.isfinite(np.asarray(made(Cut(128, 128))(1))).all()
    assert seen == [(128, 128)]


def test_time_is_that_until_the_device_is_done(monkeypatch):
    waited = []
    monkeypatch.setattr(jax, "block_until_ready", waited.append)
    assert timing.wall(functools.partial(pow, 2), 3) >= 0
    assert waited == [8]
