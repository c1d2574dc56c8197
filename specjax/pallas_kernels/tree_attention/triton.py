"""Tree attention for NVIDIA GPUs from sm_80 on and AMD gfx942 and gfx950 (Pallas' Triton route).

A program takes some query rows of one group of one request, all heads that share its keys, over one split of the
request's committed slots; split 0 begins with the draft tile, where alone there is a tree mask. The committed part is a
plain loop over blocks of slots whose edges alone look at slot numbers. Splits divide what is live, not what is
allocated, and their partial sums are merged by XLA. Head widths that are no power of two are worked on in pieces that
are, so nothing is padded and nothing copied: queries, keys and pages are read where they lie.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from specjax.array_types import Array, Bool, Float, Int
from specjax.draft import Rows
from specjax.pallas_kernels.tree_attention import reference
from specjax.pallas_kernels.tree_attention.splits import merge_splits
from specjax.pallas_kernels.tree_attention.tiles import MIN_SIDE, Sizes, TritonTiles
from specjax.pallas_kernels.tuning import choose

NEG = reference.NEG
LOG2E = math.log2(math.e)


def tree_attention(
    q, k, v, k_pages, v_pages, table, committed, rows: Rows, *, tiles=None, interpret=False, **options
) -> Array:
    """`reference.tree_attention` on a GPU, with `tiles` and `interpret` as of `attend`."""
    padded = functools.partial(attend, tiles=tiles, interpret=interpret)
    return reference.tree_attention(q, k, v, k_pages, v_pages, table, committed, rows, padded=padded, **options)


def attend(
    q: Float[Array, "b n h f"],
    k: Float[Array, "b j g f"],
    v: Float[Array, "b j g f"],
    seen: Bool[Array, "b n j"],
    k_pages: Float[Array, "p g s f"],
    v_pages: Float[Array, "p g s f"],
    table: Int[Array, "b m"] | None,
    committed: Int[Array, " b"],
    position: Int[Array, "b n"],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    tiles: Callable[[Sizes], TritonTiles] | None = None,
    interpret: bool = False,
) -> Float[Array, "b n h f"]:
    """`reference.attend` on a GPU; the tables may hold anything behind a request's last page.

    `tiles` says what to choose for a call's sizes; by default the device's table, or the rule. `interpret` runs the
    kernel as plain JAX operations.

    Raises:
        NotImplementedError: dtypes or head widths that the kernel does not have.
    """
    shape = _Shape.of(q, k, k_pages, table, scale, window, softcap, tiles)
    flat = [x.reshape(-1, shape.dim) for x in (q, k, v)]
    pages = [x.reshape(-1, shape.dim) for x in (k_pages, v_pages)]
    table = jnp.arange(shape.batch, dtype=jnp.int32) if table is None else table.reshape(-1)
    mask = seen.astype(jnp.int8).reshape(-1)
    out = _call(shape, interpret)(*flat, mask, position.reshape(-1), *pages, table, committed)
    out = out[0] if shape.splits == 1 else merge_splits(*(x.reshape(shape.splits, shape.rows, -1) for x in out))
    return out.astype(q.dtype).reshape(q.shape)


@dataclasses.dataclass(frozen=True)
class _Shape:
    """The static half of a call."""

    batch: int
    width: int
    heads: int
    groups: int
    dim: int
    tile: int
    page: int
    columns: int
    tiles: TritonTiles
    dtype: jnp.dtype
    scale: float
    window: int | None
    softcap: float | None

    @classmethod
    def of(cls, q: Array, k: Array, pages: Array, table: Array | None, scale, window, softcap, tiles) -> "_Shape":
        (batch, width, heads, dim), (_, tile, groups, _) = q.shape, k.shape
        dtype = pages.dtype
        if not (q.dtype == k.dtype == dtype) or dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
            raise NotImplementedError(f"dtypes {q.dtype}, {k.dtype} and a cache of {dtype}")
        if dim % MIN_SIDE or dim > 256:
            raise NotImplementedError(f"heads of width {dim}, of multiples of {MIN_SIDE} up to 256")
        if table is None and pages.shape[0] != batch:
            raise ValueError(f"a cache of one page a request needs {batch} pages here, got {pages.shape[0]}")
        sizes = Sizes.of(q, k, pages, table, window)
        chosen = choose(TritonTiles, sizes) if tiles is None else tiles(sizes)
        if problem := chosen.problem(sizes):
            raise NotImplementedError(problem)
        return cls(
            batch=batch,
            width=width,
            heads=heads,
            groups=groups,
            dim=dim,
            tile=tile,
            page=sizes.page,
            columns=sizes.columns,
            tiles=chosen,
            dtype=dtype,
            scale=scale,
            window=window,
            softcap=softcap,
        )

    @property
    def ratio(self) -> int:
        return self.heads // self.groups

    @property
    def queries(self) -> int:
        """Rows of a group that a program has."""
        return self.tiles.queries

    @property
    def block(self) -> int:
        """Slots worked on at once."""
        return self.tiles.block

    @property
    def splits(self) -> int:
        return self.tiles.splits

    @property
    def rows(self) -> int:
        """Query rows times heads."""
        return self.batch * self.width * self.heads

    @property
    def tile_block(self) -> int:
        """Keys of the draft tile that are worked on at once."""
        return min(self.block, max(MIN_SIDE, pl.next_power_of_2(self.tile)))

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """Start and size of pieces of a head, powers of two, the largest first."""
        most = self.tiles.part
        sizes = [most] * (self.dim // most)
        sizes += [1 << bit for bit in reversed(range(most.bit_length())) if self.dim % most >> bit & 1]
        return [(sum(sizes[:i]), size) for i, size in enumerate(sizes)]

    @property
    def cost(self) -> pl.CostEstimate:
        """For XLA's scheduler: a cache that is half full."""
        slots = self.batch * (self.columns * self.page // 2 + self.tile)
        return pl.CostEstimate(
            flops=4 * slots * self.heads * self.width * self.dim,
            bytes_accessed=2 * slots * self.groups * self.dim * self.dtype.itemsize,
            transcendentals=slots * self.heads * self.width,
        )


@functools.cache
def _call(shape: _Shape, interpret: bool):
    """The `pallas_call` of a shape; of several splits the outputs are float32 partial ones and their log2-sum-exp2."""
    s = shape
    count = s.splits * s.rows
    out = [jax.ShapeDtypeStruct((count, s.dim), s.dtype if s.splits == 1 else jnp.float32)]
    if s.splits > 1:
        out.append(jax.ShapeDtypeStruct((count,), jnp.float32))
    return pl.pallas_call(
        functools.partial(_kernel, shape),
        name="tree_attention",
        out_shape=out,
        grid=(pl.cdiv(s.ratio * s.width, s.queries), s.groups * s.splits, s.batch),
        compiler_params=pltriton.CompilerParams(num_warps=s.tiles.warps, num_stages=s.tiles.stages or None),
        cost_estimate=s.cost,
        interpret=interpret,
    )


def _kernel(
    shape: _Shape,
    # inputs
    q,  # [b * n * h, f]
    k,  # [b * j * g, f]
    v,  # [b * j * g, f]
    mask,  # [b * n * j]
    position,  # [b * n]
    k_pages,  # [p * g * page, f]
    v_pages,  # [p * g * page, f]
    table,  # [b * m]
    committed,  # [b]
    # outputs
    out,  # [splits * b * n * h, f]
    *summed,  # [splits * b * n * h], where there are several splits
):
    s, request = shape, pl.program_id(2)
    split, group = jax.lax.rem(pl.program_id(1), s.splits), jax.lax.div(pl.program_id(1), s.splits)
    # A node's heads lie together, so a group's rows are short runs of the queries as they are.
    packed = pl.program_id(0) * s.queries + jnp.arange(s.queries, dtype=jnp.int32)
    live = packed < s.ratio * s.width
    node = request * s.width + jax.lax.div(packed, s.ratio)
    rows = node * s.heads + group * s.ratio + jax.lax.rem(packed, s.ratio)
    columns = [start + jnp.arange(size, dtype=jnp.int32) for start, size in s.pieces]
    queries = [_load(q, rows, piece, live) for piece in columns]

    def add(carry, keys, values, at, valid, seen):
        """Rows `at` of keys and values, the `valid` ones (None: all), under a mask (None: all seen)."""
        top, total, *sums = carry
        parts = [_dot(s, x, _load(keys, at, piece, valid).T) for x, piece in zip(queries, columns, strict=True)]
        scores = functools.reduce(jnp.add, parts) * (s.scale * (LOG2E if s.softcap is None else 1 / s.softcap))
        if s.softcap is not None:
            scores = jnp.tanh(scores) * (s.softcap * LOG2E)
        if seen is not None:
            scores = jnp.where(seen, scores, NEG)
        new = jnp.maximum(top, jnp.max(scores, axis=1))
        weights, shrink = jnp.exp2(scores - new[:, None]), jnp.exp2(top - new)
        total = total * shrink + jnp.sum(weights, axis=1)
        weights = weights.astype(s.dtype)
        values = [_load(values, at, piece, valid) for piece in columns]
        sums = [x * shrink[:, None] + _dot(s, weights, y) for x, y in zip(sums, values, strict=True)]
        return new, total, *sums

    def add_tile(index, carry):
        keys = index * s.tile_block + jnp.arange(s.tile_block, dtype=jnp.int32)
        valid = keys < s.tile
        at = node[:, None] * s.tile + keys[None, :]
        seen = pltriton.load(mask.at[at], mask=live[:, None] & valid[None, :], other=0) != 0
        return add(carry, k, v, (request * s.tile + keys) * s.groups + group, valid, seen)

    length = committed[request]
    where: Any = None if s.window is None else pltriton.load(position.at[node], mask=live, other=0)

    def add_block(index, carry, masked):
        slots = index * s.block + jnp.arange(s.block, dtype=jnp.int32)
        below = slots < length
        valid = below if masked else None
        if s.page % s.block == 0:
            column = jax.lax.div(index * s.block, s.page)
            page = table[request * s.columns + column]
        else:  # a block spans pages
            column = jax.lax.div(slots, s.page)
            entry = table.at[request * s.columns + column]
            page = pltriton.load(entry, mask=valid, other=0 if masked else None)
        at = (page * s.groups + group) * s.page + slots - column * s.page
        seen = below[None, :] if masked else None
        if masked and s.window is not None:
            seen = seen & (slots[None, :] > where[:, None] - s.window)
        return add(carry, k_pages, v_pages, at, valid, seen)

    # Blocks: the first that a row sees, the first that all see whole, the first not full, the end; and this split's.
    first = whole = jnp.int32(0)
    full, end = jax.lax.div(length, s.block), pl.cdiv(length, s.block)
    if s.window is not None:
        first = jax.lax.div(jnp.maximum(length - s.window + 1, 0), s.block)
        whole = pl.cdiv(jnp.maximum(jnp.max(where) - s.window + 1, 0), s.block)
    share = pl.cdiv(jnp.maximum(end - first, 0), s.splits)
    low = jnp.minimum(first + split * share, end)
    high = jnp.minimum(low + share, end)
    whole = jnp.clip(whole, low, high)
    full = jnp.clip(full, whole, high)

    sums = [jnp.zeros((s.queries, size), jnp.float32) for _, size in s.pieces]
    carry = (jnp.full((s.queries,), NEG, jnp.float32), jnp.zeros((s.queries,), jnp.float32), *sums)
    # No `where`: of the constants 1 and 0 JAX makes an i1, which is no bound of a loop.
    tiles = pl.cdiv(s.tile, s.tile_block) * jnp.maximum(1 - split, 0)
    carry = jax.lax.fori_loop(0, tiles, add_tile, carry)
    if s.window is not None:
        carry = jax.lax.fori_loop(low, whole, functools.partial(add_block, masked=True), carry)
    carry = jax.lax.fori_loop(whole, full, functools.partial(add_block, masked=False), carry)
    top, total, *sums = jax.lax.fori_loop(full, high, functools.partial(add_block, masked=True), carry)

    rows = rows + split * s.rows
    some = total > 0  # a split may have no blocks
    total = jnp.where(some, total, 1.0)
    for piece, x in zip(columns, sums, strict=True):
        at = out.at[rows[:, None], piece[None, :]]
        pltriton.store(at, (x / total[:, None]).astype(out.dtype), mask=live[:, None])
    for ref in summed:
        pltriton.store(ref.at[rows], jnp.where(some, top + jnp.log2(total), NEG), mask=live)


def _load(ref, rows: Array, columns: Array, valid: Array | None) -> Array:
    """A tile; rows that are not valid read as 0, because a weight of 0 does not stop a NaN."""
    at = ref.at[rows[:, None], columns[None, :]]
    return pltriton.load(at) if valid is None else pltriton.load(at, mask=valid[:, None], other=0.0)


def _dot(shape: _Shape, a: Array, b: Array) -> Array:
    precision = jax.lax.Precision.HIGHEST if shape.dtype == jnp.float32 else None
    return jax.lax.dot(a, b, precision=precision, preferred_element_type=jnp.float32)
