"""The fused decode step for absent GPUs: each of its blocks apart, and the whole of it as dispatch picks it."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from specjax.pallas_kernels import dispatch
from specjax.pallas_kernels.aot import Job
from specjax.pallas_kernels.aot_decode import MODELS, shapes
from specjax.pallas_kernels.decode_step import triton
from specjax.pallas_kernels.decode_step.weights import Plan

ROWS: dict[str, tuple[int, ...]] = {"bfloat16": (8, 32, 128), "float32": (8, 128)}
CONTEXT = 1024  # committed slots of the whole step


def jobs(platform: str, short: bool) -> list[Job]:
    """The blocks for each model, dtype and number of rows, and where XLA can compile it the whole; `short`: 8 rows."""
    names = ("Llama-3.1-8B",) if short else ("Llama-3.1-8B", "Qwen3-8B")
    kinds: dict[str, tuple[int, ...]] = {"bfloat16": (8,)} if short else ROWS
    found = []
    for name in names:
        for dtype, sizes in kinds.items():
            plan = Plan.of(dtype=dtype, **MODELS[name])
            for rows in sizes:
                made = blocks(plan, 1, rows, CONTEXT, platform)
                title = f"decode_step {name} {dtype}, {rows} rows"
                found += [dataclasses.replace(job, name=f"{title}: {matrix}") for matrix, job in made.items()]
    if short or platform != "cuda":
        return found
    wholes = [(name, whole(Plan.of(dtype="bfloat16", **MODELS[name]), 1, 8, CONTEXT)) for name in names]
    return found + [
        dataclasses.replace(job, name=f"decode_step {name} bfloat16, 8 rows: all layers") for name, job in wholes
    ]


def blocks(plan: Plan, batch: int, width: int, context: int, platform: str) -> dict[str, Job]:
    """One layer's kernels but attention, by matrix, for `width` rows of each request; a job needs its weights' bytes.

    Args:
        plan: the decoder.
        batch: requests, each with `context` committed slots and as many free ones.
        width: rows of a request.
        context: slots.
        platform: JAX's.
    """
    args, rows = shapes(plan, batch, width, 2 * context, None), batch * width
    weights, x, cos, sin, cache = args[:5]
    step = triton.Step(plan, rows, cache.shape[1], cache.shape[3], platform == "cuda")
    number, slots = (jax.ShapeDtypeStruct((n,), jnp.int32) for n in (1, rows))
    like = functools.partial(_rows, rows, plan.dtype)
    attended, active = like(plan.heads * plan.dim), like(plan.intermediate)
    made: dict[str, tuple[Any, str, tuple, tuple[int, ...]]] = {
        "qkv": (triton.qkv, "decode_qkv", (number, weights, x, cos, sin, slots, cache, cache), (6, 7)),
        "out": (functools.partial(_out, "out"), "decode_out", (number, weights, attended, x), ()),
        "gate_up": (triton.gate_up, "decode_gate_up", (number, weights, x), ()),
        "down": (functools.partial(_out, "down"), "decode_out", (number, weights, active, x), ()),
    }
    return {
        matrix: Job(
            name=matrix,
            function=functools.partial(function, step),
            args=inputs,
            kernel=kernel,
            needed=_needed(plan, matrix),
            donated=donated,
        )
        for matrix, (function, kernel, inputs, donated) in made.items()
    }


def whole(plan: Plan, batch: int, width: int, context: int) -> Job:
    """All layers, attention included, as dispatch picks them; arguments as of `blocks`."""
    cached = 2 * batch * context * plan.layers * plan.groups * plan.dim * jnp.dtype(plan.dtype).itemsize
    return Job(
        name="all layers",
        function=functools.partial(dispatch.call, "decode_step", "decode_step", plan),
        args=shapes(plan, batch, width, 2 * context, None),
        needed=plan.layers * sum(_needed(plan, matrix) for matrix in plan.matrices) + cached,
        donated=(4, 5),
    )


def _rows(rows: int, dtype: str, size: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((rows, size), jnp.dtype(dtype))


def _out(matrix: str, step: triton.Step, *args: Any) -> Any:
    return triton.out(step, matrix, *args)


def _needed(plan: Plan, matrix: str) -> int:
    found = plan.matrices[matrix]
    return found.size_in * found.size_out * (2 if matrix == "gate_up" else 1) * jnp.dtype(plan.dtype).itemsize
