"""`specjax profile`: where the time of a round goes, phase by phase, on the device here or on an absent one."""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from specjax.cli import flags, profile_absent, profile_report
from specjax.config.drafters import MOST_DRAFTS

if TYPE_CHECKING:
    from specjax.costmodel.facts import Device
    from specjax.engine.engine import Engine

HELP = """Say where the time of a decoding round goes, phase by phase.

  specjax profile                                                  measured here: SmolLM2-135M, n-gram drafts
  specjax profile --target DIR --drafter eagle3-folder --batch 8 --json out.json --plot out.png --trace traces
  specjax profile --target llama-3.1-8b --random --decode-step fused         its shape, with random weights
  specjax profile --device tpu-v6e --target llama-3.1-8b --context 2048      a device that is not here
  specjax profile --device h100 --target llama-3.1-8b --decode-step fused    its fused step, kernel by kernel
  specjax profile decode_step --device tpu-7x --target qwen3-8b              one Pallas kernel, stage by stage
  specjax profile tree_attention --device mi300x --target llama-3.1-8b --batch 8 --drafts 15

A round is: draft; the target's pass over the drafted rows (qkv, attention, output, mlp in every layer; head); accept;
commit; and the launch. Bytes and flops are what any implementation must do, the roofline is the longer of their two
times on the device's data sheet plus an assumed time for launches and small kernels. On the device here each phase
then runs as a program of its own, `measured` less the launch of a program that does nothing; below stand the pass and
the round as one program, and a round as an engine serves it, so that you see whether the phases add up. For a device
that is not here its compiler says, in a minute or two: on a TPU an estimate of all layers (from two and from four of
them), the scheduled bundles of one (every loop counted once) and how full the units are in them; on a GPU registers,
shared memory (LDS) and spills, on AMD GPUs of the Pallas kernels alone. That needs the compilers: `make profile
ARGS="--device tpu-v6e"` makes an environment that has them, and --roofline does without. Nothing is run there."""

OPS = ("spec_step", "tree_attention", "decode_step")


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
        found = self._here() if self.device == "auto" else profile_absent.figures(self)
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
        for flag, value in (("--repeats", self.repeats), ("--context", self.context)):
            if value is not None and value < 1:
                raise ValueError(f"{flag} must be at least 1, got {value}")
        if self.batch is not None and self.batch < 1:
            raise ValueError(f"--batch must be at least 1, got {self.batch}")
        if self.drafts is not None and not 1 <= self.drafts <= MOST_DRAFTS:
            raise ValueError(f"--drafts must be 1 to {MOST_DRAFTS}; --drafter none is a round without")
        if self.drafts is not None and self.drafter == "none":
            raise ValueError("--drafts are of a drafter, and --drafter is none")
        if self.trace is not None and not Path(self.trace).absolute().parent.is_dir():
            raise ValueError(f"--trace: cannot write {self.trace}, its folder does not exist")
        flags.check_outputs(None if self.json == "-" else self.json, self.plot)
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
            work = profile_absent.work(
                device, sizes, about["dtype"], shape, engine.config.batch, width.count, context, fused
            )
        phases = profile_report.measured(work, timed)
        return {
            "op": self.op,
            "device": about["device"] if device is None else device.name,
            "attached": True,
            **profile_absent.settings(about["target"], about["dtype"], shape, engine.config.batch, context),
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

        _, model = profile_absent.described(run.target)
        return random_engine(model, run)


def _known(machine: dict[str, Any]) -> tuple["Device | None", list[str]]:
    """What is known of the device here, and a note if that is nothing."""
    from specjax.costmodel.facts import find

    try:
        found = find("cpu" if machine["platform"] == "cpu" else machine["device"])
    except ValueError as error:
        return None, [f"no roofline: {error}"]
    return found, [] if found.name != "cpu" else ["the roofline is of the stand-in CPU in devices.json"]


@contextlib.contextmanager
def _progress() -> Generator[Callable[[str, int, int], None]]:
    """A bar on standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:<14}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)
