"""Latency tables: interpolation, monotone fits, refusals, files."""

import dataclasses
import json
import os

import numpy as np
import pytest

from specjax.costmodel import build, menu, tables
from specjax.costmodel.facts import find
from specjax.costmodel.isotonic import increasing, monotone
from specjax.costmodel.roofline import Setup
from specjax.costmodel.shapes import TARGETS
from specjax.costmodel.tables import ForeignTableError, Grid, Provenance, Table
from specjax.draft import PLAIN, DraftShape

SETUP = Setup(find("h100"), 1, TARGETS["llama-3.1-8b"], "bfloat16")
SHAPES = menu.shapes(["ngram", "eagle3"])


@pytest.fixture(scope="module")
def table() -> Table:
    return tables.from_roofline(SETUP, SHAPES, date="2026-01-01")


def test_linear_costs_are_interpolated_exactly():
    """Costs with terms in rows, requests, context and their products: every point, past the last cell too."""

    def cost(batch, each, context):
        return 1 + 0.1 * batch + 0.3 * batch * each + 1e-4 * batch * context + 1e-6 * batch * each * context

    axes = ((1, 4, 16), (1, 2, 8, 64), (512, 4096))
    grid = Grid.of(axes, [[[cost(b, r, c) for c in axes[2]] for r in axes[1]] for b in axes[0]], "measured")
    for point in [(1, 1, 512), (3, 5, 1000), (16, 64, 4096), (40, 100, 9000)]:
        assert grid.at(*point) == pytest.approx(cost(*point))
    np.testing.assert_allclose(grid.at(2, np.array([1, 3, 9]), 600), [cost(2, r, 600) for r in (1, 3, 9)])
    assert grid.at(1, 0.5, 100) == pytest.approx(cost(1, 1, 512))  # below the first cell: its own


def test_a_pass_is_priced_by_its_total_rows(table):
    assert table.verify_time(8, 32, 512) == pytest.approx(table.verify.seconds[3, 3, 0])
    assert table.round_time(SHAPES[0], 8, 8, 512) == pytest.approx(table.fixed + table.verify.seconds[3, 0, 0])


def test_time_never_falls_with_rows_requests_or_context(table):
    rows = np.arange(8, 1000)
    assert (np.diff(table.verify_time(8, rows, 3000)) >= 0).all()
    contexts = [table.verify_time(8, 64, c) for c in range(500, 60000, 500)]
    assert (np.diff(contexts) >= 0).all()


def test_pool_adjacent_violators():
    values, weights = np.array([1.0, 3.0, 2.0, 2.0, 5.0, 4.0]), np.array([1.0, 1.0, 1.0, 2.0, 1.0, 3.0])
    np.testing.assert_allclose(increasing(values, weights), [1, 2.25, 2.25, 2.25, 4.25, 4.25])


def test_monotone_fit_is_the_nearest_one():
    """Against the constrained least squares found by projecting slowly and for long."""
    noisy = np.random.default_rng(0).normal(size=(4, 5)) + np.add.outer(np.arange(4), np.arange(5)) * 0.5
    fitted = monotone(noisy)
    assert (np.diff(fitted, axis=0) >= 0).all()
    assert (np.diff(fitted, axis=1) >= 0).all()
    # Optimal: no step towards any other monotone grid lowers the error.
    error = ((fitted - noisy) ** 2).sum()
    rng = np.random.default_rng(1)
    for _ in range(300):
        other = np.sort(np.sort(rng.normal(size=(4, 5)) * 2 + 1, axis=0), axis=1)
        step = fitted + 1e-3 * (other - fitted)
        assert ((step - noisy) ** 2).sum() >= error - 1e-9
    already = np.add.outer(np.arange(4.0), np.arange(5.0))
    assert (monotone(already) == already).all()


def test_grids_that_no_table_may_hold():
    axes = ((1, 2), (1, 2))
    with pytest.raises(ValueError, match="must not fall"):
        Grid.of(axes, [[1, 2], [3, 2.5]], "measured")
    with pytest.raises(ValueError, match="positive"):
        Grid.of(axes, [[0, 2], [3, 4]], "measured")
    with pytest.raises(ValueError, match="ascend"):
        Grid.of(((2, 1), (1, 2)), [[1, 2], [3, 4]], "measured")
    with pytest.raises(ValueError, match="unknown sources"):
        Grid(axes, np.ones((2, 2)), np.full((2, 2), "x"))


def test_sources_of_cells(table):
    measured = table.verify.sources.copy()
    measured[:2] = "m"
    mixed = dataclasses.replace(table, verify=dataclasses.replace(table.verify, sources=measured))
    assert mixed.source(SHAPES[0], 1, 1, 512) == "measured"
    assert mixed.source(SHAPES[1], 1, 4, 512) == "measured+roofline"
    assert mixed.source(SHAPES[0], 64, 64, 512) == "roofline"
    assert mixed.uncertainty(SHAPES[0], 1, 1, 512) < mixed.uncertainty(SHAPES[1], 1, 4, 512)


def test_round_trip_keeps_cells_and_sources(table, tmp_path):
    sources = table.verify.sources.copy()
    sources[0, :, 0] = "m"
    mixed = dataclasses.replace(table, verify=dataclasses.replace(table.verify, sources=sources))
    mixed = dataclasses.replace(mixed, switch=2e-3, aside=(3e-4, 5e-5))
    mixed.write(tmp_path / "deep" / "t.json")
    back = Table.read(tmp_path / "deep" / "t.json")
    assert back.provenance == table.provenance
    assert (back.verify.sources == sources).all()
    np.testing.assert_allclose(back.verify.seconds, table.verify.seconds, rtol=6e-4)
    assert back.draft.keys() == table.draft.keys()
    for shape in table.draft:
        np.testing.assert_allclose(back.draft[shape].seconds, table.draft[shape].seconds, rtol=6e-4)
    for kind, pair in table.catch_up.items():
        assert back.catch_up[kind] == pytest.approx(pair, rel=1e-4)
    assert (back.fixed, back.switch) == pytest.approx((table.fixed, 2e-3))
    assert back.aside == pytest.approx((3e-4, 5e-5)) and back.aside_time(5) == pytest.approx(5e-4)
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["t.json"]


def test_a_broken_write_leaves_the_old_file(table, tmp_path, monkeypatch):
    path = tmp_path / "t.json"
    table.write(path)
    before = path.read_bytes()
    monkeypatch.setattr(type(path), "replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        dataclasses.replace(table, fixed=1.0).write(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["t.json"]


def test_a_foreign_table_is_refused_field_by_field(table):
    wanted = Provenance("h200", 2, "llama-3.1-8b", "bfloat16", date="2027-01-01")
    with pytest.raises(ForeignTableError) as refused:
        table.require(wanted)
    assert "device: the table has 'h100', this is 'h200'" in str(refused.value)
    assert "devices: the table has 1, this is 2" in str(refused.value)
    assert "date" not in str(refused.value)
    assert "target" not in str(refused.value)
    assert table.require(dataclasses.replace(table.provenance, jax="0.12")) is table


def test_drafter_digests_are_compared_where_both_have_them():
    mine = Provenance("h100", 1, "t", "bfloat16", drafter_digests={"mtp": "a", "eagle3": "b"})
    assert not mine.differences(dataclasses.replace(mine, drafter_digests={"mtp": "a", "dflash": "c"}))
    assert mine.differences(dataclasses.replace(mine, drafter_digests={"eagle3": "c"}))


@pytest.mark.parametrize("damage", ["", "{", '{"format": 2}', '{"format": 1}'])
def test_what_is_no_table_is_refused_by_its_name(damage, tmp_path):
    path = tmp_path / "bad.json"
    path.write_text(damage)
    with pytest.raises(ValueError, match=r"bad\.json is not a latency table"):
        Table.read(path)


def test_measured_then_shipped_then_roofline(tmp_path):
    wanted = Provenance("h100", 1, "llama-3.1-8b", "bfloat16", jax="1.0")
    found, passed = tables.resolve(wanted, SHAPES, folder=tmp_path)
    assert found.provenance.made_by  # the shipped one
    assert not passed
    mine = dataclasses.replace(tables.from_roofline(SETUP, SHAPES), provenance=dataclasses.replace(wanted, date="x"))
    mine.write(tmp_path / "h100" / "llama-3.1-8b.json")
    found, passed = tables.resolve(wanted, SHAPES, folder=tmp_path)
    assert found.provenance.date == "x"
    assert not passed
    found, passed = tables.resolve(dataclasses.replace(wanted, jax="2.0"), SHAPES, folder=tmp_path)
    assert found.provenance.made_by
    assert len(passed) == 1
    assert "jax: the table has '1.0', this is '2.0'" in passed[0]
    found, passed = tables.resolve(dataclasses.replace(wanted, devices=4), SHAPES, folder=tmp_path)
    assert found.provenance == Provenance("h100", 4, "llama-3.1-8b", "bfloat16")
    assert len(passed) == 2
    odd = [DraftShape.chain("mtp", 9)]
    found, passed = tables.resolve(wanted, odd, folder=tmp_path / "none")
    assert odd[0] in found.draft
    assert "no draft times" in passed[0]


@pytest.mark.parametrize("setup", build.setups(), ids=lambda s: f"{s.device.name}-{s.target.name}")
def test_shipped_tables_are_what_the_command_writes(setup):
    path = tables.shipped(setup.device.name, setup.target.name)
    assert json.loads(path.read_text()) == build.table(setup).to_json()
    assert path.stat().st_size < 16000


@pytest.mark.parametrize("point", [(1, 100.0), (3, 700.0), (64, 4096.0), (700, 90000.0)])
def test_draft_times_of_a_menu_are_those_of_its_shapes(table, point):
    """Also where a grid has axes of its own."""
    odd = Grid.of(((1, 5), (300, 9000)), [[1.0, 2.0], [3.0, 5.0]], "measured")
    own = dataclasses.replace(table, draft={**table.draft, SHAPES[2]: odd})
    assert own.draft_times(SHAPES, *point).tolist() == [own.draft_time(shape, *point) for shape in SHAPES]
    for shape in SHAPES:
        passes = own.uncertainty(batch=point[0], rows=point[0], context=point[1])
        whole = own.uncertainty(shape, point[0], point[0], point[1])
        assert max(passes, own.draft_uncertainty(shape, *point)) == whole


def test_a_draft_costs_the_host_too_and_a_plain_round_does_not(table):
    dearer = dataclasses.replace(table, aside=(3e-4, 5e-5))
    shape = next(iter(table.draft))
    for batch, more in ((1, 3e-4), (5, 5e-4)):
        assert dearer.draft_time(shape, batch, 300.0) - table.draft_time(shape, batch, 300.0) == pytest.approx(more)
        both = dearer.draft_times((PLAIN, shape), batch, 300.0)
        assert both.tolist() == pytest.approx([0.0, dearer.draft_time(shape, batch, 300.0)])
        grown = dearer.round_time(shape, batch, 2 * batch, 300.0) - table.round_time(shape, batch, 2 * batch, 300.0)
        assert grown == pytest.approx(more)
