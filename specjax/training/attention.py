"""Attention of packed rows over a text, one head group at a time.

All scores of a batch at once are tens of megabytes that go through memory five times; those of one group of heads stay
in a cache, and its products are plain matrices.
"""

import jax
import jax.numpy as jnp

from specjax.array_types import Array, Bool, Float


def attend(
    q: Float[Array, "b t h f"],
    keys: Float[Array, "b s g f"],
    values: Float[Array, "b s g f"],
    seen: Bool[Array, "b t s"],
    near: Float[Array, "b t h m"],
) -> tuple[Float[Array, "b t h f"], Float[Array, "b t h m"]]:
    """Attention over a text that all rows share, and over `m` further keys that each row has of its own.

    Args:
        q: rotated queries, scaled.
        keys: rotated keys of the text.
        values: its values.
        seen: which of them each row sees.
        near: float32 scores of the further keys; -1e30 for what a row does not see. With it each row sees something.

    Returns:
        What the rows take from the text, and the weights of the further keys, in the dtype of values.
    """
    count, length, heads, _ = q.shape
    groups = keys.shape[2]
    ratio = heads // groups

    def by_group(x: Array) -> Array:
        """`[b, t, h, x]` as `[b * g, r * t, x]`."""
        each = x.shape[2] // groups
        x = x.reshape(count, x.shape[1], groups, each, x.shape[-1]).transpose(0, 2, 3, 1, 4)
        return x.reshape(count * groups, each * x.shape[3], x.shape[-1])

    def one(group):
        index, q, keys, values, near = group
        scores = jnp.einsum("mf,sf->ms", q, keys, preferred_element_type=jnp.float32)
        scores = jnp.where(jnp.tile(seen[index // groups], (ratio, 1)), scores, -1e30)
        weights = jax.nn.softmax(jnp.concatenate([scores, near], axis=-1)).astype(values.dtype)
        size = keys.shape[0]
        return weights[:, :size] @ values, weights[:, size:]

    index = jnp.arange(count * groups)
    found = jax.lax.map(one, (index, by_group(q), by_group(keys), by_group(values), by_group(near)))

    def by_row(x: Array) -> Array:
        x = x.reshape(count, groups, ratio, length, x.shape[-1]).transpose(0, 3, 1, 2, 4)
        return x.reshape(count, length, heads, x.shape[-1])

    return by_row(found[0]), by_row(found[1])
