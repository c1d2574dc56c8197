"""The compiled programs of an engine, and the menu of verify sizes that bounds their number."""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.draft import DraftShape
from specjax.drafters.drafter_set import DrafterSet
from specjax.engine import prefill as entry
from specjax.engine import step
from specjax.engine.prefill import Insertion
from specjax.engine.proposal import packed
from specjax.engine.state import Emitted, State
from specjax.engine.step import Stage, Width
from specjax.pallas_kernels.dispatch import Kernels, traced_with

FEW = 3  # rows of a request that most rounds commit, at most


def verify_widths(batch: int, rows: int) -> tuple[Width, ...]:
    """The menu of verify sizes, narrow to wide: the fullest pass, halved as long as that is worth a program.

    A round in which no request has a draft runs one row a request, whatever the menu. Up to eight rows cost hardly
    more than two on any device (the weights are read once either way), so there is nothing between plain and eight.
    """
    plain = {Width(count, 1) for count in _halves(batch, least=1)}
    if rows == 1:
        drafted = set()
    elif batch == 1:
        drafted = {Width(count, count) for count in _halves(rows, least=8)}
    else:
        drafted = {Width(count, rows) for count in _halves(batch * rows, least=8)}
    return tuple(sorted(plain | drafted, key=lambda w: (w.width, w.count)))


def planned_widths(batch: int, rows: int) -> tuple[Width, ...]:
    """The menu where a planner cuts drafts: finer, as it fills a pass with the nodes that are worth their time."""
    counts = _halves(batch, least=1) | _halves(batch * rows, least=max(2, batch // 2))
    plain = {Width(count, 1) for count in _halves(batch, least=1)}
    drafted = {Width(count, count if batch == 1 else min(rows, count)) for count in counts if count > 1}
    return tuple(sorted(plain | drafted, key=lambda w: (w.count, w.width)))


def _halves(most: int, least: int) -> set[int]:
    counts = {most}
    while min(counts) // 2 >= least:
        counts.add(-(-min(counts) // 2))
    return counts


class Programs:
    """Everything that an engine runs on the device; nothing else is compiled once these are warm.

    Attributes:
        widths: verify sizes, narrow to wide.
        sizes: prefill chunk sizes, small to large.
        lookup: the shape that a pass of a set leaves drafted in the state; None where it leaves no draft.
        rounds: rounds that stay on the device; more than one are a program of their own (`spec_steps`), which takes the
            place of the verify programs.
    """

    def __init__(self, stage: Stage, batch: int, sizes: tuple[int, ...], rounds: int, initial: Callable[[], State]):
        self.stage, self.batch, self.sizes, self.rounds = stage, batch, sizes, rounds
        self.widths = verify_widths(batch, stage.shape.rows)
        self._members: dict[tuple[DraftShape, int], Callable] = {}
        self._catch_up: dict[str, Callable] = {}
        self._rooms: dict[str, tuple[int, ...]] = {}
        self.lookup: DraftShape | None = None
        a_pass: Callable = step.verify_commit
        if isinstance(stage.drafter, DrafterSet):
            self.widths = planned_widths(batch, stage.shape.rows)
            self._rooms = {member.kind: _rooms(stage.drafter, member.kind) for member in stage.drafter.members}
            self._members, self._catch_up = _member_programs(stage, stage.drafter, self._rooms)
            self.lookup, a_pass = stage.drafter.lookup, step.verify_and_look
        self.initial = jax.jit(initial)
        self._insert = jax.jit(entry.insert, donate_argnums=0)
        self._release = jax.jit(functools.partial(entry.release, stage), donate_argnums=0)
        self._prefill = {
            size: target_program(stage.kernels, functools.partial(entry.prefill, stage, size)) for size in sizes
        }
        self._verify = {w: target_program(stage.kernels, functools.partial(a_pass, stage, w)) for w in self.widths}
        self._draft = draft_program(traced_with(stage.kernels, functools.partial(_draft, stage)))
        self._many: dict[int, Callable] = {}

    @property
    def count(self) -> int:
        """Programs that warm-up compiles."""
        drafts = len(self._members) + len(self._catch_up) or int(self.stage.drafter is not None)
        return 3 + drafts + len(self._prefill) + (1 if self.rounds > 1 else len(self._verify))

    @property
    def drafts(self) -> tuple[tuple[DraftShape, int], ...]:
        """Draft programs of a set: the shape, and the rows of a request that may wait for it."""
        return tuple(self._members)

    def fit(self, live: np.ndarray) -> Width:
        """The narrowest verify size that holds `live` rows a request (0 for a request that takes no part)."""
        total, most = int(live.sum()), int(live.max())
        return next(w for w in self.widths if w.count >= total and w.width >= most)

    def insert(self, state: State, row: int, new: Insertion) -> State:
        return self._insert(state, np.int32(row), new)

    def release(self, state: State, row: int, length: int) -> State:
        return self._release(state, np.int32(row), np.int32(length))

    def prefill(self, params: Any, state: State, row: int, start: int, size: int) -> tuple[State, Emitted]:
        return self._prefill[size](params, state, np.int32(row), np.int32(start))

    def verify(
        self, width: Width, params: Any, state: State, budgets: np.ndarray | None = None
    ) -> tuple[State, Emitted]:
        return self._verify[width](params, state, budgets)

    def draft_as(self, shape: DraftShape, params: Any, state: State, waiting: int = 1) -> tuple[State, jax.Array]:
        """Redraft in a shape of the set's menu; also the draft for the host (`proposal.packed`).

        No more than `waiting` rows of a request wait for the shape's drafter, and no more than `DrafterSet.room`.
        """
        return self._members[shape, next(room for room in self._rooms[shape.kind] if room >= waiting)](params, state)

    def catch_up(self, kind: str, params: Any, state: State) -> State:
        """Let a member of a set take in all that waits for it. The draft that stands stays."""
        return dataclasses.replace(self._catch_up[kind](params, state)[0], draft=state.draft)

    def draft(self, params: Any, state: State) -> tuple[State, jax.Array]:
        """Redraft; also the live rows of each request (0: not active), for `fit`."""
        return self._draft(params, state)

    def many(self, rounds: int, params: Any, state: State):
        """Up to `rounds` rounds on the device: `(state, (emitted, live rows)[rounds, ...], ran)`."""
        if rounds not in self._many:
            function = functools.partial(step.spec_steps, self.stage, self.widths, rounds)
            self._many[rounds] = target_program(self.stage.kernels, function)
        return self._many[rounds](params, state)

    def chunks(self, length: int) -> list[tuple[int, int]]:
        """`(start, size)` of the prefill chunks of a prompt.

        Large chunks as long as they are at least half full, then small ones: padding is computed like real rows, while
        a further pass only reads the weights again.
        """
        plan, start, small, large = [], 0, self.sizes[0], self.sizes[-1]
        while start < length:
            size = large if length - start > large // 2 else small
            plan.append((start, size))
            start += size
        return plan

    def warm(self, params: Any, new: Insertion, report: Callable[[str, int, int], None]) -> float:
        """Compile and run every program once on an empty state, calling `report(name, done, total)`; seconds taken."""
        started, total = time.perf_counter(), self.count
        done = 0

        def tick(name: str) -> None:
            nonlocal done
            done += 1
            report(name, done, total)

        state = self.initial()
        tick("initial state")
        state = self.insert(state, 0, new)
        tick("insert")
        state = self.release(state, 0, 1)
        tick("release")
        for shape, room in self.drafts:
            state, _ = self.draft_as(shape, params, state, room)
            tick(f"draft {shape.kind} {shape.rows}")
        for kind in self._catch_up:
            state = self.catch_up(kind, params, state)
            tick(f"catch up {kind}")
        if self.stage.drafter is not None and not self._members:
            state, _ = self.draft(params, state)
            tick("draft")
        for size in self.sizes:
            state, _ = self.prefill(params, state, 0, 0, size)
            tick(f"prefill {size}")
        if self.rounds > 1:
            state, _, _ = self.many(self.rounds, params, state)
            tick(f"{self.rounds} rounds")
        budgets = np.ones((self.batch,), np.int32) if self._members else None
        for width in self.widths if self.rounds == 1 else ():
            state, _ = self.verify(width, params, state, budgets)
            tick(f"verify {width.count} rows")
        jax.block_until_ready(state.lengths)
        return time.perf_counter() - started


def target_program(kernels: Kernels, function: Callable) -> Callable:
    """Jit a program that runs the target, its state (second argument) donated.

    On a CPU the time goes into the matrix products of a library, and LLVM's higher levels only cost compile time: a
    third of it, for the same step (SmolLM2-135M: 7.6 against 5.1 CPU seconds a program, 55 ms a step either way).
    """
    options = {"xla_backend_optimization_level": 1} if jax.default_backend() == "cpu" else None
    return jax.jit(traced_with(kernels, function), donate_argnums=1, compiler_options=options)


def draft_program(function: Callable) -> Callable:
    """Jit a program that drafts, without the target's weights and cache, of which it reads nothing.

    Every buffer that a call hands over costs the host a few microseconds, and those are most of them. The draft that
    stands is not handed over either, and so stays what it is: whoever holds it may put it back.
    """
    program = jax.jit(function, donate_argnums=1)

    def call(params: Any, state: State) -> tuple:
        lean = dataclasses.replace(state, cache=None, draft=None)
        after, *rest = program({"drafter": params["drafter"]}, lean)
        return dataclasses.replace(after, cache=state.cache), *rest

    return call


def _draft(stage: Stage, params: Any, state: State) -> tuple[State, jax.Array]:
    state = step.redraft(stage, params, state)
    return state, jnp.where(state.active, state.draft.lengths, 0)


def _rooms(drafters: DrafterSet, kind: str) -> tuple[int, ...]:
    """Rows that a draft of a kind takes in first: what most rounds leave, what any round does, and what some leave.

    For a batch the rows of a round that verified a lookup cost as much as the draft itself, and hardly one is real.
    """
    if not drafters.reads_features(kind):
        return (drafters.room,)
    return tuple(sorted({min(FEW, drafters.steps), drafters.steps, drafters.room}))


def _member_programs(
    stage: Stage, drafters: DrafterSet, rooms: dict[str, tuple[int, ...]]
) -> tuple[dict[tuple[DraftShape, int], Callable], dict[str, Callable]]:
    """Draft programs for each shape of a set's menu, and one for each member that falls behind, to catch up."""
    drafts: dict[tuple[DraftShape, int], Callable] = {
        (shape, room): draft_program(functools.partial(_draft_as, stage, shape, room))
        for shape in drafters.menu
        for room in rooms[shape.kind]
    }
    catch_up: dict[str, Callable] = {}
    for shape in sorted(drafters.menu, key=lambda shape: -shape.rows):  # the smallest shape stays
        if drafters.reads_features(shape.kind):
            catch_up[shape.kind] = draft_program(functools.partial(_catch_up, stage, shape, drafters.ring))
    return drafts, catch_up


def _catch_up(stage: Stage, shape: DraftShape, ring: int, params: Any, state: State) -> tuple[State]:
    return (step.redraft_as(stage, shape, ring, params, state)[0],)


def _draft_as(stage: Stage, shape: DraftShape, room: int, params: Any, state: State) -> tuple[State, jax.Array]:
    state, scores = step.redraft_as(stage, shape, room, params, state)
    return state, packed(state, scores)
