"""From a drafter's own score of a node to the chance that it is accepted: a monotone map, learned online.

A score is the product of the drafter's probabilities along the node's path. Drafters are over- or underconfident, more
so the deeper the node, so the map is kept by depth and by temperature; it may only be used to cut drafts that are
functions of the context, whose scores depend on nothing that the round samples.
"""

import numpy as np

from specjax.costmodel.acceptance import MEMORY, TEMPERATURES, WEIGHT
from specjax.costmodel.isotonic import increasing

EDGES = np.array([0.0, 0.01, 0.03, 0.07, 0.15, 0.3, 0.45, 0.6, 0.75, 0.87, 0.95, 1.0])
DEPTHS = np.array([2, 3, 5, 9])  # borders: 1, 2, 3 to 4, 5 to 8, deeper


class ScoreMap:
    """One drafter's map. Without observations a score is taken at its word."""

    def __init__(self):
        shape = (len(TEMPERATURES) + 1, len(DEPTHS) + 1, len(EDGES) - 1)
        self._hits, self._trials, self._scores = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        self._fitted: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}

    def age(self) -> None:
        """A round has passed."""
        for sums in (self._hits, self._trials, self._scores):
            sums *= 1 - 1 / MEMORY
        self._fitted.clear()

    def observe(self, scores: np.ndarray, depths: np.ndarray, temperature: float, accepted: np.ndarray) -> None:
        """Verified nodes: their scores, depths, and whether each was on the accepted path."""
        cell = (_bucket(temperature), _depth(depths), _bin(scores))
        np.add.at(self._hits, cell, accepted)
        np.add.at(self._trials, cell, 1.0)
        np.add.at(self._scores, cell, scores)
        self._fitted.clear()

    def probability(self, scores: np.ndarray, depths: np.ndarray, temperature: float) -> np.ndarray:
        """Chance that each node is accepted; at one depth it never falls as the score rises."""
        bucket, level = _bucket(temperature), _depth(depths)
        found = np.empty(np.shape(scores))
        for depth in np.unique(level):
            here = level == depth
            found[here] = np.interp(np.asarray(scores)[here], *self._fit(bucket, int(depth)))
        return found

    def calibration_error(self) -> float:
        """Expected calibration error of the map's fit: |fitted - observed|, weighed by trials."""
        gap, trials = 0.0, 0.0
        for bucket, depth in np.ndindex(self._trials.shape[:2]):
            seen = self._trials[bucket, depth]
            if not seen.any():
                continue
            there = seen > 0
            mean = self._scores[bucket, depth][there] / seen[there]
            fitted = np.interp(mean, *self._fit(bucket, depth))
            gap += float(np.abs(fitted * seen[there] - self._hits[bucket, depth][there]).sum())
            trials += float(seen.sum())
        return gap / trials if trials else 0.0

    def _fit(self, bucket: int, depth: int) -> tuple[np.ndarray, np.ndarray]:
        """Knots of the map: scores and chances, both ascending."""
        if (bucket, depth) not in self._fitted:
            hits, trials, sums = (x[bucket, depth] for x in (self._hits, self._trials, self._scores))
            middle = (EDGES[1:] + EDGES[:-1]) / 2
            scores = (sums + WEIGHT * middle) / (trials + WEIGHT)
            chances = increasing((hits + WEIGHT * middle) / (trials + WEIGHT), trials + WEIGHT)
            # Past the outer bins' middles the map goes on to what it knows of certainty: nothing, so it stays level,
            # except that an unseen drafter is taken at its word up to 1.
            if not trials[-1]:
                scores, chances = np.append(scores, 1.0), np.append(chances, max(1.0, chances[-1]))
            if not trials[0]:
                scores, chances = np.insert(scores, 0, 0.0), np.insert(chances, 0, 0.0)
            self._fitted[bucket, depth] = scores, chances
        return self._fitted[bucket, depth]


def _bucket(temperature: float) -> int:
    return int(np.searchsorted(TEMPERATURES, temperature, side="right"))


def _depth(depths: np.ndarray) -> np.ndarray:
    return np.searchsorted(DEPTHS, depths, side="right")


def _bin(scores: np.ndarray) -> np.ndarray:
    return np.clip(np.searchsorted(EDGES, scores, side="right") - 1, 0, len(EDGES) - 2)
