"""What the block drafters share around their network: options, the drafter protocol, and from scores to drafts.

A family adds what it makes of the block's hidden rows: `propose`.
"""

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from specjax import sampling
from specjax.array_types import Array, Bool, Float, Int, pytree
from specjax.cache import KVCache
from specjax.draft import Draft, DraftShape, chain
from specjax.drafters import supertree
from specjax.drafters.base import Context, Features
from specjax.drafters.block import Backbone, backbone_params, root
from specjax.drafters.config import BLOCK, HeadConfig
from specjax.drafters.head import Head, Scores, build_head
from specjax.drafters.ngram import copied_draft
from specjax.targets.decoder import Target

TREE_BUDGET = 31  # drafted nodes of a tree: with the root, 32 verify rows


@pytree
class Chosen:
    """Drafted tokens.

    Attributes:
        tokens: target ids.
        q: what each was drawn from, over the target's vocabulary; None where nothing was drawn.
        chance: the drafter's own for each, where nothing was drawn.
    """

    tokens: Int[Array, "*n"]
    q: Float[Array, "*n v"] | None
    chance: Float[Array, "*n"] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockDrafter(Backbone, abc.ABC):
    """A drafter that predicts all positions of a block in one pass.

    Attributes:
        head: what turns its hidden rows into scores.
        num_speculative_tokens: drafted positions. The block is as long as that needs; None is the block that the
            drafter was trained with. Shorter is fine, longer than trained is refused.
        sampled: draw drafts from the drafter's own distribution, with the request's temperature and filters, and return
            it as `q`; otherwise drafts are a function of the context.
        tree: `ddtree` drafts the tree of the most probable prefixes when positions are scored apart from each other;
            `none` drafts as the family does.
        tree_budget: drafted nodes of a tree; None is 31, or fewer where the drafter's file asks for fewer.
    """

    head: Head
    num_speculative_tokens: int | None = None
    sampled: bool = False
    tree: Literal["none", "ddtree"] = "none"
    tree_budget: int | None = None
    kind: str = "block"
    wants_hidden: bool = False

    def __post_init__(self):
        c = self.config
        if c.family not in BLOCK or c.block_size < 2 - c.shifted or c.mask_token_id is None:
            raise ValueError(
                f"{self.kind}: a block drafter needs a block family ({', '.join(BLOCK)}), a block_size and a "
                f"mask_token_id; got {c.family}, {c.block_size} and {c.mask_token_id}"
            )
        if not 0 <= c.mask_token_id < c.vocab_size:
            raise ValueError(f"{self.kind}: mask_token_id {c.mask_token_id} is not in the vocabulary of {c.vocab_size}")
        for name in ("windows", "block_causal"):
            if len(getattr(c, name)) not in (0, c.num_layers):
                raise ValueError(f"{self.kind}: {len(getattr(c, name))} {name} for {c.num_layers} layers")
        if c.attention_gate:
            raise ValueError(f"{self.kind}: block drafters have no attention gate, but the description asks for one")
        most = trained_drafts(c)
        if not 1 <= self.depth <= most:
            raise ValueError(
                f"{self.kind}: num_speculative_tokens must be in 1..{most} (its block of {c.block_size} makes {most} "
                f"drafts), got {self.depth}"
            )
        if self.tree not in self._trees():
            raise ValueError(f"{self.kind}: tree must be one of {', '.join(self._trees())}, got {self.tree!r}")
        if self.drafts_trees and self.sampled:
            raise ValueError(f"{self.kind}: trees are deterministic; draft_sampling 'sampled' needs tree 'none'")
        if self.tree_budget is not None and not self.drafts_trees:
            raise ValueError(f"{self.kind}: a tree_budget of {self.tree_budget} belongs to a tree; set tree too")
        if self.drafts_trees and self.budget < self.depth:
            raise ValueError(
                f"{self.kind}: a tree_budget of {self.budget} nodes cannot hold a path of {self.depth}; raise it, or "
                "lower num_speculative_tokens"
            )

    @classmethod
    def _trees(cls) -> tuple[str, ...]:
        return ("none", "ddtree")

    @property
    def taps(self) -> tuple[int, ...]:
        return self.config.taps

    @property
    def depth(self) -> int:
        """Drafted positions of a full draft."""
        return trained_drafts(self.config) if self.num_speculative_tokens is None else self.num_speculative_tokens

    @property
    def budget(self) -> int:
        """Drafted nodes of a tree."""
        asked = self.config.tree_budget or TREE_BUDGET
        return min(asked, TREE_BUDGET) if self.tree_budget is None else self.tree_budget

    @property
    def drafts_trees(self) -> bool:
        return self.tree != "none"

    @property
    def shape(self) -> DraftShape:
        if not self.drafts_trees:
            return DraftShape.chain(self.kind, self.depth)
        branching = max(2, min(self.budget, self.head.width))
        return DraftShape(kind=self.kind, depth=self.depth, branching=branching, rows=1 + self.budget)

    def prefill(
        self, params: Any, state: KVCache, row: Array, tokens: Array, start: Array, count: Array, features: Features
    ) -> KVCache:
        """Keep the context features of a chunk; the tokens themselves are not read."""
        del tokens, start
        return self.remember(params, state, jnp.reshape(row, (1,)), dataclasses.replace(features, count=count[None]))

    def draft(self, params: Any, state: KVCache, context: Context, shape: DraftShape) -> tuple[Draft, KVCache]:
        """See `Drafter.draft`. Raises ValueError for a shape that the drafter cannot fill."""
        if shape.is_chain == self.drafts_trees or not 1 <= shape.depth <= self.depth:
            raise ValueError(
                f"{self.kind} drafts {'trees' if self.drafts_trees else 'chains'} of depth 1 to {self.depth}, but the "
                f"shape asked for has depth {shape.depth} and branching {shape.branching}"
            )
        hidden, state = self._predicting(params, state, context, shape.depth)
        with jax.named_scope("propose"):
            if self.tree == "ddtree":
                return self._best_first(params, hidden, context, shape), state
            return self.propose(params, hidden, context, shape), state

    def scored(self, params: Any, state: KVCache, context: Context) -> Float[Array, "b k d"]:
        """The rows that the output head reads."""
        return self._predicting(params, state, context, self.depth)[0]

    @property
    def scored_at_once(self) -> int:
        """Rows of a request that the output head reads at once."""
        return self.depth

    def _predicting(self, params: Any, state: KVCache, context: Context, depth: int):
        """The post-norm rows that predict the drafts, and the cache with the newest features."""
        if context.features is not None:
            everyone = jnp.arange(context.lengths.shape[0], dtype=jnp.int32)
            state = self.remember(params, state, everyone, context.features)
        with jax.named_scope("block"):
            return self.hidden(params, state, context, depth), state

    def finish(self, state: KVCache, row: Array, tokens: Array, prompt_length: Array, length: Array) -> KVCache:
        del row, tokens, prompt_length, length
        return state

    @abc.abstractmethod
    def propose(self, params: Any, hidden: Float[Array, "b k d"], context: Context, shape: DraftShape) -> Draft:
        """The family's draft from the block's post-norm hidden rows, one for each drafted position."""

    def choose(self, scores: Scores, context: Context, index: Int[Array, " n"]) -> Chosen:
        """Tokens drafted from scores `[b, n, c]`; `index` numbers them within the round, from 0.

        Returns:
            The tokens `[b, n]`, and what is known of them.
        """
        if not self.sampled:
            return Chosen(tokens=scores.best(), q=None, chance=scores.sureness())
        q = self.head.distribution(scores, context.sampling)
        # Keyed by the root, not by the drafted position: block verification looks past what it accepts, so a position
        # that is drafted again must get a fresh number.
        position = (context.lengths - 1)[:, None]
        u = sampling.uniforms(context.sampling.seed[:, None], position, sampling.DRAFT, index)
        tokens = scores.tokens(sampling.pick(q, u)[..., None])[..., 0]
        return Chosen(tokens=tokens, q=scores.spread(q, self.config.vocab_size), chance=None)

    def chain(self, context: Context, chosen: Chosen, kept: Bool[Array, "b k"]) -> Draft:
        """A chain of the chosen tokens after the root, up to the first that is not kept.

        Whether a token is kept must not depend on the token itself or on later ones. A deterministic draft also ends
        before an end token; a sampled one is never cut by its own tokens: that would bias the law.

        Args:
            context: what is committed.
            chosen: the tokens, as target ids.
            kept: which tokens to propose.
        """
        tokens, q = chosen.tokens, chosen.q
        if chosen.chance is not None:
            return copied_draft(context, tokens, kept, chosen.chance)
        assert q is not None
        lengths = 1 + jnp.sum(jnp.cumprod(kept.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
        # q at a node is what its child was drawn from; the last node has no child.
        q = jnp.pad(q, ((0, 0), (0, 1), (0, 0)))
        return chain(jnp.concatenate([root(context)[:, None], tokens], axis=1), lengths, q)

    def _best_first(self, params: Any, hidden: Array, context: Context, shape: DraftShape) -> Draft:
        """DDTree over what the head says of each position by itself."""
        ids, scores = self.head.scores(params["head"], hidden).top(min(shape.rows - 1, self.head.width))
        scores = without_ends(scores, ids, context)
        return supertree.best_first(root(context), ids, scores, budget=shape.rows - 1)


def trained_drafts(config: HeadConfig) -> int:
    """Drafts of a block as long as it was trained."""
    return config.block_size if config.shifted else config.block_size - 1


def without_ends(scores: Float[Array, "b k c"], ids: Int[Array, "b k c"], context: Context) -> Float[Array, "b k c"]:
    """-inf where a candidate would end the request: the target emits such a token by itself, a node gains nothing."""
    ends = jnp.any(ids[..., None] == context.eos[:, None, None, :], axis=-1)
    return jnp.where(ends, -jnp.inf, scores)


def build_drafter(
    cls: type[BlockDrafter],
    config: HeadConfig,
    tensors: Mapping[str, np.ndarray],
    target: Target,
    target_params: Any,
    dtype: Any,
    options: Mapping[str, Any],
) -> tuple[Any, dict[str, Any]]:
    """A drafter of class `cls` and the parameters of its backbone; the family adds its own.

    Raises:
        ValueError: an option that the family does not have, or options and a description that do not go together.
    """
    own = ("config", "head", "max_position", "dtype", "kind", "wants_hidden")
    valid = [field.name for field in dataclasses.fields(cls) if field.name not in own]
    if unknown := ", ".join(sorted(set(options) - set(valid))):
        raise ValueError(f"{config.family} drafters have no option {unknown}; valid: {', '.join(valid)}")
    head, head_params = build_head(config, tensors, target_params, dtype)
    fixed = {"config": config, "head": head, "max_position": target.config.max_position_embeddings}
    drafter = cls(**fixed, dtype=str(jnp.dtype(dtype)), kind=config.family, **options)
    return drafter, backbone_params(config, tensors, target_params, dtype) | {"head": head_params}
