"""The compiler's dump, read: loops inside loops, empty bundles, unit use."""

import pytest

from specjax.pallas_kernels import schedule

BUNDLES = """
= control target key start
LB: loop body
= control target key end

     0   :  { %s1 = inlined_call_operand.vmem [shape: s32[4]] }
   0x1   :  { %s2 = sst [smem:[#allocation1]] %s1 }
   0x2 LB: > { %s3 = sphi %s2 }
   0x3   : > { %s4 = sld [smem:[#allocation1]] }
   0x4 LB: >> { %s5 = dma.hbm_to_vmem [thread:$0] }
   0x5   :  {}
   0x6   : >> { %s6 = sbr.rel target = $region1 }
   0x7 PF: > { %s7 = vmatmul }
   0x8 LB: >> { %s8 = vmatmul }
   0x9   : > { %s9 = vst }
   0xa   :  { %s10 = shalt }
"""
USE = "== CAPACITY:\nMXU, XLU\n 2 2 4 2 1 3 3 2 2 2\n== UTILIZATION:\n" + "\n".join(
    f"{mxu} 0 0 0 0 0 0 0 0 {salu}"
    for mxu, salu in ((0, 1), (0, 1), (0, 2), (0, 1), (0, 1), (0, 0), (0, 1), (1, 0), (2, 0), (0, 1), (0, 1))
)


def test_loops_and_units():
    found = schedule.parse(BUNDLES, USE)
    assert found.kernel.bundles == 3
    (outer,) = found.kernel.loops
    assert outer.bundles == 4
    assert [loop.bundles for loop in outer.loops] == [3, 1]  # the empty bundle belongs to the loop it stands in
    assert [loop.has("MXU") for loop in (outer, *outer.loops)] == [True, False, True]
    assert found.kernel.total() == 11
    assert found.kernel.total("MXU") == 3
    assert found.fullness(outer.loops[1])["MXU"] == 1.0
    assert found.fullness(outer)["MXU"] == 1 / 8


def test_an_unknown_format_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no bundle"):
        schedule.parse("nothing", USE)
    with pytest.raises(FileNotFoundError, match="no schedule of tree_attention"):
        schedule.read(tmp_path, "tree_attention")


def test_the_newest_schedule_is_read(tmp_path):
    for stamp, text in (("1", BUNDLES.replace("vmatmul", "x")), ("2", BUNDLES)):
        (tmp_path / f"{stamp}-attend.1-72-final_bundles.txt").write_text(text)
        (tmp_path / f"{stamp}-attend.1-71-schedule-analysis_final_bundles.txt").write_text("Schedule analysis:")
        (tmp_path / f"{stamp}-attend.1-70-final_hlo-static-per-bundle-utilization.txt").write_text(USE)
    assert schedule.read(tmp_path, "attend").kernel.total() == 11


def test_the_kernels_of_a_program_are_read_as_the_loops_of_one(tmp_path):
    for kernel in ("fusion", "fusion.2", "<late-finalization>"):
        (tmp_path / f"9-{kernel}-71-final_bundles.txt").write_text(BUNDLES)
        (tmp_path / f"9-{kernel}-70-schedule-analysis_final_bundles.txt").write_text("Schedule analysis:")
        (tmp_path / f"9-{kernel}-69-final_hlo-static-per-bundle-utilization.txt").write_text(USE)
    found = schedule.read_program(tmp_path)
    assert len(found.kernel.loops) == 3
    assert found.kernel.total() == 3 * 11
    assert found.filled(found.kernel)["MXU"] == 3 / (11 * 2)  # three of two slots a bundle
    inner = found.kernel.loops[0].loops[0].loops
    assert found.filled(*inner)["MXU"] == 2 / (4 * 2)
    assert found.filled(inner[1])["MXU"] == 1.0
    for path in tmp_path.iterdir():
        path.unlink()
    with pytest.raises(FileNotFoundError, match="no schedule"):
        schedule.read_program(tmp_path)
