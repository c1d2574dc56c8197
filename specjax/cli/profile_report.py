"""A profile for people: rows of phases from what was priced, timed and compiled; the table; the plot."""

import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specjax.costmodel.roofline import Work
    from specjax.engine.profile import Timed

SHOWN_UNITS = ("MXU", "VALU", "XLU", "EUP", "VLOAD", "VSTORE", "SALU")
COLUMNS = {
    "bytes": ("MB", 1e6, ".2f"),
    "flops": ("GFLOP", 1e9, ".2f"),
    "roofline_us": ("roofline µs", 1, ".1f"),
    "compiler_us": ("compiler µs", 1, ".1f"),
    "estimate_us": ("schedule µs", 1, ".1f"),
    "waiting_us": ("waiting µs", 1, ".1f"),
    "bundles": ("bundles", 1, ".0f"),
    "spills": ("spills", 1, ".0f"),
    "registers": ("registers", 1, ".0f"),
    "shared_bytes": ("shared KB", 1024, ".0f"),
    "spill_bytes": ("spilled B", 1, ".0f"),
    "measured_us": ("measured µs", 1, ".1f"),
    "of_roofline": ("of roofline", 1, ".2f"),
}


def _row(phase: str, part: "Work | None") -> dict[str, Any]:
    row: dict[str, Any] = {"phase": phase}
    if part is not None:
        row |= {"bytes": part.bytes, "flops": part.flops, "roofline_us": part.seconds * 1e6}
    return row


def measured(work: "Mapping[str, Work]", timed: "Mapping[str, Timed]") -> list[dict[str, Any]]:
    """Rows of the phases that were timed; `measured_us` is less the launch, which has a row of its own."""
    from specjax.engine.profile import LAUNCH, WHOLE

    launch, rows = timed[LAUNCH].seconds, []
    for phase in timed:
        if phase in WHOLE:
            continue
        time, less = timed[phase], 0.0 if phase == LAUNCH else launch
        row = _row(phase, work.get(phase))
        row["measured_us"] = max(time.seconds - less, 0.0) * 1e6
        row["measured_range_us"] = [max(x - less, 0.0) * 1e6 for x in (time.least, time.most)]
        if row.get("roofline_us") and row["measured_us"]:
            row["of_roofline"] = row["roofline_us"] / row["measured_us"]
        rows.append(row)
    return rows


def whole(timed: "Mapping[str, Timed]") -> list[dict[str, Any]]:
    """The programs that hold several phases, as they were timed."""
    from specjax.engine.profile import WHOLE

    found = []
    for name in (name for name in WHOLE if name in timed):
        time = timed[name]
        spread = [time.least * 1e6, time.most * 1e6]
        found.append({"program": name, "measured_us": time.seconds * 1e6, "measured_range_us": spread})
    return found


def compiled(work: "Mapping[str, Work]", rows: Sequence[dict[str, Any]], only: Collection[str]) -> list[dict[str, Any]]:
    """Rows of a round's phases, with what their compiler says and those of their stages."""
    found = []
    for phase, part in work.items():
        if only and phase not in only:
            continue
        row, said = _row(phase, part), [x for x in rows if x.get("phase") == phase]
        told = [{key: value for key, value in x.items() if key not in ("phase", "job", "chip")} for x in said]
        for about in (x for x in told if "stage" not in x):
            row |= about
        stages = [_state(x) for x in told if "stage" in x]
        if stages:
            row["stages"] = stages
        if failed := [f"{x['stage']}: {x['error']}" for x in stages if "error" in x]:
            row["error"] = "; ".join(failed)
        found.append(_state(row, bool(said)))
    # What failed before there was a phase, a compiler that does not start for example.
    return found + [{"phase": row["job"], "error": row["error"]} for row in rows if not {"phase", "program"} & set(row)]


def _state(row: dict[str, Any], compiled: bool = True) -> dict[str, Any]:
    """The row with what was done: compiled, failed, declined, or the roofline alone."""
    failed = next((key for key in ("error", "declined") if key in row), None)
    state = {"error": "failed", "declined": "declined", None: "compiled" if compiled else "roofline"}[failed]
    return row | {"state": state}


def show(found: dict[str, Any]) -> None:
    """The table, on stdout."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    drafts = f"{found['drafter']} {found['drafts']}" if found["drafts"] else "no drafts"
    console.print(
        f"{found['op']}: {found['target']}, {found['dtype']}, on {found['device']}"
        f"{'' if found['attached'] else ' (not here)'}; batch {found['batch']} of {found['rows']} rows, context "
        f"{found['context']}, {drafts}" + (f"; medians of {found['repeats']}" if found["attached"] else "")
    )
    rows = found["phases"]
    lines = [*rows, *(stage for row in rows for stage in row.get("stages", ())), *found["programs"]]
    used = [key for key in COLUMNS if any(line.get(key) is not None for line in lines)]
    units = [unit for unit in SHOWN_UNITS if any(unit in line.get("units", ()) for line in lines)]
    table = Table(show_edge=False)
    table.add_column("phase", no_wrap=True)
    for name in [*(COLUMNS[key][0] for key in used), *units]:
        table.add_column(name, justify="right")
    if not found["attached"]:
        table.add_column("", no_wrap=True)
    for row in rows:
        for name, line in [(row["phase"], row), *((f"  {x['stage']}", x) for x in row.get("stages", ()))]:
            table.add_row(name, *_cells(line, used, units), *([line["state"]] if "state" in line else []))
    sums = {key: sum(row.get(key) or 0.0 for row in rows) for key in ("bytes", "flops", "roofline_us", "measured_us")}
    sums = {key: value for key, value in sums.items() if key in used}
    if len(rows) > 1 and sums:
        table.add_section()
        table.add_row("all phases", *_cells(sums, used, units))
    for program in found["programs"]:
        table.add_row(program["program"], *_cells(program, used, units))
    console.print(table)
    for row in [*rows, *found["programs"]]:
        if "declined" in row or "error" in row:
            name, declined = row.get("phase") or row["program"], f"declined: {row.get('declined')}"
            console.print(f"{name}: {row.get('error') or declined}", markup=False)
    for note in found["notes"]:
        console.print(f"-> {note}", markup=False)
    if found.get("trace"):
        console.print(f"-> trace: xprof --logdir {found['trace']}, or open its perfetto_trace.json.gz in Perfetto")


def _cells(row: Mapping[str, Any], used: Sequence[str], units: Sequence[str]) -> list[str]:
    cells = []
    for key in used:
        _, scale, form = COLUMNS[key]
        value = row.get(key)
        text = "" if value is None or (key in ("bytes", "flops") and not value) else format(value / scale, form)
        if key == "measured_us" and value is not None and "measured_range_us" in row:
            text += " ({:.0f}-{:.0f})".format(*row["measured_range_us"])
        cells.append(text)
    share = row.get("units", {})
    return cells + [f"{share[unit]:.0%}" if unit in share else "" for unit in units]


def draw(found: dict[str, Any], path: Path) -> None:
    """A stacked bar a source (roofline, compiler, measured) on the left, the roofline with the phases on the right."""
    from matplotlib.figure import Figure

    from specjax.costmodel.tables import replacing

    rows = found["phases"]
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    bars, roof = figure.subplots(1, 2)
    sources = {
        "roofline_us": "roofline",
        "compiler_us": "compiler",
        "estimate_us": "schedule",
        "measured_us": "measured",
    }
    shown = [key for key in sources if any(row.get(key) for row in rows)]
    bottoms = [0.0] * len(shown)
    for i, row in enumerate(rows):
        heights = [row.get(key) or 0.0 for key in shown]
        bars.bar([sources[key] for key in shown], heights, bottom=bottoms, color=f"C{i}", label=row["phase"])
        bottoms = [low + height for low, height in zip(bottoms, heights, strict=True)]
    for program in found["programs"]:
        if (time := program.get("measured_us") or program.get("compiler_us")) is not None:
            bars.axhline(time, color="0.4", linewidth=0.8, linestyle="--")
            bars.annotate(program["program"], (1, time), xycoords=("axes fraction", "data"), fontsize=7,
                          ha="right", va="bottom")  # fmt: skip
    bars.set_ylabel("µs a round")
    bars.legend(fontsize=7)
    peak, bandwidth = found["peak_flops"], found["bandwidth"]
    points = [row for row in rows if row.get("flops") and row.get("bytes")]
    if peak and points:
        reach = [min(r["flops"] / r["bytes"] for r in points) / 4, peak / bandwidth * 8]
        ends = [reach[0], peak / bandwidth, reach[1]]
        roof.plot(ends, [min(peak, x * bandwidth) / 1e12 for x in ends], color="0.3", linewidth=1.2)
        for row in points:
            time = row.get("measured_us") or row.get("estimate_us") or row.get("compiler_us") or row["roofline_us"]
            place = row["flops"] / row["bytes"], row["flops"] / time / 1e6
            roof.plot(*place, "o", color=f"C{rows.index(row)}")
            roof.annotate(row["phase"], place, fontsize=8, xytext=(4, -8), textcoords="offset points")
        roof.set_xscale("log")
        roof.set_yscale("log")
    roof.set_xlabel("operations a byte")
    roof.set_ylabel("TFLOP/s")
    figure.suptitle(
        f"{found['op']}, {found['target']}, {found['dtype']}, {found['device']}, batch {found['batch']} of "
        f"{found['rows']} rows, context {found['context']}",
        fontsize=10,
    )
    with replacing(path) as part:
        figure.savefig(part, format=path.suffix.removeprefix(".") or "png", dpi=110)
