"""Which dtype a run asks for, and which one the machine should hold it in."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

NATIVE = ("avx512_bf16", "amx_bf16", "bf16")  # x86 flags, and Arm's


def value_dtype(name: str) -> Any:
    """The dtype that `dtype: name` means; `auto` is float32 on a CPU and bfloat16 elsewhere."""
    if name == "auto":
        name = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return jnp.dtype(name)


def held_dtype(dtype: Any) -> Any:
    """The dtype that weights of `dtype` are held and computed in.

    A CPU without bfloat16 instructions multiplies bfloat16 slower than float32 (SmolLM2-135M on two Zen 3 cores: 51 ms
    a step against 40), so there the values, rounded to bfloat16, are held as float32.
    """
    if dtype == jnp.bfloat16 and jax.default_backend() == "cpu" and not _cpu_has_bfloat16():
        return jnp.dtype("float32")
    return dtype


def hold(params: Any, dtype: Any) -> Any:
    """`params` in `held_dtype(dtype)`."""
    held = held_dtype(dtype)
    return params if held == dtype else jax.tree.map(lambda x: x.astype(held), params)


def _cpu_has_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16 itself; true where that cannot be found out."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return True
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), None)
    return flags is None or any(name in flags.split() for name in NATIVE)
