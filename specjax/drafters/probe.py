"""Which wiring does a drafter's checkpoint mean? Where its files are known to be ambiguous, ask the target.

A tap that is one layer off, a block read one slot late, an MTP module fed before instead of after a norm: none of this
makes a wrong text, because every draft is verified; it only makes drafts that are not accepted. So the target writes a
short text, greedily, and the drafter drafts along it from every position, once as declared and once for each way in
which the declaration may be wrong. Another wiring is kept where its drafts agree with the text clearly longer.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.array_types import Array, Float, Int
from specjax.cache import KVCache, whole_blocks
from specjax.draft import chunk
from specjax.drafters import learned
from specjax.drafters.base import Context, Features
from specjax.drafters.config import BLOCK, HeadConfig
from specjax.drafters.formats.read import LoadedDrafter
from specjax.targets.decoder import Target

NEW, DRAFTS = 64, 4  # tokens of the target's text, and drafts from each of its positions
CLEARLY, MORE = 3.0, 0.1  # standard errors, and accepted drafts a round, by which another wiring must be better


@dataclasses.dataclass(frozen=True)
class Text:
    """What the target wrote, and what it made of it.

    Attributes:
        tokens: prompt and text.
        start: tokens of the prompt.
        hidden: post-final-norm hidden states of every position but the last.
        taps: residual streams after `t` layers, by `t`.
    """

    tokens: np.ndarray
    start: int
    hidden: Float[Array, "t d"]
    taps: dict[int, Float[Array, "t d"]]


def alternatives(config: HeadConfig, target_layers: int) -> list[list[tuple[str, dict[str, Any]]]]:
    """What a checkpoint may mean instead of what it says: groups of `(words, changed fields)`, the costliest first."""

    def turned(name: str, words: dict[bool, str]) -> list[tuple[str, dict[str, Any]]]:
        value = not getattr(config, name)
        return [(words[value], {name: value})]

    shifts = [
        (f"taps {[t + by for t in config.taps]}", {"taps": tuple(t + by for t in config.taps)})
        for by in (-1, 1)
        if config.taps and min(config.taps) + by >= 0 and max(config.taps) + by < target_layers
    ]
    if config.family == "mtp":
        return [
            turned("hidden_first", {True: "[hidden, embedding] into the fuse matrix", False: "[embedding, hidden]"}),
            turned("hidden_normed", {True: "hidden states after the target's norm", False: "hidden states before it"}),
            turned("feedback_normed", {True: "feeding back after its own norm", False: "feeding back before its norm"}),
            # Exports of other frameworks may have the 1 in their weights already.
            turned("norm_offset", {True: "norms that multiply by 1 + w", False: "norms that multiply by w"}),
            turned("blank_start", {True: "no token at position 0", False: "the token at position 0"}),
        ]
    if config.family in BLOCK:
        slots = {True: "slots that predict the next token", False: "slots that predict their own token"}
        return [turned("shifted", slots), shifts]
    if config.family == "eagle3":
        return [
            shifts,
            turned("norm_output", {True: "feeding back the normed output", False: "feeding back the raw output"}),
        ]
    return [shifts]


def probe(
    loaded: LoadedDrafter, target: Target, target_params: Any, dtype: Any, prompt: Sequence[int]
) -> tuple[LoadedDrafter, list[str]]:
    """Compare a drafter's declared wiring with the likely mistakes, and keep the one whose drafts the target
    agrees with.

    Args:
        loaded: the drafter as its files declare it.
        target: the model that it drafts for.
        target_params: the model's arrays.
        dtype: dtype that the drafter is built in.
        prompt: what the target writes its text from; at least one token.

    Returns:
        The drafter, perhaps with other switches, and notes on what was found. Our own UBTree format leaves
        nothing open, and is returned as it is.
    """
    if loaded.format == "ubtree":
        return loaded, []
    groups = alternatives(loaded.config, target.config.num_layers)
    wanted = {t for options in groups for _, change in options for t in change.get("taps", ())} | set(
        loaded.config.taps
    )
    text = written(target, target_params, prompt, tuple(sorted(wanted)), dtype)

    def agreement(config: HeadConfig) -> np.ndarray:
        return accepted(config, loaded, text, target, target_params, dtype)

    config = loaded.config
    declared = best = agreement(config)
    notes = []
    for options in groups:
        tried = [(agreement(dataclasses.replace(config, **change)), words, change) for words, change in options]
        tried = [(found, words, change) for found, words, change in tried if _clearly_longer(found, best)]
        if tried:
            found, words, change = max(tried, key=lambda entry: entry[0].mean())
            notes.append(
                f"probe: the file declares another wiring, but with {words} the target accepts "
                f"{found.mean():.2f} drafts a round instead of {best.mean():.2f}; it is used"
            )
            config, best = dataclasses.replace(config, **change), found
    if not notes:
        agreed = f"{declared.mean():.2f} of {_depth(config)} drafts a round"
        notes = [f"probe: the declared wiring holds, the target accepts {agreed}"]
    return dataclasses.replace(loaded, config=config), notes


def written(target: Target, params: Any, prompt: Sequence[int], taps: tuple[int, ...], dtype: Any) -> Text:
    """A greedy text of the target, and its activations at every position of it."""
    tokens = jnp.asarray(prompt, jnp.int32)
    cache = target.init_cache(1, _slots(len(prompt) + NEW), dtype)
    tokens = jnp.concatenate([tokens, _once(_write, 1)(target, params, cache, tokens)])
    hidden, streams = _once(read, 2)(target, taps, params, cache, tokens)
    each = jnp.split(streams, len(taps), axis=-1) if taps else []
    return Text(np.asarray(tokens), len(prompt), hidden, dict(zip(taps, each, strict=True)))


@functools.cache
def _once(function: Callable, static: int) -> Callable:
    """A jitted function whose programs run once each: on a CPU, the less they are optimised the sooner it is over."""
    options = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
    return jax.jit(function, static_argnums=tuple(range(static)), compiler_options=options)


def _write(target: Target, params: Any, cache: KVCache, tokens: Array) -> Array:
    """The `NEW` tokens after a prompt."""
    start = tokens.shape[0]
    out = target.forward(params, chunk(tokens, jnp.int32(0), tokens.shape[0]), cache, jnp.zeros((1,), jnp.int32))

    def step(carry, position):
        cache, hidden = carry
        token = jnp.argmax(target.logits(params, hidden), axis=-1).astype(jnp.int32)
        out = target.forward(params, chunk(token, position, 1), cache, jnp.reshape(position, (1,)))
        return (out.cache, out.hidden), token[0]

    steps = jnp.arange(start, start + NEW, dtype=jnp.int32)
    return jax.lax.scan(step, (out.cache, out.hidden[-1:]), steps)[1]


def read(target: Target, taps: tuple[int, ...], params: Any, cache: KVCache, tokens: Array):
    """Hidden states and taps of every token but the last."""
    out = target.forward(
        params, chunk(tokens[:-1], jnp.int32(0), tokens.shape[0] - 1), cache, jnp.zeros((1,), jnp.int32), taps
    )
    return out.hidden, out.taps


def accepted(
    config: HeadConfig, loaded: LoadedDrafter, text: Text, target: Target, target_params: Any, dtype: Any
) -> np.ndarray:
    """Drafts that agree with the text from its start on, for each position that has enough text behind it."""
    depth = _depth(config)
    options = (
        {"depth": depth, "branching": 1} if config.family in ("eagle3", "mtp") else {"num_speculative_tokens": depth}
    )
    drafter, params = learned.build(config, loaded.tensors, target, target_params, dtype, **options)
    roots = np.arange(max(text.start, 1), len(text.tokens) - depth)
    if drafter.wants_hidden:
        given = {"hidden": text.hidden}
    else:
        given = {"taps": jnp.concatenate([text.taps[t] for t in config.taps], axis=-1)}
    found = _once(_drafts, 1)(drafter, params, jnp.asarray(text.tokens), given, jnp.asarray(roots, jnp.int32))
    wanted = text.tokens[roots[:, None] + 1 + np.arange(depth)]
    return np.cumprod(found == wanted, axis=1).sum(axis=1)


def _drafts(drafter: Any, params: Any, tokens: Array, given: dict[str, Array], roots: Array) -> Array:
    """The chains `[roots, depth]` that a drafter makes after each root, with the features of all tokens before it."""
    return drafter.draft(params, *at_every_root(drafter, params, tokens, given, roots), drafter.shape)[0].tokens[:, 1:]


def at_every_root(
    drafter: Any, params: Any, tokens: Int[Array, " t"], given: Mapping[str, Array], roots: Int[Array, " b"]
) -> tuple[Any, Context]:
    """State and context of a drafter in which every root is a request of its own, its text being the tokens up to it.

    Args:
        drafter: what drafts.
        params: its weights.
        tokens: a text.
        given: the target's `hidden` states or `taps` of all its tokens but the last.
        roots: positions of the roots, from 1 on.
    """
    rows, batch, capacity = tokens.shape[0] - 1, roots.shape[0], _slots(tokens.shape[0])
    positions = jnp.arange(rows, dtype=jnp.int32)[None]
    whole = Features(positions=positions, count=jnp.array([rows]), **{name: x[None] for name, x in given.items()})
    zero = jnp.int32(0)
    state = drafter.prefill(params, drafter.init_state(1, capacity), zero, tokens, zero, jnp.int32(rows), whole)
    # What lies past the root's length is not read.
    state = jax.tree.map(lambda x: jnp.repeat(x, batch, axis=0), state)
    newest = {name: x[roots - 1][:, None] for name, x in given.items()}
    context = Context(
        tokens=jnp.broadcast_to(jnp.pad(tokens, (0, capacity - rows - 1)), (batch, capacity)),
        lengths=roots + 1,
        prompt_lengths=roots + 1,
        active=jnp.ones((batch,), bool),
        eos=jnp.full((batch, 1), -1, jnp.int32),
        sampling=None,  # read by sampled drafts alone
        features=Features(positions=roots[:, None] - 1, count=jnp.ones((batch,), jnp.int32), **newest),
    )
    return state, context


def _slots(tokens: int) -> int:
    return whole_blocks(tokens)


def _depth(config: HeadConfig) -> int:
    """Drafts from each position: as many as every wiring of the drafter can make."""
    if config.family in BLOCK:
        return min(DRAFTS, config.block_size - 1)
    return min(DRAFTS, config.depths) if config.family == "peagle" else DRAFTS


def _clearly_longer(found: np.ndarray, best: np.ndarray) -> bool:
    """A paired comparison over the positions of the text."""
    gain = found - best
    error = gain.std() / math.sqrt(len(gain))
    return bool(gain.mean() > MORE and gain.mean() > CLEARLY * error)
