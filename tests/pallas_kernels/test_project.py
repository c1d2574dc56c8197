"""The product: the reference and the CPU's kernel against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.pallas_kernels import dispatch
from specjax.pallas_kernels.project import cpu, reference
from specjax.pallas_kernels.project.op import project

WAYS = {"reference": reference.project, "cpu": cpu.project}
SHAPES = [(96, 40), (97, 64), (1, 32), (5, 7), (200, 129)]  # inner sizes that fill vectors, and that do not


def arrays(rows, outer, inner, dtype, seed=0):
    rng = np.random.default_rng(seed)
    return (jnp.asarray(rng.normal(size=(n, inner)), dtype) for n in (outer, rows))


def wide(weight, x):
    return np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 6, 7, 8, 9, 16, 17, 32, 33])
def test_a_product_for_every_number_of_rows(rows, dtype, way):
    """Each number of rows has a way of its own on a CPU; the rows beside, NaN among them, never mix."""
    weight, x = arrays(rows, 96, 40, dtype, rows)
    run = jax.jit(WAYS[way])
    y = run(weight, x)
    assert y.dtype == x.dtype and y.shape == (rows, 96)
    np.testing.assert_allclose(np.asarray(y, np.float64), wide(weight, x), atol=1e-5 if dtype == "float32" else 0.1)
    precise = jax.jit(functools.partial(WAYS[way], out_dtype=jnp.float32))(weight, x)
    assert precise.dtype == jnp.float32
    np.testing.assert_allclose(precise, wide(weight, x), atol=1e-5)
    spoilt = run(weight, x.at[rows - 1].set(jnp.nan))
    np.testing.assert_array_equal(spoilt[: rows - 1], y[: rows - 1])
    assert np.isnan(np.asarray(spoilt[rows - 1], np.float32)).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("outer", "inner"), SHAPES)
def test_the_kernel_takes_odd_shapes_and_a_row_does_not_depend_on_how_many_there_are(outer, inner, dtype):
    most = cpu.MOST_ROWS[jnp.dtype(dtype)]
    weight, x = arrays(most, outer, inner, dtype)
    run = jax.jit(functools.partial(cpu.project, out_dtype=jnp.float32))
    whole = np.asarray(run(weight, x))
    np.testing.assert_allclose(whole, wide(weight, x), atol=2e-5)
    for rows in range(1, most):
        np.testing.assert_array_equal(run(weight, x[:rows]), whole[:rows])
        np.testing.assert_array_equal(run(weight, x[most - rows :]), whole[most - rows :])


def test_the_kernel_is_what_auto_takes_on_a_cpu_and_the_reference_can_be_asked_for():
    weight, x = arrays(4, 64, 48, "float32")
    lowered = {}
    for kernels in ("auto", "reference"):
        with dispatch.use(kernels):
            lowered[kernels] = jax.jit(project).lower(weight, x).as_text()
    assert "specjax_project" in lowered["auto"] and "specjax_project" not in lowered["reference"]


def test_it_can_be_differentiated_and_mapped():
    weight, x = arrays(3, 20, 33, "float32")

    def loss(way, weight, x):
        return jnp.sum(jnp.sin(way(weight, x)))

    for argument in (1, 2):
        got, want = (jax.grad(loss, argument)(way, weight, x) for way in (cpu.project, reference.project))
        np.testing.assert_allclose(got, want, atol=1e-5)
    many = jnp.stack([weight, 2 * weight])
    np.testing.assert_allclose(
        jax.vmap(cpu.project, (0, None))(many, x), jax.vmap(reference.project, (0, None))(many, x), atol=1e-5
    )


def test_the_handler_refuses_what_it_cannot_read():
    weight, x = arrays(2, 8, 16, "float32")
    call = jax.ffi.ffi_call(cpu.cpu.handler(cpu.SOURCE), jax.ShapeDtypeStruct((2, 9), jnp.float32))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"takes weight \[o, i\] and x \[n, i\]"):
        jax.block_until_ready(call(weight, x))
