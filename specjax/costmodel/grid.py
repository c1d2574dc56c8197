"""Seconds over a grid of requests, rows and contexts: linear between its cells, each of which says where it is from."""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np

SOURCES = {"m": "measured", "c": "compiler", "r": "roofline", "p": "published"}
_LETTERS = {name: letter for letter, name in SOURCES.items()}


@dataclasses.dataclass(frozen=True)
class Grid:
    """Seconds over some axes, with the source of each cell as one letter.

    Attributes:
        axes: ascending coordinates, one tuple an axis.
        seconds: the times.
        sources: letters of `SOURCES`, of the same shape.
    """

    axes: tuple[tuple[float, ...], ...]
    seconds: np.ndarray
    sources: np.ndarray

    def __post_init__(self):
        shape = tuple(len(axis) for axis in self.axes)
        if self.seconds.shape != shape or self.sources.shape != shape:
            raise ValueError(f"a grid of {shape} cells has {self.seconds.shape} times, {self.sources.shape} sources")
        if any(list(axis) != sorted(set(axis)) for axis in self.axes):
            raise ValueError(f"coordinates must ascend, got {self.axes}")
        if not (np.isfinite(self.seconds).all() and (self.seconds > 0).all()):
            raise ValueError("times must be positive")
        if any((np.diff(self.seconds, axis=a) < 0).any() for a in range(len(shape))):
            raise ValueError("times must not fall as a coordinate grows; fit them with `isotonic.monotone`")
        if unknown := set(self.sources.ravel().tolist()) - SOURCES.keys():
            raise ValueError(f"unknown sources {sorted(unknown)}; known are {sorted(SOURCES)}")

    def at(self, *point: Any) -> Any:
        """Seconds at a point; coordinates may be arrays that broadcast."""
        return self.mixed(corners_of(self.axes, point))

    def mixed(self, corners: list[tuple[Any, tuple]]) -> Any:
        """Seconds at a point, from the cells around it and their shares."""
        total = 0.0
        for weight, index in corners:
            total = total + weight * self.seconds[index]
        return total

    def source(self, *point: float) -> str:
        """Source of the nearest cell below each coordinate."""
        index = tuple(int(_place(np.asarray(axis, float), x)[0]) for axis, x in zip(self.axes, point, strict=True))
        return SOURCES[str(self.sources[index])]

    def to_json(self) -> dict[str, Any]:
        letters = set(self.sources.ravel().tolist())
        flat = self.sources.reshape(-1, self.sources.shape[-1])
        source = letters.pop() if len(letters) == 1 else ["".join(line) for line in flat.tolist()]
        return {"us": _plain(_rounded(self.seconds * 1e6).tolist()), "source": source}

    @classmethod
    def from_json(cls, axes: tuple[tuple[float, ...], ...], given: Mapping[str, Any]) -> "Grid":
        seconds = np.asarray(given["us"], float) / 1e6
        source = given["source"]
        letters = np.full(seconds.shape, source) if isinstance(source, str) else np.array([list(s) for s in source])
        return cls(axes, seconds, letters.reshape(seconds.shape))

    @classmethod
    def of(cls, axes: tuple[tuple[float, ...], ...], seconds: Any, source: str) -> "Grid":
        """A grid whose cells have one source."""
        seconds = np.asarray(seconds, float)
        return cls(axes, seconds, np.full(seconds.shape, _LETTERS[source]))


def corners_of(axes: tuple[tuple[float, ...], ...], point: tuple) -> list[tuple[Any, tuple]]:
    """The cells around a point: the share of each, and its index."""
    around = [_place(np.asarray(axis, float), x) for axis, x in zip(axes, point, strict=True)]
    corners = []
    for choice in itertools.product((False, True), repeat=len(around)):
        weight, index = 1.0, []
        for (low, high, share), upper in zip(around, choice, strict=True):
            weight = weight * (share if upper else 1 - share)
            index.append(high if upper else low)
        corners.append((weight, tuple(index)))
    return corners


def _place(axis: np.ndarray, x: Any) -> tuple[Any, Any, Any]:
    """The cells around `x`, and the share of the upper one: above 1 past the end, 0 before the start."""
    if len(axis) == 1:
        zero = np.zeros(np.shape(x), int)
        return zero, zero, np.zeros(np.shape(x))
    low = np.clip(np.searchsorted(axis, x, side="right") - 1, 0, len(axis) - 2)
    share = np.maximum((np.asarray(x, float) - axis[low]) / (axis[low + 1] - axis[low]), 0.0)
    return low, low + 1, share


def _rounded(x: np.ndarray, digits: int = 4) -> np.ndarray:
    """To significant digits; rounding keeps the order."""
    scale = 10.0 ** (digits - 1 - np.floor(np.log10(x)))
    return np.round(np.round(x * scale) / scale, 6)


def _plain(values: Any) -> Any:
    """Nested lists with whole numbers written as such: a third less of a file."""
    if isinstance(values, list):
        return [_plain(value) for value in values]
    return int(values) if values == int(values) else values
