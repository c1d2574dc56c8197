"""The product in plain `jnp`; on a CPU in the form that XLA is fastest at for the type and the number of rows."""

import functools

import jax
import jax.numpy as jnp

from specjax.array_types import Array, Float

FEW_ROWS = 5  # float32 on a CPU: up to here a product is fastest unpadded
MANY_ROWS = 32  # and beyond here as fast as written
VECTOR = 16  # float32 numbers in the widest vector of a CPU (512 bits)


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
