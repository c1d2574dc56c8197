"""The trees of a menu side by side: from the chances of depths to those of nodes, of all shapes at once."""

from collections.abc import Sequence

import numpy as np

from specjax.costmodel.acceptance import Acceptance
from specjax.draft import DraftShape


class Forest:
    """Nodes of every shape; nothing here changes from round to round.

    Args:
        menu: shapes, plain decoding first.
        acceptance: the curves and outlines of the drafted ones.

    Attributes:
        curve: index of each drafted shape's curve.
        of: the same of each shape of the menu; plain's is not used.
        rows: of each shape, the root included.
        depth: of each node `[shape, node]`, from 0.
        cells: where each node's depth and curve lie in a flat array of `[depth, curve]`.
        share: of each node, of the chance of its depth; 0 where there is none.
    """

    def __init__(self, menu: Sequence[DraftShape], acceptance: Acceptance):
        drafted = menu[1:]
        self.curve = np.array([acceptance.curve[s] for s in drafted], int)
        self.of = np.concatenate([[0], self.curve]).astype(int)
        self.rows = np.array([s.rows for s in menu])
        self.depth = np.zeros((len(menu), max(self.rows)), int)
        self.share = np.zeros(self.depth.shape)
        for index, made in enumerate((acceptance.outlines[s] for s in drafted), 1):
            self.depth[index, : len(made.depths)] = made.depths - 1
            self.share[index, : len(made.depths)] = made.shares
        self.cells = self.depth * len(acceptance.kind) + self.of[:, None]
        self._nodes = [(self.depth[i, : n - 1], self.share[i, : n - 1, None]) for i, n in enumerate(self.rows.tolist())]
        self._deepest = np.array([s.depth for s in drafted], int) - 1
        self._layouts: dict[int, tuple[np.ndarray, ...]] = {}

    def nodes(self, index: int, levels: np.ndarray) -> np.ndarray:
        """Chance of each node `[request, node]` of a drafted shape of the menu.

        Args:
            index: of the shape.
            levels: chance that the accepted path reaches each depth of its curve `[depth, request]`.
        """
        depths, shares = self._nodes[index]
        return (levels[depths] * shares).T

    def totals(self, levels: np.ndarray) -> np.ndarray:
        """Expected accepted drafts of each shape, whole, over all requests."""
        sums = np.add.accumulate(np.add.reduce(levels, axis=-1), axis=0)
        totals = np.zeros(len(self.of))
        totals[1:] = sums[self._deepest, self.curve]
        return totals

    def layout(self, live: int, counts: np.ndarray) -> tuple[np.ndarray, ...]:
        """For a number of requests: the pass that holds each whole shape; nodes a request of each pass, and a part.

        Args:
            live: requests.
            counts: total rows of the passes, always the same ones.
        """
        if live not in self._layouts:
            full = np.minimum(np.searchsorted(counts, live * self.rows), len(counts) - 1)
            most = live * (self.share.shape[1] - 1)
            nodes, rest = np.divmod(np.clip(counts - live, 0, most), live)
            self._layouts[live] = full, nodes, rest / live
        return self._layouts[live]


def reached(rates: np.ndarray, live: np.ndarray | None = None) -> np.ndarray:
    """Chance that the accepted path reaches each depth, from that of each depth given the one above.

    Args:
        rates: `[depth, curve, request]`.
        live: chance that there is a draft at all `[curve, request]`; without it: given a draft.
    """
    levels = np.empty_like(rates)
    chance = 1.0 if live is None else live
    for depth, rate in enumerate(rates):  # faster than `cumprod`, which goes one number after another
        chance = np.multiply(chance, rate, out=levels[depth])
    return levels
