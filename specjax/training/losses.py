"""Losses of drafters, over rows of logits; `p` is the target's distribution, `q` the drafter's."""

import jax
import jax.numpy as jnp

from specjax.array_types import Array, Bool, Float, Int


def cross_entropy(p: Float[Array, "*n c"], logits: Float[Array, "*n c"]) -> Float[Array, "*n"]:
    """`-sum_v p(v) log q(v)`: KL(p, q) up to the entropy of p, which the drafter does not change."""
    return jax.nn.logsumexp(logits, axis=-1) - jnp.sum(p * logits, axis=-1)


def token_loss(logits: Float[Array, "*n c"], column: Int[Array, "*n"]) -> Float[Array, "*n"]:
    """`-log q(token)`."""
    return jax.nn.logsumexp(logits, axis=-1) - jnp.take_along_axis(logits, column[..., None], axis=-1)[..., 0]


def distance(p: Float[Array, "*n c"], logits: Float[Array, "*n c"]) -> Float[Array, "*n"]:
    """`sum_v |p(v) - q(v)|`; `1 - distance / 2` is the chance that speculative sampling accepts a draft from q."""
    return jnp.sum(jnp.abs(p - jax.nn.softmax(logits)), axis=-1)


def binary(logit: Float[Array, "*n"], wanted: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """Binary cross-entropy of a predicted chance, given as a logit."""
    return jax.nn.softplus(logit) - wanted * logit


def mean(values: Float[Array, "*n"], weights: Float[Array, "*n"]) -> Float[Array, ""]:
    """The weighted mean; 0 where nothing has weight."""
    return jnp.sum(values * weights) / jnp.maximum(jnp.sum(weights), 1e-9)


def agreement(p: Float[Array, "*n c"], logits: Float[Array, "*n c"], valid: Bool[Array, "*n"]) -> Float[Array, ""]:
    """How often the drafter's most likely column is the target's; a tie counts if any of the tied is."""
    # Not by `argmax`, which costs a CPU twenty times what `max` does.
    both = (logits >= logits.max(axis=-1, keepdims=True)) & (p >= p.max(axis=-1, keepdims=True))
    return mean(jnp.any(both, axis=-1).astype(jnp.float32), valid.astype(jnp.float32))
