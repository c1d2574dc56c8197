"""Which backend an op runs on, decided while a program is traced.

Every op is a folder with `reference.py` and the kernels it has: `tpu.py`, `mosaic_gpu.py`, `triton.py`, and for CPUs
`cpu.py`, which is C and not Pallas. A backend declines what it cannot take with `NotImplementedError`, and the next one
is tried; the reference takes everything. Nothing here looks at a device before a program is traced.
"""

import functools
import importlib
import importlib.util
import logging
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax

Kernels = Literal["auto", "reference", "pallas", "interpret"]

# Backends of each platform, the preferred one first.
BACKENDS = {"tpu": ("tpu",), "gpu": ("mosaic_gpu", "triton"), "cuda": ("mosaic_gpu", "triton"), "rocm": ("triton",)}
NATIVE = {"cpu": ("cpu",)}  # kernels that are not Pallas: taken by `auto` alone
INTERPRETED = ("tpu",)  # what `interpret` simulates on a platform without kernels of its own

_log = logging.getLogger(__name__)
_kernels = jax.make_user_context("auto")


def use(kernels: Kernels):
    """Context in which programs are traced with `kernels`; part of the key of JAX's trace caches.

    `auto` takes a kernel where the platform has one. `pallas` is the same, but no Pallas kernels are an error.
    `interpret` simulates kernels instead of compiling them: very slow, to look for faults. `reference` is plain `jnp`.
    """
    if kernels not in get_args(Kernels):
        raise ValueError(f"kernels must be one of {', '.join(get_args(Kernels))}; got {kernels!r}")
    return _kernels(kernels)


def traced_with(kernels: Kernels, function: Callable) -> Callable:
    """`function`, traced with `kernels` wherever it is traced."""

    @functools.wraps(function)
    def inner(*args, **kwargs):
        with use(kernels):
            return function(*args, **kwargs)

    return inner


def platform() -> str:
    """The platform that the program being traced is for: the abstract device's around it, else JAX's default."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def backends(op: str, kernels: Kernels, platform: str) -> tuple[str, ...]:
    """The backends that `op` tries in turn, without the reference, which comes last.

    Raises:
        ValueError: `pallas` on a platform that has no kernels.
    """
    if kernels == "reference":
        return ()
    if kernels == "pallas" and platform not in BACKENDS:
        raise ValueError(
            f"kernels is 'pallas', and there are none for {platform}: take 'auto', or 'interpret' to simulate them"
        )
    names = BACKENDS.get(platform, NATIVE.get(platform, ()) if kernels == "auto" else INTERPRETED)
    return tuple(name for name in names if importlib.util.find_spec(_module(op, name)))


def call(op: str, function: str, *args: Any, **options: Any) -> Any:
    """Run `function` of the op's first backend that takes the arguments, else the reference's.

    Args:
        op: a folder of `pallas_kernels`.
        function: a name that the reference and the backends have; backends take `interpret` besides.
        *args: its arguments.
        **options: its keyword arguments.
    """
    kernels = _kernels.value
    for name in backends(op, kernels, platform()):
        try:
            run = getattr(importlib.import_module(_module(op, name)), function)
            return run(*args, interpret=kernels == "interpret", **options)
        except NotImplementedError as declined:
            _note(op, name, str(declined))
    return getattr(importlib.import_module(_module(op, "reference")), function)(*args, **options)


def _module(op: str, name: str) -> str:
    return f"specjax.pallas_kernels.{op}.{name}"


@functools.cache
def _note(op: str, backend: str, reason: str) -> None:
    """One line, once, for each reason."""
    _log.warning("%s: the %s kernel declines (%s); trying the next", op, backend, reason)
