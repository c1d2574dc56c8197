"""Temperatures for DSpark's confidence head, a position at a time (arXiv 2607.05147, section on scheduling).

Position `k` is fitted with the positions before it held fixed, so that the product of confidences up to `k` says how
often a draft really gets that far.
"""

import numpy as np

GRID = np.exp(np.linspace(np.log(0.25), np.log(8.0), 81))
BINS = 10


def fit(logits: np.ndarray, hit: np.ndarray) -> list[float]:
    """Temperatures that make cumulative confidences true.

    Args:
        logits: of the confidence head, `[n, k]`.
        hit: whether each draft agrees with the text, `[n, k]`.

    Returns:
        A temperature for each position, fitted from left to right on the calibration error of the cumulative product.
    """
    reached = np.cumprod(hit, axis=1)
    survival, out = np.ones((len(hit),)), []
    for k in range(hit.shape[1]):
        options = [survival * _sigmoid(logits[:, k] / t) for t in GRID]
        best = int(np.argmin([calibration_error(x, reached[:, k]) for x in options]))
        out.append(float(GRID[best]))
        survival = options[best]
    return out


def calibration_error(chance: np.ndarray, happened: np.ndarray) -> float:
    """The expected calibration error: mean gap between predicted and found frequency, over bins of equal count."""
    order = np.argsort(chance, kind="stable")
    parts = [x for x in np.array_split(order, BINS) if len(x)]
    return float(sum(len(x) * abs(chance[x].mean() - happened[x].mean()) for x in parts) / max(len(chance), 1))


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + np.tanh(x / 2))
