"""A small target as drafter: the classic two-model speculation (arXiv 2211.17192), chains, sampled or greedy.

It keeps a dense key/value cache of its own, filled beside the target's at prefill. A draft starts with the newest
committed tokens: two, because after a fully accepted draft the cache lacks the last draft, or as many as a round can
commit where others' drafts may have been accepted. Writing a row again changes nothing. Then it extends one token at a
time.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax import sampling
from specjax.array_types import Array, Int
from specjax.cache import KVCache, whole_blocks
from specjax.draft import Draft, DraftShape, Rows, chain, chunk
from specjax.drafters.base import Context, Features
from specjax.targets.decoder import Target


@dataclasses.dataclass(frozen=True)
class DraftModel:
    """Drafts with another model of the same vocabulary.

    Attributes:
        model: the drafting model's pure functions; its weights are the drafter's `params`.
        num_speculative_tokens: drafts of a round (the root is not counted).
        sampled: draw drafts from the model's own distribution, with the request's temperature and filters, and return
            it as `q`; otherwise the draft is the model's argmax chain, a function of the context.
        cache_dtype: dtype of its key/value cache, by name.
        newest: committed tokens that a draft starts with. 2 where only its own drafts are accepted; in a tree with
            drafts of others, whose keys and values it has not computed, one more than the tree is deep.
    """

    model: Target
    num_speculative_tokens: int = 4
    sampled: bool = False
    cache_dtype: str = "float32"
    newest: int = 2
    kind: str = "draft_model"
    taps: tuple[int, ...] = ()
    wants_hidden: bool = False

    def __post_init__(self):
        if self.num_speculative_tokens < 1:
            raise ValueError(f"num_speculative_tokens must be at least 1, got {self.num_speculative_tokens}")

    @property
    def shape(self) -> DraftShape:
        return DraftShape.chain(self.kind, self.num_speculative_tokens)

    def init_state(self, batch: int, capacity: int) -> KVCache:
        slots = whole_blocks(capacity)
        return self.model.init_cache(batch, slots, jnp.dtype(self.cache_dtype))

    def prefill(
        self,
        params: Any,
        state: KVCache,
        row: Array,
        tokens: Array,
        start: Array,
        count: Array,
        features: Features | None,
    ) -> KVCache:
        del features
        rows = chunk(tokens[:-1], start, count)
        out = self.model.forward(params, rows, state.request(row), jnp.reshape(start, (1,)))
        return KVCache(k=out.cache.k, v=out.cache.v, table=None)

    def draft(self, params: Any, state: KVCache, context: Context, shape: DraftShape) -> tuple[Draft, KVCache]:
        batch = context.lengths.shape[0]
        request = jnp.arange(batch)
        # The first pass covers the newest committed tokens of every request.
        start = jnp.maximum(context.lengths - self.newest, 0)
        covered = start[:, None] + jnp.arange(self.newest, dtype=jnp.int32)
        hidden, cache = self._pass(params, state, context.tokens[request[:, None], covered], start)
        first, first_q = self._next(params, hidden[request, context.lengths - 1 - start], context, jnp.int32(0))

        def extend(carry, depth):
            token, cache = carry
            at = context.lengths - 1 + depth
            hidden, cache = self._pass(params, cache, token[:, None], at)
            token, q = self._next(params, hidden[:, 0], context, depth)
            return (token, cache), (token, q)

        steps = jnp.arange(1, shape.depth, dtype=jnp.int32)
        (_, cache), (later, later_q) = jax.lax.scan(extend, (first, cache), steps)
        root = context.tokens[request, context.lengths - 1]
        tokens = jnp.concatenate([root[:, None], first[:, None], later.T], axis=1)
        lengths = jnp.full((batch,), shape.rows, jnp.int32)
        if not self.sampled:
            return chain(tokens, self._before_eos(tokens, lengths, context.eos)), cache
        # q at node i is what its child was drawn from; the last node has no child. A sampled draft is never cut by its
        # own tokens: that would bias the law.
        assert first_q is not None, "a sampled draft has its q"
        q = jnp.concatenate([first_q[None], later_q, jnp.zeros_like(first_q)[None]]).swapaxes(0, 1)
        return chain(tokens, lengths, q), cache

    def finish(self, state: KVCache, row: Array, tokens: Array, prompt_length: Array, length: Array) -> KVCache:
        del row, tokens, prompt_length, length
        return state

    def _pass(self, params: Any, cache: KVCache, tokens: Int[Array, "b n"], start: Int[Array, " b"]):
        """Run `n` consecutive tokens of every request from position `start` on: hidden `[b, n, d]` and the cache."""
        batch, width = tokens.shape
        node = jnp.tile(jnp.arange(width, dtype=jnp.int32), batch)
        request = jnp.repeat(jnp.arange(batch, dtype=jnp.int32), width)
        rows = Rows(
            tokens=tokens.reshape(-1),
            request=request,
            node=node,
            positions=start[request] + node,
            slots=start[request] + node,
            valid=jnp.ones((batch * width,), bool),
            ancestors=None,
            starts=jnp.arange(batch + 1, dtype=jnp.int32) * width,
            width=width,
        )
        out = self.model.forward(params, rows, cache, start)
        return out.hidden.reshape(batch, width, -1), out.cache

    def _next(self, params: Any, hidden: Array, context: Context, index: Int[Array, ""]):
        """Draft `index` of every request, and the distribution it was drawn from (None for argmax)."""
        logits = self.model.logits(params, hidden)
        if not self.sampled:
            return sampling.argmax(logits), None
        s = context.sampling
        q = sampling.draft_distribution(logits, s.temperature, s.top_k, s.top_p, s.min_p)
        # Keyed by the root, not by the drafted position: block verification looks past what it accepts, so a position
        # that is drafted again must get a fresh number.
        return sampling.pick(q, sampling.uniforms(s.seed, context.lengths - 1, sampling.DRAFT, index)), q

    @staticmethod
    def _before_eos(tokens: Array, lengths: Array, eos: Array) -> Array:
        """Live lengths that end before the first drafted end token."""
        ends = jnp.any(tokens[:, 1:, None] == eos[:, None, :], axis=-1)
        return jnp.where(ends.any(axis=1), 1 + jnp.argmax(ends, axis=1), lengths).astype(jnp.int32)
