"""How often drafts are accepted: learned from every verified round, by drafter, depth, temperature and request.

Three levels, each shrunk to the one above, all forgetting at a steady pace so that they follow the traffic:

    prior -> the drafter's odds against its prior -> each depth of each shape and temperature -> the request's odds

How far a request may be from the others is itself estimated (a random effect of the log odds, by moments): where all
requests are alike, none is taken for lucky.

Only rounds that are over feed it, so whatever is decided from it depends on nothing that the next round samples.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from specjax.costmodel.odds import EDGE, inside, odds_ratio, shifted
from specjax.costmodel.priors import HOT, PRIORS, Outline, Prior, outline
from specjax.draft import DraftShape

TEMPERATURES = (0.25, 0.85)  # bucket borders: near greedy, warm, hot
MEMORY = 400.0  # rounds after which an observation counts 1/e
REQUEST_MEMORY = 30.0  # the same, of one request, in its own rounds
ENOUGH = 1000.0  # observations of a depth beyond which older ones are dropped: a large batch forgets in a few rounds
WEIGHT = 12.0  # observations that a prior counts for
REQUEST_WEIGHT = 6.0  # rounds that the batch's share of proposals counts for in a request's own
SPREAD = 0.25  # variance of the log odds between requests, before any was seen
SPREAD_WEIGHT = 100.0  # the information behind that number


class Acceptance:
    """Estimates for the drafted shapes of a menu and the rows of a batch.

    A *curve* is the conditional acceptance by depth: one for all chains of a drafter, one for each of its trees.

    Attributes:
        shapes: drafted shapes.
        curve: index of each shape's curve.
        outlines: of each shape.
    """

    def __init__(self, shapes: Sequence[DraftShape], batch: int, priors: Mapping[str, Prior] = PRIORS):
        self.shapes = tuple(shapes)
        kinds = list(dict.fromkeys(shape.kind for shape in self.shapes))
        keys = list(dict.fromkeys(_curve(shape) for shape in self.shapes))
        self.curve = {shape: keys.index(_curve(shape)) for shape in self.shapes}
        self.outlines = {shape: outline(shape, priors[shape.kind]) for shape in self.shapes}
        deepest = max((shape.depth for shape in self.shapes), default=1)
        self._kept = {shape: _kept(made, deepest) for shape, made in self.outlines.items()}
        self.kind = np.array([kinds.index(key[0]) for key in keys], int)
        self.depth = deepest
        buckets = len(TEMPERATURES) + 1
        prior = np.full((len(keys), buckets, self.depth), 0.5)
        for shape in self.shapes:
            levels = self.outlines[shape].levels
            heat = HOT ** np.linspace(0, 1, buckets)[:, None]
            prior[self.curve[shape], :, : shape.depth] = shifted(inside(levels), heat)
        self._prior = prior
        # Hits and trials, and what the level above expected of them.
        self._hits, self._trials = np.zeros_like(prior), np.zeros_like(prior)
        self._kind = np.zeros((len(kinds), 4))  # hits, misses, expected hits, expected misses
        self._request = np.zeros((len(kinds), batch, 3))  # score, information, variance of the score
        self._spread = np.zeros((len(kinds), 2))  # excess of the squared scores, squared information
        self._live_prior = np.array([priors[kind].live for kind in kinds])
        self._live = np.zeros((len(kinds), 2))  # proposals, rounds
        self._live_request = np.zeros((len(kinds), batch, 2))
        self._bucket = np.zeros(batch, int)
        self._gap = np.zeros((len(kinds), self.depth))  # predicted less observed hits
        self._seen = np.zeros(len(kinds))  # trials behind it
        self._kinds = kinds
        self._rates: np.ndarray | None = None
        self._asked: tuple[bytes, np.ndarray, np.ndarray] | None = None

    def start(self, row: int, temperature: float) -> None:
        """A new request decodes in a row of the batch."""
        self._bucket[row] = int(np.searchsorted(TEMPERATURES, temperature, side="right"))
        self._request[:, row] = 0
        self._live_request[:, row] = 0
        self._asked = None

    def age(self, rounds: int = 1) -> None:
        """Some rounds have passed, whatever they were."""
        keep = (1 - 1 / MEMORY) ** rounds
        for sums in (self._hits, self._trials, self._kind, self._live, self._gap, self._seen, self._spread):
            sums *= keep
        self._rates = self._asked = None

    # ---------------------------------------------------------------- estimates

    def rates(self, rows: np.ndarray, *, optimism: float = 0.0, curve: int | None = None) -> np.ndarray:
        """Conditional acceptance `[depth, curve, request]`; `optimism` adds that many standard deviations.

        With a `curve` it is that one alone.

        The deviation is of the shared curve: what a request deviates by is part of the estimate. Requests stand last,
        as there are most of them: the arithmetic of a decision runs along them.
        """
        which = slice(None) if curve is None else slice(curve, curve + 1)
        rates = self._curves()[which]
        if optimism:
            deviation = np.sqrt(rates * (1 - rates) / (self._trials[which] + WEIGHT + 1))
            rates = inside(rates + optimism * deviation)
        odds, buckets = self._own(rows)
        # Laid out anew while it is small: what is made of it keeps its order.
        rates = np.ascontiguousarray(rates[:, buckets].transpose(2, 0, 1))
        return shifted(rates, odds[self.kind[which]])

    def heat(self, rows: np.ndarray) -> np.ndarray:
        """Temperature bucket of each request."""
        return self._bucket[rows]

    def live(self, rows: np.ndarray) -> np.ndarray:
        """Chance that a drafter proposes anything, `[curve, request]`."""
        shared = (self._live[:, 0] + WEIGHT * self._live_prior) / (self._live[:, 1] + WEIGHT)
        own = self._live_request[:, rows]
        each = (own[..., 0] + REQUEST_WEIGHT * shared[:, None]) / (own[..., 1] + REQUEST_WEIGHT)
        return each[self.kind]

    def calibration_error(self) -> dict[str, float]:
        """By kind: how far predicted and observed acceptance are apart, depth by depth, weighed by their trials."""
        apart = np.abs(self._gap).sum(axis=1) / np.maximum(self._seen, 1)
        return dict(zip(self._kinds, apart.tolist(), strict=True))

    def trials(self, shape: DraftShape) -> float:
        """Observations of the first depth that still count, over all temperatures."""
        return float(self._trials[self.curve[shape], :, 0].sum())

    # ---------------------------------------------------------------- observations

    def observe(self, shape: DraftShape, rows: np.ndarray, drafts: np.ndarray, accepted: np.ndarray) -> None:
        """A round is over.

        Args:
            shape: what was drafted.
            rows: batch rows of the requests that took part.
            drafts: drafted nodes of each that were verified; 0 where the drafter had nothing.
            accepted: tokens of each that were accepted, the target's own not counted.
        """
        curve = self.curve[shape]
        kind = self.kind[curve]
        proposed = drafts > 0
        count = np.count_nonzero(proposed)
        self._live[kind] += [count, len(rows)]
        self._live[kind] *= ENOUGH / max(float(self._live[kind, 1]), ENOUGH)
        own = self._live_request[kind]
        newest = np.ones((len(rows), 2))
        newest[:, 0] = proposed
        own[rows] = own[rows] * (1 - 1 / REQUEST_MEMORY) + newest
        if not count:
            return
        if count < len(rows):
            rows, drafts, accepted = rows[proposed], drafts[proposed], accepted[proposed]
        bucket = self._bucket[rows]
        predicted = self.rates(rows, curve=curve)[:, 0].T
        shared = self._curves()[curve][bucket]
        hits, trials = _outcomes(self._kept[shape], drafts, accepted)
        np.add.at(self._hits[curve], bucket, hits)
        np.add.at(self._trials[curve], bucket, trials)
        keep = ENOUGH / np.maximum(self._trials[curve], ENOUGH)
        self._hits[curve] *= keep
        self._trials[curve] *= keep
        prior = self._prior[curve][bucket]
        self._kind[kind] += _tally(hits, trials, prior).sum(axis=0)
        self._kind[kind] *= ENOUGH / max(float(self._kind[kind, :2].sum()), ENOUGH)
        mine, keep = self._request[kind], 1 - 1 / REQUEST_MEMORY
        expected = trials * shared
        newest = np.empty((len(rows), 3))
        np.add.reduce(hits - expected, axis=1, out=newest[:, 0])
        newest[:, 1:] = np.add.reduce(expected * (1 - shared), axis=1)[:, None]
        mine[rows] = newest = mine[rows] * [keep, keep, keep**2] + newest
        scores, information, noise = newest.T
        self._spread[kind] += [(scores**2 - noise).sum(), (information**2).sum()]
        self._gap[kind] += (predicted * trials - hits).sum(axis=0)
        self._seen[kind] += trials.sum()
        self._rates = self._asked = None

    # ---------------------------------------------------------------- inside

    def _own(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Odds of requests by kind `[kind, request]`, and their temperature buckets: one, where all have the same.

        They are kept until something was learned: a round asks several times for the same requests.
        """
        asked = rows.tobytes()
        if self._asked is None or self._asked[0] != asked:
            spread = (self._spread[:, 0] + SPREAD_WEIGHT * SPREAD) / (self._spread[:, 1] + SPREAD_WEIGHT)
            own = self._request[:, rows]
            shift = own[..., 0] / (own[..., 1] + 1 / np.maximum(spread, EDGE)[:, None])
            buckets = self._bucket[rows]
            alike = len(buckets) > 0 and bool((buckets == buckets[0]).all())
            self._asked = asked, np.exp(shift), buckets[:1] if alike else buckets
        return self._asked[1], self._asked[2]

    def _base(self) -> np.ndarray:
        """The prior moved by each drafter's odds."""
        odds = odds_ratio(self._kind, WEIGHT)[self.kind]
        return shifted(self._prior, odds[:, None, None])

    def _curves(self) -> np.ndarray:
        if self._rates is None:
            self._rates = inside((self._hits + WEIGHT * self._base()) / (self._trials + WEIGHT))
        return self._rates


def _curve(shape: DraftShape) -> tuple:
    return (shape.kind,) if shape.is_chain else (shape.kind, shape.depth, shape.branching, shape.rows)


def _outcomes(kept: np.ndarray, drafts: np.ndarray, accepted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Hits and exposures by depth `[request, depth]` of rounds that verified the first `drafts` nodes of an outline.

    A depth is exposed once if the depth above was accepted. Of a tree that was cut, the nodes that were kept are more
    or less fertile than the whole depth: the exposure is what they hold of this depth over what they hold of the last.
    """
    level, accepted = np.arange(1, kept.shape[1] + 1), accepted[:, None]
    held = kept[np.minimum(drafts, len(kept) - 1)]
    above = np.ones_like(held)
    np.maximum(held[:, :-1], EDGE, out=above[:, 1:])
    exposure = np.where(level <= accepted + 1, held / above, 0.0)
    return (level <= accepted).astype(float), exposure


def _kept(made: Outline, depth: int) -> np.ndarray:
    """Share of each depth's chance that the first n nodes hold `[n, depth]`, n from 0 to all."""
    kept = np.zeros((len(made.shares) + 1, depth))
    np.add.at(kept, (np.arange(1, len(made.shares) + 1), made.depths - 1), made.shares)
    return np.minimum(np.cumsum(kept, axis=0), 1.0)


def _tally(hits: np.ndarray, trials: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Hits, misses, expected hits and expected misses of each request."""
    sums = np.empty((len(hits), 4))
    for place, x in enumerate((hits, trials - hits, trials * expected, trials * (1 - expected))):
        np.add.reduce(x, axis=-1, out=sums[:, place])
    return sums
