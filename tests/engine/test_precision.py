"""bfloat16 where the processor has it, bfloat16 values in float32 where it has not."""

import jax.numpy as jnp
import numpy as np
import pytest

from specjax.engine import precision


def test_a_cpu_without_bfloat16_holds_rounded_values_as_float32(monkeypatch):
    monkeypatch.setattr(precision, "_cpu_has_bfloat16", lambda: False)
    weights = {"w": jnp.asarray(np.array([1.001, -3.14159], np.float32), jnp.bfloat16)}
    held = precision.hold(weights, jnp.dtype("bfloat16"))
    assert held["w"].dtype == jnp.float32
    assert np.array_equal(held["w"], np.asarray(weights["w"], np.float32))
    assert not np.array_equal(held["w"], np.array([1.001, -3.14159], np.float32))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_cpu_with_bfloat16_holds_what_was_asked(monkeypatch, dtype):
    monkeypatch.setattr(precision, "_cpu_has_bfloat16", lambda: True)
    assert precision.held_dtype(jnp.dtype(dtype)) == dtype
    weights = {"w": jnp.ones((2,), dtype)}
    assert precision.hold(weights, jnp.dtype(dtype)) is weights


@pytest.mark.parametrize(
    ("flags", "has"), [("flags : fpu avx2", False), ("flags : avx512_bf16 fpu", True), ("model name : x", True)]
)
def test_the_processor_is_asked(monkeypatch, flags, has):
    monkeypatch.setattr(precision.Path, "read_text", lambda self, encoding: flags)
    assert precision._cpu_has_bfloat16() is has


def test_auto_is_float32_on_a_cpu():
    assert precision.value_dtype("auto") == jnp.float32
    assert precision.value_dtype("bfloat16") == jnp.bfloat16
