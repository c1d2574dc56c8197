"""The candidate head of a trained drafter: fitted to its rows, it finds what the plain decomposition misses."""

import jax.numpy as jnp
import numpy as np
import pytest
from support import heads

from specjax.drafters.head import build_head, recall
from specjax.training.candidate_head import fit

VOCAB, WIDTH, RANK = 300, 32, 6


@pytest.fixture(scope="module")
def rows_in_few_directions():
    """Rows that crowd into few directions, along which the head is weak."""
    rng = np.random.default_rng(0)
    basis = np.linalg.qr(rng.normal(size=(WIDTH, WIDTH)))[0]
    head = rng.normal(size=(VOCAB, WIDTH)) * np.linspace(3, 1, WIDTH) @ basis
    rows = rng.normal(size=(600, WIDTH)) * np.where(np.arange(WIDTH) >= WIDTH - RANK, 2.0, 0.05) @ basis
    return jnp.asarray(head, jnp.float32), jnp.asarray(rows, jnp.float32)


def test_knowing_the_rows_and_training_raise_recall(rows_in_few_directions):
    head, rows = rows_in_few_directions
    seen = []
    fitted = fit(head, rows, rank=RANK, candidates=8, steps=60, batch=64, progress=lambda n, of: seen.append((n, of)))
    plain, knowing, trained = fitted.recall
    assert plain < 0.5 < 0.9 < knowing
    assert trained >= knowing - 0.02
    assert fitted.down.shape == (RANK, WIDTH)
    assert fitted.lift.shape == (WIDTH, RANK)
    assert seen[-1] == (60, 60)


def test_training_raises_what_the_least_squares_leave():
    """The most of the logits' variance may lie between tokens that are never likely; training looks at the others."""
    rng = np.random.default_rng(1)
    head, rows = np.zeros((VOCAB, WIDTH)), 0.01 * rng.normal(size=(1600, WIDTH))
    centres = np.linspace(-3, 3, 20)
    head[:20, 0], head[:20, 2] = -(centres**2) / 2, centres  # the token whose centre is nearest to the row's third
    head[20:, 0], head[20:, 1] = -60, 6 * rng.normal(size=VOCAB - 20)
    rows[:, 0] = 1
    rows[:, 1:3] = rng.uniform(-1.5, 1.5, size=(1600, 2))
    _, knowing, trained = fit(
        jnp.asarray(head, jnp.float32), jnp.asarray(rows, jnp.float32), rank=2, candidates=3, steps=200, rate=0.1
    ).recall
    assert knowing < 0.65
    assert trained > 0.9


def test_full_rank_is_the_head(rows_in_few_directions):
    head, rows = rows_in_few_directions
    fitted = fit(head, rows, rank=WIDTH, candidates=1, steps=0)
    np.testing.assert_allclose(rows @ (head @ fitted.lift @ fitted.down).T, rows @ head.T, atol=2e-3)
    assert fitted.recall == (1.0, 1.0, 1.0)


def test_a_drafter_loads_what_was_fitted(rows_in_few_directions):
    head, rows = rows_in_few_directions
    fitted = fit(head, rows, rank=RANK, candidates=8, steps=0)
    config = heads.head_config("mtp", head_rank=RANK, head_candidates=8, vocab_size=VOCAB, draft_vocab_size=VOCAB)
    tensors = {"candidate_head.down.weight": fitted.down, "candidate_head.lift.weight": fitted.lift}
    made, params = build_head(config, tensors, {"head": {"weight": head}}, jnp.float32)
    np.testing.assert_allclose(params["up"], head @ fitted.lift, atol=1e-4)
    assert float(recall(made, params, rows[:75])) > 0.9
    plain, weights = build_head(config, {}, {"head": {"weight": head}}, jnp.float32)
    assert float(recall(plain, weights, rows[:75])) < 0.5
    for missing in tensors:
        half = {name: x for name, x in tensors.items() if name != missing}
        with pytest.raises(ValueError, match="`down` with `up`, or `down` with `lift`"):
            build_head(config, half, {"head": {"weight": head}}, jnp.float32)


def test_refusals(rows_in_few_directions):
    head, rows = rows_in_few_directions
    with pytest.raises(ValueError, match="must be in 1..32"):
        fit(head, rows, rank=33, candidates=8)
    with pytest.raises(ValueError, match="at least 16"):
        fit(head, rows[:10], rank=4, candidates=8)
