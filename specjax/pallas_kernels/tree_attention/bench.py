"""Tree attention as a pass runs it, to be timed: other layers' keys each time, at several fills of the cache."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specjax.pallas_kernels.tree_attention.tiles import Sizes

COLD_BYTES = 2**28  # of keys and values, more than caches on the chip hold
MOST_LAYERS = 64
FILLS = 4  # a quarter of the slots, a half, ...


def bench(name: str, sizes: Sizes, interpret: Any = False) -> Callable[[Any], Callable[[int], Any]]:
    """As `timing.bench`, for one of the kernels."""
    attend = importlib.import_module(f"specjax.pallas_kernels.tree_attention.{name}").attend
    options = {"scale": sizes.dim**-0.5, "window": sizes.window, "interpret": interpret}
    options |= {} if sizes.capability is None else {"capability": sizes.capability}
    arrays = _arrays(sizes)

    def make(tiles):
        program = jax.jit(functools.partial(_repeated, functools.partial(attend, tiles=lambda _: tiles, **options)))
        return lambda times: program(times, *arrays)

    return make


def _arrays(s: Sizes) -> tuple:
    each = 2 * s.batch * s.slots * s.groups * s.dim * s.item
    layers = max(1, min(MOST_LAYERS, -(-COLD_BYTES // each)))
    shapes = [(s.batch, s.width, s.heads, s.dim)] + [(s.batch, s.keys, s.groups, s.dim)] * 2
    shapes += [(layers * s.batch * s.columns, s.groups, s.page, s.dim)] * 2
    keys = jax.random.split(jax.random.key(0), len(shapes))
    q, k, v, *pages = (jax.random.normal(key, shape, s.dtype) for key, shape in zip(keys, shapes, strict=True))
    seen = jnp.broadcast_to(jnp.tri(s.width, s.keys, dtype=bool), (s.batch, s.width, s.keys))
    table = jnp.arange(layers * s.batch * s.columns, dtype=jnp.int32).reshape(layers, s.batch, s.columns)
    fills = max(s.slots - s.width, 0) * jnp.arange(1, FILLS + 1) // FILLS
    return q, k, v, seen, *pages, table, jnp.broadcast_to(fills[:, None], (FILLS, s.batch)).astype(jnp.int32)


def _repeated(attend: Callable, times: jax.Array, q, k, v, seen, k_pages, v_pages, tables, fills) -> jax.Array:
    """Each time the queries are what came out before, so that nothing is left out or done at once."""

    def once(index, q):
        table, committed = tables[index % len(tables)], fills[index % len(fills)]
        position = committed[:, None] + jnp.arange(q.shape[1], dtype=jnp.int32)
        return attend(q, k, v, seen, k_pages, v_pages, table, committed, position)

    return jax.lax.fori_loop(0, times, once, q)
