"""What an accept rule returns, and the random numbers that a round of a sampled rule uses."""

import jax.numpy as jnp

from specjax.array_types import Array, Bool, Float, Int, UInt32, pytree
from specjax.draft import Draft
from specjax.sampling import ACCEPT, SAMPLE, uniforms


@pytree
class Accepted:
    """The outcome of one round: `count + 1` tokens are emitted, the drafts on the path and then `token`.

    Attributes:
        path: nodes of the accepted path, `path[:, 0]` being the root; entries past `count` are 0.
        count: accepted drafts.
        token: the token that the target supplies after the last accepted node; the next root.
    """

    path: Int[Array, "b k1"]
    count: Int[Array, " b"]
    token: Int[Array, " b"]


def live_nodes(draft: Draft) -> Bool[Array, "b n"]:
    """Which nodes are not padding."""
    return jnp.arange(draft.tokens.shape[1]) < draft.lengths[:, None]


def round_uniforms(
    draft: Draft, lengths: Int[Array, " b"], seed: UInt32[Array, "b 2"]
) -> tuple[Float[Array, "b n"], Float[Array, "b n"]]:
    """The `u_accept` and `u_next` of the sampled rules, for a round on `lengths` committed tokens.

    The numbers that test drafts are new in every round. Block verification asks about drafts past the ones it accepts;
    were the same numbers met again when those positions are drafted anew, the text would no longer follow `p`.
    """
    root = (lengths - 1)[:, None]
    node = jnp.arange(draft.tokens.shape[1])[None, :]
    u_accept = uniforms(seed[:, None], root, ACCEPT, node)
    u_next = uniforms(seed[:, None], lengths[:, None] + draft.depths, SAMPLE)
    return u_accept, u_next
