"""How large the fused step's weight tiles are, chosen once at load: by rule, or from a device's table."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Self

import jax.numpy as jnp

from specjax.pallas_kernels.tuning import Tiles

LANES = 128
TILE_BYTES = 2**21
COPY_BYTES = 2**16  # what starting a copy costs, in bytes that could have come meanwhile
SIDES = tuple(itertools.product(range(LANES, 1025, LANES), range(LANES, 4097, LANES)))


@dataclasses.dataclass(frozen=True)
class Matrices:
    """The sizes of a layer's matrices: what decides how they are cut.

    Attributes:
        hidden: model width.
        intermediate: width of the gated MLP.
        heads: query heads.
        groups: key/value heads.
        dim: width of a head.
        dtype: of activations.
        int8: weights have 8 bits.
    """

    hidden: int
    intermediate: int
    heads: int
    groups: int
    dim: int
    dtype: str
    int8: bool

    @property
    def item(self) -> int:
        return 1 if self.int8 else jnp.dtype(self.dtype).itemsize

    def shapes(self) -> tuple[tuple[str, int, int], ...]:
        """Name, outputs and inputs of each, in the order of their use; `gate_up` is two of its size."""
        return (
            ("qkv", (self.heads + 2 * self.groups) * self.dim, self.hidden),
            ("out", self.hidden, self.heads * self.dim),
            ("gate_up", self.intermediate, self.hidden),
            ("down", self.hidden, self.intermediate),
        )

    def key(self) -> dict[str, str | int]:
        """As of `tuning.Sizes`; every size counts, since a tile must fit all matrices."""
        return dataclasses.asdict(self) | {"int8": int(self.int8)}


@dataclasses.dataclass(frozen=True)
class Cut(Tiles):
    """Of the weights of `tpu.py`: a tile holds `columns` inputs of `rows` outputs."""

    kernel: ClassVar[str] = "decode_step/cut"

    rows: int
    columns: int

    @classmethod
    def rule(cls, sizes: Matrices, most: int = TILE_BYTES) -> Self:
        """Tiles of up to `most` bytes that waste least: padding costs its bytes, every tile a copy of its own."""

        def moved(side):
            rows, columns = side
            tiles = sum(
                -(-out // rows) * -(-size // columns) * (2 if name == "gate_up" else 1)
                for name, out, size in sizes.shapes()
            )
            return tiles * (rows * columns * sizes.item + COPY_BYTES)

        return cls(*min((side for side in SIDES if side[0] * side[1] * sizes.item <= most), key=moved))

    def around(self, sizes: Matrices) -> Iterator[Self]:
        """These, and what wastes least among tiles of other sizes."""
        yield from dict.fromkeys((self, *(self.rule(sizes, most) for most in (2**19, 2**20, 2**21, 2**22))))

    @classmethod
    def options(cls, sizes: Any) -> Mapping[str, Any]:
        """None: the two sides are chosen together, in `around`."""
        return {}

    def problem(self, sizes: Matrices) -> str | None:
        if (self.rows, self.columns) not in SIDES:
            return f"tiles of {self.rows} x {self.columns}, of multiples of {LANES} up to 1024 x 4096"
        if (size := self.rows * self.columns * sizes.item) > 2 * TILE_BYTES:
            return f"tiles of {size} bytes, of up to {2 * TILE_BYTES}"
        return None
