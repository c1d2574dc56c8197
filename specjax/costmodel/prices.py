"""What a round will take: the table's price, corrected by how long such rounds really took.

The correction is a factor for each shape and pass, shrunk to the factor of the pass (all shapes), which is shrunk to
the factor of the device. It forgets, so that it follows a device that slows down, and grows less sure with time.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from specjax.costmodel.tables import Table
from specjax.draft import PLAIN, DraftShape

MEMORY = 200.0  # rounds after which an observation counts 1/e
NOISE = 0.05  # logarithm by which one round's time differs from the next
ENOUGH = 30.0  # rounds of a cell beyond which older ones are dropped
FEW = 3.0  # cells that the table's own doubt counts for
OUTLIER = 0.7  # a round twice as long as expected says no more than this
SHRINK = 0.5  # observations that the level above counts for
STEPS = 8  # cached contexts to a doubling


@dataclasses.dataclass(frozen=True)
class Quote:
    """Uncorrected seconds for a number of live requests and a context.

    Attributes:
        draft: of each shape, fixed costs included.
        verify: of each pass; infinite where a pass cannot hold every root.
        sure: logarithm by which each price may be off, `[shape, pass]`.
        least: index of the narrowest pass that holds every root.
    """

    draft: np.ndarray
    verify: np.ndarray
    sure: np.ndarray
    least: int


class Prices:
    """Round times of a menu.

    Attributes:
        table: the prices.
        menu: shapes, plain among them.
        counts: total rows of the passes, ascending.
        place: index of each shape in the menu.
    """

    def __init__(self, table: Table, menu: Sequence[DraftShape], counts: Sequence[int]):
        self.table, self.menu, self.counts = table, tuple(menu), np.array(counts)
        self.place = {shape: index for index, shape in enumerate(self.menu)}
        self._sum = np.zeros((len(self.menu), len(self.counts)))
        self._seen = np.zeros_like(self._sum)
        self._quotes: dict[tuple[int, int], Quote] = {}
        self._factors: np.ndarray | None = None
        self._seconds: tuple[Quote, np.ndarray] | None = None

    def quote(self, live: int, context: float) -> Quote:
        """Prices for `live` requests whose caches hold `context` tokens on average."""
        step = round(STEPS * math.log2(max(context, 1)))
        if (live, step) not in self._quotes:
            context = 2.0 ** (step / STEPS)
            least = int(np.searchsorted(self.counts, live))
            verify = np.full(len(self.counts), np.inf)
            verify[least:] = self.table.verify_time(live, self.counts[least:], context)
            draft = self.table.fixed + self.table.draft_times(self.menu, live, context)
            # A round is as uncertain as its least certain cell: that of the pass, or that of the draft.
            passes = [self.table.uncertainty(PLAIN, live, max(count, live), context) for count in self.counts.tolist()]
            drafts = [self.table.draft_uncertainty(shape, live, context) for shape in self.menu]
            self._quotes[live, step] = Quote(draft, verify, np.maximum.outer(drafts, passes), least)
        return self._quotes[live, step]

    def seconds(self, quote: Quote) -> np.ndarray:
        """Corrected seconds of every shape with every pass, `[shape, pass]`."""
        if self._seconds is None or self._seconds[0] is not quote:
            self._seconds = quote, (quote.draft[:, None] + quote.verify) * self.factors()
        return self._seconds[1]

    def factors(self) -> np.ndarray:
        """Corrections, `[shape, pass]`."""
        if self._factors is None:
            self._factors = np.exp((self._sum + SHRINK * self._passes()) / (self._seen + SHRINK))
        return self._factors

    def _passes(self) -> np.ndarray:
        """Logarithms of the corrections of passes, all shapes taken together."""
        total, seen = np.add.reduce(self._sum, axis=0), np.add.reduce(self._seen, axis=0)
        device = total.sum() / (seen.sum() + SHRINK)
        return (total + SHRINK * device) / (seen + SHRINK)

    def _factor(self, shape: int, index: int) -> float:
        """As `factors`, of one shape and pass."""
        around = self._passes()[index]
        return float(np.exp((self._sum[shape, index] + SHRINK * around) / (self._seen[shape, index] + SHRINK)))

    def deviation(self, quote: Quote) -> np.ndarray:
        """Logarithm by which each corrected price may still be off, `[shape, pass]`.

        The table's own doubt counts as much as a few cells; what the cells that ran were off by tells the rest.
        """
        ran = self._seen > 0.5
        off = float(((self._sum[ran] / self._seen[ran]) ** 2).sum())
        doubt = np.sqrt((FEW * quote.sure**2 + off) / (FEW + ran.sum()))
        return doubt / np.sqrt(1 + self._seen * (doubt / NOISE) ** 2)

    def age(self, rounds: int = 1) -> None:
        """Some rounds have passed."""
        keep = (1 - 1 / MEMORY) ** rounds
        self._sum *= keep
        self._seen *= keep
        self._factors = self._seconds = None

    def observe(self, shape: int, index: int, uncorrected: float, seconds: float) -> None:
        """A round of a shape and a pass took `seconds` where the table says `uncorrected`."""
        ratio = float(np.log(seconds / uncorrected))
        if self._seen[shape, index] > 1:  # by then it is known: a pause of the machine is no news of the shape
            known = float(np.log(self._factor(shape, index)))
            ratio = min(max(ratio, known - OUTLIER), known + OUTLIER)
        self._sum[shape, index] += ratio
        self._seen[shape, index] += 1
        keep = min(1.0, ENOUGH / self._seen[shape, index])
        self._sum[shape, index] *= keep
        self._seen[shape, index] *= keep
        self._factors = self._seconds = None
