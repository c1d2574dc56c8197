"""The TPU kernel, interpreted (copies, semaphores and races simulated), against the reference over the shared cases."""

import functools
from collections.abc import Callable

import jax
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from specjax.pallas_kernels.tree_attention import cases, reference, tpu
from specjax.pallas_kernels.tree_attention.tiles import TpuTiles

SIMULATED = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
REFERENCE = jax.jit(reference.tree_attention, static_argnames=("scale", "window", "softcap"))
KERNEL = jax.jit(tpu.tree_attention, static_argnames=("scale", "window", "softcap", "interpret", "tiles"))


# Contexts of the cases are several blocks of this size; those of the rule are longer than most of them.
SMALL = functools.partial(TpuTiles.rule, most=128)


def run(case, args, interpret=SIMULATED, tiles: Callable | None = SMALL):
    return np.asarray(KERNEL(*args, interpret=interpret, tiles=tiles, **case.options), np.float32)


def check(case, tiles: Callable | None = SMALL):
    inputs = cases.build(case)
    got = run(case, inputs.args, tiles=tiles)[inputs.live]
    want = np.asarray(REFERENCE(*inputs.args, **case.options), np.float32)[inputs.live]
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got, want, atol=cases.TOLERANCE[case.dtype], rtol=0)


@pytest.mark.parametrize("case", cases.quick(), ids=lambda case: case.name)
def test_interpreted_equals_the_reference(case):
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", cases.sweep(), ids=lambda case: case.name)
def test_interpreted_equals_the_reference_everywhere(case):
    check(case)
    check(case, tiles=None)


@pytest.mark.parametrize("page", [384, 512])
def test_a_block_may_be_several_large_pages(page):
    """Each copy stays inside its page."""
    case = cases.Case((1500, 40), (3, 2), 3, dim=128, page=page, slots=4 * page, fill=cases.NAN, seed=page)
    assert TpuTiles.rule(case.sizes).block > page
    check(case, tiles=None)


def test_copies_may_arrive_early_or_late():
    """What a copy brings is waited for: nothing changes whether it is there at once or at the last moment."""
    case = cases.quick()[0]
    args, late = cases.build(case).args, run(case, cases.build(case).args)
    early = run(case, args, pltpu.InterpretParams(dma_execution_mode="eager", detect_races=True))
    np.testing.assert_array_equal(early, late)


def test_what_the_kernel_does_not_have_is_declined():
    case = cases.Case((4, 4), (2, 2), 2, page=16)
    q, k, v, k_pages, v_pages, table, committed, rows = cases.build(case).args
    decline = functools.partial(tpu.tree_attention, committed=committed, rows=rows, interpret=True, scale=1.0)
    with pytest.raises(NotImplementedError, match="dtypes float32, float32 and a cache of bfloat16"):
        decline(q, k, v, *(x.astype("bfloat16") for x in (k_pages, v_pages)), table)
    with pytest.raises(NotImplementedError, match="pages of 12 slots"):
        decline(q, k, v, k_pages[:, :, :12], v_pages[:, :, :12], table)
    wide = cases.build(cases.Case((4,), (129,), 129)).args
    with pytest.raises(NotImplementedError, match="129 rows and 129 keys"):
        tpu.tree_attention(*wide, scale=1.0)
    with pytest.raises(ValueError, match="needs 2 pages here"):
        decline(q, k, v, k_pages, v_pages, None)
