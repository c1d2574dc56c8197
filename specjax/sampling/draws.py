"""Random numbers that belong to a request and a position, and tokens drawn with them."""

import jax
import jax.numpy as jnp

from specjax.array_types import Array, Float, Int, UInt32

# Streams of random numbers. SAMPLE is keyed by the position of the token that it draws. ACCEPT and DRAFT are keyed by
# the position of the round's root, with the index inside the round of what is tested or drawn: a round may look at
# drafts past the ones it accepts, so the same position must get fresh numbers when it is drafted again.
SAMPLE, ACCEPT, DRAFT = 0, 1, 2

_LANES = 128


def sample(
    p: Float[Array, "*rows v"], seed: UInt32[Array, "*rows 2"], position: Int[Array, "*rows"]
) -> Int[Array, "*rows"]:
    """A token of `p` for `position`, drawn with the SAMPLE stream."""
    return pick(p, uniforms(seed, position, SAMPLE))


def uniforms(
    seed: UInt32[Array, "*rows 2"], position: Int[Array, "*rows"], stream: int, index: Int[Array, "*rows"] | int = 0
) -> Float[Array, "*rows"]:
    """Uniform numbers in [0, 1) with 24 bits: threefry's `fold_in` of seed, position, stream and index.

    A number depends on its own four arguments only, not on what else is drawn beside it. The arguments broadcast.
    """

    def word(seed, position, index):
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        for data in (position, stream, index):
            key = jax.random.fold_in(key, data)
        return jax.random.key_data(key)[0]

    position, index = jnp.asarray(position), jnp.asarray(index)
    shape = jnp.broadcast_shapes(seed.shape[:-1], position.shape, index.shape)
    flat = [jnp.broadcast_to(x, shape).reshape(-1) for x in (position, index)]
    words = jax.vmap(word)(jnp.broadcast_to(seed, (*shape, 2)).reshape(-1, 2), *flat)
    return ((words >> 8).astype(jnp.float32) * 2**-24).reshape(shape)


def pick(p: Float[Array, "*rows v"], u: Float[Array, "*rows"]) -> Int[Array, "*rows"]:
    """The token at which the cumulative sum of `p` passes `u` times its total.

    `p` needs no normalisation. A token with `p == 0` is never returned, whatever the rounding of the sums. Works on the
    sums of blocks first, so only one block has its running sum taken.
    """
    vocab = p.shape[-1]
    lanes = min(_LANES, vocab)
    p = jnp.pad(p, [(0, 0)] * (p.ndim - 1) + [(0, -vocab % lanes)])
    p = p.reshape(*p.shape[:-1], -1, lanes)
    sums = jnp.sum(p, axis=-1)
    ends = jnp.cumsum(sums, axis=-1)
    target = u * ends[..., -1]
    block = _first_past(sums, ends, target)
    before = jnp.take_along_axis(ends, jnp.maximum(block - 1, 0)[..., None], axis=-1)[..., 0]
    inside = jnp.take_along_axis(p, block[..., None, None], axis=-2)[..., 0, :]
    lane = _first_past(inside, jnp.cumsum(inside, axis=-1), target - jnp.where(block > 0, before, 0))
    return block * lanes + lane


def _first_past(weights: Array, ends: Array, target: Array) -> Array:
    """First index of positive weight whose running sum is past `target`, else the last of positive weight."""
    index = jnp.arange(weights.shape[-1], dtype=jnp.int32)
    positive = weights > 0
    none = weights.shape[-1]
    first = jnp.min(jnp.where(positive & (ends > target[..., None]), index, none), axis=-1)
    last = jnp.max(jnp.where(positive, index, 0), axis=-1)
    return jnp.where(first < none, first, last)
