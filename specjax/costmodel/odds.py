"""Arithmetic of odds: chances that move together keep their order and stay between 0 and 1."""

import numpy as np

EDGE = 1e-3  # rates stay this far from 0 and 1: odds must be finite


def shifted(rates: np.ndarray, odds: np.ndarray | float) -> np.ndarray:
    """Rates whose odds are multiplied."""
    raised = rates * odds
    return np.divide(raised, (1 - rates) + raised, out=raised if isinstance(raised, np.ndarray) else None)


def odds_ratio(tally: np.ndarray, weight: float) -> np.ndarray:
    """Observed odds over expected odds, both shrunk as if `weight` hits and misses had gone as expected.

    Args:
        tally: hits, misses, expected hits and expected misses, along the last axis.
        weight: of the expectation.
    """
    sums = np.maximum(tally, 0.0) + weight
    return sums[..., 0] * sums[..., 3] / (sums[..., 1] * sums[..., 2])


def inside(rates: np.ndarray) -> np.ndarray:
    """Rates kept off 0 and 1."""
    return np.minimum(np.maximum(rates, EDGE), 1 - EDGE)  # a third of what `np.clip` takes
