"""Tables of tuned sizes: a JSON file for each device and op, in the package or in the user's cache folder.

    {"format": 1, "provenance": {"device": "h100", "op": "tree_attention", ...}, "entries": [
    {"kernel": "triton", "where": {"dtype": "bfloat16", "dim": 128, ...}, "tiles": {"block": 64, ...}, "source": ...}]}

An entry holds for calls whose sizes have all of its `where`; of several, the one that says most.
"""

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from importlib import metadata, resources
from pathlib import Path
from typing import Any

from specjax.costmodel.tables import ForeignTableError, default_folder, replacing

FORMAT = 1
SOURCES = ("measured", "compiled")
# Folders whose code decides how fast an op's kernels are.
CODE = {"tree_attention": ("tree_attention",), "decode_step": ("decode_step", "tree_attention")}


@dataclasses.dataclass(frozen=True)
class Provenance:
    """What a table holds for; fields that are None hold for all.

    Attributes:
        device: as the cost model names it.
        op: a folder of `pallas_kernels`.
        jax: version.
        code: of the op's kernels (`digest`).
        compiler: version, of what made the entries that are compiled.
        date: of the making.
        made_by: the command.
    """

    device: str
    op: str
    jax: str | None = None
    code: str | None = None
    compiler: str | None = None
    date: str | None = None
    made_by: str | None = None

    def differences(self, wanted: "Provenance") -> list[str]:
        """A line for each field in which a table of this provenance does not hold for `wanted`."""
        pairs = {name: (getattr(self, name), getattr(wanted, name)) for name in ("device", "op", "jax", "code")}
        return [
            f"{name}: the table has {mine!r}, this is {theirs!r}"
            for name, (mine, theirs) in pairs.items()
            if mine is not None and theirs is not None and mine != theirs
        ]


@dataclasses.dataclass(frozen=True)
class Entry:
    """What to choose, and where.

    Attributes:
        kernel: of the op.
        where: sizes that a call must have.
        tiles: what it then takes.
        source: `measured` on the device, or `compiled`: its compiler took these, and not the rule's.
        us: microseconds of a call, where it was measured.
        rule_us: the same with what the rule chooses.
    """

    kernel: str
    where: Mapping[str, str | int]
    tiles: Mapping[str, int]
    source: str
    us: float | None = None
    rule_us: float | None = None

    def __post_init__(self):
        if self.source not in SOURCES:
            raise ValueError(f"an entry is {' or '.join(SOURCES)}, not {self.source!r}")
        if (self.source == "measured") != (self.us is not None):
            raise ValueError("measured entries, and no others, have a time")

    def holds(self, key: Mapping[str, str | int]) -> bool:
        return all(key.get(name) == value for name, value in self.where.items())


@dataclasses.dataclass(frozen=True)
class Table:
    """The entries of a device and an op."""

    provenance: Provenance
    entries: tuple[Entry, ...]

    def find(self, kernel: str, key: Mapping[str, str | int]) -> Entry | None:
        """The entry that says most of those that hold, the first of equals."""
        holding = [entry for entry in self.entries if entry.kernel == kernel and entry.holds(key)]
        return max(holding, key=lambda entry: len(entry.where), default=None)

    def updated(self, entries: Iterable[Entry]) -> "Table":
        """With these entries in the place of those for the same sizes."""
        found = {(e.kernel, json.dumps(e.where, sort_keys=True)): e for e in (*self.entries, *entries)}
        return dataclasses.replace(self, entries=tuple(found.values()))

    def require(self, wanted: Provenance) -> "Table":
        """This table, if it holds for `wanted`.

        Raises:
            ForeignTableError: it does not; every difference is listed.
        """
        if found := self.provenance.differences(wanted):
            raise ForeignTableError("its sizes were chosen for something else:" + "".join(f"\n  - {f}" for f in found))
        return self

    def write(self, path: Path) -> None:
        """Write the file; it appears whole or not at all."""

        def short(given: Any) -> str:
            return json.dumps({k: v for k, v in dataclasses.asdict(given).items() if v is not None})

        entries = ",\n".join(short(entry) for entry in self.entries)
        text = f'{{\n"format": {FORMAT},\n"provenance": {short(self.provenance)},\n"entries": [\n{entries}\n]\n}}\n'
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
            given = json.loads(path.read_text(encoding="utf-8"))
            if given["format"] != FORMAT:
                raise ValueError(f"format {given['format']!r}, this reads {FORMAT}")
            return cls(Provenance(**given["provenance"]), tuple(Entry(**entry) for entry in given["entries"]))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is no table of kernel sizes: {error}") from None


def provenance(device: str, op: str) -> Provenance:
    """What a table must have been made for to hold here."""
    return Provenance(device=device, op=op, jax=metadata.version("jax"), code=digest(op))


@functools.cache
def digest(op: str) -> str:
    """Eight hex digits of the code of an op's kernels."""
    folders = [resources.files("specjax.pallas_kernels").joinpath(name) for name in CODE[op]]
    files = [file for folder in folders for file in folder.iterdir() if file.name.endswith(".py")]
    text = b"".join(file.read_bytes() for file in sorted(files, key=str))
    return hashlib.sha256(text).hexdigest()[:8]


def shipped_path(device: str, op: str) -> Path:
    """Where the package keeps its table of a device and an op."""
    return Path(str(resources.files("specjax.pallas_kernels").joinpath("tables", device, f"{op}.json")))


def own_path(device: str, op: str) -> Path:
    """Where the user's measured table belongs."""
    return default_folder().parent / "kernels" / device / f"{op}.json"


def known(device: str, op: str) -> tuple[tuple[Table, ...], tuple[str, ...]]:
    """The tables of a device and an op that hold here, the user's first, and a line for each one passed over."""
    paths = own_path(device, op), shipped_path(device, op)
    return _known(device, op, tuple((path, _changed(path)) for path in paths))


def _changed(path: Path) -> float | None:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return None


@functools.lru_cache(maxsize=64)
def _known(device: str, op: str, files: tuple[tuple[Path, float | None], ...]) -> tuple:
    """`known` of files that changed last at these times."""
    found, passed = [], []
    for path, changed in files:
        if changed is None:
            continue
        try:
            found.append(Table.read(path).require(provenance(device, op)))
        except ForeignTableError as error:
            passed.append(f"{path} was passed over: {error}")
        except ValueError as error:
            passed.append(f"passed over: {error}")
    return tuple(found), tuple(passed)
