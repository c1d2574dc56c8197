"""Latency tables: what a round costs for one target on one kind of device, with the source of every cell.

    T(round) = fixed + T_draft(shape; batch, context) + T_verify(batch, rows, context)

Between cells, time is linear in the rows, in the requests and in the context (exact for a sum of such terms and their
products), and beyond the last cell it goes on as it ended. A table is a JSON file; times are in microseconds.
"""

import contextlib
import dataclasses
import functools
import json
import os
import tempfile
from collections.abc import Generator, Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from specjax.costmodel import roofline
from specjax.costmodel.facts import find as find_device
from specjax.costmodel.grid import Grid, corners_of
from specjax.costmodel.roofline import Setup
from specjax.costmodel.shapes import drafter as drafter_shape
from specjax.costmodel.shapes import target as target_shape
from specjax.draft import PLAIN, DraftShape

FORMAT = 1
# How far a cell may be from the truth (a factor's logarithm), before a round has been seen.
UNCERTAINTY = {"measured": 0.05, "compiler": 0.25, "roofline": 0.3, "published": 0.1}

BATCH = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
CONTEXT = (512, 4096, 32768)


class ForeignTableError(ValueError):
    """A table that was made for something else; the message names every field that differs."""


@dataclasses.dataclass(frozen=True)
class Provenance:
    """What a table holds for. A table serves only a set-up with the same fields (those that are None hold for all).

    Attributes:
        device: kind, as `facts` names it.
        devices: how many.
        target: name of the model.
        dtype: of weights and cache.
        target_digest: of the target's configuration, where it was measured or compiled.
        drafter_digests: the same of each drafter, by kind.
        jax: version.
        compiler: version, of libtpu, the GPU's, or what made a CPU's kernels.
        date: of the making.
        made_by: the command.
    """

    device: str
    devices: int
    target: str
    dtype: str
    target_digest: str | None = None
    drafter_digests: Mapping[str, str] | None = None
    jax: str | None = None
    compiler: str | None = None
    date: str | None = None
    made_by: str | None = None

    def differences(self, wanted: "Provenance") -> list[str]:
        """A line for each field in which a table of this provenance does not hold for `wanted`."""
        found = []
        for field in dataclasses.fields(self):
            mine, theirs = getattr(self, field.name), getattr(wanted, field.name)
            if field.name in ("date", "made_by") or mine is None or theirs is None:
                continue
            if field.name == "drafter_digests":
                shared = mine.keys() & theirs.keys()
                mine, theirs = {k: mine[k] for k in shared}, {k: theirs[k] for k in shared}
            if mine != theirs:
                found.append(f"{field.name}: the table has {mine!r}, this is {theirs!r}")
        return found


@dataclasses.dataclass(frozen=True)
class Table:
    """Prices of whole rounds; see the module.

    Attributes:
        provenance: what it holds for.
        verify: over requests, rows a request, and context.
        draft: of each shape, over requests and context, its launch included.
        fixed: seconds of a round beside its passes.
        catch_up: by drafter, seconds to bring it up to date: at least, and for each missed token.
        switch: measured seconds that a change of shape costs once.
        aside: seconds of the host for a draft, its making apart: to dispatch, fetch and judge it. Of one request, and
            of each further one.
    """

    provenance: Provenance
    verify: Grid
    draft: Mapping[DraftShape, Grid]
    fixed: float
    catch_up: Mapping[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    switch: float = 0.0
    aside: tuple[float, float] = (0.0, 0.0)

    def verify_time(self, batch: Any, rows: Any, context: Any) -> Any:
        """Seconds of a pass of `rows` packed rows in all, of `batch` requests."""
        return self.verify.at(batch, np.asarray(rows, float) / batch, context)

    def draft_time(self, shape: DraftShape, batch: Any, context: Any) -> Any:
        """Seconds to draft a shape, the host's for it included; nothing for plain decoding.

        Raises:
            ValueError: the table has no such shape.
        """
        if shape.depth == 0:
            return 0.0
        if shape not in self.draft:
            raise ValueError(f"the table of {self.provenance.target} has no draft times of {shape}")
        return self.draft[shape].at(batch, context) + self.aside_time(batch)

    def draft_times(self, shapes: Iterable[DraftShape], batch: float, context: float) -> np.ndarray:
        """As `draft_time`, of several shapes at one point: grids over the same axes share the search for it."""
        corners: dict[tuple, list[tuple[Any, tuple]]] = {}
        found = []
        for shape in shapes:
            grid = self.draft.get(shape)
            if grid is None:  # plain decoding, or a shape without times
                found.append(self.draft_time(shape, batch, context))
                continue
            if grid.axes not in corners:
                corners[grid.axes] = corners_of(grid.axes, (batch, context))
            found.append(grid.mixed(corners[grid.axes]) + self.aside_time(batch))
        return np.array(found, float)

    def round_time(self, shape: DraftShape, batch: float, rows: Any, context: float) -> Any:
        """Seconds of a whole round that verifies `rows` rows in all."""
        return self.fixed + self.draft_time(shape, batch, context) + self.verify_time(batch, rows, context)

    def catch_up_time(self, kind: str, missed: float) -> float:
        """Seconds to bring a drafter up to date that missed `missed` tokens in all."""
        least, each = self.catch_up.get(kind, (0.0, 0.0))
        return least + each * missed if missed > 0 else 0.0

    def aside_time(self, batch: Any) -> Any:
        """Seconds of the host for a draft for `batch` requests, its making apart."""
        first, further = self.aside
        return first + further * (batch - 1)

    def source(self, shape: DraftShape = PLAIN, batch: float = 1, rows: float = 1, context: float = 512) -> str:
        """Source of the cells that price a round; both of them where they differ."""
        names = [self.verify.source(batch, rows / batch, context)]
        if shape.depth:
            names.append(self.draft[shape].source(batch, context))
        return "+".join(dict.fromkeys(names))

    def uncertainty(self, shape: DraftShape = PLAIN, batch: float = 1, rows: float = 1, context: float = 512) -> float:
        """How far the price of a round may be off, as a logarithm: that of its least certain cell."""
        return max(UNCERTAINTY[name] for name in self.source(shape, batch, rows, context).split("+"))

    def draft_uncertainty(self, shape: DraftShape, batch: float, context: float) -> float:
        """As `uncertainty`, of the draft alone; 0 for plain decoding."""
        return UNCERTAINTY[self.draft[shape].source(batch, context)] if shape.depth else 0.0

    def require(self, wanted: Provenance) -> "Table":
        """This table, if it holds for `wanted`.

        Raises:
            ForeignTableError: it does not; every difference is listed.
        """
        if found := self.provenance.differences(wanted):
            raise ForeignTableError(
                "the latency table was made for another set-up:" + "".join(f"\n  - {f}" for f in found)
            )
        return self

    # ---------------------------------------------------------------- files

    def to_json(self) -> dict[str, Any]:
        batch, rows, context = self.verify.axes
        return {
            "format": FORMAT,
            "provenance": {k: v for k, v in dataclasses.asdict(self.provenance).items() if v is not None},
            "batch": list(batch),
            "rows": list(rows),
            "context": list(context),
            "fixed_us": round(self.fixed * 1e6, 3),
            "switch_us": round(self.switch * 1e6, 3),
            **({"aside_us": [round(x * 1e6, 3) for x in self.aside]} if any(self.aside) else {}),
            "catch_up_us": {k: [round(x * 1e6, 5) for x in pair] for k, pair in self.catch_up.items()},
            "verify": self.verify.to_json(),
            "draft": [{"shape": dataclasses.asdict(s), **g.to_json()} for s, g in self.draft.items()],
        }

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> "Table":
        if given.get("format") != FORMAT:
            raise ValueError(f"a latency table of format {given.get('format')!r}; this reads format {FORMAT}")
        axes = tuple(tuple(given[name]) for name in ("batch", "rows", "context"))
        return cls(
            provenance=Provenance(**given["provenance"]),
            verify=Grid.from_json(axes, given["verify"]),
            draft={DraftShape(**d["shape"]): Grid.from_json((axes[0], axes[2]), d) for d in given["draft"]},
            fixed=given["fixed_us"] / 1e6,
            catch_up={kind: (a / 1e6, b / 1e6) for kind, (a, b) in given["catch_up_us"].items()},
            switch=given["switch_us"] / 1e6,
            aside=tuple(x / 1e6 for x in given.get("aside_us", (0.0, 0.0))),
        )

    def write(self, path: Path) -> None:
        """Write the file; it appears whole or not at all."""
        fields = self.to_json()
        drafts = ",\n".join(json.dumps(d, separators=(",", ":")) for d in fields.pop("draft"))
        lines = [f"{json.dumps(k)}:{json.dumps(v, separators=(',', ':'))}" for k, v in fields.items()]
        text = "{\n" + ",\n".join([*lines, f'"draft":[\n{drafts}\n]']) + "\n}\n"
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as part:
            part.write_text(text, encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> "Table":
        """Read a table.

        Raises:
            ValueError: it cannot be read, or holds what no table may; the message names the file.
        """
        try:
            return cls.from_json(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is not a latency table: {error}") from None


@contextlib.contextmanager
def replacing(path: Path) -> Generator[Path]:
    """A file to write that takes the place of `path` at the end: it appears whole or not at all."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    part = Path(name)
    try:
        yield part
        part.chmod(0o644)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def from_roofline(setup: Setup, shapes: Iterable[DraftShape], **about: Any) -> Table:
    """A table of roofline cells for `shapes`; `about` are fields of its provenance."""
    verify = [[[roofline.verify(setup, b, b * r, c) for c in CONTEXT] for r in ROWS] for b in BATCH]
    drafted = [shape for shape in shapes if shape.depth]
    draft = {}
    for shape in drafted:
        kind = drafter_shape(shape.kind)
        cells = [[roofline.draft(setup, kind, shape, b, c) for c in CONTEXT] for b in BATCH]
        draft[shape] = Grid.of((BATCH, CONTEXT), cells, "roofline")
    kinds = dict.fromkeys(shape.kind for shape in drafted)
    return Table(
        provenance=Provenance(setup.device.name, setup.count, setup.target.name, setup.dtype, **about),
        verify=Grid.of((BATCH, ROWS, CONTEXT), verify, "roofline"),
        draft=draft,
        fixed=roofline.fixed(setup),
        catch_up={kind: roofline.catch_up(setup, drafter_shape(kind), 1) for kind in kinds},
    )


def shipped(device: str, target: str) -> Path:
    """Where the package keeps its table of a device and a target."""
    return Path(str(resources.files("specjax.costmodel").joinpath("tables", device, f"{target}.json")))


def default_folder() -> Path:
    """The user's folder of measured tables."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "specjax" / "tables"


@functools.lru_cache(maxsize=32)
def _read(path: Path, changed: float) -> Table:
    del changed  # part of the key: a file that was written anew is read anew
    return Table.read(path)


def load(path: Path) -> Table:
    """As `Table.read`, kept while the file stays as it is."""
    try:
        changed = path.stat().st_mtime
    except OSError as error:
        raise ValueError(f"{path} is not a latency table: {error}") from None
    return _read(path, changed)


def resolve(
    wanted: Provenance,
    shapes: Iterable[DraftShape],
    setup: Setup | None = None,
    folder: Path | None = None,
    batch: int = 1,
) -> tuple[Table, list[str]]:
    """The best table for a set-up: measured here, else shipped, else the roofline of the device's facts.

    Args:
        wanted: the set-up.
        shapes: draft shapes that must be priced.
        setup: what to price by the roofline; None takes it from the names in `wanted`.
        folder: of measured tables; None is the user's.
        batch: requests that decode together; a table that was measured for fewer is passed over.

    Returns:
        The table, and a line for each candidate that was passed over, with the differences.

    Raises:
        ValueError: a device or a target of which nothing is known.
    """
    shapes = [shape for shape in shapes if shape.depth]
    passed = []
    folder = default_folder() if folder is None else folder
    measured = sorted((folder / wanted.device).glob(f"{wanted.target}*.json"))
    for path in [*measured, shipped(wanted.device, wanted.target)]:
        if not path.exists():
            continue
        try:
            table = load(path).require(wanted)
        except ValueError as error:
            passed.append(f"{path.name} was passed over: {error}")
            continue
        most = table.verify.axes[0][-1]
        if most < batch and most < BATCH[-1]:
            passed.append(f"{path.name} was passed over: it is for up to {most:.0f} requests, not {batch}")
            continue
        missing = [shape for shape in shapes if shape not in table.draft]
        if not missing:
            return table, passed
        passed.append(f"{path.name} was passed over: it has no draft times of {missing[0]}")
    if setup is None:
        model = target_shape(wanted.target)
        if model is None:
            raise ValueError(f"nothing is known of a target {wanted.target!r}")
        setup = Setup(find_device(wanted.device), wanted.devices, model, wanted.dtype)
    return from_roofline(setup, shapes), passed
