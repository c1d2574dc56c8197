"""`specjax calibrate`: measure what rounds cost on this device, so that the planner chooses by facts."""

import contextlib
import dataclasses
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Annotated

from specjax import config
from specjax.cli import flags

HELP = """Measure what decoding rounds cost on this device.

  specjax calibrate --drafters ngram
  specjax calibrate --drafters ngram,drafts/smollm2-135m/eagle3 --batch 16

Times the engine's own programs over requests, rows and context, and writes a latency table to your cache folder, where
an engine with `drafter: auto` finds it when target, drafters, precision, device and JAX are the same. Compiling comes
first and is not measured. Interrupted, it goes on where it was. Keep the machine quiet meanwhile."""


@dataclasses.dataclass(kw_only=True)
class Calibrate(flags.EngineFlags):
    """Flags of `specjax calibrate`."""

    drafters: Annotated[str | None, flags.text("KIND|PATH,...")] = None
    """The set to measure; None takes the one of the configuration."""
    no_probe: bool = False
    """Take the wiring of learned drafters as their files declare it, without trying it on a text of the target."""
    out: Annotated[str | None, flags.text("FILE.json")] = None
    """Write the table here (for `drafter.table`) and not to the cache folder."""

    def run(self) -> int:
        """Measure and write; the path on stdout."""
        from specjax.engine.calibrate import calibrate, table_path
        from specjax.engine.pricing import provenance

        drafter = None if self.drafters is None else {"kind": "auto", "of": self.drafters.split(",")}
        run = self.run_config(drafter)
        if run.drafter.kind != "auto":
            raise ValueError(
                "calibrate measures a set of drafters: name them with --drafters, or use drafter kind auto"
            )
        # What a table would say does not matter while one is made, and one that is asked for may not exist yet.
        chosen = run.drafter.model_copy(update={"table": None})
        chosen = flags.unprobed([chosen])[0] if self.no_probe else chosen
        if self.out is not None and not Path(self.out).resolve().parent.is_dir():
            raise ValueError(f"--out: there is no folder {Path(self.out).resolve().parent}")
        engine = flags.load_engine(config.make(run.model_dump() | {"drafter": chosen}), quiet=False)
        wanted = provenance(engine.config, engine.target.config, engine.describe()["dtype"], engine.drafter)
        path = Path(self.out) if self.out is not None else table_path(wanted, run.batch)
        with _progress() as report:
            table = calibrate(engine, wanted, path.with_name(path.name + ".partial"), report)
        table.write(path)
        axes = " x ".join(str(len(axis)) for axis in table.verify.axes)
        flags.note(f"{axes} passes (requests, rows, context) and {len(table.draft)} drafts measured")
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
