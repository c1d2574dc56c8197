"""Attention over a cache on a CPU: keys and values are read where they lie, as far as each request has any."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp

from specjax.array_types import Array, Bool, Float, Int
from specjax.draft import Rows
from specjax.pallas_kernels import cpu
from specjax.pallas_kernels.tree_attention import reference

SOURCE = Path(__file__).with_name("cpu.c")
WHOLE = 16  # a head's size is a multiple: the floats of the widest vector
MOST_ROWS = 64  # of a request; beyond, XLA's products of whole blocks are as fast


def tree_attention(q, k, v, k_pages, v_pages, table, committed, rows: Rows, *, interpret: bool = False, **options):
    """`reference.tree_attention` on a CPU; rows that a request does not have are passed over."""
    padded = functools.partial(_attend, jnp.diff(rows.starts))
    return reference.tree_attention(q, k, v, k_pages, v_pages, table, committed, rows, padded=padded, **options)


def attend(q: Float[Array, "b n h f"], *args, interpret: bool = False, **options) -> Float[Array, "b n h f"]:
    """`reference.attend` on a CPU. There is nothing to `interpret`."""
    return _attend(jnp.full(q.shape[:1], q.shape[1]), q, *args, **options)


def _attend(
    live: Int[Array, " b"],
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
) -> Float[Array, "b n h f"]:
    """`reference.attend` for the first `live` rows of each request; the others are 0.

    Raises:
        NotImplementedError: heads are no whole vectors, types differ, or there is no compiler.
    """
    if q.shape[3] % WHOLE or q.dtype not in (jnp.float32, jnp.bfloat16) or {k.dtype, k_pages.dtype} != {q.dtype}:
        raise NotImplementedError(f"heads of {q.shape[3]}, {q.dtype} over a cache of {k_pages.dtype}")
    if q.shape[1] > MOST_ROWS:
        options = {"scale": scale, "window": window, "softcap": softcap}
        return reference.attend(q, k, v, seen, k_pages, v_pages, table, committed, position, **options)
    name = cpu.handler(SOURCE)
    if table is None:
        table = jnp.arange(q.shape[0], dtype=jnp.int32)[:, None]
    options = jnp.asarray([scale, window or 0, softcap or 0], jnp.float32)
    seen = jnp.broadcast_to(seen, (*q.shape[:2], k.shape[1]))
    places = [x.astype(jnp.int32) for x in (table, committed, position, live)]
    out = jax.ShapeDtypeStruct(q.shape, jnp.float32)
    call = jax.ffi.ffi_call(name, out, vmap_method="sequential")
    return call(q, k, v, seen, k_pages, v_pages, *places, options).astype(q.dtype)
