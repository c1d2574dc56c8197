"""The Triton kernel, interpreted as plain JAX operations, against the reference over the shared cases."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.pallas_kernels.tree_attention import cases, reference, splits, triton
from specjax.pallas_kernels.tree_attention.tiles import TritonTiles

STATIC = ("scale", "window", "softcap")
REFERENCE = jax.jit(reference.tree_attention, static_argnames=STATIC)
KERNEL = jax.jit(functools.partial(triton.tree_attention, interpret=True), static_argnames=(*STATIC, "tiles"))


def check(case, **options):
    inputs = cases.build(case)
    got = np.asarray(KERNEL(*inputs.args, **case.options, **options), np.float32)[inputs.live]
    want = np.asarray(REFERENCE(*inputs.args, **case.options), np.float32)[inputs.live]
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got, want, atol=cases.TOLERANCE[case.dtype], rtol=0)


@pytest.mark.parametrize("case", cases.quick(), ids=lambda case: case.name)
def test_interpreted_equals_the_reference(case):
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", cases.sweep(), ids=lambda case: case.name)
def test_interpreted_equals_the_reference_everywhere(case):
    check(case)


def test_a_request_may_be_split_finer_than_its_blocks():
    """Splits of several blocks, of one, and empty ones; a window leaves the first splits nothing to do."""
    case = cases.Case((400, 40, 0), (3, 2, 1), 3, heads=2, groups=1, dim=16, page=16, window=150, fill=cases.NAN)
    check(case, tiles=lambda sizes: dataclasses.replace(TritonTiles.rule(sizes), splits=8))


def test_partial_softmaxes_merge_into_the_whole():
    rng = np.random.default_rng(0)
    scores, values = rng.normal(size=(4, 6, 5)) * 9, rng.normal(size=(4, 5, 7))
    weights = np.exp(scores - scores.max())
    totals = weights.sum(-1, keepdims=True)
    parts = np.einsum("crj,cjf->crf", weights, values) / totals
    summed = np.log2(totals) + scores.max() / np.log(2)
    summed[2], parts[2] = triton.NEG, 0  # a split without slots
    keep = [0, 1, 3]
    want = np.einsum("crj,cjf->rf", weights[keep], values[keep]) / weights[keep].sum(axis=(0, 2))[:, None]
    got = splits.merge_splits(jnp.float32(parts), jnp.float32(summed))
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_splits_fill_a_gpu_and_no_more():
    assert splits.choose_splits(8, 8192) == 32  # one request of eight groups
    assert splits.choose_splits(64, 8192) == 4
    assert splits.choose_splits(8, 1024) == 4  # a short cache
    assert splits.choose_splits(8, 100) == splits.choose_splits(1000, 8192) == 1


def test_what_the_kernel_does_not_have_is_declined():
    q, k, v, k_pages, v_pages, table, committed, rows = cases.build(cases.Case((4, 4), (2, 2), 2, page=16)).args
    decline = functools.partial(triton.tree_attention, committed=committed, rows=rows, interpret=True, scale=1.0)
    with pytest.raises(NotImplementedError, match="dtypes float32, float32 and a cache of bfloat16"):
        decline(q, k, v, *(x.astype("bfloat16") for x in (k_pages, v_pages)), table)
    with pytest.raises(NotImplementedError, match="heads of width 24"):
        decline(*(x[..., :24] for x in (q, k, v, k_pages, v_pages)), table)
    with pytest.raises(ValueError, match="needs 2 pages here"):
        decline(q, k, v, k_pages, v_pages, None)
