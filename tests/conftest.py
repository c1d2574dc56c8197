"""Set before anything imports JAX: the CPU, full-precision products, no network, and programs compiled once only."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JAX_DEFAULT_MATMUL_PRECISION"] = "highest"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

# Compiling is most of the suite's time, and many tests make the same programs: they find each other's here.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".cache" / "xla-tests"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "0")


@pytest.fixture(autouse=True, scope="module")
def room_for_programs():
    """A worker runs hundreds of modules' programs."""
    yield
    from support.memory import forget_programs

    forget_programs()
