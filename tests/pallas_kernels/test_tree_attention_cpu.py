"""The CPU's attention kernel against the reference over the shared cases."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.pallas_kernels.tree_attention import cases, cpu, reference

STATIC = ("scale", "window", "softcap")
REFERENCE = jax.jit(reference.tree_attention, static_argnames=STATIC)
KERNEL = jax.jit(cpu.tree_attention, static_argnames=STATIC)
TAKEN = [case for case in (*cases.quick(), *cases.sweep()) if case.dim % cpu.WHOLE == 0]


@pytest.mark.parametrize("case", TAKEN, ids=lambda case: case.name)
def test_equals_the_reference(case):
    inputs = cases.build(case)
    got = np.asarray(KERNEL(*inputs.args, **case.options), np.float32)[inputs.live]
    want = np.asarray(REFERENCE(*inputs.args, **case.options), np.float32)[inputs.live]
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got, want, atol=cases.TOLERANCE[case.dtype], rtol=0)


def test_the_cases_reach_the_kernel():
    """Beyond so many rows the reference is what runs: most cases are below."""
    assert sum(case.width <= cpu.MOST_ROWS for case in TAKEN) > 10


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("rows", "tile"), [(3, 3), (2, 150), (7, 1)])
def test_queries_over_a_tile_of_another_size(rows, tile, dtype):
    """Drafters: a tile longer than a block of slots, whose first blocks a query may not see at all."""
    rng = np.random.default_rng(rows)
    committed = jnp.asarray([0, 70, 33], jnp.int32)
    q = jnp.asarray(rng.normal(size=(3, rows, 4, 32)), dtype)
    k, v = (jnp.asarray(rng.normal(size=(3, tile, 2, 32)), dtype) for _ in range(2))
    pages = [jnp.asarray(rng.normal(size=(3, 2, 128, 32)), dtype) for _ in range(2)]
    seen = np.zeros((3, rows, tile), bool)
    seen[..., -1] = True
    args = (q, k, v, jnp.asarray(seen), *pages, None, committed, committed[:, None] + jnp.arange(rows))
    got, want = (
        np.asarray(jax.jit(way.attend, static_argnames=STATIC)(*args, scale=0.3, window=40), np.float32)
        for way in (cpu, reference)
    )
    np.testing.assert_allclose(got, want, atol=cases.TOLERANCE[dtype], rtol=0)


def test_large_scores_do_not_overflow():
    """The softmax runs along: a later block may hold a far higher score, and a far lower one weighs nothing."""
    rng = np.random.default_rng(1)
    q, k, v = (jnp.asarray(rng.normal(size=(1, 2, 1, 16)), jnp.float32) for _ in range(3))
    keys, values = (rng.normal(size=(1, 1, 256, 16)).astype(np.float32) for _ in range(2))
    keys[0, 0, 200] = 400 * np.asarray(q)[0, 0, 0]
    args = (q, k, v, jnp.eye(2, dtype=bool)[None], jnp.asarray(keys), jnp.asarray(values), None)
    args = (*args, jnp.asarray([256]), jnp.asarray([[256, 257]]))
    got, want = (np.asarray(way.attend(*args, scale=1.0)) for way in (cpu, reference))
    np.testing.assert_allclose(got, want, atol=2e-5)
    np.testing.assert_allclose(got[0, 0, 0], values[0, 0, 200], atol=1e-5)


def test_what_the_kernel_does_not_have_is_declined():
    q = jnp.zeros((1, 2, 2, 24))
    args = (q, q, q, jnp.ones((1, 2, 2), bool), jnp.zeros((1, 2, 64, 24)), jnp.zeros((1, 2, 64, 24)), None)
    with pytest.raises(NotImplementedError, match="heads of 24"):
        cpu.attend(*args, jnp.zeros(1, jnp.int32), jnp.zeros((1, 2), jnp.int32), scale=1.0)
