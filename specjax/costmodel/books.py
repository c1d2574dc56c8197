"""What rounds have brought and cost: where the engine stands against plain decoding, and the money for trials."""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from specjax.costmodel.decision import Decision
from specjax.costmodel.prices import Quote
from specjax.costmodel.tables import Table
from specjax.draft import PLAIN, DraftShape

PURSE = 0.008  # share of the time that trials and shadow drafts may cost
FARE, GAIN = 0.002, 0.1  # share of the time that drafts may cost that ride along, and of what such drafts have gained
OPENING = 1.0  # plain rounds' worth of it to begin with
EARLY, EARLY_ROUNDS = 0.01, 150  # more than that share at first, while the engine is ahead of plain decoding
DEBT = 0.02  # share of plain's tokens that may be missing before only sure gains are taken
HISTORY = 256


class Books:
    """The account of one engine, round by round.

    Args:
        table: prices of changes.
        menu: shapes.
        ring: newest tokens of a request that a drafter can catch up on; older ones are dropped.
        room: of these, what a draft takes in of itself; None for those of one round.

    Attributes:
        current: shape of the last round, drafts apart that were verified for their scores.
        rounds: so far.
        ahead: tokens more than plain decoding would have made, a request.
        missed: tokens that each drafter has not taken in, of all requests.
        purse: seconds that trials and shadow drafts may cost; None until the first is thought of.
        fares: seconds that drafts may cost that ride along; None likewise.
        spent: seconds that trials and shadow drafts have cost.
        lost: seconds that a change of shape would have saved so far.
        before: the shape before a trial: the way back to it is paid for.
        switches: newest changes of shape: round, from, to, reason.
        reasons: rounds by `Decision.reason`.
        changes: changes of shape, likewise.
        totals: of all rounds: expected and actual seconds, expected and actual tokens.
        rounds_of: rounds by the kind of drafter whose drafts were up for verification, `none` for plain ones.
        drafted: drafts that were verified, by kind.
        accepted: of these, accepted.
    """

    def __init__(self, table: Table, menu: Sequence[DraftShape], ring: int, room: int | None = None):
        self.table, self.menu, self.ring = table, tuple(menu), ring
        self._place = {shape: index for index, shape in enumerate(self.menu)}
        self.room = 1 + max(shape.depth for shape in self.menu) if room is None else room
        self.current = PLAIN
        self.rounds = 0
        self.ahead = 0.0
        self.missed = dict.fromkeys((s.kind for s in self.menu if s.depth), 0.0)
        self.purse: float | None = None
        self.fares: float | None = None
        self.spent = 0.0
        self.lost = 0.0
        self.before: DraftShape | None = None
        self.switches: collections.deque = collections.deque(maxlen=HISTORY)
        self.reasons: collections.Counter = collections.Counter()
        self.changes: collections.Counter = collections.Counter()
        self.totals = (0.0, 0.0, 0.0, 0.0)
        self.rounds_of: collections.Counter = collections.Counter()
        self.drafted: collections.Counter = collections.Counter()
        self.accepted: collections.Counter = collections.Counter()
        self._errors: collections.deque = collections.deque(maxlen=HISTORY)

    @property
    def behind(self) -> bool:
        """Whether fewer tokens were committed than plain decoding would have, beyond what is tolerated."""
        return self.ahead < -(OPENING + DEBT * self.rounds)

    # ---------------------------------------------------------------- what changes cost

    def entry(self, shape: DraftShape, live: int) -> float:
        """Seconds to take up a shape: the switch, and what its drafter has to catch up on."""
        return 0.0 if shape == self.current else self.table.switch + self.catch_up(shape.kind, live)

    def catch_up(self, kind: str, live: int) -> float:
        """Seconds that a drafter takes before it can draft, where it missed more than a draft takes in of itself."""
        missed = self.missed.get(kind, 0.0)
        return self.table.catch_up_time(kind, missed) if missed > self.room * live else 0.0

    def back(self, shape: DraftShape, live: int) -> float:
        """Seconds to return to the current shape from a short trial of another."""
        if shape == self.current:
            return 0.0
        missed = 2.0 * live if shape.kind != self.current.kind else 0.0
        return self.table.switch + self.table.catch_up_time(self.current.kind, missed)

    def shadow(self, shape: DraftShape, quote: Quote, live: int) -> float:
        """Seconds to draft a shape beside a plain round."""
        return float(quote.draft[self._place[shape]] - self.table.fixed) + self.catch_up(shape.kind, live)

    # ---------------------------------------------------------------- after a round

    def commit(self, decision: Decision, live: int, accepted: int) -> None:
        """A round's tokens are known: whoever did not draft for it has missed them."""
        drafted = {made.kind for made in (decision.shape, decision.shadow, decision.beside) if made is not None}
        for kind, missed in self.missed.items():
            self.missed[kind] = 0.0 if kind in drafted else min(missed + live + accepted, float(self.ring * live))

    def enter(
        self, decision: Decision, live: int, drafted: int, accepted: int, *, seconds: float, extra: float, plain: float
    ) -> None:
        """A round is over.

        Args:
            decision: what was decided for it.
            live: requests that took part.
            drafted: drafts of theirs that were verified, in all.
            accepted: of these, accepted.
            seconds: how long it took, `extra` included.
            extra: what the change of shape and a shadow draft were expected to take.
            plain: expected seconds of a plain round.
        """
        self.rounds += 1
        self.reasons[decision.reason] += 1
        kind = decision.shape.kind
        self.rounds_of[kind] += 1
        if drafted:
            self.drafted[kind] += drafted
            self.accepted[kind] += accepted
        tokens = live + float(accepted)
        self.ahead = min(self.ahead + tokens / live - seconds / plain, OPENING)
        outcome = decision.seconds, seconds, decision.tokens, tokens
        self._errors.append(outcome)
        a, b, c, d = self.totals
        self.totals = a + outcome[0], b + outcome[1], c + outcome[2], d + outcome[3]
        if decision.reason == "trial":
            self.before = self.current if self.before is None else self.before
            lost = seconds - tokens / decision.runner_up[1] if decision.runner_up else 0.0
        else:  # a shadow draft, and the way back from a trial
            lost = extra if decision.shadow is not None or self.before is not None else 0.0
            self.before = None
        self.spent += lost
        if self.fares is not None:
            gained = max(tokens / live * plain - seconds, 0.0) if decision.reason == "scores" else 0.0
            self.fares = min(self.fares + FARE * seconds + GAIN * gained - lost * decision.ride, OPENING * plain)
        if self.purse is not None:
            early = self.rounds < EARLY_ROUNDS and self.ahead > 0
            fare = 0.0 if decision.ride else lost
            self.purse = min(self.purse + (PURSE + EARLY * early) * seconds - fare, 10 * OPENING * plain)
        if decision.shape != self.current and decision.reason != "scores":
            self.lost = 0.0
            self.changes[decision.reason] += 1
            self.switches.append((self.rounds, self.current, decision.shape, decision.reason))
            self.current = decision.shape

    def report(self) -> dict[str, Any]:
        """Predicted against actual, over the newest rounds; rounds by reason; cost of trials; changes of shape."""
        errors = np.array(list(self._errors)) if self._errors else np.ones((0, 4))
        time = np.abs(np.log(errors[:, 1] / errors[:, 0]))
        tokens = np.abs(errors[:, 3] - errors[:, 2]) / errors[:, 2]
        return {
            "rounds": self.rounds,
            "seconds": self.totals[1],
            "shape": dataclasses.asdict(self.current),
            "time_error_median": float(np.median(time)) if len(time) else 0.0,
            "tokens_error_median": float(np.median(tokens)) if len(tokens) else 0.0,
            "tokens_bias": float(errors[:, 3].sum() / errors[:, 2].sum() - 1) if len(tokens) else 0.0,
            "reasons": dict(self.reasons),
            "exploration_s": self.spent,
            "switches": [
                {"round": r, "from": dataclasses.asdict(a), "to": dataclasses.asdict(b), "reason": why}
                for r, a, b, why in list(self.switches)
            ],
        }
