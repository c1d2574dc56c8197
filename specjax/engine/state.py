"""The engine's state: one pytree of device arrays, donated to every program and returned by it."""

from typing import Any

import jax.numpy as jnp

from specjax.array_types import Array, Bool, Float, Int, pytree
from specjax.cache import KVCache
from specjax.draft import Draft, chain
from specjax.drafters.base import Context, Features
from specjax.sampling import SamplingState

RUNNING, STOP, LENGTH = 0, 1, 2  # why a request ended, as the device says it
FINISH_REASON = {STOP: "stop", LENGTH: "length"}


@pytree
class State:
    """All that lives on the device between two programs.

    `lengths` counts committed tokens, the root included; the root's key and value are not in the cache yet, so the
    cache holds `lengths - 1` slots of each request.

    Attributes:
        cache: the target's keys and values.
        tokens: prompt and output of each request.
        lengths: committed tokens.
        prompt_lengths: tokens of the prompt.
        limits: `lengths` at which the request must end (token budget or context end, the smaller).
        active: requests that are decoding.
        eos: end tokens of each request, -1 where unused.
        sampling: sampling parameters.
        draft: the draft that the next round verifies.
        features: target activations of the rows committed last, if a drafter reads them.
        drafter: the drafter's own state.
    """

    cache: KVCache
    tokens: Int[Array, "b t"]
    lengths: Int[Array, " b"]
    prompt_lengths: Int[Array, " b"]
    limits: Int[Array, " b"]
    active: Bool[Array, " b"]
    eos: Int[Array, "b e"]
    sampling: SamplingState
    draft: Draft
    features: Features | None
    drafter: Any

    @property
    def context(self) -> Context:
        """The part that a drafter may look at."""
        return Context(
            tokens=self.tokens,
            lengths=self.lengths,
            prompt_lengths=self.prompt_lengths,
            active=self.active,
            eos=self.eos,
            sampling=self.sampling,
            features=self.features,
        )


@pytree
class Emitted:
    """What one round hands to the host.

    Attributes:
        tokens: tokens committed by the round, in order; the first `counts` of each request are real.
        counts: how many.
        finish: RUNNING, STOP or LENGTH.
        logprobs: raw log-probability of each token, rank, and the `top` best ids and their log-probabilities; None
            where the engine was built without logprobs.
        lookup: the draft that stands in the state after the round (`proposal.packed`), where that makes one itself: in
            a set with prompt lookup.
    """

    tokens: Int[Array, "b k"]
    counts: Int[Array, " b"]
    finish: Int[Array, " b"]
    logprobs: "Logprobs | None"
    lookup: "Int[Array, 'b e'] | None" = None


@pytree
class Logprobs:
    """Log-probabilities of emitted tokens under the target's raw softmax."""

    chosen: Float[Array, "b k"]
    rank: Int[Array, "b k"]
    top_tokens: Int[Array, "b k e"]
    top: Float[Array, "b k e"]

    @classmethod
    def of(cls, parts: tuple[Array, Array, Array, Array]) -> "Logprobs":
        """From what `sampling.logprobs` returns."""
        chosen, rank, top_tokens, top = parts
        return cls(chosen=chosen, rank=rank, top_tokens=top_tokens, top=top)


def init(
    cache: KVCache,
    batch: int,
    capacity: int,
    rows: int,
    sampling: SamplingState,
    max_eos: int,
    features: Features | None,
    drafter: Any,
    draft_q: Array | None,
) -> State:
    """A state in which no request is active.

    Args:
        cache: an empty cache.
        batch: requests that run at once.
        capacity: token slots of a request.
        rows: rows of the widest draft, the root included.
        sampling: neutral sampling parameters.
        max_eos: end tokens that a request may have.
        features: zero-filled buffers for the newest rows' activations, or None.
        drafter: the drafter's fresh state.
        draft_q: zero-filled buffer for sampled drafts' distributions, or None.
    """

    def zeros():
        return jnp.zeros((batch,), jnp.int32)

    return State(
        cache=cache,
        tokens=jnp.zeros((batch, capacity), jnp.int32),
        lengths=zeros() + 1,
        prompt_lengths=zeros(),
        limits=zeros() + 1,
        active=jnp.zeros((batch,), bool),
        eos=jnp.full((batch, max_eos), -1, jnp.int32),
        sampling=sampling,
        draft=chain(jnp.zeros((batch, rows), jnp.int32), zeros() + 1, draft_q),
        features=features,
        drafter=drafter,
    )
