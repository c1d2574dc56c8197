"""What must hold of any drafter in an engine, whatever it drafts."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from specjax.sampling import SamplingParams
from support import blocks, engines, toy

PROMPTS = ([3, 1, 4, 1, 5], [2], [1, 6, 0, 2, 3, 5, 3, 6, 1, 4, 4, 1, 2, 0, 3, 5, 1, 2, 6, 0, 2])
NEW, SMALL_VOCAB = 24, 7


def small_target(dtype=jnp.float32):
    """A target of 7 tokens, few enough that the drafts of a random drafter are right now and then."""
    model, weights = toy.tiny(vocab_size=SMALL_VOCAB)
    return model, jax.tree.map(lambda x: x.astype(dtype), weights)


def small(family: str, dtype=jnp.float32, options=None, **changes):
    """A random block drafter on the small target: `(drafter, params, target)`."""
    target = small_target(dtype)
    few = {"selector_top_k": 5} if family in ("dflash2", "ubtree") else {}
    config = blocks.head_config(
        family, vocab_size=SMALL_VOCAB, draft_vocab_size=SMALL_VOCAB, mask_token_id=SMALL_VOCAB - 1, **(few | changes)
    )
    drafter, weights = blocks.build(config, target=target, dtype=dtype, **(options or {}))
    return drafter, weights, target


@functools.cache
def _plain():
    engine = engines.narrow(toy.engine(target=small_target(), batch=len(PROMPTS)))
    return [r.token_ids for r in engine.generate(list(PROMPTS), SamplingParams(max_tokens=NEW))]


def check_greedy(drafter, params, target, expected=None) -> None:
    """A batch of ragged prompts at temperature 0, some drafts of which are accepted and some not.

    The text is the target's own, and in every round the draft is that of a drafter which meets the committed tokens for
    the first time, whatever was accepted or rejected before (trap 16). `expected(text)` may say the first tokens of the
    chain that must be drafted after a text.
    """
    engine = engines.narrow(toy.engine(drafter, params, target, batch=len(PROMPTS)))
    drafts = watched(engine)
    for prompt in PROMPTS:
        engine.submit(list(prompt), SamplingParams(max_tokens=NEW))
    results, accepted = {}, set()
    while engine.busy:
        chunks = engine.step()
        results |= {index: chunk.result for index, chunk in chunks if chunk.result is not None}
        accepted |= {len(chunk.token_ids) - 1 for _, chunk in chunks}
    assert [results[index].token_ids for index in range(len(PROMPTS))] == _plain()
    right, drafted = (sum(getattr(r.spec, name) for r in results.values()) for name in ("accepted", "drafted"))
    assert 0 < right < drafted and {0, 1} <= accepted

    if expected is not None:
        told = 0
        for text, _, tokens, _ in drafts:
            want = expected(text)[: len(tokens) - 1]
            assert tokens[1 : 1 + len(want)] == want
            told += len(want)
        assert told > len(drafts)

    # Each text again, as a prompt whose first new token is the root: the same programs, a new request.
    made, met = list(drafts), []
    drafts.clear()
    for start in range(0, len(made), len(PROMPTS)):
        texts = made[start : start + len(PROMPTS)]
        ids = [engine.submit(list(text[:-1]), SamplingParams(max_tokens=room + 1)) for text, room, *_ in texts]
        engine.step()
        for index in ids:
            engine.abort(index)
        met += drafts
        drafts.clear()
    assert met == made


def watched(engine) -> list:
    """What every verify pass is about to check: `(text, room, tokens, parents)` of each request, live nodes only."""
    seen, verify = [], engine.programs.verify

    def watching(width, params, state):
        rows = jax.device_get((state.tokens, state.lengths, state.limits, state.draft, state.active))
        for text, length, limit, draft, active in zip(*rows[:3], _rows(rows[3]), rows[4], strict=True):
            if active:
                tokens, parents, live = draft
                room = int(limit - length)
                seen.append((tuple(text[:length].tolist()), room, tokens[:live].tolist(), parents[:live].tolist()))
        return verify(width, params, state)

    engine.programs.verify = watching
    return seen


def _rows(draft):
    return zip(draft.tokens, draft.parents, draft.lengths, strict=True)


def check_bfloat16(drafter, params, target) -> None:
    """Decoding runs in bfloat16 and fills its budget; rounding may choose between equals, so no text is expected."""
    assert drafter.dtype == "bfloat16" and drafter.init_state(1, 8).k[0].dtype == jnp.bfloat16
    engine = engines.narrow(toy.engine(drafter, params, target, batch=len(PROMPTS)))
    results = engine.generate(list(PROMPTS), SamplingParams(max_tokens=NEW))
    assert [len(result.token_ids) for result in results] == [NEW] * len(PROMPTS)
    assert sum(result.spec.accepted for result in results) > 0


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
