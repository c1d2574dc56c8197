"""Chain rejection (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318)."""

import jax.numpy as jnp

from specjax.array_types import Array, Float, Int
from specjax.draft import Draft
from specjax.sampling import pick
from specjax.verify.accepted import Accepted, live_nodes


def chain(
    draft: Draft,
    p: Float[Array, "b n v"],
    q: Float[Array, "b n v"] | None,
    u_accept: Float[Array, "b n"],
    u_next: Float[Array, "b n"],
) -> Accepted:
    """Accept a draft `x` with probability min(1, p(x)/q(x)), up to the first rejection. Lossless.

    The next token is drawn from the rest, max(p - q, 0), at the first rejected draft, or from `p` after the last one.

    Args:
        draft: chains; node `i + 1` was drawn from `q[:, i]`.
        p: the target's distribution at each node.
        q: the drafter's distribution at each node; None if the drafts are a function of the context (a point mass).
        u_accept: uniform number that tests each node.
        u_next: uniform number that draws the next token at each node.
    """
    on_p, on_q = drafted_probabilities(draft, p, q)
    ratio = jnp.where(on_q > 0, on_p / jnp.where(on_q > 0, on_q, 1), 0)
    passed = (u_accept[:, 1:] < ratio) & live_nodes(draft)[:, 1:]
    count = jnp.sum(jnp.cumprod(passed.astype(jnp.int32), axis=1), axis=1)
    return stop_at(draft, p, q, count, jnp.ones(count.shape, p.dtype), u_next)


def drafted_probabilities(
    draft: Draft, p: Float[Array, "b n v"], q: Float[Array, "b n v"] | None
) -> tuple[Float[Array, "b k"], Float[Array, "b k"]]:
    """p(x) and q(x) of each draft of a chain, under the distributions at its parent."""
    drafts = draft.tokens[:, 1:, None]
    on_p = jnp.take_along_axis(p[:, :-1], drafts, axis=-1)[..., 0]
    on_q = jnp.ones_like(on_p) if q is None else jnp.take_along_axis(q[:, :-1], drafts, axis=-1)[..., 0]
    return on_p, on_q


def stop_at(
    draft: Draft,
    p: Float[Array, "b n v"],
    q: Float[Array, "b n v"] | None,
    count: Int[Array, " b"],
    scale: Float[Array, " b"],
    u_next: Float[Array, "b n"],
) -> Accepted:
    """End a chain after `count` drafts: the next token comes from max(scale * p - q, 0), or from `p` after the last."""
    batch, rows = draft.tokens.shape
    request = jnp.arange(batch)
    here = p[request, count]
    if q is None:
        rejected = draft.tokens[request, jnp.minimum(count + 1, rows - 1)]
        rest = jnp.where(jnp.arange(p.shape[-1]) == rejected[:, None], 0, here)
    else:
        rest = jnp.maximum(scale[:, None] * here - q[request, count], 0)
    # Nothing is left over only where p and q agree up to rounding, so p is the rest.
    whole = (count >= draft.lengths - 1) | ~jnp.any(rest > 0, axis=-1)
    token = pick(jnp.where(whole[:, None], here, rest), u_next[request, count])
    index = jnp.arange(rows, dtype=jnp.int32)
    return Accepted(path=jnp.where(index <= count[:, None], index, 0), count=count, token=token)
