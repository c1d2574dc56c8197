"""Penalties, `min_tokens` and `logit_bias` count tokens, whatever a round drafts (case C17)."""

import dataclasses

import numpy as np
import pytest
from support import tables, toy
from support.engines import TREE_OF_17

from specjax.sampling import SamplingParams

A, B, C, EOS = 0, 1, 2, 3
V = tables.VOCAB
PROMPT = [C, C, 5]


def constant(**logits: float) -> np.ndarray:
    """The same logits after every token: those given, far below everything else."""
    row = np.full(V, -50.0, np.float32)
    for name, value in logits.items():
        row[{"A": A, "B": B, "C": C, "EOS": EOS}[name]] = value
    return np.tile(row, (V, 1))


def always(*tokens: int) -> list[list[int]]:
    """For each row, one token at every position."""
    return [[token] * tables.POSITIONS for token in tokens]


def penalised(by_token: np.ndarray, prompt: list[int], params: SamplingParams, eos: int | None = None) -> list[int]:
    """Greedy decoding, one token at a time: what `SamplingParams` says, in numpy."""
    text = list(prompt)
    while len(text) < len(prompt) + params.max_tokens:
        logits = np.array(by_token[text[-1]], np.float32)
        new = text[len(prompt) :]
        for token, value in params.logit_bias.items():
            logits[token] += np.float32(value)
        for token in range(V):
            factor = np.float32(params.repetition_penalty)
            if token in text:
                logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
            logits[token] -= np.float32(params.frequency_penalty) * np.float32(new.count(token))
            logits[token] -= np.float32(params.presence_penalty) * (token in new)
        if eos is not None and len(new) < params.min_tokens:
            logits[eos] = -np.inf
        text.append(int(np.argmax(logits)))
        if text[-1] == eos:
            break
    return text[len(prompt) :]


@pytest.mark.parametrize("most", range(7))
def test_the_handed_sequence(most):
    """AABABABABA with any number of drafts; without the penalty, ten A, and all drafts accepted."""
    engine = tables.engine(constant(A=5, B=4, C=0), drafts=tables.scripts(always(A, A), most))
    kept, ignored = engine.generate(
        [PROMPT] * 2, [SamplingParams(max_tokens=10, frequency_penalty=0.6), SamplingParams(max_tokens=10)]
    )
    assert "".join("AB"[token] for token in kept.token_ids) == "AABABABABA"
    assert ignored.token_ids == [A] * 10
    assert ignored.spec.rounds == -(-9 // (most + 1))
    assert kept.spec.rounds > ignored.spec.rounds or most < 2


MIXED = [
    SamplingParams(max_tokens=20, frequency_penalty=0.7),
    SamplingParams(max_tokens=20, presence_penalty=1.3, logit_bias={7: 1.0, 2: -2.0}),
    SamplingParams(max_tokens=20, repetition_penalty=1.4),
    SamplingParams(max_tokens=20),
]


@pytest.fixture(scope="module")
def random_table():
    return np.random.default_rng(5).normal(0, 2, (V, V)).astype(np.float32)


@pytest.mark.parametrize("most", range(1, 7))
@pytest.mark.parametrize("wrong", [0, 3])
def test_mixed_penalties_in_a_batch(random_table, most, wrong):
    """Each row counts its own text; drafts are right, wrong at every third token, or (row 3) meant for a neighbour."""
    prompts = [[1, 4, 4], [9, 9, 2], [3, 8, 1], [6, 1, 1]]
    want = [penalised(random_table, prompt, params) for prompt, params in zip(prompts, MIXED, strict=True)]
    drafts = [[(t + (wrong > 0 and i % wrong == 2)) % V for i, t in enumerate(row)] for row in [*want[:3], want[0]]]
    engine = tables.engine(random_table, drafts=tables.scripts(drafts, most, start=3))
    results = engine.generate(prompts, MIXED)
    assert [r.token_ids for r in results] == want
    assert len({tuple(row) for row in want}) == 4
    if not wrong:
        assert [r.spec.rounds for r in results[:3]] == [-(-19 // (most + 1))] * 3


def test_penalties_on_a_tree_count_a_nodes_own_path(random_table):
    """Siblings and cousins carry tokens of other paths; a node's history is the text, its ancestors and itself."""
    model, _ = toy.lookup_target(V)
    drafter = dataclasses.replace(TREE_OF_17, vocab=V)
    script = np.full((2, tables.POSITIONS), -1, np.int32)
    prompts, each = [[1, 4, 4], [3, 8, 1]], [MIXED[0], MIXED[2]]
    want = [penalised(random_table, prompt, p) for prompt, p in zip(prompts, each, strict=True)]
    for row, ids in enumerate(want):
        script[row, 3 : 3 + len(ids)] = ids
    target = model, toy.lookup(V, by_token=random_table)
    engine = toy.engine(drafter, script, target, batch=2, context=64)
    results = engine.generate(prompts, each)
    assert [r.token_ids for r in results] == want
    assert all(r.spec.acceptance_length > 2 for r in results), "the tree's deep path is taken"


def test_repetition_counts_the_prompt_and_the_others_do_not():
    engine = tables.engine(constant(A=5, B=4.5, C=1))
    params = [
        SamplingParams(max_tokens=1, **{name: 2.0})
        for name in ("repetition_penalty", "presence_penalty", "frequency_penalty")
    ]
    assert [r.token_ids for r in engine.generate([[A, 5]] * 3, params)] == [[B], [A], [A]]


@pytest.mark.parametrize("most", range(7))
def test_min_tokens(most):
    """The end token is everybody's favourite; it comes as token 7, not after 7 rounds, also where it is drafted."""
    drafts = [[A] * 30, [EOS] * 30, [A, A, EOS] * 10, [B] * 30]
    engine = tables.engine(constant(A=5, EOS=9), drafts=tables.scripts(drafts, most, start=len(PROMPT)))
    params = SamplingParams(max_tokens=20, min_tokens=6, stop_token_ids=(EOS,))
    for result in engine.generate([PROMPT] * 4, params):
        assert result.token_ids == [A] * 6 + [EOS]
        assert result.finish_reason == "stop"


def test_min_tokens_in_numpy_too(random_table):
    params = SamplingParams(
        max_tokens=20, min_tokens=5, stop_token_ids=(EOS,), frequency_penalty=0.4, logit_bias={EOS: 20.0}
    )
    want = penalised(random_table, PROMPT, params, eos=EOS)
    engine = tables.engine(random_table, drafts=tables.scripts([want], 4, start=len(PROMPT)))
    assert engine.generate(PROMPT, params).token_ids == want
    assert len(want) == 6


@pytest.mark.parametrize("most", [0, 1, 4])
def test_logit_bias(most):
    """It forbids, it favours, and it applies at every node of a draft."""
    engine = tables.engine(constant(A=5, B=4, C=0), drafts=tables.scripts(always(A, B, C), most))
    biases = [{A: -100.0}, {C: 6.0}, {A: -1.5, B: 1.0, C: 5.5}]
    results = engine.generate([PROMPT] * 3, [SamplingParams(max_tokens=8, logit_bias=bias) for bias in biases])
    assert [r.token_ids for r in results] == [[B] * 8, [C] * 8, [C] * 8]
    with pytest.raises(ValueError, match=f"logit_bias names token {V}"):
        engine.generate(PROMPT, SamplingParams(logit_bias={V: 1.0}))
