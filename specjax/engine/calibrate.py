"""Latency tables by measurement: how long the programs of an engine really take, over requests, rows and context.

What is measured is what a round does. A pass is timed from its dispatch until the host has its tokens. A draft is timed
as the longer wait for a pass that is dispatched with it, since that is how a round runs it. What the host does besides
is the time of plain rounds of real requests beyond their pass.

The grid is not exhaustive. Its rows are those of the programs. Of requests and context the borders come first; then
the middle of the gap that a straight line misses by most, as long as that is more than `TOLERANCE`. The cross product
of the coordinates that this leaves is the table.
"""

import dataclasses
import datetime
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specjax.costmodel import isotonic, tables
from specjax.costmodel.decision import Decision
from specjax.costmodel.planner import Planner
from specjax.costmodel.scores import Nodes
from specjax.costmodel.tables import Grid, Provenance, Table
from specjax.draft import PLAIN, DraftShape
from specjax.drafters.drafter_set import DrafterSet
from specjax.engine import pinned
from specjax.engine.engine import Engine
from specjax.engine.pilot import Pilot
from specjax.engine.pricing import digest
from specjax.engine.state import State
from specjax.sampling import SamplingParams

TOLERANCE = 0.05  # by which a straight line may miss a measured point
POINTS = 7  # coordinates of an axis, at most: on a noisy machine every line seems bent
REPEATS, MOST = 3, 9  # measurements of a cell: at least, and at most where they disagree
SPREAD = 0.05  # agreement that is enough
CHEAP, OFTEN = 0.05, 8  # a draft below that share of a pass is made so many times
LEAST = 1e-6  # seconds; no price is nothing
SMALL_CONTEXT = 128
HOST_ROUNDS = 24
ASIDES = 5  # comparisons of rounds with a draft beside to rounds without


def calibrate(engine: Engine, wanted: Provenance, partial: Path, report: Callable[[str, int, int], None]) -> Table:
    """Measure a table for an engine with a set of drafters.

    Args:
        engine: warmed up.
        wanted: what the table will be good for.
        partial: file of the cells that are measured; what it holds already is not measured again. It is removed when
            the table is whole.
        report: called with `(what, done, total)`; the total grows where the grid is refined.

    Raises:
        ValueError: the engine has no set of drafters, or `partial` belongs to another set-up.
    """
    if not isinstance(engine.drafter, DrafterSet):
        raise ValueError("calibrate measures a set of drafters: give the engine drafter kind 'auto'")
    bench = _Bench(engine, Cells(partial, dataclasses.asdict(wanted)), report)
    batch, most = engine.config.batch, engine.drafter.shape.rows
    contexts = (min(SMALL_CONTEXT, engine.config.context // 4), engine.config.context - most - 1)
    live = bench.refined((1, batch), lambda b: bench.verify(b, 1, contexts[0]))
    # Passes come in the sizes that have programs: a table in their terms has the price of each.
    rows = sorted({width.count / batch for width in engine.programs.widths if width.count >= batch})
    context = bench.refined(contexts, lambda s: bench.verify(batch, most, s))
    bench.plan(len(live) * len(rows) * len(context) + len(engine.drafter.menu) * len(live) * len(context) + 3)
    verify = [[[bench.verify(b, r, s) for s in context] for r in rows] for b in live]
    draft = {shape: [[bench.draft(shape, b, s) for s in context] for b in live] for shape in engine.drafter.menu}
    kinds = [member.kind for member in engine.drafter.members if engine.drafter.reads_features(member.kind)]
    catch_up = {kind: (bench.catch_up(kind, batch, contexts[0]), 0.0) for kind in kinds}
    axes = tuple(tuple(map(float, axis)) for axis in (live, rows, context))
    table = Table(
        provenance=dataclasses.replace(wanted, date=datetime.date.today().isoformat(), made_by="specjax calibrate"),
        verify=Grid.of(axes, isotonic.monotone(np.array(verify)), "measured"),
        draft={
            shape: Grid.of((axes[0], axes[2]), isotonic.monotone(np.array(cells)), "measured")
            for shape, cells in draft.items()
        },
        fixed=LEAST,
        catch_up=catch_up,
    )
    table = dataclasses.replace(table, fixed=bench.fixed(contexts[0], table))
    table = dataclasses.replace(table, aside=bench.aside(batch, contexts[0], table))
    partial.unlink(missing_ok=True)
    return table


def table_path(wanted: Provenance, batch: int, folder: Path | None = None) -> Path:
    """Where the measured table of a set-up belongs: one file for each target, precision, drafters and batch."""
    drafters = digest(dict(wanted.drafter_digests or {}))  # the same weights may serve two kinds: eagle3, a hybrid
    name = f"{Path(wanted.target).name}-{wanted.dtype}-{wanted.target_digest}-{drafters}-b{batch}.json"
    return (folder or tables.default_folder()) / wanted.device / name


class Cells:
    """What was measured, by name, in a file that is replaced as a whole after each; `key` is of the set-up.

    Raises:
        ValueError: the file is another's.
    """

    def __init__(self, path: Path, key: dict[str, Any]):
        self.path, self.key = path, key
        self.values: dict[str, Any] = {}
        if path.exists():
            try:
                found = json.loads(path.read_text(encoding="utf-8"))
                key, values = found["key"], found["cells"]
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path} is no unfinished calibration ({error}); remove it to start anew") from None
            if key != self.key:
                raise ValueError(f"{path} is an unfinished calibration of another set-up; remove it to start anew")
            self.values = values

    def get(self, name: str, measure: Callable[[], Any]) -> Any:
        """The value of this name, measured unless it is there."""
        if name not in self.values:
            self.values[name] = measure()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            part = self.path.with_suffix(".part")
            part.write_text(json.dumps({"key": self.key, "cells": self.values}), encoding="utf-8")
            os.replace(part, self.path)
        return self.values[name]


class _Bench:
    """An engine's programs, run on a state that is set to the case before each measurement."""

    def __init__(self, engine: Engine, cells: Cells, report: Callable[[str, int, int], None]):
        self.engine, self.programs, self.params = engine, engine.programs, engine.params
        self.cells, self.report = cells, report
        self._done = self._total = 0
        self._state: State = pinned.fresh(engine)
        self._pin = jax.jit(pinned.pin, donate_argnums=0)

    def plan(self, cells: int) -> None:
        """So many cells are still to be looked up."""
        self._total = self._done + cells

    def refined(self, ends: Sequence[int], at: Callable[[int], float]) -> tuple[int, ...]:
        """Coordinates between which `at` is straight, ascending, the `ends` among them; at most `POINTS`."""
        known = {x: at(x) for x in dict.fromkeys(ends)}
        gaps = [(np.inf, *pair) for pair in itertools.pairwise(sorted(known))]
        while gaps and len(known) < POINTS:
            gaps.sort()
            _, low, high = gaps.pop()  # where a straight line missed by most
            middle = round((low * high) ** 0.5) if high > 2 * low else (low + high) // 2
            if middle in (low, high):
                continue
            known[middle] = at(middle)
            share = (middle - low) / (high - low)
            miss = abs((known[low] + share * (known[high] - known[low])) / known[middle] - 1)
            if miss > TOLERANCE:
                gaps += [(miss, low, middle), (miss, middle, high)]
        return tuple(sorted(known))

    def verify(self, live: int, rows: float, context: int) -> float:
        """Seconds of a pass of `rows` rows a request on average, for `live` requests, until the host has its tokens."""
        return self._cell(f"verify {live} {rows:g} {context}", lambda: self._pass(live, rows, context))

    def draft(self, shape: DraftShape, live: int, context: int) -> float:
        """Seconds that a draft adds to a plain pass; none, where every pass makes it."""
        name = f"draft {shape.kind} {shape.depth} {shape.branching} {shape.rows} {live} {context}"

        def measure() -> float:
            if shape == self.programs.lookup:
                return LEAST
            seconds = self._added(live, context, draft=shape)
            if seconds > CHEAP * self.verify(live, 1, context):
                return seconds
            return self._added(live, context, draft=shape, times=OFTEN)  # one is lost in what passes differ by

        return self._cell(name, measure)

    def catch_up(self, kind: str, live: int, context: int) -> float:
        """Seconds that taking in a full ring adds to a plain pass."""
        return self._cell(f"catch up {kind}", lambda: self._added(live, context, kind=kind))

    def fixed(self, context: int, table: Table) -> float:
        """Seconds of the host in a round, its decision included: rounds of one real request that draft nothing."""
        return self._cell("fixed", lambda: max(self._beyond(Planner(table, (), self._counts, 1), 1, context), LEAST))

    def aside(self, batch: int, context: int, table: Table) -> tuple[float, float]:
        """Seconds of the host for the cheapest draft beside a plain round: of one request, and of each further one."""

        def measure(live: int) -> float:
            cheapest = min(table.draft, key=lambda shape: table.draft_time(shape, live, context))
            if (drafting := table.draft_time(cheapest, live, context)) > CHEAP * self.verify(live, 1, context):
                return 0.0  # nothing rides along
            drafting *= not self._shares_processor  # the device's time is none of the host's
            found = []
            for _ in range(ASIDES):
                plain, taking = (Planner(table, (), self._counts, live), _Taking(cheapest, table, self._counts, live))
                found.append(self._beyond(taking, live, context) - self._beyond(plain, live, context) - drafting)
            return statistics.median(found)

        first, all_of_them = (self._cell(f"aside {live}", lambda live=live: measure(live)) for live in (1, batch))
        first = max(first, 0.0)
        return first, max(all_of_them - first, 0.0) / max(batch - 1, 1)

    @property
    def _counts(self) -> list[int]:
        return sorted({width.count for width in self.programs.widths})

    def _beyond(self, planner: Planner, live: int, context: int) -> float:
        """Median seconds of real rounds beyond their passes.

        Each is compared with a pass right after it, as passes drift by more than the host takes. Where they share a
        processor even these differ by more: there the host's time is that of its thread.
        """
        clock = time.thread_time if self._shares_processor else time.perf_counter

        def step() -> float:
            started = clock()
            self.engine.step()
            return clock() - started - self._once(live, 1, context, clock=clock)

        return self._rounds(planner, live, context, step)

    @property
    def _shares_processor(self) -> bool:
        """Whether the host computes where the programs do: then its time is seconds of their cores, whenever it is."""
        return jax.default_backend() == "cpu"

    def _rounds(self, planner: Planner, live: int, context: int, step: Callable[[], float]) -> float:
        """Median of `step` over rounds of `live` real requests, which `planner` decides."""
        engine = self.engine
        engine.reset()
        engine.pilot = Pilot(planner, engine.drafter, self.programs)
        prompt = [1] * max(context - HOST_ROUNDS, 1)
        for _ in range(live):
            engine.submit(prompt, SamplingParams(max_tokens=HOST_ROUNDS, ignore_eos=True))
        found = []
        while engine.busy:
            found.append(step())
        engine.reset()
        return statistics.median(found[1:])

    def _cell(self, name: str, measure: Callable[[], float]) -> float:
        value = self.cells.get(name, measure)
        self._done += 1
        self._total = max(self._total, self._done)
        self.report(name, self._done, self._total)
        return value

    def _pass(self, live: int, rows: float, context: int) -> float:
        """Median seconds of a pass."""
        times: list[float] = []
        while len(times) <= REPEATS or (len(times) <= MOST and _disagree(times[1:])):
            times.append(self._once(live, rows, context))
        return statistics.median(times[1:])  # the first warms caches

    def _added(
        self, live: int, context: int, draft: DraftShape | None = None, kind: str | None = None, times: int = 1
    ) -> float:
        """Median seconds that a draft (one of so many), or a member's catching up, adds to a plain pass.

        The two take turns: what is added may be a hundredth of the pass, which drifts by more than that meanwhile.
        """
        added: list[float] = []
        while len(added) <= REPEATS or (len(added) <= MOST and _disagree(added[1:])):
            alone = self._once(live, 1, context)
            added.append((self._once(live, 1, context, draft=draft, kind=kind, times=times) - alone) / times)
        return max(statistics.median(added[1:]), LEAST)

    def _once(
        self,
        live: int,
        rows: float,
        context: int,
        draft: DraftShape | None = None,
        kind: str | None = None,
        times: int = 1,
        clock: Callable[[], float] = time.perf_counter,
    ) -> float:
        """Seconds (of a clock) of a pass of `rows` rows a request on average, and of what is dispatched behind it."""
        each = np.zeros(self.programs.batch, int)
        each[:live] = np.diff(np.ceil(np.arange(live + 1) * rows)).astype(int)
        width, budgets = self.programs.fit(each), np.maximum(each, 1).astype(np.int32)
        lengths = np.where(each > 0, context, 1).astype(np.int32)
        state = jax.block_until_ready(self._pin(self._state, lengths, each > 0, budgets))
        started = clock()
        state, emitted = self.programs.verify(width, self.params, state, budgets)
        wait: Any = emitted
        if kind is not None:
            state = self.programs.catch_up(kind, self.params, state)
            wait = (emitted, state.lengths)
        if draft is not None:
            for _ in range(times):
                state, drafted = self.programs.draft_as(draft, self.params, state)
                wait = (emitted, drafted)
        jax.block_until_ready(jax.device_get(wait))
        jax.block_until_ready(state.lengths)
        seconds = clock() - started
        self._state = state
        return seconds


class _Taking(Planner):
    """Takes a draft along with every round, judges it, and verifies none."""

    def __init__(self, shape: DraftShape, table: Table, counts: Sequence[int], batch: int):
        super().__init__(table, (shape,), counts, batch, explore=False, scored=True)
        self._shape = shape

    def decide(self, rows: np.ndarray, context: float) -> Decision:
        return super().decide(rows, context)._replace(shape=PLAIN, shadow=self._shape, ride=True)

    def fit(
        self, decision: Decision, rows: np.ndarray, live: np.ndarray, context: float, nodes: Nodes | None = None
    ) -> Decision:
        super().fit(decision, rows, live, context, nodes)
        return decision._replace(rows=len(rows), budgets=np.ones(len(rows), int))


def _disagree(times: list[float]) -> bool:
    middle = statistics.median(times)
    return statistics.median(abs(t - middle) for t in times) > SPREAD * middle
