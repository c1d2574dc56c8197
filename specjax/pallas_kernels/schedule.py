"""Reading the TPU compiler's own schedule: bundles of each loop of a kernel, and how full its units are.

With `--xla_jf_dump_to=DIR --xla_jf_dump_llo_text=true` in LIBTPU_INIT_ARGS, libtpu writes the final instruction bundles
of every kernel. A bundle takes one cycle unless it waits; waiting for copies is not in the schedule, so bundles over
the clock are the time of a kernel whose data is there.
"""

import dataclasses
import glob
import re
from pathlib import Path

UNITS = ("MXU", "XLU", "VALU", "VPOP", "EUP", "VLOAD", "FILL", "VSTORE", "SPILL", "SALU")
_BUNDLE = re.compile(r"\s*(?:0x)?[0-9a-f]+\s*(LB)?[A-Z]*\s*:\s*(>*) *(\{\})?")


@dataclasses.dataclass
class Loop:
    """A loop of a kernel, or the kernel itself.

    Attributes:
        bundles: of one trip, inner loops left out.
        used: instructions in those bundles for each of `UNITS`.
        loops: the inner loops, in order.
    """

    bundles: int = 0
    used: dict[str, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(UNITS, 0))
    loops: list["Loop"] = dataclasses.field(default_factory=list)

    def has(self, unit: str) -> bool:
        """Whether the loop or one inside it uses a unit."""
        return self.used[unit] > 0 or any(loop.has(unit) for loop in self.loops)

    def total(self, unit: str | None = None) -> int:
        """Bundles (or instructions of a unit), every loop once."""
        own = self.bundles if unit is None else self.used[unit]
        return own + sum(loop.total(unit) for loop in self.loops)


@dataclasses.dataclass
class Schedule:
    """A kernel's schedule: its loops, and how many instructions of each unit a bundle can hold."""

    kernel: Loop
    capacity: dict[str, int]

    def fullness(self, loop: Loop) -> dict[str, float]:
        """Share of the unit slots of a loop's own bundles that are used."""
        return {u: loop.used[u] / max(1, loop.bundles * self.capacity[u]) for u in UNITS}

    def filled(self, *loops: Loop) -> dict[str, float]:
        """The same over the bundles of loops and those inside them, every loop counted once."""
        bundles = sum(loop.total() for loop in loops)
        return {u: sum(loop.total(u) for loop in loops) / max(1, bundles * self.capacity[u]) for u in UNITS}


def read(folder: Path, kernel: str) -> Schedule:
    """The schedule that the compiler has written for the newest kernel of this name.

    Raises:
        FileNotFoundError: there is none.
    """
    bundles = [p for p in folder.glob(f"*{kernel}*-final_bundles.txt") if "schedule-analysis" not in p.name]
    use = list(folder.glob(f"*{kernel}*-final_hlo-static-per-bundle-utilization.txt"))
    if not bundles or not use:
        raise FileNotFoundError(f"the compiler has written no schedule of {kernel} to {folder}")
    return parse(max(bundles).read_text(), max(use).read_text())


def read_program(folder: Path) -> Schedule:
    """The schedules of all kernels that the compiler has written to a folder, as the loops of one.

    Raises:
        FileNotFoundError: there is none.
    """
    found, capacity = [], {}
    for path in sorted(folder.glob("*-final_bundles.txt")):
        name, _, kind = path.name.rpartition("-")[0].rpartition("-")  # of TIME-KERNEL-NUMBER-final_bundles.txt
        use = list(folder.glob(f"{glob.escape(name)}-*-final_hlo-static-per-bundle-utilization.txt"))
        if path.name.endswith("schedule-analysis_final_bundles.txt") or not kind.isdigit() or not use:
            continue
        kernel = parse(path.read_text(), use[0].read_text())
        found.append(kernel.kernel)
        capacity = kernel.capacity
    if not found:
        raise FileNotFoundError(f"the compiler has written no schedule to {folder}")
    return Schedule(Loop(loops=found), capacity)


def parse(bundles: str, utilization: str) -> Schedule:
    """`read` on the text of the two files."""
    rows = [line.split() for line in utilization.splitlines()]
    capacity, *counts = [[int(x) for x in row] for row in rows if row and all(x.isdigit() for x in row)]
    root = Loop()
    open_loops, depth = [root], 0
    lines = (match for line in bundles.splitlines() if (match := _BUNDLE.match(line)))
    for match, used in zip(lines, counts, strict=False):
        starts, arrows, empty = match.groups()
        depth = depth if empty and not arrows else len(arrows)  # an empty bundle does not say how deep it is
        del open_loops[depth if starts else depth + 1 :]
        while len(open_loops) <= depth:
            open_loops.append(Loop())
            open_loops[-2].loops.append(open_loops[-1])
        loop = open_loops[-1]
        loop.bundles += 1
        for unit, n in zip(UNITS, used, strict=True):
            loop.used[unit] += n
    if not root.total():
        raise ValueError("no bundle in the compiler's dump: its format is not the one known here")
    return Schedule(root, dict(zip(UNITS, capacity, strict=True)))
