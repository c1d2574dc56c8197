"""What tree attention's kernels choose: how many slots, rows and programs, by rule or from a table (`tuning.py`).

The rules are by shape alone, until a device has been measured.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import jax.numpy as jnp

from specjax.array_types import Array
from specjax.draft import WORD_BITS
from specjax.pallas_kernels.tree_attention.splits import MAX_SPLITS, choose_splits
from specjax.pallas_kernels.tuning import Tiles, bucket


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of a call.

    Attributes:
        batch: requests.
        width: rows of each.
        heads: query heads.
        groups: key/value heads.
        dim: width of a head.
        keys: of the tile beside the cache.
        page: slots of a page.
        columns: pages of a request.
        dtype: of all.
        window: as of the op.
        capability: of an NVIDIA GPU, where the kernel asks for it.
    """

    batch: int
    width: int
    heads: int
    groups: int
    dim: int
    keys: int
    page: int
    columns: int
    dtype: jnp.dtype
    window: int | None = None
    capability: int | None = None

    @classmethod
    def of(cls, q: Array, k: Array, pages: Array, table: Array | None, window: int | None = None, **more: Any) -> Self:
        """The sizes of `reference.attend`'s arguments."""
        (batch, width, heads, dim), (_, keys, groups, _) = q.shape, k.shape
        columns = 1 if table is None else table.shape[1]
        dtype = jnp.dtype(pages.dtype)
        return cls(batch, width, heads, groups, dim, keys, pages.shape[2], columns, dtype, window, **more)

    @property
    def ratio(self) -> int:
        return self.heads // self.groups

    @property
    def packed(self) -> int:
        """Query rows of a group of one request: all heads that share keys, times all rows."""
        return self.ratio * self.width

    @property
    def slots(self) -> int:
        """Slots that a request can have."""
        return self.page * self.columns

    @property
    def item(self) -> int:
        return self.dtype.itemsize

    def key(self) -> dict[str, str | int]:
        """As of `tuning.Sizes`; a window bounds the context, whatever the cache."""
        return {
            "dtype": self.dtype.name,
            "dim": self.dim,
            "ratio": self.ratio,
            "groups": self.groups,
            "rows": bucket(self.width),
            "requests": bucket(self.batch),
            "context": bucket(min(self.slots, self.window or self.slots)),
            "page": "dense" if self.columns == 1 else self.page,
        }


LANES = 128
BUFFER_BYTES = 2**21  # of one block of keys
LARGEST_BLOCK = 1024
PIECE = 256  # slots of one copy of a large page
UNROLL = 8  # groups whose work the scheduler may interleave
TPU_BYTES = 48 * 2**20  # v5p and 7x have 64 MiB a core


@dataclasses.dataclass(frozen=True)
class TpuTiles(Tiles):
    """Of `tpu.py`.

    Attributes:
        block: slots worked on at once.
        piece: slots of one copy: a page, or what divides both it and a block.
        unroll: groups whose work stands side by side; the rest is a loop.
        ahead: groups whose scores are computed before they are needed.
    """

    kernel: ClassVar[str] = "tree_attention/tpu"

    block: int
    piece: int
    unroll: int
    ahead: int = 2

    @classmethod
    def rule(cls, sizes: Sizes, most: int | None = None) -> Self:
        """Blocks that fill the buffers, or of up to `most` slots; smaller ones where VMEM has no room for these."""
        most = most or BUFFER_BYTES // (sizes.groups * up(sizes.dim, LANES) * sizes.item)
        block = _block(sizes.page, most)
        unroll = max(n for n in range(1, UNROLL + 1) if sizes.groups % n == 0)
        tiles = cls(block=block, piece=_piece(sizes.page, block), unroll=unroll)
        return tiles if most <= LANES or tiles.vmem_bytes(sizes) <= TPU_BYTES else cls.rule(sizes, most // 2)

    @classmethod
    def options(cls, sizes: Sizes) -> Mapping[str, Sequence[int]]:
        return {
            "block": sorted({_block(sizes.page, most) for most in (128, 256, 512, 1024)}),
            "piece": (128, 256, 512),
            "unroll": [n for n in range(1, 2 * UNROLL + 1) if sizes.groups % n == 0],
            "ahead": (0, 1, 2, 3),
        }

    def problem(self, sizes: Sizes) -> str | None:
        page = sizes.page
        if self.block < LANES or self.block % LANES or self.block > max(LARGEST_BLOCK, math.lcm(page, LANES)):
            return f"a block of {self.block} slots, of multiples of {LANES} up to {LARGEST_BLOCK}"
        if page % self.block and self.block % page:
            return f"a block of {self.block} slots and pages of {page}, neither of which divides the other"
        if self.piece != page and (self.block > page or self.piece < 1 or page % self.piece or self.block % self.piece):
            return f"copies of {self.piece} slots into blocks of {self.block} from pages of {page}"
        if self.piece == page and self.block < page:
            return f"copies of whole pages of {page} slots into blocks of {self.block}"
        if self.piece * sizes.item % 32:
            return f"copies of {self.piece} slots, which are no whole sublanes"
        if self.unroll < 1 or sizes.groups % self.unroll:
            return f"{self.unroll} of {sizes.groups} groups side by side"
        needed = self.vmem_bytes(sizes)
        return None if needed <= TPU_BYTES else f"{needed >> 20} MiB of VMEM, of {TPU_BYTES >> 20}"

    def vmem_bytes(self, sizes: Sizes) -> int:
        """Buffers, accumulators, two of each block that the grid streams, and the largest scores."""
        sublanes = 32 // sizes.item
        queries, keys, dim = up(sizes.packed, sublanes), up(sizes.keys, sublanes), up(sizes.dim, LANES)
        cached = 2 * 2 * sizes.groups * self.block * dim * sizes.item
        sums = sizes.groups * queries * (dim + 2 * LANES) * 4
        streamed = 2 * sizes.groups * (2 * queries + 2 * keys) * dim * sizes.item
        meta = 2 * queries * up(1 + -(-keys // WORD_BITS), LANES) * 4
        return cached + sums + streamed + meta + 4 * queries * max(self.block, up(keys, LANES)) * 4


def up(size: int, multiple: int) -> int:
    """The next multiple."""
    return -(-size // multiple) * multiple


def _block(page: int, most: int) -> int:
    """Slots of a block: whole lanes, up to `most` of them, and whole pages or a divisor of a page."""
    most = max(LANES, min(LARGEST_BLOCK, most // LANES * LANES))
    if page % LANES == 0 and page > most:
        return max(size for size in range(LANES, most + 1, LANES) if page % size == 0)
    whole = math.lcm(page, LANES)
    return whole * max(1, most // whole)


def _piece(page: int, block: int) -> int:
    """Slots of one copy: a page, or as many of a larger one than a block as divide both."""
    return page if block > page or page <= min(PIECE, block) else math.gcd(page, block, PIECE)


MIN_SIDE = 16  # of each side of a product
KEY_BYTES = 2**14  # of one block of keys


@dataclasses.dataclass(frozen=True)
class TritonTiles(Tiles):
    """Of `triton.py`; powers of two, but `splits`.

    Attributes:
        queries: rows of a group that a program has.
        block: slots worked on at once.
        part: columns of a head worked on at once, where it is wider.
        splits: programs that share a request's slots.
        warps: of a program.
        stages: turns of a loop whose loads are on their way; 0 leaves it to JAX.
    """

    kernel: ClassVar[str] = "tree_attention/triton"

    queries: int
    block: int
    part: int
    splits: int
    warps: int
    stages: int = 0

    @classmethod
    def rule(cls, sizes: Sizes) -> Self:
        """More warps where sums and keys would not fit the registers of four."""
        single = sizes.dtype == jnp.float32
        most = 16 if single else 128 if sizes.dim <= 128 else 64
        queries = min(max(bucket(sizes.packed), MIN_SIDE), most)
        programs = sizes.batch * sizes.groups * -(-sizes.packed // queries)
        return cls(
            queries=queries,
            block=max(32, min(128, KEY_BYTES // bucket(sizes.dim * sizes.item))),
            part=32 if single else 256,
            splits=choose_splits(programs, sizes.slots),
            warps=8 if sizes.dim > 128 or queries > 64 else 4,
        )

    @classmethod
    def options(cls, sizes: Sizes) -> Mapping[str, Sequence[int]]:
        return {
            "splits": _split_options(sizes.slots),
            "block": (32, 64, 128),
            "queries": (16, 32, 64, 128),
            "warps": (2, 4, 8),
            "stages": (1, 2, 3, 4),
            "part": (32, 64, 128, 256),
        }

    def problem(self, sizes: Sizes) -> str | None:
        for name in ("queries", "block", "part"):
            value = getattr(self, name)
            if value < MIN_SIDE or value != bucket(value):
                return f"{name} of {value}, of powers of two from {MIN_SIDE} on"
        if self.queries >= 2 * max(MIN_SIDE, bucket(sizes.packed)):
            return f"{self.queries} rows of a program, of which there are {sizes.packed}"
        return _split_problem(self) or (f"{self.warps} warps" if self.warps not in (1, 2, 4, 8, 16) else None)


BLOCK = 64  # slots worked on at once
RING_BYTES = 112 * 2**10  # shared memory that lets two blocks of threads live on a multiprocessor
SHARED_BYTES = 224 * 2**10  # of one, barriers left out
COLUMNS = 512  # of a Blackwell's tensor memory


@dataclasses.dataclass(frozen=True)
class MosaicTiles(Tiles):
    """Of `mosaic_gpu.py`; rows are the tensor cores' own: 64 on Hopper, 128 on Blackwell.

    Attributes:
        block: slots worked on at once.
        stages: blocks in the ring.
        splits: blocks of threads that share a request's slots.
    """

    kernel: ClassVar[str] = "tree_attention/mosaic_gpu"

    block: int
    stages: int
    splits: int

    @classmethod
    def rule(cls, sizes: Sizes) -> Self:
        """A ring that leaves room for a second block of threads."""
        rows = rows_of(sizes)
        programs = sizes.batch * sizes.groups * -(-sizes.packed // rows)
        left = RING_BYTES - rows * (sizes.dim + (BLOCK if rows == 64 else 0)) * sizes.item
        stages = max(2, min(4, left // (2 * BLOCK * sizes.dim * sizes.item)))
        return cls(block=BLOCK, stages=stages, splits=choose_splits(programs, sizes.slots))

    @classmethod
    def options(cls, sizes: Sizes) -> Mapping[str, Sequence[int]]:
        return {"splits": _split_options(sizes.slots), "stages": (2, 3, 4, 6), "block": (64, 128)}

    def problem(self, sizes: Sizes) -> str | None:
        if self.block not in (64, 128) or self.stages < 2:
            return f"a block of {self.block} slots, of 64 or 128, in a ring of {self.stages}, of two or more"
        if sizes.page % self.block and self.block % sizes.page:
            return f"a block of {self.block} slots and pages of {sizes.page}, neither of which divides the other"
        rows = rows_of(sizes)
        shared = rows * (sizes.dim + (self.block if rows == 64 else 0)) + 2 * self.stages * self.block * sizes.dim
        if shared * sizes.item > SHARED_BYTES:
            return f"{shared * sizes.item >> 10} KiB of shared memory, of {SHARED_BYTES >> 10}"
        if rows == 128 and (columns := self.block + self.block * sizes.item // 4 + sizes.dim) > COLUMNS:
            return f"{columns} columns of tensor memory, of {COLUMNS}"
        return _split_problem(self)


def rows_of(sizes: Sizes) -> int:
    """Query rows of a block of threads of `mosaic_gpu.py`."""
    return 64 if sizes.capability == 90 else 128


def _split_options(slots: int) -> list[int]:
    return [1 << n for n in range(7) if slots // (1 << n) >= 128 or n == 0]


def _split_problem(tiles: TritonTiles | MosaicTiles) -> str | None:
    if not (1 <= tiles.splits <= 2 * MAX_SPLITS and tiles.stages <= 8):
        return f"{tiles.splits} splits, of 1 to {2 * MAX_SPLITS}, and {tiles.stages} stages, of up to 8"
    return None
