"""`specjax plan`: which draft shape pays for a device, a target and a load, without running anything."""

import dataclasses
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from specjax.cli import flags

if TYPE_CHECKING:
    from specjax.costmodel.plan import Plan
    from specjax.costmodel.roofline import Setup
    from specjax.costmodel.shapes import ModelShape
    from specjax.costmodel.tables import Table
    from specjax.draft import DraftShape

HELP = """Say which draft shape is worth its cost.

  specjax plan --device tpu-v6e --target llama-3.1-8b --drafters ngram,eagle3 --batch 1,16,128
  specjax plan --device h100 --target Qwen/Qwen3-8B --context 8192 --json
  specjax plan --device b300 --devices 4 --target dense-27b --drafters dflash,dspark --plot plan.png

Prices come from a table that was measured here, else from a shipped one, else from the device's data sheet; the answer
says which. Drafters are named by kind and do as published averages say (acceptance on chat-like text); a run learns
its own. All requests are taken to be alike and to verify a whole shape. A load that does not fit in the memory is
refused (exit code 2), with what would fit."""


@dataclasses.dataclass(kw_only=True)
class PlanCommand(flags.CommonFlags):
    """Flags of `specjax plan`."""

    device: Annotated[str, flags.text("NAME")] = "auto"
    """tpu-v5e, h100, mi300x, ... or a name that JAX reports; auto is the device here."""
    devices: Annotated[int, flags.text("N")] = 1
    """How many of them share the target."""
    target: Annotated[str, flags.text("MODEL")] = "smollm2-135m"
    """smollm2-135m, llama-3.1-8b, qwen3-8b, qwen3-32b, dense-27b, a hub id of these, or a folder with config.json."""
    drafters: Annotated[str, flags.text("KIND|PATH,...")] = "ngram,eagle3,mtp,dflash,dspark"
    """Kinds to choose from, or folders of drafters, which are priced by their kind; plain decoding is always one."""
    batch: Annotated[tuple[str, ...], flags.text("N,...")] = ()
    """Requests that decode together; several are planned one by one. Without it: 1, 8, 64 and 512 where they fit."""
    context: Annotated[int, flags.text("N")] = 2048
    """Tokens in the cache of each request."""
    temperature: Annotated[float, flags.text("T")] = 0.0
    """Of sampling: drafts are accepted less often when it is hot."""
    dtype: Annotated[str, flags.text("auto|float32|bfloat16|int8|float8")] = "auto"
    """Of weights and cache; auto is float32 on a CPU and bfloat16 elsewhere."""
    table: Annotated[str | None, flags.text("FILE.json")] = None
    """Use this latency table; refused where it was made for something else."""
    json: bool = False
    """Print the plans as JSON."""
    plot: Annotated[str | None, flags.text("FILE.png")] = None
    """Draw speed-up against requests, a line a shape, the planner on top."""

    def run(self) -> int:
        """Plan and print."""
        from specjax.costmodel import menu, tables
        from specjax.costmodel.facts import find
        from specjax.costmodel.plan import BATCHES, check_memory, fits, plan
        from specjax.costmodel.roofline import Setup
        from specjax.costmodel.shapes import BYTES, drafter
        from specjax.costmodel.tables import Provenance

        self._check()
        kinds = [_kind(name.strip()) for name in self.drafters.split(",") if name.strip()]
        shapes = menu.shapes(kinds)
        device = find(_attached() if self.device == "auto" else self.device)
        dtype = self.dtype if self.dtype != "auto" else "float32" if device.platform == "cpu" else "bfloat16"
        if dtype not in BYTES:
            raise ValueError(f"--dtype must be auto, {', '.join(BYTES)}; got {dtype!r}")
        setup = Setup(device, self.devices, target_shape(self.target), dtype)
        learned = [drafter(kind) for kind in dict.fromkeys(kinds) if kind != "none"]
        batches = self._batches() or [b for b in (1, 8, 64, 512) if fits(setup, learned, b, self.context)] or [1]
        for batch in batches:
            check_memory(setup, learned, batch, self.context)
        wanted = Provenance(device.name, self.devices, setup.target.name, dtype)
        if self.table is not None:
            table, passed = tables.load(Path(self.table)).require(wanted), []
        else:
            table, passed = tables.resolve(wanted, shapes, setup)
        plans = [plan(table, shapes, batch, self.context, self.temperature) for batch in batches]
        for line in passed:
            flags.note(line)
        sweep = [b for b in BATCHES if fits(setup, learned, b, self.context)]
        if self.json:
            print(json.dumps({"plans": [made.to_json() for made in plans]}, indent=2))
        else:
            wide = [plan(table, shapes, batch, self.context, self.temperature) for batch in sweep]
            _show(setup, table, plans, wide, self.context)
        if self.plot is not None:
            wide = [plan(table, shapes, batch, self.context, self.temperature) for batch in sweep]
            draw(
                wide, f"{setup.target.name}, {dtype}, {self.devices} x {device.name}, context {self.context}", self.plot
            )
        return 0

    def _check(self) -> None:
        """Refuse what cannot be honoured before anything is worked out."""
        if self.devices < 1 or self.context < 1 or not 0 <= self.temperature < math.inf:
            raise ValueError("--devices and --context must be at least 1, --temperature at least 0")
        flags.check_plot(self.plot)

    def _batches(self) -> list[int]:
        words = [word.strip() for given in self.batch for word in given.split(",") if word.strip()]
        if not all(word.isdigit() and int(word) > 0 for word in words):
            raise ValueError(f"--batch must be positive whole numbers, got {' '.join(self.batch)}")
        return list(dict.fromkeys(int(word) for word in words))


def _attached() -> str:
    """The device that JAX runs on."""
    import jax

    return jax.devices()[0].device_kind


def target_shape(name: str) -> "ModelShape":
    """The shape of a known target, or of the `config.json` in a folder."""
    from specjax.costmodel.shapes import TARGETS, ModelShape, target

    known = target(name)
    if known is not None:
        return known
    file = Path(name).expanduser() / "config.json"
    if not file.is_file():
        raise ValueError(
            f"no target {name!r} is known here, and no folder of that name holds a config.json; known are "
            f"{', '.join(TARGETS)}"
        )
    from specjax.targets.config import DecoderConfig

    config = json.loads(file.read_text(encoding="utf-8"))
    DecoderConfig.from_hf(config)  # refuses what could not be run
    return ModelShape.from_config(file.parent.name, config)


def _kind(name: str) -> str:
    """A drafter's kind, by its name or from the files of its folder."""
    folder = Path(name).expanduser()
    if not (folder / "config.json").is_file():
        return name
    from specjax.drafters.formats.detect import detect
    from specjax.drafters.formats.files import open_folder

    format = detect(open_folder(folder)) or "model"
    return next((kind for kind in ("dflash", "dspark", "eagle3", "mtp") if kind in format), format)


def name_of(shape: "DraftShape") -> str:
    """A shape in a few words."""
    if not shape.depth:
        return "plain"
    tree = "" if shape.is_chain else f"x{shape.branching}, {shape.rows} rows"
    return f"{shape.kind} {shape.depth}{tree}"


def _show(setup: "Setup", table: "Table", plans: list["Plan"], wide: list["Plan"], context: int) -> None:
    """Tables of expected rates on stdout."""
    import sys

    from rich.console import Console
    from rich.table import Table as Sheet

    from specjax.costmodel.plan import crossings

    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    made = table.provenance
    console.print(
        f"{setup.target.name}, {setup.dtype}, {setup.count} x {setup.device.name}, context {context}; "
        f"prices: {plans[0].choice.source}" + (f", {made.made_by or ''} {made.date or ''}".rstrip(", "))
    )
    below = crossings(wide) if wide else {}
    for each in plans:
        sheet = Sheet(
            "shape", "rows a request", "tokens a round", "round, ms", "tokens/s", "to plain", "below plain from"
        )
        for outlook in each.outlooks:
            shape = outlook.shape
            crossing = below.get(shape)
            sheet.add_row(
                name_of(shape),
                str(shape.rows),
                f"{outlook.tokens:.2f}",
                f"{outlook.seconds * 1e3:.3g}",
                f"{outlook.rate:.4g}",
                f"{outlook.rate / each.plain.rate:.2f}",
                "" if not shape.depth else "-" if crossing is None else str(crossing),
            )
        choice, second = each.outlooks[0], each.outlooks[1] if len(each.outlooks) > 1 else None
        runner = f"; then {name_of(second.shape)}, {second.rate:.4g}" if second else ""
        console.print(f"\n{each.batch} requests: {name_of(choice.shape)}, {choice.rate:.4g} tokens/s{runner}")
        console.print(sheet)
    if wide:
        console.print(f"(rows of one request; 'below plain from': requests, looked at up to {wide[-1].batch})")


def draw(plans: list["Plan"], title: str, path: str) -> None:
    """Speed-up over plain decoding against requests: a line a shape, and the planner's choice on top."""
    from matplotlib.figure import Figure

    from specjax.costmodel.tables import replacing

    figure = Figure(figsize=(9, 4.6), layout="constrained")
    axes = figure.subplots()
    batches = [made.batch for made in plans]
    shapes = [o.shape for o in sorted(plans[0].outlooks, key=lambda o: (o.shape.kind, o.shape.rows)) if o.shape.depth]
    kinds = list(dict.fromkeys(shape.kind for shape in shapes))
    for shape in shapes:
        rates = [next(o.rate for o in made.outlooks if o.shape == shape) / made.plain.rate for made in plans]
        same = [s for s in shapes if s.kind == shape.kind]
        fade = 0.35 + 0.65 * (same.index(shape) + 1) / len(same)
        axes.plot(batches, rates, color=f"C{kinds.index(shape.kind)}", alpha=fade, linewidth=1.2, label=name_of(shape))
    axes.plot(batches, [p.choice.rate / p.plain.rate for p in plans], "k--", linewidth=2.2, label="planner")
    axes.axhline(1.0, color="0.5", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches[::2], [str(b) for b in batches[::2]])
    axes.set_xlabel("requests")
    axes.set_ylabel("tokens/s over plain decoding")
    axes.set_title(title, fontsize=10)
    figure.legend(fontsize=7, loc="outside right upper")
    with replacing(Path(path)) as part:
        figure.savefig(part, format=Path(path).suffix.removeprefix(".") or "png", dpi=90)
