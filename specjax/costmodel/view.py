"""The menu as it looks before a round: what each shape is expected to commit, and in what time."""

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from specjax.costmodel import allocate
from specjax.costmodel.prices import Quote

if TYPE_CHECKING:
    from specjax.costmodel.planner import Planner


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
    """Expected rates of the menu for one round, under some seconds `[shape, pass]` and chances by depth."""

    def __init__(
        self,
        planner: "Planner",
        rows: np.ndarray,
        quote: Quote,
        seconds: np.ndarray,
        proposing: np.ndarray,
        *,
        optimism: float = 0.0,
    ):
        self.planner, self.rows, self.quote, self.seconds, self.proposing = planner, rows, quote, seconds, proposing
        self.levels = levels = planner._levels(rows, proposing, optimism=optimism)
        self.totals = planner._totals(levels)
        self.full, nodes, part = planner._layout(len(rows))
        # A drafter that often has nothing to propose mostly runs a plain pass: its time is the mean of both.
        self.live = np.ones(len(planner.menu))
        self.live[1:] = (proposing.sum(axis=1) / len(rows))[planner._curve]
        bare = seconds[:, quote.least]
        times = self.live[:, None] * seconds + ((1 - self.live) * bare)[:, None]
        # No set of nodes beats one that takes the best request's chances for all: exact where requests are alike.
        caps = np.zeros((len(times), planner._nodes_share.shape[1] + 1))
        if levels.size:
            peaks = levels.max(axis=-1)[planner._nodes_depth, planner._of[:, None]] * planner._nodes_share
            np.cumsum(peaks, axis=1, out=caps[:, 1:])
        caps = (caps[:, nodes] * (1 - part) + caps[:, nodes + 1] * part) * len(rows)
        self.whole = (len(rows) + self.totals) / times[planner._index, self.full]
        self.bounds = ((len(rows) + np.minimum(self.totals[:, None], caps)) / times).max(axis=1)

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
        prices, requests = self.planner.prices, len(self.rows)
        if index == 0:
            return Choice(0, self.quote.least, float(requests), float(self.seconds[0, self.quote.least]))
        full = int(self.full[index])
        if place is None or place <= self.quote.least:
            places = np.arange(min(self.quote.least + 1, full), full + 1)
        else:
            places = np.array([min(place, full)])
        times = self.time(index, places)
        nodes = self.planner._nodes(index, self.levels)
        tokens = allocate.expected(nodes, prices.counts[places])
        best = int(np.argmax(tokens / times))
        return Choice(index, int(places[best]), float(tokens[best]), float(times[best]))
