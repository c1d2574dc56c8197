"""What must hold of any block drafter in an engine, whatever it drafts."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from specjax.draft import Rows
from specjax.drafters.base import Features
from specjax.sampling import SamplingParams
from support import blocks, toy

PROMPTS = ([3, 1, 4, 1, 5], [2], [1, 6, 0, 2, 3, 5, 3, 6, 1, 4, 4, 1, 2, 0, 3, 5, 1, 2, 6, 0, 2])
NEW, SMALL_VOCAB = 24, 7


def small(family: str, dtype=jnp.float32, options=None, **changes):
    """`(drafter, params, target)` on a target of 7 tokens, few enough that random drafts are right now and then."""
    model, params = toy.tiny(vocab_size=SMALL_VOCAB)
    params = jax.tree.map(lambda x: x.astype(dtype), params)
    few = {"selector_top_k": 5} if family in ("dflash2", "ubtree") else {}
    config = blocks.head_config(
        family, vocab_size=SMALL_VOCAB, draft_vocab_size=SMALL_VOCAB, mask_token_id=SMALL_VOCAB - 1, **(few | changes)
    )
    drafter, weights = blocks.build(config, target=(model, params), dtype=dtype, **(options or {}))
    return drafter, weights, (model, params)


@functools.cache
def _plain():
    engine = toy.engine(target=toy.tiny(vocab_size=SMALL_VOCAB), batch=len(PROMPTS))
    return [r.token_ids for r in engine.generate(list(PROMPTS), SamplingParams(max_tokens=NEW))]


def check_greedy(drafter, params, target) -> None:
    """A batch of ragged prompts at temperature 0, some drafts of which are accepted and some not.

    The text is the target's own, and in every round the draft is that of a drafter which has seen the committed tokens
    for the first time, whatever was accepted or rejected before.
    """
    engine = toy.engine(drafter, params, target, batch=len(PROMPTS))
    for prompt in PROMPTS:
        engine.submit(list(prompt), SamplingParams(max_tokens=NEW))
    fresh = jax.jit(lambda state, row: _fresh_draft(drafter, params, target, state, row))
    results, seen = {}, set()
    while engine.busy:
        chunks = engine.step()
        results |= {index: chunk.result for index, chunk in chunks if chunk.result is not None}
        seen |= {len(chunk.token_ids) - 1 for _, chunk in chunks}
        for row in np.flatnonzero(engine._state.active):
            _same_draft(engine._state, int(row), fresh(engine._state, row), drafter.shape.is_chain)
    assert [results[index].token_ids for index in range(len(PROMPTS))] == _plain()
    accepted, drafted = (sum(getattr(r.spec, name) for r in results.values()) for name in ("accepted", "drafted"))
    assert 0 < accepted < drafted and {0, 1} <= seen


def _same_draft(state, row: int, want, is_chain: bool) -> None:
    """The draft that stands in the state for `row` is the draft `want` of one request, a chain cut to the budget."""
    live = int(want.lengths[0])
    if is_chain:
        live = max(min(live, int(state.limits[row] - state.lengths[row])), 1)
    assert int(state.draft.lengths[row]) == live
    np.testing.assert_array_equal(state.draft.tokens[row, :live], want.tokens[0, :live])
    np.testing.assert_array_equal(state.draft.parents[row, :live], want.parents[0, :live])


def _fresh_draft(drafter, params, target, state, row):
    """The draft for the committed tokens of `row`, whose features come from one pass of the target over all of them."""
    model, weights = target
    size = state.tokens.shape[1]
    index = jnp.arange(size, dtype=jnp.int32)
    count = state.lengths[row] - 1
    rows = Rows(
        tokens=state.tokens[row],
        request=jnp.zeros_like(index),
        node=index,
        positions=index,
        slots=index,
        valid=index < count,
        ancestors=None,
        starts=jnp.array([0, size], jnp.int32),
        width=size,
    )
    cache = model.init_cache(1, -(-size // 256) * 256, jax.tree.leaves(weights)[0].dtype)
    out = model.forward(weights, rows, cache, jnp.zeros((1,), jnp.int32), drafter.taps)
    given = Features(positions=index[None], count=count[None], taps=out.taps[None])
    tokens = jnp.pad(state.tokens[row], (0, 1))
    memory = drafter.prefill(params, drafter.init_state(1, size), jnp.int32(0), tokens, jnp.int32(0), count, given)
    alone = jax.tree.map(lambda x: x[row][None], dataclasses.replace(state.context, features=None))
    return drafter.draft(params, memory, alone, drafter.shape)[0]


# ---------------------------------------------------------------- the law of sampled drafts

VOCAB, DEPTH, TEMPERATURE, TOP_K, ROOT, LENGTH = 5, 2, 0.7, 4, 3, 3
BATCH, BATCHES = 1000, 8


def tabled(family: str, **options):
    """`(drafter, params, target)` on a bigram table of 5 tokens, drafting two at a time."""
    target = blocks.feature_target(VOCAB)
    few = {"selector_top_k": 3} if family in ("dflash2", "ubtree") else {}
    config = blocks.head_config(
        family, vocab_size=VOCAB, draft_vocab_size=VOCAB, mask_token_id=VOCAB - 1, num_layers=1, block_size=3, **few
    )
    return *blocks.build(config, target=target, num_speculative_tokens=DEPTH, **options), target


def check_sampled(drafter, params, target, rule: str) -> None:
    """Sampled drafts under a lossless rule: texts follow the target's law; drafts are right sometimes, not always."""
    settings = {"accept": rule, "draft_sampling": "sampled", "batch": BATCH, "context": 24}
    engine = toy.engine(drafter, params, target, **settings)
    counts, rounds, emitted = np.zeros((VOCAB,) * LENGTH, np.int64), 0, 0
    for number in range(BATCHES):
        tokens, used = _decode(engine, LENGTH + DEPTH, number)
        np.add.at(counts, tuple(tokens[:, :LENGTH].T), 1)
        rounds, emitted = rounds + used, emitted + tokens.size
    logits = np.asarray(target[1]["by_token"], np.float64)
    kept = np.where(logits >= np.sort(logits, axis=1)[:, [-TOP_K]], logits, -np.inf) / TEMPERATURE
    p = np.exp(blocks.log_softmax(kept))
    law = p[ROOT][:, None, None] * p[:, :, None] * p[None, :, :]
    assert abs(chi_square(counts, law)) < 4
    assert 1.1 < emitted / rounds < DEPTH + 0.9


def chi_square(counts: np.ndarray, law: np.ndarray) -> float:
    """Pearson's statistic in standard deviations from its mean; infinite if something impossible came out."""
    possible = law > 0
    if counts[~possible].any():
        return float("inf")
    want = counts.sum() * law[possible]
    statistic = ((counts[possible] - want) ** 2 / want).sum()
    freedom = possible.sum() - 1
    return float((statistic - freedom) / np.sqrt(2 * freedom))


def _decode(engine, new: int, number: int) -> tuple[np.ndarray, int]:
    """`new` tokens after the root in every row, each with a seed of its own; and the rounds of all rows together."""
    programs, state, rows = engine.programs, engine.programs.initial(), engine.config.batch
    seeds = np.stack([np.full(rows, number), np.arange(rows)], axis=1).astype(np.uint32)
    state = dataclasses.replace(
        state,
        tokens=state.tokens.at[:, 0].set(ROOT),
        prompt_lengths=jnp.ones((rows,), jnp.int32),
        limits=jnp.full((rows,), 1 + new, jnp.int32),
        active=jnp.ones((rows,), bool),
        sampling=dataclasses.replace(
            state.sampling,
            temperature=jnp.full((rows,), TEMPERATURE, jnp.float32),
            top_k=jnp.full((rows,), TOP_K, jnp.int32),
            seed=jnp.asarray(seeds),
        ),
    )
    used = 0
    while np.asarray(state.active).any():
        used += int(np.asarray(state.active).sum())
        state, _ = programs.draft(engine.params, state)
        state, _ = programs.verify(programs.widths[-1], engine.params, state)
    return np.asarray(state.tokens)[:, 1 : 1 + new], used
