"""The menu as it looks before a round: what each shape is expected to commit, and in what time."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from specjax.costmodel import allocate
from specjax.costmodel.forest import Forest, reached
from specjax.costmodel.prices import Quote


@dataclasses.dataclass(frozen=True)
class Choice:
    """A shape with a pass: indices into the menu and the passes, and what they are expected to do."""

    index: int
    place: int
    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class View:
    """Expected rates of the menu for one round.

    Args:
        forest: the menu's trees.
        counts: total rows of the passes.
        rows: batch rows of the requests.
        quote: prices.
        seconds: of every shape with every pass, `[shape, pass]`.
        proposing: chance that a drafter proposes anything, `[curve, request]`.
        rates: acceptance of each depth given the one above, `[depth, curve, request]`.
    """

    def __init__(
        self,
        forest: Forest,
        counts: np.ndarray,
        rows: np.ndarray,
        quote: Quote,
        seconds: np.ndarray,
        proposing: np.ndarray,
        rates: np.ndarray,
    ):
        self.forest, self.counts, self.rows, self.quote = forest, counts, rows, quote
        self.seconds, self.proposing = seconds, proposing
        self.levels = levels = reached(rates, proposing)
        self._sums: dict[int, np.ndarray] = {}
        requests = len(rows)
        self.totals = totals = forest.totals(levels)
        self.full, nodes, part = forest.layout(requests, counts)
        # A drafter that often has nothing to propose mostly runs a plain pass: its time is the mean of both.
        live = np.ones((len(forest.of), 1))
        live[1:, 0] = (np.add.reduce(proposing, axis=1) / requests)[forest.curve]
        self.times = times = live * seconds + (1 - live) * seconds[:, quote.least, None]
        # No set of nodes beats one that takes the best request's chances for all: exact where requests are alike.
        caps = np.zeros((len(times), forest.share.shape[1] + 1))
        if levels.size:
            peaks = np.maximum.reduce(levels, axis=-1).take(forest.cells) * forest.share
            np.add.accumulate(peaks, axis=1, out=caps[:, 1:])
        caps = (caps.take(nodes, axis=1) * (1 - part) + caps.take(nodes + 1, axis=1) * part) * requests
        self.whole = (requests + totals) / times[np.arange(len(times)), self.full]
        bounds = (requests + np.minimum(totals[:, None], caps)) / times
        self.bounds = np.maximum.reduce(bounds, axis=1)

    @property
    def plain(self) -> float:
        """Seconds of a plain round."""
        return float(self.seconds[0, self.quote.least])

    def best(self, among: Sequence[int] | None = None) -> tuple[Choice, tuple[int, float] | None]:
        """The choice of the highest rate, and the next best whole shape with its rate.

        Passes are worked out in the order of a bound that needs no sorting: all tokens of the shape, or what the pass
        has rows for if all requests did as well as the best. Where the bound of the next shape is no better than what
        was found, the search is over.

        Args:
            among: shapes of the menu that may be chosen; None for all.
        """
        order = (-self.bounds).argsort(kind="stable").tolist()
        order = order if among is None else [index for index in order if index in among]
        found = self.choice(order[0])
        for index in order[1:]:
            if self.bounds[index] <= found.rate:
                break
            choice = self.choice(index)
            if choice.rate > found.rate:
                found = choice
        others = self.whole.copy()
        others[found.index] = 0.0
        second = int(others.argmax())
        return found, (second, float(others[second])) if others[second] > 0 else None

    def choice(self, index: int, place: int | None = None) -> Choice:
        """A shape with its best pass, or with a given one."""
        requests = len(self.rows)
        if index == 0:
            return Choice(0, self.quote.least, float(requests), self.plain)
        full = int(self.full[index])
        if place is None or place <= self.quote.least:
            first, last = min(self.quote.least + 1, full), full + 1
        else:
            first = min(place, full)
            last = first + 1
        if index not in self._sums:
            self._sums[index] = allocate.likeliest(self.nodes(index))
        sums, times = self._sums[index], self.times[index, first:last]
        tokens = requests + sums[np.minimum(self.counts[first:last] - requests, len(sums) - 1)]
        best = int((tokens / times).argmax())
        return Choice(index, first + best, float(tokens[best]), float(times[best]))

    def nodes(self, index: int) -> np.ndarray:
        """Chance of each node `[request, node]` of a drafted shape."""
        return self.forest.nodes(index, self.levels[:, self.forest.of[index]])
