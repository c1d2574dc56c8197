"""A request that is given up: its row and pages are free, the others do not notice (C23, offline part)."""

import pytest
from support import toy

from specjax.drafters.ngram import NGram
from specjax.sampling import SamplingParams

PROMPTS = [[1, 2, 3, 4, 5], [9, 8, 7], [20, 21, 22, 20, 21]]
PARAMS = SamplingParams(max_tokens=24)


@pytest.fixture(scope="module")
def engine():
    return toy.engine(NGram(), batch=2, page_size=16)


@pytest.fixture(scope="module")
def alone(engine):
    return [engine.generate(prompt, PARAMS).token_ids for prompt in PROMPTS]


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_the_others_get_their_own_answer(engine, alone, steps):
    free = engine.scheduler.free_pages
    ids = [engine.submit(prompt, PARAMS) for prompt in PROMPTS]
    results = {}

    def step():
        results.update({i: chunk.result for i, chunk in engine.step() if chunk.result is not None})

    for _ in range(steps):
        step()
    assert engine.abort(ids[1])
    assert not engine.abort(ids[1]), "aborted twice"
    while engine.busy:
        step()
    assert {i: results[i].token_ids for i in (ids[0], ids[2])} == {ids[0]: alone[0], ids[2]: alone[2]}
    assert ids[1] not in results
    assert engine.scheduler.free_pages == free
    assert not engine.abort(ids[0]), "it has ended"
    assert not engine.abort(12345), "it never existed"
    assert engine.generate(PROMPTS[1], PARAMS).token_ids == alone[1], "the slot serves the next request"


def test_a_stream_that_nobody_reads_on_is_given_up(engine, alone):
    stream = engine.stream(PROMPTS[0], PARAMS)
    next(stream)
    stream.close()
    assert not engine.busy
    assert engine.generate(PROMPTS[2], PARAMS).token_ids == alone[2]
