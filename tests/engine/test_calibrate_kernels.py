"""Tuning by a clock that is made up: the shapes of an engine, tables that engines find, and an interruption."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import pytest
from support import chips, toy

from specjax import config
from specjax.drafters.ngram import NGram
from specjax.engine import calibrate_kernels, step
from specjax.engine.prefill import prefill
from specjax.pallas_kernels import dispatch, timing, tuning
from specjax.pallas_kernels import tuning_tables as tables
from specjax.pallas_kernels.decode_step.cut import Cut
from specjax.pallas_kernels.decode_step.tiles import StepSizes, StepTiles
from specjax.pallas_kernels.decode_step.weights import Plan
from specjax.pallas_kernels.tree_attention.tiles import Sizes, TpuTiles, TritonTiles
from specjax.pallas_kernels.tuning_tables import Table

BFLOAT16 = jnp.dtype("bfloat16")
SIZES = [Sizes(4, width, 32, 8, 128, width, 2048, 1, BFLOAT16) for width in (1, 8)]
SHAPES = [(TritonTiles, sizes) for sizes in SIZES]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The user's cache folder, empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tuning._missed.cache_clear()
    return tmp_path / "specjax" / "kernels"


def few_warps(run, times):
    """Two warps are best, then few splits."""
    tiles = run(times)
    return times * 1e-4 * (tiles.warps + tiles.splits / 100)


def calibrate(cache, shapes=SHAPES, clock=few_warps, report=lambda *_: None):
    said = []
    paths = calibrate_kernels.calibrate(shapes, "h100", cache / "h100" / "x.partial", report, said.append, clock)
    return paths, said


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch):
    monkeypatch.setattr(timing, "bench", lambda kind, sizes, interpret: lambda tiles: lambda times: tiles)


def test_what_is_fastest_is_written_where_programs_find_it(cache):
    paths, said = calibrate(cache)
    assert paths == [cache / "h100" / "tree_attention.json"]
    table = Table.read(paths[0])
    assert table.provenance.made_by == "specjax calibrate --kernels"
    assert not table.provenance.differences(tables.provenance("h100", "tree_attention"))
    assert [(e.source, e.where["rows"]) for e in table.entries] == [("measured", 1), ("measured", 8)]
    rule = TritonTiles.rule(SIZES[1])
    with chips.around(chips.H100):
        found = tuning.choose(TritonTiles, SIZES[1])
    assert found == dataclasses.replace(rule, warps=2, splits=1)
    assert table.entries[1].us == pytest.approx(1e2 * (2 + 1 / 100))
    assert table.entries[1].rule_us == pytest.approx(1e2 * (rule.warps + rule.splits / 100))
    assert f"{table.entries[1].rule_us} us by rule" in said[1]
    assert [path.name for path in paths[0].parent.iterdir()] == ["tree_attention.json"]


def test_entries_of_other_shapes_stay_unless_the_table_is_stale(cache):
    calibrate(cache)
    other = [(TritonTiles, dataclasses.replace(SIZES[0], dim=64))]
    (path,), _ = calibrate(cache, other)
    assert [e.where["dim"] for e in Table.read(path).entries] == [128, 128, 64]
    stale = json.loads(path.read_text())
    stale["provenance"]["code"] = "00000000"
    path.write_text(json.dumps(stale))
    calibrate(cache, other)
    assert [e.where["dim"] for e in Table.read(path).entries] == [64]


def test_an_interrupted_measurement_goes_on(cache):
    def stop(what, done, total):
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate(cache, report=stop)
    (partial,) = (cache / "h100").iterdir()
    content = json.loads(partial.read_text())
    (name,) = content["cells"]
    content["cells"][name]["us"] = 1e6  # to tell whether it is used
    partial.write_text(json.dumps(content))
    (path,), _ = calibrate(cache)
    first, second = Table.read(path).entries
    assert first.us == 1e6 > second.us
    assert not partial.exists()


def test_an_unfinished_measurement_of_another_set_up_is_refused(cache):
    (cache / "h100").mkdir(parents=True)
    (cache / "h100" / "x.partial").write_text('{"key": {}, "cells": {}}')
    with pytest.raises(ValueError, match="unfinished calibration of another set-up"):
        calibrate(cache)


def test_what_does_not_run_is_said_and_the_rest_measured(cache, monkeypatch):
    def bench(kind, sizes, interpret):
        def make(tiles):
            if sizes.width == 1:
                raise NotImplementedError("no such kernel")
            return lambda times: tiles

        return make

    monkeypatch.setattr(timing, "bench", bench)
    (path,), said = calibrate(cache)
    assert said[0] == "tree_attention/triton does not run: NotImplementedError: no such kernel"
    assert len(Table.read(path).entries) == 1
    with pytest.raises(ValueError, match="no kernel could be timed"):
        calibrate(cache, SHAPES[:1])


def test_a_step_is_timed_in_the_tiles_that_its_weights_will_have(cache):
    sizes = {"layers": 4, "hidden": 2048, "intermediate": 4096, "heads": 16, "groups": 4, "dim": 128, "eps": 1e-5}
    plan = Plan.of(dtype="bfloat16", qk_norm=False, **sizes)
    attention = Sizes(1, 16, 16, 4, 128, 16, 2048, 1, BFLOAT16)
    small = Cut.rule(plan.sizes, 2**19)

    def clock(run, times):
        return times * (1e-3 if run(times) == small else 2e-3)

    (path,), _ = calibrate(cache, [(Cut, plan.sizes), (StepTiles, StepSizes(plan, attention))], clock)
    cut, step = Table.read(path).entries
    assert cut.tiles == dataclasses.asdict(small)
    assert step.where["tile"] == 2 * small.rows * small.columns != StepSizes(plan, attention).tile_bytes


def test_the_shapes_are_those_of_an_engines_programs():
    """Of every verify size, of both prefill chunks, each once."""
    target = toy.tiny()
    options = {"kernels": "interpret", "batch": 2, "context": 64, "prefill_chunk": 64, "warmup": False}
    drafter = NGram(num_speculative_tokens=3, prompt_lookup_min=1)

    def load():
        made = toy.engine(drafter, (), target, **options)
        state, stage = made.programs.initial(), made.programs.stage
        for width in made.programs.widths:
            jax.eval_shape(functools.partial(step.verify_commit, stage, width), made.params, state, None)
        for size in made.programs.sizes:
            jax.eval_shape(functools.partial(prefill, stage, size), made.params, state, 0, 0)

    with dispatch.use("interpret"):
        found = calibrate_kernels.shapes(load)
    assert {kind for kind, _ in found} == {TpuTiles}
    assert sorted((s.batch, s.width) for _, s in found) == [(1, 32), (1, 64), (2, 1), (2, 4)]
    assert all((s.heads, s.groups, s.dim) == (4, 2, 8) for _, s in found)


def test_what_has_no_kernels_is_refused():
    with pytest.raises(ValueError, match=r"JAX runs on cpu, which has none .* where JAX sees a TPU or a GPU"):
        calibrate_kernels.refuse(config.make({}), "cpu")
    for kernels in ("reference", "interpret"):
        with pytest.raises(ValueError, match=f"kernels is '{kernels}': make it 'auto' or 'pallas'"):
            calibrate_kernels.refuse(config.make({"kernels": kernels}), "tpu")
    calibrate_kernels.refuse(config.make({"kernels": "pallas"}), "gpu")
