"""What is not known well enough is tried: which shape, in which way, and whether there is money for it.

A trial drafts and verifies a shape for a few rounds. A shadow draft is made beside a plain round and tells acceptance
alone. A ride is a draft so cheap that a plain round takes it along, in case its scores promise something.
"""

import math
from collections.abc import Sequence

import numpy as np

from specjax.costmodel.books import OPENING, Books
from specjax.costmodel.prices import MEMORY, NOISE
from specjax.costmodel.view import Choice, View
from specjax.draft import DraftShape

LONGEST = 8  # rounds of a trial
RIDE = 0.02  # plain rounds: a draft that costs no more may ride along with one
NEGLIGIBLE = 0.01  # plain rounds: what costs less than this is as good as free
EAGER, EVERY = 64, 4  # trials are thought of in each of the first rounds, then now and then: thinking costs too


class Trials:
    """Trials of one engine; `books` holds the money."""

    def __init__(self, books: Books):
        self.books = books
        self._trying: tuple[int, int] | None = None  # a shape and a pass on trial, and the rounds left to them
        self._left = 0
        self._thought = 0  # the round in which one was last thought of

    def passed(self) -> None:
        """A round is over."""
        if self._trying is not None:
            self._left -= 1
            self._trying = self._trying if self._left > 0 else None

    def running(self, view: View) -> Choice | None:
        """The trial that goes on, until it has really lost a plain round more than was there to spend."""
        if self._trying is not None and self.books.purse is not None and self.books.purse <= -OPENING * view.plain:
            self._trying = None
        return None if self._trying is None else view.choice(*self._trying)

    @property
    def due(self) -> bool:
        """Whether a new one is thought of in this round."""
        return self.books.rounds < EAGER or self.books.rounds - self._thought >= EVERY

    def find(self, view: View, hopeful: View, deviation: np.ndarray, choice: Choice) -> Choice | DraftShape | None:
        """The shape from whose trial most is to be expected, or None.

        Its gain: the expected improvement (of a normal log rate) over the rounds for which what is learned holds, less
        what the trial is expected to lose.

        A plain round is best left as it is and the shape drafted beside it, where that is cheaper and all that is
        unknown is its acceptance: then the shape itself is returned.

        Args:
            view: the menu as it is expected to be.
            hopeful: as it may be: all better by a deviation.
            deviation: of the prices, `[shape, pass]`.
            choice: what would be done without a trial.
        """
        books, menu, quote = self.books, self.books.menu, view.quote
        plain, self._thought = view.plain, books.rounds
        found, worth, price, length = None, 0.0, 0.0, 0
        for index in np.flatnonzero(hopeful.bounds > choice.rate).tolist():
            hope = hopeful.choice(index)
            if (index, hope.place) == (choice.index, choice.place):
                continue
            expected = view.choice(index, hope.place)  # the very pass that might be better
            gain = _improvement(math.log(expected.rate / choice.rate), math.log(hope.rate / expected.rate))
            entry = books.entry(menu[index], len(view.rows)) + books.back(menu[index], len(view.rows))
            each = max(expected.seconds * max(1 - expected.rate / choice.rate, 0.0), NEGLIGIBLE * plain)
            # As many rounds as cost what the way in costs: at most twice the price of what is learned.
            rounds = min(max(round(entry / each), 1), LONGEST)
            lost = entry + rounds * each
            if gain * MEMORY * choice.seconds - lost > worth:
                found, worth, price, length = expected, gain * MEMORY * choice.seconds - lost, lost, rounds
        if found is None:
            return None
        assert books.purse is not None
        shape = menu[found.index]
        if shape.depth and choice.index == 0 and deviation[found.index, found.place] <= 2 * NOISE:
            # How long it takes is known; whether it is accepted can be seen beside a plain round.
            shadow = books.shadow(shape, quote, len(view.rows))
            if shadow < price and shadow <= books.purse:
                return shape
        if price > books.purse:
            return None
        self._trying, self._left = (found.index, found.place), length
        return found

    def affordable(self, view: View) -> bool:
        """Whether the purse holds anything; it is opened when this is first asked."""
        if self.books.purse is None:
            self.books.purse = OPENING * view.plain
        return self.books.purse > 0

    def cheap(self, view: View) -> list[int]:
        """Shapes so cheap to make that another round may take them along, the better ones first."""
        live = len(view.rows)
        host = self.books.table.aside_time(live)
        prices = [0.0] + [self.books.shadow(shape, view.quote, live) - host for shape in self.books.menu[1:]]
        found = [index for index, price in enumerate(prices) if index and price <= RIDE * view.plain]
        return sorted(found, key=lambda index: -view.whole[index])

    def ride(self, view: View, cheap: Sequence[int]) -> int | None:
        """The best of the `cheap` shapes that the fares pay for: its scores may make it worth verifying."""
        books = self.books
        if books.fares is None:
            books.fares = OPENING * view.plain
        fares, live = books.fares, len(view.rows)
        return next((index for index in cheap if books.shadow(books.menu[index], view.quote, live) <= fares), None)


def _improvement(ahead: float, deviation: float) -> float:
    """Expected gain of a log rate that is normal around `ahead` of the chosen one's, if the better is taken then."""
    if deviation <= 0:
        return max(ahead, 0.0)
    z = ahead / deviation
    density = math.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    return deviation * (density + z * 0.5 * math.erfc(-z / math.sqrt(2)))
