"""Which shape to draft next, and how many of its nodes to verify: the most committed tokens per second.

Each round, for the requests that decode now: expected tokens of every shape (acceptance, learned from past rounds) over
the time of the whole round (prices, corrected by past rounds); plain decoding is always one of the shapes. What is not
known well enough is tried, but only from a purse that holds a small share of the decoding time; and whoever falls
behind plain decoding has to be sure of a shape before using it again. A decision reads nothing from the device.
"""

import collections
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from specjax.costmodel import allocate
from specjax.costmodel.acceptance import TEMPERATURES, Acceptance
from specjax.costmodel.prices import MEMORY, NOISE, Prices, Quote
from specjax.costmodel.scores import Nodes, ScoreMap
from specjax.costmodel.tables import Table
from specjax.costmodel.view import Choice, View
from specjax.draft import PLAIN, DraftShape

PURSE = 0.008  # share of the time that trials and shadow drafts may cost
FARE, GAIN = 0.002, 0.1  # share of the time that drafts may cost that ride along, and of what such drafts have gained
OPENING = 1.0  # plain rounds' worth of it to begin with
EARLY, EARLY_ROUNDS = 0.02, 150  # more than that share at first, while the engine is ahead of plain decoding
LONGEST = 8  # rounds of a trial
DEBT = 0.02  # share of plain's tokens that may be missing before only sure gains are taken
RIDE = 0.02  # plain rounds: a draft that costs no more may ride along with one
NEGLIGIBLE = 0.01  # plain rounds: what costs less than this is as good as free
EAGER, EVERY = 64, 4  # trials are thought of in each of the first rounds, then now and then: thinking costs too
DOUBT = 0.7  # deviations of each depth at once: they are independent, so their sum deviates by less than theirs
HISTORY = 256


@dataclasses.dataclass(frozen=True)
class Decision:
    """What to do in the next round.

    Attributes:
        shape: what to draft.
        rows: total rows of the pass that is expected to follow.
        budgets: rows of each request, its root included.
        seconds: expected time of the round.
        tokens: expected tokens of the round, of all requests.
        plain: expected tokens per second of plain decoding.
        reason: `best`; `trial`, to learn; `sure`, the best of what surely gains, as the engine is behind plain; `stay`,
            where another is better but not yet by what the change costs; `scores`, where a draft made beside a plain
            round turned out to be worth verifying.
        shadow: a shape to draft beside a plain round. The tokens that come anyway tell its acceptance; none of it is
            verified, unless its scores say that it should be (`Planner.fit`).
        ride: the shadow was made because it costs next to nothing, and not to learn from it.
        runner_up: the next best shape, and its rate; for a trial the best one.
    """

    shape: DraftShape
    rows: int
    budgets: np.ndarray
    seconds: float
    tokens: float
    plain: float
    reason: str
    shadow: DraftShape | None = None
    ride: bool = False
    runner_up: tuple[DraftShape, float] | None = None

    @property
    def rate(self) -> float:
        """Expected tokens per second."""
        return self.tokens / self.seconds


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
        acceptance: estimates to begin with; None begins at the priors.
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
        acceptance: Acceptance | None = None,
    ):
        self.menu = tuple(dict.fromkeys((PLAIN, *menu)))
        self.prices = Prices(table, self.menu, counts)
        drafted = self.menu[1:]
        self.acceptance = Acceptance(drafted, batch) if acceptance is None else acceptance
        self.scores = ScoreMap(list(dict.fromkeys(s.kind for s in drafted)), len(TEMPERATURES) + 1)
        self.explore, self.scored, self.ring = explore, scored, ring
        self.current = PLAIN
        self.rounds = 0
        self.switches: collections.deque = collections.deque(maxlen=HISTORY)
        self._curve = np.array([self.acceptance.curve[s] for s in drafted], int)
        self._deepest = np.array([s.depth for s in drafted], int) - 1
        self._rows = np.array([s.rows for s in self.menu])
        # Nodes of every shape, side by side: depth (from 0) and share of its depth; a share of 0 where there is none.
        self._nodes_depth = np.zeros((len(self.menu), max(self._rows)), int)
        self._nodes_share = np.zeros(self._nodes_depth.shape)
        for index, made in enumerate((self.acceptance.outlines[s] for s in drafted), 1):
            self._nodes_depth[index, : len(made.depths)] = made.depths - 1
            self._nodes_share[index, : len(made.depths)] = made.shares
        self._of = np.concatenate([[0], self._curve]).astype(int)  # curve of each shape; plain's is not used
        self._index = np.arange(len(self.menu))
        self._layouts: dict[int, tuple[np.ndarray, ...]] = {}
        self._missed = dict.fromkeys({s.kind for s in drafted}, 0.0)
        self._purse: float | None = None
        self._fares: float | None = None  # seconds that drafts may cost that ride along
        self._before: DraftShape | None = None  # the shape before a trial: the way back to it is paid for
        self._trying: tuple[int, int] | None = None  # a shape and a pass on trial, and the rounds left to them
        self._left = 0
        self._ahead = 0.0  # tokens more than plain would have made, a request
        self._lost = 0.0  # seconds that a change of shape would have saved so far
        self._errors: collections.deque = collections.deque(maxlen=HISTORY)
        self.spent = 0.0  # seconds that trials and shadow drafts have cost
        self._reasons: collections.Counter = collections.Counter()

    def start(self, row: int, temperature: float = 0.0) -> None:
        """A new request decodes in a row of the batch."""
        self.acceptance.start(row, temperature)

    # ---------------------------------------------------------------- deciding

    def decide(self, rows: np.ndarray, context: float) -> Decision:
        """The next round of the requests in `rows` (of the batch), whose caches hold `context` tokens on average."""
        quote = self.prices.quote(len(rows), context)
        seconds = self.prices.seconds(quote)
        view = View(self, rows, quote, seconds, self.acceptance.live(rows))
        choice, second = view.best()
        choice, reason = self._settle(view, choice)
        plain = len(rows) / seconds[0, quote.least]
        if self.explore:
            if self._ahead < -(OPENING + DEBT * self.rounds):
                choice, reason = self._sure(rows, quote, seconds, view.proposing, choice), "sure"
            trial = None
            if self._trying is not None:  # paid for already
                trial = view.choice(*self._trying)
            elif self.rounds < EAGER or self.rounds % EVERY == 0:
                trial = self._trial(rows, quote, seconds, view, choice)
            if isinstance(trial, DraftShape):
                return self._decision(view, choice, plain, reason, second, shadow=trial)
            if trial is not None:
                # What the trial loses against the shape that it keeps from running is known when the round is over.
                second, choice, reason = (choice.index, choice.rate), trial, "trial"
            elif self.scored and choice.index == 0 and (ride := self._ride(view, quote)) is not None:
                return self._decision(view, choice, plain, reason, second, shadow=ride, ride=True)
        return self._decision(view, choice, plain, reason, second)

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
            verifying becomes the shape.
        """
        quote = self.prices.quote(len(rows), context)
        counts, shape = self.prices.counts, decision.shape
        if decision.shadow is not None and nodes is not None:
            shape = decision.shadow
        index = self.menu.index(shape)
        if shape.depth == 0 or not live.any():
            chances = np.zeros((len(rows), 1))
        elif nodes is None:
            chances = self._nodes(index, self._levels(rows))
        else:
            doubt = DOUBT if decision.reason == "sure" else 0.0
            chances = self.scores.chances(shape.kind, self.acceptance.heat(rows), nodes, doubt=doubt)
        chances = np.where(np.arange(chances.shape[1]) < live[:, None], chances, 0.0)
        drafts = live.sum() if shape.depth else 0
        needed = np.searchsorted(counts, len(rows) + drafts)
        usable = np.arange(quote.least, min(needed, len(counts) - 1) + 1)
        times = self.prices.seconds(quote)[index, usable]
        if decision.reason == "trial":  # the pass that is on trial, if there is enough to fill it
            choice = min(int(np.searchsorted(counts[usable], decision.rows)), len(usable) - 1)
        else:
            choice = allocate.best_surplus(chances, counts[usable], times, decision.rate)
        if shape != decision.shape and choice > 0:
            decision = dataclasses.replace(decision, shape=shape, shadow=None, reason="scores")
        total = int(counts[usable[choice]])
        return dataclasses.replace(
            decision,
            rows=total,
            budgets=allocate.budgets(chances, total),
            seconds=float(times[choice]),
            tokens=float(allocate.expected(chances, counts[usable[choice : choice + 1]])[0]),
        )

    def extra(self, decision: Decision, live: int, context: float) -> float:
        """Seconds that a round takes beside its shape: to take the shape up, and for a shadow draft."""
        shadow = decision.shadow
        entry = 0.0 if decision.reason == "scores" else self._entry(decision.shape)
        return entry + (self._shadow_cost(shadow, self.prices.quote(live, context)) if shadow else 0.0)

    # ---------------------------------------------------------------- learning

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
        """
        quote = self.prices.quote(len(rows), context)
        index, place = self.menu.index(decision.shape), int(np.searchsorted(self.prices.counts, count))
        self.rounds += 1
        self._reasons[decision.reason] += 1
        self.acceptance.age()
        self.scores.age(1 - 1 / MEMORY)
        self.prices.age()
        extra = self.extra(decision, len(rows), context)
        paid = max(seconds - extra, 0.1 * seconds)
        self.prices.observe(index, place, quote.draft[index] + quote.verify[place], paid)
        # What a shape is worth is what comes of it as it is used: cut by its scores, down to nothing.
        if decision.shape.depth or decision.ride:
            self.acceptance.observe(decision.shadow or decision.shape, rows, drafts, accepted)
        for kind in self._missed:
            on = kind == decision.shape.kind or (decision.shadow is not None and kind == decision.shadow.kind)
            missed = self._missed[kind] + float(len(rows) + accepted.sum())
            self._missed[kind] = 0.0 if on else min(missed, float(self.ring * len(rows)))
        tokens = len(rows) + float(accepted.sum())
        plain = self.prices.seconds(quote)[0, quote.least]
        self._ahead = min(self._ahead + tokens / len(rows) - seconds / plain, OPENING)
        self._errors.append((decision.seconds, seconds, decision.tokens, tokens))
        if decision.reason == "trial":
            self._before = self.current if self._before is None else self._before
            lost = seconds - tokens / decision.runner_up[1] if decision.runner_up else 0.0
        else:  # a shadow draft, and the way back from a trial
            lost = extra if decision.shadow is not None or self._before is not None else 0.0
            self._before = None
        self.spent += lost
        if self._fares is not None:
            gained = max(tokens / len(rows) * plain - seconds, 0.0) if decision.reason == "scores" else 0.0
            self._fares = min(self._fares + FARE * seconds + GAIN * gained - lost * decision.ride, OPENING * plain)
        if self._trying is not None:
            self._left -= 1
            self._trying = self._trying if self._left > 0 else None
        if self._purse is not None:
            early = self.rounds < EARLY_ROUNDS and self._ahead > 0
            fare = 0.0 if decision.ride else lost
            self._purse = min(self._purse + (PURSE + EARLY * early) * seconds - fare, 10 * OPENING * plain)
        if decision.shape != self.current and decision.reason != "scores":
            self._lost = 0.0
            self.switches.append((self.rounds, self.current, decision.shape, decision.reason))
            self.current = decision.shape

    def shadow(self, shape: DraftShape, rows: np.ndarray, drafts: np.ndarray, accepted: np.ndarray) -> None:
        """What became of shadow drafts: how many of each request's drafts the text that followed agrees with."""
        self.acceptance.observe(shape, rows, drafts, accepted)

    def learn(self, shape: DraftShape, rows: np.ndarray, drafts: np.ndarray, nodes: Nodes, path: np.ndarray) -> None:
        """The text after some drafts is known, whether they were verified or not.

        What a pass verifies is chosen by the scores, so what it accepts says nothing of the scores that it left out;
        the text judges all of them.

        Args:
            shape: what was drafted.
            rows: batch rows of the requests.
            drafts: drafted nodes of each, the root not counted.
            nodes: the drafts.
            path: which of their nodes the text goes along, roots included.
        """
        self.scores.observe(shape.kind, self.acceptance.heat(rows), nodes, 1 + drafts, path)

    def report(self) -> dict[str, Any]:
        """Predicted against actual, over the newest rounds; calibration of acceptance; changes of shape.

        `scores` are the maps of greedy requests: what drafters said, what was accepted, and of how many drafts (the
        newer, the more they count). `reasons` counts rounds by `Decision.reason`.
        """
        errors = np.array(self._errors) if self._errors else np.ones((0, 4))
        time = np.abs(np.log(errors[:, 1] / errors[:, 0]))
        tokens = np.abs(errors[:, 3] - errors[:, 2]) / errors[:, 2]
        return {
            "rounds": self.rounds,
            "shape": dataclasses.asdict(self.current),
            "time_error_median": float(np.median(time)) if len(time) else 0.0,
            "tokens_error_median": float(np.median(tokens)) if len(tokens) else 0.0,
            "tokens_bias": float(errors[:, 3].sum() / errors[:, 2].sum() - 1) if len(tokens) else 0.0,
            "calibration_error": self.acceptance.calibration_error(),
            "scores": {
                kind: [
                    dict(zip(("said", "accepted", "drafts"), entry, strict=True)) for entry in self.scores.table(kind)
                ]
                for kind in self._missed
            },
            "reasons": dict(self._reasons),
            "exploration_s": self.spent,
            "switches": [
                {"round": r, "from": dataclasses.asdict(a), "to": dataclasses.asdict(b), "reason": why}
                for r, a, b, why in self.switches
            ],
        }

    # ---------------------------------------------------------------- inside

    def _levels(self, rows: np.ndarray, live: np.ndarray | None = None, *, optimism: float = 0.0) -> np.ndarray:
        """Chance that the accepted path reaches each depth `[depth, curve, request]`; without `live`: given a draft."""
        rates = self.acceptance.rates(rows, optimism=optimism)
        reached = np.empty_like(rates)
        chance = 1.0 if live is None else live
        for depth, rate in enumerate(rates):  # faster than `cumprod`, which goes one number after another
            chance = np.multiply(chance, rate, out=reached[depth])
        return reached

    def _nodes(self, index: int, levels: np.ndarray) -> np.ndarray:
        """Chance of each node `[request, node]` of a drafted shape of the menu."""
        count = self._rows[index] - 1
        chances = levels[self._nodes_depth[index, :count], self._of[index]]
        return (chances * self._nodes_share[index, :count, None]).T

    def _layout(self, live: int) -> tuple[np.ndarray, ...]:
        """For a number of requests: the pass that holds each whole shape; nodes a request of each pass, and a part."""
        if live not in self._layouts:
            counts = self.prices.counts
            full = np.minimum(np.searchsorted(counts, live * self._rows), len(counts) - 1)
            most = live * (self._nodes_share.shape[1] - 1)
            nodes, rest = np.divmod(np.clip(counts - live, 0, most), live)
            self._layouts[live] = full, nodes, rest / live
        return self._layouts[live]

    def _totals(self, levels: np.ndarray) -> np.ndarray:
        """Expected accepted drafts of each shape, whole, over all requests."""
        sums = np.cumsum(levels.sum(axis=-1), axis=0)
        return np.concatenate([[0.0], sums[self._deepest, self._curve]])

    def _entry(self, shape: DraftShape) -> float:
        """Seconds to take up a shape: the switch, and what its drafter has to catch up on."""
        if shape == self.current:
            return 0.0
        return self.prices.table.switch + self.prices.table.catch_up_time(shape.kind, self._missed.get(shape.kind, 0.0))

    def _back(self, shape: DraftShape, live: int) -> float:
        """Seconds to return to the current shape from a short trial of another."""
        if shape == self.current:
            return 0.0
        missed = 2.0 * live if shape.kind != self.current.kind else 0.0
        return self.prices.table.switch + self.prices.table.catch_up_time(self.current.kind, missed)

    def _settle(self, view: View, choice: Choice) -> tuple[Choice, str]:
        """The better shape, or the current one while what was lost by it is less than what the change costs.

        Buying when the rent paid so far equals the price costs at most twice what foresight would, however long the
        better shape stays better; where changes are free they happen at once.
        """
        entry = self._entry(self.menu[choice.index])
        if entry == 0.0 or self.menu[choice.index] == self._before:
            self._lost *= 0.9
            return choice, "best"
        mine = view.choice(self.menu.index(self.current))
        self._lost += mine.seconds * max(1 - mine.rate / choice.rate, 0.0)
        return (choice, "best") if self._lost >= entry else (mine, "stay")

    def _sure(self, rows: np.ndarray, quote: Quote, seconds: np.ndarray, live: np.ndarray, choice: Choice) -> Choice:
        """The best of what beats plain even if acceptance and time are worse than expected by a deviation."""
        dearer = seconds * np.exp(self.prices.deviation(quote))
        dearer[0] = seconds[0]
        careful, _ = View(self, rows, quote, dearer, live, optimism=-DOUBT).best()
        return choice if careful.index == choice.index else careful

    def _trial(
        self, rows: np.ndarray, quote: Quote, seconds: np.ndarray, view: View, choice: Choice
    ) -> Choice | DraftShape | None:
        """The shape from whose trial most is to be expected, or None.

        Its gain: the expected improvement (of a normal log rate) over the rounds for which what is learned holds, less
        what the trial is expected to lose.

        A plain round is best left as it is and the shape drafted beside it, where that is cheaper and all that is
        unknown is its acceptance: then the shape itself is returned.
        """
        plain = float(seconds[0, quote.least])
        if self._purse is None:
            self._purse = OPENING * plain
        if self._purse <= 0:
            return None
        hopeful = View(
            self, rows, quote, seconds * np.exp(-self.prices.deviation(quote)), view.proposing, optimism=DOUBT
        )
        found, worth, price, length = None, 0.0, 0.0, 0
        for index in np.flatnonzero(hopeful.bounds > choice.rate).tolist():
            hope = hopeful.choice(index)
            if (index, hope.place) == (choice.index, choice.place):
                continue
            expected = view.choice(index, hope.place)  # the very pass that might be better
            deviation = math.log(hope.rate / expected.rate)
            gain = _improvement(math.log(expected.rate / choice.rate), deviation)
            entry = self._entry(self.menu[index]) + self._back(self.menu[index], len(rows))
            each = max(expected.seconds * max(1 - expected.rate / choice.rate, 0.0), NEGLIGIBLE * plain)
            # As many rounds as cost what the way in costs: at most twice the price of what is learned.
            rounds = int(np.clip(round(entry / each), 1, LONGEST))
            lost = entry + rounds * each
            if gain * MEMORY * choice.seconds - lost > worth:
                found, worth, price, length = expected, gain * MEMORY * choice.seconds - lost, lost, rounds
        if found is None:
            return None
        shape = self.menu[found.index]
        known = self.prices.deviation(quote)[found.index, found.place] <= 2 * NOISE
        if shape.depth and choice.index == 0 and known:
            # How long it takes is known; whether it is accepted can be seen beside a plain round.
            shadow = self._shadow_cost(shape, quote)
            if shadow < price and shadow <= self._purse:
                return shape
        if price > self._purse:
            return None
        self._trying, self._left = (found.index, found.place), length
        return found

    def _ride(self, view: View, quote: Quote) -> DraftShape | None:
        """A shape so cheap to draft that a plain round takes it along: its scores may make it worth verifying."""
        if self._fares is None:
            self._fares = OPENING * float(view.seconds[0, quote.least])
        found, best = None, 0.0
        for index in range(1, len(self.menu)):
            cost = self._shadow_cost(self.menu[index], quote)
            if cost <= min(RIDE * view.seconds[0, quote.least], self._fares) and view.whole[index] > best:
                found, best = self.menu[index], float(view.whole[index])
        return found

    def _shadow_cost(self, shape: DraftShape, quote: Quote) -> float:
        index = self.menu.index(shape)
        missed = self._missed[shape.kind]
        drafting = quote.draft[index] - self.prices.table.fixed
        return float(drafting + self.prices.table.catch_up_time(shape.kind, missed))

    def _decision(
        self,
        view: View,
        choice: Choice,
        plain: float,
        reason: str,
        second: tuple[int, float] | None,
        shadow: DraftShape | None = None,
        ride: bool = False,
    ) -> Decision:
        shape = self.menu[choice.index]
        total = int(self.prices.counts[choice.place])
        if shape.depth:
            budgets = allocate.budgets(self._nodes(choice.index, view.levels), total)
        else:
            budgets = np.ones(len(view.rows), int)
        return Decision(
            shape=shape,
            rows=total,
            budgets=budgets,
            seconds=choice.seconds,
            tokens=choice.tokens,
            plain=plain,
            reason=reason,
            shadow=shadow,
            ride=ride,
            runner_up=None if second is None else (self.menu[second[0]], second[1]),
        )


def _improvement(ahead: float, deviation: float) -> float:
    """Expected gain of a log rate that is normal around `ahead` of the chosen one's, if the better is taken then."""
    if deviation <= 0:
        return max(ahead, 0.0)
    z = ahead / deviation
    density = math.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    return deviation * (density + z * 0.5 * math.erfc(-z / math.sqrt(2)))
