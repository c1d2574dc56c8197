"""What a planner decides for one round."""

import dataclasses

import numpy as np

from specjax.draft import DraftShape


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
    def lasts(self) -> bool:
        """Whether it may stand for further rounds: nothing was tried, and no change is being weighed."""
        return self.reason in ("best", "sure") and (self.shadow is None or self.ride)

    @property
    def rate(self) -> float:
        """Expected tokens per second."""
        return self.tokens / self.seconds
