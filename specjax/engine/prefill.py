"""A request enters and leaves: insert its prompt and parameters, prefill in chunks, sample the first token, release."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax import sampling
from specjax.array_types import Array, pytree
from specjax.draft import Rows, chunk
from specjax.drafters.base import Features
from specjax.engine.accept import choose_first
from specjax.engine.state import LENGTH, RUNNING, STOP, Emitted, Logprobs, State
from specjax.engine.step import Stage, root_only
from specjax.sampling import SamplingState
from specjax.targets.decoder import Output


@pytree
class Insertion:
    """What a request brings to its batch row, as host values of fixed shapes.

    Attributes:
        tokens: the prompt, padded to the token buffer.
        length: its tokens.
        limit: total tokens at which the request ends.
        eos: its end tokens, padded with -1.
        sampling: its sampling parameters.
        pages: its pages, or None for a dense cache.
    """

    tokens: Array
    length: Array
    limit: Array
    eos: Array
    sampling: SamplingState
    pages: Array | None


def insert(state: State, row: Array, new: Insertion) -> State:
    """Put a request into batch row `row`; it becomes active when its prompt has been prefilled."""
    cache = state.cache
    if new.pages is not None and cache.table is not None:
        cache = dataclasses.replace(cache, table=cache.table.at[row].set(new.pages))
    return dataclasses.replace(
        state,
        cache=cache,
        tokens=state.tokens.at[row].set(new.tokens),
        lengths=state.lengths.at[row].set(new.length),
        prompt_lengths=state.prompt_lengths.at[row].set(new.length),
        limits=state.limits.at[row].set(new.limit),
        active=state.active.at[row].set(False),
        eos=state.eos.at[row].set(new.eos),
        sampling=sampling.set_row(state.sampling, row, new.sampling),
    )


def prefill(stage: Stage, size: int, params: Any, state: State, row: Array, start: Array) -> tuple[State, Emitted]:
    """Process prompt tokens `start ... start + size` of `row`; behind the last of them, sample the first token.

    Args:
        stage: what is compiled.
        size: rows of the chunk; those past the prompt's end are padding.
        params: weights.
        state: the state, `row` inserted.
        row: the batch row.
        start: first position of the chunk.

    Returns:
        The state, and what was emitted: one token of one request in the last chunk, nothing before.
    """
    length = state.prompt_lengths[row]
    count = jnp.minimum(length - start, size)
    # One token more than the chunk: a drafter pairs the features of token i with token i + 1.
    padded = jnp.pad(state.tokens[row], (0, size + 1))
    tokens = jax.lax.dynamic_slice(padded, (start,), (size + 1,))
    rows = chunk(tokens[:size], start, count)
    with jax.named_scope("prefill"):
        view = state.cache.request(row)
        out = stage.target.forward(params["target"], rows, view, jnp.reshape(start, (1,)), stage.taps)
    cache = dataclasses.replace(out.cache, table=state.cache.table)
    last = start + size >= length
    hidden = jax.lax.dynamic_slice_in_dim(out.hidden, jnp.maximum(count - 1, 0), 1)
    first, logprobs = jax.lax.cond(
        last,
        lambda: _first_token(stage, params, state, row, hidden),
        lambda: jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype),
            jax.eval_shape(lambda: _first_token(stage, params, state, row, hidden)),
        ),
    )
    drafter = state.drafter
    if stage.drafter is not None:
        features = Features(
            positions=rows.positions[None],
            count=count[None],
            hidden=out.hidden[None] if stage.drafter.wants_hidden else None,
            taps=None if out.taps is None else out.taps[None],
        )
        pairs = tokens.at[count].set(jnp.where(last, first[0], tokens[count]))
        drafter = stage.drafter.prefill(params["drafter"], drafter, row, pairs, start, count, features)
    done = jnp.any(first[0] == state.eos[row])
    full = length + 1 >= state.limits[row]
    finish = jnp.where(done, STOP, jnp.where(full, LENGTH, RUNNING)).astype(jnp.int32)
    state = dataclasses.replace(
        state,
        cache=cache,
        drafter=drafter,
        features=_newest(state.features, row, rows, jnp.maximum(count - 1, 0), out),
        tokens=state.tokens.at[row, length].set(jnp.where(last, first[0], state.tokens[row, length]), mode="drop"),
        lengths=state.lengths.at[row].add(last.astype(jnp.int32)),
        active=state.active.at[row].set(last & (finish == RUNNING)),
    )
    state = root_only(state)
    emitted = Emitted(
        tokens=first[None],
        counts=last.astype(jnp.int32)[None],
        finish=jnp.where(last, finish, RUNNING)[None],
        logprobs=logprobs,
    )
    return state, emitted


def _newest(features: Features | None, row: Array, rows: Rows, last: Array, out: Output) -> Features | None:
    """Activations of the prompt's last row: the one that the first draft starts from."""
    if features is None:
        return None

    def put(buffer, values):
        return None if buffer is None else buffer.at[row, 0].set(values[last])

    return Features(
        positions=put(features.positions, rows.positions),
        count=features.count.at[row].set(1),
        hidden=put(features.hidden, out.hidden),
        taps=put(features.taps, out.taps),
    )


def release(stage: Stage, state: State, row: Array, length: Array) -> State:
    """Request `row` is over: it takes no further part, and the drafter may remember what it said.

    `length` is what the host kept of it, prompt included: a stop string may have ended it before the device's last
    token.
    """
    drafter = state.drafter
    if stage.drafter is not None:
        drafter = stage.drafter.finish(drafter, row, state.tokens[row], state.prompt_lengths[row], length)
    return dataclasses.replace(
        state,
        active=state.active.at[row].set(False),
        lengths=state.lengths.at[row].set(1),  # the loop over cached slots runs as far as the longest row
        drafter=drafter,
    )


def _first_token(stage: Stage, params: Any, state: State, row: Array, hidden: Array):
    """The token behind the prompt, with its log-probabilities where asked."""
    logits = stage.target.logits(params["target"], hidden)
    token = choose_first(logits, row, state)
    logprobs = None
    if stage.top_logprobs:
        logprobs = Logprobs.of(sampling.logprobs(logits[None], token[None], stage.top_logprobs))
    return token, logprobs
