"""What the fused step's kernels choose: banks and blocks on a TPU, pieces, turns and warps on a GPU (`tuning.py`)."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import ClassVar, Self

import jax.numpy as jnp

from specjax.pallas_kernels.decode_step.weights import Plan
from specjax.pallas_kernels.tree_attention.tiles import LANES, MIN_SIDE, Sizes, TpuTiles, up
from specjax.pallas_kernels.tuning import Tiles, bucket

BANKS, FEWEST = 12, 4
RING_BYTES = 24 * 2**20  # of copies on their way, about
CACHE_BLOCK = 512  # slots of a block of cached keys
VMEM_BYTES = 56 * 2**20  # v5p and 7x have 64 MiB a core


@dataclasses.dataclass(frozen=True)
class StepSizes:
    """The sizes of a step on a TPU.

    Attributes:
        plan: the decoder and its tiles.
        attention: of one layer, its rows padded.
        taps: residual streams that are kept.
    """

    plan: Plan
    attention: Sizes
    taps: int = 0

    @property
    def rows(self) -> int:
        """Rows of the products, whole sublanes."""
        return self.attention.batch * self.attention.width

    @functools.cached_property
    def lanes(self) -> dict[str, int]:
        """Lanes of the buffers between the products: the residual stream's, heads', attention's and the MLP's."""
        plan = self.plan
        return {
            "x": max(plan.padded("out"), plan.padded("down"), plan.matrices["qkv"].inputs * plan.columns),
            "qkv": plan.matrices["qkv"].outputs * plan.rows,
            "attended": plan.matrices["out"].inputs * plan.columns,
            "mlp": max(plan.matrices["gate_up"].outputs // 2 * plan.rows, plan.matrices["down"].inputs * plan.columns),
        }

    @property
    def window(self) -> int:
        """Slots that are read, changed and written to store a request's rows: whole sublanes around them."""
        return self.attention.width + 32 // self.attention.item

    @property
    def tile_bytes(self) -> int:
        return self.plan.rows * self.plan.columns * self.plan.tile_dtype.itemsize

    def key(self) -> dict[str, str | int]:
        plan = self.plan
        own = {"hidden": plan.hidden, "intermediate": plan.intermediate, "int8": int(plan.int8)}
        return self.attention.key() | own | {"tile": self.tile_bytes}


@dataclasses.dataclass(frozen=True)
class StepTiles(Tiles):
    """Of `tpu.py`: banks of the ring of weight tiles, and of attention what `TpuTiles` has."""

    kernel: ClassVar[str] = "decode_step/tpu"

    banks: int
    block: int
    piece: int
    unroll: int
    ahead: int = 2

    @classmethod
    def rule(cls, sizes: StepSizes, most: int = CACHE_BLOCK) -> Self:
        """As many banks as the ring and VMEM have room for, at least `FEWEST`, and blocks of up to `most` slots."""
        banks = max(2, min(BANKS, RING_BYTES // sizes.tile_bytes))
        tiles = cls(banks=banks, **dataclasses.asdict(TpuTiles.rule(sizes.attention, most)))
        if tiles.loops(sizes):
            tiles = dataclasses.replace(tiles, unroll=sizes.attention.groups)
        while tiles.banks > FEWEST and tiles.vmem_bytes(sizes) > VMEM_BYTES:
            tiles = dataclasses.replace(tiles, banks=tiles.banks - 1)
        return tiles

    @property
    def attention(self) -> TpuTiles:
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(TpuTiles)}
        return TpuTiles(**own)

    @classmethod
    def options(cls, sizes: StepSizes) -> Mapping[str, Sequence[int]]:
        return {"banks": (4, 6, 8, 10, 12, 16, 20), **TpuTiles.options(sizes.attention)}

    def problem(self, sizes: StepSizes) -> str | None:
        if self.banks < 2:
            return f"{self.banks} banks, of two or more"
        if found := self.attention.problem(sizes.attention):
            return found
        if self.loops(sizes):
            return f"groups in a loop with heads of {sizes.attention.dim}, which are no whole lanes"
        needed = self.vmem_bytes(sizes)
        return None if needed <= VMEM_BYTES else f"{needed >> 20} MiB of VMEM, of {VMEM_BYTES >> 20}"

    def loops(self, sizes: StepSizes) -> bool:
        """Whether a loop over groups would store heads at lanes that are no multiples of 128."""
        return self.unroll < sizes.attention.groups and sizes.attention.dim % LANES != 0

    def vmem_bytes(self, sizes: StepSizes) -> int:
        """Banks, buffers between products, rows in and out, and what attention needs."""
        plan, item, lanes, rows = sizes.plan, sizes.attention.item, sizes.lanes, sizes.rows
        banks = self.banks * sizes.tile_bytes
        banks += plan.layers * plan.scales["all"] * plan.rows * 4 if plan.int8 else 0
        buffers = rows * 4 * (2 * lanes["x"] + lanes["qkv"] + lanes["attended"] + lanes["mlp"])
        outside = rows * item * lanes["x"] * (2 + sizes.taps) + 2 * plan.layers * lanes["x"] * 4
        dim = up(plan.dim, LANES)
        windows = 2 * plan.groups * sizes.window * dim * item
        return banks + buffers + outside + windows + self.attention.vmem_bytes(sizes.attention) + 2 * rows * dim * 4


PIECE = 32  # the fewest output columns of a piece: 64 bytes of bfloat16
LINE = 128  # bytes of weights that are read at once, where that leaves enough programs
PROGRAMS = 128  # enough: about one for each multiprocessor of a large GPU
STAGE_BYTES = 2**17  # of copies on their way for a program


@dataclasses.dataclass(frozen=True)
class ProductSizes:
    """The sizes of one of the products on a GPU.

    Attributes:
        plan: the decoder.
        matrix: of `Plan.matrices`.
        count: rows that there are.
        nvidia: or AMD.
    """

    plan: Plan
    matrix: str
    count: int
    nvidia: bool

    @property
    def dtype(self) -> jnp.dtype:
        return jnp.dtype(self.plan.dtype)

    @property
    def rows(self) -> int:
        """Rows of the product, padding included."""
        return max(MIN_SIDE, bucket(self.count))

    @property
    def pieces(self) -> int:
        """Pieces that a program has: the halves of a head, gate and up, or one."""
        return 2 if self.matrix in ("qkv", "gate_up") else 1

    @property
    def size(self) -> int:
        """Inputs of the matrix."""
        return self.plan.matrices[self.matrix].size_in

    @property
    def half(self) -> int:
        """Columns of a piece that holds half a head."""
        return max(MIN_SIDE, bucket(self.plan.dim // 2))

    @property
    def normed(self) -> bool:
        """Whether a program needs a whole head, to norm it."""
        return self.matrix == "qkv" and self.plan.qk_norm

    def key(self) -> dict[str, str | int]:
        found = self.plan.matrices[self.matrix]
        sizes = {"outputs": found.size_out, "inputs": found.size_in, "dim": self.plan.dim, "normed": int(self.normed)}
        return {"matrix": self.matrix, "dtype": self.plan.dtype, "rows": self.rows} | sizes


@dataclasses.dataclass(frozen=True)
class ProductTiles(Tiles):
    """Of one of the products of `triton.py`; powers of two, but `stages`.

    Attributes:
        piece: output columns of one of a program's pieces.
        inputs: of one turn of its loop.
        warps: of a program.
        stages: turns whose copies are on their way.
    """

    kernel: ClassVar[str] = "decode_step/triton"

    piece: int
    inputs: int
    warps: int
    stages: int

    @classmethod
    def rule(cls, sizes: ProductSizes) -> Self:
        """Whole lines, unless programs would be too few; AMD's compiler passes copies through registers: two stages."""
        item, rows = sizes.dtype.itemsize, sizes.rows
        if sizes.matrix == "qkv":
            piece = sizes.half if sizes.normed else min(PIECE, sizes.half)
        else:
            wide = LINE // item
            piece = wide if -(-sizes.plan.matrices[sizes.matrix].size_out // wide) >= PROGRAMS else PIECE
        # Of many float32 rows, 32 inputs at once spilled registers on NVIDIA where a piece is 64 columns.
        few, many = (32, 16) if item == 4 else (128, 64)
        inputs = min(few if rows <= 32 else many, max(MIN_SIDE, bucket(sizes.size)))
        turn = (rows + sizes.pieces * piece) * inputs * item
        stages = min(4, STAGE_BYTES // turn) if sizes.nvidia else 2
        return cls(piece=piece, inputs=inputs, warps=4 if rows <= 32 else 8, stages=stages)

    @classmethod
    def options(cls, sizes: ProductSizes) -> Mapping[str, Sequence[int]]:
        return {
            "piece": (16, 32, 64, 128),
            "inputs": (16, 32, 64, 128, 256),
            "warps": (2, 4, 8),
            "stages": (2, 3, 4, 5, 6) if sizes.nvidia else (1, 2, 3),
        }

    def problem(self, sizes: ProductSizes) -> str | None:
        for name in ("piece", "inputs"):
            value = getattr(self, name)
            if value < MIN_SIDE or value != bucket(value):
                return f"{name} of {value}, of powers of two from {MIN_SIDE} on"
        if self.piece > LANES:
            return f"a piece of {self.piece} columns, which one tile of weights may not hold, of up to {LANES}"
        if sizes.normed and self.piece != sizes.half:
            return f"a piece of {self.piece} columns where a whole head is normed, of {sizes.half}"
        if sizes.matrix == "qkv" and self.piece > sizes.half:
            return f"a piece of {self.piece} columns of half a head, of up to {sizes.half}"
        if self.inputs > max(MIN_SIDE, bucket(sizes.size)):
            return f"{self.inputs} inputs at once, of {sizes.size}"
        if self.warps not in (1, 2, 4, 8, 16) or not 1 <= self.stages <= 8:
            return f"{self.warps} warps and {self.stages} stages"
        shared = (sizes.rows + sizes.pieces * self.piece) * self.inputs * sizes.dtype.itemsize * self.stages
        return None if shared <= 2 * STAGE_BYTES else f"{shared >> 10} KiB on their way, of {2 * STAGE_BYTES >> 10}"
