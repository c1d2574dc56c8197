"""The product as targets and drafters call it: the reference's function, on the backend that dispatch picks."""

from specjax.array_types import Array, Float
from specjax.pallas_kernels import dispatch


def project(weight: Float[Array, "o i"], x: Float[Array, "N i"], out_dtype=None) -> Float[Array, "N o"]:
    """`x @ weight.T`, in `out_dtype` (default: x's)."""
    return dispatch.call("project", "project", weight, x, out_dtype=out_dtype)
