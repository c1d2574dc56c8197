"""What EAGLE-3 and MTP heads share: a small causal decoder that is fed its own output.

Row p of the head pairs what the target made of the token at position p with the *next* token, p + 1, and predicts the
token after that, p + 2. The row of the newest token's predecessor is the last one whose target features exist; from
there on, the head's own output stands in for the target's.

    committed tokens        x0 x1 x2 x3                       (x3 is the root: the target has not seen it)
    rows with features      (f0,x1) (f1,x2) (f2,x3)           -> first draft, y1
    rows of the draft       (own output, y1) ...              -> later drafts

The keys and values of rows with features are kept, one dense cache row a request. After each round the rows just
committed are taken in with their true features; what drafted rows left is never read, because it is never written: they
live in a tile of their own, as long as the draft is being made.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import sampling
from specjax.array_types import Array, Float, Int
from specjax.cache import KVCache
from specjax.draft import Draft, DraftShape, tree
from specjax.drafters import growth
from specjax.drafters.base import Context, Features
from specjax.drafters.causal import Causal
from specjax.drafters.config import HeadConfig
from specjax.drafters.embedding import build_embedding
from specjax.drafters.growth import Beam, Children
from specjax.drafters.head import Head, Scores, build_head
from specjax.drafters.layers import layer_params, norm_weight
from specjax.targets.decoder import Target


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recurrent(Causal):
    """A drafter whose head is fed its own output.

    Attributes:
        head: its output head's static half.
        shape: the draft shape when the drafter is named alone.
        sampled: draw drafts from the head's distribution, with the request's temperature and filters, and return it as
            `q`; otherwise drafts are its most likely tokens, a function of the context.
    """

    head: Head
    shape: DraftShape
    sampled: bool = False

    def __post_init__(self):
        growth.check_shape(self.shape)
        if self.shape.branching > self.head.width:
            raise ValueError(
                f"branching {self.shape.branching} exceeds the {self.head.width} tokens that the head scores"
            )

    @property
    def kind(self) -> str:
        return self.config.family

    @property
    def taps(self) -> tuple[int, ...]:
        return self.config.taps

    @property
    def wants_hidden(self) -> bool:
        return not self.config.taps

    # ---------------------------------------------------------------- the drafter protocol

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
        del count  # rows past it lie beyond the committed ones, where the next rows overwrite them
        assert features is not None
        view = KVCache(k=state.k, v=state.v, table=jnp.reshape(row, (1, 1)).astype(jnp.int32))
        condition = self.condition(params, features)
        _, tile = self.take_in(params, view, tokens[None, 1:], condition, features.positions, start[None])

        def put(pages, new):
            return jax.lax.dynamic_update_slice(pages, new.swapaxes(1, 2), (row, 0, start, 0))

        return KVCache(k=tuple(map(put, state.k, tile.k)), v=tuple(map(put, state.v, tile.v)))

    def draft(self, params: Any, state: KVCache, context: Context, shape: DraftShape) -> tuple[Draft, KVCache]:
        out, state = self.newest(params, state, context)
        normed = self.normed(params, out)
        first = self.children(self.head.scores(params["head"], normed), context, shape.branching, 0)
        k, rows = shape.branching, growth.run_rows(shape)
        root = context.lengths - 1

        def expand(carry, beam: Beam):
            condition, tile = carry
            condition = jnp.take_along_axis(condition, beam.parents[:, :, None], axis=1)
            positions = jnp.broadcast_to((root + beam.level)[:, None], beam.tokens.shape)
            out, tile = self.rows(
                params, state, beam.tokens, condition, positions, tile, beam.level * k, beam.seen, committed=root
            )
            normed = self.normed(params, out)
            children = self.children(self.head.scores(params["head"], normed), context, k, 1 + beam.level * k)
            return (self.feedback(out, normed), tile), children

        condition = jnp.repeat(self.feedback(out, normed), k, axis=1)
        positions = root[:, None] + jnp.arange(rows, dtype=jnp.int32) // k
        carry = (condition, self.empty_tile(positions))
        token = context.tokens[jnp.arange(root.shape[0]), root]
        grown = growth.grow(expand, token, first, carry, shape)
        scores = None if self.sampled else grown.scores
        return tree(grown.tokens, grown.parents, grown.lengths, grown.q, scores), state

    def finish(self, state: KVCache, row: Array, tokens: Array, prompt_length: Array, length: Array) -> KVCache:
        del row, tokens, prompt_length, length
        return state

    def scored(self, params: Any, state: KVCache, context: Context) -> Float[Array, "b n d"]:
        """The rows that the output head reads first."""
        return self.normed(params, self.newest(params, state, context)[0])

    @property
    def scored_at_once(self) -> int:
        """Rows of a request that the output head reads at once, at most."""
        return self.shape.branching

    # ---------------------------------------------------------------- parts

    def newest(self, params: Any, state: KVCache, context: Context) -> tuple[Float[Array, "b 1 d"], KVCache]:
        """Take the rows in that were committed last: the output of the newest one, and the cache that holds them.

        Doing it twice with the same features writes the same values to the same slots.
        """
        features = context.features
        assert features is not None
        positions = features.positions
        request = jnp.arange(positions.shape[0])[:, None]
        after = jnp.minimum(positions + 1, context.tokens.shape[1] - 1)
        condition = self.condition(params, features)
        out, tile = self.take_in(params, state, context.tokens[request, after], condition, positions, positions[:, 0])
        # Written only when it has been read: otherwise a compiler may copy the whole cache to keep what is read.
        out, state = jax.lax.optimization_barrier((out, state))
        state = self.keep(state, tile, features, context)
        last = jnp.maximum(features.count - 1, 0)
        return jnp.take_along_axis(out, last[:, None, None], axis=1), state

    def children(self, scores: Scores, context: Context, k: int, row: Int[Array, ""] | int) -> Children:
        """The k children of each of `n` nodes, which the draft runs as its rows `row ...` (the root is row 0)."""
        if not self.sampled:
            tokens, values = scores.top(k)
            # An end token has no continuation, and the target emits it without our help.
            ends = jnp.any(tokens[..., None] == context.eos[:, None, None, :], axis=-1)
            return Children(tokens=tokens, values=jnp.where(ends, -jnp.inf, values))
        q = self.head.distribution(scores, context.sampling)
        number = (row + jnp.arange(q.shape[1]))[:, None] * k + jnp.arange(k)
        seed, root = context.sampling.seed[:, None, None], (context.lengths - 1)[:, None, None]
        columns = draw(q, scores.logits, sampling.uniforms(seed, root, sampling.DRAFT, number))
        return Children(
            tokens=scores.tokens(columns),
            values=jnp.broadcast_to(growth.rank_values(k), columns.shape),
            q=scores.spread(q, self.head.vocab_size),
        )


def draw(
    q: Float[Array, "*rows c"], logits: Float[Array, "*rows c"], u: Float[Array, "*rows k"]
) -> Int[Array, "*rows k"]:
    """Columns drawn from `q` without replacement, one for each uniform number; the law is that of Gumbel top-k.

    Where the support of `q` is used up, the best columns outside it follow: they are then a function of the context,
    which the recursive rule takes them for.
    """
    left, columns = q, []
    for i in range(u.shape[-1]):
        best = sampling.argmax(logits)
        column = jnp.where(jnp.any(left > 0, axis=-1), sampling.pick(left, u[..., i]), best)
        columns.append(column)
        taken = jnp.arange(q.shape[-1]) == column[..., None]
        left, logits = jnp.where(taken, 0, left), jnp.where(taken, -jnp.inf, logits)
    return jnp.stack(columns, axis=-1)


def build_recurrent(
    cls: type[Recurrent],
    config: HeadConfig,
    tensors: Mapping[str, np.ndarray],
    target: Target,
    target_params: Any,
    dtype: Any,
    *,
    shape: DraftShape,
    sampled: bool,
) -> tuple[Any, dict[str, Any]]:
    """A drafter of class `cls` and what every recurrent head has of parameters; the family adds its own."""
    head, head_params = build_head(config, tensors, target_params, dtype)
    params = {
        "embedding": build_embedding(config, tensors, target_params, dtype),
        "layers": [layer_params(config, tensors, f"layers.{i}", dtype) for i in range(config.num_layers)],
        "norm": norm_weight(config, tensors, "norm"),
        "head": head_params,
    }
    drafter = cls(
        config=config,
        head=head,
        shape=shape,
        max_position=target.config.max_position_embeddings,
        sampled=sampled,
        dtype=str(jnp.dtype(dtype)),
    )
    return drafter, params
