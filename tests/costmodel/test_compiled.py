"""Tables from compiled passes: the line through two and four layers, the floor, the sources, the files."""

import dataclasses
import json

import numpy as np
import pytest

from specjax.costmodel import build, compiled, menu, roofline, tables
from specjax.costmodel.compiled import CHECK, LAYERS, REQUESTS, ROWS, Samples
from specjax.costmodel.facts import find
from specjax.costmodel.roofline import Setup, total
from specjax.costmodel.shapes import TARGETS

V6E = Setup(find("tpu-v6e"), 1, TARGETS["llama-3.1-8b"], "bfloat16")
SHAPES = menu.shapes(["ngram", "eagle3"])
NONE = Samples("tpu-v6e", "llama-3.1-8b", "bfloat16", jax="1.0", compiler="2.0", date="2026-01-01")
SAMPLED = [s for s in build.setups() if compiled.file(s.device.name, s.target.name).exists()]


def bare(setup: Setup, batch: int, rows: int) -> float:
    """Seconds of matrices and logits by the roofline, worked out from the phases of a pass."""
    parts = setup.layers(setup.target.layers, batch, rows, 0, ops={})
    return total([parts["qkv"], parts["output"], parts["mlp"], setup.head(setup.target.vocab, rows)]).seconds


def fake(more=lambda batch, rows: 0.0, times: float = 1.0, setup: Setup = V6E) -> Samples:
    """What a compiler would say that finds `times` the roofline and `more` seconds, 50 us of it beside the layers."""
    seconds = {}
    for b, r in [(b, r) for b in REQUESTS for r in ROWS]:
        whole, once = times * bare(setup, b, b * r) + more(b, b * r), 5e-5
        for n in LAYERS:
            seconds[b, r, n] = once + (whole - once) * n / setup.target.layers
    return dataclasses.replace(NONE, device=setup.device.name, target=setup.target.name, seconds=seconds)


def test_two_and_four_layers_give_any_number_exactly_where_cost_is_linear():
    samples = dataclasses.replace(NONE, seconds={(8, 8, n): 3e-4 + 2.5e-4 * n for n in LAYERS})
    for layers in (1, 2, 3, 4, 32, 64):
        assert samples.whole((8, 8), layers) == pytest.approx(3e-4 + 2.5e-4 * layers)
    with pytest.raises(KeyError):
        samples.whole((1, 8), 32)


def test_a_compiler_that_finds_the_roofline_changes_no_cell():
    found, plain = compiled.table(V6E, SHAPES, fake()), tables.from_roofline(V6E, SHAPES)
    np.testing.assert_allclose(found.verify.seconds, plain.verify.seconds, rtol=1e-9)
    assert found.draft.keys() == plain.draft.keys()
    assert found.fixed == plain.fixed


def test_what_a_pass_takes_beyond_the_roofline_is_added_between_the_points():
    """A cost in requests and in rows is met at every cell inside; outside, the nearest edge's is added."""

    def more(batch, rows):
        return 2e-4 + 3e-6 * batch + 1e-6 * rows

    found, plain = compiled.table(V6E, SHAPES, fake(more)), tables.from_roofline(V6E, SHAPES)
    for i, b in enumerate(tables.BATCH):
        for j, r in enumerate(tables.ROWS):
            edge = min(b, REQUESTS[-1]), min(r, ROWS[-1])
            expected = plain.verify.seconds[i, j] + more(edge[0], edge[0] * edge[1])
            np.testing.assert_allclose(found.verify.seconds[i, j], expected, rtol=1e-9)


def test_no_cell_is_below_its_bytes_over_the_bandwidth():
    """Even if the compiler says that a pass takes no time."""
    small = Setup(find("tpu-v5e"), 1, TARGETS["smollm2-135m"], "bfloat16")
    for setup in (V6E, small):
        above_the_floor(setup, compiled.table(setup, SHAPES, fake(times=0.01, setup=setup)))
    # Where arithmetic bounds a pass, a compiler may say less than the data sheet, down to that floor.
    found, plain = compiled.table(small, SHAPES, fake(times=0.9, setup=small)), tables.from_roofline(small, SHAPES)
    assert found.verify.at(64, 8, 512) < plain.verify.at(64, 8, 512)


def above_the_floor(setup: Setup, found: tables.Table) -> None:
    for i, b in enumerate(tables.BATCH):
        for j, r in enumerate(tables.ROWS):
            for k, c in enumerate(tables.CONTEXT):
                moved = total(roofline.verify_phases(setup, b, b * r, c).values()).bytes
                moved += setup.sampling(setup.target.vocab, b * r).bytes
                assert found.verify.seconds[i, j, k] >= moved / setup.device.bandwidth * (1 - 1e-9)


def test_cells_say_where_they_are_from():
    found = compiled.table(V6E, SHAPES, fake(lambda b, n: 1e-4))
    sources = {
        (b, r, c): found.verify.source(b, r, c) for b in (1, 8, 64, 512) for r in (1, 8, 64) for c in (512, 32768)
    }
    assert sources[1, 1, 512] == sources[8, 8, 512] == sources[64, 8, 512] == "compiler"
    assert sources[1, 64, 512] == sources[512, 1, 512] == "roofline"  # outside of what was compiled
    assert sources[64, 8, 32768] == "roofline"  # a longer cache than those that were compiled
    assert {grid.source(1, 512) for grid in found.draft.values()} == {"roofline"}
    assert found.uncertainty(SHAPES[0]) == tables.UNCERTAINTY["compiler"]
    # A small model's pass is mostly the assumed time of its kernels.
    small = dataclasses.replace(V6E, target=TARGETS["smollm2-135m"])
    found = compiled.table(small, SHAPES, fake(setup=small))
    assert found.verify.source(1, 1, 512) == "roofline"


def test_points_that_are_not_complete_are_left_out():
    whole = fake()
    assert whole.points() == (REQUESTS, ROWS)
    missing = dataclasses.replace(whole, seconds={k: v for k, v in whole.seconds.items() if k != (64, 8, 4)})
    assert missing.points() == ((1, 8), ROWS)
    found = compiled.table(V6E, SHAPES, missing)
    assert found.verify.source(8, 8, 512) == "compiler"
    assert found.verify.source(64, 8, 512) == "roofline"
    with pytest.raises(ValueError, match="no pass of llama-3.1-8b on tpu-v6e was compiled"):
        compiled.table(V6E, SHAPES, NONE)


def test_samples_of_another_set_up_are_refused():
    with pytest.raises(ValueError, match="samples of llama-3.1-8b, bfloat16, on tpu-v5p are not of"):
        compiled.table(V6E, SHAPES, dataclasses.replace(fake(), device="tpu-v5p"))


def test_samples_come_back_from_their_file(tmp_path):
    path = tmp_path / "deep" / "s.json"
    samples = fake(lambda b, n: 1e-6 * n)
    samples.write(path)
    back = Samples.read(path)
    assert dataclasses.replace(back, seconds={}) == NONE
    assert back.seconds == pytest.approx(dict(samples.seconds), abs=1e-8)
    assert [p.name for p in path.parent.iterdir()] == ["s.json"]
    for damage in ("", "{}", '{"format": 9}', '{"format": 1, "compiled": [{}]}'):
        path.write_text(damage)
        with pytest.raises(ValueError, match=r"s\.json holds no times of compiled passes"):
            Samples.read(path)


def test_a_broken_write_leaves_the_old_samples(tmp_path, monkeypatch):
    path = tmp_path / "s.json"
    NONE.write(path)
    before = path.read_bytes()
    monkeypatch.setattr(type(path), "replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        fake().write(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["s.json"]


def test_what_is_not_compiled():
    assert compiled.compilable(V6E) is None
    assert "no TPU" in compiled.compilable(dataclasses.replace(V6E, device=find("h100")))
    assert "split over 2" in compiled.compilable(dataclasses.replace(V6E, count=2))
    assert "two devices to JAX" in compiled.compilable(dataclasses.replace(V6E, device=find("tpu-7x")))


@pytest.mark.parametrize("setup", SAMPLED, ids=lambda s: f"{s.device.name}-{s.target.name}")
def test_shipped_samples_are_sane(setup):
    """Not below what a pass must move, and a straight line in the layers.

    Nor far above, where heads are whole lanes; for heads of 64 the compiler copies caches from one layout to another.
    """
    samples = Samples.read(compiled.file(setup.device.name, setup.target.name))
    requests, rows = samples.points()
    assert requests and rows
    for b in requests:
        for r in rows:
            found = samples.whole((b, r), setup.target.layers)
            assert 0.9 < found / bare(setup, b, b * r) < (1.7 if setup.target.head_dim % 128 == 0 else 100)
    if samples.has(CHECK, setup.target.layers):
        whole = samples.seconds[*CHECK, setup.target.layers]
        assert samples.whole(CHECK, setup.target.layers) == pytest.approx(whole, rel=0.1)
    shipped = json.loads(tables.shipped(setup.device.name, setup.target.name).read_text())
    assert samples.compiler in shipped["provenance"]["made_by"]
