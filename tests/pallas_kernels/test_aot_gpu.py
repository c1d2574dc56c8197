"""What the GPUs' compilers say is read; kernels lower for AMD without any compiler of AMD's."""

import dataclasses

import pytest

from specjax.pallas_kernels import aot_attention_gpu, aot_gpu

PTXAS = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'loop_fusion' for 'sm_90a'
ptxas info    : Function properties for loop_fusion
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers
ptxas info    : Compiling entry function 'tree_attention' for 'sm_90a'
ptxas info    : Function properties for tree_attention
ptxas         .     8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 8 bytes cumulative stack size
"""
AMDGCN = """  .agpr_count: 0
    .private_segment_fixed_size: {scratch}
    .sgpr_spill_count: 4
    .vgpr_count:     236
    .vgpr_spill_count: {spilled}
"""


def test_registers_and_spills_are_read_from_what_compilers_say():
    assert aot_gpu.read_ptxas(PTXAS) == {"loop_fusion": (8, 0), "tree_attention": (168, 16)}
    assert aot_gpu.read_amdgcn(AMDGCN.format(scratch=0, spilled=0)) == {"registers": 236, "spill_bytes": 0}
    assert aot_gpu.read_amdgcn(AMDGCN.format(scratch=16, spilled=5))["spill_bytes"] == 20


def test_a_spill_is_an_error_and_a_shape_that_is_declined_is_none(monkeypatch):
    chip = aot_gpu.CHIPS["h100"]
    job = aot_gpu.Job("job", len, (), kernel="tree_attention", needed=3_350_000)
    monkeypatch.setattr(aot_gpu, "_compile_nvidia", lambda *_: {"registers": 255, "spill_bytes": 16})
    row = aot_gpu.run(job, chip)
    assert row["roofline_us"] == 1.0
    assert row["error"] == "16 bytes of registers spilled to memory"
    assert "error" not in aot_gpu.run(dataclasses.replace(job, kernel=None), chip)  # XLA's kernels are not ours

    def decline(*_):
        raise NotImplementedError("heads of width 12")

    monkeypatch.setattr(aot_gpu, "_compile_nvidia", decline)
    assert aot_gpu.run(job, chip) == {"chip": "h100", "job": "job", "declined": "heads of width 12"}


@pytest.mark.parametrize("short", [True, False])
@pytest.mark.parametrize("chip", aot_gpu.CHIPS.values(), ids=lambda chip: chip.name)
def test_jobs_are_named_apart(chip, short):
    names = [job.name for job in aot_attention_gpu.jobs(chip, short)]
    assert len(set(names)) == len(names) >= len(chip.backends)


def test_the_kernel_lowers_for_amd(monkeypatch):
    """As far as AMD's compiler, which takes what is captured here."""
    seen = []

    def compiler(job, chip):
        seen.extend(aot_gpu.triton_kernels(job.function, job.args))
        return {"registers": 1, "spill_bytes": 0}

    monkeypatch.setattr(aot_gpu, "_compile_amd", compiler)
    chip = aot_gpu.CHIPS["mi300x"]
    (job,) = aot_attention_gpu.jobs(chip, short=True)
    assert "error" not in aot_gpu.run(job, chip)
    ((name, ir, options),) = seen
    assert name == "tree_attention" and options == {"num_warps": 4, "num_stages": 1}
    assert "tt.dot" in ir and "tt.func" in ir
