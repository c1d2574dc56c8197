"""From a drafter's own chances to the chance that the target accepts: one monotone map a drafter and temperature.

A drafter says of each node how sure it is. That tells nodes of one depth apart, the long match from the short one and
the plain continuation from the guess, but it is the drafter's opinion. The map says what came of such opinions: for
scores alike, the odds of what was accepted over those of what was announced, learned from drafts whose text is known.
A better score never means a worse chance (pool adjacent violators).
"""

import bisect
import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np

from specjax.costmodel.isotonic import increasing
from specjax.costmodel.odds import EDGE, inside, odds_ratio, shifted

WIDTH, REACH = 0.4, 4.0  # scores are told apart by their log odds: so finely, between plus and minus so much
BUCKETS = 2 * round(REACH / WIDTH)
WEIGHT = 12.0  # observations of a bucket that the drafter's own word counts for
ENOUGH = 500.0  # observations of a bucket beyond which older ones are dropped


@dataclasses.dataclass(frozen=True)
class Nodes:
    """Drafted trees of some requests, padded to one size; node 0 is the root.

    Attributes:
        scores: log chance of the path to each node, by the drafter.
        parents: index of each node's parent, -1 for the root.
    """

    scores: np.ndarray
    parents: np.ndarray

    @functools.cached_property
    def chains(self) -> bool:
        """Whether each node's parent is the node before it, in all drafts: then nothing has to be looked up."""
        return bool((self.parents[:, 1:] == np.arange(self.parents.shape[1] - 1)).all())

    @functools.cached_property
    def chances(self) -> np.ndarray:
        """The drafter's chance of each node, given its parent `[request, node]`, roots left out."""
        if self.chains:
            above = self.scores[:, :-1]
        else:
            above = np.take_along_axis(self.scores, np.maximum(self.parents[:, 1:], 0), axis=1)
        return inside(np.exp(np.minimum(self.scores[:, 1:] - above, 0.0)))

    def along(self, chances: np.ndarray) -> np.ndarray:
        """Chance of the path to each node, from that of each node given its parent; roots left out of both.

        A node is given no more than the nodes before it in the list have: any prefix of a draft is a tree, and a cut
        takes a prefix.
        """
        if self.chains:
            return np.minimum.accumulate(np.multiply.accumulate(chances, axis=1), axis=1)
        requests, nodes = chances.shape
        path, request = np.ones((1 + nodes, requests)), np.arange(requests)
        parents = np.maximum(self.parents.T, 0)
        for node, chance in enumerate(np.ascontiguousarray(chances.T), 1):
            np.multiply(path[parents[node], request], chance, out=path[node])
        return np.minimum.accumulate(path[1:].T, axis=1)


class ScoreMap:
    """Maps for some kinds of drafters and temperatures (of `acceptance.TEMPERATURES`)."""

    def __init__(self, kinds: Sequence[str], temperatures: int):
        self._kinds = {kind: index for index, kind in enumerate(kinds)}
        # Hits, misses, and what the drafters' words made expect of both.
        self._tally = np.zeros((len(kinds), temperatures, BUCKETS, 4))
        self._maps: dict[tuple[int, int], np.ndarray] = {}
        self._listed: dict[tuple[str, int, float], tuple[list[float], list[float]]] = {}  # for `_chances_of_one`

    def age(self, keep: float) -> None:
        """A round has passed: what was seen counts a little less, in the maps from the next observation on."""
        self._tally *= keep

    def chances(
        self, kind: str, heat: np.ndarray, nodes: Nodes, drafts: np.ndarray, *, doubt: float = 0.0
    ) -> np.ndarray:
        """Chance of the path to each node `[request, node]`, roots left out.

        Args:
            kind: the drafter.
            heat: temperature bucket of each request.
            nodes: what it drafted.
            drafts: drafted nodes of each request, the root not counted; those behind have no chance.
            doubt: take that many standard deviations off what is known.
        """
        if len(heat) == 1:
            return self._chances_of_one(kind, int(heat[0]), nodes, int(drafts[0]), doubt)
        said = _log_odds(nodes.chances)
        made = np.empty_like(said)
        for t in set(heat.tolist()):
            announced, accepted, deviation = self._map(kind, t)
            # Most batches have one temperature: nothing is picked out of them.
            which = heat == t if len(heat) > 1 else slice(None)
            made[which] = np.interp(said[which], announced, accepted - doubt * deviation)
        chances = nodes.along(1 / (1 + np.exp(-made)))
        return np.where(np.arange(chances.shape[1]) < drafts[:, None], chances, 0.0)

    def _chances_of_one(self, kind: str, heat: int, nodes: Nodes, drafts: int, doubt: float) -> np.ndarray:
        """`chances` of one request, node by node.

        A pass leaves nothing in the processor's caches. A handful of numbers then takes Python a third of the time in
        which numpy's many functions are fetched.
        """
        if (kind, heat, doubt) not in self._listed:
            announced, accepted, deviation = self._map(kind, heat)
            self._listed[kind, heat, doubt] = announced.tolist(), (accepted - doubt * deviation).tolist()
        announced, accepted = self._listed[kind, heat, doubt]
        scores, parents = nodes.scores[0].tolist(), nodes.parents[0].tolist()
        path, least, found = [1.0], 1.0, np.zeros((1, len(scores) - 1))
        for node in range(1, 1 + drafts):
            said = min(max(math.exp(min(scores[node] - scores[parents[node]], 0.0)), EDGE), 1 - EDGE)
            made = _between(math.log(said / (1 - said)), announced, accepted)
            path.append(path[parents[node]] / (1 + math.exp(-made)))
            least = found[0, node - 1] = min(least, path[node])
        return found

    def observe(self, kind: str, heat: np.ndarray, nodes: Nodes, live: np.ndarray, path: np.ndarray) -> None:
        """The text after some drafts is known.

        Args:
            kind: the drafter.
            heat: as above.
            nodes: what it drafted.
            live: nodes of each draft, the root included.
            path: which nodes lie on the text's path, `[request, node]`, the roots among them.
        """
        index, said = self._kinds[kind], nodes.chances
        parent = np.take_along_axis(path, np.maximum(nodes.parents[:, 1:], 0), axis=1)
        exposed = parent & (np.arange(1, path.shape[1]) < live[:, None])
        hit = exposed & path[:, 1:]
        outcome = np.stack([hit, exposed & ~hit, exposed * said, exposed * (1 - said)], axis=-1).astype(float)
        where = np.broadcast_to(heat[:, None], said.shape)
        bucket = np.clip(np.floor((_log_odds(said) + REACH) / WIDTH), 0, BUCKETS - 1).astype(int)
        np.add.at(self._tally[index], (where, bucket), outcome)
        seen = self._tally[index, ..., :2].sum(axis=-1)
        self._tally[index] *= (ENOUGH / np.maximum(seen, ENOUGH))[..., None]
        self._maps.clear()
        self._listed.clear()

    def table(self, kind: str, heat: int = 0) -> list[tuple[float, float, float]]:
        """What is known: the mean announced chance, the chance made of it, and the trials, of each bucket with any."""
        tally = self._tally[self._kinds[kind], heat]
        announced, accepted, _ = 1 / (1 + np.exp(-self._map(kind, heat)))
        seen = tally[:, :2].sum(axis=-1)
        return [(float(s), float(a), float(n)) for s, a, n in zip(announced, accepted, seen, strict=True) if n >= 1]

    def _map(self, kind: str, heat: int) -> np.ndarray:
        """Log odds that were announced and that were found, bucket by bucket, and deviations of the latter."""
        key = self._kinds[kind], heat
        if key not in self._maps:
            tally = self._tally[key]
            seen = tally[:, :2].sum(axis=-1)
            said = (tally[:, 2] + WEIGHT * _CENTRES) / (seen + WEIGHT)
            made = inside(increasing(shifted(said, odds_ratio(tally, WEIGHT / 2)), seen + WEIGHT))
            deviation = 1 / np.sqrt((seen + WEIGHT) * made * (1 - made))
            self._maps[key] = np.stack([_log_odds(said), _log_odds(made), deviation])
        return self._maps[key]


def _log_odds(chances: np.ndarray) -> np.ndarray:
    return np.log(chances / (1 - chances))


def _between(x: float, xs: list[float], ys: list[float]) -> float:
    """`np.interp` of one number."""
    right = bisect.bisect_right(xs, x)
    if right == 0 or right == len(xs):
        return ys[min(right, len(xs) - 1)]
    left = right - 1
    return ys[left] + (ys[right] - ys[left]) * (x - xs[left]) / (xs[right] - xs[left])


_CENTRES = 1 / (1 + np.exp(-(np.arange(BUCKETS) * WIDTH - REACH + WIDTH / 2)))
