"""The best trees over a fixed set of candidates a depth, found by a beam: UBTree's Algorithm 1, and DDTree.

A draft pass has scored `c` candidates at each depth, given their predecessor or regardless of it. The tree with the
most probability mass is then a matter of bookkeeping: no network runs in here, so all depths are one `lax.scan` of
small top-k's.
"""

import jax
import jax.numpy as jnp

from specjax.array_types import Array, Float, Int
from specjax.draft import Draft, tree


def grow(
    root: Int[Array, " b"],
    candidates: Int[Array, "b k c"],
    scores: Float[Array, "b k a c"],
    *,
    width: int,
    budget: int,
    bonus: float = 0.0,
) -> Draft:
    """UBTree's tree (arXiv 2609.39972, Algorithm 1): a beam over depths, then the best nodes of all it has met.

    Level `d` extends each node of level `d - 1` by all candidates of the depth and keeps the `width` best of all
    extensions, whoever their parents are. A node's score is the sum along its path, so it stands for its whole prefix:
    the same token below another parent is another node. The `budget` best nodes of all levels make the tree. A node
    counts no better than its worst ancestor (scores fall along a path anyway unless `bonus` is positive) and of equals
    the ancestor wins, so the parent of every node that is kept is kept.

    Args:
        root: the last committed tokens.
        candidates: target ids of the candidates at each depth.
        scores: log-probability of each candidate after each candidate of the depth before (at the first depth row 0
            stands for the root); one row if the predecessor does not matter. -inf rules a candidate out.
        width: nodes of a level.
        budget: drafted nodes of the tree.
        bonus: added to a node's score for each level, so that deeper trees are preferred.

    Returns:
        The drafts, `1 + budget` rows, best node first: what is left of a tree cut short is its best part.
    """
    batch, depth, count = candidates.shape
    request = jnp.arange(batch)[:, None]

    def level(beam, scores):
        candidate, score, rank = beam
        after = jnp.broadcast_to(scores, (batch, width, count)) if scores.shape[1] == 1 else scores[request, candidate]
        extended = (score[:, :, None] + after + bonus).reshape(batch, width * count)
        score, chosen = jax.lax.top_k(extended, width)
        parent, candidate = chosen // count, chosen % count
        rank = jnp.minimum(rank[request, parent], score)
        return (candidate, score, rank), (candidate, parent, rank)

    # Before the first depth the root is the only node.
    alone = jnp.where(jnp.arange(width) == 0, 0.0, -jnp.inf)
    alone = jnp.broadcast_to(alone, (batch, width)).astype(scores.dtype)
    nobody = jnp.zeros((batch, width), jnp.int32)
    _, levels = jax.lax.scan(level, (nobody, alone, jnp.full_like(alone, jnp.inf)), scores.swapaxes(0, 1))
    candidate, parent, rank = (x.swapaxes(0, 1) for x in levels)  # [b, k, width]

    tokens = jnp.take_along_axis(candidates, candidate, axis=2)
    above = jnp.arange(-1, depth - 1, dtype=jnp.int32)[:, None] * width
    parent = jnp.where(above < 0, -1, above + parent)
    tokens, parent, rank = (x.reshape(batch, depth * width) for x in (tokens, parent, rank))
    short = ((0, 0), (0, max(budget - depth * width, 0)))
    # Of equals `top_k` lists the first, and levels stand in order: ancestors first, here and in the draft.
    rank, kept = jax.lax.top_k(jnp.pad(rank, short, constant_values=-jnp.inf), budget)
    alive = rank > -jnp.inf
    tokens, parent = (jnp.pad(x, short)[request, kept] for x in (tokens, parent))
    node = jnp.arange(1, budget + 1, dtype=jnp.int32)
    node_of = jnp.zeros((batch, max(budget, depth * width)), jnp.int32).at[request, kept].set(node)
    parent = jnp.where(alive & (parent >= 0), node_of[request, jnp.maximum(parent, 0)], 0)
    return tree(
        jnp.concatenate([root[:, None], jnp.where(alive, tokens, 0)], axis=1),
        jnp.concatenate([jnp.full((batch, 1), -1, jnp.int32), parent], axis=1),
        1 + jnp.sum(alive, axis=1, dtype=jnp.int32),
        scores=jnp.pad(jnp.where(alive, rank, 0.0), ((0, 0), (1, 0))),
    )


def best_first(
    root: Int[Array, " b"], candidates: Int[Array, "b k c"], scores: Float[Array, "b k c"], *, budget: int
) -> Draft:
    """DDTree (arXiv 2604.12989): the `budget` most probable prefixes, where depths are scored apart from each other.

    The usual way is a heap: pop the best prefix, push its first child and its next sibling. If a prefix is among the
    `budget` best of its depth, so is its parent, so a beam as wide as the budget finds the same nodes without a heap.
    Arguments are those of `grow`; the candidates of a depth should be its `budget` best, or all.
    """
    return grow(root, candidates, scores[:, :, None], width=budget, budget=budget)
