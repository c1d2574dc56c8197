"""Kernels for CPUs, in C: compiled for this very processor, kept in the user's cache, called through XLA's FFI.

XLA's CPU backend is slow at what decoding is made of, products of few rows and attention over a cache. Where a machine
has a C compiler, as most do, it makes better ones in seconds; where there is none, XLA's programs run.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import jax
import jaxlib

HEADER = Path(__file__).with_name("cpu.h")
FLAGS = ("-O3", "-march=native", "-shared", "-fPIC", "-std=gnu11", "-lm")
COMPILERS = ("cc", "gcc", "clang")
SECONDS = 60  # for a file that takes two


def handler(source: Path) -> str:
    """The name by which a program calls the kernel in `source`, a file `OP/cpu.c` that defines `specjax_OP`.

    Raises:
        NotImplementedError: it cannot be made here; says why.
    """
    name, reason = _registered(source)
    if reason:
        raise NotImplementedError(reason)
    return name


@functools.cache
def compiler() -> str | None:
    """The compiler's version, a line; None if there is none. The speed of kernels may depend on it."""
    try:
        said = subprocess.run([_compiler(), "--version"], capture_output=True, text=True, check=True, timeout=SECONDS)
    except (OSError, subprocess.SubprocessError):
        return None
    return said.stdout.splitlines()[0]


@functools.cache
def _registered(source: Path) -> tuple[str, str]:
    """The handler's name, and why there is none."""
    name = f"specjax_{source.parent.name}"
    if len(jax.local_devices(backend="cpu")) > 1:
        return name, "several CPU devices in a process: XLA splits its own programs over them"
    try:
        entry = getattr(ctypes.CDLL(str(_built(source))), name)
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(entry), platform="cpu")
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        return name, said[-1] if said else type(error).__name__
    return name, ""


def _built(source: Path) -> Path:
    """The library of a source for this processor, compiler and jaxlib, compiled if the cache has none.

    Raises:
        OSError: there is no compiler, or nowhere to write.
        subprocess.SubprocessError: it does not compile.
    """
    command = [_compiler(), *FLAGS, "-I", jax.ffi.include_dir(), "-I", str(HEADER.parent), str(source)]
    known = (HEADER.read_text(), source.read_text(), str(compiler()), _processor(), jaxlib.__version__, *FLAGS)
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    folder = Path(base) / "specjax" / "cpu-kernels"
    library = folder / f"{source.parent.name}-{hashlib.sha256('|'.join(known).encode()).hexdigest()[:16]}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / library.name
            subprocess.run([*command, "-o", str(made)], capture_output=True, text=True, check=True, timeout=SECONDS)
            made.replace(library)  # whole or not at all, also when two processes make it
    return library


def _compiler() -> str:
    wanted = os.environ.get("CC")
    for name in (wanted,) if wanted else COMPILERS:
        if found := shutil.which(name):
            return found
    raise FileNotFoundError(f"there is no C compiler ({wanted or ', '.join(COMPILERS)}; CC names another)")


def _processor() -> str:
    """What `-march=native` depends on: machines may share a cache folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))
