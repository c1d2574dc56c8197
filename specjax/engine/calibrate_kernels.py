"""Kernel sizes by measurement: the shapes that an engine's programs have, each kernel's candidates timed for them."""

import dataclasses
import datetime
import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specjax.config import RunConfig
from specjax.engine.calibrate import Cells
from specjax.pallas_kernels import dispatch, timing, tuning
from specjax.pallas_kernels import tuning_tables as tables
from specjax.pallas_kernels.decode_step.cut import Cut
from specjax.pallas_kernels.decode_step.tiles import StepSizes
from specjax.pallas_kernels.tuning import Tiles
from specjax.pallas_kernels.tuning_tables import Entry, Table

Shape = tuple[type[Tiles], Any]  # a kernel's class of tiles, and the sizes of a call


def refuse(config: RunConfig, platform: str) -> None:
    """Refuse what has no kernels to time.

    Raises:
        ValueError: a platform or a configuration without.
    """
    if platform not in dispatch.BACKENDS:
        raise ValueError(
            f"calibrate --kernels times Pallas kernels, and JAX runs on {platform}, which has none (an interpreted one "
            "says nothing of time): run it where JAX sees a TPU or a GPU (`specjax doctor` shows what it sees), or "
            "leave --kernels out, to measure rounds"
        )
    if config.kernels not in ("auto", "pallas"):
        raise ValueError(
            f"calibrate --kernels times Pallas kernels, and kernels is '{config.kernels}': make it 'auto' or 'pallas'"
        )


def shapes(load: Callable[[], Any]) -> list[Shape]:
    """The kernels, each with every bucket of sizes, that programs are traced with while `load` runs."""
    with tuning.recording() as found:
        load()
    gc.collect()  # what was loaded, before anything is timed
    first: dict[str, Shape] = {}
    for kind, sizes in found:
        first.setdefault(_name(kind, sizes), (kind, sizes))
    return list(first.values())


def calibrate(
    found: list[Shape],
    device: str,
    partial: Path,
    report: Callable[[str, int, int], None],
    say: Callable[[str], None],
    clock: timing.Clock | None = None,
    interpret: Any = False,
) -> list[Path]:
    """Time each kernel's candidates for each of its shapes, and write the best to the user's tables.

    Args:
        found: what to time.
        device: the one here.
        partial: file of what is measured; what it holds already is not measured again. It is removed at the end.
        report: called with `(what, done, total)`.
        say: told what came out for each shape.
        clock: what times; None for the clock on the wall.
        interpret: simulate the kernels.

    Returns:
        The tables, one for each op. Entries of other shapes that were there and still hold are kept.

    Raises:
        ValueError: `partial` belongs to another set-up, or nothing could be timed.
    """
    ops = list(dict.fromkeys(kind.kernel.partition("/")[0] for kind, _ in found))
    cells = Cells(partial, {op: dataclasses.asdict(tables.provenance(device, op)) for op in ops})
    made: dict[str, list[Entry]] = {}
    cuts: dict[Any, Cut] = {}
    for done, (kind, sizes) in enumerate(found):
        if isinstance(sizes, StepSizes) and sizes.plan.sizes in cuts:  # timed in the tiles that it will have
            sizes = dataclasses.replace(sizes, plan=sizes.plan.cut(cuts[sizes.plan.sizes]))

        def tick(seen: int, kind=kind, done=done) -> None:
            report(f"{kind.kernel}, {seen} tried", done, len(found))

        def measure(kind=kind, sizes=sizes, tick=tick) -> dict[str, Any]:
            make = timing.bench(kind, sizes, interpret)
            return _entry(kind, sizes, timing.search(kind, sizes, make, clock, tick))

        report(kind.kernel, done, len(found))
        try:
            entry = Entry(**cells.get(_name(kind, sizes), measure))
        except RuntimeError as error:
            say(str(error))
            continue
        if kind is Cut:
            cuts[sizes] = Cut(**entry.tiles)
        made.setdefault(kind.kernel.partition("/")[0], []).append(entry)
        say(_told(kind, entry))
    if not made:
        raise ValueError("no kernel could be timed; what each said is above")
    report("", len(found), len(found))
    paths = [_write(device, op, entries) for op, entries in made.items()]
    partial.unlink(missing_ok=True)
    return paths


def _name(kind: type[Tiles], sizes: Any) -> str:
    return f"{kind.kernel} {json.dumps(sizes.key(), sort_keys=True)}"


def _entry(kind: type[Tiles], sizes: Any, found: timing.Found) -> dict[str, Any]:
    """The entry of a shape, as plain data."""
    return {
        "kernel": kind.kernel.partition("/")[2],
        "where": dict(sizes.key()),
        "tiles": dataclasses.asdict(found.tiles),
        "source": "measured",
        "us": round(found.seconds * 1e6, 3),
        "rule_us": None if found.rule_seconds is None else round(found.rule_seconds * 1e6, 3),
    }


def _told(kind: type[Tiles], entry: Entry) -> str:
    where = ", ".join(f"{name} {value}" for name, value in entry.where.items())
    tiles = ", ".join(f"{name} {value}" for name, value in entry.tiles.items())
    rule = "the rule's do not run" if entry.rule_us is None else f"{entry.rule_us} us by rule"
    return f"{kind.kernel} ({where}): {entry.us} us with {tiles}; {rule}"


def _write(device: str, op: str, entries: list[Entry]) -> Path:
    path, wanted = tables.own_path(device, op), tables.provenance(device, op)
    made = {"date": datetime.date.today().isoformat(), "made_by": "specjax calibrate --kernels"}
    try:
        kept = Table.read(path).require(wanted).entries
    except ValueError:  # none, or one that no longer holds
        kept = ()
    Table(dataclasses.replace(wanted, **made), kept).updated(entries).write(path)
    return path
