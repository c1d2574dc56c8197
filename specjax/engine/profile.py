"""What each phase of a round takes on the device here: every phase as a program of its own, and the round beside them.

Phases are cut where `engine/step.py` and the decoder cut themselves, and run on a state that is set to the case before
each measurement. Apart they miss what the compiler would fuse across their borders, and each has a launch, so their sum
is not the round: both are shown.
"""

import contextlib
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.config import RunConfig
from specjax.draft import pack
from specjax.drafters.drafter_set import DrafterSet
from specjax.engine import pinned, step
from specjax.engine.drafter import make_drafter
from specjax.engine.engine import Engine
from specjax.engine.precision import hold, value_dtype
from specjax.engine.programs import target_program
from specjax.engine.state import State
from specjax.engine.step import Stage, Width
from specjax.targets import decoder, fused, phases
from specjax.targets.config import DecoderConfig
from specjax.targets.decoder import Output, Target

LAUNCH, VERIFY, ROUND, SERVED = "launch", "verify pass", "round", "served round"
WHOLE = (VERIFY, ROUND, SERVED)  # programs that hold several phases

Phase = Callable[..., tuple[State, Any]]  # (params, state, *args) -> (state, what it makes)


@dataclasses.dataclass(frozen=True)
class Timed:
    """Seconds from a program's dispatch until its results are there: the median of some runs, and their range."""

    seconds: float
    least: float
    most: float

    @classmethod
    def of(cls, times: Sequence[float]) -> "Timed":
        return cls(statistics.median(times), min(times), max(times))


def layer_phases(target: Any) -> tuple[str, ...]:
    """The phases that the layers of a target can be cut into; those of a fused step are one."""
    return ("qkv", "attention", "output", "mlp") if isinstance(target, Target) else ("layers",)


def programs(stage: Stage, width: Width, dtype: Any) -> dict[str, tuple[Phase, tuple]]:
    """The functions of a round's phases and the shapes of their arguments behind `(params, state)`.

    Args:
        stage: what an engine compiles against.
        width: the verify pass.
        dtype: of activations.
    """
    c, count, target = stage.target.config, width.count, stage.target

    def shape(*size: int, kind: Any = dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(size, kind)

    def rows(state: State) -> Any:
        return pack(state.draft, state.lengths - 1, count, width.width, state.active)

    def with_cache(state: State, cache: Any) -> State:
        return dataclasses.replace(state, cache=cache)

    def qkv(params, state, x):
        return state, phases.qkv(target, params["target"], x, rows(state))

    def attention(params, state, heads):
        y, cache = phases.attention(target, params["target"], heads, state.cache, state.lengths - 1, rows(state))
        return with_cache(state, cache), y

    def output(params, state, x, y):
        return state, phases.output(target, params["target"], x, y)

    def mlp(params, state, x):
        return state, phases.mlp(target, params["target"], x)

    def layers(params, state):
        out = target.forward(params["target"], rows(state), state.cache, state.lengths - 1, stage.taps)
        return with_cache(state, out.cache), (out.hidden, out.taps)

    def head(params, state, x):
        return state, target.logits(params["target"], x)

    def accept(params, state, logits):
        return state, step.accept_path(stage, width, logits, rows(state), state)

    def commit(params, state, hidden, taps, logits, draft, accepted):
        out = Output(hidden=hidden, taps=taps, cache=state.cache)
        return step.commit(stage, width, state, rows(state), out, logits, draft, accepted)

    def launch(params, state):
        return dataclasses.replace(state, lengths=state.lengths + 0), ()

    def verify(params, state):
        _, out, logits = step.verify(stage, width, params, state)
        return with_cache(state, out.cache), logits

    x, logits = shape(count, c.hidden_size), shape(count, c.vocab_size, kind=jnp.float32)
    heads = tuple(shape(count, n, c.head_dim) for n in (c.num_heads, c.num_kv_heads, c.num_kv_heads))
    taps = shape(count, len(stage.taps) * c.hidden_size) if stage.taps else None
    found: dict[str, tuple[Phase, tuple]] = {
        "qkv": (qkv, (x,)),
        "attention": (attention, (heads,)),
        "output": (output, (x, shape(count, c.num_heads * c.head_dim))),
        "mlp": (mlp, (x,)),
        "layers": (layers, ()),
    }
    found = {name: found[name] for name in layer_phases(target)}
    found |= {"head": (head, (x,)), "accept": (accept, (logits,))}
    found["commit"] = (commit, (x, taps, logits, None, None))  # the last two are what accept makes
    found[LAUNCH] = (launch, ())
    found[VERIFY] = (verify, ())
    found[ROUND] = (functools.partial(step.round_step, stage, width), ())
    return found


def measure(
    engine: Engine,
    context: int,
    repeats: int,
    report: Callable[[str, int, int], None],
    only: Collection[str] = (),
    trace: Path | None = None,
) -> dict[str, Timed]:
    """Time the phases of a round in which every request has `context` committed tokens and a full draft.

    Args:
        engine: with one drafter or none.
        context: committed tokens, as far as the engine's context goes.
        repeats: runs that are timed, behind one that is not.
        report: called with `(what, done, total)`.
        only: phases to time; none means all, and the whole programs.
        trace: folder for a profiler's trace of one more run of each, which is not timed.

    Returns:
        By phase, in the order of a round, then `launch` (a program that does nothing) and the `WHOLE` programs:
        the verify pass, the round as one program, and the round as an engine serves it: two programs, and a
        look at their results.

    Raises:
        ValueError: a context that does not fit, or a set of drafters, whose rounds differ.
    """
    if isinstance(engine.drafter, DrafterSet):
        raise ValueError("a profile is of one drafter's round, and 'auto' changes it: name one of its drafters")
    most = engine.config.context - engine.programs.stage.shape.rows
    if not 1 <= context <= most:
        raise ValueError(f"--context must be 1 to {most} for an engine of context {engine.config.context}")
    if repeats < 1:
        raise ValueError(f"--repeats must be at least 1, got {repeats}")
    bench = _Bench(engine, context, repeats, report)
    found = bench.run(only)
    if trace is not None:
        bench.trace(trace)
    return found


@dataclasses.dataclass(frozen=True)
class _Run:
    """A program, its arguments behind `(params, state)`, and what makes the state that it starts from."""

    program: Callable
    args: tuple
    before: Callable[[], State]


class _Bench:
    """An engine's state, set to the case before every run."""

    def __init__(self, engine: Engine, context: int, repeats: int, report: Callable[[str, int, int], None]):
        self.engine, self.repeats, self.report = engine, repeats, report
        self.width, batch = engine.programs.widths[-1], engine.config.batch
        self.case = np.full(batch, context, np.int32), np.ones(batch, bool)
        self.each = np.full(batch, self.width.width, np.int32)
        self.state: State = pinned.fresh(engine)
        self.pin = jax.jit(pinned.pin, donate_argnums=0)
        self.runs: dict[str, _Run] = {}

    def run(self, only: Collection[str]) -> dict[str, Timed]:
        stage = self.engine.programs.stage
        table = programs(stage, self.width, self.state.cache.k[0].dtype)
        names = [*(["draft"] if stage.drafter is not None else []), *table, SERVED]
        wanted, found = [name for name in names if not only or name in only], {}
        for name in wanted:
            self.report(name, len(found), len(wanted))
            self.runs[name] = self.made(name, table)
            found[name] = self.time(self.runs[name])
        self.report("", len(found), len(wanted))
        return found

    def made(self, name: str, table: dict[str, tuple[Phase, tuple]]) -> _Run:
        """A phase's program, with random arrays of the shapes that it takes."""
        if name == "draft":
            return _Run(self.engine.programs.draft, (), self.verified)
        if name == SERVED:
            return _Run(self.served, (), self.pinned)
        function, shapes = table[name]
        args = tuple(_random(x, i) for i, x in enumerate(shapes))
        if name == "commit":
            accept = self.made("accept", table)
            self.state, chosen = accept.program(self.engine.params, self.pinned(), *accept.args)
            args = (*args[:3], *chosen)
        return _Run(target_program(self.engine.programs.stage.kernels, function), args, self.pinned)

    def pinned(self) -> State:
        return self.pin(self.state, *self.case, self.each)

    def verified(self) -> State:
        """A state behind a pass, with which a drafter has something to take in."""
        state, _ = self.engine.programs.verify(self.width, self.engine.params, self.pinned())
        return state

    def served(self, params: Any, state: State) -> tuple[State, Any]:
        """A round as `Engine.step` runs it."""
        state, emitted = self.engine.programs.verify(self.width, params, state)
        wait: Any = emitted
        if self.engine.drafter is not None:
            state, live = self.engine.programs.draft(params, state)
            wait = emitted, live
        return state, jax.device_get(wait)

    def time(self, run: _Run) -> Timed:
        times = [self.once(run) for _ in range(self.repeats + 1)]
        return Timed.of(times[1:])

    def once(self, run: _Run, name: str = "") -> float:
        """Seconds of a run; with a `name`, under it in the profiler's trace."""
        state = jax.block_until_ready(run.before())
        with jax.profiler.TraceAnnotation(name) if name else contextlib.nullcontext():
            started = time.perf_counter()
            self.state, made = run.program(self.engine.params, state, *run.args)
            jax.block_until_ready((self.state, made))
            return time.perf_counter() - started

    def trace(self, folder: Path) -> None:
        with jax.profiler.trace(folder, create_perfetto_trace=True):
            for name, run in self.runs.items():
                self.once(run, name)


def _random(shapes: Any, seed: int) -> Any:
    """Arrays of these shapes, of the size that a residual stream has."""
    leaves, tree = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(seed), max(1, len(leaves)))
    return tree.unflatten([jax.random.normal(k, x.shape, x.dtype) for k, x in zip(keys, leaves, strict=False)])


def random_engine(model: DecoderConfig, config: RunConfig) -> Engine:
    """An engine of a target with random weights, for its times.

    Raises:
        ValueError: a drafter with weights, which there are none of.
    """
    if config.drafter.kind not in ("none", "ngram", "suffix"):
        raise ValueError(
            f"random weights are of the target alone, and drafter '{config.drafter.kind}' has its own: take none, "
            "ngram or suffix, or a target with its weights"
        )
    dtype = value_dtype(config.dtype)
    target, params = decoder.build(model, dtype)
    params = hold(params, dtype)
    made: tuple[Any, Any] = (target, params)
    if config.decode_step == "fused":
        made = fused.fuse(target, params, int8=config.quantization == "int8")
    drafter, drafter_params = make_drafter(config, made[0], made[1], None, dtype, lambda line: None)
    return Engine(*made, drafter=drafter, drafter_params=drafter_params, config=config)
