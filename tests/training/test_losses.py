import numpy as np

from specjax.training import losses

P = np.array([0.5, 0.25, 0.25], np.float32)
Q = np.array([0.25, 0.25, 0.5], np.float32)


def test_cross_entropy_and_token_loss():
    logits = np.log(Q) + 3
    want = -(0.5 * np.log(0.25) + 0.25 * np.log(0.25) + 0.25 * np.log(0.5))
    np.testing.assert_allclose(losses.cross_entropy(P, logits), want, rtol=1e-6)
    np.testing.assert_allclose(losses.token_loss(logits, np.array(2)), np.log(2), rtol=1e-6)


def test_distance_gives_the_chance_of_acceptance():
    far = losses.distance(P, np.log(Q))
    np.testing.assert_allclose(1 - far / 2, np.minimum(P, Q).sum(), rtol=1e-6)


def test_binary():
    np.testing.assert_allclose(losses.binary(np.log(3.0), np.float32(0.5)), -0.5 * np.log(0.75 * 0.25), rtol=1e-6)


def test_mean_of_nothing_is_zero():
    assert losses.mean(np.ones(3), np.zeros(3)) == 0
    np.testing.assert_allclose(losses.mean(np.array([1.0, 5.0, 9.0]), np.array([1.0, 1.0, 0.0])), 3)


def test_agreement_counts_valid_rows():
    p = np.array([[0.9, 0.1], [0.9, 0.1], [0.1, 0.9]])
    logits = np.array([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    assert losses.agreement(p, logits, np.array([True, True, False])) == 0.5
