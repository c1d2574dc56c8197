"""Where a request ends: end tokens, the budget and the context, also in the middle of an accepted run."""

import functools

import numpy as np
import pytest
from support import engines, toy
from support.scripted import ScriptedRuns

from specjax.sampling import SamplingParams

VOCAB, CONTEXT, PAGE, POSITIONS = 16, 64, 16, 160
A, B, C, D, E, F = range(1, 7)
EOS, OTHER_EOS = 9, 10
TEXT = [A, B, EOS, C, D, E]


@functools.cache
def shared():
    """Two rows, paged, K = 5; the model has two end tokens."""
    config = toy.tiny_config(vocab_size=VOCAB, eos_token_ids=(EOS, OTHER_EOS))
    target = toy.LookupTarget(config), toy.lookup(VOCAB, POSITIONS)
    return toy.engine(ScriptedRuns(5), (), target, batch=2, context=CONTEXT, page_size=PAGE)


class Run:
    """One request on the shared engine: its target says `text` behind `prompt`, its drafter proposes `drafts` there."""

    def __init__(self, monkeypatch, text, prompt=(7, 8, 7), drafts=None, most=5):
        self.engine, self.prompt, self.calls = shared(), list(prompt), {"verify": 0, "draft": 0, "prefill": 0}
        assert not self.engine.busy
        script = np.full((2, POSITIONS), -1, np.int32)
        drafts = text if drafts is None else drafts
        script[:, len(self.prompt) : len(self.prompt) + len(drafts)] = drafts
        rows = toy.favourites(VOCAB, len(self.prompt), text)
        self.engine.params = {
            "target": toy.lookup(VOCAB, POSITIONS, by_position=rows),
            "drafter": {"script": script, "most": np.full((2,), most, np.int32)},
        }
        self.free = self.engine.scheduler.free_pages
        for name in self.calls:
            self._count(monkeypatch, name, getattr(self.engine.programs, name))

    def _count(self, monkeypatch, name, program):
        def counted(*args):
            self.calls[name] += 1
            return program(*args)

        monkeypatch.setattr(self.engine.programs, name, counted)

    def generate(self, max_tokens, **options):
        """The result; its row and pages are free again, and a further step runs nothing."""
        result = self.engine.generate(self.prompt, SamplingParams(max_tokens=max_tokens, **options))
        assert self.engine.scheduler.free_pages == self.free
        assert not self.engine.busy
        before = dict(self.calls)
        assert self.engine.step() == []
        assert self.calls == before
        return result


@pytest.mark.parametrize("eos", [EOS, OTHER_EOS])
def test_an_end_token_inside_an_accepted_run(monkeypatch, eos):
    """Either of the model's two end tokens; all five drafts would have been accepted."""
    run = Run(monkeypatch, [A, B, eos, C, D, E])
    result = run.generate(6, logprobs=2)
    assert result.token_ids == [A, B, eos]
    assert result.finish_reason == "stop"
    assert len(result.logprobs) == 3
    assert [entry.token for entry in result.logprobs] == result.token_ids
    assert run.calls["verify"] == 1
    # The last token of a round counts as the target's own.
    assert (result.spec.rounds, result.spec.accepted) == (1, 1)


def test_nothing_of_it_reaches_a_stream(monkeypatch):
    run = Run(monkeypatch, TEXT)
    chunks = list(run.engine.stream(run.prompt, SamplingParams(max_tokens=6)))
    assert [t for chunk in chunks for t in chunk.token_ids] == [A, B, EOS]
    assert [chunk.result is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert run.calls["verify"] == 1


def test_a_stop_token_of_the_request(monkeypatch):
    run = Run(monkeypatch, [A, B, C, D, E, F])
    result = run.generate(6, stop_token_ids=(D, F))
    assert (result.token_ids, result.finish_reason) == ([A, B, C, D], "stop")
    assert run.calls["verify"] == 1


def test_ignore_eos(monkeypatch):
    run = Run(monkeypatch, TEXT)
    result = run.generate(6, ignore_eos=True)
    assert (result.token_ids, result.finish_reason) == (TEXT, "length")
    run = Run(monkeypatch, TEXT)
    assert run.generate(6, ignore_eos=True, stop_token_ids=(C,)).token_ids == [A, B, EOS, C]


def test_a_rejected_end_token_ends_nothing(monkeypatch):
    text = [A, B, C, D, E, F, A, B]
    run = Run(monkeypatch, text, drafts=[A, B, EOS, EOS, E, F, OTHER_EOS, B])
    result = run.generate(8)
    assert (result.token_ids, result.finish_reason) == (text, "length")


@pytest.mark.parametrize("most", [0, 1, 2, 5])
def test_an_end_token_at_every_place_of_a_round(monkeypatch, most):
    """As the last accepted draft, as the target's own token, and in a round without drafts."""
    for length in range(1, 8):
        text = [A, B, C, D, E, F, A, B][: length - 1] + [EOS, C, C, C, C, C]
        result = Run(monkeypatch, text, most=most).generate(12)
        assert (result.token_ids, result.finish_reason) == (text[:length], "stop")


def test_an_end_token_from_prefill(monkeypatch):
    run = Run(monkeypatch, [EOS, A, B])
    result = run.generate(6)
    assert (result.token_ids, result.finish_reason, result.spec.rounds) == ([EOS], "stop", 0)
    assert run.calls["verify"] == 0


@pytest.mark.parametrize("budget", range(1, 9))
def test_the_budget_inside_an_accepted_run(monkeypatch, budget):
    text = [A, B, C, D, E, F, A, B, C, D, E, F]
    run = Run(monkeypatch, text)
    result = run.generate(budget)
    assert (result.token_ids, result.finish_reason) == (text[:budget], "length")
    assert run.calls["verify"] == -(-(budget - 1) // 6)
    assert result.spec.drafted == result.spec.accepted == budget - 1 - result.spec.rounds


def test_an_end_token_as_the_last_token_of_the_budget(monkeypatch):
    result = Run(monkeypatch, TEXT).generate(3)
    assert (result.token_ids, result.finish_reason) == ([A, B, EOS], "stop")


@pytest.mark.parametrize("left", range(1, 9))
def test_the_end_of_the_context_inside_an_accepted_run(monkeypatch, left):
    """`left` tokens fit behind the prompt, whatever the budget."""
    text = [A, B, C, D, E, F, A, B, C, D, E, F]
    run = Run(monkeypatch, text, prompt=[7] * (CONTEXT - left))
    result = run.generate(100)
    assert (result.token_ids, result.finish_reason) == (text[:left], "length")
    assert run.calls["verify"] == -(-(left - 1) // 6)


def test_a_prompt_of_one_token(monkeypatch):
    result = Run(monkeypatch, TEXT, prompt=[3]).generate(6)
    assert (result.token_ids, result.prompt_tokens) == ([A, B, EOS], 1)


def test_two_requests_end_apart(monkeypatch):
    """The row that goes on is not disturbed, and pages return one request at a time."""
    run = Run(monkeypatch, [A, B, C, D, E, F, A, B, C])
    engine, done = run.engine, {}
    short, long = (engine.submit(run.prompt, SamplingParams(max_tokens=n)) for n in (3, 9))
    free = []
    while engine.busy:
        done |= {index: chunk.result for index, chunk in engine.step() if chunk.result is not None}
        free.append(engine.scheduler.free_pages)
    assert done[short].token_ids == [A, B, C]
    assert done[long].token_ids == [A, B, C, D, E, F, A, B, C]
    assert free == [run.free - 2, run.free]  # 3 + 9 tokens and 6 draft rows need two pages


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt is empty"),
        ([1] * CONTEXT, r"has 64 tokens and context is 64: shorten it, or set context to at least 70"),
        ([1, VOCAB], r"prompt ids must be in 0\.\.15, got 1\.\.16"),
        ([-1], r"prompt ids must be in 0\.\.15"),
        ("text", "no tokenizer"),
    ],
)
def test_prompts_that_cannot_run(prompt, message):
    engine = shared()
    with pytest.raises(ValueError, match=message):
        engine.submit(prompt, SamplingParams(max_tokens=6))
    assert not engine.busy


def test_impossible_end_tokens_are_refused():
    with pytest.raises(ValueError, match=r"end tokens must be in 0\.\.15, got \[9, 10, 16\]"):
        shared().submit([1], SamplingParams(stop_token_ids=(VOCAB,)))
    with pytest.raises(ValueError, match="at most 16 end tokens a request, got 17"):
        engines.plain().submit([1], SamplingParams(stop_token_ids=tuple(range(17))))
    assert not shared().busy
    assert not engines.plain().busy
