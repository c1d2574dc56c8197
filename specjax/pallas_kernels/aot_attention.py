"""Tree attention for absent TPUs: what to compile, and its time by the compiler's schedule."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.pallas_kernels.aot import Chip, Job, shares
from specjax.pallas_kernels.schedule import Loop, Schedule


def job(
    name: str,
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
    """Tree attention over a cache that is full."""
    from specjax.pallas_kernels.tree_attention import tpu
    from specjax.pallas_kernels.tree_attention.tpu_request import Shape, bounds_of

    shape, kind = jax.ShapeDtypeStruct, jnp.dtype(dtype)
    columns = context // (page or context)
    pages = shape((batch * columns, groups, page or context, dim), kind)
    q, tile = shape((batch, width, heads, dim), kind), shape((batch, width, groups, dim), kind)
    table = None if page is None else shape((batch, columns), jnp.int32)
    ints = shape((batch,), jnp.int32), shape((batch, width), jnp.int32)
    static = Shape.of(q, tile, pages, table, window, softcap, None)
    committed = np.full(batch, context, np.int32)
    bounds = np.asarray(bounds_of(static, jnp.asarray(committed)))
    read = batch * (context if window is None else min(context, window))
    return Job(
        name=name,
        function=functools.partial(tpu.attend, scale=dim**-0.5, window=window, softcap=softcap),
        args=(q, tile, tile, shape((batch, width, width), jnp.bool_), pages, pages, table, *ints),
        kernel="tree_attention",
        scalars=(bounds, committed, np.arange(batch * columns, dtype=np.int32)),
        needed=2 * read * groups * dim * kind.itemsize,
        estimate=functools.partial(_estimate, static, context) if window is None else None,
        stages=functools.partial(_stages, static) if window is None else None,
        vmem=static.vmem_bytes,
    )


def _estimate(shape: Any, context: int, found: Schedule, chip: Chip) -> dict[str, float]:
    """Time of the kernel of tree attention when every request holds `context` slots, whole blocks.

    A request is what stands before and after its blocks (its draft tile, mostly) and, a block, the longer of its
    bundles and its copies; the copies of one block run beside the bundles of the one before, across requests too.
    """
    request, (*before, plain, _) = _request(shape, found)
    rounds = shape.groups // shape.unrolled
    working = sum(loop.bundles * rounds for loop in plain.loops if loop.has("MXU"))
    copying = max(loop.bundles for loop in plain.loops if not loop.has("MXU"))  # this request's or the next one's
    bundles = plain.bundles + working + copying * (shape.block // shape.piece)
    copied = 2 * shape.groups * shape.block * shape.dim * shape.dtype.itemsize / chip.bandwidth
    around = request.bundles + (before[-1].bundles * rounds if rounds > 1 else 0)
    blocks = context // shape.block
    seconds = shape.batch * (around / chip.clock + blocks * max(bundles / chip.clock, copied)) + copied
    return {"estimate_s": seconds}


def _request(shape: Any, found: Schedule) -> tuple[Loop, list[Loop]]:
    """What the kernel does for a request, and its loops with products in them.

    With several requests it is a loop, with one the kernel. Products are in the loop of blocks that all rows see whole,
    in that of the last one, and before them, where the groups are a loop, in the draft tile's. A compiler may put a few
    into what it makes of the mask, too (v5p's does), ahead of these.
    """
    request = found.kernel if shape.batch == 1 else found.kernel.loops[0]
    return request, [loop for loop in request.loops if loop.has("MXU")]


def _stages(shape: Any, found: Schedule, chip: Chip) -> list[dict[str, Any]]:
    """The loops of the kernel of tree attention: bundles of one trip, inner loops once, and the units in them."""
    request, busy = _request(shape, found)
    names = ["draft tile", "block", "last block"][-2 - (shape.groups > shape.unrolled) :]
    busy = busy[-len(names) :]
    around = dataclasses.replace(request, loops=[])
    return [
        {"stage": name, "bundles": loop.total(), "units": shares(found.filled(loop))}
        for name, loop in zip(["request", *names], [around, *busy], strict=True)
    ]


def jobs(short: bool) -> list[Job]:
    """The kernels compiled for each TPU; `short`: the one that says most."""
    main = job("tree_attention 8x16 rows, 8k, dense")
    if short:
        return [main]
    return [
        main,
        job("tree_attention 8x16 rows, 8k, pages of 64", page=64),
        job("tree_attention 8x16 rows, 8k, pages of 16", page=16),
        job("tree_attention 1 row, 8k", batch=1, width=1),
        job("tree_attention 2x128 rows", batch=2, width=128, page=64, context=2048),
        job("tree_attention window, softcap", page=64, window=1024, softcap=30.0),
        job("tree_attention heads of 64, 9:3", batch=2, heads=9, groups=3, dim=64, page=16, context=2048),
        job("tree_attention heads of 80", batch=2, heads=8, groups=2, dim=80, page=64, context=2048),
        job("tree_attention heads of 96", batch=2, heads=8, groups=2, dim=96, page=64, context=2048),
        job("tree_attention heads of 192", batch=2, heads=8, groups=8, dim=192, page=64, context=2048),
        job("tree_attention heads of 256", batch=2, heads=8, groups=4, dim=256, page=64, context=2048),
        job("tree_attention 32 groups", batch=2, heads=32, groups=32, page=64, context=2048),
        job("tree_attention float32", batch=2, page=64, context=2048, dtype="float32"),
    ]
