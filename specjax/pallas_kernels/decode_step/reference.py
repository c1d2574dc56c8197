"""The whole step in plain `jnp` over the fused step's weights and cache: its specification, and the path of prefill."""

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
    tapped = [x] if 0 in taps else []
    for layer in range(plan.layers):
        n = norm(x, weights.norms[layer, 0], plan.eps)
        qkv = product(plan, weights, layer, "qkv", n).reshape(len(x), -1, plan.dim)
        q, k, v = jnp.split(qkv, (plan.heads, plan.heads + plan.groups), axis=1)
        if weights.head_norms is not None:
            q = norm(q, weights.head_norms[layer, 0], plan.eps)
            k = norm(k, weights.head_norms[layer, 1], plan.eps)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k_pages, v_pages = kv.write(k_cache[layer], k, table, rows), kv.write(v_cache[layer], v, table, rows)
        k_cache, v_cache = k_cache.at[layer].set(k_pages), v_cache.at[layer].set(v_pages)
        y = tree_attention(q, k, v, k_pages, v_pages, table, committed, rows, scale=plan.dim**-0.5)
        x = x + product(plan, weights, layer, "out", y.reshape(len(x), -1))
        n = norm(x, weights.norms[layer, 1], plan.eps)
        gate, up = jnp.split(product(plan, weights, layer, "gate_up", n), 2, axis=-1)
        x = x + product(plan, weights, layer, "down", jax.nn.silu(gate) * up)
        if layer + 1 in taps:
            tapped.append(x)
    hidden = norm(x, weights.final_norm, plan.eps)
    return hidden, jnp.concatenate(tapped, axis=-1) if taps else None, k_cache, v_cache


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
