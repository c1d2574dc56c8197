"""What every drafter is: pure functions over its own parameters and state, called inside the engine's programs.

A drafter is a small hashable object (static configuration only). Its arrays travel beside it as two pytrees:
`params` (weights, never changed) and `state` (per-request memory, donated and returned). It never sees the target;
it reads what has been committed (`Context`) and proposes a `Draft`.
"""

from typing import Any, Protocol

from specjax.array_types import Array, Bool, Float, Int, pytree
from specjax.draft import Draft, DraftShape
from specjax.sampling import SamplingState


@pytree
class Features:
    """Target activations of the rows that the last step committed (the old root and the accepted drafts).

    Attributes:
        positions: position of each row.
        count: live rows of each request; the rest is padding.
        hidden: post-final-norm hidden states.
        taps: residual streams after `t` layers, concatenated in the order of the drafters' tap union.
    """

    positions: Int[Array, "b n"]
    count: Int[Array, " b"]
    hidden: Float[Array, "b n d"] | None = None
    taps: Float[Array, "b n e"] | None = None


@pytree
class Context:
    """What a drafter may look at: committed tokens only, prompt included.

    Attributes:
        tokens: prompt and output of each request; what lies at or past `lengths` is unspecified.
        lengths: committed tokens; the root of the next draft is `tokens[lengths - 1]`.
        prompt_lengths: tokens of the prompt.
        active: requests that are decoding; the draft of another is ignored.
        eos: end tokens of each request, -1 where unused. A draft is cut before one.
        sampling: the requests' sampling parameters, for sampled drafts.
        features: target activations of the newest rows, where the drafter asked for them.
    """

    tokens: Int[Array, "b t"]
    lengths: Int[Array, " b"]
    prompt_lengths: Int[Array, " b"]
    active: Bool[Array, " b"]
    eos: Int[Array, "b e"]
    sampling: SamplingState
    features: Features | None = None


class Drafter(Protocol):
    """The protocol. `specjax.drafters.registry` names the implementations.

    Attributes:
        kind: the name in configs and on the command line.
        shape: the draft shape when the drafter is named alone.
        taps: target layers (`t` = layers already executed) whose residual streams it reads.
        wants_hidden: whether it reads post-norm hidden states.
    """

    kind: str
    shape: DraftShape
    taps: tuple[int, ...]
    wants_hidden: bool

    def init_state(self, batch: int, capacity: int) -> Any:
        """Fresh state for `batch` requests of at most `capacity` tokens."""
        ...

    def prefill(
        self, params: Any, state: Any, row: Array, tokens: Array, start: Array, count: Array, features: Features | None
    ) -> Any:
        """Take in `count` prompt tokens of request `row` at positions `start...`, with their target features.

        `tokens[t + 1]` holds the chunk and the token after it (the next prompt token, or the one just sampled), so that
        a drafter that pairs feature `i` with token `i + 1` sees the same pairs whatever the chunking.
        """
        ...

    def draft(self, params: Any, state: Any, context: Context, shape: DraftShape) -> tuple[Draft, Any]:
        """Propose a draft of `shape` for every active request; a live length of 1 means "nothing to propose"."""
        ...

    def finish(self, state: Any, row: Array, tokens: Array, prompt_length: Array, length: Array) -> Any:
        """Request `row` has ended with `tokens[:length]`; remember or forget it."""
        ...


class Weightless:
    """Defaults for drafters without weights, features or memory of a request."""

    taps: tuple[int, ...] = ()
    wants_hidden: bool = False

    def init_state(self, batch: int, capacity: int) -> Any:
        del batch, capacity
        return ()

    def prefill(self, params, state, row, tokens, start, count, features) -> Any:
        del params, row, tokens, start, count, features
        return state

    def finish(self, state, row, tokens, prompt_length, length) -> Any:
        del row, tokens, prompt_length, length
        return state
