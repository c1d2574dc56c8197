"""The whole decoder step for NVIDIA GPUs from sm_80 on and AMD gfx942 and gfx950 (Pallas' Triton route), in blocks.

A GPU has no cheap barrier over its whole grid, so a layer is cut where all of a row must be there before anything can
go on, into five kernels:

1. `decode_qkv`: RMSNorm, product, head norms, rotation, new rows put into the cache
2. `tree_attention`: its own Triton kernel
3. `decode_out`: product, residual
4. `decode_gate_up`: RMSNorm, both products, activation
5. `decode_out` again: the MLP's second product, residual

The norm costs no kernel: each program adds up the squares of the rows while it streams them, and divides its sums at
the end. A program owns some columns of the output for all rows and streams their weights once, over all inputs; there
is no split over inputs, so sums have a fixed order and nothing is merged. Columns that an epilogue needs together (the
halves of a head for its rotation, gate and up) are two pieces of one program. Weights are those of `weights.py`: the
tiles of an output tile lie behind each other, so they are one matrix, `[inputs, outputs]`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from specjax.array_types import Array
from specjax.draft import Rows
from specjax.pallas_kernels import gpu
from specjax.pallas_kernels.decode_step import reference
from specjax.pallas_kernels.decode_step.tiles import MIN_SIDE, ProductSizes, ProductTiles
from specjax.pallas_kernels.decode_step.triton_product import Block, Piece
from specjax.pallas_kernels.decode_step.weights import Plan, Weights
from specjax.pallas_kernels.tree_attention import triton as attention
from specjax.pallas_kernels.tuning import choose

MAX_ROWS = 128


def decode_step(
    plan: Plan,
    weights: Weights,
    x: Array,
    cos: Array,
    sin: Array,
    k_cache: Array,
    v_cache: Array,
    table: Array | None,
    committed: Array,
    rows: Rows,
    *,
    taps: tuple[int, ...] = (),
    tiles: Callable[[ProductSizes], ProductTiles] | None = None,
    interpret: bool = False,
) -> tuple[Array, Array | None, Array, Array]:
    """`reference.decode_step` on a GPU; the cache is updated in place where it is donated.

    Rows that are not valid are worked on as zeros, so nothing that they hold reaches another row. `tiles` is as of
    `Step`.

    Raises:
        NotImplementedError: more rows, other dtypes or head widths than the kernels have.
    """
    step = step_of(plan, weights, x, k_cache, rows, tiles)
    own = jnp.arange(rows.batch, dtype=jnp.int32)[:, None] if table is None else table
    slots = _slots(step, rows, own)
    x = jnp.where(rows.valid[:, None], x, 0)
    found = [x] * (0 in taps)
    for index in range(plan.layers):
        number = jnp.full((1,), index, jnp.int32)
        x, k_cache, v_cache = _layer(
            step, interpret, number, weights, x, cos, sin, k_cache, v_cache, own, slots, committed, rows
        )
        found += [x] * (index + 1 in taps)
    hidden = reference.norm(x, weights.final_norm, plan.eps)
    return hidden, jnp.concatenate(found, axis=-1) if taps else None, k_cache, v_cache


def step_of(plan: Plan, weights: Weights, x: Array, k_cache: Array, rows: Rows, tiles=None) -> "Step":
    """The static half of a call.

    Raises:
        NotImplementedError: as `decode_step`.
    """
    kinds = {str(a.dtype) for a in (x, k_cache, weights.tiles)}
    if kinds != {plan.dtype} or plan.dtype not in ("bfloat16", "float32"):
        raise NotImplementedError(f"{' and '.join(sorted(kinds))} in a plan for {plan.dtype}, of bfloat16 and float32")
    if rows.count > MAX_ROWS:
        raise NotImplementedError(f"{rows.count} rows, of {MAX_ROWS}")
    if plan.dim % MIN_SIDE or plan.dim > 256:
        raise NotImplementedError(f"heads of width {plan.dim}, of multiples of {MIN_SIDE} up to 256")
    step = Step(plan, rows.count, k_cache.shape[1], k_cache.shape[3], gpu.capability() is not None, tiles)
    if step.cached >= 2**30:
        raise NotImplementedError(f"a cache of {step.cached} slots and heads, which 32-bit indices do not reach twice")
    return step


@dataclasses.dataclass(frozen=True)
class Step:
    """The static half of a call.

    Attributes:
        plan: the decoder.
        rows: packed rows.
        pages: of a layer's cache.
        page: slots of each.
        nvidia: or AMD.
        tiles: says what a product chooses for its sizes; None takes the device's table, or the rule.
    """

    plan: Plan
    rows: int
    pages: int
    page: int
    nvidia: bool
    tiles: Callable[[ProductSizes], ProductTiles] | None = None

    @property
    def dtype(self) -> jnp.dtype:
        return jnp.dtype(self.plan.dtype)

    @property
    def layer_slots(self) -> int:
        """Slots of all heads of a layer: rows of the cache as the kernel writes it."""
        return self.pages * self.plan.groups * self.page

    @property
    def cached(self) -> int:
        return self.plan.layers * self.layer_slots

    @property
    def half(self) -> int:
        return self.plan.dim // 2

    def block(self, matrix: str) -> Block:
        """What a program of a product works on."""
        sizes = ProductSizes(self.plan, matrix, self.rows, self.nvidia)
        chosen = choose(ProductTiles, sizes) if self.tiles is None else self.tiles(sizes)
        if problem := chosen.problem(sizes):
            raise NotImplementedError(problem)
        return Block.of(sizes, chosen)

    def call(self, kernel: Any, name: str, programs: int, block: Block, matrix: str, interpret: bool, **options: Any):
        """A `pallas_call` that streams a matrix."""
        found = self.plan.matrices[matrix]
        size = found.size_in * found.size_out * (2 if matrix == "gate_up" else 1)
        return pl.pallas_call(
            functools.partial(kernel, self, block, matrix),
            name=name,
            grid=(programs,),
            compiler_params=pltriton.CompilerParams(num_warps=block.warps, num_stages=block.stages),
            cost_estimate=pl.CostEstimate(
                flops=2 * size * self.rows,
                bytes_accessed=(size + self.rows * (found.size_in + found.size_out)) * self.dtype.itemsize,
                transcendentals=self.rows * found.size_out if matrix == "gate_up" else 0,
            ),
            interpret=interpret,
            **options,
        )

    def like(self, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, self.dtype)


def _slots(step: Step, rows: Rows, own: Array) -> Array:
    """Where each row's key goes among the slots of a layer, in its first head; behind all of them: nowhere."""
    column = rows.slots // step.page
    page = own[rows.request, jnp.minimum(column, own.shape[1] - 1)]
    stored = rows.valid & (column < own.shape[1]) & (page >= 0) & (page < step.pages)
    at = page * (step.plan.groups * step.page) + rows.slots % step.page
    return jnp.where(stored, at, step.cached).astype(jnp.int32)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _layer(
    step: Step, interpret: bool, number, weights: Weights, x, cos, sin, k_cache, v_cache, own, slots, committed, rows
):
    """One layer, whose number is a value, so that all layers are one trace and each block is compiled once."""
    plan = step.plan
    q, k, v, k_cache, v_cache = qkv(step, number, weights, x, cos, sin, slots, k_cache, v_cache, interpret)
    q, k, v = (y.reshape(step.rows, -1, plan.dim) for y in (q, k, v))
    keys, values = (c.reshape(-1, *c.shape[2:]) for c in (k_cache, v_cache))
    table = own + number * step.pages
    options = {"scale": plan.dim**-0.5, "interpret": interpret}
    y = attention.tree_attention(q, k, v, keys, values, table, committed, rows, **options)
    x = out(step, "out", number, weights, y.reshape(step.rows, -1), x, interpret)
    x = out(step, "down", number, weights, gate_up(step, number, weights, x, interpret), x, interpret)
    return x, k_cache, v_cache


def qkv(step: Step, number, weights: Weights, x, cos, sin, slots, k_cache, v_cache, interpret=False):
    """Queries, keys and values of normed rows, rotated, and the cache with keys and values in it."""
    plan, block = step.plan, step.block("qkv")
    flat = [c.reshape(-1, plan.dim) for c in (k_cache, v_cache)]
    norms = [] if weights.head_norms is None else [weights.head_norms.reshape(-1, plan.dim)]
    inputs = [number, x, weights.norms.reshape(-1, plan.hidden), _flat(weights), cos, sin, slots, *norms]
    sizes = plan.heads, plan.groups, plan.groups
    made = step.call(
        _qkv,
        "decode_qkv",
        sum(sizes) * pl.cdiv(step.half, block.piece),
        block,
        "qkv",
        interpret,
        out_shape=[step.like(step.rows, n * plan.dim) for n in sizes] + [step.like(*c.shape) for c in flat],
        input_output_aliases={len(inputs): 3, len(inputs) + 1: 4},
    )(*inputs, *flat)
    return *made[:3], made[3].reshape(k_cache.shape), made[4].reshape(v_cache.shape)


def out(step: Step, matrix: str, number, weights: Weights, y, x, interpret=False):
    """The residual stream `x` and the product of `y` with matrix `out` or `down`."""
    size = step.plan.hidden
    block = step.block(matrix)
    return step.call(
        _out,
        "decode_out",
        pl.cdiv(size, block.piece),
        block,
        matrix,
        interpret,
        out_shape=step.like(*x.shape),
    )(number, y, _flat(weights), x)


def gate_up(step: Step, number, weights: Weights, x, interpret=False):
    """The activations of the MLP of normed rows."""
    size = step.plan.intermediate
    block = step.block("gate_up")
    return step.call(
        _gate_up,
        "decode_gate_up",
        pl.cdiv(size, block.piece),
        block,
        "gate_up",
        interpret,
        out_shape=step.like(step.rows, size),
    )(number, x, weights.norms.reshape(-1, step.plan.hidden), _flat(weights))


def _flat(weights: Weights) -> Array:
    """The tiles behind each other: inputs of an output tile are consecutive rows."""
    return weights.tiles.reshape(-1, weights.tiles.shape[2])


def _qkv(
    step: Step,
    block: Block,
    name: str,
    # inputs
    layer,  # [1]
    x,  # [N, d]
    norms,  # [2 l, d]
    tiles,  # [T * i, o]
    cos,  # [N, f / 2]
    sin,  # [N, f / 2]
    slots,  # [N]
    *rest,  # head norms [2 l, f] where there are some, the cache as it was, twice; and the outputs:
    # q [N, h f], k [N, g f], v [N, g f], keys [l * p * g * s, f], values
):
    plan, half = step.plan, step.half
    head_norms, (*_, q, k, v, keys, values) = rest[0], rest
    share = pl.cdiv(half, block.piece)
    head, part = jax.lax.div(pl.program_id(0), share), jax.lax.rem(pl.program_id(0), share)
    lanes = part * block.piece + jnp.arange(block.piece, dtype=jnp.int32)
    inside = lanes < half
    whole, number = half % block.piece == 0, layer[0]
    pieces = []
    for start in (0, half):
        first = head * plan.dim + start
        at = first + part * block.piece if whole else None
        pieces.append(Piece.of(plan, name, number, first + lanes, at, live=None if whole else inside))
    sums, rows, live = block.stream(x, tiles, pieces, norms, 2 * number)
    low, high = (y.astype(step.dtype).astype(jnp.float32) for y in sums)
    turned = head < plan.heads + plan.groups  # values are neither normed nor rotated
    if plan.qk_norm:
        scale = jax.lax.rsqrt(jnp.sum(low * low + high * high, axis=1) / plan.dim + plan.eps)[:, None]
        row = 2 * number + jnp.minimum(jax.lax.div(head, plan.heads), 1)
        normed = []
        for y, start in ((low, 0), (high, half)):
            weight = pltriton.load(head_norms.at[row, start + lanes], mask=inside, other=0.0).astype(jnp.float32)
            normed.append((y * scale * weight[None, :]).astype(step.dtype).astype(jnp.float32))
        low, high = (jnp.where(turned, y, raw) for y, raw in zip(normed, (low, high), strict=True))
    at, valid = (rows[:, None], lanes[None, :]), live[:, None] & inside[None, :]
    c, s = (pltriton.load(angle.at[at], mask=valid, other=0.0) for angle in (cos, sin))
    rotated = low * c - high * s, high * c + low * s
    low, high = (jnp.where(turned, y, raw).astype(step.dtype) for y, raw in zip(rotated, (low, high), strict=True))

    slot = pltriton.load(slots.at[rows], mask=live, other=step.cached)
    stored = valid & (slot < step.layer_slots)[:, None]
    first = 0
    for made, cache, count in ((q, None, plan.heads), (k, keys, plan.groups), (v, values, plan.groups)):
        group = head - first
        mine = (group >= 0) & (group < count)
        for y, start in ((low, 0), (high, half)):
            column = start + lanes
            pltriton.store(made.at[rows[:, None], (group * plan.dim + column)[None, :]], y, mask=valid & mine)
            if cache is not None:
                row = slot + number * step.layer_slots + group * step.page
                pltriton.store(cache.at[row[:, None], column[None, :]], y, mask=stored & mine)
        first += count


def _out(
    step: Step,
    block: Block,
    name: str,
    # inputs
    layer,  # [1]
    y,  # [N, i]
    tiles,  # [T * i, o]
    x,  # [N, d]
    # outputs
    made,  # [N, d]
):
    first = pl.program_id(0) * block.piece
    columns = first + jnp.arange(block.piece, dtype=jnp.int32)
    piece = Piece.of(step.plan, name, layer[0], columns, first)
    (total,), rows, live = block.stream(y, tiles, [piece])
    at, valid = (rows[:, None], columns[None, :]), live[:, None] & (columns < step.plan.hidden)[None, :]
    stream = pltriton.load(x.at[at], mask=valid, other=0.0).astype(jnp.float32)
    total = total.astype(step.dtype).astype(jnp.float32)
    pltriton.store(made.at[at], (stream + total).astype(step.dtype), mask=valid)


def _gate_up(
    step: Step,
    block: Block,
    name: str,
    # inputs
    layer,  # [1]
    x,  # [N, d]
    norms,  # [2 l, d]
    tiles,  # [T * i, o]
    # outputs
    made,  # [N, i]
):
    first, number = pl.program_id(0) * block.piece, layer[0]
    columns = first + jnp.arange(block.piece, dtype=jnp.int32)
    pieces = [Piece.of(step.plan, name, number, columns, first, turn) for turn in range(2)]
    sums, rows, live = block.stream(x, tiles, pieces, norms, 2 * number + 1)
    gate, up = (y.astype(step.dtype).astype(jnp.float32) for y in sums)
    active = (gate * jax.lax.logistic(gate)).astype(step.dtype).astype(jnp.float32)
    valid = live[:, None] & (columns < step.plan.intermediate)[None, :]
    pltriton.store(made.at[rows[:, None], columns[None, :]], (active * up).astype(step.dtype), mask=valid)
