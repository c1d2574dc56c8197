"""Bytes counted from traced kernels: of a small kernel worked out by hand, and of tree attention."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from specjax.pallas_kernels import traffic
from specjax.pallas_kernels.tree_attention import tpu


def copier(bounds, x, steps):
    """Copies `x[i]` to VMEM and back out for `i` below `bounds[0]`, the copy back only where `i` is odd."""

    def kernel(bounds, x, out, buffer, arrived):
        def body(i, _):
            @pl.when(i < bounds[0])
            def _():
                pltpu.make_async_copy(x.at[i], buffer, arrived).start()
                pltpu.make_async_copy(x.at[i], buffer, arrived).wait()

            @pl.when(jax.lax.rem(i, 2) == 1)
            def _():
                pltpu.sync_copy(buffer.at[pl.ds(0, 8)], out.at[i, pl.ds(0, 8)])

        jax.lax.fori_loop(0, steps if steps is not None else bounds[0], body, None)

    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM), pl.BlockSpec(memory_space=pl.ANY)],
        out_specs=pl.BlockSpec(memory_space=pl.ANY),
        scratch_shapes=[pltpu.VMEM(x.shape[1:], x.dtype), pltpu.SemaphoreType.DMA(())],
    )(bounds, x)


@pytest.mark.parametrize("steps", [None, 6])
def test_counts_a_kernel_worked_out_by_hand(steps):
    shapes = (jax.ShapeDtypeStruct((1,), jnp.int32), jax.ShapeDtypeStruct((6, 16, 128), jnp.float32))
    found = traffic.count(functools.partial(copier, steps=steps), *shapes, scalars=[np.array([3])])
    row, odd = 16 * 128 * 4, 1 if steps is None else 3
    assert dict(found.read) == {"x": 3 * row}
    assert dict(found.written) == {"out": odd * row // 2}
    assert found.copies == 3 + odd


def attention(committed, slots, page, window=None, batch=4, width=16):
    """Traffic of tree attention with 8 groups of 4 heads of 128, bfloat16."""
    shape, dtype = jax.ShapeDtypeStruct, jnp.bfloat16
    columns = slots // page
    pages = shape((batch * columns, 8, page, 128), dtype)
    q, k = shape((batch, width, 32, 128), dtype), shape((batch, width, 8, 128), dtype)
    table = shape((batch, columns), jnp.int32)
    rest = shape((batch, width, width), bool), pages, pages, table, shape((batch,), jnp.int32)
    args = (q, k, k, *rest, shape((batch, width), jnp.int32))
    static = tpu.Shape.of(q, k, pages, table, window, None, None)
    scalars = [tpu.bounds_of(static, jnp.array(committed)), committed, np.arange(batch * columns)]
    call = functools.partial(tpu.attend, scale=1.0, window=window)
    return traffic.count(call, *args, scalars=scalars)


def test_tree_attention_reads_keys_and_values_once_for_a_group_and_a_mask_whatever_the_context():
    slot = 8 * 128 * 2
    short, long = (attention(np.full(4, n), 4096, 64) for n in (256, 4096))
    for found, length in ((short, 256), (long, 4096)):
        assert found.read["k_pages"] == found.read["v_pages"] == 4 * length * slot
    cached = ("k_pages", "v_pages")
    assert {k: v for k, v in short.read.items() if k not in cached} == {
        k: v for k, v in long.read.items() if k not in cached
    }
    masks = 4 * 64 * 2 * 4  # positions and one word of ancestors for each of 64 packed queries of 4 requests
    assert short.read["args[6]"] == masks


def test_tree_attention_reads_only_pages_with_committed_slots_and_inside_the_window():
    page = 64 * 8 * 128 * 2
    found = attention(np.array([0, 1, 64, 65]), 4096, 64)
    assert found.read["k_pages"] == (0 + 1 + 1 + 2) * page
    whole, windowed = (attention(np.full(4, 4096), 4096, 64, window=w).read["k_pages"] for w in (None, 512))
    assert windowed == 4 * 16 * page  # one block of 1024 slots each
    assert whole == 4 * 64 * page


def test_copies_that_depend_on_vectors_are_refused():
    def kernel(x, y, out, arrived):
        @pl.when(jnp.sum(x[...]) > 0)
        def _():
            pltpu.sync_copy(y, out)

    def call(x):
        return pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            in_specs=[pl.BlockSpec(), pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=[pltpu.SemaphoreType.DMA(())],
        )(x, x)

    with pytest.raises(ValueError, match="depends on more than the scalar operands"):
        traffic.count(call, jax.ShapeDtypeStruct((8, 128), jnp.float32), scalars=[])
    with pytest.raises(ValueError, match="expected one pallas_call, found 0"):
        traffic.count(jnp.sin, 1.0, scalars=[])
