"""Growth of a dynamic draft tree, level by level: the best nodes of a static pool (EAGLE-2, arXiv 2406.16858).

The root's k best children make the first beam. Each level runs the k nodes of the beam, whose k children each join the
pool; the k best of these k * k are the next beam. In the end the best `rows - 1` nodes of the pool are kept. Pool and
beam are static, so the whole growth is one `lax.scan`.

A child's score is its parent's plus its own value, which is never positive: a parent is never worse than its child and
stands before it in the pool, so what is kept is a tree. With log-probabilities as values the tree follows the drafter's
confidence. With values that depend on the rank of a child alone (`rank_values`) the same code makes one fixed topology
whatever was drawn, which is what a tree of sampled children needs to be lossless: pruning may not look at draws.

A chain is the growth with one child a node.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.array_types import Array, Bool, Float, Int, pytree
from specjax.draft import DraftShape

# Chance that a target accepts a sampled child after having rejected its elder siblings, in round figures.
RANK_ACCEPTANCE = 0.6


@pytree
class Children:
    """The k children of each expanded node, the one to be tested first at the front.

    Attributes:
        tokens: their tokens.
        values: what each adds to its parent's score, at most 0; -inf for a child that may not be drafted.
        q: the distribution that they were drawn from, or None where they are a function of the context.
    """

    tokens: Int[Array, "b n k"]
    values: Float[Array, "b n k"]
    q: Float[Array, "b n v"] | None = None


@pytree
class Beam:
    """The k nodes that a level runs.

    Attributes:
        level: the beam's number, from 0: its nodes are `level + 1` deep.
        tokens: their tokens.
        parents: place of each one's parent in the beam before (0 in the first, where all are the root's children).
        seen: `[b, k, rows run in all levels]`, the ancestors of each node and itself; level l has rows `l * k ...`.
    """

    level: Int[Array, ""]
    tokens: Int[Array, "b k"]
    parents: Int[Array, "b k"]
    seen: Bool[Array, "b k j"]


@pytree
class Grown:
    """A tree, root first, in the fields of `Draft`."""

    tokens: Int[Array, "b n"]
    parents: Int[Array, "b n"]
    lengths: Int[Array, " b"]
    q: Float[Array, "b n v"] | None
    scores: Float[Array, "b n"]


def run_rows(shape: DraftShape) -> int:
    """Nodes that the growth runs: the beams of all levels but the deepest."""
    return (shape.depth - 1) * shape.branching


def rank_values(k: int) -> np.ndarray:
    """Values of sampled children by rank: log-probabilities that the first, the second, ... is the one accepted."""
    return (np.log(RANK_ACCEPTANCE) + np.arange(k) * np.log1p(-RANK_ACCEPTANCE)).astype(np.float32)


def check_shape(shape: DraftShape) -> None:
    """Refuse a shape with more rows than its depth and branching can fill."""
    k = shape.branching
    pool = k + (shape.depth - 1) * k * k
    if shape.depth < 1 or shape.rows - 1 > pool:
        raise ValueError(
            f"a tree of depth {shape.depth} and branching {k} grows {max(pool, 0)} nodes at most, but {shape.rows} "
            "rows (the root included) are asked for: lower rows, or raise depth or branching"
        )


def grow(
    expand: Callable[[Any, Beam], tuple[Any, Children]],
    root: Int[Array, " b"],
    first: Children,
    carry: Any,
    shape: DraftShape,
) -> Grown:
    """Grow a tree.

    Args:
        expand: `expand(carry, beam) -> (carry, children)` runs the k nodes of a beam; `carry` is its own memory.
        root: token of the root.
        first: children of the root, `n = 1`.
        carry: what the first call of `expand` gets; every call must return the same structure.
        shape: depth, branching and rows of the tree.

    Returns:
        The tree, best node first: parents come before children, siblings in their own order, and what is left of a tree
        cut short is its best part. Nodes without a finite score are padding.
    """
    check_shape(shape)
    k, levels = shape.branching, shape.depth - 1
    batch = root.shape[0]
    request = jnp.arange(batch)[:, None]

    def step(state, level):
        carry, beam, score, place = state
        carry, children = expand(carry, beam)
        scores = score[:, :, None] + children.values
        pool = (children.tokens.reshape(batch, -1), scores.reshape(batch, -1), jnp.repeat(place, k, axis=1))
        score, chosen = jax.lax.top_k(pool[1], k)
        parent = chosen // k
        own = jnp.arange(levels * k) == (level + 1) * k + jnp.arange(k)[:, None]
        beam = Beam(
            level=level + 1,
            tokens=pool[0][request, chosen],
            parents=parent,
            seen=beam.seen[request, parent] | own,
        )
        run = jnp.full_like(pool[0], -1).at[request, chosen].set(1 + (level + 1) * k + jnp.arange(k))
        return (carry, beam, score, k + level * k * k + chosen), (*pool, run, children.q)

    # A place counts the pool's nodes from 0 (the root's is -1); `run` is the row that runs a node (the root's is 0).
    slots = jnp.arange(k, dtype=jnp.int32)
    parents = jnp.full((batch, k), -1, jnp.int32)
    pool = [first.tokens[:, 0], first.values[:, 0], parents, jnp.broadcast_to(1 + slots, (batch, k))]
    q = first.q
    if levels:
        beam = Beam(
            level=jnp.int32(0),
            tokens=first.tokens[:, 0],
            parents=jnp.zeros((batch, k), jnp.int32),
            seen=jnp.broadcast_to(jnp.arange(levels * k) == slots[:, None], (batch, k, levels * k)),
        )
        start = (carry, beam, first.values[:, 0], jnp.broadcast_to(slots, (batch, k)))
        _, later = jax.lax.scan(step, start, jnp.arange(levels, dtype=jnp.int32))
        pool = [jnp.concatenate([a, _levels_in_row(b)], axis=1) for a, b in zip(pool, later[:4], strict=True)]
        q = None if q is None else jnp.concatenate([q, _levels_in_row(later[4])], axis=1)
    tokens, scores, parents, run = pool
    return _rerank(root, tokens, scores, parents, run, q, shape)


def _levels_in_row(x: Array) -> Array:
    """`[levels, b, n, ...]`, as a scan stacks it, to `[b, levels * n, ...]`."""
    return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])


def _rerank(
    root: Array, tokens: Array, scores: Array, parents: Array, run: Array, q: Array | None, shape: DraftShape
) -> Grown:
    """Keep the best nodes of the pool and number them anew."""
    batch, size = tokens.shape
    request = jnp.arange(batch)[:, None]
    best, kept = jax.lax.top_k(scores, shape.rows - 1)  # of equals the first: parents before children
    live = best > -jnp.inf
    number = jnp.zeros((batch, size), jnp.int32).at[request, kept].set(jnp.arange(1, shape.rows, dtype=jnp.int32))
    above = jnp.take_along_axis(parents, kept, axis=1)  # the parent's place in the pool
    parent = jnp.where(live & (above >= 0), number[request, jnp.maximum(above, 0)], 0)
    if q is not None:
        row = jnp.concatenate([jnp.zeros((batch, 1), jnp.int32), jnp.where(live, run[request, kept], -1)], axis=1)
        # The last level is not run: its nodes have no children, and their q is 0.
        ran = (row >= 0) & (row < q.shape[1])
        q = jnp.where(ran[:, :, None], q[request, jnp.where(ran, row, 0)], 0)
    return Grown(
        tokens=jnp.concatenate([root[:, None], jnp.where(live, tokens[request, kept], 0)], axis=1),
        parents=jnp.concatenate([jnp.full((batch, 1), -1, jnp.int32), parent], axis=1),
        lengths=1 + jnp.sum(live, axis=1, dtype=jnp.int32),
        q=q,
        scores=jnp.pad(jnp.where(live, best, 0.0), ((0, 0), (1, 0))),
    )
