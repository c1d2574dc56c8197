"""`specjax calibrate`: measure what rounds cost on this device, so that the planner chooses by facts."""

import contextlib
import dataclasses
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Annotated

from specjax import config
from specjax.cli import flags

HELP = """Measure what decoding rounds cost on this device, or tune its kernels.

  specjax calibrate --drafters ngram
  specjax calibrate --drafters ngram,drafts/smollm2-135m/eagle3 --batch 16
  specjax calibrate --kernels --config configs/auto.yaml

Times the engine's own programs over requests, rows and context, and writes a latency table to your cache folder, where
an engine with `drafter: auto` finds it when target, drafters, precision, device and JAX are the same. Compiling comes
first and is not measured. Interrupted, it goes on where it was. Keep the machine quiet meanwhile.

With --kernels, on a TPU or a GPU: finds the shapes with which the engine of this configuration runs its Pallas kernels,
times block sizes, splits, warps and the like for each, and writes the fastest to tables in your cache folder, where
every engine finds them for the same device, JAX and kernels. Do this before rounds are measured; docs/kernels.md,
Tuning. What the rounds run with is then -o kernels=auto|reference|pallas|interpret."""


@dataclasses.dataclass(kw_only=True)
class Calibrate(flags.SetupFlags):
    """Flags of `specjax calibrate`."""

    drafters: Annotated[str | None, flags.text("KIND|PATH,...")] = None
    """The set to measure, in place of that of the configuration."""
    kernels: bool = False
    """Time what the kernels may choose, not rounds; any drafter will do, or none."""
    no_probe: bool = False
    """Take the wiring of learned drafters as their files declare it, without trying it on a text of the target."""
    out: Annotated[str | None, flags.text("FILE.json")] = None
    """Write the table of rounds here (for `drafter.table`) and not to the cache folder."""

    def run(self) -> int:
        """Measure and write; the path on stdout, or paths."""
        drafter = None if self.drafters is None else {"kind": "auto", "of": self.drafters.split(",")}
        run = self.run_config(drafter)
        if run.drafter.kind == "auto":
            # What a table would say does not matter while one is made, and one that is asked for may not exist yet.
            run = run.model_copy(update={"drafter": run.drafter.model_copy(update={"table": None})})
        elif not self.kernels:
            raise ValueError(
                "calibrate measures a set of drafters: name them with --drafters, or use drafter kind auto"
            )
        if self.no_probe:
            run = run.model_copy(update={"drafter": flags.unprobed([run.drafter])[0]})
        return self._tune(run) if self.kernels else self._measure(run)

    def _measure(self, run: config.RunConfig) -> int:
        """Rounds, to a latency table."""
        from specjax.engine.calibrate import calibrate, table_path
        from specjax.engine.pricing import provenance

        flags.check_outputs(self.out)
        engine = flags.load_engine(run, quiet=False)
        wanted = provenance(engine.config, engine.target.config, engine.describe()["dtype"], engine.drafter)
        path = Path(self.out) if self.out is not None else table_path(wanted, run.batch)
        with _progress() as report:
            table = calibrate(engine, wanted, path.with_name(path.name + ".partial"), report)
        table.write(path)
        axes = " x ".join(str(len(axis)) for axis in table.verify.axes)
        flags.note(f"{axes} passes (requests, rows, context) and {len(table.draft)} drafts measured")
        print(path)
        return 0

    def _tune(self, run: config.RunConfig) -> int:
        """Kernels, to tables of their sizes."""
        import jax

        from specjax.engine import calibrate_kernels
        from specjax.pallas_kernels import tuning, tuning_tables

        if self.out is not None:
            raise ValueError("--out is for the table of rounds: kernels have a table for each op, in the cache folder")
        calibrate_kernels.refuse(run, jax.default_backend())
        # What an engine compiles in its warm-up is what it will run; its weights are let go of before the timing.
        warm = run.model_copy(update={"warmup": True})
        found = calibrate_kernels.shapes(lambda: flags.load_engine(warm, quiet=False))
        device = tuning.device()
        if not found or device is None:
            raise ValueError(f"no Pallas kernel takes the shapes of {run.target} here: every one declined, as logged")
        partial = tuning_tables.own_path(device, "kernels").with_suffix(".partial")
        with _progress() as report:
            paths = calibrate_kernels.calibrate(found, device, partial, report, flags.note)
        for path in paths:
            print(path)
        return 0


@contextlib.contextmanager
def _progress() -> Generator[Callable[[str, int, int], None]]:
    """A bar on standard error."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description:<28}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("measuring", total=None)

        def report(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        yield report
