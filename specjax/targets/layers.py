"""The layers that decoders and drafters are made of. Matrices are stored `[out, in]`, as checkpoints have them."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.array_types import Array, Float

INIT_STD = 0.02
FEW_ROWS = 5  # float32 on a CPU: up to here a product is fastest unpadded
MANY_ROWS = 32  # and beyond here as fast as written
VECTOR = 16  # float32 numbers in the widest vector of a CPU (512 bits)


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


def project(weight: Float[Array, "o i"], x: Float[Array, "N i"], out_dtype=None) -> Float[Array, "N o"]:
    """`x @ weight.T`, in `out_dtype` (default: x's)."""
    return jax.lax.platform_dependent(
        weight,
        x,
        cpu=functools.partial(_project_cpu, out_dtype=out_dtype),
        default=functools.partial(_project, out_dtype=out_dtype),
    )


def _project(weight: Array, x: Array, out_dtype) -> Array:
    return jax.lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=out_dtype)


def _project_cpu(weight: Array, x: Array, out_dtype) -> Array:
    """`x @ weight.T` by the product that XLA's CPU backend is fastest at, for this type and number of rows.

    bfloat16: as written; but a single row would take a scalar path, fourteen times the time of two, so it gets company.
    float32, few rows: as `weight @ x.T`, where two to five rows cost little more than one. From six on the same
    product falls off its vector path unless the rows fill vectors, so they are padded (6 to 16 rows: one price).
    XLA would swap the operands back to get rid of the transposition; the barriers keep them.
    """
    rows = x.shape[0]
    if x.dtype == jnp.bfloat16 and rows == 1:
        return jax.lax.optimization_barrier(_project(weight, _pad(x, 2), out_dtype))[:1]
    if x.dtype == jnp.bfloat16 or rows > MANY_ROWS:
        return _project(weight, x, out_dtype)
    padded = x if rows <= FEW_ROWS else _pad(x, -(-rows // VECTOR) * VECTOR)
    y = jax.lax.dot_general(weight, padded, (((1,), (1,)), ((), ())), preferred_element_type=out_dtype)
    return jax.lax.optimization_barrier(y)[:, :rows].T


def _pad(x: Array, rows: int) -> Array:
    return jax.lax.optimization_barrier(jnp.pad(x, ((0, rows - x.shape[0]), (0, 0))))


def rotate(x: Float[Array, "N h f"], cos: Float[Array, "N f2"], sin: Float[Array, "N f2"]) -> Float[Array, "N h f"]:
    """Rotary position embedding, half-split ("NeoX") pairs (arXiv 2104.09864), in float32."""
    half = x.shape[-1] // 2
    low, high = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    c, s = cos[:, None, :], sin[:, None, :]
    return jnp.concatenate([low * c - high * s, high * c + low * s], axis=-1).astype(x.dtype)
