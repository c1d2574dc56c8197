"""The engine's surface: submit and step, run, generate, stream, what is refused, seeds, and what it says of itself."""

import numpy as np
import pytest
from support import tables, toy
from support.scripted import ScriptedTree
from support.text import byte_level

from specjax.config import ConfigError, RunConfig
from specjax.drafters.draft_model import DraftModel
from specjax.sampling import SamplingParams

TABLE = np.random.default_rng(8).normal(0, 2, (tables.VOCAB, tables.VOCAB))
PROMPTS = [[1, 2, 3], [4], [5, 6, 5, 6], [7, 8], [9], [2, 2, 2]]
PARAMS = [
    SamplingParams(max_tokens=n, temperature=t, seed=i)
    for i, (n, t) in enumerate(zip((9, 3, 14, 1, 6, 20), (0, 1, 0.5, 0, 1, 1), strict=True))
]


def drafts(most: int = 3) -> dict:
    """Something to accept now and then."""
    return tables.scripts(np.random.default_rng(9).integers(0, tables.VOCAB, (4, 64)), most)


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    """Each request by itself, nothing drafted."""
    engine = tables.engine(TABLE)
    return [engine.generate(prompt, params).token_ids for prompt, params in zip(PROMPTS, PARAMS, strict=True)]


def test_submit_and_step(alone):
    """Six requests in four rows; each chunk belongs to a request, and the last one of each says so."""
    engine = tables.engine(TABLE, drafts=drafts())
    ids = [engine.submit(prompt, params) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
    assert ids == list(range(ids[0], ids[0] + 6))
    assert len(engine.scheduler.waiting) == 6
    pieces, results = {index: [] for index in ids}, {}
    while engine.busy:
        for index, chunk in engine.step():
            assert index not in results
            pieces[index] += chunk.token_ids
            if chunk.result is not None:
                results[index] = chunk.result
        assert len(engine.scheduler.running) <= tables.BATCH
    assert engine.step() == []
    assert [pieces[index] for index in ids] == alone
    assert [results[index].token_ids for index in ids] == alone
    assert [results[index].prompt_tokens for index in ids] == [len(prompt) for prompt in PROMPTS]
    assert {r.finish_reason for r in results.values()} == {"length"}


def test_run_is_step_without_the_host(alone):
    engine = tables.engine(TABLE, drafts=drafts())
    ids = [engine.submit(prompt, params) for prompt, params in zip(PROMPTS[:4], PARAMS[:4], strict=True)]
    results = {}
    while engine.busy:
        results |= {index: chunk.result for index, chunk in engine.run(5) if chunk.result is not None}
    assert [results[index].token_ids for index in ids] == alone[:4]
    again = engine.generate(PROMPTS[:4], PARAMS[:4])
    assert [results[index].spec for index in ids] == [r.spec for r in again]


def test_a_loop_that_stays_on_the_device_by_configuration(alone):
    """Same answers and counters, whether asked for together or streamed; six requests in four rows."""
    engine, each = tables.engine(TABLE, drafts=drafts()), tables.engine(TABLE, drafts=drafts())
    expected = each.generate(PROMPTS, PARAMS)
    try:
        engine.config = engine.config.model_copy(update={"device_rounds": 5})
        found = engine.generate(PROMPTS, PARAMS)
        streamed = list(engine.stream(PROMPTS[2], PARAMS[2]))
    finally:
        engine.config = engine.config.model_copy(update={"device_rounds": 1})
    assert [r.token_ids for r in found] == alone
    assert [r.spec for r in found] == [r.spec for r in expected]
    assert [token for chunk in streamed for token in chunk.token_ids] == alone[2]


def test_steps_by_hand_leave_an_open_stream_its_chunks(alone):
    engine = tables.engine(TABLE, drafts=drafts())
    stream = engine.stream(PROMPTS[2], PARAMS[2])
    pieces = list(next(stream).token_ids)
    engine.step()
    engine.step()
    pieces += [token for chunk in stream for token in chunk.token_ids]
    assert pieces == alone[2]


def test_generate_takes_one_or_many(alone):
    engine = tables.engine(TABLE, drafts=drafts())
    assert [r.token_ids for r in engine.generate(PROMPTS, PARAMS)] == alone
    assert engine.generate(np.array(PROMPTS[0]), PARAMS[0]).token_ids == alone[0]
    assert engine.generate([PROMPTS[0]], PARAMS[0])[0].token_ids == alone[0]
    assert engine.generate([]) == []
    with pytest.raises(ValueError, match="2 prompts but 1 sampling parameters"):
        engine.generate(PROMPTS[:2], PARAMS[:1])


def test_streams_side_by_side(alone):
    """Each keeps its chunks for itself; a stream that nobody reads to its end is no one's result."""
    engine = tables.engine(TABLE, drafts=drafts())
    left = engine.stream(PROMPTS[5], PARAMS[5])
    next(left)
    left.close()
    streams = [engine.stream(prompt, params) for prompt, params in zip(PROMPTS[:3], PARAMS[:3], strict=True)]
    texts: list[list[int]] = [[], [], []]
    open_streams = {0, 1, 2}
    while open_streams:
        for i in sorted(open_streams):
            chunk = next(streams[i], None)
            if chunk is None:
                open_streams.remove(i)
            else:
                texts[i] += chunk.token_ids
        if open_streams == {0, 2}:
            assert engine.generate(PROMPTS[4], PARAMS[4]).token_ids == alone[4]
    assert texts == alone[:3]
    while engine.busy:
        engine.step()


def test_refusals_leave_nothing_behind():
    engine = tables.engine(TABLE)
    vocab = tables.VOCAB
    cases = [
        ([], None, "the prompt is empty"),
        ([0, vocab], None, rf"prompt ids must be in 0..{vocab - 1}, got 0..{vocab}"),
        ([-1], None, "prompt ids must be in"),
        (
            [1] * tables.CONTEXT,
            None,
            rf"has {tables.CONTEXT} tokens and context is {tables.CONTEXT}.*at least {tables.CONTEXT + 128}",
        ),
        ([1], SamplingParams(stop=("x",)), "stop strings need a tokenizer"),
        ([1], SamplingParams(stop_token_ids=(vocab,)), rf"end tokens must be in 0..{vocab - 1}, got \[{vocab}\]"),
        ([1], SamplingParams(stop_token_ids=tuple(range(16)) + (3,) * 4), None),
        ([1], SamplingParams(logit_bias={vocab: 1.0}), f"logit_bias names token {vocab}"),
        ("text", None, "no tokenizer"),
    ]
    for prompt, params, message in cases:
        if message is None:  # 16 different end tokens are the most that fit
            engine.submit(prompt, params)
            engine.scheduler.waiting.clear()
            continue
        with pytest.raises(ValueError, match=message):
            engine.submit(prompt, params)
    with pytest.raises(ValueError, match="the prompt is empty"):
        engine.generate([[1], []])
    assert not engine.busy


def test_the_context_ends_a_request():
    """The budget is cut to what the context holds, prompt included."""
    engine = tables.engine(TABLE, drafts=drafts(12))
    result = engine.generate([1] * (tables.CONTEXT - 5), SamplingParams(max_tokens=50))
    assert (len(result.token_ids), result.finish_reason) == (5, "length")


def test_seeds():
    """A seed is a text, alone, in a batch and in any row; without one, the run's seed plus the request's number."""
    engine = tables.engine(TABLE, drafts=drafts())
    params = [SamplingParams(max_tokens=12, temperature=1.0, seed=seed) for seed in (5, 6, 5, 2**64 - 1)]
    first, second, third, fourth = (r.token_ids for r in engine.generate([[1]] * 4, params))
    assert first == third == engine.generate([1], params[0]).token_ids
    assert len({tuple(first), tuple(second), tuple(fourth)}) == 3
    free = SamplingParams(max_tokens=12, temperature=1.0)
    one, two = (engine.generate([1], free).token_ids for _ in range(2))
    assert one != two
    number = engine._submitted - 2
    assert one == engine.generate([1], SamplingParams(max_tokens=12, temperature=1.0, seed=number)).token_ids


def test_text_prompts():
    """Raw text is encoded as it is; other text and messages go through the chat template, which must exist."""
    tokenizer = byte_level([b"a", b"b", b"c"])
    engine = tables.engine(TABLE, tokenizer=tokenizer)
    assert engine.encode("b", raw=True) == [1]
    assert engine.encode([1, np.int64(2)]) == [1, 2]
    for prompt in ("b", [{"role": "user", "content": "b"}]):
        with pytest.raises(ValueError, match="no chat template"):
            engine.submit(prompt)
    assert engine.generate("b", SamplingParams(max_tokens=2), raw=True).prompt_tokens == 1


def test_results_come_in_order_as_soon_as_they_are_there(alone):
    engine = tables.engine(TABLE, drafts=drafts())
    found = []
    for result in engine.results(PROMPTS, PARAMS):
        found.append(result.token_ids)
        if len(found) == 1:
            assert engine.busy, "the first is handed out while the others decode"
    assert found == alone
    half = engine.results(PROMPTS, PARAMS)
    next(half)
    half.close()
    assert not engine.busy, "what nobody reads is given up"


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (None, "got NoneType"),
        (5, "got int"),
        (b"hi", "got bytes"),
        ([True, False], "got bool"),
        ([{"role": "user", "content": "b"}, 3], "holds something else"),
        ("", "the prompt is empty"),
        ("a\ud800b", "half of a surrogate pair"),
    ],
)
def test_what_is_no_prompt_is_refused(prompt, words):
    engine = tables.engine(TABLE, tokenizer=byte_level([b"a", b"b"]))
    with pytest.raises(ValueError, match=words):
        engine.generate(prompt)
    assert not engine.busy


def test_counters_and_times():
    engine = tables.engine(by_position=toy.favourites(tables.VOCAB, 1, [3] * 20), drafts=tables.scripts([[3] * 64], 4))
    result = engine.generate([1], SamplingParams(max_tokens=13))
    assert result.spec.to_dict() == {
        "rounds": 3,
        "drafted": 9,
        "accepted": 9,
        "acceptance_length": 4.0,
        "per_position": [1.0, 2 / 3, 2 / 3, 2 / 3],
    }
    timing = result.timing
    assert timing.tokens == 13
    assert timing.prefill_s > 0
    assert timing.tokens_per_s == pytest.approx(12 / timing.decode_s)


def test_rounds_with_all_rows_full_are_counted_apart():
    """Six requests in four rows, plainly: of 2, 5, 3, 4, 3 and 6 tokens, the first of each prefill's."""
    engine = tables.engine(TABLE)
    engine.reset()
    budgets = [2, 5, 3, 4, 3, 6]
    prompts = [[1], [2], [3], [4], [5], [6]]
    engine.generate(prompts, [SamplingParams(max_tokens=n, ignore_eos=True) for n in budgets])
    counters = engine.counters
    # The first ends after a round and the fifth follows, the third after two and the sixth follows; the fourth and the
    # fifth end after three, and nobody waits.
    assert counters.full_tokens == 3 * 4
    assert counters.rounds == 2 + 5
    assert 0 < counters.full_s < counters.decode_s


def test_describe():
    engine = tables.engine(TABLE)
    said = engine.describe()
    assert said["drafter"] == "scripted-runs"
    assert said["shape"] == {"kind": "scripted-runs", "depth": 12, "branching": 1, "rows": 13}
    assert (said["accept"], said["dtype"], said["batch"], said["context"]) == ("tree", "float32", 4, tables.CONTEXT)
    assert said["weights_bytes"] == 4 * (tables.VOCAB**2 + tables.POSITIONS * tables.VOCAB)
    assert said["kv_bytes_per_token"] == 2 * 2 * 2 * 8 * 4  # of the tiny configuration that the table carries


def test_another_drafter_on_the_same_weights():
    engine = tables.engine(TABLE)
    other = engine.with_drafter("ngram", context=64)
    assert (other.drafter.kind, other.describe()["shape"]["depth"], other.config.context) == ("ngram", 5, 64)
    assert other.params["target"] is engine.params["target"]
    assert engine.config.context == tables.CONTEXT
    assert engine.with_drafter("none").drafter is None
    with pytest.raises(ConfigError, match="did you mean 'ngram'"):
        engine.with_drafter("ngrams")
    with pytest.raises(ConfigError, match="contxt"):
        engine.with_drafter("ngram", contxt=64)
    for changed in ({"dtype": "bfloat16"}, {"target": "other"}, {"decode_step": "fused"}):
        with pytest.raises(ConfigError, match=f"shares the weights that are there, so {next(iter(changed))} cannot"):
            engine.with_drafter("none", **changed)
    with pytest.raises(ConfigError, match="context is 1000, but the target was loaded for 512 positions"):
        engine.with_drafter("none", context=1000)


def test_rules_that_do_not_fit_are_refused():
    """Before anything is compiled."""
    with pytest.raises(ValueError, match="needs a drafter with a distribution"):
        RunConfig(draft_sampling="sampled", compilation_cache=None)
    with pytest.raises(ConfigError, match="'chain' takes chains only"):
        toy.engine(ScriptedTree(), (), accept="chain")
    with pytest.raises(ValueError, match="deterministic drafts, but draft_sampling is 'sampled'"):
        toy.engine(accept="tree", draft_sampling="sampled")
    with pytest.raises(ValueError, match="is .sampled., but the draft_model drafter was built for determ"):
        toy.engine(DraftModel(model=toy.tiny()[0], num_speculative_tokens=2), (), draft_sampling="sampled")
    with pytest.raises(ValueError, match="is .deterministic., but the draft_model drafter was built for sampled"):
        toy.engine(DraftModel(model=toy.tiny()[0], num_speculative_tokens=2, sampled=True), ())
