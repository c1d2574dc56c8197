"""Texts of the tiny target as a corpus, and short training runs on it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from specjax.training.corpus import Corpus, Dialogue, Origin
from specjax.training.features import capture
from specjax.training.packing import Batch
from support import toy

ORIGIN = Origin(target="toy", target_digest="toy", tokenizer_digest="toy", vocab_size=toy.VOCAB)
PROMPT, LENGTH = 4, 24


@functools.cache
def texts(count: int, temperature: float = 0.5, seed: int = 0, **changes) -> np.ndarray:
    """`[count, LENGTH]` tokens: random prompts of `PROMPT` tokens, and what the tiny target makes of them."""
    target, params = toy.tiny(**changes)
    prompts = np.random.default_rng(seed).integers(0, target.config.vocab_size, (count, LENGTH)).astype(np.int32)
    shape = (count, LENGTH)
    fixed = {
        "mask": jnp.ones(shape, bool),
        "segments": jnp.ones(shape, jnp.int32),
        "positions": jnp.broadcast_to(jnp.arange(LENGTH), shape),
    }

    @jax.jit
    def write(tokens):
        def step(at, tokens):
            hidden = capture(target, (), params, Batch(tokens=tokens, **fixed)).hidden
            logits = target.logits(params, jnp.take(hidden, at - 1, axis=1)) / temperature
            new = jax.random.categorical(jax.random.fold_in(jax.random.key(seed), at), logits)
            return tokens.at[:, at].set(new.astype(jnp.int32))

        return jax.lax.fori_loop(PROMPT, LENGTH, step, tokens)

    return np.asarray(write(jnp.asarray(prompts)))


@functools.cache
def corpus(count: int = 400, temperature: float = 0.5) -> Corpus:
    """Dialogues of the tiny target: `PROMPT` tokens of prompt, the rest to be learned."""
    mask = np.arange(LENGTH) >= PROMPT
    made = texts(count, temperature)
    return Corpus([Dialogue(tokens=t, mask=mask, prompt=i, number=i) for i, t in enumerate(made)], ORIGIN)
