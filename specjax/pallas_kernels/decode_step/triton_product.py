"""The product of a few rows with some columns of one of the fused step's matrices, inside a Triton kernel."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from specjax.array_types import Array
from specjax.pallas_kernels.decode_step.tiles import ProductSizes, ProductTiles
from specjax.pallas_kernels.decode_step.weights import Plan


@dataclasses.dataclass(frozen=True)
class Block:
    """What a program works on.

    Attributes:
        count: rows that there are.
        rows: rows of its products, padding included.
        piece: output columns of one of its pieces.
        size: inputs of its matrix.
        inputs: inputs of one turn of its loop.
        dtype: of rows and weights.
        eps: of the RMSNorm before the product, where there is one.
        warps: of a program.
        stages: turns whose copies are on their way.
    """

    count: int
    rows: int
    piece: int
    size: int
    inputs: int
    dtype: jnp.dtype
    eps: float
    warps: int
    stages: int

    @classmethod
    def of(cls, sizes: ProductSizes, tiles: ProductTiles) -> "Block":
        return cls(
            count=sizes.count,
            rows=sizes.rows,
            piece=tiles.piece,
            size=sizes.size,
            inputs=tiles.inputs,
            dtype=sizes.dtype,
            eps=sizes.plan.eps,
            warps=tiles.warps,
            stages=tiles.stages,
        )

    def stream(self, x, tiles, pieces: list["Piece"], norm=None, which=None) -> tuple[list[Array], Array, Array]:
        """Sums `[rows, piece]` of all rows over all inputs, a piece each, in float32.

        Args:
            x: reference to the rows, `[N, i]`.
            tiles: reference to the weights, `[T * i, o]`.
            pieces: output columns.
            norm: reference to the weights of norms, one of which comes before the product.
            which: row of them.

        Returns:
            Sums, rows, and which rows there are.
        """
        rows = jnp.arange(self.rows, dtype=jnp.int32)
        live, whole = rows < self.count, self.size % self.inputs == 0

        def add(index, carry):
            squares, *sums = carry
            inputs = index * self.inputs + jnp.arange(self.inputs, dtype=jnp.int32)
            valid = live[:, None] if whole else live[:, None] & (inputs < self.size)[None, :]
            a = pltriton.load(x.at[rows[:, None], inputs[None, :]], mask=valid, other=0.0)
            if norm is not None:
                options: dict[str, Any] = {} if whole else {"mask": inputs < self.size, "other": 0.0}
                weight = pltriton.load(norm.at[which, inputs], **options).astype(jnp.float32)
                wide = a.astype(jnp.float32)
                squares = squares + jnp.sum(wide * wide, axis=1)
                a = (wide * weight[None, :]).astype(self.dtype)
            made = [self.dot(a, piece.load(tiles, inputs)) for piece in pieces]
            return squares, *[y + new for y, new in zip(sums, made, strict=True)]

        sums = [jnp.zeros((self.rows, self.piece), jnp.float32) for _ in pieces]
        first = jnp.zeros((self.rows,), jnp.float32), *sums
        squares, *sums = jax.lax.fori_loop(0, pl.cdiv(self.size, self.inputs), add, first)
        if norm is not None:
            scale = jax.lax.rsqrt(squares / self.size + self.eps)
            sums = [y * scale[:, None] for y in sums]
        return sums, rows, live

    def dot(self, a: Array, b: Array) -> Array:
        precision = jax.lax.Precision.HIGHEST if self.dtype == jnp.float32 else None
        return jax.lax.dot(a, b, precision=precision, preferred_element_type=jnp.float32)


@dataclasses.dataclass(frozen=True)
class Piece:
    """Output columns of a matrix.

    Attributes:
        start: row of the flat tiles at which each column's inputs begin.
        lanes: place of each in its row.
        live: which of them are wanted, None for all.
    """

    start: Array
    lanes: Array
    live: Array | None

    @classmethod
    def of(cls, plan: Plan, name: str, layer: Array, columns: Array, first: Array | None, turn=0, live=None) -> "Piece":
        """`first` is the first column where all lie in one tile, None where they may not; `turn` 1 is up after gate."""
        matrix, each = plan.matrices[name], 2 if name == "gate_up" else 1
        tile = jax.lax.div(columns if first is None else first, plan.rows)
        start = (layer * plan.tiles + matrix.first + (tile * each + turn) * matrix.inputs) * plan.columns
        return cls(start if first is None else jnp.full(columns.shape, start), columns - tile * plan.rows, live)

    def load(self, tiles, inputs: Array) -> Array:
        """Weights `[inputs, columns]`; one program reads them once, so they need not stay in a cache."""
        at = tiles.at[self.start[None, :] + inputs[:, None], self.lanes[None, :]]
        options: dict[str, Any] = {} if self.live is None else {"mask": self.live[None, :], "other": 0.0}
        return pltriton.load(at, eviction_policy="evict_first", **options)
