"""P-EAGLE: an EAGLE-3 head that predicts several tokens in one pass instead of one after another.

The row of the newest features predicts the first draft, as in EAGLE-3. Behind it stand rows for which nothing is known
yet: the mask token, and a learned stand-in for the taps (`mask_hidden`). Each sees the committed rows and the mask rows
before it, and predicts one draft more. Drafts of a round do not depend on each other, so it drafts chains.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from specjax import sampling
from specjax.array_types import Array, Float
from specjax.cache import KVCache
from specjax.draft import Draft, DraftShape, chain
from specjax.drafters.base import Context
from specjax.drafters.config import HeadConfig
from specjax.drafters.eagle3 import Eagle3, fusion_params
from specjax.drafters.ngram import copied_draft
from specjax.drafters.recurrent import build_recurrent
from specjax.targets.decoder import Target


@dataclasses.dataclass(frozen=True, kw_only=True)
class PEagle(Eagle3):
    """The drafter; `build` makes one with its parameters."""

    def __post_init__(self):
        super().__post_init__()
        if not self.shape.is_chain:
            raise ValueError(f"peagle drafts chains, got a branching of {self.shape.branching}")
        if self.shape.depth > self.config.depths:
            raise ValueError(
                f"this peagle head was trained to predict {self.config.depths} tokens at once, {self.shape.depth} are "
                "asked for: lower num_speculative_tokens"
            )

    @property
    def scored_at_once(self) -> int:
        return self.shape.depth

    def scored(self, params: Any, state: KVCache, context: Context) -> Float[Array, "b k d"]:
        return self._predicting(params, state, context, self.shape.depth)[0]

    def _predicting(
        self, params: Any, state: KVCache, context: Context, depth: int
    ) -> tuple[Float[Array, "b k d"], KVCache]:
        """The rows that predict the drafts, after the final norm, and the cache with the newest features."""
        features, token = context.features, self.config.mask_token_id
        assert features is not None and token is not None
        batch, width = features.positions.shape
        masks = depth - 1
        request = jnp.arange(batch)[:, None]
        root = context.lengths - 1
        # Rows with features, then mask rows: their positions go on behind the newest features.
        after = jnp.minimum(features.positions + 1, context.tokens.shape[1] - 1)
        tokens = jnp.pad(context.tokens[request, after], ((0, 0), (0, masks)), constant_values=token)
        unknown = jnp.broadcast_to(
            self.fuse(params, params["mask_hidden"][None, None]), (batch, masks, self.config.hidden_size)
        )
        condition = jnp.concatenate([self.condition(params, features), unknown], axis=1)
        positions = jnp.concatenate([features.positions, root[:, None] + jnp.arange(masks, dtype=jnp.int32)], axis=1)
        index = jnp.arange(width + masks)
        live = (index < features.count[:, None]) | (index >= width)
        seen = jnp.tri(width + masks, dtype=bool) & live[:, None, :] | jnp.eye(width + masks, dtype=bool)
        out, tile = self.rows(
            params,
            state,
            tokens,
            condition,
            positions,
            self.empty_tile(positions),
            0,
            seen,
            committed=features.positions[:, 0],
        )
        newest = jnp.maximum(features.count - 1, 0)[:, None]
        read = jnp.concatenate([newest, jnp.broadcast_to(width + jnp.arange(masks), (batch, masks))], axis=1)
        return self.normed(params, out[request, read]), self.keep(state, tile, features, context)

    def draft(self, params: Any, state: KVCache, context: Context, shape: DraftShape) -> tuple[Draft, KVCache]:
        rows, state = self._predicting(params, state, context, shape.depth)
        scores = self.head.scores(params["head"], rows)
        batch, root = rows.shape[0], context.lengths - 1
        if not self.sampled:
            drafts = scores.best()
            return copied_draft(context, drafts, jnp.ones_like(drafts, bool), scores.sureness()), state
        drawn_from = self.head.distribution(scores, context.sampling)
        u = sampling.uniforms(context.sampling.seed[:, None], root[:, None], sampling.DRAFT, jnp.arange(shape.depth))
        drafts = scores.tokens(sampling.pick(drawn_from, u)[..., None])[..., 0]
        q = scores.spread(drawn_from, self.head.vocab_size)
        # q at a node is what its child was drawn from; the last node has none.
        q = jnp.pad(q, ((0, 0), (0, 1), (0, 0)))
        root_token = jnp.take_along_axis(context.tokens, root[:, None], axis=1)
        lengths = jnp.full((batch,), shape.rows, jnp.int32)
        return chain(jnp.concatenate([root_token, drafts], axis=1), lengths, q), state


def build(
    config: HeadConfig,
    tensors: Mapping[str, np.ndarray],
    target: Target,
    target_params: Any,
    dtype: Any,
    *,
    num_speculative_tokens: int | None = None,
    sampled: bool = False,
) -> tuple[PEagle, dict]:
    """A P-EAGLE drafter and its parameters.

    Args:
        config: its description.
        tensors: its weights by canonical name.
        target: the target that it drafts for.
        target_params: the target's arrays.
        dtype: dtype of its weights, keys and values.
        num_speculative_tokens: drafts of a round; as many as the head was trained for by default.
        sampled: draw drafts instead of taking the most likely ones.

    Raises:
        ValueError: more drafts than the head was trained for, no mask token, or a d2t table that does not fit.
    """
    if config.mask_token_id is None or not 0 <= config.mask_token_id < config.vocab_size:
        raise ValueError(
            f"peagle needs a mask token among the embedding's {config.vocab_size} rows, got {config.mask_token_id}"
        )
    shape = DraftShape.chain(config.family, num_speculative_tokens or config.depths)
    drafter, params = build_recurrent(
        PEagle, config, tensors, target, target_params, dtype, shape=shape, sampled=sampled
    )
    params |= fusion_params(config, tensors, dtype)
    return drafter, params | {"mask_hidden": jnp.asarray(tensors["mask_hidden"], dtype).reshape(-1)}
