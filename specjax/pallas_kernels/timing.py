"""The fastest of what a kernel may choose, by measurement: candidates that take turns, and a climb from the rule."""

import dataclasses
import importlib
import math
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax

from specjax.pallas_kernels.tuning import Tiles

Run = Callable[[int], Any]  # runs a kernel so many times, one after another, and returns what to wait for
Clock = Callable[[Run, int], float]  # seconds of that

SAMPLE = 0.02  # seconds of a sample: a launch is a small part of it
MOST = 10_000  # runs in a sample
TURNS = 7  # samples of each candidate
MARGIN = 0.03  # by which another choice must be faster
ROUNDS = 3  # of the climb


@dataclasses.dataclass(frozen=True)
class Found:
    """What a search came to.

    Attributes:
        tiles: the choice; the rule's, unless another was faster by `MARGIN`.
        seconds: of one run with it.
        rule_seconds: with the rule's, in the same turns; None where that does not run.
        tried: candidates that were timed.
        refused: candidates that did not compile or run, and what was said.
    """

    tiles: Tiles
    seconds: float
    rule_seconds: float | None
    tried: int
    refused: dict[Tiles, str]


def bench(kind: type[Tiles], sizes: Any, interpret: Any = False) -> Callable[[Tiles], Run]:
    """What makes a `Run` of a kernel for sizes, on random arrays, from its tiles."""
    op, _, name = kind.kernel.partition("/")
    module = importlib.import_module(f"specjax.pallas_kernels.{op}.bench")
    return module.bench(name, sizes, interpret)


def search(
    kind: type[Tiles],
    sizes: Any,
    make: Callable[[Tiles], Run],
    clock: Clock | None = None,
    tick: Callable[[int], None] = lambda seen: None,
) -> Found:
    """Climb from the rule to the best of the candidates around, as long as one is faster by `MARGIN`.

    `tick` is told how many candidates were compiled or refused so far.

    Raises:
        RuntimeError: nothing runs; the message has what was said of the rule's choice.
    """
    runs: dict[Tiles, Run] = {}
    refused: dict[Tiles, str] = {}
    clock = clock or wall

    def compared(tiles: Iterable[Tiles]) -> dict[Tiles, float]:
        """Seconds of each that runs; a candidate may be too much for the compiler or the device."""
        for one in tiles:
            if one in runs or one in refused:
                continue
            try:
                run = make(one)
                clock(run, 1)  # compiles
                runs[one] = run
            except Exception as error:
                refused[one] = f"{type(error).__name__}: {error}"
            tick(len(runs) + len(refused))
        return compare({one: runs[one] for one in tiles if one in runs}, clock)

    rule = best = kind.rule(sizes)
    for _ in range(ROUNDS):
        times = compared(list(best.around(sizes)))
        if not times:
            raise RuntimeError(f"{kind.kernel} does not run: {refused[rule]}")
        winner = min(times, key=lambda tiles: times[tiles])
        if times[winner] > (1 - MARGIN) * times.get(best, math.inf):
            break
        best = winner
    times = compared(list(dict.fromkeys((rule, best))))  # side by side: of many candidates, noise favours some
    if rule in times and times[best] > (1 - MARGIN) * times[rule]:
        best = rule
    return Found(best, times[best], times.get(rule), len(runs), refused)


def compare(runs: dict[Tiles, Run], clock: Clock) -> dict[Tiles, float]:
    """Median seconds of one run of each. They take turns, in another order each time, as a device drifts."""
    if not runs:
        return {}
    count = min(MOST, max(1, math.ceil(SAMPLE / min(clock(run, 1) for run in runs.values()))))
    samples: dict[Tiles, list[float]] = {tiles: [] for tiles in runs}
    order = list(runs)
    for turn in range(TURNS):
        shift = turn * len(order) // TURNS
        for tiles in order[shift:] + order[:shift]:
            samples[tiles].append(clock(runs[tiles], count) / count)
    return {tiles: statistics.median(found) for tiles, found in samples.items()}


def wall(run: Run, times: int) -> float:
    """Seconds on the clock, until the device is done."""
    started = time.perf_counter()
    jax.block_until_ready(run(times))
    return time.perf_counter() - started
