"""A row of a ragged batch is what it would be alone, whatever its neighbours do."""

import itertools

import jax
import numpy as np
import pytest
from support import engines

from specjax.sampling import SamplingParams, neutral

BATCH = 4
PROMPTS = [engines.prompt(3, 3), engines.prompt(7, 1), engines.prompt(12, 1), engines.prompt(9, 3)]
NEW = SamplingParams(max_tokens=24)
# Wrong drafts at every, every third and no position: 0, 2 and 4 of 4 are accepted in each round.
WRONG_EVERY = [1, 3, 0, 2]


def ending(prompt, params):
    """The same parameters with an end token: one that the row first says as its eighth token or later."""
    ids = engines.solo(prompt, params).token_ids
    token = next(t for i, t in enumerate(ids) if i >= 7 and t not in ids[:i])
    return SamplingParams(**{**vars(params), "stop_token_ids": (token,)})


def cases(params=NEW):
    """The four requests: row 1 ends first, at an end token."""
    each = list(params) if isinstance(params, list) else [params] * len(PROMPTS)
    return [
        (p, ending(p, q) if i == 1 else q, WRONG_EVERY[i]) for i, (p, q) in enumerate(zip(PROMPTS, each, strict=True))
    ]


def decode(requests, name="K<=7 batch"):
    """The requests in rows 0, 1, 2 ... of the batch, their drafts wrong as they say; results in that order."""
    alone = [engines.solo(prompt, params) for prompt, params, _ in requests]
    scripts = [
        engines.script(prompt, one.token_ids, every) for (prompt, _, every), one in zip(requests, alone, strict=True)
    ]
    engine = engines.engine(name, scripts, most=4)
    got = engines.decode(engine, [r[0] for r in requests], [r[1] for r in requests])
    return alone, got


def check(requests, name="K<=7 batch"):
    alone, got = decode(requests, name)
    for want, result in zip(alone, got, strict=True):
        assert result.token_ids == want.token_ids
        assert result.finish_reason == want.finish_reason
    return alone, got


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_three_rows_and_a_padding_row_in_every_order(order):
    requests = [cases()[i] for i in order]
    _, got = check(requests)
    by_case = dict(zip(order, got, strict=True))
    assert by_case[0].spec.accepted == 0
    assert by_case[0].spec.rounds == 23
    assert by_case[1].finish_reason == "stop"
    assert 8 <= len(by_case[1].token_ids) < 24
    assert by_case[1].spec.rounds == -(-(len(by_case[1].token_ids) - 1) // 3)
    assert max(len(r.spec.accepted_at) for r in got) == 4
    assert by_case[2].spec.rounds == 5  # 23 tokens, 5 a round


def test_the_last_valid_row():
    """Row 2, behind which there is only padding; it runs longest, and alone from the moment that the others end."""
    short = SamplingParams(max_tokens=4)
    requests = [(PROMPTS[0], short, 1), (PROMPTS[1], short, 0), (PROMPTS[2], NEW, 3)]
    alone, got = check(requests)
    last, want = got[2], alone[2]
    assert last.token_ids == want.token_ids
    assert len(last.token_ids) == 24


@pytest.mark.parametrize("name", ["K<=7 batch", pytest.param("K=4 batch paged", marks=pytest.mark.slow)])
def test_four_rows(name):
    check(cases(), name)


def test_greedy_and_sampled_rows_side_by_side():
    """Fixed seeds: the text of a row is its own, with drafts and without, in every place of the batch."""
    mixed = [
        NEW,
        SamplingParams(max_tokens=24, temperature=0.7, seed=11),
        SamplingParams(max_tokens=24, temperature=0.9, top_k=5, seed=12),
        SamplingParams(max_tokens=24, temperature=1.3, top_p=0.8, seed=13),
    ]
    requests = cases(mixed)
    for shift in range(4):
        check(requests[shift:] + requests[:shift])
    greedy = [engines.solo(p, NEW).token_ids for p in PROMPTS[1:]]
    assert all(engines.solo(p, q).token_ids != g for (p, q, _), g in zip(requests[1:], greedy, strict=True))


def test_a_seed_is_all_that_a_row_shares_with_its_copy():
    """The same prompt four times: equal seeds give equal texts, others do not."""
    seeds = (1, 2, 1, 3)
    requests = [(PROMPTS[3], SamplingParams(max_tokens=24, temperature=0.9, seed=s), 2) for s in seeds]
    _, got = check(requests)
    texts = [tuple(r.token_ids) for r in got]
    assert texts[0] == texts[2]
    assert len(set(texts)) == 3


def test_logprobs_of_a_batch():
    asked = SamplingParams(max_tokens=24, logprobs=3)
    alone, got = check(cases(asked))
    for want, result in zip(alone, got, strict=True):
        for one, other in zip(want.logprobs, result.logprobs, strict=True):
            assert (one.token, one.rank) == (other.token, other.rank)
            np.testing.assert_allclose(one.logprob, other.logprob, atol=1e-5)
            np.testing.assert_allclose([x for _, x in one.top], [x for _, x in other.top], atol=1e-4, rtol=1e-5)


def test_a_row_that_is_left_out_has_no_stale_draft():
    """Row 1 ends with drafts standing; the request that takes its place has none, and is not offered the old ones."""
    requests = cases()[:3]
    scripts = [engines.script(p, engines.solo(p, q).token_ids, every) for p, q, every in requests]
    engine = engines.engine("K<=7 batch", scripts, most=4)
    ids = [engine.submit(p, q) for p, q, _ in requests]
    results = {}
    while ids[1] not in results:
        results |= {i: chunk.result for i, chunk in engine.step() if chunk.result is not None}
    # Nothing stands in the freed row, while its neighbours' drafts do.
    live = np.asarray(engine.programs.draft(engine.params, jax.tree.map(lambda x: x.copy(), engine._state))[1])
    assert live[1] == 0
    assert live[3] == 0
    assert live[0] > 1
    scripts[1] = np.full_like(scripts[1], -1)
    engine.params = {
        **engine.params,
        "drafter": {**engine.params["drafter"], "script": np.stack([*scripts, scripts[1]])},
    }
    late = engine.submit(PROMPTS[3], NEW)
    while engine.busy:
        results |= {i: chunk.result for i, chunk in engine.step() if chunk.result is not None}
    assert results[late].token_ids == engines.solo(PROMPTS[3], NEW).token_ids
    assert results[late].spec.drafted == 0
    for index, (prompt, params, _) in zip(ids, requests, strict=True):
        assert results[index].token_ids == engines.solo(prompt, params).token_ids


def test_more_requests_than_rows():
    """Rows are filled again as they become free, first come first served; every text is its own."""
    lengths = (5, 24, 1, 9, 17, 3, 24, 2, 12, 6)
    prompts = [engines.prompt(3 + 2 * i, i) for i in range(len(lengths))]
    params = [SamplingParams(max_tokens=n) for n in lengths]
    follow = engines.script(prompts[1], engines.solo(prompts[1], params[1]).token_ids)
    engine = engines.engine("K<=7 batch", [follow] * BATCH, most=4)
    order, results = [], {}
    ids = [engine.submit(p, q) for p, q in zip(prompts, params, strict=True)]
    while engine.busy:
        assert len(engine.scheduler.running) <= BATCH
        for index, chunk in engine.step():
            if index not in order:
                order.append(index)
            if chunk.result is not None:
                results[index] = chunk.result
    assert order == ids
    for index, prompt, one in zip(ids, prompts, params, strict=True):
        assert results[index].token_ids == engines.solo(prompt, one).token_ids


def test_empty_rows_carry_neutral_parameters():
    state = engines.engine("K<=7 batch", []).programs.initial()
    jax.tree.map(np.testing.assert_array_equal, state.sampling, neutral(BATCH, state.sampling.bias_tokens.shape[1]))
    assert state.sampling.temperature.tolist() == [1.0] * BATCH
    assert not np.asarray(state.active).any()
