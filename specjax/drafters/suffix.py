"""Suffix decoding (arXiv 2411.04975): draft the continuation that the past makes most likely.

The paper keeps suffix trees. Here a node is what it stands for, a set of positions in a token buffer, so that the
search stays on the device with static shapes: the node of the context's last m tokens is the positions whose match
length is at least m, a child is the subset that goes on with the same token, and a count is the size of a set.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.array_types import Array, Int
from specjax.draft import Draft, DraftShape
from specjax.drafters.base import Context, Weightless
from specjax.drafters.ngram import (
    NO_TOKEN,
    check_integer,
    check_shape,
    context_suffix,
    copied_draft,
    match_chance,
    match_lengths,
    own_corpus,
    read,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Suffix(Weightless):
    """Suffix decoding over two corpora: the request's own text, and the responses of requests that have ended.

    For each m up to `max_depth`, if the last m tokens of the context occur earlier and go on there: follow the most
    frequent next token (of equals, the one seen latest), again and again. The path probability is the product of the
    shares, count of the child by count of all children; occurrences that end with their text have no child and count in
    neither. The path stops where that product falls below `min_token_prob`, at its budget
    `floor(m * max_spec_factor + max_spec_offset)`, or where the text ends. Its score is the sum of the path
    probabilities of its tokens, the tokens expected to be right. The best score wins; of equals the longer m, and the
    request's own text before the past responses. The draft depends on the history alone, so it needs no `q`.

    Counts are exact while the last token of the context occurs at most `occurrences` times in a corpus. Beyond that
    they are over the `occurrences` longest matches, of equals the latest.

    State: `i32[ring]`, past responses without their prompts, the oldest first, one NO_TOKEN after each. What is
    appended pushes the oldest tokens out. Requests share it: it may change how fast one goes, never its text.

    Attributes:
        kind: the drafter's name in draft shapes.
        num_speculative_tokens: the most drafted tokens.
        max_depth: the longest match that is told apart from longer ones.
        max_spec_factor: drafted tokens per matched token.
        max_spec_offset: drafted tokens whatever the match.
        min_token_prob: least path probability of a drafted token.
        ring: tokens of past responses that are remembered, separators included; 0 remembers none.
        occurrences: the most occurrences looked at in a corpus.

    Raises:
        ValueError: at construction, for numbers out of range or a budget that is nil at every match length.
    """

    kind: str = "suffix"
    num_speculative_tokens: int = 5
    max_depth: int = 24
    max_spec_factor: float = 1.0
    max_spec_offset: float = 0.0
    min_token_prob: float = 0.1
    ring: int = 16384
    occurrences: int = 128

    def __post_init__(self):
        for name in ("num_speculative_tokens", "max_depth", "occurrences"):
            check_integer(self, name, minimum=1)
        check_integer(self, "ring", minimum=0)
        if self.ring == 1:
            raise ValueError(f"{self.kind}: a ring of 1 holds a separator and no token; use 0 or at least 2")
        for name, high in (("max_spec_factor", math.inf), ("max_spec_offset", math.inf), ("min_token_prob", 1.0)):
            value = getattr(self, name)
            low = -math.inf if name == "max_spec_offset" else 0.0
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise ValueError(f"{self.kind}: {name} must be a finite number, got {value!r}")
            if not low <= value <= high:
                raise ValueError(f"{self.kind}: {name} must lie in [{low}, {high}], got {value}")
        if self._budgets(self.num_speculative_tokens).max() == 0:
            raise ValueError(
                f"{self.kind}: floor(m * {self.max_spec_factor} + {self.max_spec_offset}) is below 1 for every match "
                f"length m up to max_depth = {self.max_depth}, so nothing could ever be drafted; raise "
                f"max_spec_factor or max_spec_offset"
            )

    @property
    def shape(self) -> DraftShape:
        return DraftShape.chain(self.kind, self.num_speculative_tokens)

    def init_state(self, batch: int, capacity: int) -> Int[Array, " ring"]:
        """No past responses."""
        del batch, capacity
        return jnp.full((self.ring,), NO_TOKEN, jnp.int32)

    def finish(self, state: Array, row: Array, tokens: Array, prompt_length: Array, length: Array) -> Array:
        """Append the response `tokens[prompt_length:length]` and a separator; see `Drafter.finish`."""
        del row
        if not self.ring:
            return state
        kept = jnp.clip(length - prompt_length, 0, self.ring - 1)
        shift = jnp.where(kept > 0, kept + 1, 0)
        source = jnp.arange(self.ring, dtype=jnp.int32) + shift
        # Counted from the end: the separator is last, before it the newest `kept` tokens, before them the old content.
        appended = read(tokens.astype(jnp.int32), source - self.ring + length - kept)
        appended = jnp.where(source - self.ring < kept, appended, NO_TOKEN)
        return jnp.where(source < self.ring, read(state, source), appended)

    def draft(self, params: Any, state: Array, context: Context, shape: DraftShape) -> tuple[Draft, Array]:
        """See `Drafter.draft`. Raises ValueError for a shape that is no chain or deeper than configured."""
        del params
        check_shape(self, shape)
        with jax.named_scope("suffix_draft"):
            own = own_corpus(context)
            suffix = context_suffix(own, context.lengths, self.max_depth)
            tokens, counts, chances = jax.vmap(lambda o, s: self._best(o, state, s, shape.depth))(own, suffix)
            proposed = jnp.arange(shape.depth) < counts[:, None]
            return copied_draft(context, tokens, proposed, chances), state

    def _best(self, own: Array, past: Array, suffix: Array, depth: int) -> tuple[Array, Array, Array]:
        """The best-scored path of one request over both corpora.

        Returns:
            Tokens `[depth]`, how many of them are drafted, and the chance of each: the share of the occurrences that go
            on with it, as far as a match of that length is to be trusted.
        """
        corpora = [corpus for corpus in (own, past) if corpus.shape[0]]
        found = [self._occurrences(corpus, suffix, depth) for corpus in corpora]
        length, position, following = (jnp.stack(parts) for parts in zip(*found, strict=True))
        tokens, count, score, share = jax.vmap(self._paths)(length, position, following)
        # Own text before the past, long matches before short: the first of the best is the winner.
        winner = jnp.argmax(score.reshape(-1))
        matched = self.max_depth - winner % self.max_depth
        chance = share.reshape(-1, depth)[winner] * match_chance(matched[None], depth)
        return tokens.reshape(-1, depth)[winner], count.reshape(-1)[winner], chance

    def _occurrences(self, corpus: Array, suffix: Array, depth: int) -> tuple[Array, Array, Array]:
        """The `occurrences` longest matches, of equals the latest: length, position, and the `depth` tokens after."""
        size = corpus.shape[0]
        lengths = jnp.pad(match_lengths(corpus, suffix), (max(self.occurrences - size, 0), 0))
        # `top_k` takes the first of equals, so it reads backwards; in f32, for which XLA has a fast selection on a CPU.
        length, back = jax.lax.top_k(lengths[::-1].astype(jnp.float32), self.occurrences)
        position = size - 1 - back
        return length.astype(jnp.int32), position, read(corpus, position[:, None] + 1 + jnp.arange(depth))

    def _paths(self, length: Array, position: Array, following: Array) -> tuple[Array, Array, Array, Array]:
        """The path of each match length, the longest first.

        Returns:
            Tokens `[m, depth]`, drafted counts and scores `[m]`, and the share of each node's occurrences that go on
            with its token `[m, depth]`.
        """
        # A node of the tree is a set of occurrences: at first, for each match length, those that match so far.
        matched = length >= np.arange(self.max_depth, 0, -1)[:, None]
        agreed = [jnp.ones((), bool)]
        for token in following.T:
            agreed.append(agreed[-1] & (token[:, None] == token) & (token >= 0))
        # same[step, i, j]: the texts after occurrences i and j agree up to and including the step.
        same = jnp.stack(agreed[1:])
        # How many of a node's occurrences go on as a given one does, for all at once: a product of zeros and ones,
        # exact in any precision that accumulates in f32.
        votes = jnp.einsum("mi,kij->kmj", matched.astype(jnp.float32), same.astype(jnp.float32)).astype(jnp.int32)

        def follow(carry, inputs):
            node, probability, score, count = carry
            token, same, votes, step = inputs
            node &= token >= 0
            # Any occurrence stands for its child; of the largest child the latest one leads.
            most = jnp.max(jnp.where(node, votes, 0), axis=1)
            leader = jnp.argmax(jnp.where(node & (votes == most[:, None]), position, -1), axis=1)
            total = jnp.maximum(jnp.sum(node, axis=1, dtype=jnp.int32), 1)
            share = most.astype(jnp.float32) / total.astype(jnp.float32)
            probability *= share
            wanted = (most > 0) & (step < budget) & (probability >= self.min_token_prob)
            carry = node & same[leader], probability, score + jnp.where(wanted, probability, 0.0), count + wanted
            return carry, (token[leader], share)

        depth = following.shape[1]
        budget = self._budgets(depth)[::-1]
        zero = jnp.zeros((self.max_depth,), jnp.float32)
        start = matched, zero + 1, zero, jnp.zeros((self.max_depth,), jnp.int32)
        (_, _, score, count), (tokens, share) = jax.lax.scan(
            follow, start, (following.T, same, votes, np.arange(depth))
        )
        return tokens.T, count, score, share.T

    def _budgets(self, depth: int) -> np.ndarray:
        """The most drafted tokens after a match of 1, 2, ..., `max_depth` tokens."""
        matched = range(1, self.max_depth + 1)
        asked = [math.floor(m * self.max_spec_factor + self.max_spec_offset) for m in matched]
        return np.array([min(max(n, 0), depth) for n in asked], np.int32)
