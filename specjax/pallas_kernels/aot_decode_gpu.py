"""The fused decode step for absent GPUs: each of its blocks apart, and the whole of it as dispatch picks it."""

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
    found = [
        job for name in names for kind, sizes in kinds.items() for n in sizes for job in blocks(name, kind, n, platform)
    ]
    return found if short or platform != "cuda" else [*found, *(whole(name) for name in names)]


def blocks(model: str, dtype: str, rows: int, platform: str) -> list[Job]:
    """One layer's kernels, but attention, which has jobs of its own; `needed` are the bytes of a block's weights."""
    plan, args = _abstract(model, dtype, rows)
    weights, x, cos, sin, cache = args[:5]
    step = triton.Step(plan, rows, cache.shape[1], cache.shape[3], platform == "cuda")
    number, slots = (jax.ShapeDtypeStruct((n,), jnp.int32) for n in (1, rows))
    like = functools.partial(_rows, rows, dtype)
    attended, active = like(plan.heads * plan.dim), like(plan.intermediate)
    made: dict[str, tuple[Any, str, tuple, tuple[int, ...]]] = {
        "qkv": (triton.qkv, "decode_qkv", (number, weights, x, cos, sin, slots, cache, cache), (6, 7)),
        "out": (functools.partial(_out, "out"), "decode_out", (number, weights, attended, x), ()),
        "gate_up": (triton.gate_up, "decode_gate_up", (number, weights, x), ()),
        "down": (functools.partial(_out, "down"), "decode_out", (number, weights, active, x), ()),
    }
    return [
        Job(
            name=f"decode_step {model} {dtype}, {rows} rows: {matrix}",
            function=functools.partial(function, step),
            args=inputs,
            kernel=kernel,
            needed=_needed(plan, matrix),
            donated=donated,
        )
        for matrix, (function, kernel, inputs, donated) in made.items()
    ]


def whole(model: str, rows: int = 8) -> Job:
    """All layers of a model in bfloat16, attention included, one request."""
    plan, args = _abstract(model, "bfloat16", rows)
    cached = 2 * CONTEXT * plan.layers * plan.groups * plan.dim * 2
    return Job(
        name=f"decode_step {model} bfloat16, {rows} rows: all layers",
        function=functools.partial(dispatch.call, "decode_step", "decode_step", plan),
        args=args,
        needed=plan.layers * sum(_needed(plan, matrix) for matrix in plan.matrices) + cached,
        donated=(4, 5),
    )


def _abstract(model: str, dtype: str, rows: int) -> tuple[Plan, tuple]:
    plan = Plan.of(dtype=dtype, **MODELS[model])
    return plan, shapes(plan, 1, rows, 2 * CONTEXT, None)


def _rows(rows: int, dtype: str, size: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((rows, size), jnp.dtype(dtype))


def _out(matrix: str, step: triton.Step, *args: Any) -> Any:
    return triton.out(step, matrix, *args)


def _needed(plan: Plan, matrix: str) -> int:
    found = plan.matrices[matrix]
    return found.size_in * found.size_out * (2 if matrix == "gate_up" else 1) * jnp.dtype(plan.dtype).itemsize
