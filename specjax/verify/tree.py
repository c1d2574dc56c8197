"""Trees: follow the target's own choices, or test siblings drawn without replacement one after another."""

import jax.numpy as jnp
from jax import lax

from specjax.array_types import Array, Float, Int
from specjax.draft import Draft
from specjax.sampling import pick
from specjax.verify.accepted import Accepted, live_nodes


def tree(draft: Draft, depth: int, choice: Int[Array, "b n"]) -> Accepted:
    """Go to the child that carries the target's choice, as long as there is one; emit the choice where there is none.

    Lossless at any temperature if `choice` is a draw from the target's distribution at each node and the draft does not
    depend on that draw. With the argmax as choice it is the greedy rule. A chain is a tree.

    Args:
        draft: trees of deterministic (or otherwise independent) candidates.
        depth: the most drafts to accept.
        choice: the target's token at each node.
    """
    batch = draft.tokens.shape[0]
    request = jnp.arange(batch)
    live = live_nodes(draft)

    def descend(node, _):
        # A node that has stopped finds no child again, so nothing else need be remembered.
        wanted = choice[request, node]
        child = (draft.parents == node[:, None]) & (draft.tokens == wanted[:, None]) & live
        found = jnp.any(child, axis=1)
        first = jnp.argmax(child, axis=1).astype(jnp.int32)
        return jnp.where(found, first, node), jnp.where(found, first, 0)

    root = jnp.zeros((batch,), jnp.int32)
    node, path = lax.scan(descend, root, None, length=depth)
    path = jnp.concatenate([root[:, None], path.T], axis=1)
    count = jnp.sum(path > 0, axis=1, dtype=jnp.int32)
    return Accepted(path=path, count=count, token=choice[request, node].astype(jnp.int32))


def recursive(
    draft: Draft,
    depth: int,
    p: Float[Array, "b n v"],
    q: Float[Array, "b n v"] | None,
    u_accept: Float[Array, "b n"],
    u_next: Float[Array, "b n"],
) -> Accepted:
    """Recursive rejection of siblings drawn without replacement (Jeon et al., arXiv 2402.14160). Lossless.

    At a node r starts as `p`. Each child y in draw order is accepted with probability min(1, r(y)/q(y)); if it is not,
    r becomes max(r - q, 0), normalised, then q(y) becomes 0 and q is normalised. The next token is drawn from what r is
    at the node that the path ends in. A child that q gives no mass to (a second copy, or any child where `q` is None)
    was not drawn from q: it counts as drawn from the point mass on it.

    Args:
        draft: trees; the children of a node stand in draw order.
        depth: the most drafts to accept.
        p: the target's distribution at each node.
        q: the distribution that the first child of each node was drawn from; None if children are deterministic.
        u_accept: uniform number that tests each node.
        u_next: uniform number that draws the next token at each node.
    """
    batch, rows = draft.tokens.shape
    request = jnp.arange(batch)
    live = live_nodes(draft)
    vocabulary = jnp.arange(p.shape[-1])

    # Parents stand before children and siblings in draw order, so one pass over the nodes meets every test in its turn.
    def visit(carry, j):
        node, count, path, r, q_left = carry
        tested = (draft.parents[:, j] == node) & live[:, j] & (count < depth)

        def test():
            y = draft.tokens[:, j]
            on_r = r[request, y]
            is_y = vocabulary == y[:, None]
            if q is None:
                drawn_from, ratio, left = is_y.astype(r.dtype), on_r, None
            else:
                on_q = q_left[request, y]
                drawn = on_q > 0
                drawn_from = jnp.where(drawn[:, None], q_left, is_y)
                ratio = jnp.where(drawn, on_r / jnp.where(drawn, on_q, 1), on_r)
                left = _normalised(jnp.where(is_y, 0, q_left), q_left)
            accepted = tested & (u_accept[:, j] < ratio)
            rest = _normalised(jnp.maximum(r - drawn_from, 0), r)
            reached = jnp.where(accepted, count + 1, count)
            here = accepted[:, None] & (jnp.arange(depth + 1) == reached[:, None])

            def move(start, after_rejection, now):
                beyond = lax.dynamic_index_in_dim(start, j, axis=1, keepdims=False)
                stay = jnp.where(tested[:, None], after_rejection, now)
                return jnp.where(accepted[:, None], beyond, stay)

            return (
                jnp.where(accepted, j, node),
                reached,
                jnp.where(here, j, path),
                move(p, rest, r),
                None if q is None else move(q, left, q_left),
            )

        return lax.cond(jnp.any(tested), test, lambda: carry), None

    start = (
        jnp.zeros((batch,), jnp.int32),
        jnp.zeros((batch,), jnp.int32),
        jnp.zeros((batch, depth + 1), jnp.int32),
        p[:, 0],
        None if q is None else q[:, 0],
    )
    (node, count, path, r, _), _ = lax.scan(visit, start, jnp.arange(1, rows, dtype=jnp.int32))
    return Accepted(path=path, count=count, token=pick(r, u_next[request, node]))


def _normalised(weights: Float[Array, "b v"], otherwise: Float[Array, "b v"]) -> Float[Array, "b v"]:
    """`weights` over their sum; `otherwise` where rounding has left nothing."""
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return jnp.where(total > 0, weights / jnp.where(total > 0, total, 1), otherwise)
