"""Monotone fits: more rows, requests or context never cost less, whatever the noise of a measurement says."""

import numpy as np

ROUNDS = 200


def increasing(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The non-decreasing sequence nearest to `values` in weighted squares (pool adjacent violators)."""
    if (values[1:] >= values[:-1]).all():
        return values
    means: list[float] = []
    masses: list[float] = []
    counts: list[int] = []
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        mean, mass, count = value, weight, 1
        while means and means[-1] > mean:
            other, before, n = means.pop(), masses.pop(), counts.pop()
            mean = (mean * mass + other * before) / (mass + before)
            mass, count = mass + before, count + n
        means.append(mean)
        masses.append(mass)
        counts.append(count)
    return np.repeat(means, counts)


def monotone(values: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """The grid nearest to `values` in weighted squares that does not decrease along any axis.

    Dykstra's alternating projections, one axis after another; what is left of a violation at the end is raised.
    """
    fitted = np.asarray(values, float)
    weights = np.ones_like(fitted) if weights is None else np.broadcast_to(weights, fitted.shape)
    if all((np.diff(fitted, axis=axis) >= 0).all() for axis in range(fitted.ndim)):
        return fitted
    residues = [np.zeros_like(fitted) for _ in range(fitted.ndim)]
    for _ in range(ROUNDS):
        before = fitted
        for axis in range(fitted.ndim):
            wanted = fitted - residues[axis]
            fitted = _along(wanted, weights, axis)
            residues[axis] = fitted - wanted
        if np.allclose(before, fitted, rtol=1e-9, atol=0):
            break
    for axis in range(fitted.ndim):
        fitted = np.maximum.accumulate(fitted, axis=axis)
    return fitted


def _along(values: np.ndarray, weights: np.ndarray, axis: int) -> np.ndarray:
    moved, mass = np.moveaxis(values, axis, -1), np.moveaxis(weights, axis, -1)
    lines = [increasing(v, w) for v, w in zip(_lines(moved), _lines(mass), strict=True)]
    return np.moveaxis(np.reshape(lines, moved.shape), -1, axis)


def _lines(grid: np.ndarray) -> np.ndarray:
    return grid.reshape(-1, grid.shape[-1])
