"""Which shape to draft next, and how many of its nodes to verify: the most committed tokens per second.

Each round, for the requests that decode now: expected tokens of every shape (acceptance, learned from past rounds) over
the time of the whole round (prices, corrected by past rounds); plain decoding is always one of the shapes. What is not
known well enough is tried (`trials.py`), but only from a purse that holds a small share of the decoding time
(`books.py`); and whoever falls behind plain decoding has to be sure of a shape before using it again. A decision reads
nothing from the device.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from specjax.costmodel import allocate
from specjax.costmodel.acceptance import TEMPERATURES, Acceptance
from specjax.costmodel.books import Books
from specjax.costmodel.decision import Decision
from specjax.costmodel.forest import Forest, reached
from specjax.costmodel.prices import MEMORY, Prices, Quote
from specjax.costmodel.scores import Nodes, ScoreMap
from specjax.costmodel.tables import Table
from specjax.costmodel.trials import Trials
from specjax.costmodel.view import Choice, View
from specjax.draft import PLAIN, DraftShape

AGEING = 8  # rounds by which what is known grows older at a time: it costs as much for one
LOOKS = 32  # draft lookups over which it is reckoned how many of them are verified
DOUBT = 0.7  # deviations of each depth at once: they are independent, so their sum deviates by less than theirs


class Planner:
    """Chooses shapes for one engine, round by round.

    Args:
        table: prices of rounds.
        menu: shapes with programs; plain decoding is added if it is missing.
        counts: total rows of the verify passes that have programs.
        batch: rows of the batch.
        explore: try what is uncertain; off for a plan on paper.
        scored: drafts come with scores, so that cheap ones may ride along with plain rounds.
        ring: newest tokens of a request that a drafter can catch up on; older ones are dropped.
        room: tokens of a request that a draft takes in of itself; None for those of one round.
        acceptance: estimates to begin with; None begins at the priors.

    Attributes:
        prices: what rounds take.
        acceptance: how often drafts are accepted.
        scores: what the drafters' own chances are worth.
        books: what rounds have brought and cost.
    """

    def __init__(
        self,
        table: Table,
        menu: Sequence[DraftShape],
        counts: Sequence[int],
        batch: int,
        *,
        explore: bool = True,
        scored: bool = False,
        ring: int = 64,
        room: int | None = None,
        acceptance: Acceptance | None = None,
    ):
        self.menu = tuple(dict.fromkeys((PLAIN, *menu)))
        self.prices = Prices(table, self.menu, counts)
        drafted = self.menu[1:]
        self.acceptance = Acceptance(drafted, batch) if acceptance is None else acceptance
        self.scores = ScoreMap(list(dict.fromkeys(s.kind for s in drafted)), len(TEMPERATURES) + 1)
        self.explore, self.scored = explore, scored
        self.books = Books(table, self.menu, ring, room)
        self._trials = Trials(self.books)
        self._forest = Forest(self.menu, self.acceptance)
        self._found = 0.5  # share of lookups before a dear draft that were verified, of late
        self._rent = (
            0.0  # seconds lost in rounds whose better shape was not made, as its drafter would have to catch up
        )

    def start(self, row: int, temperature: float = 0.0) -> None:
        """A new request decodes in a row of the batch."""
        self.acceptance.start(row, temperature)

    # ---------------------------------------------------------------- deciding

    def decide(self, rows: np.ndarray, context: float) -> Decision:
        """The next round of the requests in `rows` (of the batch), whose caches hold `context` tokens on average."""
        quote = self.prices.quote(len(rows), context)
        seconds = self.prices.seconds(quote)
        proposing = self.acceptance.live(rows)
        view = self._view(rows, quote, seconds, proposing)
        choice, second = view.best()
        choice, reason = self._settle(view, choice)
        if not self.explore:
            return self._decision(view, choice, reason, second)
        if self.books.behind:
            choice, reason = self._sure(view, choice), "sure"
        trial = self._trials.running(view)
        if trial is None and self._trials.due and self._trials.affordable(view):
            deviation = self.prices.deviation(quote)
            hopeful = self._view(rows, quote, seconds * np.exp(-deviation), proposing, optimism=DOUBT)
            trial = self._trials.find(view, hopeful, deviation, choice)
        if isinstance(trial, DraftShape):
            return self._decision(view, choice, reason, second, shadow=trial)
        if trial is not None:
            # What the trial loses against the shape that it keeps from running is known when the round is over.
            return self._decision(view, trial, "trial", (choice.index, choice.rate))
        return (
            self._with_look(view, choice, reason, second)
            if self.scored
            else self._decision(view, choice, reason, second)
        )

    def fit(
        self, decision: Decision, rows: np.ndarray, live: np.ndarray, context: float, nodes: Nodes | None = None
    ) -> Decision:
        """The decision, now that the draft is there.

        Args:
            decision: made for this round.
            rows: as there.
            live: drafted nodes of each request, the root not counted.
            context: as there.
            nodes: the drafts with their scores; without them every draft of a shape is taken for an average one, and a
                shadow stays one.

        Returns:
            The decision with the rows of the pass, the budget of each request, and what is expected of them. The
            draft's time is spent, so what counts is what further rows gain over the going rate. A shadow that is worth
            verifying becomes the shape. Where it was made first (`Decision.looks`) and promises less than the shape,
            the decision comes back without a shadow: the shape is then to be drafted, and fitted.
        """
        if decision.looks and decision.beside is not None and not live.any():
            return self._turned(decision, len(rows))
        quote = self.prices.quote(len(rows), context)
        counts, shape = self.prices.counts, decision.shape
        if decision.shadow is not None and nodes is not None:
            shape = decision.shadow
        index = self.prices.place[shape]
        rate = decision.going or decision.rate
        if shape.depth == 0 or not live.any():
            plain = decision._replace(
                rows=int(counts[quote.least]),
                budgets=np.ones(len(rows), int),
                seconds=float(self.prices.seconds(quote)[index, quote.least]),
                tokens=float(len(rows)),
            )
            return self._looked(decision, plain, len(rows), context) if decision.looks else plain
        if nodes is None:
            rates = self.acceptance.rates(rows, curve=int(self._forest.of[index]))
            chances = self._forest.nodes(index, reached(rates)[:, 0])
            chances = np.where(np.arange(chances.shape[1]) < live[:, None], chances, 0.0)
        else:
            doubt = DOUBT if decision.reason == "sure" else 0.0
            chances = self.scores.chances(shape.kind, self.acceptance.heat(rows), nodes, live, doubt=doubt)
        needed = int(counts.searchsorted(len(rows) + live.sum()))
        first, last = quote.least, min(needed, len(counts) - 1)
        if decision.reason == "trial":  # the pass that is on trial, if there is enough to fill it
            first = last = max(first, min(int(counts.searchsorted(decision.rows)), last))
        usable = slice(first, last + 1)
        times = self.prices.seconds(quote)[index, usable]
        choice, tokens, budgets = allocate.cut(chances, counts[usable], times, rate)
        total = int(counts[first + choice])
        fitted = decision._replace(rows=total, budgets=budgets, seconds=float(times[choice]), tokens=tokens)
        if shape != decision.shape and first + choice > quote.least:
            fitted = fitted._replace(shape=shape, shadow=None, reason="scores")
        return self._looked(decision, fitted, len(rows), context) if decision.looks else fitted

    def extra(self, decision: Decision, live: int, context: float) -> float:
        """Seconds that a round takes beside its shape: to take the shape up, and for drafts that are not verified."""
        books, shape = self.books, decision.shape
        late = decision.reason == "scores" or shape == books.current
        entry = books.catch_up(shape.kind, live) if late else books.entry(shape, live)
        if decision.shadow is decision.beside is None:
            return entry
        others, quote = {decision.shadow, decision.beside} - {None, shape}, self.prices.quote(live, context)
        return entry + sum(books.shadow(other, quote, live) for other in others if other)

    # ---------------------------------------------------------------- learning

    def committed(self, decision: Decision, live: int, context: float, accepted: int) -> float:
        """A round's tokens are known, though nothing may be learned of it yet: see `observe`.

        What the next decision rests on must not be old: which drafters have missed tokens.

        Returns:
            Seconds that the round took beside its shape.
        """
        extra = self.extra(decision, live, context)
        self.books.commit(decision, live, accepted)
        return extra

    def observe(
        self,
        decision: Decision,
        rows: np.ndarray,
        context: float,
        *,
        seconds: float,
        count: int,
        drafts: np.ndarray,
        accepted: np.ndarray,
        extra: float | None = None,
    ) -> None:
        """A round is over. What the text says of its drafts, verified or not, is told to `learn`.

        Args:
            decision: what was decided for it, fitted.
            rows: batch rows of the requests that took part.
            context: as given to `decide`.
            seconds: how long the whole round took.
            count: total rows of the pass that ran.
            drafts: nodes of each request that were verified, the root not counted.
            accepted: of these, accepted.
            extra: what `committed` said, where it was told of the round before.
        """
        if extra is None:
            extra = self.committed(decision, len(rows), context, int(accepted.sum()))
        quote = self.prices.quote(len(rows), context)
        index, place = self.prices.place[decision.shape], int(self.prices.counts.searchsorted(count))
        if self.books.rounds % AGEING == 0:
            self.acceptance.age(AGEING)
            self.scores.age((1 - 1 / MEMORY) ** AGEING)
            self.prices.age(AGEING)
        paid = max(seconds - extra, 0.1 * seconds)
        self.prices.observe(index, place, quote.draft[index] + quote.verify[place], paid)
        if decision.shape.depth and not self.scored:
            self.acceptance.observe(decision.shape, rows, drafts, accepted)
        plain = self.prices.seconds(quote)[0, quote.least]
        self.books.enter(
            decision,
            len(rows),
            int(drafts.sum()),
            int(accepted.sum()),
            seconds=seconds,
            extra=extra,
            plain=float(plain),
        )
        self._trials.passed()

    def shadow(self, shape: DraftShape, rows: np.ndarray, drafts: np.ndarray, accepted: np.ndarray) -> None:
        """As `learn`, of drafts without scores: how many of each request's drafts the text that followed agrees with.

        Where a drafter had nothing to propose, `drafts` is 0.
        """
        self.acceptance.observe(shape, rows, drafts, accepted)

    def learn(self, shape: DraftShape, rows: np.ndarray, drafts: np.ndarray, nodes: Nodes, path: np.ndarray) -> None:
        """The text after some drafts is known, whether they were verified or not.

        What a pass verifies is chosen by the scores, so what it accepts says nothing of the drafts that it left out;
        the text judges all of them.

        Args:
            shape: what was drafted.
            rows: batch rows of the requests.
            drafts: drafted nodes of each, the root not counted.
            nodes: the drafts.
            path: which of their nodes the text goes along, roots included.
        """
        self.scores.observe(shape.kind, self.acceptance.heat(rows), nodes, 1 + drafts, path)
        self.acceptance.observe(shape, rows, drafts, np.count_nonzero(path, axis=1) - 1)

    def report(self) -> dict[str, Any]:
        """Predicted against actual, over the newest rounds; calibration of acceptance; changes of shape.

        `scores` are the maps of greedy requests: what drafters said, what was accepted, and of how many drafts (the
        newer, the more they count). `reasons` counts rounds by `Decision.reason`.
        """
        return self.books.report() | {
            "calibration_error": self.acceptance.calibration_error(),
            "scores": {
                kind: [
                    dict(zip(("said", "accepted", "drafts"), entry, strict=True)) for entry in self.scores.table(kind)
                ]
                for kind in self.books.missed
            },
        }

    # ---------------------------------------------------------------- inside

    def _view(
        self, rows: np.ndarray, quote: Quote, seconds: np.ndarray, proposing: np.ndarray, *, optimism: float = 0.0
    ) -> View:
        """The menu under some seconds `[shape, pass]`, with acceptance that is better by `optimism` deviations."""
        rates = self.acceptance.rates(rows, optimism=optimism)
        return View(self._forest, self.prices.counts, rows, quote, seconds, proposing, rates)

    def _settle(self, view: View, choice: Choice) -> tuple[Choice, str]:
        """The better shape, or the current one while what was lost by it is less than what the change costs.

        Buying when the rent paid so far equals the price costs at most twice what foresight would, however long the
        better shape stays better; where changes are free they happen at once.
        """
        books, shape = self.books, self.menu[choice.index]
        entry = books.entry(shape, len(view.rows))
        if entry == 0.0 or shape == books.before:
            books.lost *= 0.9
            return choice, "best"
        mine = view.choice(self.prices.place[books.current])
        books.lost += mine.seconds * max(1 - mine.rate / choice.rate, 0.0)
        return (choice, "best") if books.lost >= entry else (mine, "stay")

    def _sure(self, view: View, choice: Choice) -> Choice:
        """The best of what beats plain even if acceptance and time are worse than expected by a deviation."""
        dearer = view.seconds * np.exp(self.prices.deviation(view.quote))
        dearer[0] = view.seconds[0]
        careful, _ = self._view(view.rows, view.quote, dearer, view.proposing, optimism=-DOUBT).best()
        return choice if careful.index == choice.index else careful

    def _with_look(self, view: View, choice: Choice, reason: str, second: tuple[int, float] | None) -> Decision:
        """The choice, and a draft that costs next to nothing beside it.

        Beside a plain round it is verified if its scores promise enough. Before a shape that has its price it may save
        it; and where the cheap shape is the choice itself, a dear one that beats plain waits for the rounds in which
        there is nothing cheap. What the two expect apart is compared when the cheap draft is there. Where that is
        seldom the better one, the dear one is drafted right behind it.
        """
        cheap = self._trials.cheap(view)
        going = choice.rate
        if choice.index in cheap:
            look = choice.index
            choice, _ = view.best(among=[index for index in range(len(self.menu)) if index not in cheap])
            if choice.index == 0:  # nothing to fall back to
                choice = view.choice(look)
                return self._decision(view, choice, reason, second)
        else:
            ride = self._trials.ride(view, cheap)
            waits = choice.index and not self._behind(view.quote, choice, len(view.rows))
            if ride is None or (waits and not self._worth_a_look(view, ride, choice)):
                return self._decision(view, choice, reason, second)
            look = ride
        decision = self._decision(view, choice, reason, second, shadow=self.menu[look], ride=True)
        beside = decision.shape if choice.index and self._behind(view.quote, choice, len(view.rows)) else None
        return decision._replace(beside=beside, going=going)

    def _behind(self, quote: Quote, choice: Choice, live: int) -> bool:
        """Whether a dear shape, drafted behind every lookup, loses less than by waiting for what that says."""
        drafting = self.books.shadow(self.menu[choice.index], quote, live)
        return self._found * drafting < (1 - self._found) * self.prices.table.fixed

    def _worth_a_look(self, view: View, look: int, choice: Choice) -> bool:
        """Whether drafting a cheap shape first gains more than a dear one's wait for it loses."""
        live = max(float(view.proposing[self._forest.of[look]].mean()), 1e-3)
        tokens, seconds = len(view.rows) + view.totals[look] / live, view.seconds[look, view.full[look]]
        return live * (tokens - choice.rate * seconds) > (1 - live) * choice.rate * self.prices.table.fixed

    def _looked(self, decision: Decision, cheap: Decision, live: int, context: float) -> Decision:
        """What to do now that the cheap draft is there: `cheap`, which verifies of it what pays, or the shape itself.

        The higher rate wins, whatever rate is usual: stretches of text in which one drafter does better than the other
        have their lengths in tokens, and are to be left behind in the shortest time.
        """
        if decision.beside is None:
            seconds = decision.seconds + self.prices.table.fixed
        else:  # it is drafted already
            seconds = decision.seconds - self.books.shadow(decision.shape, self.prices.quote(live, context), live)
        better = decision.tokens / seconds
        if better > cheap.rate and (decision.beside is not None or self._returns(decision, cheap, better, live)):
            return self._turned(decision, live)
        if cheap.shadow is None:
            self._found += (1 - self._found) / LOOKS
        else:
            cheap = cheap._replace(shape=PLAIN)
        return cheap._replace(reason="scores")

    def _returns(self, decision: Decision, cheap: Decision, better: float, live: int) -> bool:
        """Whether a dear shape that is better is made, though its drafter may have to catch up first.

        That pays for many rounds, so it is bought as a change of shape is (`_settle`): when as much was lost without.
        """
        price = self.books.catch_up(decision.shape.kind, live)
        if price > 0:
            self._rent += cheap.seconds * (1 - cheap.rate / better)
            if self._rent < price:
                return False
        self._rent = 0.0
        return True

    def _turned(self, decision: Decision, live: int) -> Decision:
        """The shape itself, after a look that promises less: to be drafted, if it is not yet, and fitted."""
        self._found -= self._found / LOOKS
        # Requests may have ended since it was made; what each gets is decided when the draft is there.
        told = {"shadow": None, "ride": False, "beside": None, "going": None}
        return decision._replace(**told, budgets=np.ones(live, int))

    def _decision(
        self,
        view: View,
        choice: Choice,
        reason: str,
        second: tuple[int, float] | None,
        shadow: DraftShape | None = None,
        ride: bool = False,
    ) -> Decision:
        shape = self.menu[choice.index]
        total = int(self.prices.counts[choice.place])
        if shape.depth:
            budgets = allocate.budgets(view.nodes(choice.index), total)
        else:
            budgets = np.ones(len(view.rows), int)
        return Decision(
            shape=shape,
            rows=total,
            budgets=budgets,
            seconds=choice.seconds,
            tokens=choice.tokens,
            plain=len(view.rows) / view.plain,
            reason=reason,
            shadow=shadow,
            ride=ride,
            runner_up=None if second is None else (self.menu[second[0]], second[1]),
        )
