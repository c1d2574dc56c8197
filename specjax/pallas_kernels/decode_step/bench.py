"""The fused step's kernels, to be timed on random weights: a few layers of the model, each as cold as in a pass."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specjax.draft import Rows, chain, pack
from specjax.pallas_kernels.decode_step import tpu, triton
from specjax.pallas_kernels.decode_step.cut import Cut, Matrices
from specjax.pallas_kernels.decode_step.tiles import ProductSizes, ProductTiles, StepSizes, StepTiles
from specjax.pallas_kernels.decode_step.weights import Plan, Weights

COLD_BYTES = 2**28  # of weights, more than caches on the chip hold
LAYERS = 8  # at most, but at least two
SCALE = 0.02  # of a weight
CUT_ROWS, CUT_SLOTS = 8, 2048  # of the one request for which weights are cut

Run = Callable[[int], Any]


def bench(name: str, sizes: Any, interpret: Any = False) -> Callable[[Any], Run]:
    """As `timing.bench`: `tpu`, its `cut`, or one of the products of `triton`."""
    return {"tpu": _step, "cut": _cut, "triton": _product}[name](sizes, interpret)


def _fewer(plan: Plan) -> Plan:
    """The same with as many layers as it takes for weights to be cold."""
    each = plan.tiles * plan.rows * plan.columns * plan.tile_dtype.itemsize
    return dataclasses.replace(plan, layers=max(2, min(LAYERS, -(-COLD_BYTES // each))))


def _weights(plan: Plan) -> Weights:
    shape, count = (plan.layers * plan.tiles, plan.columns, plan.rows), plan.layers * plan.scales["all"]
    if plan.int8:
        tiles = jax.random.randint(jax.random.key(0), shape, -127, 128, jnp.int8)
    else:
        tiles = (SCALE * jax.random.normal(jax.random.key(0), shape, plan.tile_dtype)).astype(plan.tile_dtype)
    return Weights(
        tiles=tiles,
        scales=jnp.full((count, plan.rows), SCALE / 127, jnp.float32) if plan.int8 else None,
        norms=jnp.ones((plan.layers, 2, plan.hidden), plan.dtype),
        head_norms=jnp.ones((plan.layers, 2, plan.dim), plan.dtype) if plan.qk_norm else None,
        final_norm=jnp.ones((plan.hidden,), plan.dtype),
    )


def _turn(plan: Plan, count: int) -> tuple[jax.Array, jax.Array]:
    """A rotation by 45 degrees."""
    return (jnp.full((count, plan.dim // 2), 0.5**0.5, jnp.float32),) * 2


def _step(sizes: StepSizes, interpret: Any) -> Callable[[StepTiles], Run]:
    plan, s = _fewer(sizes.plan), sizes.attention
    weights, committed = _weights(plan), jnp.full((s.batch,), s.slots // 2, jnp.int32)
    rows, count = _rows(s.batch, s.width, committed), s.batch * s.width
    x = jax.random.normal(jax.random.key(1), (count, plan.hidden), plan.dtype)
    pages = jnp.zeros((plan.layers, s.batch * s.columns, s.groups, s.page, s.dim), plan.dtype)
    table = jnp.arange(s.batch * s.columns, dtype=jnp.int32).reshape(s.batch, s.columns)
    arrays = weights, x, *_turn(plan, count), pages, pages, table, committed, rows

    def make(tiles):
        call = functools.partial(tpu.decode_step, plan, tiles=lambda _: tiles, interpret=interpret)
        program = jax.jit(functools.partial(_steps, call))
        return lambda times: program(times, *arrays)

    return make


def _rows(batch: int, width: int, committed: jax.Array) -> Rows:
    draft = chain(jnp.zeros((batch, width), jnp.int32), jnp.full((batch,), width, jnp.int32))
    return pack(draft, committed, batch * width, width, jnp.ones((batch,), bool))


def _steps(call: Callable, times, weights, x, cos, sin, k_cache, v_cache, table, committed, rows):
    """Each time the rows are what came out before, over the same cache."""

    def once(_, carry):
        x, k_cache, v_cache = carry
        hidden, _, k_cache, v_cache = call(weights, x, cos, sin, k_cache, v_cache, table, committed, rows)
        return hidden, k_cache, v_cache

    return jax.lax.fori_loop(0, times, once, (x, k_cache, v_cache))[0]


def _cut(sizes: Matrices, interpret: Any) -> Callable[[Cut], Run]:
    """A whole step of one request, with the banks that the rule takes for such tiles."""
    own = {field.name: getattr(sizes, field.name) for field in dataclasses.fields(sizes)}

    def make(cut):
        plan = _fewer(Plan(**own, layers=LAYERS, eps=1e-5, qk_norm=False, rows=cut.rows, columns=cut.columns))
        shape, dtype = jax.ShapeDtypeStruct, jnp.dtype(plan.dtype)
        committed = jnp.zeros((1,), jnp.int32)
        cache = shape((plan.layers, 1, plan.groups, CUT_SLOTS, plan.dim), dtype)
        step = tpu.step_of(plan, _rows(1, CUT_ROWS, committed), cache, None, tiles=StepTiles.rule)
        return _step(step.sizes, interpret)(step.tiles)

    return make


def _product(sizes: ProductSizes, interpret: Any) -> Callable[[ProductTiles], Run]:
    plan, count = _fewer(sizes.plan), sizes.count
    matrix, slots = plan.matrices[sizes.matrix], 256
    weights, layers = _weights(plan), plan.layers
    wide = matrix.size_in if matrix.name in ("qkv", "gate_up") else plan.hidden
    x, y = (
        jax.random.normal(jax.random.key(n), (count, size), plan.dtype) for n, size in ((1, wide), (2, matrix.size_in))
    )
    pages = jnp.zeros((layers, 1, plan.groups, slots, plan.dim), plan.dtype)
    where, turn = jnp.arange(count, dtype=jnp.int32), _turn(plan, count)

    def once(step, index, carry, weights, y):
        """Carried on, so that nothing is done at once: the residual stream, or rows with one value of the result."""
        x, k_cache, v_cache = carry
        number = jnp.reshape(index % layers, (1,)).astype(jnp.int32)
        if matrix.name == "qkv":
            made, _, _, k_cache, v_cache = triton.qkv(
                step, number, weights, x, *turn, where, k_cache, v_cache, interpret
            )
        elif matrix.name == "gate_up":
            made = triton.gate_up(step, number, weights, x, interpret)
        else:
            return triton.out(step, matrix.name, number, weights, y, x, interpret), k_cache, v_cache
        return x.at[0, 0].set(made[0, 0]), k_cache, v_cache

    def make(tiles):
        step = triton.Step(plan, count, 1, slots, sizes.nvidia, lambda _: tiles)

        def repeated(times, weights, x, y, pages):
            def body(index, carry):
                return once(step, index, carry, weights, y)

            return jax.lax.fori_loop(0, times, body, (x, pages, pages))[0]

        program = jax.jit(repeated)
        return lambda times: program(times, weights, x, y, pages)

    return make
