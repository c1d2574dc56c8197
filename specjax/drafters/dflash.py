"""DFlash (arXiv 2602.06036) and DFlash 2: a block of drafts in one pass of the backbone.

DFlash takes each position by itself. DFlash 2 mixes neighbouring rows in the backbone (dynamic convolutions, see
`block.py`) and lets a candidate selector decide among each position's best tokens, given the one before.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.array_types import Array, Float
from specjax.draft import Draft, DraftShape
from specjax.drafters.base import Context
from specjax.drafters.block import root
from specjax.drafters.block_drafter import BlockDrafter, build_drafter
from specjax.drafters.config import HeadConfig
from specjax.drafters.head import Scores
from specjax.targets.decoder import Target
from specjax.targets.layers import project


@dataclasses.dataclass(frozen=True, kw_only=True)
class DFlash(BlockDrafter):
    """The whole block as a chain: the argmax of each position, or an independent draw from each with its `q`."""

    kind: str = "dflash"

    def propose(self, params: Any, hidden: Float[Array, "b k d"], context: Context, shape: DraftShape) -> Draft:
        chosen = self.choose(self.head.scores(params["head"], hidden), context, jnp.arange(shape.depth))
        return self.chain(context, chosen, jnp.ones(chosen.tokens.shape, bool))


@dataclasses.dataclass(frozen=True, kw_only=True)
class DFlash2(BlockDrafter):
    """A walk over candidates: token `b` at position `t` after token `a` scores `U_t(b) + <A(a) * (W h_t), B(b)>`.

    `U_t` are the head's logits, A and B the selector's codebooks, W its projection. The candidates of a position are
    the `selector_top_k` best of `U_t`. From the root on, each position takes the best candidate after the token
    before, or draws from the softmax of the scores: the exact law of the draft given its prefix, on a small support.
    """

    kind: str = "dflash2"

    def __post_init__(self):
        super().__post_init__()
        check_candidates(self, self.config.selector_top_k)

    def propose(self, params: Any, hidden: Float[Array, "b k d"], context: Context, shape: DraftShape) -> Draft:
        ids, unary = self.head.scores(params["head"], hidden).top(self.config.selector_top_k)
        selector = params["selector"]
        batch, depth, _ = hidden.shape
        wanted = project(selector["hidden"], hidden.reshape(batch * depth, -1), out_dtype=jnp.float32)
        successors = selector["successor"][ids].astype(jnp.float32)

        def walk(token, position):
            index, ids, unary, wanted, successors = position
            query = selector["predecessor"][token].astype(jnp.float32) * wanted
            logits = unary + jnp.einsum("br,bcr->bc", query, successors)
            chosen = self.choose(Scores(logits=logits[:, None], ids=ids[:, None]), context, index[None])
            chosen = jax.tree.map(lambda x: x[:, 0], chosen)
            return chosen.tokens, chosen

        each = (x.swapaxes(0, 1) for x in (ids, unary, wanted.reshape(batch, depth, -1), successors))
        _, chosen = jax.lax.scan(walk, root(context), (jnp.arange(depth), *each))
        chosen = jax.tree.map(lambda x: x.swapaxes(0, 1), chosen)
        return self.chain(context, chosen, jnp.ones(chosen.tokens.shape, bool))


def check_candidates(drafter: BlockDrafter, count: int) -> None:
    """Refuse more candidates a position than the head scores, or none."""
    if not 1 <= count <= drafter.head.width:
        raise ValueError(
            f"{drafter.kind}: a position has 1..{drafter.head.width} candidates (what its head scores), got {count}"
        )


def build(
    config: HeadConfig,
    tensors: Mapping[str, np.ndarray],
    target: Target,
    target_params: Any,
    dtype: Any,
    **options: Any,
) -> tuple[DFlash | DFlash2, Any]:
    """A DFlash or DFlash 2 drafter from its tensors; see `specjax.drafters.learned.build`."""
    if config.family == "dflash":
        return build_drafter(DFlash, config, tensors, target, target_params, dtype, options)
    drafter, params = build_drafter(DFlash2, config, tensors, target, target_params, dtype, options)
    names = {
        "hidden": "candidate_selector.hidden_projection.weight",
        "predecessor": "candidate_selector.predecessor_codebook",
        "successor": "candidate_selector.successor_codebook",
    }
    return drafter, params | {"selector": {name: jnp.asarray(tensors[key], dtype) for name, key in names.items()}}
