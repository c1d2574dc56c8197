"""The law of what comes out where drafts are sampled, and the text of a seed where they are not."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from support import toy

from specjax.drafters.draft_model import DraftModel
from specjax.drafters.ngram import NGram
from specjax.drafters.suffix import Suffix
from specjax.sampling import SamplingParams

VOCAB, DEPTH, TEMPERATURE, TOP_K = 5, 2, 0.7, 4
BATCH, BATCHES, ROOT, LENGTH = 1000, 10, 3, 3
RULES = ("chain", "block", "recursive")


def bigrams(seed: int) -> dict:
    """A table of logits by last token, at a scale where target and drafter differ clearly."""
    return toy.lookup(VOCAB, by_token=1.5 * np.random.default_rng(seed).standard_normal((VOCAB, VOCAB)))


TARGET, DRAFT = 1, 2


def conditionals(seed: int) -> np.ndarray:
    """Next-token probabilities by last token, after top-k and temperature; in numpy."""
    logits = np.asarray(bigrams(seed)["by_token"], np.float64)
    kept = np.where(logits >= np.sort(logits, axis=1)[:, [-TOP_K]], logits, -np.inf)
    mass = np.exp((kept - kept.max(axis=1, keepdims=True)) / TEMPERATURE)
    return mass / mass.sum(axis=1, keepdims=True)


def sequence_law(seed: int, root: int = ROOT) -> np.ndarray:
    """Probability of each sequence of LENGTH tokens after `root`."""
    p = conditionals(seed)
    law = np.eye(VOCAB)[root]
    for _ in range(LENGTH):
        law = law[..., None] * p
    return law.sum(axis=0) if law.ndim > LENGTH else law


def chi_square(counts: np.ndarray, law: np.ndarray) -> float:
    """Pearson's statistic in standard deviations from its mean; infinite if something impossible came out."""
    possible = law > 0
    if counts[~possible].any():
        return float("inf")
    want = counts.sum() * law[possible]
    statistic = ((counts[possible] - want) ** 2 / want).sum()
    freedom = possible.sum() - 1
    return float((statistic - freedom) / np.sqrt(2 * freedom))


def sampled_engine(rule: str, batch: int):
    model, params = toy.LookupTarget(toy.tiny_config(vocab_size=VOCAB)), bigrams(TARGET)
    drafter = DraftModel(model=model, num_speculative_tokens=DEPTH, sampled=True)
    settings = {"accept": rule, "draft_sampling": "sampled", "batch": batch, "context": 24}
    return toy.engine(drafter, bigrams(DRAFT), (model, params), **settings)


def decode(engine, new: int, batch_number: int) -> np.ndarray:
    """`new` tokens after the root, in every batch row with a seed of its own."""
    programs, state, rows = engine.programs, engine.programs.initial(), engine.config.batch
    seeds = np.stack([np.full(rows, batch_number), np.arange(rows)], axis=1).astype(np.uint32)
    settings = dataclasses.replace(
        state.sampling,
        temperature=jnp.full((rows,), TEMPERATURE, jnp.float32),
        top_k=jnp.full((rows,), TOP_K, jnp.int32),
        seed=jnp.asarray(seeds),
    )
    state = dataclasses.replace(
        state,
        tokens=state.tokens.at[:, 0].set(ROOT),
        prompt_lengths=jnp.ones((rows,), jnp.int32),
        limits=jnp.full((rows,), 1 + new, jnp.int32),
        active=jnp.ones((rows,), bool),
        sampling=settings,
    )
    for _ in range(new):
        state, _ = programs.draft(engine.params, state)
        state, _ = programs.verify(programs.widths[-1], engine.params, state)
    assert not np.asarray(state.active).any()
    return np.asarray(state.tokens)[:, 1 : 1 + new]


def tally(tokens: np.ndarray) -> np.ndarray:
    counts = np.zeros((VOCAB,) * LENGTH, np.int64)
    np.add.at(counts, tuple(tokens[:, :LENGTH].T), 1)
    return counts


@pytest.mark.parametrize("rule", RULES)
def test_sampled_drafts_follow_the_target(rule):
    """Two tokens more than the law is taken of, so that no draft that matters is cut by the budget.

    Block verification reads drafts that it does not accept: random numbers met twice would show here.
    """
    engine = sampled_engine(rule, BATCH)
    tokens = np.concatenate([decode(engine, LENGTH + DEPTH, number) for number in range(BATCHES)])
    counts = tally(tokens)
    assert abs(chi_square(counts, sequence_law(TARGET))) < 4
    assert chi_square(counts, sequence_law(DRAFT)) > 1000  # the test tells the two laws apart


def test_through_submit_and_step():
    """The host's side of it: prompts prefilled, rows used again and again, drafts cut by the budget."""
    engine = sampled_engine("block", 4)
    params = [SamplingParams(max_tokens=4, temperature=TEMPERATURE, top_k=TOP_K, seed=seed) for seed in range(800)]
    results = engine.generate([[ROOT]] * len(params), params)
    counts = tally(np.array([r.token_ids for r in results]))
    assert abs(chi_square(counts, sequence_law(TARGET))) < 4
    assert 0 < sum(r.spec.accepted for r in results) < sum(r.spec.drafted for r in results)
    alone = [engine.generate([ROOT], p).token_ids for p in params[::100]]
    assert alone == [r.token_ids for r in results[::100]]


def test_same_seed_same_text_whatever_the_drafter():
    """Deterministic drafts and the tree rule: the text is plain decoding's, to the token, at temperature 1."""
    target = toy.LookupTarget(toy.tiny_config(vocab_size=VOCAB)), bigrams(TARGET)
    drafters = {
        "none": (None, ()),
        "ngram": (NGram(num_speculative_tokens=3, prompt_lookup_min=1), ()),
        "suffix": (Suffix(num_speculative_tokens=3), ()),
        "draft_model": (DraftModel(model=target[0], num_speculative_tokens=3), bigrams(TARGET)),
    }
    prompts = [[3, 1, 2, 3, 1, 2, 3], [0], [4, 4, 1], [2, 0, 2, 0, 2]]
    params = [
        SamplingParams(max_tokens=24, temperature=1.0, seed=seed, top_p=p) for seed, p in enumerate((1, 1, 0.9, 1))
    ]
    texts, accepted = {}, {}
    for name, (drafter, weights) in drafters.items():
        engine = toy.engine(drafter, weights, target, batch=2, context=64)
        results = engine.generate(prompts, params)
        texts[name] = [r.token_ids for r in results]
        accepted[name] = sum(r.spec.accepted for r in results)
    assert all(text == texts["none"] for text in texts.values())
    assert accepted.pop("none") == 0
    assert min(accepted.values()) > 0
    assert len({tuple(text) for text in texts["none"]}) == 4
