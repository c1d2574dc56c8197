"""`specjax profile`: where the time of a round goes, phase by phase, on the device here or on an absent one."""

import contextlib
import dataclasses
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from specjax.cli import aot, flags, plan, profile_report
from specjax.config.drafters import MOST_DRAFTS

if TYPE_CHECKING:
    from specjax.costmodel.facts import Device
    from specjax.costmodel.shapes import ModelShape
    from specjax.draft import DraftShape
    from specjax.engine.aot import Case
    from specjax.engine.engine import Engine
    from specjax.targets.config import DecoderConfig

HELP = """Say where the time of a decoding round goes, phase by phase.

  specjax profile                                                  measured here: SmolLM2-135M, n-gram drafts
  specjax profile --target DIR --drafter eagle3-folder --batch 8 --json out.json --plot out.png --trace traces
  specjax profile --target llama-3.1-8b --random --decode-step fused         its shape, with random weights
  specjax profile --device tpu-v6e --target llama-3.1-8b --context 2048      a device that is not here
  specjax profile decode_step --device tpu-7x --target qwen3-8b              one Pallas kernel, stage by stage
  specjax profile tree_attention --device mi300x --target llama-3.1-8b --batch 8 --drafts 15

A round is: draft; the target's pass over the drafted rows (qkv, attention, output, mlp in every layer; head); accept;
commit; and the launch. Bytes and flops are what any implementation must do, the roofline is the longer of their two
times on the device's data sheet plus an assumed time for launches and small kernels. On the device here each phase
then runs as a program of its own, `measured` less the launch of a program that does nothing; below stand the pass and
the round as one program, and a round as an engine serves it, so that you see whether the phases add up. For a device
that is not here its compiler says: on a TPU an estimate, the scheduled bundles (every loop counted once) and how full
the units are in them; on a GPU registers, shared memory (LDS) and spills. That needs the compilers: `make profile
ARGS="--device tpu-v6e"` makes an environment that has them, and --roofline does without. Nothing is run there."""

OPS = ("spec_step", "tree_attention", "decode_step")
# The module that a platform's compiler comes in, and the extra that installs it.
COMPILERS = {"tpu": ("libtpu", "tpu"), "cuda": ("jax_plugins.xla_cuda13", "cuda"), "rocm": ("triton", "aot")}


@dataclasses.dataclass(kw_only=True)
class Profile(flags.EngineFlags):
    """Flags of `specjax profile`."""

    op: Annotated[tyro.conf.Positional[str], flags.text("OP")] = "spec_step"
    """spec_step: a whole round; tree_attention or decode_step: one op of it."""
    device: Annotated[str, flags.text("NAME")] = "auto"
    """auto: the one here, measured. Else one that is not: tpu-v5e, tpu-v5p, tpu-v6e, tpu-7x, a100, h100, b200, mi300x,
    mi355x; others that `specjax plan` knows have the roofline alone."""
    drafter: Annotated[str, flags.text("KIND|PATH")] = "ngram"
    """none, ngram, suffix, or the path of a drafter; for an absent device its kind."""
    drafts: Annotated[int | None, flags.text("N")] = None
    """Drafted tokens of a round; the drafter's own number without it. A request's pass has one row more."""
    context: Annotated[int | None, flags.text("N")] = None
    """Tokens in the cache of each request: 1024, or what a shorter context of the configuration allows."""
    random: bool = False
    """Random weights for a known target (or a folder with config.json), for the times of one that is not here."""
    repeats: Annotated[int, flags.text("N")] = 10
    """Runs of each program that are timed."""
    roofline: bool = False
    """For an absent device: compile nothing."""
    json: Annotated[str | None, flags.text("FILE.json")] = None
    """Write all figures here; - prints them in place of the table."""
    plot: Annotated[str | None, flags.text("FILE.png")] = None
    """Draw a stacked bar of the phases, and the roofline with them on it."""
    trace: Annotated[str | None, flags.text("DIR")] = None
    """Write a profiler's trace (XProf, and Perfetto) of one more run of each program here."""

    def run(self) -> int:
        """Profile, print, write; 1 if something does not compile."""
        self._check()
        found = self._here() if self.device == "auto" else self._absent()
        if self.json == "-":
            print(json.dumps(found, indent=1))
        else:
            profile_report.show(found)
        if self.json not in (None, "-"):
            Path(self.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        if self.plot is not None:
            profile_report.draw(found, Path(self.plot))
        return 1 if any("error" in phase for phase in found["phases"]) else 0

    def _check(self) -> None:
        """Refuse what cannot be honoured before anything is loaded."""
        if self.op not in OPS:
            raise ValueError(f"no op {self.op!r}; known are {', '.join(OPS)}")
        if self.repeats < 1 or (self.context is not None and self.context < 1):
            raise ValueError("--repeats and --context must be at least 1")
        if self.batch is not None and self.batch < 1:
            raise ValueError(f"--batch must be at least 1, got {self.batch}")
        if self.drafts is not None and not 1 <= self.drafts <= MOST_DRAFTS:
            raise ValueError(f"--drafts must be 1 to {MOST_DRAFTS}; --drafter none is a round without")
        if self.drafts is not None and self.drafter == "none":
            raise ValueError("--drafts are of a drafter, and --drafter is none")
        for flag, path in (("--json", self.json), ("--plot", self.plot), ("--trace", self.trace)):
            if path not in (None, "-") and not Path(path).absolute().parent.is_dir():
                raise ValueError(f"{flag}: cannot write {path}, its folder does not exist")
        if self.json != "-":
            flags.check_outputs(self.json)
        flags.check_plot(self.plot)
        if self.op == "decode_step" and self.decode_step == "xla":
            raise ValueError("op decode_step is the fused step: leave --decode-step xla out")
        if self.device == "auto":
            if self.roofline:
                raise ValueError("--roofline is for an absent device: name one with --device")
            return
        unused = {"--trace": self.trace, "--random": self.random, "--config": self.config, "--set": self.overrides}
        unused |= {"--kernels": self.kernels}
        if given := [flag for flag, value in unused.items() if value]:
            raise ValueError(f"{', '.join(given)}: nothing runs on {self.device}, so leave that out")

    # ---------------------------------------------------------------- the device here

    def _here(self) -> dict[str, Any]:
        from specjax.cli.machine import facts
        from specjax.engine import profile

        engine = self._engine()
        context, shape = engine.config.context - engine.programs.stage.shape.rows, engine.programs.stage.shape
        context = min(1024, context) if self.context is None else self.context
        about, model = engine.describe(), engine.target.config
        only = {"tree_attention": ("attention", "launch"), "decode_step": ("layers", "launch")}.get(self.op, ())
        trace = None if self.trace is None else Path(self.trace)
        with _progress() as report:
            timed = profile.measure(engine, context, self.repeats, report, only, trace)
        device, note = _known(facts())
        work = {}
        if device is not None:
            from specjax.engine.pricing import model_shape

            sizes = model_shape(engine.config.target, model)
            width = engine.programs.widths[-1]
            fused = profile.layer_phases(engine.target) == ("layers",)
            work = _work(device, sizes, about["dtype"], shape, engine.config.batch, width.count, context, fused)
        phases = profile_report.measured(work, timed)
        return {
            "op": self.op,
            "device": about["device"] if device is None else device.name,
            "attached": True,
            **_settings(about["target"], about["dtype"], shape, engine.config.batch, context),
            "weights": "random" if self.random else "loaded",
            "repeats": self.repeats,
            "machine": facts(),
            "peak_flops": None if device is None else device.flops(about["dtype"]),
            "bandwidth": None if device is None else device.bandwidth,
            "phases": phases,
            "programs": profile_report.whole(timed),
            "trace": self.trace,
            "notes": note,
        }

    def _engine(self) -> "Engine":
        """An engine for this round; its programs compile when they are first run."""
        options: list[str] = ["warmup=false"]
        if self.drafts is not None:
            options.append(f"drafter.num_speculative_tokens={self.drafts}")
        fused = "fused" if self.op == "decode_step" else self.decode_step
        flagged = dataclasses.replace(self, decode_step=fused, overrides=(*self.overrides, *options))
        run = flags.EngineFlags.run_config(flagged, self.drafter)
        if run.drafter.kind == "auto":
            raise ValueError("a profile is of one drafter's round, and 'auto' changes it: name one of its drafters")
        if self.op == "tree_attention" and run.decode_step == "fused":
            raise ValueError("the fused step has its attention inside: take op decode_step, or --decode-step xla")
        if not self.random:
            return flags.load_engine(run, quiet=False)
        from specjax.engine.profile import random_engine

        _, model = described(run.target)
        return random_engine(model, run)

    # ---------------------------------------------------------------- a device that is not

    def _absent(self) -> dict[str, Any]:
        from specjax.costmodel.facts import find
        from specjax.costmodel.plan import check_memory
        from specjax.costmodel.roofline import Setup
        from specjax.costmodel.shapes import BYTES
        from specjax.costmodel.shapes import drafter as drafter_shape

        device, target = find(self.device), self.target or "smollm2-135m"
        sizes = plan.target_shape(target)
        shape = chain(self.drafter, self.drafts)
        batch, context = self.batch or 1, self.context or 1024
        dtype = (
            self.dtype if self.dtype not in (None, "auto") else "float32" if device.platform == "cpu" else "bfloat16"
        )
        assert dtype in BYTES
        kinds = [] if shape.kind == "none" else [drafter_shape(shape.kind)]
        check_memory(Setup(device, 1, sizes, dtype), kinds, batch, context)
        fused = self.op == "decode_step" or self.decode_step == "fused"
        work = _work(device, sizes, dtype, shape, batch, batch * shape.rows, context, fused)
        rows, notes = [], []
        if self.op == "decode_step" and device.platform != "tpu":
            raise ValueError(
                f"op decode_step: on {device.name} the step is several kernels, see 'specjax aot'; take op spec_step"
            )
        if fused and device.platform != "tpu":
            raise ValueError(
                f"--decode-step fused: rounds with it are not compiled for {device.name}, only its kernels, by "
                "'specjax aot': take xla"
            )
        if self.roofline:
            notes.append("the roofline alone, as asked for: nothing was compiled")
        elif missing := compiler_missing(device.name):
            notes.append(missing)
        else:
            given = {
                "target": target, "drafter": shape.kind, "drafts": shape.depth, "batch": batch,
                "context": context, "dtype": dtype, "fused": fused, "op": self.op,
            }  # fmt: skip
            with _progress() as report:
                for row in aot.in_a_process(device.name, json.dumps(given), module="specjax.cli.profile"):
                    report(row.get("next") or row.get("phase", ""), len(rows), row.get("total", len(rows)))
                    rows += [row] if "next" not in row else []
        only = {"tree_attention": ("attention",), "decode_step": ("layers",)}.get(self.op, ())
        return {
            "op": self.op,
            "device": device.name,
            "attached": False,
            **_settings(target, dtype, shape, batch, context),
            "peak_flops": device.flops(dtype),
            "bandwidth": device.bandwidth,
            "phases": profile_report.compiled(work, rows, only),
            "programs": [],
            "notes": notes,
        }


def chain(kind: str, drafts: int | None) -> "DraftShape":
    """The chain that a drafter of a kind makes, by default of the greatest depth up to 7 that is usual for it."""
    from specjax.costmodel import menu
    from specjax.draft import PLAIN, DraftShape

    if kind == PLAIN.kind:
        return PLAIN
    usual = [shape.depth for shape in menu.shapes([kind]) if shape.is_chain and shape.depth <= 7]
    return DraftShape.chain(kind, drafts or max(usual))


def described(name: str) -> tuple["ModelShape", "DecoderConfig"]:
    """A target's sizes and its architecture, by a known name or from a folder's `config.json`; ValueError otherwise."""
    from specjax.costmodel.shapes import target
    from specjax.engine.aot import model_of
    from specjax.targets.config import DecoderConfig

    sizes = plan.target_shape(name)
    if target(name) is not None:
        return sizes, model_of(sizes)
    file = Path(name).expanduser() / "config.json"
    return sizes, DecoderConfig.from_hf(json.loads(file.read_text(encoding="utf-8")))


def compiler_missing(name: str) -> str | None:
    """Why nothing can be compiled for a device here, and what to do; None if it can."""
    from specjax.pallas_kernels import aot as tpu
    from specjax.pallas_kernels import aot_gpu

    chips = {chip.name: chip.platform for chip in (*tpu.CHIPS.values(), *aot_gpu.CHIPS.values())}
    if name not in chips:
        return f"the roofline alone: no compiler is described for {name}; there is for {', '.join(chips)}"
    module, extra = COMPILERS[chips[name]]
    try:
        there = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        there = False
    if there:
        return None
    return (
        f'the roofline alone: the compiler for {name} is not installed here. `make profile ARGS="--device {name} ..."` '
        f"makes an environment with it (or pip install 'specjax[{extra}]')"
    )


def _known(machine: dict[str, Any]) -> tuple["Device | None", list[str]]:
    """What is known of the device here, and a note if that is nothing."""
    from specjax.costmodel.facts import find

    try:
        found = find("cpu" if machine["platform"] == "cpu" else machine["device"])
    except ValueError as error:
        return None, [f"no roofline: {error}"]
    return found, [] if found.name != "cpu" else ["the roofline is of the stand-in CPU in devices.json"]


def _work(
    device, sizes, dtype: str, shape: "DraftShape", batch: int, rows: int, context: int, fused: bool
) -> dict[str, Any]:
    """The cost model's phases of a round."""
    from specjax.costmodel.roofline import Setup, round_phases
    from specjax.costmodel.shapes import DRAFTERS

    drafter = DRAFTERS.get(shape.kind)
    setup = Setup(device, 1, sizes, dtype)
    return dict(round_phases(setup, drafter, shape, batch, rows, context, fused))


def _settings(target: str, dtype: str, shape: "DraftShape", batch: int, context: int) -> dict[str, Any]:
    drafter = {"drafter": shape.kind, "drafts": shape.depth, "rows": shape.rows}
    return {"target": target, "dtype": dtype, "batch": batch, "context": context, **drafter}


@contextlib.contextmanager
def _progress() -> Generator[Callable[[str, int, int], None]]:
    """A bar on standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:<14}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)


def worker(name: str, given: dict[str, Any]) -> None:
    """Print a line of JSON for every phase that is compiled for a chip, and one before it."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    from specjax.pallas_kernels import aot as tpu
    from specjax.pallas_kernels import aot_gpu

    if name in aot_gpu.CHIPS:
        aot_gpu.prepare()
    from specjax.engine import aot as engine_aot

    chip: Any = tpu.CHIPS.get(name) or aot_gpu.CHIPS[name]
    op, committed, target = given.pop("op"), given.pop("context"), given.pop("target")
    room = committed + given["drafts"] + 1
    learned = given["drafter"] not in ("none", "ngram", "suffix")  # drafts come from weights that are not here
    given |= {"drafter": "ngram"} if learned else {}
    case: Case = engine_aot.Case(name=target, model=described(target)[1], context=room, **given)
    jobs = engine_aot.kernel_jobs(case, chip, committed)
    if op == "spec_step" and chip.platform != "rocm":  # XLA has no route to AMD's chips without one
        jobs |= engine_aot.phase_jobs(case)
    if learned:
        jobs.pop("draft", None)
    with tpu.dumping(kernels=True) if chip.platform == "tpu" else contextlib.nullcontext() as folder:
        for phase, (job, times) in jobs.items():
            print(json.dumps({"next": phase, "total": len(jobs)}), flush=True)

            def compiled(job=job):
                return tpu.run(job, chip, folder) if chip.platform == "tpu" else aot_gpu.run(job, chip)

            print(json.dumps({"phase": phase, "times": times} | aot.attempt(name, job, compiled)), flush=True)


if __name__ == "__main__":
    worker(sys.argv[1], json.loads(sys.argv[2]))
