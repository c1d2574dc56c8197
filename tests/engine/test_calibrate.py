"""Measured tables: what is in them, that an interrupted measurement goes on, and which set-ups they serve."""

import dataclasses
import json

import numpy as np
import pytest
from support import tables, toy

from specjax import config
from specjax.cli import explain
from specjax.config import ConfigError
from specjax.draft import PLAIN, DraftShape
from specjax.drafters.drafter_set import DrafterSet
from specjax.drafters.ngram import NGram
from specjax.engine.calibrate import ASIDES, LEAST, Cells, _Bench, calibrate, table_path
from specjax.engine.pricing import find_table, provenance
from specjax.sampling import SamplingParams

LOOKUP = DraftShape.chain("ngram", 3)
DRAFTERS = DrafterSet((NGram(num_speculative_tokens=3, prompt_lookup_min=1),), (LOOKUP,), 32)
RUN = config.make({"target": "toy", "drafter": {"kind": "auto"}, "batch": 2, "context": 64, "dtype": "float32"})


@pytest.fixture(scope="module")
def engine():
    target = toy.lookup_target(tables.VOCAB)
    table = find_table(RUN, target[0].config, "float32", DRAFTERS, lambda line: None)
    return toy.engine(DRAFTERS, ((),), target, table=table, batch=2, context=64)


@pytest.fixture(scope="module")
def wanted(engine):
    return provenance(RUN, engine.target.config, "float32", DRAFTERS)


@pytest.fixture(scope="module")
def stopped(engine, wanted, tmp_path_factory):
    """A measurement that was interrupted, and what had been measured by then."""
    path = tmp_path_factory.mktemp("cells") / "table.partial"

    def stop(what, done, total):
        if done == 9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate(engine, wanted, path, stop)
    cells = json.loads(path.read_text())["cells"]
    assert 5 <= len(cells) <= 9
    return path, cells


@pytest.fixture(scope="module")
def table(engine, wanted, stopped):
    """The same measurement, gone on with; values that it had are marked to tell whether they are used."""
    path, cells = stopped
    content = json.loads(path.read_text())
    content["cells"] = {name: 1e4 if name == "verify 1 1 16" else value for name, value in cells.items()}
    path.write_text(json.dumps(content))
    seen = []
    made = calibrate(engine, wanted, path, lambda *what: seen.append(what))
    assert not path.exists()
    assert [done for _, done, _ in seen] == list(range(1, len(seen) + 1))
    assert all(done <= total for _, done, total in seen)
    assert seen[-1][1] == seen[-1][2]
    return made


def test_what_a_table_holds(table, wanted):
    live, rows, context = table.verify.axes
    assert (live[0], live[-1], rows[0], rows[-1]) == (1, 2, 1, 4)
    assert (context[0], context[-1]) == (16, 59)
    assert table.verify.seconds.min() > 10  # the cell from the file, shared among all that cannot be cheaper
    assert set(table.verify.sources.ravel()) == {"m"}
    assert list(table.draft) == [LOOKUP]
    assert table.fixed > 0
    assert table.aside_time(2) >= table.aside_time(1) >= 0
    assert table.provenance.made_by == "specjax calibrate"
    assert dataclasses.replace(table.provenance, date=None, made_by=None) == wanted


def test_rows_are_those_of_the_programs(engine, table, tmp_path, monkeypatch):
    """A pass costs what its program does: between two of them there is nothing to interpolate."""
    counts = sorted({width.count for width in engine.programs.widths if width.count >= 2})
    assert counts == [2, 4, 8]
    assert table.verify.axes[1] == tuple(count / 2 for count in counts)
    bench, ran, verify = _Bench(engine, Cells(tmp_path / "cells", {}), lambda *what: None), [], engine.programs.verify
    monkeypatch.setattr(
        engine.programs, "verify", lambda width, *given: (ran.append(width.count), verify(width, *given))[1]
    )
    for live, rows, program in ((2, 1, 2), (2, 2, 4), (2, 4, 8), (1, 2, 2), (1, 1.5, 2), (2, 1.5, 4), (1, 1, 1)):
        ran.clear()
        bench.verify(live, rows, 16)
        assert set(ran) == {program}, (live, rows)


def test_a_cheap_draft_is_not_told_by_one_of_them(engine, tmp_path, monkeypatch):
    """Passes of a second that differ by 4 ms, drafts of 1 ms and of 100 ms. What each pass makes costs nothing."""
    bench = _Bench(engine, Cells(tmp_path / "cells", {}), lambda *what: None)
    cost = {DraftShape.chain("ngram", 1): 0.001, DraftShape.chain("ngram", 2): 0.1}

    def once(live, rows, context, draft=None, kind=None, times=1):
        return 1.0 if draft is None else 1.004 + times * cost[draft]

    monkeypatch.setattr(bench, "_once", once)
    cheap, dear = (bench.draft(shape, 2, 16) for shape in cost)
    assert cheap == pytest.approx(0.001 + 0.004 / 8)
    assert dear == pytest.approx(0.104)
    assert bench.draft(LOOKUP, 2, 16) == LEAST


def test_a_table_comes_back_from_its_file_and_is_found(table, wanted, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = table_path(wanted, batch=2)
    table.write(path)
    said = []
    found = find_table(RUN, toy.tiny_config(vocab_size=tables.VOCAB), "float32", DRAFTERS, said.append)
    np.testing.assert_allclose(found.verify.seconds, table.verify.seconds, rtol=1e-3)
    assert "measured" in said[-1]
    larger = RUN.model_copy(update={"batch": 8})
    found = find_table(larger, toy.tiny_config(vocab_size=tables.VOCAB), "float32", DRAFTERS, said.append)
    assert found.source(LOOKUP) == "roofline"
    assert any("up to 2 requests" in line for line in said)


def test_a_table_that_is_asked_for_must_fit(table, tmp_path):
    path = tmp_path / "mine.json"
    table.write(path)
    asked = RUN.model_copy(update={"drafter": RUN.drafter.model_copy(update={"table": str(path)})})
    model = toy.tiny_config(vocab_size=tables.VOCAB)
    assert find_table(asked, model, "float32", DRAFTERS, lambda line: None).source(LOOKUP) == "measured"
    with pytest.raises(ConfigError, match="another set-up(.|\n)*dtype: the table has 'float32', this is 'bfl"):
        find_table(asked, model, "bfloat16", DRAFTERS, lambda line: None)
    shorter = NGram(num_speculative_tokens=2)
    other = dataclasses.replace(DRAFTERS, members=(shorter,), menu=(shorter.shape,))
    with pytest.raises(ConfigError, match="another set-up(.|\n)*drafter_digests"):
        find_table(asked, model, "float32", other, lambda line: None)
    gone = asked.model_copy(update={"drafter": asked.drafter.model_copy(update={"table": str(tmp_path / "gone")})})
    with pytest.raises(ConfigError, match="is not a latency table"):
        find_table(gone, model, "float32", DRAFTERS, lambda line: None)


def test_an_unfinished_measurement_of_another_set_up_is_refused(engine, wanted, tmp_path):
    path = tmp_path / "table.partial"
    path.write_text(json.dumps({"key": dataclasses.asdict(dataclasses.replace(wanted, jax="0.1")), "cells": {}}))
    with pytest.raises(ValueError, match="of another set-up; remove it"):
        calibrate(engine, wanted, path, lambda *what: None)
    path.write_text("{")
    with pytest.raises(ValueError, match="no unfinished calibration"):
        calibrate(engine, wanted, path, lambda *what: None)
    with pytest.raises(ValueError, match="give the engine drafter kind 'auto'"):
        calibrate(toy.engine(), wanted, path, lambda *what: None)


def test_an_engine_decodes_by_its_table(engine, table):
    """The planner itself at the helm: the text is plain decoding's, and what it learned can be read."""
    rows = np.random.default_rng(1).normal(0, 2, (tables.VOCAB, tables.VOCAB))
    engine.params = {"target": toy.lookup(tables.VOCAB, 256, rows), "drafter": ((),)}
    engine._table = table
    engine.reset()
    prompts = [[1, 2, 3, 1, 2, 3], [4, 5], [6]]
    each = [SamplingParams(max_tokens=40, temperature=t, seed=3) for t in (0, 0.9, 0)]
    plain = tables.engine(rows)
    expected = [plain.generate(prompt, p).token_ids for prompt, p in zip(prompts, each, strict=True)]
    assert [r.token_ids for r in engine.generate(prompts, each)] == expected
    said = engine.pilot.report()
    assert said["rounds"] > 10
    assert said["time_error_median"] >= 0
    assert explain.lines(said)[0].startswith(f"planner: {said['rounds']} rounds")


def test_file_names_tell_set_ups_apart(wanted, tmp_path):
    weights = dataclasses.replace(wanted, drafter_digests={"ngram": "00000000"})
    kind = dataclasses.replace(wanted, drafter_digests={"suffix": wanted.drafter_digests["ngram"]})
    paths = {table_path(wanted, 1, tmp_path), table_path(wanted, 2, tmp_path)}
    assert len(paths | {table_path(other, 1, tmp_path) for other in (weights, kind)}) == 4


def test_what_a_ride_costs_the_host_is_measured_on_rounds_that_take_one(engine, table, tmp_path, monkeypatch):
    """Real rounds with a draft beside against real rounds without, of one request and of all."""
    bench = _Bench(engine, Cells(tmp_path / "cells", {}), lambda *_: None)
    rides = []

    def beyond(planner, live, context):
        decision = planner.decide(np.arange(live), context)
        rides.append((live, decision.ride))
        assert (decision.shape, decision.shadow) == (PLAIN, LOOKUP if decision.ride else None)
        return 0.010 * live if decision.ride else 0.002

    monkeypatch.setattr(bench, "_beyond", beyond)
    grid = table.draft[LOOKUP]
    free, dear = (
        dataclasses.replace(
            table, aside=(0.0, 0.0), draft={LOOKUP: dataclasses.replace(grid, seconds=np.full_like(grid.seconds, each))}
        )
        for each in (1e-9, 1e6)
    )
    first, further = bench.aside(2, 16, free)
    assert sorted(rides) == ASIDES * [(1, False)] + ASIDES * [(1, True)] + ASIDES * [(2, False)] + ASIDES * [(2, True)]
    assert (first, further) == pytest.approx((0.008, 0.010))
    bench = _Bench(engine, Cells(tmp_path / "others", {}), lambda *_: None)
    assert bench.aside(2, 16, dear) == (0.0, 0.0)
