import numpy as np

from specjax.training.calibrate import calibration_error, fit


def test_an_overconfident_head_is_cooled():
    rng = np.random.default_rng(0)
    true = rng.normal(0.5, 1.5, (4000, 2))
    hit = rng.random((4000, 2)) < 1 / (1 + np.exp(-true))
    found = fit(3 * true, hit)
    np.testing.assert_allclose(found, 3, rtol=0.25)

    def error(temperatures):
        chance = np.cumprod(1 / (1 + np.exp(-3 * true / temperatures)), axis=1)
        return calibration_error(chance[:, 1], hit.all(axis=1))

    assert error(np.array(found)) < 0.5 * error(np.ones(2))


def test_the_error_of_true_chances_is_small():
    rng = np.random.default_rng(1)
    chance = rng.random(20000)
    happened = rng.random(20000) < chance
    assert calibration_error(chance, happened) < 0.02
    assert calibration_error(1 - chance, happened) > 0.3
