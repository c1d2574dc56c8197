"""What a planner decides for one round."""

from typing import NamedTuple

import numpy as np

from specjax.draft import DraftShape


class Decision(NamedTuple):
    """What to do in the next round.

    Attributes:
        shape: what to draft.
        rows: total rows of the pass that is expected to follow.
        budgets: rows of each request, its root included.
        seconds: expected time of the round.
        tokens: expected tokens of the round, of all requests.
        plain: expected tokens per second of plain decoding.
        reason: `best`; `trial`, to learn; `sure`, the best of what surely gains, as the engine is behind plain; `stay`,
            where another is better but not yet by what the change costs; `scores`, where those of a draft that was
            made first, or beside a plain round, have decided otherwise.
        shadow: a shape to draft beside a plain round, or before `shape` is drafted. The tokens that come anyway tell
            its acceptance; none of it is verified, unless its scores say that it should be (`Planner.fit`).
        ride: the shadow was made because it costs next to nothing, and not to learn from it.
        beside: `shape`, where it is drafted right behind the shadow and not only when that promises less: a wait is
            saved, and its time lost where the shadow is verified.
        going: tokens per second that a round has to beat to be worth its time, where that is not this round's rate.
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
    beside: DraftShape | None = None
    going: float | None = None
    runner_up: tuple[DraftShape, float] | None = None

    @property
    def looks(self) -> bool:
        """Whether the shadow is drafted first, and `shape` only if that promises less."""
        return self.ride and self.shadow is not None and self.shape.depth > 0

    @property
    def lasts(self) -> bool:
        """Whether it may stand for further rounds: nothing was tried, and no change is being weighed."""
        return self.reason in ("best", "sure") and (self.shadow is None or self.ride)

    @property
    def rate(self) -> float:
        """Expected tokens per second."""
        return self.tokens / self.seconds
