"""Times worked out from a schedule: bound by memory where bundles are few, by bundles where they are many."""

import dataclasses

import pytest

from specjax.pallas_kernels import aot, aot_attention, aot_decode
from specjax.pallas_kernels.schedule import UNITS, Loop, Schedule

CHIP = aot.Chip("test", "tpu", "none", clock=1e9, bandwidth=1e12, memory=32e9)


def loop(bundles, *inner, mxu=True):
    return Loop(bundles=bundles, used=dict.fromkeys(UNITS, 0) | {"MXU": int(mxu)}, loops=list(inner))


def schedule(*inner):
    return Schedule(loop(0, *inner, mxu=False), dict.fromkeys(UNITS, 2))


def attention(plain):
    pieces = loop(10, mxu=False)
    return schedule(loop(100, loop(plain, pieces, pieces), loop(plain + 300, pieces), mxu=False))


def test_attention_is_the_longer_of_bundles_and_copies():
    job = aot_attention.job("8k", batch=4, context=8192)
    block = 2 * 8 * 1024 * 128 * 2 / CHIP.bandwidth
    quick, slow = (job.estimate(attention(n), CHIP)["estimate_s"] for n in (100, 100_000))
    assert quick == pytest.approx(4 * (100e-9 + 8 * block) + block)
    assert slow == pytest.approx(4 * (100e-9 + 8 * (100_000 + 4 * 10) * 1e-9) + block)  # four pieces of 256 slots
    assert job.needed == 4 * 8 * block * CHIP.bandwidth
    stages = job.stages(attention(100), CHIP)
    assert [(stage["stage"], stage["bundles"]) for stage in stages] == [
        ("request", 100),
        ("block", 120),
        ("last block", 410),
    ]


def test_the_draft_tile_is_found_where_the_mask_has_products_too():
    """32 groups, eight side by side: the tile is a loop of four turns; v5p has a small loop with products before it."""
    pieces = loop(10, mxu=False)
    tile, blocks = loop(210), [loop(66, pieces, loop(500)), loop(129, pieces, loop(600))]
    job = aot_attention.job("32 groups", batch=4, heads=32, groups=32, context=2048)
    shown = [
        job.estimate(schedule(loop(100, *x, mxu=False)), CHIP) for x in ([tile, *blocks], [loop(12), tile, *blocks])
    ]
    assert shown[0] == shown[1]
    stages = job.stages(schedule(loop(100, loop(12), loop(210), *blocks, mxu=False)), CHIP)
    assert [stage["stage"] for stage in stages] == ["request", "draft tile", "block", "last block"]
    assert [stage["bundles"] for stage in stages] == [100, 210, 576, 739]


def test_one_request_is_the_kernel_and_no_loop_of_it():
    job = aot_attention.job("8k", batch=1, context=8192)
    pieces = loop(10, mxu=False)
    found = Schedule(loop(100, pieces, loop(2000, pieces), loop(2300, pieces), mxu=False), dict.fromkeys(UNITS, 2))
    block = 2 * 8 * 1024 * 128 * 2 / CHIP.bandwidth
    assert job.estimate(found, CHIP)["estimate_s"] == pytest.approx(100e-9 + 8 * block + block)
    assert [stage["bundles"] for stage in job.stages(found, CHIP)] == [100, 2010, 2310]


def decode(tile, around=0):
    """A layer of the 8B plan whose tiles take `tile` bundles each; one request."""
    pieces = loop(1, mxu=False)
    counts = (2, 2, 4, 7)  # tiles in a turn of the loops of qkv, out, gate_up and down
    qkv, out, gate_up, down = (loop(tile * n) for n in counts)
    return schedule(loop(around, qkv, pieces, loop(1, pieces), loop(1, pieces), out, gate_up, down, mxu=False))


def test_a_step_whose_bundles_are_few_keeps_memory_busy():
    job = aot_decode.job("Llama-3.1-8B", context=1024)
    shown = job.estimate(decode(1), CHIP)
    floor = job.needed / CHIP.bandwidth
    assert floor < shown["estimate_s"] < 1.01 * floor
    assert shown["idle"] < 0.01 and shown["busy"] < 0.01


def test_stages_add_up_to_the_step_and_say_where_it_waits():
    job = aot_decode.job("Llama-3.1-8B", context=1024)
    for found in (decode(1), decode(10_000, around=5000)):
        shown, stages = job.estimate(found, CHIP), job.stages(found, CHIP)
        assert [stage["stage"] for stage in stages] == ["around", "qkv", "attention", "out", "gate_up", "down"]
        assert sum(stage["estimate_us"] for stage in stages) == pytest.approx(shown["estimate_s"] * 1e6, rel=1e-3)
        waiting = sum(stage["waiting_us"] for stage in stages) / sum(stage["estimate_us"] for stage in stages)
        assert waiting == pytest.approx(1 - shown["busy"], abs=0.01)
        sizes = {stage["stage"]: stage["bytes"] for stage in stages}
        assert sizes["down"] == 2 * 32 * 4096 * 14336
        assert sizes["attention"] == 2 * 1024 * 32 * 8 * 128 * 2
        assert sum(sizes.values()) == job.needed
    many = {stage["stage"]: stage for stage in stages}
    assert many["around"]["bundles"] == 32 * 5000
    assert many["gate_up"]["units"]["MXU"] == round(1 / (2 * 4 * 10_000), 3)


def test_a_step_whose_bundles_are_many_lets_memory_wait():
    job = aot_decode.job("Llama-3.1-8B", context=1024)
    tiles, cycles = 32 * 208, 10_000
    shown = job.estimate(decode(cycles), CHIP)
    assert shown["estimate_s"] == pytest.approx(tiles * cycles / CHIP.clock, rel=0.02)
    assert shown["busy"] > 0.98 and shown["idle"] > 0.7


def test_work_outside_of_the_products_is_covered_by_tiles_in_flight():
    """A ring of twelve tiles is 25 µs of copies here: 10 µs a layer beside the products cost nothing, 100 µs do."""
    job = aot_decode.job("Llama-3.1-8B", context=1024)
    short, long = (job.estimate(decode(1, around=n), CHIP)["estimate_s"] for n in (10_000, 100_000))
    floor = job.needed / CHIP.bandwidth
    assert short < 1.02 * floor
    assert long > floor + 32 * 40e-6


def test_jobs_fit_the_chip():
    for chip in aot.CHIPS.values():
        for job in aot_decode.jobs(chip, short=False):
            assert sum(x.size * x.dtype.itemsize for x in aot.jax.tree.leaves(job.args)) < chip.memory
    small = dataclasses.replace(CHIP, memory=17e9)
    assert "3B" in aot_decode.jobs(small, short=True)[0].name


PROGRAM = """HloModule m
%body {
  %copy-start.9 = (f32[1024]{0:S(1)}, f32[1024]{0}, u32[]{:S(2)}) copy-start(%x)
}

ENTRY %main (w: bf16[64,128]) -> f32[8] {
  %copy-start = (bf16[64,128]{1,0:T(8,128)(2,1)S(1)}, bf16[64,128]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}) copy-start(%w)
  %slice-start = ((s8[4096]{0:T(1024)}), s8[512]{0:T(1024)S(1)}, s32[]{:S(2)}) slice-start(%b), slice={[0:512]}
  %fusion = f32[8,128]{1,0:T(8,128)S(1)} fusion(%copy-start), kind=kLoop
}
"""


def test_copies_ahead_are_counted_as_the_cost_analysis_does():
    """Those of the entry alone, their VMEM end once: 64 x 128 of two bytes four times, 512 bytes three times."""
    assert aot.copied_ahead(PROGRAM) == 4 * 64 * 128 * 2 + 3 * 512


@pytest.mark.parametrize(("unknown", "left"), [(0, 2e-4), (3, 2e-4)])
def test_an_estimate_leaves_out_unknown_calls_and_copies_ahead(monkeypatch, unknown, left):
    copies = aot.copied_ahead(PROGRAM) / CHIP.bandwidth

    class Compiled:
        def cost_analysis(self):
            return {"optimal_seconds": left + copies - unknown}

        def as_text(self):
            return PROGRAM

    monkeypatch.setattr(aot, "compile_for", lambda *_: Compiled())
    job = aot.Job("x", lambda: None, ())
    assert aot.estimate(job, CHIP) == pytest.approx(left)
    left = 0.0
    with pytest.raises(ValueError, match="gives no estimate of x"):
        aot.estimate(job, dataclasses.replace(CHIP, bandwidth=1e6))
