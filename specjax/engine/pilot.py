"""The planner at the helm of an engine: it picks each round's draft, cuts it, and learns from what came of it.

What the host does in a round, and when:

    fit the standing draft -> dispatch verify -> learn from the rounds before, decide the next draft, dispatch it
        -> wait for tokens and the draft

Prompt lookup is no dispatch of its own: where it is a member, every pass leaves its draft in the state.

The decision rests on rounds that are over: the one that the device works on is not among them, so nothing waits for it
and nothing that it samples decides its shape. How much of a draft is verified follows from its scores, which are
functions of the text so far.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from specjax.costmodel.decision import Decision
from specjax.costmodel.planner import Planner
from specjax.costmodel.scores import Nodes
from specjax.draft import PLAIN, Draft, DraftShape
from specjax.drafters.drafter_set import DrafterSet
from specjax.engine.follow import Followed
from specjax.engine.programs import Programs
from specjax.engine.proposal import Proposal
from specjax.engine.state import Emitted, State

THINKING = 0.0025  # share of the time that deciding may take, and that following drafts may
TOGETHER = 8  # rounds at most that are learned from at a time: after a pass nothing of it is left in the caches
EAGER = 64  # drafts that are all followed, of as many requests as there are, before that share is kept to


@dataclasses.dataclass
class Standing:
    """A draft that was dispatched.

    Attributes:
        decision: why.
        shape: what was drafted; plain, if nothing was.
        made: the draft (`proposal.packed`), on the device until it was waited for; None where nothing was drafted.
        cost: seconds that drafting it was expected to take.
        caught_up: kinds that had taken in everything when it was made.
        behind: another one, drafted right behind it; the state holds that one's nodes.
        draft: this one's nodes then.
    """

    decision: Decision
    shape: DraftShape
    made: Any
    cost: float
    caught_up: set[str]
    behind: "Standing | None" = None
    draft: Draft | None = None

    def fetch(self, *others: Any) -> Any:
        """Wait for this draft, the one behind it, and `others`; those come back."""
        behind = self.behind or self
        others, self.made, behind.made = jax.device_get((others, self.made, behind.made))
        return others


class Pilot:
    """Rounds of a set of drafters, as a planner wants them.

    Args:
        planner: who decides.
        drafters: the set.
        programs: of the engine.
        thinking: share of the time that deciding may take, meanwhile the last decision stands; and that following the
            drafts may, to learn how right they were. What comes when it is due is not looked at first.
        clock: seconds.

    Attributes:
        planner: who decides.
        host_s: processor seconds that its thinking has taken: `decide`, `fit` (cut a draft by its scores), `learn`. Not
            by the clock: most of it happens while the device works, which may be this very processor.
    """

    def __init__(
        self,
        planner: Planner,
        drafters: DrafterSet,
        programs: Programs,
        *,
        thinking: float = THINKING,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.planner, self.programs, self.thinking, self.clock = planner, programs, thinking, clock
        self._steps, self._room, self._ring = drafters.steps, drafters.room, drafters.ring
        kinds = [member.kind for member in drafters.members if drafters.reads_features(member.kind)]
        self._waiting = {kind: np.zeros(programs.batch, int) for kind in kinds}  # rows to take in, of each request
        self._standing: Standing | None = None
        self._followed: list[Followed] = []
        self._rounds, self._follow_at = 0, 0.0  # so far; when a draft is to be followed again
        self._silent: list[tuple[DraftShape, np.ndarray]] = []  # shapes that had nothing to propose, and to whom
        self._unlearned: list[Callable[[], None]] = []  # what the newest rounds teach
        self._since = 0.0
        self._kept: Decision | None = None  # the last decision, if it may stand
        self._think_at = 0.0  # when the next one is due
        self.host_s = {"decide": 0.0, "fit": 0.0, "learn": 0.0}

    def admitted(self, row: int, temperature: float) -> None:
        """A request was prefilled: all drafters know its prompt, and the draft that stood is gone."""
        self._settle()
        self.planner.start(row, temperature)
        self.released(row)
        self._standing = None

    def released(self, row: int) -> None:
        """The request of a row has ended or was given up."""
        self._settle()
        self._kept = None
        for waiting in self._waiting.values():
            waiting[row] = 0
        for followed in self._followed:
            followed.drop(row)

    def round(self, params: Any, state: State, rows: np.ndarray, context: float) -> tuple[State, Emitted, np.ndarray]:
        """One round.

        Args:
            params: weights.
            state: the state.
            rows: batch rows that decode, ascending.
            context: tokens that their caches hold on average.

        Returns:
            The state, what was emitted, and the rows of each batch row that were verified (0 where none decodes).
        """
        standing = self._standing
        if standing is None:
            self._since = self.clock()
            running = np.zeros(self.programs.batch, int)
            state, standing = self._propose(self._decide(rows, context), params, state, rows, context, running)
            self._wait(standing, rows)
        spent = standing.cost
        decision, drafts = self._fit(standing, rows, context)
        if decision.shadow is None and decision.shape != standing.shape:
            # A cheap draft was made first, and promises less than the shape itself.
            if standing.behind is not None:
                standing = dataclasses.replace(standing.behind, decision=decision)
            else:
                running = np.zeros(self.programs.batch, int)
                state, standing = self._propose(decision, params, state, rows, context, running)
                self._wait(standing, rows)
            decision, more = self._fit(standing, rows, context)
            drafts += more
        elif standing.behind is not None:
            state = dataclasses.replace(state, draft=standing.draft)
        verified = np.zeros(self.programs.batch, int)
        verified[rows] = decision.budgets
        width = self.programs.fit(verified)
        state, emitted = self.programs.verify(width, params, state, np.maximum(verified, 1).astype(np.int32))
        if self._kept is None or len(self._unlearned) >= TOGETHER:
            self._settle()  # while the device is at work
        self._rounds += 1
        ahead = self._decide(rows, context)
        state, following = self._propose(ahead, params, state, rows, context, verified, emitted.lookup)
        (emitted,) = following.fetch(emitted)
        now = self.clock()
        for kind, waiting in self._waiting.items():
            waiting[rows] = 0 if kind in following.caught_up else waiting[rows] + emitted.counts[rows]
        # The time since the last round ended holds this round's pass and the next one's draft: exchange the drafts.
        seconds = max(now - self._since - following.cost + spent, 1e-6)
        accepted = np.maximum(emitted.counts[rows] - 1, 0)
        extra = self.planner.committed(decision, len(rows), context, int(accepted.sum()))

        def learn() -> None:
            began = time.thread_time()
            self.planner.observe(
                decision,
                rows,
                context,
                seconds=seconds,
                count=width.count,
                drafts=verified[rows] - 1,
                accepted=accepted,
                extra=extra,
            )
            self._followed.extend(drafts)
            self._learn(emitted)
            self._thought("learn", began)

        self._unlearned.append(learn)
        self._standing, self._since = following, now
        return state, emitted, verified

    def report(self) -> dict[str, Any]:
        """Predicted against actual, calibration, and changes of shape: see `Planner.report`; and `host_s`, as here."""
        self._settle()
        return self.planner.report() | {"host_s": dict(self.host_s)}

    # ---------------------------------------------------------------- inside

    def _settle(self) -> None:
        """Learn from the rounds of which that is still to be done."""
        unlearned, self._unlearned = self._unlearned, []
        for learn in unlearned:
            learn()

    def _thought(self, what: str, began: float) -> None:
        self.host_s[what] += time.thread_time() - began

    def _propose(
        self,
        decision: Decision,
        params: Any,
        state: State,
        rows: np.ndarray,
        context: float,
        running: np.ndarray,
        looked: Any = None,
    ) -> tuple[State, Standing]:
        """Dispatch the draft of a decision, once its drafter has caught up.

        Args:
            decision: what to draft, and why.
            params: weights.
            state: the state.
            rows: batch rows that decode.
            context: as given to `round`.
            running: rows that the device may be committing meanwhile, of each request.
            looked: the prompt lookup that stands in the state, if one does: made by the pass that is under way.

        Returns:
            The state, and the draft.
        """
        drafted = decision.shadow or decision.shape
        kinds, caught_up, waits = {drafted.kind, (decision.beside or drafted).kind}, set(), {}
        for kind, waiting in self._waiting.items():
            waits[kind] = most = int((waiting + running)[rows].max())
            if (kind in kinds and most > self._room) or most + self._steps > self._ring:
                state = self.programs.catch_up(kind, params, state)
                caught_up.add(kind)
                waits[kind] = 1  # the newest is taken in again
        # The price of a shadow is an extra of a plain round, or of one for which the shape is drafted as well.
        made = PLAIN if decision.shadow and decision.beside is None else decision.shape
        prices = self.planner.prices
        draft = prices.quote(len(rows), context).draft[prices.place[made]]
        extra = self.planner.extra(decision._replace(shape=made), len(rows), context)
        standing = Standing(decision, drafted, None, float(draft) + extra, caught_up)
        if looked is not None and drafted == self.programs.lookup:
            standing.made = looked
        elif drafted.depth:
            state, standing.made = self.programs.draft_as(drafted, params, state, waits.get(drafted.kind, 0))
        if drafted.depth:
            caught_up |= kinds & set(self._waiting)
        if decision.beside is not None:
            standing.draft = state.draft
            beside = decision.beside
            state, made = self.programs.draft_as(beside, params, state, waits.get(beside.kind, 0))
            standing.behind = Standing(decision, decision.beside, made, 0.0, set())
        return state, standing

    def _wait(self, standing: Standing, rows: np.ndarray) -> None:
        """Until the draft is there; nothing else is under way."""
        standing.fetch()
        for kind in standing.caught_up:
            self._waiting[kind][rows] = 0

    def _decide(self, rows: np.ndarray, context: float) -> Decision:
        """What the planner wants, or what it wanted last: thinking costs too, and its share of the time is bounded."""
        now = self.clock()
        if self._kept is None or now >= self._think_at:
            self._settle()
            began = time.thread_time()
            decision = self.planner.decide(rows, context)
            self._thought("decide", began)
            self._kept = decision if decision.lasts else None
            self._think_at = now + (self.clock() - now) / self.thinking
            return decision
        return self._kept

    def _fit(self, standing: Standing, rows: np.ndarray, context: float) -> tuple[Decision, list[Followed]]:
        """The decision with what the draft's scores say, and the draft to follow."""
        decision, shape = standing.decision, standing.shape
        if not shape.depth:
            return decision._replace(budgets=np.ones(len(rows), int)), []
        began = time.thread_time()
        proposal = Proposal(standing.made)
        live = np.maximum(proposal.live[rows], 1)
        tokens, parents, scores = proposal.nodes(rows, shape.rows)
        nodes = Nodes(scores, parents)
        decision = self.planner.fit(decision, rows, live - 1, context, nodes)
        followed = []
        if self._rounds * len(rows) < EAGER or self.clock() >= self._follow_at:
            if live.max() > 1:
                followed = [Followed(shape, rows, live, tokens, nodes)]
            else:
                self._silent.append((shape, rows))
        self._thought("fit", began)
        return decision, followed

    def _learn(self, emitted: Emitted) -> None:
        """What came out in this round, held against the drafts under way."""
        if not (self._silent or self._followed):
            return
        began = self.clock()
        for shape, rows in self._silent:
            self.planner.shadow(shape, rows, np.zeros(len(rows), int), np.zeros(len(rows), int))
        self._silent.clear()
        for followed in self._followed:
            followed.advance(emitted)
            if (out := followed.outcome()) is not None:
                self.planner.learn(out.shape, out.rows, out.drafts, out.nodes, out.path)
        self._followed = [followed for followed in self._followed if not followed.over]
        self._follow_at = began + (self.clock() - began) / self.thinking
