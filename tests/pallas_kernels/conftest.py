"""Kernels are interpreted here."""

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def uncached(request):
    """Interpreted kernels are not written to the suite's cache of programs: serializing a large one crashed XLA."""
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    if request.path.stem != "test_tree_attention":  # the reference is an ordinary program
        jax.config.update(name, 1e9)
    yield
    jax.config.update(name, before)
