"""Kernels in C: made once, kept, and done without where they cannot be made."""

import ctypes
import dataclasses
import functools
import logging
import platform

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.pallas_kernels import cpu, dispatch
from specjax.pallas_kernels.project import cpu as kernel
from specjax.pallas_kernels.project.op import project
from specjax.pallas_kernels.tree_attention import cases
from specjax.pallas_kernels.tree_attention import cpu as attention


@pytest.fixture
def afresh(tmp_path, monkeypatch):
    """An empty cache, and a process that has made no kernel yet; its handlers keep the name that JAX knows."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cpu._registered.cache_clear()
    cpu.compiler.cache_clear()
    yield tmp_path / "specjax" / "cpu-kernels"
    monkeypatch.undo()
    cpu._registered.cache_clear()
    cpu.compiler.cache_clear()


def test_a_library_is_compiled_once_for_a_source_and_a_processor(afresh, monkeypatch):
    first = cpu._built(kernel.SOURCE)
    assert first.parent == afresh and list(afresh.iterdir()) == [first]
    made = first.stat().st_mtime_ns
    assert cpu._built(kernel.SOURCE) == first and first.stat().st_mtime_ns == made
    monkeypatch.setattr(cpu, "_processor", lambda: "another")
    other = cpu._built(kernel.SOURCE)
    assert other != first and sorted(afresh.iterdir()) == sorted([first, other])


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [("no-such-compiler", "there is no C compiler \\(no-such-compiler"), ("false", "returned non-zero exit status 1")],
)
def test_without_a_compiler_xla_does_it_and_one_line_says_why(afresh, monkeypatch, caplog, compiler, reason):
    monkeypatch.setenv("CC", compiler)
    dispatch._note.cache_clear()
    with pytest.raises(NotImplementedError, match=reason):
        cpu.handler(kernel.SOURCE)
    assert cpu.compiler() is None and not list(afresh.glob("*"))
    rng = np.random.default_rng(0)
    weight, x = (jnp.asarray(rng.normal(size=(n, 32)), jnp.float32) for n in (24, 3))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            np.testing.assert_allclose(project(weight, x), x @ weight.T, atol=1e-5)
    [line] = [r.getMessage() for r in caplog.records]
    assert line.startswith("project: the cpu kernel declines (") and line.endswith("; trying the next")


def test_what_does_not_compile_is_not_kept(afresh, tmp_path):
    broken = tmp_path / "project" / "cpu.c"
    broken.parent.mkdir()
    broken.write_text("int specjax_project(;")
    with pytest.raises(NotImplementedError, match="error"):
        cpu.handler(broken)
    assert not list(afresh.iterdir())


def test_a_process_of_several_cpu_devices_leaves_it_to_xla(afresh, monkeypatch):
    monkeypatch.setattr(jax, "local_devices", lambda backend=None: [None, None])
    with pytest.raises(NotImplementedError, match="several CPU devices"):
        cpu.handler(kernel.SOURCE)


def test_a_compiler_is_named_here():
    """The suite runs where there is one: without, it would compare the reference with itself."""
    assert cpu.compiler()
    assert cpu.handler(kernel.SOURCE) == "specjax_project"


NARROWER = {
    "avx": ("-mno-avx512f",),
    "avx_unfused": ("-mno-avx512f", "-mtune=znver3"),  # for which GCC parts the sums of some loops: mul and add
    "sse": ("-mno-avx512f", "-mno-avx"),
}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="flags of x86 compilers")
@pytest.mark.parametrize("vectors", NARROWER)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_processors_with_narrower_vectors_compute_the_same(vectors, dtype, monkeypatch):
    """What other processors would be given, on this one."""
    monkeypatch.setattr(cpu, "FLAGS", (*cpu.FLAGS, *NARROWER[vectors]))
    calls = {}
    for source in (kernel.SOURCE, attention.SOURCE):
        entry = getattr(ctypes.CDLL(str(cpu._built(source))), f"specjax_{source.parent.name}")
        calls[source.parent.name] = name = f"test_{source.parent.name}_{vectors}_{dtype}"
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(entry), platform="cpu")
    monkeypatch.setattr(cpu, "handler", lambda source: calls[source.parent.name])
    rng = np.random.default_rng(0)
    for rows in (1, 5, 8, 19):
        weight, x = (jnp.asarray(rng.normal(size=(n, 77)), dtype) for n in (101, rows))
        wide = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
        product = np.asarray(kernel._product(weight, x))
        np.testing.assert_allclose(product, wide, atol=1e-4)
        np.testing.assert_array_equal(kernel._product(weight, x[:1]), product[:1])
    case = cases.quick()[0]
    inputs = cases.build(dataclasses.replace(case, dtype=dtype))
    got, want = (
        np.asarray(jax.jit(functools.partial(way.tree_attention, **case.options))(*inputs.args), np.float32)[
            inputs.live
        ]
        for way in (attention, attention.reference)
    )
    np.testing.assert_allclose(got, want, atol=cases.TOLERANCE[dtype], rtol=0)
