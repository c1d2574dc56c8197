"""Tree attention for Hopper and Blackwell GPUs (Mosaic GPU): keys and values stream into shared memory by TMA.

A block of threads (one warpgroup) takes 64 packed query rows of a group on Hopper, 128 on Blackwell, and one split of
the request's committed slots; split 0 begins with the draft tile, where alone there is a tree mask. A ring of buffers
keeps copies in flight while one block of keys is worked on by wgmma or tcgen05. Scores and sums are in float32, the
weights pass through shared memory (Blackwell: its tensor memory), and partial sums of splits are merged by XLA.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from specjax.array_types import Array, Bool, Float, Int
from specjax.draft import Rows
from specjax.pallas_kernels import gpu
from specjax.pallas_kernels.tree_attention import reference
from specjax.pallas_kernels.tree_attention.splits import merge_splits
from specjax.pallas_kernels.tree_attention.tiles import BLOCK, MosaicTiles, Sizes, rows_of
from specjax.pallas_kernels.tuning import choose

NEG = reference.NEG
LOG2E = math.log2(math.e)


def tree_attention(
    q, k, v, k_pages, v_pages, table, committed, rows: Rows, *, tiles=None, capability=None, interpret=False, **options
) -> Array:
    """`reference.tree_attention` on a GPU, with `tiles`, `capability` and `interpret` as of `attend`."""
    padded = functools.partial(attend, tiles=tiles, capability=capability, interpret=interpret)
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
    tiles: Callable[[Sizes], MosaicTiles] | None = None,
    capability: int | None = None,
    interpret: bool | plgpu.InterpretGPUParams = False,
) -> Float[Array, "b n h f"]:
    """`reference.attend` on a GPU; the tables may hold anything behind a request's last page.

    `tiles` says what to choose for a call's sizes; by default the device's table, or the rule. `capability` names the
    GPU (90, 100), by default the one around the trace. `interpret` simulates the kernel, its copies and barriers.

    Raises:
        NotImplementedError: GPUs, dtypes, head widths or page sizes that the kernel does not have.
    """
    capability = gpu.capability() if capability is None else capability
    shape = _Shape.of(q, k, k_pages, table, scale, window, softcap, tiles, capability)
    if interpret is True:
        interpret = plgpu.InterpretGPUParams()
    table = jnp.arange(shape.batch, dtype=jnp.int32) if table is None else table.reshape(-1)
    packed = _pack(q, k, v, seen, position, shape)
    out, summed = _call(shape, interpret)(*packed, k_pages, v_pages, table, committed)
    out = out[0] if shape.splits == 1 else merge_splits(out, summed[..., None])
    out = out[:, :, : shape.ratio * shape.width].astype(q.dtype)
    out = out.reshape(shape.batch, shape.groups, shape.width, shape.ratio, shape.dim)
    return out.transpose(0, 2, 1, 3, 4).reshape(q.shape)


@dataclasses.dataclass(frozen=True)
class _Shape:
    """The static half of a call: a block of threads has `rows` query rows of a group."""

    batch: int
    width: int
    groups: int
    ratio: int
    dim: int
    tile: int
    page: int
    columns: int
    tiles: MosaicTiles
    rows: int
    dtype: jnp.dtype
    scale: float
    window: int | None
    softcap: float | None

    @classmethod
    def of(cls, q, k, pages, table, scale, window, softcap, tiles, capability) -> "_Shape":
        (batch, width, _, dim), (_, tile, groups, _) = q.shape, k.shape
        page, dtype = pages.shape[2], pages.dtype
        if capability not in (90, 100, 103):
            raise NotImplementedError(f"compute capability {capability}, of 90, 100 and 103")
        if not (q.dtype == k.dtype == dtype) or dtype not in (jnp.bfloat16, jnp.float16):
            raise NotImplementedError(f"dtypes {q.dtype}, {k.dtype} and a cache of {dtype}")
        most = 128 if capability == 90 else 256  # whose threads keep their sums in registers
        if dim % 16 or dim > most:
            raise NotImplementedError(f"heads of width {dim}, of multiples of 16 up to {most}")
        if page % BLOCK and (page < 16 or BLOCK % page):
            raise NotImplementedError(f"pages of {page} slots, of 16, 32 and multiples of {BLOCK}")
        if table is None and pages.shape[0] != batch:
            raise ValueError(f"a cache of one page a request needs {batch} pages here, got {pages.shape[0]}")
        sizes = Sizes.of(q, k, pages, table, window, capability=capability)
        chosen = choose(MosaicTiles, sizes) if tiles is None else tiles(sizes)
        if problem := chosen.problem(sizes):
            raise NotImplementedError(problem)
        return cls(
            batch=batch,
            width=width,
            groups=groups,
            ratio=sizes.ratio,
            dim=dim,
            tile=tile,
            page=page,
            columns=sizes.columns,
            tiles=chosen,
            rows=rows_of(sizes),
            dtype=dtype,
            scale=scale,
            window=window,
            softcap=softcap,
        )

    @property
    def row_tiles(self) -> int:
        return pl.cdiv(self.ratio * self.width, self.rows)

    @property
    def tile_blocks(self) -> int:
        return pl.cdiv(self.tile, self.block)

    @property
    def piece(self) -> int:
        """Slots of one copy: a block, or a smaller page."""
        return min(self.page, self.block)

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """Start and size of pieces of a head whose sums pass through registers one after another."""
        return [(start, min(64, self.dim - start)) for start in range(0, self.dim, 64)]

    @property
    def block(self) -> int:
        """Slots worked on at once."""
        return self.tiles.block

    @property
    def splits(self) -> int:
        return self.tiles.splits

    @property
    def stages(self) -> int:
        """Blocks in the ring."""
        return self.tiles.stages

    @property
    def blackwell(self) -> bool:
        return self.rows == 128


def _pack(q: Array, k: Array, v: Array, seen: Array, position: Array, shape: _Shape) -> tuple[Array, ...]:
    """Queries `[b, g, n * r, f]`, tile `[b, g, j, f]` twice, mask `[b, n * r, j]`, positions `[b, n * r]`; padded."""
    s = shape
    q = q.reshape(s.batch, s.width, s.groups, s.ratio, s.dim).transpose(0, 2, 1, 3, 4)
    q = q.reshape(s.batch, s.groups, s.width * s.ratio, s.dim)
    rows, keys = s.row_tiles * s.rows - q.shape[2], s.tile_blocks * s.block - s.tile
    seen, position = (jnp.repeat(x.astype(jnp.int32), s.ratio, axis=1) for x in (seen, position))
    # A padding row sees the first key, so that its softmax is finite.
    seen = jnp.pad(jnp.pad(seen, ((0, 0), (0, 0), (0, keys))), ((0, 0), (0, rows), (0, 0)), constant_values=1)
    k, v = (jnp.pad(x.transpose(0, 2, 1, 3), ((0, 0), (0, 0), (0, keys), (0, 0))) for x in (k, v))
    return jnp.pad(q, ((0, 0), (0, 0), (0, rows), (0, 0))), k, v, seen, jnp.pad(position, ((0, 0), (0, rows)))


@functools.cache
def _call(shape: _Shape, interpret: bool | plgpu.InterpretGPUParams):
    """The kernel of a shape; its outputs are those of each split, normalised, and their log2-sum-exp2."""
    s = shape
    packed = (s.splits, s.batch, s.groups, s.row_tiles * s.rows)

    # One swizzle for all: wgmma wants that of both sides to be the same.
    swizzle = plgpu.find_swizzle(math.gcd(s.dim, s.block) * s.dtype.itemsize * 8)
    transforms = (plgpu.TilingTransform((8, swizzle // s.dtype.itemsize)), plgpu.SwizzleTransform(swizzle))

    def shared(*dims: int):
        return plgpu.SMEM(dims, s.dtype, transforms=transforms)

    scratch = {
        "q_shared": shared(s.rows, s.dim),
        "k_ring": shared(s.stages, s.block, s.dim),
        "v_ring": shared(s.stages, s.block, s.dim),
        "q_arrived": plgpu.Barrier(),
        "arrived": plgpu.Barrier(num_arrivals=2 * (s.block // s.piece), num_barriers=s.stages),
    }
    if s.blackwell:
        scratch |= {
            "weights": plgpu.TMEM((s.rows, s.block), s.dtype, packed=True),
            "scores_memory": plgpu.TMEM((s.rows, s.block), jnp.float32),
            "sums_memory": plgpu.TMEM((s.rows, s.dim), jnp.float32),
            "done": plgpu.Barrier(orders_tensor_core=True),
        }
    else:
        scratch["weights"] = shared(s.rows, s.block)
    return plgpu.kernel(
        functools.partial(_kernel, shape),
        out_type=[
            jax.ShapeDtypeStruct((*packed, s.dim), s.dtype if s.splits == 1 else jnp.float32),
            jax.ShapeDtypeStruct(packed, jnp.float32),
        ],
        scratch_types=scratch,
        grid=(s.row_tiles, s.groups * s.splits, s.batch),
        grid_names=("rows", "groups", "requests"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )


def _kernel(
    shape: _Shape,
    # inputs
    q,  # [b, g, n * r, f]
    k,  # [b, g, j, f]
    v,  # [b, g, j, f]
    mask,  # [b, n * r, j]
    position,  # [b, n * r]
    k_pages,  # [p, g, page, f]
    v_pages,  # [p, g, page, f]
    table,  # [b * m]
    committed,  # [b]
    # outputs
    out,  # [splits, b, g, n * r, f]
    summed,  # [splits, b, g, n * r]
    # scratch
    q_shared,  # [rows, f]
    k_ring,  # [stages, block, f]
    v_ring,  # [stages, block, f]
    q_arrived,  # [1]
    arrived,  # [stages]
    weights,  # [rows, block], shared or of the tensor cores
    scores_memory: Any = None,  # [rows, block], of the tensor cores
    sums_memory: Any = None,  # [rows, f]
    done: Any = None,  # [1]
):
    s, request = shape, jax.lax.axis_index("requests")
    split, group = (f(jax.lax.axis_index("groups"), s.splits) for f in (jax.lax.rem, jax.lax.div))
    rows = pl.ds(jax.lax.axis_index("rows") * s.rows, s.rows)
    layout = plgpu.Layout.TCGEN05 if s.blackwell else plgpu.Layout.WGMMA
    plgpu.copy_gmem_to_smem(q.at[request, group, rows], q_shared, q_arrived)

    # Blocks of slots: the first that a row sees, the first that all see whole, the first not full, the end; and this
    # split's share. A step is a block of the draft tile or of those.
    length = committed[request]
    first = whole = jnp.int32(0)
    full, end = jax.lax.div(length, s.block), pl.cdiv(length, s.block)
    if s.window is not None:
        where = plgpu.load(position.at[request, rows], layout=layout.reduce(1), optimized=False)
        first = jax.lax.div(jnp.maximum(length - s.window + 1, 0), s.block)
        # No row is deeper than its request is wide, so all of them see what the deepest would.
        whole = pl.cdiv(jnp.maximum(length + s.width - s.window, 0), s.block)
    share = pl.cdiv(jnp.maximum(end - first, 0), s.splits)
    low = jnp.minimum(first + split * share, end)
    high = jnp.minimum(low + share, end)
    tiles = jnp.where(split == 0, jnp.int32(s.tile_blocks), jnp.int32(0))
    steps = tiles + high - low
    whole = tiles + jnp.clip(whole, low, high) - low
    full = jnp.maximum(whole, tiles + jnp.clip(full, low, high) - low)

    def copy(step):
        """Start the copies of a step into its buffers, as many whatever it is."""
        slot = jax.lax.rem(step, s.stages)

        def each(index, sources):
            for source, ring in zip(sources, (k_ring, v_ring), strict=True):
                plgpu.copy_gmem_to_smem(source, ring.at[slot, pl.ds(index * s.piece, s.piece)], arrived.at[slot])

        @pl.when(step < tiles)
        def _():
            for i in range(s.block // s.piece):
                at = pl.ds(step * s.block + i * s.piece, s.piece)
                each(i, (k.at[request, group, at], v.at[request, group, at]))

        @pl.when((step >= tiles) & (step < steps))
        def _():
            for i in range(s.block // s.piece):
                start = (low + step - tiles) * s.block + i * s.piece
                # Behind the last page the table may hold anything: the last page again.
                column = jax.lax.div(jnp.minimum(start, length - 1), s.page)
                page = table[request * s.columns + column]
                at = pl.ds(start - column * s.page if s.page > s.block else 0, s.piece)
                each(i, (k_pages.at[page, group, at], v_pages.at[page, group, at]))

    def multiply(a, b, memory, accumulate=False):
        """Blackwell's product, into the tensor cores' own memory."""
        plgpu.tcgen05_mma(memory, a, b, done, accumulate=accumulate)
        plgpu.barrier_wait(done)

    def product(a, b):
        """Hopper's product, into registers."""

        def run(sums):
            plgpu.wgmma(sums, a, b)
            return sums[...]

        return pl.run_scoped(run, plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32))

    def rowwise(x, size):
        return jax.lax.broadcast_in_dim(x, (s.rows, size), [0])

    def add(step, carry, kind):
        top, total, *sums = carry
        slot = jax.lax.rem(step, s.stages)
        plgpu.barrier_wait(arrived.at[slot])
        keys = k_ring.at[slot].transpose((1, 0))
        if s.blackwell:
            multiply(q_shared, keys, scores_memory)
            scores = plgpu.async_load_tmem(scores_memory)
            plgpu.wait_load_tmem()
        else:
            scores = product(q_shared, keys)
        if s.softcap is None:
            scores = scores * (s.scale * LOG2E)
        else:  # 1 - 2 / (1 + exp(2 x)) is tanh(x)
            grown = jnp.exp2(scores * (2 * LOG2E * s.scale / s.softcap))
            scores = (s.softcap * LOG2E) - (2 * s.softcap * LOG2E) / (1.0 + grown)
        start = (low + step - tiles) * s.block
        if kind == "tile":
            at = mask.at[request, rows, pl.ds(step * s.block, s.block)]
            scores = jnp.where(plgpu.load(at, layout=layout, optimized=False) != 0, scores, NEG)
        elif kind == "edge":
            slots = start + plgpu.broadcasted_iota(jnp.int32, (s.rows, s.block), 1, layout=layout)
            seen = slots < length
            if s.window is not None:
                seen = seen & (slots > rowwise(where, s.block) - s.window)
            scores = jnp.where(seen, scores, NEG)
            # A weight of 0 does not stop a NaN that an earlier request has left in a slot.
            for at, size in s.pieces:
                values = v_ring.at[slot, :, pl.ds(at, size)]
                below = (
                    start + plgpu.broadcasted_iota(jnp.int32, (s.block, size), 0, layout=plgpu.Layout.WGMMA) < length
                )
                found = plgpu.load(values, layout=plgpu.Layout.WGMMA)
                values[...] = jnp.where(below, found, jnp.zeros_like(found))
        new = jnp.maximum(top, jnp.max(scores, axis=1))
        grown, shrink = jnp.exp2(scores - rowwise(new, s.block)), jnp.exp2(top - new)
        total = total * shrink + jnp.sum(grown, axis=1)
        if s.blackwell:
            plgpu.async_store_tmem(weights, grown.astype(s.dtype))
        else:
            weights[...] = grown.astype(s.dtype)
        plgpu.commit_smem()
        if s.blackwell:  # whose threads have a row each, more than their registers hold
            for at, size in s.pieces:
                part = sums_memory.at[:, pl.ds(at, size)]
                found = plgpu.async_load_tmem(part)
                plgpu.wait_load_tmem()
                plgpu.async_store_tmem(part, found * rowwise(shrink, size))
            plgpu.commit_tmem()
            multiply(weights, v_ring.at[slot], sums_memory, accumulate=True)
        else:
            for i, (at, size) in enumerate(s.pieces):
                more = product(weights, v_ring.at[slot, :, pl.ds(at, size)])
                sums[i] = sums[i] * rowwise(shrink, size) + more
        copy(step + s.stages)
        return new, total, *sums

    jax.lax.fori_loop(0, jnp.minimum(steps, s.stages), lambda step, _: copy(step), None)
    plgpu.barrier_wait(q_arrived)

    def filled(dims, value, layout):
        return plgpu.layout_cast(jnp.full(dims, value, jnp.float32), layout)

    carry = tuple(filled((s.rows,), value, layout.reduce(1)) for value in (NEG, 0.0))
    if s.blackwell:
        for at, size in s.pieces:
            plgpu.async_store_tmem(sums_memory.at[:, pl.ds(at, size)], filled((s.rows, size), 0.0, layout))
        plgpu.commit_tmem()
    else:
        carry += tuple(filled((s.rows, size), 0.0, layout) for _, size in s.pieces)
    carry = jax.lax.fori_loop(0, tiles, functools.partial(add, kind="tile"), carry)
    if s.window is not None:
        carry = jax.lax.fori_loop(tiles, whole, functools.partial(add, kind="edge"), carry)
    carry = jax.lax.fori_loop(whole, full, functools.partial(add, kind="whole"), carry)
    top, total, *sums = jax.lax.fori_loop(full, steps, functools.partial(add, kind="edge"), carry)

    some = total > 0  # a split may have no blocks
    total = jnp.where(some, total, 1.0)
    for i, (at, size) in enumerate(s.pieces):
        x = plgpu.async_load_tmem(sums_memory.at[:, pl.ds(at, size)]) if s.blackwell else sums[i]
        _store(out.at[split, request, group, rows, pl.ds(at, size)], (x / rowwise(total, size)).astype(out.dtype))
    _store(summed.at[split, request, group, rows], jnp.where(some, top + jnp.log(total) * LOG2E, NEG))


def _store(ref, value: Array) -> None:
    """Registers to global memory, whole cache lines or not; JAX 0.11 has no function for that and needs none."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value
