"""Tree attention for absent GPUs: what to compile."""

import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp

from specjax.pallas_kernels.aot import Job
from specjax.pallas_kernels.aot_gpu import Chip


def job(
    name: str,
    backend: str,
    *,
    batch: int = 8,
    width: int = 16,
    heads: int = 32,
    groups: int = 8,
    dim: int = 128,
    page: int | None = None,
    context: int = 8192,
    window: int | None = None,
    softcap: float | None = None,
    dtype: str = "bfloat16",
) -> Job:
    """Tree attention over a cache that is full, by one of its kernels or by `op`, which picks one."""
    module = importlib.import_module(f"specjax.pallas_kernels.tree_attention.{backend}")
    shape, kind = jax.ShapeDtypeStruct, jnp.dtype(dtype)
    columns = context // (page or context)
    pages = shape((batch * columns, groups, page or context, dim), kind)
    q, tile = shape((batch, width, heads, dim), kind), shape((batch, width, groups, dim), kind)
    table = None if page is None else shape((batch, columns), jnp.int32)
    ints = shape((batch,), jnp.int32), shape((batch, width), jnp.int32)
    read = batch * (context if window is None else min(context, window))
    return Job(
        name=f"tree_attention {name}, {backend}",
        function=functools.partial(module.attend, scale=dim**-0.5, window=window, softcap=softcap),
        args=(q, tile, tile, shape((batch, width, width), jnp.bool_), pages, pages, table, *ints),
        kernel="tree_attention",
        needed=2 * read * groups * dim * kind.itemsize,
    )


MAIN: dict[str, dict[str, Any]] = {"8x16 rows, 8k, dense": {}}
SHAPES: dict[str, dict[str, Any]] = MAIN | {
    "8x16 rows, 8k, pages of 16": {"page": 16},
    "1 row, 8k": {"batch": 1, "width": 1},
    "2x128 rows": {"batch": 2, "width": 128, "page": 64, "context": 2048},
    "window, softcap": {"page": 64, "window": 1024, "softcap": 30.0},
    "heads of 64, 9:3": {"batch": 2, "heads": 9, "groups": 3, "dim": 64, "page": 16, "context": 2048},
    "heads of 80": {"batch": 2, "heads": 8, "groups": 2, "dim": 80, "page": 64, "context": 2048},
    "heads of 96": {"batch": 2, "heads": 8, "groups": 2, "dim": 96, "page": 64, "context": 2048},
    "heads of 192": {"batch": 2, "heads": 8, "groups": 8, "dim": 192, "page": 64, "context": 2048},
    "heads of 256, window": {"batch": 2, "heads": 8, "groups": 4, "dim": 256, "page": 64, "window": 1024},
    "float32": {"batch": 2, "page": 64, "context": 2048, "dtype": "float32"},
}


def jobs(chip: Chip, short: bool) -> list[Job]:
    """What is compiled for a GPU; `short`: the shape that says most."""
    shapes = MAIN if short else SHAPES
    found = [job(name, backend, **shape) for backend in chip.backends for name, shape in shapes.items()]
    return found if short else [*found, job("8x16 rows, 8k, pages of 64", "op", page=64)]
