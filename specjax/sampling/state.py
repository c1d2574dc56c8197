"""The sampling parameters of a batch on the device, one entry a request."""

import secrets

import jax
import jax.numpy as jnp
import numpy as np

from specjax.array_types import Array, Bool, Float, Int, UInt32, pytree
from specjax.sampling.params import MAX_BIAS, SamplingParams, check_seed

_TINY = np.finfo(np.float32).tiny


@pytree
class SamplingState:
    """The sampling parameters of a batch, one entry a request.

    Attributes:
        temperature, top_k, top_p, min_p, repetition, presence, frequency: as in `SamplingParams`.
        bias_tokens: token ids that `bias_values` are added to, -1 where unused.
        min_length: no end token below this position (prompt length + `min_tokens`).
        seed: the two words of the request's 64-bit seed, high word first.
        logprobs: whether the request reports log-probabilities.
    """

    temperature: Float[Array, " b"]
    top_k: Int[Array, " b"]
    top_p: Float[Array, " b"]
    min_p: Float[Array, " b"]
    repetition: Float[Array, " b"]
    presence: Float[Array, " b"]
    frequency: Float[Array, " b"]
    bias_tokens: Int[Array, "b e"]
    bias_values: Float[Array, "b e"]
    min_length: Int[Array, " b"]
    seed: UInt32[Array, "b 2"]
    logprobs: Bool[Array, " b"]


def neutral(batch: int, max_bias: int = MAX_BIAS) -> SamplingState:
    """Parameters that ask for nothing (temperature 1, all else off): what empty and padding rows carry."""
    return SamplingState(
        temperature=jnp.ones((batch,), jnp.float32),
        top_k=jnp.zeros((batch,), jnp.int32),
        top_p=jnp.ones((batch,), jnp.float32),
        min_p=jnp.zeros((batch,), jnp.float32),
        repetition=jnp.ones((batch,), jnp.float32),
        presence=jnp.zeros((batch,), jnp.float32),
        frequency=jnp.zeros((batch,), jnp.float32),
        bias_tokens=jnp.full((batch, max_bias), -1, jnp.int32),
        bias_values=jnp.zeros((batch, max_bias), jnp.float32),
        min_length=jnp.zeros((batch,), jnp.int32),
        seed=jnp.zeros((batch, 2), jnp.uint32),
        logprobs=jnp.zeros((batch,), bool),
    )


def row_values(
    params: SamplingParams,
    *,
    prompt_length: int,
    vocab_size: int,
    seed: int | None = None,
    max_bias: int = MAX_BIAS,
) -> SamplingState:
    """One request's row of a `SamplingState`, as numpy values without the batch axis. Runs on the host.

    Args:
        params: what the request asks for.
        prompt_length: tokens of its prompt.
        vocab_size: tokens of the target's vocabulary.
        seed: used instead of `params.seed` if given (several answers to one request); without either, a fresh one.
        max_bias: entries of the state's bias arrays.

    Raises:
        ValueError: a token id is outside the vocabulary, or there are more biases than `max_bias`.
    """
    for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
        for token in ids:
            if not 0 <= token < vocab_size:
                raise ValueError(f"{name} names token {token}; the target's vocabulary is 0..{vocab_size - 1}")
    if len(params.logit_bias) > max_bias:
        raise ValueError(f"logit_bias has {len(params.logit_bias)} entries, this engine takes {max_bias}")
    seed = params.seed if seed is None else seed
    if seed is None:
        seed = secrets.randbits(64)
    check_seed(seed)
    bias_tokens = np.full((max_bias,), -1, np.int32)
    bias_values = np.zeros((max_bias,), np.float32)
    bias_tokens[: len(params.logit_bias)] = list(params.logit_bias)
    bias_values[: len(params.logit_bias)] = list(params.logit_bias.values())
    return SamplingState(
        # Below float32's smallest normal number a division would flush to one by zero.
        temperature=np.float32(params.temperature if params.temperature >= _TINY else 0),
        top_k=np.int32(min(params.top_k, vocab_size)),
        top_p=np.float32(params.top_p),
        min_p=np.float32(params.min_p),
        repetition=np.float32(params.repetition_penalty),
        presence=np.float32(params.presence_penalty),
        frequency=np.float32(params.frequency_penalty),
        bias_tokens=bias_tokens,
        bias_values=bias_values,
        min_length=np.int32(prompt_length + params.min_tokens),
        seed=np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32),
        logprobs=np.bool_(params.logprobs is not None),
    )


def set_row(state: SamplingState, row: Int[Array, ""], values: SamplingState) -> SamplingState:
    """`state` with row `row` (may be traced) replaced by `values`, as `row_values` makes them."""
    return jax.tree.map(lambda rows, value: rows.at[row].set(value), state, values)
