"""UBTree (arXiv 2609.39972): a tree over DFlash's candidates, scored by a bigram selector.

The selector scores every pair of neighbouring candidates at once, so no network runs between the depths of the tree.
The candidate's codes come from small networks over the target's input embedding; they depend on the token alone and are
computed once, at load.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from specjax.array_types import Array, Float, Int
from specjax.draft import Draft, DraftShape
from specjax.drafters import supertree
from specjax.drafters.base import Context
from specjax.drafters.block import root
from specjax.drafters.block_drafter import BlockDrafter, build_drafter, without_ends
from specjax.drafters.config import HeadConfig
from specjax.drafters.dflash import check_candidates
from specjax.targets.decoder import Target
from specjax.targets.layers import project

CODE_ROWS = 8192  # embedding rows that go through the codebook networks at once


@dataclasses.dataclass(frozen=True, kw_only=True)
class UBTree(BlockDrafter):
    """Candidate `b` at depth i after `a` scores `alpha_i u_i(b) + lambda_i <(P h_i) * phi(a), psi(b)>`.

    `u_i` are the head's logits, `phi` and `psi` the codes, and alpha and lambda calibrate a depth. Log-probabilities
    are the log-softmax of the scores over the candidates of a depth, for each predecessor; `supertree.grow` makes the
    tree of them. It does not depend on the temperature.

    Attributes:
        tree: `ubtree` as above; `ddtree` leaves the selector out.
        tree_width: nodes of a level of the beam, None for what the drafter's file says.
        top_k: candidates of a depth, None for what the drafter's file says.
    """

    kind: str = "ubtree"
    tree: Literal["ubtree", "ddtree"] = "ubtree"  # type: ignore[assignment]
    tree_width: int | None = None
    top_k: int | None = None

    def __post_init__(self):
        super().__post_init__()
        check_candidates(self, self.candidates)
        if self.width < 1:
            raise ValueError(f"{self.kind}: tree_width must be at least 1, got {self.width}")
        if self.tree == "ddtree" and (self.tree_width, self.top_k) != (None, None):
            raise ValueError(f"{self.kind}: tree_width and top_k belong to tree 'ubtree'; 'ddtree' reads neither")

    @classmethod
    def _trees(cls) -> tuple[str, ...]:
        return ("ubtree", "ddtree")

    @property
    def width(self) -> int:
        """Nodes of a level of the beam."""
        return self.config.tree_width if self.tree_width is None else self.tree_width

    @property
    def candidates(self) -> int:
        """Candidates of a depth."""
        return self.config.selector_top_k if self.top_k is None else self.top_k

    def propose(self, params: Any, hidden: Float[Array, "b k d"], context: Context, shape: DraftShape) -> Draft:
        ids, unary = self.head.scores(params["head"], hidden).top(self.candidates)
        scores = self.pair_scores(params["selector"], hidden, root(context), ids, unary)
        scores = jnp.where(jnp.isneginf(without_ends(unary, ids, context))[:, :, None], -jnp.inf, scores)
        options = {"width": self.width, "budget": shape.rows - 1, "bonus": self.config.depth_bonus}
        return supertree.grow(root(context), ids, scores, **options)

    def pair_scores(
        self,
        params: Any,
        hidden: Float[Array, "b k d"],
        anchor: Int[Array, " b"],
        ids: Int[Array, "b k c"],
        unary: Float[Array, "b k c"],
    ) -> Float[Array, "b k a c"]:
        """Log-probability of each candidate after each one of the depth before; at the first, after the anchor."""
        batch, depth, count = ids.shape
        before = jnp.broadcast_to(anchor[:, None, None], (batch, 1, count))
        before = jnp.concatenate([before, ids[:, :-1]], axis=1)
        wanted = project(params["hidden"], hidden.reshape(batch * depth, -1), out_dtype=jnp.float32)
        left = params["phi"][before].astype(jnp.float32) * wanted.reshape(batch, depth, 1, -1)
        pairs = jnp.einsum("bkar,bkcr->bkac", left, params["psi"][ids].astype(jnp.float32))
        alpha, scale = (jnp.exp(params[name][:depth])[:, None] for name in ("log_alpha", "log_lambda"))
        return jax.nn.log_softmax((alpha * unary)[:, :, None] + scale[:, None] * pairs, axis=-1)


def codebook(embedding: Float[Array, "v d"], fc1: Float[Array, "u d"], fc2: Float[Array, "r u"]) -> Float[Array, "v r"]:
    """`fc2 . silu(fc1 . e)` of every embedding row, some at a time, in the embedding's dtype."""

    @jax.jit
    def codes(rows):
        hidden = jax.nn.silu(project(fc1, rows, out_dtype=jnp.float32))
        return project(fc2, hidden.astype(fc2.dtype), out_dtype=jnp.float32).astype(embedding.dtype)

    starts = range(0, embedding.shape[0], CODE_ROWS)
    return jnp.concatenate([codes(embedding[start : start + CODE_ROWS]) for start in starts])


def build(
    config: HeadConfig,
    tensors: Mapping[str, np.ndarray],
    target: Target,
    target_params: Any,
    dtype: Any,
    **options: Any,
) -> tuple[UBTree, Any]:
    """A UBTree drafter from its tensors; see `specjax.drafters.learned.build`.

    The codes are those of the target's embedding rows as they are stored, without an embedding scale, whether or not
    the drafter ships an embedding of its own.
    """
    drafter, params = build_drafter(UBTree, config, tensors, target, target_params, dtype, options)

    def get(name: str, dtype=dtype) -> Array:
        return jnp.asarray(tensors[f"bigram_selector.{name}"], dtype)

    def codes(side: str) -> Array:
        return codebook(target_params["embedding"], get(f"{side}.fc1.weight"), get(f"{side}.fc2.weight"))

    selector = {"phi": codes("phi"), "psi": codes("psi"), "hidden": get("hidden_projection.weight")}
    selector |= {name: get(name, jnp.float32) for name in ("log_alpha", "log_lambda")}
    return drafter, params | {"selector": selector}
