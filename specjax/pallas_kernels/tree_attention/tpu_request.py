"""The inside of the TPU kernels that attend: one request's rows over its blocks of cached keys and values.

Keys and values are copied from their pages into one of two VMEM buffers while the other is worked on, across requests
too, and are read once for a whole group of query heads: the queries of a group are the rows of one product. The mask
concerns the draft tile, which comes first and makes the running maximum finite; the committed part is a plain loop
whose last block alone (with a window, also its first ones) looks at slot numbers.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from specjax.array_types import Array
from specjax.draft import WORD_BITS
from specjax.pallas_kernels.tree_attention import reference
from specjax.pallas_kernels.tree_attention.tiles import LANES, Sizes, TpuTiles, up
from specjax.pallas_kernels.tuning import choose

NEG = reference.NEG
MAX_ROWS = 128  # queries of a request
MAX_TILE = 512  # keys beside the cache


@dataclasses.dataclass(frozen=True)
class Shape:
    """The static half of a call; `block` slots are worked on at once, `queries` rows of a group, `keys` of the tile."""

    batch: int
    width: int
    groups: int
    ratio: int
    dim: int
    queries: int
    keys: int
    page: int
    columns: int
    tiles: TpuTiles
    vmem_bytes: int
    dtype: jnp.dtype
    window: int | None
    softcap: float | None

    @classmethod
    def of(cls, q: Array, k: Array, pages: Array, table: Array | None, window, softcap, tiles) -> "Shape":
        """`tiles` makes them from the sizes; None takes a table's or the rule's."""
        (batch, width, heads, dim), (_, keys, groups, _) = q.shape, k.shape
        page, dtype = pages.shape[2], pages.dtype
        if not (q.dtype == k.dtype == dtype) or dtype not in (jnp.bfloat16, jnp.float32):
            raise NotImplementedError(f"dtypes {q.dtype}, {k.dtype} and a cache of {dtype}")
        if width > MAX_ROWS or keys > MAX_TILE:
            raise NotImplementedError(f"{width} rows and {keys} keys of a request, of {MAX_ROWS} and {MAX_TILE}")
        if table is None and pages.shape[0] != batch:
            raise ValueError(f"a cache of one page a request needs {batch} pages here, got {pages.shape[0]}")
        sublanes = 32 // dtype.itemsize
        if page % sublanes:
            raise NotImplementedError(f"pages of {page} slots, of multiples of {sublanes}")
        sizes = Sizes.of(q, k, pages, table, window)
        chosen = choose(TpuTiles, sizes) if tiles is None else tiles(sizes)
        if problem := chosen.problem(sizes):
            raise NotImplementedError(problem)
        return cls(
            batch=batch,
            width=width,
            groups=groups,
            ratio=heads // groups,
            dim=dim,
            queries=up(heads // groups * width, sublanes),
            keys=up(keys, sublanes),
            page=page,
            columns=1 if table is None else table.shape[1],
            tiles=chosen,
            vmem_bytes=chosen.vmem_bytes(sizes),
            dtype=dtype,
            window=window,
            softcap=softcap,
        )

    @property
    def words(self) -> int:
        return -(-self.keys // WORD_BITS)

    @property
    def block(self) -> int:
        return self.tiles.block

    @property
    def piece(self) -> int:
        """Slots of one copy."""
        return self.tiles.piece

    @property
    def unrolled(self) -> int:
        """Groups whose work stands side by side; the rest is a loop."""
        return self.tiles.unroll

    @property
    def cost(self) -> pl.CostEstimate:
        """For XLA's scheduler: a cache that is half full."""
        slots = self.batch * (self.columns * self.page // 2 + self.keys)
        heads = self.groups * self.ratio * self.width
        return pl.CostEstimate(
            flops=4 * slots * heads * self.dim,
            bytes_accessed=2 * slots * self.groups * self.dim * self.dtype.itemsize,
            transcendentals=slots * heads,
        )


def bounds_of(shape: Shape, committed: Array) -> Array:
    """`[4, b + 1]` block numbers: first that a row sees, first that all see whole, first not full, end.

    One empty request more, so that the last one has a next.
    """
    first = whole = jnp.zeros_like(committed)
    if shape.window is not None:
        first = jnp.maximum(committed - shape.window + 1, 0) // shape.block
        # No row is deeper than its request is wide, so all of them see what the deepest would.
        whole = -(-jnp.maximum(committed + shape.width - shape.window, 0) // shape.block)
    end = -(-committed // shape.block)
    bounds = jnp.stack([first, jnp.minimum(whole, end), committed // shape.block, end])
    return jnp.pad(bounds, ((0, 0), (0, 1)))


class Scratch(NamedTuple):
    """What attending needs beside its operands; `turn` starts as (0, -1).

    Attributes:
        keys: `[2, g, block, f]`.
        values: the same.
        top: `[g, queries, 128]`, all lanes alike.
        total: `[g, queries, 128]`, the sum over lanes counts.
        acc: `[g, queries, f]`.
        turn: buffer of the next block, and the request whose first block is on its way already.
        arrived: a semaphore a buffer.
    """

    keys: Any
    values: Any
    top: Any
    total: Any
    acc: Any
    turn: Any
    arrived: Any

    @classmethod
    def of(cls, s: Shape) -> "Scratch":
        """The scratch shapes of a `pallas_call`."""
        return cls(
            pltpu.VMEM((2, s.groups, s.block, s.dim), s.dtype),
            pltpu.VMEM((2, s.groups, s.block, s.dim), s.dtype),
            pltpu.VMEM((s.groups, s.queries, LANES), jnp.float32),
            pltpu.VMEM((s.groups, s.queries, LANES), jnp.float32),
            pltpu.VMEM((s.groups, s.queries, s.dim), jnp.float32),
            pltpu.SMEM((2,), jnp.int32),
            pltpu.SemaphoreType.DMA((2,)),
        )


def attend_request(
    shape: Shape,
    request,
    bounds,  # [4, b + 1]
    committed,  # [b]
    table,  # [b * m]
    q,  # [g, queries, f]
    k,  # [g, keys, f]
    v,  # [g, keys, f]
    meta,  # [queries, 1 + words]: position, words
    k_pages,  # [p, g, page, f], HBM
    v_pages,  # [p, g, page, f], HBM
    scratch: Scratch,
    finish: Callable,
) -> None:
    """Attend with the rows of one request; `finish(g, out)` takes the `[queries, f]` outputs of each group."""
    s = shape
    k_buffer, v_buffer, top, total, acc, turn, arrived = scratch
    first, whole, full, end = (bounds[i, request] for i in range(4))
    length = committed[request]

    def copies(request, index, slot, act):
        """Start, or wait for, the copies of a block into buffer `slot`; only pieces with committed slots."""
        count = jnp.minimum(pl.cdiv(committed[request] - index * s.block, s.piece), s.block // s.piece)
        # A block is several pages, or a page several blocks: no division in the loop either way.
        column, offset = index * (s.block // s.page), 0
        if s.page > s.block:
            column = jax.lax.div(index, jnp.int32(s.page // s.block))
            offset = pl.multiple_of((index - column * (s.page // s.block)) * s.block, s.block)
        column += request * s.columns

        def piece(i, _):
            page, source = (
                (table[column + i], pl.ds(0, s.page)) if s.piece == s.page else (table[column], at(i, offset))
            )
            for pages, buffer in ((k_pages, k_buffer), (v_pages, v_buffer)):
                act(pltpu.make_async_copy(pages.at[page, :, source], buffer.at[slot, :, at(i)], arrived.at[slot]))

        jax.lax.fori_loop(0, count, piece, None)

    def at(i, offset=0):
        return pl.ds(pl.multiple_of(offset + i * s.piece, s.piece), s.piece)

    start = functools.partial(copies, act=lambda copy: copy.start())

    def wait(index, slot, whole):
        if not whole:
            copies(request, index, slot, lambda copy: copy.wait())
            return
        for buffer in (k_buffer, v_buffer):  # at once, by its size
            pltpu.make_async_copy(buffer.at[slot], buffer.at[slot], arrived.at[slot]).wait()

    def start_next(slot):
        """Start the next request's first block, if it has one."""
        following = request + 1

        @pl.when(bounds[0, following] < bounds[3, following])
        def _():
            start(following, bounds[0, following], slot)
            turn[1] = following

    @pl.when((first < end) & (turn[1] != request))
    def _():
        start(request, first, turn[0])

    @pl.when(first >= end)
    def _():
        start_next(turn[0])

    draft_seen = _unpack_words(meta, s)
    _each_group(s, lambda g, _: _start_group(s, g, q, k, v, draft_seen, top, total, acc))

    def add_block(index, _, masked):
        slot = turn[0]

        @pl.when(index + 1 < end)
        def _():
            start(request, index + 1, 1 - slot)

        @pl.when(index + 1 >= end)
        def _():
            start_next(1 - slot)

        wait(index, slot, whole=not masked)
        turn[0] = 1 - slot
        seen = below = None
        if masked:
            number = index * s.block
            seen = number + jax.lax.broadcasted_iota(jnp.int32, (s.queries, s.block), 1) < length
            if s.window is not None:
                slots = number + jax.lax.broadcasted_iota(jnp.int32, (s.queries, s.block), 1)
                seen = seen & (slots > meta[:, 0:1] - s.window)
            below = number + jax.lax.broadcasted_iota(jnp.int32, (s.block, s.dim), 0) < length

        def score(g):
            scores = _scores(s, q[g], k_buffer[slot, g])
            return jnp.where(seen, scores, NEG) if masked else scores

        def add(g, scores):
            values = v_buffer[slot, g]
            # A weight of 0 does not stop a NaN.
            values = jnp.where(below, values, 0).astype(s.dtype) if masked else values
            _add_group(s, g, scores, values, top, total, acc)

        _each_group(s, add, score)

    if s.window is not None:
        jax.lax.fori_loop(first, whole, functools.partial(add_block, masked=True), None)
    jax.lax.fori_loop(whole, full, functools.partial(add_block, masked=False), None)
    jax.lax.fori_loop(jnp.maximum(whole, full), end, functools.partial(add_block, masked=True), None)

    def finished(g, _):
        finish(g, acc[g] / jnp.sum(total[g], axis=1, keepdims=True))

    _each_group(s, finished)


def _each_group(shape: Shape, body: Callable, ahead: Callable = lambda g: None) -> None:
    """`body(g, ahead(g))` for every group; `ahead` of the next ones is computed before, to fill latencies."""
    inner = shape.unrolled

    def several(i, _):
        groups = [i * inner + j for j in range(inner)]
        made = [ahead(g) for g in groups[: shape.tiles.ahead]]
        for j, g in enumerate(groups):
            made += [ahead(g) for g in groups[j + shape.tiles.ahead : j + shape.tiles.ahead + 1]]
            body(g, made[j])

    if inner == shape.groups:
        several(0, None)
    else:
        jax.lax.fori_loop(0, shape.groups // inner, several, None)


def _unpack_words(meta, shape: Shape) -> Array:
    """Which keys of the tile each query sees, `[queries, keys]`, from signed words (unsigned vectors do not lower)."""
    key = jax.lax.broadcasted_iota(jnp.int32, (shape.queries, shape.keys), 1)
    word = jnp.zeros_like(key)
    for i in range(shape.words):
        word = jnp.where(key // WORD_BITS == i, meta[:, 1 + i : 2 + i], word)
    return jax.lax.shift_right_logical(word, key % WORD_BITS) & 1 == 1


def _dot(shape: Shape, a: Array, b: Array, contract: int) -> Array:
    """`a @ b` (or `a @ b.T` for `contract` 1) with sums in float32."""
    precision = jax.lax.Precision.HIGHEST if shape.dtype == jnp.float32 else None
    dims = (((1,), (contract,)), ((), ()))
    return jax.lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def _scores(shape: Shape, q: Array, k: Array) -> Array:
    s = _dot(shape, q, k, 1)
    return s if shape.softcap is None else shape.softcap * jnp.tanh(s / shape.softcap)


def _start_group(shape: Shape, g, q, k, v, seen: Array, top, total, acc) -> None:
    """The draft tile: every query sees some key of it, so the maximum is finite from here on."""
    scores = jnp.where(seen, _scores(shape, q[g], k[g]), NEG)
    best = jnp.max(scores, axis=1, keepdims=True)
    weights = jnp.exp(scores - best)
    lane = jax.lax.broadcasted_iota(jnp.int32, (shape.queries, LANES), 1)
    top[g] = jnp.broadcast_to(best, (shape.queries, LANES))
    total[g] = jnp.where(lane == 0, jnp.sum(weights, axis=1, keepdims=True), 0.0)
    acc[g] = _dot(shape, weights.astype(shape.dtype), v[g], 0)


def _add_group(shape: Shape, g, scores: Array, values: Array, top, total, acc) -> None:
    """One block into the running maximum, sum (lane by lane) and output."""
    old = top[g]
    new = jnp.maximum(old, jnp.max(scores, axis=1, keepdims=True))
    weights = jnp.exp(scores - _lanes(new, shape.block))
    shrink = jnp.exp(old - new)
    total[g] = total[g] * shrink + sum(weights[:, i : i + LANES] for i in range(0, shape.block, LANES))
    acc[g] = acc[g] * _lanes(shrink, shape.dim) + _dot(shape, weights.astype(shape.dtype), values, 0)
    top[g] = new


def _lanes(x: Array, count: int) -> Array:
    """`[m, 128]` of equal lanes as `[m, count]`."""
    return jnp.tile(x, (1, -(-count // LANES)))[:, :count]
