"""Sizes that a kernel may choose freely: as a table of the device says, else by the kernel's own rule.

What a kernel computes does not depend on them, only how fast. A kernel has a class of them (`Tiles`): which there are,
the rule, what is allowed. Tables (`tuning_tables.py`) are looked up while a program is traced, by device, dtype and
bucketed shape; a table that was measured here comes before the package's. Nothing looks at a device on import.
"""

import contextlib
import dataclasses
import functools
import logging
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol, Self

import jax

from specjax.costmodel import facts
from specjax.pallas_kernels import tuning_tables as tables

_log = logging.getLogger(__name__)
_recorder: dict[tuple[type["Tiles"], "Sizes"], None] | None = None


class Sizes(Protocol):
    """The static sizes of a call, hashable."""

    def key(self) -> Mapping[str, str | int]:
        """What a table tells calls apart by: the sizes that matter, large ones rounded up to powers of two."""
        ...


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Base of what a kernel chooses; every field is a whole number.

    Attributes:
        kernel: the op and the kernel of it, `op/name`.
    """

    kernel: ClassVar[str]

    @classmethod
    def rule(cls, sizes: Any) -> Self:
        """What is chosen without a table."""
        raise NotImplementedError

    @classmethod
    def options(cls, sizes: Any) -> Mapping[str, Sequence[int]]:
        """Values of each field that are worth a measurement."""
        raise NotImplementedError

    def problem(self, sizes: Any) -> str | None:
        """Why a call of these sizes cannot have these tiles; None if it can."""
        raise NotImplementedError

    def around(self, sizes: Any) -> Iterator[Self]:
        """These tiles, and all allowed ones that differ from them in one field."""
        yield self
        for name, values in self.options(sizes).items():
            for value in values:
                other = dataclasses.replace(self, **{name: value})
                if other != self and other.problem(sizes) is None:
                    yield other

    @classmethod
    def candidates(cls, sizes: Any) -> Iterator[Self]:
        """What a measurement begins with: the rule's tiles and those around them."""
        return cls.rule(sizes).around(sizes)

    @classmethod
    def read(cls, given: Mapping[str, Any], sizes: Any) -> Self:
        """Tiles from a table.

        Raises:
            ValueError: fields that are missing, unknown or no whole numbers, or what `problem` says.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        if given.keys() != names or not all(type(x) is int and x >= 0 for x in given.values()):
            raise ValueError(f"{dict(given)} are no tiles of {cls.kernel}, which are whole numbers {sorted(names)}")
        tiles = cls(**given)
        if (found := tiles.problem(sizes)) is not None:
            raise ValueError(found)
        return tiles


def choose[T: Tiles](kind: type[T], sizes: Any) -> T:
    """The tiles of a call: a table's where the device around the trace has one that holds, else the rule's."""
    if _recorder is not None:
        _recorder[kind, sizes] = None
    name = device()
    if name is None:
        return kind.rule(sizes)
    op, _, backend = kind.kernel.partition("/")
    found, passed = tables.known(name, op)
    for line in passed:
        _note(line)
    for table in found:
        entry = table.find(backend, sizes.key())
        if entry is None:
            continue
        try:
            return kind.read(entry.tiles, sizes)
        except ValueError as error:
            _note(f"{kind.kernel}: an entry for {name} was passed over: {error}")
    _missed(kind.kernel, name)
    return kind.rule(sizes)


def device() -> str | None:
    """The accelerator that the program being traced is for, as the cost model names it; None on a CPU.

    One of which the cost model knows nothing goes by the name that JAX reports, in small letters.
    """
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is not None:
        platform, kind = abstract.platform, abstract.device_kind
    else:
        platform, kind = jax.default_backend(), jax.devices()[0].device_kind
    if platform == "cpu":
        return None
    try:
        return facts.find(kind).name
    except ValueError:
        return re.sub(r"[^a-z0-9]+", "-", kind.lower()).strip("-")


@contextlib.contextmanager
def recording() -> Generator[dict[tuple[type[Tiles], Any], None]]:
    """The kernels and sizes for which tiles are chosen meanwhile, in order; what is traced already is not seen."""
    global _recorder
    before, _recorder = _recorder, {}
    try:
        yield _recorder
    finally:
        _recorder = before


def bucket(size: int) -> int:
    """The next power of two."""
    return 1 << max(size - 1, 0).bit_length()


@functools.cache
def _missed(kernel: str, name: str) -> None:
    """One line for each kernel and device."""
    _log.warning(
        "%s: no measured sizes for a shape on %s, chosen by rule (`specjax calibrate --kernels` measures them)",
        kernel,
        name,
    )


@functools.cache
def _note(line: str) -> None:
    """One line, once."""
    _log.warning("%s", line)
