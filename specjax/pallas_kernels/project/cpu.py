"""The product for few rows on a CPU: as long as reading the weights takes, and each row alike whatever is beside it."""

from pathlib import Path

import jax
import jax.numpy as jnp

from specjax.array_types import Array, Float
from specjax.pallas_kernels import cpu
from specjax.pallas_kernels.project import reference

SOURCE = Path(__file__).with_name("cpu.c")
MOST_ROWS = {jnp.dtype(jnp.float32): 32, jnp.dtype(jnp.bfloat16): 8}  # beyond, XLA's product is as fast or faster


def project(
    weight: Float[Array, "o i"], x: Float[Array, "N i"], out_dtype=None, *, interpret: bool = False
) -> Float[Array, "N o"]:
    """`reference.project` on a CPU. Of few rows, each number is summed in float32 in one order, so that a row's result
    does not depend on the other rows or how many they are. There is nothing to `interpret`.
    """
    if x.dtype != weight.dtype or not 0 < x.shape[0] <= MOST_ROWS.get(x.dtype, 0):
        return reference.project(weight, x, out_dtype)
    cpu.handler(SOURCE)
    return _product(weight, x).astype(out_dtype or x.dtype)


@jax.custom_jvp
def _product(weight: Array, x: Array) -> Array:
    shape = jax.ShapeDtypeStruct((x.shape[0], weight.shape[0]), jnp.float32)
    return jax.ffi.ffi_call(cpu.handler(SOURCE), shape, vmap_method="sequential")(weight, x)


@_product.defjvp
def _product_jvp(primals, tangents):
    (weight, x), (weight_dot, x_dot) = primals, tangents
    wide = jnp.float32
    return _product(weight, x), reference.project(weight_dot, x, wide) + reference.project(weight, x_dot, wide)
