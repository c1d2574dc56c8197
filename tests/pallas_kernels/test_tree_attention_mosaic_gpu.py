"""The Mosaic GPU kernel, interpreted (copies, barriers and races simulated), against the reference."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from specjax.pallas_kernels.tree_attention import cases, mosaic_gpu, reference
from specjax.pallas_kernels.tree_attention.tiles import MosaicTiles

SIMULATED = plgpu.InterpretGPUParams(detect_races=True, uninitialized_memory="nan")
STATIC = ("scale", "window", "softcap")
HOPPER, BLACKWELL = 90, 100
REFERENCE = jax.jit(reference.tree_attention, static_argnames=STATIC)
KERNEL = jax.jit(
    functools.partial(mosaic_gpu.tree_attention, interpret=SIMULATED), static_argnames=(*STATIC, "capability", "tiles")
)


def in_bfloat16(found):
    """The kernel has no float32; Hopper's no heads wider than 128."""
    for case in found:
        for capability in (HOPPER, BLACKWELL):
            if capability == BLACKWELL or case.dim <= 128:
                yield dataclasses.replace(case, dtype="bfloat16"), capability


def name(value):
    return getattr(value, "name", str(value))


def check(case, **options):
    inputs = cases.build(case)
    got = np.asarray(KERNEL(*inputs.args, **case.options, **options), np.float32)[inputs.live]
    want = np.asarray(REFERENCE(*inputs.args, **case.options), np.float32)[inputs.live]
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got, want, atol=cases.TOLERANCE[case.dtype], rtol=0)


QUICK = tuple(in_bfloat16(cases.quick()))


@pytest.mark.parametrize(("case", "capability"), [QUICK[i] for i in (0, 3, 5, 8)], ids=name)
def test_interpreted_equals_the_reference(case, capability):
    check(case, capability=capability)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "capability"), [*QUICK, *in_bfloat16(cases.sweep())], ids=name)
def test_interpreted_equals_the_reference_everywhere(case, capability):
    check(case, capability=capability)


def test_a_request_may_be_split_finer_than_its_blocks():
    case = cases.Case((200, 0), (3, 1), 3, heads=2, groups=1, dim=16, page=16, dtype="bfloat16", fill=cases.NAN)
    check(case, capability=HOPPER, tiles=lambda sizes: dataclasses.replace(MosaicTiles.rule(sizes), splits=8))


def test_what_the_kernel_does_not_have_is_declined():
    q, k, v, k_pages, v_pages, table, committed, rows = cases.build(
        cases.Case((4, 4), (2, 2), 2, page=16, dtype="bfloat16")
    ).args
    decline = functools.partial(mosaic_gpu.tree_attention, committed=committed, rows=rows, interpret=True, scale=1.0)
    with pytest.raises(NotImplementedError, match="compute capability None, of 90, 100 and 103"):
        decline(q, k, v, k_pages, v_pages, table)
    decline = functools.partial(decline, capability=HOPPER)
    with pytest.raises(NotImplementedError, match="dtypes bfloat16, bfloat16 and a cache of float32"):
        decline(q, k, v, *(x.astype("float32") for x in (k_pages, v_pages)), table)
    with pytest.raises(NotImplementedError, match="pages of 12 slots"):
        decline(q, k, v, k_pages[:, :, :12], v_pages[:, :, :12], table)
    with pytest.raises(NotImplementedError, match="heads of width 192, of multiples of 16 up to 128"):
        decline(*(np.tile(x, 3) for x in (q, k, v, k_pages, v_pages)), table)
    with pytest.raises(ValueError, match="needs 2 pages here"):
        decline(q, k, v, *(np.tile(x, (1, 1, 4, 1)) for x in (k_pages, v_pages)), None)
