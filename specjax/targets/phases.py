"""The phases of a decoder's pass, each for all layers: what `specjax profile` times and compiles one by one.

They are the decoder's own methods. A layer's part waits for that of the layer before, as in the pass, so that none
runs beside another; what joins them costs one maximum over its outputs.
"""

from typing import Any

import jax.numpy as jnp
from flax import nnx

from specjax.array_types import Array, Float, Int
from specjax.cache import KVCache
from specjax.draft import Rows
from specjax.targets import rope
from specjax.targets.decoder import Target


def qkv(target: Target, params: Any, x: Float[Array, "N d"], rows: Rows) -> Array:
    """Norm, queries, keys and values, rotated."""
    c = target.config
    cos, sin = rope.cos_sin(c.rope, c.head_dim, rows.positions, c.max_position_embeddings)
    for layer in nnx.merge(target.graph, params).layers:
        x = _behind(x, *layer.attention.project(layer.attention_norm(x), cos, sin))
    return x


def attention(
    target: Target,
    params: Any,
    heads: tuple[Array, Array, Array],
    cache: KVCache,
    committed: Int[Array, " b"],
    rows: Rows,
) -> tuple[Array, KVCache]:
    """Keys and values written, and what the rows see; `heads` are queries, keys and values, rotated."""
    (q, key, value), k, v = heads, list(cache.k), list(cache.v)
    for i, layer in enumerate(nnx.merge(target.graph, params).layers):
        y, k[i], v[i] = layer.attention.attend(q, key, value, k[i], v[i], cache.table, committed, rows)
        q = _behind(q, y)
    return q, KVCache(k=tuple(k), v=tuple(v), table=cache.table)


def output(target: Target, params: Any, x: Float[Array, "N d"], y: Float[Array, "N e"]) -> Array:
    """The product behind attention, added to the residual stream."""
    for layer in nnx.merge(target.graph, params).layers:
        x = x + layer.attention.out(y)
        y = _behind(y, x)
    return x


def mlp(target: Target, params: Any, x: Float[Array, "N d"]) -> Array:
    """Norm, gate, up and down, added to the residual stream."""
    for layer in nnx.merge(target.graph, params).layers:
        x = x + layer.mlp(layer.mlp_norm(x))
    return x


def _behind(x: Array, *others: Array) -> Array:
    """`x`, to within rounding, when `others` are there."""
    wait = sum((jnp.max(y).astype(jnp.float32) for y in others), jnp.float32(0))
    return x + (wait * 1e-30).astype(x.dtype)
