"""The menu as it looks before a round: what each shape is expected to commit, and in what time."""

import dataclasses
from typing import Any

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
        self.totals = forest.totals(levels)
        self.full, nodes, part = forest.layout(len(rows), counts)
        # A drafter that often has nothing to propose mostly runs a plain pass: its time is the mean of both.
        self.live = np.ones(len(forest.of))
        self.live[1:] = (proposing.sum(axis=1) / len(rows))[forest.curve]
        bare = seconds[:, quote.least]
        times = self.live[:, None] * seconds + ((1 - self.live) * bare)[:, None]
        # No set of nodes beats one that takes the best request's chances for all: exact where requests are alike.
        caps = np.zeros((len(times), forest.share.shape[1] + 1))
        if levels.size:
            peaks = levels.max(axis=-1)[forest.depth, forest.of[:, None]] * forest.share
            np.cumsum(peaks, axis=1, out=caps[:, 1:])
        caps = (caps[:, nodes] * (1 - part) + caps[:, nodes + 1] * part) * len(rows)
        self.whole = (len(rows) + self.totals) / times[np.arange(len(times)), self.full]
        self.bounds = ((len(rows) + np.minimum(self.totals[:, None], caps)) / times).max(axis=1)

    @property
    def plain(self) -> float:
        """Seconds of a plain round."""
        return float(self.seconds[0, self.quote.least])

    def time(self, index: int, places: Any) -> Any:
        """Expected seconds of a shape with some passes."""
        live = self.live[index]
        return live * self.seconds[index, places] + (1 - live) * self.seconds[index, self.quote.least]

    def best(self) -> tuple[Choice, tuple[int, float] | None]:
        """The choice of the highest rate, and the next best whole shape with its rate.

        Passes are worked out in the order of a bound that needs no sorting: all tokens of the shape, or what the pass
        has rows for if all requests did as well as the best. Where the bound of the next shape is no better than what
        was found, the search is over.
        """
        order = np.argsort(-self.bounds, kind="stable").tolist()
        found = self.choice(order[0])
        for index in order[1:]:
            if self.bounds[index] <= found.rate:
                break
            choice = self.choice(index)
            if choice.rate > found.rate:
                found = choice
        others = self.whole.copy()
        others[found.index] = 0.0
        second = int(np.argmax(others))
        return found, (second, float(others[second])) if others[second] > 0 else None

    def choice(self, index: int, place: int | None = None) -> Choice:
        """A shape with its best pass, or with a given one."""
        requests = len(self.rows)
        if index == 0:
            return Choice(0, self.quote.least, float(requests), self.plain)
        full = int(self.full[index])
        if place is None or place <= self.quote.least:
            places = np.arange(min(self.quote.least + 1, full), full + 1)
        else:
            places = np.array([min(place, full)])
        times = self.time(index, places)
        nodes = self.forest.nodes(index, self.levels)
        tokens = allocate.expected(nodes, self.counts[places])
        best = int(np.argmax(tokens / times))
        return Choice(index, int(places[best]), float(tokens[best]), float(times[best]))
