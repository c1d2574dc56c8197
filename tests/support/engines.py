"""Compiled engines on the tiny target that the engine's tests share, and the scripts their drafters follow."""

import functools
from collections.abc import Sequence

import numpy as np

from specjax.engine.engine import Engine
from specjax.engine.request import Result, SpecStats
from specjax.engine.step import Width
from specjax.sampling import SamplingParams
from support import toy
from support.scripted import ScriptedChain, ScriptedRuns, ScriptedTree

POSITIONS = 160  # of a script; more than the context

# The target's path is 0 -> 3 -> 9 -> 13 -> 16. Nodes 5 and 12 carry the right token of their depth on a wrong path.
TREE_OF_17 = ScriptedTree(
    parents=(-1, 0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 6, 8, 9, 10, 12, 13),
    offsets=(0, 1, 2, 0, 1, 0, 1, 2, 1, 0, 1, 1, 0, 0, 1, 1, 0),
)

SETUPS = {
    "K=1": (ScriptedChain(1), {}),
    "K=4": (ScriptedChain(4), {}),
    "K=7": (ScriptedChain(7), {}),
    "K=4 paged": (ScriptedChain(4), {"page_size": 16}),
    "tree of 6": (ScriptedTree(), {}),
    "tree of 17": (TREE_OF_17, {}),
    "K=4 batch paged": (ScriptedChain(4), {"batch": 4, "page_size": 16}),
    "K<=7 batch": (ScriptedRuns(7), {"batch": 4}),
    "tree of 6 batch": (ScriptedTree(), {"batch": 4}),
    "tree of 6 batch paged": (ScriptedTree(), {"batch": 4, "page_size": 16}),
    "tree of 17 batch paged": (TREE_OF_17, {"batch": 4, "page_size": 16}),
}

FULL_MENU = ("K=4", "K<=7 batch", "K=4 batch paged")  # the others run a part of it, see `narrow`


@functools.cache
def plain() -> Engine:
    """One request at a time, no drafter, dense cache."""
    return toy.engine()


@functools.cache
def _engine(name: str) -> Engine:
    drafter, options = SETUPS[name]
    made = toy.engine(drafter, (), **options)
    return made if name in FULL_MENU else narrow(made)


def narrow(engine: Engine) -> Engine:
    """Two verify sizes, one row a request and the widest, so that less has to compile."""
    programs = engine.programs
    programs.widths = (Width(programs.batch, 1), programs.widths[-1])
    return engine


def engine(name: str, scripts: Sequence[np.ndarray], most=7) -> Engine:
    """The compiled engine of a setup, its drafter following `scripts`, one a batch row (without: no drafts).

    `most` bounds the drafts of each row where the setup says `K<=7`.
    """
    shared = _engine(name)
    assert not shared.busy, "an earlier test has left requests behind"
    batch = shared.config.batch
    script = np.full((batch, POSITIONS), -1, np.int32)
    if len(scripts):
        script[: len(scripts)] = scripts
    runs = isinstance(shared.drafter, ScriptedRuns)
    most = np.broadcast_to(np.asarray(most, np.int32), (batch,)).copy()
    shared.params = {**shared.params, "drafter": {"script": script, "most": most} if runs else script}
    return shared


def prompt(length: int, seed: int) -> list[int]:
    """A random prompt."""
    return np.random.default_rng(seed).integers(0, toy.VOCAB, length).tolist()


def solo(prompt: Sequence[int], params: SamplingParams) -> Result:
    """What plain decoding says to one prompt alone."""
    key = (tuple(prompt), repr(params))  # a logit bias is a dict, so parameters have no hash
    if key not in _known:
        _known[key] = plain().generate(list(prompt), params)
    return _known[key]


_known: dict[tuple, Result] = {}


def script(prompt: Sequence[int], ids: Sequence[int], wrong_every: int = 0, shift: int = 1) -> np.ndarray:
    """A script that proposes `ids` behind `prompt`, each `wrong_every`-th of them wrong (0: none, 1: all).

    The first of `ids` comes from prefill and is never proposed; counting starts behind it.
    """
    out = np.full((POSITIONS,), -1, np.int32)
    tokens = np.array(ids, np.int32)
    if wrong_every:
        wrong = (np.arange(len(ids)) % wrong_every == 0) & (np.arange(len(ids)) > 0)
        tokens = np.where(wrong, (tokens + shift) % toy.VOCAB, tokens)
    out[len(prompt) : len(prompt) + len(ids)] = tokens
    return out


def decode(engine: Engine, prompts, params, device_rounds: int | None = None) -> list[Result]:
    """Results of `prompts`, by `Engine.step`, or by `Engine.run` with so many rounds on the device at a time."""
    each = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
    ids = [engine.submit(prompt, p) for prompt, p in zip(prompts, each, strict=True)]
    results = {}
    while engine.busy:
        for index, chunk in engine.step() if device_rounds is None else engine.run(device_rounds):
            if chunk.result is not None:
                results[index] = chunk.result
    return [results[index] for index in ids]


def expected_stats(drafter, follows: np.ndarray, prompt: Sequence[int], ids: Sequence[int], most: int = 7) -> SpecStats:
    """The counters of a request whose drafts follow a script, worked out without an engine.

    Args:
        drafter: a scripted drafter.
        follows: its script.
        prompt: the prompt.
        ids: what the target says.
        most: the most drafts of a round, where the drafter is a `ScriptedRuns`.
    """
    stats, done = SpecStats(), 1
    while done < len(ids):
        at, room = len(prompt) + done, len(ids) - done
        right = 0
        while right < drafter.shape.depth and done + right < len(ids) and follows[at + right] == ids[done + right]:
            right += 1
        if drafter.shape.is_chain:
            # Drafts past the budget are not made: a round emits one token more than it accepts.
            drafted = min(drafter.shape.depth, room - 1, most if isinstance(drafter, ScriptedRuns) else room)
            right = min(right, drafted)
        else:
            drafted, right = drafter.shape.rows - 1, min(right, room - 1)
        stats.add_round(drafted, right)
        done += right + 1
    return stats
