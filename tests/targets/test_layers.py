"""The layers that decoders and drafters are made of."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.targets.layers import project


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 2, 5, 6, 16, 17, 32, 33])
def test_project_is_a_product_for_every_number_of_rows(rows, dtype):
    """Each number of rows has a way of its own on a CPU; the rows beside, NaN among them, never mix."""
    rng = np.random.default_rng(rows)
    weight = jnp.asarray(rng.normal(size=(96, 40)), dtype)
    x = jnp.asarray(rng.normal(size=(rows, 40)), dtype)
    wide = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    y = jax.jit(project)(weight, x)
    assert y.dtype == x.dtype and y.shape == wide.shape
    np.testing.assert_allclose(np.asarray(y, np.float64), wide, atol=1e-5 if dtype == "float32" else 0.1)
    precise = jax.jit(lambda w, x: project(w, x, out_dtype=jnp.float32))(weight, x)
    assert precise.dtype == jnp.float32
    np.testing.assert_allclose(precise, wide, atol=1e-5)
    spoilt = jax.jit(project)(weight, x.at[rows - 1].set(jnp.nan))
    np.testing.assert_array_equal(spoilt[: rows - 1], y[: rows - 1])
    assert np.isnan(np.asarray(spoilt[rows - 1], np.float32)).all()
