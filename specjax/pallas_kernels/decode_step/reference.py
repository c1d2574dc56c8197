"""The whole step in plain `jnp` over the fused step's weights and cache: its specification, and the path of prefill."""

import dataclasses

import jax
import jax.numpy as jnp

from specjax import cache as kv
from specjax.array_types import Array, Float, Int
from specjax.draft import Rows
from specjax.pallas_kernels.decode_step.weights import Plan, Weights, product
from specjax.pallas_kernels.tree_attention.op import tree_attention


def decode_step(
    plan: Plan,
    weights: Weights,
    x: Float[Array, "N d"],
    cos: Float[Array, "N f2"],
    sin: Float[Array, "N f2"],
    k_cache: Float[Array, "l p g s f"],
    v_cache: Float[Array, "l p g s f"],
    table: Int[Array, "b m"] | None,
    committed: Int[Array, " b"],
    rows: Rows,
    *,
    taps: tuple[int, ...] = (),
) -> tuple[Array, Array | None, Array, Array]:
    """Run packed rows through all layers.

    Args:
        plan: the decoder's sizes.
        weights: its weights, cut.
        x: embedded rows.
        cos: of each row's position, half the head's width.
        sin: likewise.
        k_cache: keys of all layers.
        v_cache: values.
        table: pages of each request, None for one page a request in order.
        committed: committed slots of each request.
        rows: the packed rows; their keys and values go to `rows.slots`.
        taps: residual streams to return, `t` = layers already executed, ascending.

    Returns:
        Hidden rows after the final norm, taps behind each other on the last axis (None without), and the cache.
    """
    tapped = jnp.zeros((len(taps), *x.shape), x.dtype)
    at = jnp.array(taps, jnp.int32)[:, None, None]
    tapped = jnp.where(at == 0, x, tapped)

    def layer(index, carry):
        x, tapped, k_cache, v_cache = carry
        n = norm(x, weights.norms[index, 0], plan.eps)
        qkv = product(plan, weights, index, "qkv", n).reshape(len(x), -1, plan.dim)
        q, k, v = jnp.split(qkv, (plan.heads, plan.heads + plan.groups), axis=1)
        if weights.head_norms is not None:
            q = norm(q, weights.head_norms[index, 0], plan.eps)
            k = norm(k, weights.head_norms[index, 1], plan.eps)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k_cache, v_cache = (_write(c, index, new, table, rows) for c, new in ((k_cache, k), (v_cache, v)))
        pages = _pages(k_cache, index, table), _pages(v_cache, index, table)
        own = None if table is None else table + index * k_cache.shape[1]
        y = tree_attention(q, k, v, *pages, own, committed, rows, scale=plan.dim**-0.5)
        x = x + product(plan, weights, index, "out", y.reshape(len(x), -1))
        n = norm(x, weights.norms[index, 1], plan.eps)
        gate, up = jnp.split(product(plan, weights, index, "gate_up", n), 2, axis=-1)
        x = x + product(plan, weights, index, "down", jax.nn.silu(gate) * up)
        return x, jnp.where(at == index + 1, x, tapped), k_cache, v_cache

    x, tapped, k_cache, v_cache = jax.lax.fori_loop(0, plan.layers, layer, (x, tapped, k_cache, v_cache))
    hidden = norm(x, weights.final_norm, plan.eps)
    return hidden, jnp.concatenate(list(tapped), axis=-1) if taps else None, k_cache, v_cache


def _write(cache: Array, layer: Array, new: Array, table: Array | None, rows: Rows) -> Array:
    """`kv.write` into one layer's pages, in place: to it, all layers are one run of pages."""
    pages = cache.reshape(-1, *cache.shape[2:])
    own = jnp.arange(rows.batch, dtype=jnp.int32)[:, None] if table is None else table
    valid = rows.valid & (rows.slots < own.shape[1] * cache.shape[3])  # behind the last page is the next layer's first
    shifted = dataclasses.replace(rows, valid=valid)
    return kv.write(pages, new, own + layer * cache.shape[1], shifted).reshape(cache.shape)


def _pages(cache: Array, layer: Array, table: Array | None) -> Array:
    """The pages that a layer's table means: all layers' with a table that is shifted, else this layer's alone."""
    if table is None:
        return jax.lax.dynamic_index_in_dim(cache, layer, keepdims=False)
    return cache.reshape(-1, *cache.shape[2:])


def norm(x: Array, weight: Array, eps: float) -> Array:
    """RMSNorm over the last axis, in float32."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale * weight.astype(jnp.float32)).astype(x.dtype)


def rotate(x: Float[Array, "N h f"], cos: Float[Array, "N f2"], sin: Float[Array, "N f2"]) -> Float[Array, "N h f"]:
    """Rotary position embedding, half-split pairs, in float32."""
    half = x.shape[-1] // 2
    low, high = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    c, s = cos[:, None], sin[:, None]
    return jnp.concatenate([low * c - high * s, high * c + low * s], axis=-1).astype(x.dtype)
