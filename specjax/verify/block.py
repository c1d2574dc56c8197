"""Block verification (Sun et al., arXiv 2403.10444): drafts of a chain are judged together, not one by one."""

import jax.numpy as jnp
from jax import lax

from specjax.array_types import Array, Float
from specjax.draft import Draft
from specjax.verify.accepted import Accepted, live_nodes
from specjax.verify.chain import drafted_probabilities, stop_at


def block(
    draft: Draft,
    p: Float[Array, "b n v"],
    q: Float[Array, "b n v"] | None,
    u_accept: Float[Array, "b n"],
    u_next: Float[Array, "b n"],
) -> Accepted:
    """Keep the longest prefix that passes its own test. Lossless, and never shorter on average than `chain`.

    With P_0 = 1 and P_i = min(1, P_{i-1} p(x_i)/q(x_i)), prefix i passes with probability R_i / (R_i + 1 - P_i), where
    R_i is the sum of max(P_i p - q, 0) over the vocabulary at node i; the whole draft passes with probability P. The
    next token is drawn from max(P_i p - q, 0), or from `p` after the last draft. Arguments are those of `chain`.
    """
    on_p, on_q = drafted_probabilities(draft, p, q)
    log_ratio = jnp.where(on_q > 0, jnp.log(on_p) - jnp.log(jnp.where(on_q > 0, on_q, 1)), -jnp.inf)

    def extend(log_prefix, log_ratio):
        log_prefix = jnp.minimum(log_prefix + log_ratio, 0)
        return log_prefix, log_prefix

    root = jnp.zeros(draft.tokens.shape[:1], p.dtype)
    _, log_prefix = lax.scan(extend, root, log_ratio.T)
    log_prefix = jnp.concatenate([root[:, None], log_prefix.T], axis=1)
    prefix, short = jnp.exp(log_prefix), -jnp.expm1(log_prefix)
    if q is None:
        rest = prefix[:, :-1] * (1 - on_p)
    else:
        rest = jnp.sum(jnp.maximum(prefix[:, :-1, None] * p[:, :-1] - q[:, :-1], 0), axis=-1)
    rest = jnp.pad(rest, ((0, 0), (0, 1)))
    # P = 1 passes always; it is also the 0/0 of p == q.
    passes = jnp.where(short > 0, rest / jnp.where(short > 0, rest + short, 1), 1)
    node = jnp.arange(draft.tokens.shape[1], dtype=jnp.int32)
    passes = jnp.where(node == draft.lengths[:, None] - 1, prefix, passes)
    passed = (u_accept < passes) & live_nodes(draft) & (node > 0)
    count = jnp.max(jnp.where(passed, node, 0), axis=1)
    scale = jnp.take_along_axis(prefix, count[:, None], axis=1)[:, 0]
    return stop_at(draft, p, q, count, scale, u_next)
