"""Tree attention for TPUs (Mosaic): one program a request; `tpu_request.py` is what it does."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from specjax.array_types import Array, Bool, Float, Int
from specjax.draft import WORD_BITS, Rows
from specjax.pallas_kernels.tree_attention import reference
from specjax.pallas_kernels.tree_attention.tiles import Sizes, TpuTiles
from specjax.pallas_kernels.tree_attention.tpu_request import Scratch, Shape, attend_request, bounds_of


def tree_attention(q, k, v, k_pages, v_pages, table, committed, rows: Rows, *, interpret=False, tiles=None, **options):
    """`reference.tree_attention` on a TPU, with `interpret` and `tiles` as of `attend`."""
    padded = functools.partial(attend, interpret=interpret, tiles=tiles)
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
    interpret: bool | pltpu.InterpretParams = False,
    tiles: Callable[[Sizes], TpuTiles] | None = None,
) -> Float[Array, "b n h f"]:
    """`reference.attend` on a TPU; the tables may hold anything behind a request's last page.

    `interpret` simulates the kernel instead of compiling it, with the defaults or under the parameters given. `tiles`
    says what to choose for a call's sizes; by default the device's table, or the rule.

    Raises:
        NotImplementedError: more rows, other page sizes or dtypes than the kernel has.
    """
    shape = Shape.of(q, k, k_pages, table, window, softcap, tiles)
    packed = _pack(q * jnp.asarray(scale, q.dtype), k, v, seen, position, shape)
    table = jnp.arange(shape.batch, dtype=jnp.int32) if table is None else table.reshape(-1)
    if interpret is True:
        interpret = pltpu.InterpretParams()
    out = _call(shape, interpret)(bounds_of(shape, committed), committed, table, *packed, k_pages, v_pages)
    out = out[:, :, : shape.ratio * shape.width].reshape(shape.batch, shape.groups, shape.ratio, shape.width, shape.dim)
    return out.transpose(0, 3, 1, 2, 4).reshape(q.shape)


def _pack(q: Array, k: Array, v: Array, seen: Array, position: Array, shape: Shape) -> tuple[Array, ...]:
    """Queries `[b, g, r * n, f]`, the tile `[b, g, j, f]` twice, positions and words `[b, r * n, 1 + w]`; padded."""
    s = shape
    q = q.reshape(s.batch, s.width, s.groups, s.ratio, s.dim).transpose(0, 2, 3, 1, 4)
    q = q.reshape(s.batch, s.groups, s.ratio * s.width, s.dim)
    meta = words_of(seen, position, s)

    def rows(x, count):
        return jnp.pad(x, ((0, 0), (0, 0), (0, count - x.shape[2]), (0, 0)))

    k, v = (rows(x.transpose(0, 2, 1, 3), s.keys) for x in (k, v))
    return rows(q, s.queries), k, v, meta


def words_of(seen: Bool[Array, "b n j"], position: Int[Array, "b n"], shape: Shape) -> Int[Array, "b m w1"]:
    """Of each packed query its position, then the words of the keys that it sees; padding sees the first key."""
    s = shape
    bits = jnp.arange(seen.shape[2], dtype=jnp.int32) % WORD_BITS
    words = jnp.pad(jnp.where(seen, 1 << bits, 0), ((0, 0), (0, 0), (0, s.words * WORD_BITS - seen.shape[2])))
    words = jnp.sum(words.reshape(s.batch, s.width, s.words, WORD_BITS), axis=-1, dtype=jnp.int32)
    meta = jnp.tile(jnp.concatenate([position[:, :, None], words], axis=2), (1, s.ratio, 1))
    return jnp.pad(meta, ((0, 0), (0, s.queries - meta.shape[1]), (0, 0)), constant_values=1)


@functools.cache
def _call(shape: Shape, interpret: bool | pltpu.InterpretParams):
    """The `pallas_call` of a shape."""
    s = shape

    def streamed(*block):
        return pl.BlockSpec((None, *block), lambda b, *_: (b,) + (0,) * len(block))

    queries, tile = streamed(s.groups, s.queries, s.dim), streamed(s.groups, s.keys, s.dim)
    cached = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        functools.partial(_kernel, shape),
        name="tree_attention",
        out_shape=jax.ShapeDtypeStruct((s.batch, s.groups, s.queries, s.dim), s.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(s.batch,),
            in_specs=[queries, tile, tile, streamed(s.queries, 1 + s.words), cached, cached],
            out_specs=queries,
            scratch_shapes=list(Scratch.of(s)),
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            vmem_limit_bytes=min(s.vmem_bytes * 5 // 4 + 2**21, 60 * 2**20),
            disable_bounds_checks=True,  # three quarters of what starting a copy costs; interpreted runs check them all
        ),
        cost_estimate=s.cost,
        interpret=interpret,
    )


def _kernel(shape: Shape, bounds, committed, table, q, k, v, meta, k_pages, v_pages, out, *scratch):
    scratch, request = Scratch(*scratch), pl.program_id(0)

    @pl.when(request == 0)
    def _():
        scratch.turn[0] = 0
        scratch.turn[1] = -1

    def finish(g, value):
        out[g] = value.astype(shape.dtype)

    attend_request(
        shape, request, bounds, committed, table, q, k, v, meta, k_pages, v_pages, scratch=scratch, finish=finish
    )
