"""The whole decoder step as one TPU kernel without a grid: all layers in a loop at run time, weights in one stream.

The step's time is that of reading the weights. They come as one array of equal tiles in the order of their use (see
`weights.py`), copied through a ring of VMEM banks: when a tile has been multiplied, the copy of the one `banks` later
starts in its place, in whatever matrix or layer that lies. So the stream goes on while the kernel attends, norms and
crosses layer borders. Rows are padded to whole sublanes for each request.
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
from specjax.draft import Rows
from specjax.pallas_kernels.decode_step.tiles import StepSizes, StepTiles
from specjax.pallas_kernels.decode_step.weights import Plan, Weights
from specjax.pallas_kernels.tree_attention import reference as attention
from specjax.pallas_kernels.tree_attention.tiles import LANES, Sizes
from specjax.pallas_kernels.tree_attention.tpu import words_of
from specjax.pallas_kernels.tree_attention.tpu_request import Scratch, Shape, attend_request, bounds_of
from specjax.pallas_kernels.tuning import choose

MAX_WIDTH = 32  # rows of a request
MAX_ROWS = 256  # rows in all, padding included


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
    interpret: bool | pltpu.InterpretParams = False,
    tiles: Callable[[StepSizes], StepTiles] | None = None,
) -> tuple[Array, Array | None, Array, Array]:
    """`reference.decode_step` on a TPU; the cache is updated in place where it is donated.

    `interpret` and `tiles` are as of tree attention's `attend`.

    Raises:
        NotImplementedError: more rows, other page sizes or dtypes than the kernel has.
    """
    if x.dtype != plan.dtype or weights.tiles.dtype != plan.tile_dtype:
        raise NotImplementedError(f"rows of {x.dtype} and weights of {weights.tiles.dtype} in a plan for {plan.dtype}")
    step = step_of(plan, rows, k_cache, table, taps, tiles)
    shape, width = step.shape, step.width
    operands = _operands(step, weights, x, cos, sin, rows)
    table = jnp.arange(rows.batch, dtype=jnp.int32) if table is None else table.reshape(-1)
    live = jnp.sum(rows.unpack(rows.valid) & _own(rows), axis=1, dtype=jnp.int32)
    scalars = bounds_of(shape, committed), committed, live, table
    interpret = pltpu.InterpretParams() if interpret is True else interpret
    hidden, tapped, k_cache, v_cache = _call(step, interpret, k_cache.shape)(
        *scalars, *operands, weights.tiles, k_cache, v_cache
    )

    def packed(y):
        return rows.pack(y[:, : plan.hidden].reshape(rows.batch, width, -1)[:, : rows.width])

    found = [x] * (0 in taps) + [packed(tapped[i]) for i in range(len(step.taps))]
    return packed(hidden), jnp.concatenate(found, axis=-1) if taps else None, k_cache, v_cache


def step_of(plan: Plan, rows: Rows, k_cache: Array, table: Array | None, taps=(), tiles=None) -> "_Step":
    """The static half of a call.

    Raises:
        NotImplementedError: as `decode_step`.
    """
    dtype = jnp.dtype(plan.dtype)
    sublanes = 32 // dtype.itemsize
    width = -(-rows.width // sublanes) * sublanes
    if rows.width > MAX_WIDTH or rows.batch * width > MAX_ROWS:
        raise NotImplementedError(
            f"{rows.width} rows of a request, of {MAX_WIDTH}, and {rows.batch * width} in all, of {MAX_ROWS}"
        )
    tile = jax.ShapeDtypeStruct((rows.batch, width, plan.groups, plan.dim), dtype)
    queries = jax.ShapeDtypeStruct((rows.batch, width, plan.heads, plan.dim), dtype)
    pages = jax.ShapeDtypeStruct(k_cache.shape[1:], k_cache.dtype)
    taps = tuple(t for t in taps if t)
    sizes = StepSizes(plan, Sizes.of(queries, tile, pages, table), len(taps))
    chosen = choose(StepTiles, sizes) if tiles is None else tiles(sizes)
    shape = Shape.of(queries, tile, pages, table, None, None, lambda _: chosen.attention)
    if problem := chosen.problem(sizes):
        raise NotImplementedError(problem)
    return _Step(plan=plan, shape=shape, sizes=sizes, tiles=chosen, width=width, taps=taps)


@dataclasses.dataclass(frozen=True)
class _Step:
    """The static half of a call: `width` padded rows of a request, taps behind layers."""

    plan: Plan
    shape: Shape
    sizes: StepSizes
    tiles: StepTiles
    width: int
    taps: tuple[int, ...]

    @property
    def dtype(self) -> jnp.dtype:
        return self.shape.dtype

    @property
    def banks(self) -> int:
        return self.tiles.banks

    @property
    def rows(self) -> int:
        """Rows of the products, whole sublanes."""
        return self.sizes.rows

    @property
    def lanes(self) -> dict[str, int]:
        """Lanes of the buffers between the products."""
        return self.sizes.lanes

    @property
    def window(self) -> int:
        """Slots that are read, changed and written to store a request's rows."""
        return self.sizes.window

    @property
    def vmem_bytes(self) -> int:
        return self.tiles.vmem_bytes(self.sizes)

    @property
    def cost(self) -> pl.CostEstimate:
        """For XLA's scheduler: the weights once and a cache that is half full."""
        plan, kv = self.plan, self.shape.cost
        size = plan.layers * plan.tiles * plan.rows * plan.columns
        return pl.CostEstimate(
            flops=2 * size * self.rows + plan.layers * kv.flops,
            bytes_accessed=size * plan.tile_dtype.itemsize + plan.layers * kv.bytes_accessed,
            transcendentals=plan.layers * (kv.transcendentals + self.rows * plan.intermediate),
        )


def _own(rows: Rows) -> Array:
    return jnp.arange(rows.width) < jnp.diff(rows.starts)[:, None]


def _operands(step: _Step, weights: Weights, x: Array, cos: Array, sin: Array, rows: Rows) -> tuple[Array, ...]:
    """Rows of each request padded to `step.width`, their rotation over a whole head, mask words, and norm weights."""
    s, lanes = step.shape, step.lanes["x"]
    own = _own(rows) & rows.unpack(rows.valid)

    def padded(y, size):
        y = jnp.where(own[:, :, None], rows.unpack(y), 0)
        y = jnp.pad(y, ((0, 0), (0, step.width - rows.width), (0, size - y.shape[2])))
        return y.reshape(step.rows, size)

    position = rows.unpack(rows.positions)
    seen = attention.draft_mask(rows, position, None)
    more = step.width - rows.width
    seen = jnp.pad(seen, ((0, 0), (0, more), (0, more))) | jnp.eye(step.width, dtype=bool)
    meta = words_of(seen, jnp.pad(position, ((0, 0), (0, more))), s)
    wide = ((0, 0), (0, lanes - step.plan.hidden))
    norms = jnp.pad(weights.norms.reshape(-1, step.plan.hidden).astype(jnp.float32), wide)
    heads = jnp.ones((2 * step.plan.layers, s.dim)) if weights.head_norms is None else weights.head_norms
    return (
        padded(x, lanes),
        padded(jnp.concatenate([cos, cos], axis=1), s.dim),
        padded(jnp.concatenate([-sin, sin], axis=1), s.dim),
        meta,
        norms,
        heads.reshape(-1, s.dim).astype(jnp.float32),
        jnp.pad(weights.final_norm[None].astype(jnp.float32), wide),
        jnp.ones((1, LANES), jnp.float32) if weights.scales is None else weights.scales,
    )


class _Buffers(NamedTuple):
    """Scratch of the kernel; everything between two products is float32 that holds rounded values."""

    banks: Any  # [banks, columns, rows]
    x: Any  # [N, d], the residual stream
    normed: Any  # [N, d]
    qkv: Any  # [N, (h + 2g) f]
    attended: Any  # [N, h f]
    mlp: Any  # [N, i]
    q: Any  # [g, queries, f]
    k: Any  # [g, keys, f]
    v: Any  # [g, keys, f]
    k_window: Any  # [g, window, f]
    v_window: Any  # [g, window, f]
    bank: Any  # [1]: of the next tile
    loaded: Any  # [banks]
    stored: Any  # [1]

    @classmethod
    def of(cls, step: _Step) -> "_Buffers":
        s, lanes = step.shape, step.lanes

        def between(name):
            return pltpu.VMEM((step.rows, lanes[name]), jnp.float32)

        tile, window = (
            pltpu.VMEM((s.groups, s.keys, s.dim), s.dtype),
            pltpu.VMEM((s.groups, step.window, s.dim), s.dtype),
        )
        return cls(
            pltpu.VMEM((step.banks, step.plan.columns, step.plan.rows), step.plan.tile_dtype),
            between("x"),
            between("x"),
            between("qkv"),
            between("attended"),
            between("mlp"),
            pltpu.VMEM((s.groups, s.queries, s.dim), s.dtype),
            tile,
            tile,
            window,
            window,
            pltpu.SMEM((1,), jnp.int32),
            pltpu.SemaphoreType.DMA((step.banks,)),
            pltpu.SemaphoreType.DMA((1,)),
        )


@functools.cache
def _call(step: _Step, interpret: bool | pltpu.InterpretParams, cache: tuple[int, ...]):
    """The `pallas_call` of a step."""
    size, count = (step.rows, step.lanes["x"]), max(1, len(step.taps))
    scalar, vector, hbm = (pl.BlockSpec(memory_space=space) for space in (pltpu.SMEM, pltpu.VMEM, pl.ANY))
    return pl.pallas_call(
        functools.partial(_kernel, step),
        name="decode_step",
        out_shape=(
            jax.ShapeDtypeStruct(size, step.dtype),
            jax.ShapeDtypeStruct((count, *size), step.dtype),
            jax.ShapeDtypeStruct(cache, step.dtype),
            jax.ShapeDtypeStruct(cache, step.dtype),
        ),
        in_specs=[scalar] * 4 + [vector] * 8 + [hbm] * 3,
        out_specs=(vector, vector, hbm, hbm),
        scratch_shapes=[*_Buffers.of(step), *Scratch.of(step.shape)],
        input_output_aliases={13: 2, 14: 3},
        compiler_params=pltpu.CompilerParams(
            vmem_limit_bytes=min(step.vmem_bytes * 9 // 8 + 2**22, 62 * 2**20),
            disable_bounds_checks=True,  # as in tree attention; interpreted runs check them all
        ),
        cost_estimate=step.cost,
        interpret=interpret,
    )


def _kernel(
    step: _Step,
    # scalars
    bounds,  # [4, b + 1]
    committed,  # [b]
    live,  # [b]
    table,  # [b * m]
    # inputs
    x,  # [N, d]
    cos,  # [N, f]
    sin,  # [N, f]: its first half negative
    meta,  # [b, queries, 1 + words]
    norms,  # [2 l, d]
    head_norms,  # [2 l, f]
    final_norm,  # [1, d]
    scales,  # [S, rows], of int8 tiles
    tiles,  # [T, columns, rows], HBM
    k_before,  # the cache's buffers, which the outputs are
    v_before,
    # outputs
    hidden,  # [N, d]
    tapped,  # [taps, N, d]
    k_cache,  # [l, p, g, page, f], HBM
    v_cache,  # [l, p, g, page, f], HBM
    # scratch
    *scratch,
):
    del k_before, v_before
    count = len(_Buffers._fields)
    at, attending = _Buffers(*scratch[:count]), Scratch(*scratch[count:])
    plan, tiles_in_all = step.plan, step.plan.layers * step.plan.tiles

    def load(tile, bank):
        return pltpu.make_async_copy(tiles.at[tile], at.banks.at[bank], at.loaded.at[bank])

    for bank in range(min(step.banks, tiles_in_all)):
        load(bank, bank).start()
    at.bank[0] = 0
    attending.turn[0] = 0
    at.x[...] = x[...].astype(jnp.float32)
    for buffer in (at.normed, at.attended, at.mlp, at.q):  # lanes that no product writes meet weights of 0: no NaN
        buffer[...] = jnp.zeros_like(buffer)

    def multiply(source, column, tile):
        """`source[:, column of tiles] @ tile`, in float32; the bank is filled again at once."""
        bank = at.bank[0]
        at.bank[0] = jnp.where(bank + 1 == step.banks, 0, bank + 1)
        load(tile, bank).wait()
        lanes = pl.ds(pl.multiple_of(column * plan.columns, LANES), plan.columns)
        precision = jax.lax.Precision.HIGHEST if step.dtype == jnp.float32 else None
        weight = at.banks[bank].astype(step.dtype)
        y = jnp.dot(
            source[:, lanes].astype(step.dtype), weight, precision=precision, preferred_element_type=jnp.float32
        )

        @pl.when(tile + step.banks < tiles_in_all)
        def _():
            load(tile + step.banks, bank).start()

        return y

    def product(name, layer, source, store):
        """`store(i, y)` for every tile of outputs of a matrix, its inputs summed in order; pairs of gate and up."""
        matrix = plan.matrices[name]
        pair = 2 if name == "gate_up" else 1

        def outputs(i, tile):
            found = []
            for half in range(pair):
                y = multiply(source, 0, tile)
                for column in range(1, matrix.inputs):
                    y += multiply(source, column, tile + column)
                tile += matrix.inputs
                if plan.int8:
                    row = layer * plan.scales["all"] + plan.scales[name] + pair * i + half
                    y *= scales[pl.ds(row, 1), :]
                found.append(_round(step, y))
            store(pl.ds(pl.multiple_of(i * plan.rows, LANES), plan.rows), *found)
            return tile

        jax.lax.fori_loop(0, matrix.outputs // pair, outputs, layer * plan.tiles + matrix.first)

    def norm(weight):
        """The residual stream, normed, in the precision of the activations."""
        wide = at.x[...]
        scale = jax.lax.rsqrt(jnp.sum(wide * wide, axis=1, keepdims=True) / plan.hidden + plan.eps)
        return _round(step, wide * scale * weight)

    def add(lanes, y):
        at.x[:, lanes] = _round(step, at.x[:, lanes] + y)

    def keep(buffer):
        def store(lanes, y):
            buffer[:, lanes] = y

        return store

    def activate(lanes, gate, up):
        at.mlp[:, lanes] = _round(step, _round(step, gate * jax.nn.sigmoid(gate)) * up)

    def layer(index, _):
        pages = k_cache.at[index], v_cache.at[index]
        attending.turn[1] = -1
        with jax.named_scope("qkv"):
            at.normed[...] = norm(norms[pl.ds(2 * index, 1), :])
            product("qkv", index, at.normed, keep(at.qkv))
        with jax.named_scope("attention"):
            head_norm = head_norms[pl.ds(2 * index, 1), :], head_norms[pl.ds(2 * index + 1, 1), :]
            request = functools.partial(
                _attend, step, at, attending, bounds, committed, live, table, cos, sin, meta, head_norm, pages
            )
            jax.lax.fori_loop(0, step.shape.batch, lambda b, _: request(b), None)
            product("out", index, at.attended, add)
        with jax.named_scope("mlp"):
            at.normed[...] = norm(norms[pl.ds(2 * index + 1, 1), :])
            product("gate_up", index, at.normed, activate)
            product("down", index, at.mlp, add)
        for i, tap in enumerate(step.taps):

            @pl.when(index + 1 == tap)
            def _(i=i):
                tapped[i] = at.x[...].astype(step.dtype)

    jax.lax.fori_loop(0, plan.layers, layer, None)
    hidden[...] = norm(final_norm[...]).astype(step.dtype)
    if not step.taps:
        tapped[...] = jnp.zeros_like(tapped)


def _round(step: _Step, y: Array) -> Array:
    """To the precision of the activations and back: where the ordinary step rounds, so does this one."""
    return y.astype(step.dtype).astype(jnp.float32)


def _attend(
    step: _Step,
    at: _Buffers,
    attending: Scratch,
    bounds,
    committed,
    live,
    table,
    cos,
    sin,
    meta,
    head_norm,
    pages,
    request,
) -> None:
    """One request's rows: heads normed and turned, its new keys and values stored, its outputs to `at.attended`."""
    s, plan = step.shape, step.plan
    own = pl.ds(pl.multiple_of(request * step.width, step.width), step.width)
    windows = _windows(step, at, pages, request, committed, live, table)
    for part, copies in windows:

        @pl.when(part)
        def _(copies=copies):
            for read, _ in copies:
                read.start()

    turn = cos[own, :], sin[own, :]

    def head(i, weight=None, rotated=True):
        y = at.qkv[own, i * s.dim : (i + 1) * s.dim]
        if weight is not None:
            y = _round(step, y * jax.lax.rsqrt(jnp.mean(y * y, axis=1, keepdims=True) + plan.eps) * weight)
        return _round(step, y * turn[0] + _swap_halves(y) * turn[1]) if rotated else y

    norms = head_norm if plan.qk_norm else (None, None)
    scale = jnp.float32(jnp.asarray(s.dim**-0.5, step.dtype))
    for g in range(s.groups):
        for r in range(s.ratio):
            q = head(g * s.ratio + r, norms[0]) * scale
            at.q[g, r * step.width : (r + 1) * step.width, :] = q.astype(s.dtype)
        at.k[g] = head(plan.heads + g, norms[1]).astype(s.dtype)
        at.v[g] = head(plan.heads + s.groups + g, rotated=False).astype(s.dtype)

    def finish(g, out):
        for r in range(s.ratio):
            lanes = (g * s.ratio + r) * s.dim
            if s.unrolled < s.groups:  # then `g` is a value, and a head whole lanes
                lanes = pl.multiple_of(lanes, LANES)
            value = _round(step, out[r * step.width : (r + 1) * step.width])
            at.attended[own, pl.ds(lanes, s.dim)] = value

    attend_request(
        s,
        request,
        bounds,
        committed,
        table,
        at.q,
        at.k,
        at.v,
        meta.at[request],
        *pages,
        scratch=attending,
        finish=finish,
    )
    _store(step, at, windows, request, committed, live)


def _swap_halves(x: Array) -> Array:
    half = x.shape[1] // 2
    if x.shape[1] % LANES == 0:
        return pltpu.roll(x, half, 1)
    return jnp.concatenate([x[:, half:], x[:, :half]], axis=1)


def _windows(step: _Step, at: _Buffers, pages, request, committed, live, table):
    """For each run of sublanes around a request's rows: whether a row falls into it, and copies out and back.

    Copies move whole sublanes, and a request's length is none; so what stands around its rows is read first.
    """
    s, size = step.shape, 32 // step.dtype.itemsize
    first = committed[request] // size * size
    found = []
    for i in range(step.window // size):
        slot = first + i * size
        page = table[jnp.minimum(request * s.columns + slot // s.page, s.batch * s.columns - 1)]
        source = pl.ds(pl.multiple_of(slot % s.page, size), size)
        copies = []
        for cache, window in zip(pages, (at.k_window, at.v_window), strict=True):
            outside, inside = cache.at[page, :, source], window.at[:, pl.ds(i * size, size)]
            copies.append(
                (
                    pltpu.make_async_copy(outside, inside, at.stored.at[0]),
                    pltpu.make_async_copy(inside, outside, at.stored.at[0]),
                )
            )
        end = committed[request] + live[request]
        found.append(((slot < end) & (live[request] > 0) & (slot < s.columns * s.page), copies))
    return found


def _store(step: _Step, at: _Buffers, windows, request, committed, live) -> None:
    """Put a request's new keys and values among what was read around them, and write all of it back."""
    s, size = step.shape, 32 // step.dtype.itemsize
    for part, copies in windows:

        @pl.when(part)
        def _(copies=copies):
            for read, _ in copies:
                read.wait()

    before = committed[request] - committed[request] // size * size
    shape = (step.window, s.keys)
    row = jax.lax.broadcasted_iota(jnp.int32, shape, 0) - before
    place = (row == jax.lax.broadcasted_iota(jnp.int32, shape, 1)) & (row < live[request])
    own = jax.lax.broadcasted_iota(jnp.int32, (step.window, s.dim), 0) - before
    own = (own >= 0) & (own < live[request])
    for g in range(s.groups):
        for new, window in ((at.k, at.k_window), (at.v, at.v_window)):
            moved = jnp.dot(
                place.astype(jnp.float32),
                new[g].astype(jnp.float32),
                precision=jax.lax.Precision.HIGHEST,
                preferred_element_type=jnp.float32,
            )
            window[g] = jnp.where(own, moved, window[g].astype(jnp.float32)).astype(s.dtype)
    for act in ("start", "wait"):
        for part, copies in windows:

            @pl.when(part)
            def _(copies=copies, act=act):
                for _, write in copies:
                    getattr(write, act)()
