"""The arithmetic of a causal drafter's layer, and its weights from canonical tensors.

Traced tensors do as well as numpy's: training differentiates through the same lines that load a file.

q, k, v (and the output gate) become one matrix, gate and up another. Norm weights stay in float32, with the offset of
`1 + w` norms added in. Interleaved rotation becomes the half-split one by a permutation of the rows of q and k.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.array_types import Array, Float
from specjax.drafters.config import HeadConfig
from specjax.targets.layers import project, rotate


def norm(weight: Float[Array, " d"], x: Float[Array, "*rows d"], eps: float) -> Float[Array, "*rows d"]:
    """Root-mean-square norm over the last axis in float32 (arXiv 1910.07467)."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps) * weight).astype(x.dtype)


def apply(projection: Mapping[str, Array], x: Float[Array, "b n i"]) -> Float[Array, "b n o"]:
    """A projection with its bias, if it has one, on padded rows."""
    y = project(projection["weight"], x.reshape(-1, x.shape[-1])).reshape(*x.shape[:-1], -1)
    return y + projection["bias"] if "bias" in projection else y


def rotate_heads(x: Float[Array, "N h f"], cos: Array, sin: Array) -> Array:
    """Rotate the leading `2 * cos.shape[-1]` dimensions of each head; the rest pass."""
    turning = 2 * cos.shape[-1]
    if turning == x.shape[-1]:
        return rotate(x, cos, sin)
    return jnp.concatenate([rotate(x[..., :turning], cos, sin), x[..., turning:]], axis=-1)


def attention_inputs(c: HeadConfig, layer: Mapping[str, Any], x: Float[Array, "b n i"], cos: Array, sin: Array):
    """Rotated queries and keys, values, and the output gate if the layer has one (else None)."""
    heads, groups = c.num_heads, c.num_kv_heads
    joined = apply(layer["qkv"], x).reshape(x.shape[0] * x.shape[1], -1, c.head_dim)
    q, k, v, gate = jnp.split(joined, (heads, heads + groups, heads + 2 * groups), axis=1)
    if c.qk_norm:
        q, k = norm(layer["q_norm"], q, c.rms_norm_eps), norm(layer["k_norm"], k, c.rms_norm_eps)
    q, k = (rotate_heads(t, cos, sin) for t in (q, k))
    q, k, v = (t.reshape(*x.shape[:2], *t.shape[1:]) for t in (q, k, v))
    return q, k, v, gate.reshape(*x.shape[:2], -1) if c.attention_gate else None


def mlp(c: HeadConfig, layer: Mapping[str, Any], x: Float[Array, "b n d"]) -> Float[Array, "b n d"]:
    """The gated MLP (arXiv 2002.05202) of a residual stream, its norm included."""
    gate, up = jnp.split(apply(layer["gate_up"], norm(layer["mlp_norm"], x, c.rms_norm_eps)), 2, axis=-1)
    return apply(layer["down"], jax.nn.silu(gate) * up)


def norm_weight(config: HeadConfig, tensors: Mapping[str, np.ndarray], name: str) -> Array:
    """A norm's factor, float32."""
    weight = tensors[f"{name}.weight"].astype(np.float32)
    return jnp.asarray(1 + weight if config.norm_offset else weight)


def layer_params(c: HeadConfig, tensors: Mapping[str, np.ndarray], prefix: str, dtype: Any) -> dict[str, Any]:
    """The arrays of one layer, from its tensors `prefix.*`."""

    def parts(kind: str) -> tuple[np.ndarray, ...]:
        """Rows of q, k, v and the gate, per head `[heads, f, ...]`."""
        q, k, v = (tensors[f"{prefix}.self_attn.{x}_proj.{kind}"] for x in "qkv")
        q = q.reshape(c.num_heads, -1, *q.shape[1:])
        k, v = (x.reshape(c.num_kv_heads, -1, *x.shape[1:]) for x in (k, v))
        return (_halves(c, q[:, : c.head_dim]), _halves(c, k), v, q[:, c.head_dim :])

    def joined(kind: str) -> Array:
        rows = [x.reshape(-1, *x.shape[2:]) for x in parts(kind)]
        return jnp.asarray(_stack(rows), dtype)

    def matrix(*names: str) -> dict:
        return {"weight": jnp.asarray(_stack([tensors[f"{prefix}.{name}.weight"] for name in names]), dtype)}

    attn, mlp = "self_attn", "mlp"
    layer = {
        "input_norm": norm_weight(c, tensors, f"{prefix}.input_layernorm"),
        "mlp_norm": norm_weight(c, tensors, f"{prefix}.post_attention_layernorm"),
        "qkv": {"weight": joined("weight")} | ({"bias": joined("bias")} if c.attention_bias else {}),
        "out": matrix(f"{attn}.o_proj"),
        "gate_up": matrix(f"{mlp}.gate_proj", f"{mlp}.up_proj"),
        "down": matrix(f"{mlp}.down_proj"),
    }
    if c.qk_norm:
        for x in "qk":
            weight = norm_weight(c, tensors, f"{prefix}.{attn}.{x}_norm")
            layer[f"{x}_norm"] = _halves(c, weight[None])[0]
    return layer


def _stack(parts: Sequence[Any]) -> Any:
    """Matrices above each other: numpy's stay numpy's (loading), traced ones stay traced (training)."""
    return parts[0].__array_namespace__().concat(parts)


def _halves(c: HeadConfig, rows: Any) -> Any:
    """Rows of heads `[heads, f, ...]` with interleaved rotary pairs, in the order of half-split ones.

    Scores do not change when q and k are permuted alike.
    """
    if not c.rope_interleaved:
        return rows
    turning = c.rotary_dims or c.head_dim
    order = [*range(0, turning, 2), *range(1, turning, 2), *range(turning, c.head_dim)]
    return rows[:, np.array(order)]
