"""The layers that decoders and drafters are made of. Matrices are stored `[out, in]`, as checkpoints have them."""

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.array_types import Array, Float
from specjax.pallas_kernels.project.op import project

INIT_STD = 0.02


class RMSNorm(nnx.Module):
    """Root-mean-square norm over the last axis, accumulated in float32 (arXiv 1910.07467)."""

    def __init__(self, size: int, eps: float, dtype=jnp.float32):
        self.eps = eps
        self.weight = nnx.Param(jnp.ones((size,), dtype))

    def __call__(self, x: Float[Array, "*n d"]) -> Float[Array, "*n d"]:
        wide = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (wide * scale * self.weight[...].astype(jnp.float32)).astype(x.dtype)


class Projection(nnx.Module):
    """`x @ weight.T (+ bias)`, with the weight stored `[out, in]`."""

    def __init__(self, size_in: int, size_out: int, *, bias: bool = False, rngs: nnx.Rngs, dtype=jnp.float32):
        self.weight = nnx.Param(INIT_STD * jax.random.normal(rngs.params(), (size_out, size_in), dtype))
        self.bias = nnx.Param(jnp.zeros((size_out,), dtype)) if bias else None

    def __call__(self, x: Float[Array, "N i"]) -> Float[Array, "N o"]:
        y = project(self.weight[...], x)
        return y if self.bias is None else y + self.bias[...]


def rotate(x: Float[Array, "N h f"], cos: Float[Array, "N f2"], sin: Float[Array, "N f2"]) -> Float[Array, "N h f"]:
    """Rotary position embedding, half-split ("NeoX") pairs (arXiv 2104.09864), in float32."""
    half = x.shape[-1] // 2
    low, high = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    c, s = cos[:, None, :], sin[:, None, :]
    return jnp.concatenate([low * c - high * s, high * c + low * s], axis=-1).astype(x.dtype)
