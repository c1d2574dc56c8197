"""A stand-in for the engine, so that the command line is tested without a model."""

import dataclasses

import pytest

from specjax.cli import flags, machine
from specjax.config import RunConfig
from specjax.engine.counters import Counters
from specjax.engine.request import Chunk, Result, SpecStats, Timing, TokenLogprob
from specjax.engine.scheduler import Scheduler

PLAIN_STEP = 0.01  # seconds a round


class FakeEngine:
    """Answers with its prompt's last word, spelled token by token; drafts are right `accepts` at a time."""

    def __init__(self, run: RunConfig, accepts: int = 0, offset: int = 0):
        self.run, self.accepts, self.offset = run, accepts, offset
        self.asked: list = []
        self.params_given: list = []
        self.family = [self]  # and the engines that `with_drafter` made of it
        self.forgot = 0
        self.drafters: list = []
        self.pilot = FakePilot() if run is not None and run.drafter.kind == "auto" else None
        self.counters, self.scheduler = Counters(), Scheduler(1, None, 0)
        self.drafter, self.target, self.params, self.config = None, None, {"target": None, "drafter": None}, run

    def with_drafter(self, drafter, *, quiet=True, **overrides):
        self.drafters.append(drafter)
        accepts = {"ngram": 1, "suffix": 3}.get(drafter.kind, 0)
        self.family.append(FakeEngine(self.run.model_copy(update={"drafter": drafter}), accepts, self.offset))
        return self.family[-1]

    def check(self, prompt, params=None, *, raw=False):
        if "far too long" in str(prompt):
            raise ValueError("the prompt has 9000 tokens and context is 2048")

    def encode(self, prompt):
        return [ord(letter) for letter in prompt[-1]["content"]]

    def reset(self):
        self.forgot += 1
        self.counters = Counters()

    def describe(self):
        return {
            "target": self.run.target,
            "drafter": self.run.drafter.kind,
            "dtype": "float32",
            "device": "cpu",
            "batch": self.run.batch,
            "programs": 7,
            "weights_bytes": 4_000_000,
            "kv_bytes_per_token": 100,
        }

    def generate(self, prompts, params=None, *, raw=False):
        self.asked.append(prompts)
        each = list(params) if isinstance(params, list) else [params] * len(prompts)
        self.params_given.append(each)
        left = range(len(prompts) - 1, -1, -1)
        return [self._result(*one, waiting=more > 0) for *one, more in zip(prompts, each, left, strict=True)]

    def results(self, prompts, params=None, *, raw=False):
        yield from self.generate(prompts, params, raw=raw)

    def stream(self, prompt, params=None, *, raw=False):
        result = self._result(prompt, params)
        yield Chunk(result.text[:2], result.token_ids[:2])
        yield Chunk(result.text[2:], result.token_ids[2:], result)

    def _result(self, prompt, params, waiting=False):
        text = (prompt if isinstance(prompt, str) else prompt[-1]["content"]).split()[-1][: params.max_tokens]
        spec, left = SpecStats(), len(text) - 1
        while left:
            accepted = min(self.accepts, left - 1)
            spec.add_round(drafted=self.accepts, accepted=accepted)
            left -= accepted + 1
        self.counters.spec.merge(spec)
        self.counters.tokens += len(text)
        self.counters.decode_s += spec.rounds * PLAIN_STEP
        self.counters.rounds += spec.rounds
        if waiting:
            self.counters.full_tokens += len(text) - 1
            self.counters.full_s += spec.rounds * PLAIN_STEP
        shift = self.offset if self.run.drafter.kind != "none" else 0
        ids = [ord(letter) + shift for letter in text]
        logprobs = [TokenLogprob(token=i, logprob=-0.5, rank=1, top=((i, -0.5),)) for i in ids]
        return Result(
            text=text,
            token_ids=ids,
            finish_reason="length" if len(text) == params.max_tokens else "stop",
            prompt_tokens=3,
            logprobs=logprobs if params.logprobs is not None else None,
            spec=spec,
            timing=Timing(prefill_s=0.5, decode_s=spec.rounds * PLAIN_STEP, tokens=len(ids)),
        )


class FakePilot:
    """A planner that has changed its mind once."""

    def report(self):
        plain = {"kind": "none", "depth": 0, "branching": 1, "rows": 1}
        lookup = {"kind": "ngram", "depth": 5, "branching": 1, "rows": 6}
        return {
            "rounds": 12,
            "shape": {"kind": "eagle3", "depth": 3, "branching": 4, "rows": 12},
            "time_error_median": 0.05,
            "tokens_error_median": 0.1,
            "tokens_bias": -0.02,
            "calibration_error": {"ngram": 0.031},
            "scores": {"ngram": [{"said": 0.5, "accepted": 0.41, "drafts": 12.0}], "mtp": []},
            "reasons": {"best": 30, "scores": 10},
            "exploration_s": 0.002,
            "seconds": 0.4,
            "host_s": {"decide": 0.001, "fit": 0.0002, "learn": 0.002},
            "switches": [{"round": 3, "from": plain, "to": lookup, "reason": "trial"}] * 14,
        }


@pytest.fixture
def engines(monkeypatch):
    """The engines that a command loads; `engines.offset` makes drafted tokens differ from plain ones."""

    @dataclasses.dataclass
    class Loaded:
        offset: int = 0
        compiled: int = 0
        made: list = dataclasses.field(default_factory=list)

        @property
        def every(self):
            return [engine for made in self.made for engine in made.family]

    loaded = Loaded()

    def load(run, *, quiet, check=None):
        loaded.made.append(FakeEngine(run, offset=loaded.offset))
        if check is not None:
            check(loaded.made[-1])
        loaded.compiled += 1
        return loaded.made[-1]

    monkeypatch.setattr(flags, "load_engine", load)
    monkeypatch.setattr(machine, "ceiling", lambda dtype: {"read_gb_s": 20.0, "gflop_s": 100.0})
    return loaded
