"""The facts that belong beside every figure: processor, versions, device, and what memory and products reach."""

import os
import platform
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from time import perf_counter
from typing import Any

READ_BYTES = 512 * 2**20  # past every cache
PRODUCT = 2048
REPEATS = 5


def facts() -> dict[str, Any]:
    """Processor, memory, and the versions of what decodes."""
    import jax
    import psutil

    device = jax.devices()[0]
    return {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 2**30, 1),
        "platform": device.platform,
        "device": device.device_kind,
        "devices": jax.device_count(),
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in ("jax", "jaxlib", "flax")},
    }


def cpu_name() -> str:
    """The processor's own name, as far as the system tells it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def ceiling(dtype: str) -> dict[str, float]:
    """What this machine reaches now: reading memory once, and a large matrix product of `dtype`.

    A plain step cannot be faster than its weights are read, nor a wide one than its products run; figures are held
    against these two, measured in the same process.

    Returns:
        `read_gb_s`: the better of a sum and a one-row product over 512 MiB of float32. `gflop_s`: a square product.
    """
    import jax
    import jax.numpy as jnp

    width = 4096
    weights = jnp.ones((width, READ_BYTES // 4 // width), jnp.float32)
    row = jnp.ones((1, width), jnp.float32)
    seconds = min(_fastest(jax.jit(jnp.sum), weights), _fastest(jax.jit(jnp.matmul), row, weights))
    read = weights.nbytes / seconds / 1e9
    del weights
    square = jax.random.normal(jax.random.key(0), (PRODUCT, PRODUCT), dtype)
    product = 2 * PRODUCT**3 / _fastest(jax.jit(jnp.matmul), square, square) / 1e9
    return {"read_gb_s": read, "gflop_s": product}


def _fastest(function: Callable, *args: Any) -> float:
    """Seconds of the best of a few runs, compilation excluded."""
    import jax

    jax.block_until_ready(function(*args))
    best = float("inf")
    for _ in range(REPEATS):
        started = perf_counter()
        jax.block_until_ready(function(*args))
        best = min(best, perf_counter() - started)
    return best
