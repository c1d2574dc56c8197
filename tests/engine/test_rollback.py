"""Rejected drafts leave no trace, at page edges and everywhere else."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import engines, toy
from support.scripted import ScriptedChain

from specjax.draft import chain, pack
from specjax.engine.request import Request
from specjax.engine.step import Width, root_only
from specjax.sampling import SamplingParams

PAGE, CONTEXT, BATCH, K, ROUNDS = 16, 64, 25, 4, 3
POISON = 1e4
LONGEST = 32 + 1 + ROUNDS * (K + 1)
ORDERS = list(itertools.product(range(K + 1), repeat=ROUNDS))


@functools.cache
def engine():
    return toy.engine(ScriptedChain(K), (), batch=BATCH, context=CONTEXT, page_size=PAGE)


def prefilled(length):
    """25 requests with random prompts of `length`, right after prefill, their pages in random order."""
    e, rng = engine(), np.random.default_rng(length)
    state = e.programs.initial()
    columns = state.cache.table.shape[1]
    pages = 1 + rng.permutation(BATCH * columns).reshape(BATCH, columns).astype(np.int32)
    params = {"target": e.params["target"], "drafter": np.full((BATCH, engines.POSITIONS), -1, np.int32)}
    for row in range(BATCH):
        prompt = rng.integers(0, toy.VOCAB, length).tolist()
        request = Request(prompt=prompt, params=SamplingParams(), index=row)
        state = e.programs.insert(state, row, e.intake.insertion(request, CONTEXT, pages[row]))
        for start, size in e.programs.chunks(length):
            state, _ = e.programs.prefill(params, state, row, start, size)
    return params, state


@functools.cache
def fresh_pass():
    """Logits of every position of 25 texts, in one pass over an empty cache."""
    target = engine().target

    def run(params, tokens, lengths):
        nothing = jnp.zeros((BATCH,), jnp.int32)
        draft = chain(tokens[:, :LONGEST], lengths)
        rows = pack(draft, nothing, BATCH * LONGEST, LONGEST, jnp.ones((BATCH,), bool))
        rows = dataclasses.replace(rows, ancestors=None)
        cache = target.init_cache(BATCH, PAGE, jnp.float32)  # nothing of it is read: the texts are one tile
        out = target.forward(params, rows, cache, nothing)
        return rows.unpack(target.logits(params, out.hidden))

    return jax.jit(run)


@jax.jit
def poison(state):
    """Every slot that holds no committed token, whoever owns it: 1e4 in keys and values."""
    slot = jnp.arange(state.cache.table.shape[1] * PAGE).reshape(-1, PAGE)
    keep = slot[None] < (state.lengths - 1)[:, None, None]
    mask = jnp.zeros((state.cache.k[0].shape[0], PAGE), bool).at[state.cache.table].set(keep)
    k, v = (tuple(jnp.where(mask[:, None, :, None], x, POISON) for x in xs) for xs in (state.cache.k, state.cache.v))
    return dataclasses.replace(state, cache=dataclasses.replace(state.cache, k=k, v=v))


@functools.cache
def next_logits():
    """The logits that the next round will find at each root."""
    target = engine().target

    def run(params, state):
        committed = state.lengths - 1
        rows = pack(root_only(state).draft, committed, BATCH, 1, state.active)
        return target.logits(params, target.forward(params, rows, state.cache, committed).hidden)

    return jax.jit(run)


def copied(state):
    """A copy that a program may consume."""
    return jax.tree.map(jnp.copy, state)


def check_next_logits(params, state):
    """The next token's logits equal those of a fresh pass over the committed ids."""
    lengths = np.asarray(state.lengths)
    fresh = np.asarray(fresh_pass()(params["target"], state.tokens, state.lengths))[np.arange(BATCH), lengths - 1]
    got = np.asarray(next_logits()(params["target"], state))
    np.testing.assert_allclose(got, fresh, atol=1e-5 * max(1.0, np.abs(fresh).max()))


def continuation(params, state):
    """What the target says behind each prompt: tokens up to the longest that a test reaches."""
    programs, state = engine().programs, copied(state)
    for _ in range(ROUNDS * (K + 1)):
        state, _ = programs.verify(Width(BATCH, 1), params, state)
    return np.asarray(state.tokens)


@pytest.mark.parametrize("length", [14, 15, 16, 17, 31, 32])
def test_every_order_of_acceptance(length):
    """Three rounds of 0 to 4 accepted drafts in every order, 25 orders at a time; poison between the rounds."""
    programs = engine().programs
    params, start = prefilled(length)
    text = continuation(params, start)
    check_next_logits(params, poison(start))
    for first in range(0, len(ORDERS), BATCH):
        orders = np.array(ORDERS[first : first + BATCH])
        script = np.full((BATCH, engines.POSITIONS), -1, np.int32)
        script[:, : text.shape[1]] = text
        # The target's own tokens everywhere, but a wrong one where a round has to stop. What is drafted behind a wrong
        # token is the right continuation on a wrong path, and all of it is drafted anew in the next round.
        at = length + 1
        for accepted in orders.T:
            stop = at + accepted
            rows = np.flatnonzero(accepted < K)
            script[rows, stop[rows]] = (script[rows, stop[rows]] + 1) % toy.VOCAB
            at = at + accepted + 1
        params = {**params, "drafter": script}
        state, lengths = poison(start), np.full((BATCH,), length + 1)
        for accepted in orders.T:
            state, live = programs.draft(params, state)
            assert np.asarray(live).tolist() == [K + 1] * BATCH
            state, emitted = programs.verify(programs.fit(np.asarray(live)), params, state)
            assert np.asarray(emitted.counts).tolist() == (accepted + 1).tolist()
            lengths = lengths + accepted + 1
            assert np.asarray(state.lengths).tolist() == lengths.tolist()
            state = poison(state)
            check_next_logits(params, state)
        for row, n in enumerate(lengths):
            np.testing.assert_array_equal(state.tokens[row, :n], text[row, :n])


def test_the_poison_would_show():
    """Sabotage: a committed slot that is poisoned changes the logits, so the comparison above can fail."""
    params, state = prefilled(15)
    longer = dataclasses.replace(state, lengths=state.lengths - 1)
    poisoned = dataclasses.replace(poison(longer), lengths=state.lengths)
    with pytest.raises(AssertionError):
        check_next_logits(params, poisoned)
