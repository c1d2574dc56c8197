"""What the target makes of packed rows: its residual streams and final hidden states.

Captured online, in the same program as the training step, or once into files that are then read again every epoch. The
files are bfloat16 and laid out by row, so that a batch is a few contiguous reads.
"""

import dataclasses
import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from specjax.array_types import Array, Float, pytree
from specjax.cache import whole_blocks
from specjax.draft import WORD_BITS, Rows, words
from specjax.targets.decoder import Target
from specjax.training.packing import Batch, Packed

MANIFEST = "manifest.json"


@pytree
class TargetFeatures:
    """Target activations of packed rows.

    Attributes:
        hidden: post-final-norm hidden states.
        taps: residual streams, concatenated in the order of the taps; None without taps.
    """

    hidden: Float[Array, "b t d"]
    taps: Float[Array, "b t e"] | None


def capture(target: Target, taps: tuple[int, ...], params: Any, batch: Batch) -> TargetFeatures:
    """Run the target over packed rows; to be traced.

    A packed row is a forest to the target: each token's ancestors are the earlier tokens of its own dialogue, so the
    tree mask that verifies drafts keeps the dialogues of a row apart.
    """
    count, length = batch.tokens.shape
    index = jnp.arange(length)
    seen = (batch.segments[:, :, None] == batch.segments[:, None, :]) & (index <= index[:, None])
    rows = Rows(
        tokens=batch.tokens.reshape(-1),
        request=jnp.repeat(jnp.arange(count, dtype=jnp.int32), length),
        node=jnp.tile(index.astype(jnp.int32), count),
        positions=batch.positions.reshape(-1),
        slots=jnp.tile(index.astype(jnp.int32), count),
        valid=batch.segments.reshape(-1) > 0,
        ancestors=_bits(seen).reshape(count * length, -1),
        starts=jnp.arange(count + 1, dtype=jnp.int32) * length,
        width=length,
    )
    slots = whole_blocks(length)
    dtype = jax.tree.leaves(params)[0].dtype
    cache = target.init_cache(count, slots, dtype)
    out = target.forward(params, rows, cache, jnp.zeros((count,), jnp.int32), taps)
    return TargetFeatures(
        hidden=out.hidden.reshape(count, length, -1),
        taps=None if out.taps is None else out.taps.reshape(count, length, -1),
    )


@functools.partial(jax.jit, static_argnums=(0, 1))
def captured(target: Target, taps: tuple[int, ...], params: Any, batch: Batch) -> TargetFeatures:
    """`capture` by itself, compiled."""
    return capture(target, taps, params, batch)


def _bits(seen: Array) -> Array:
    """Booleans `[..., n, n]` as ancestor words `[..., n, w]`."""
    length = seen.shape[-1]
    padded = jnp.pad(seen, [(0, 0)] * (seen.ndim - 1) + [(0, words(length) * WORD_BITS - length)])
    powers = jnp.asarray((1 << np.arange(WORD_BITS, dtype=np.uint32)).astype(np.uint32))
    grouped = padded.reshape(*seen.shape[:-1], -1, WORD_BITS).astype(jnp.uint32)
    return jax.lax.bitcast_convert_type(jnp.sum(grouped * powers, axis=-1, dtype=jnp.uint32), jnp.int32)


@dataclasses.dataclass(frozen=True)
class Store:
    """Features of all rows of a corpus in a folder; see `fill`.

    Attributes:
        hidden: as in `TargetFeatures`, of all rows.
        taps: the same; may hold more streams than are wanted.
        wanted: which of them, in order; None for all.
    """

    hidden: np.ndarray
    taps: np.ndarray | None
    wanted: tuple[int, ...] | None = None

    def batch(self, rows: np.ndarray) -> TargetFeatures:
        """The features of the rows of these numbers."""
        if self.taps is None or self.wanted == ():
            return TargetFeatures(hidden=self.hidden[rows], taps=None)
        taps = self.taps[rows]
        if self.wanted is not None:
            streams = taps.reshape(*taps.shape[:-1], -1, self.hidden.shape[-1])
            taps = streams[..., list(self.wanted), :].reshape(*taps.shape[:-1], -1)
        return TargetFeatures(hidden=self.hidden[rows], taps=taps)


def size(packed: Packed, width: int, taps: tuple[int, ...]) -> int:
    """Bytes of the features of a corpus."""
    return packed.tokens.size * width * (len(taps) + 1) * 2


def take_up(folder: Path, packed: Packed, width: int, taps: tuple[int, ...]) -> Store | None:
    """The features that another run left in a folder, if they are whole and hold these streams."""
    path = folder / MANIFEST
    found = json.loads(path.read_text()) if path.is_file() else {}
    about = {"rows": packed.digest(), "width": width, "length": packed.length, "done": len(packed)}
    if {key: found.get(key) for key in about} != about or not set(taps) <= set(found["taps"]):
        return None

    def array(name: str, columns: int) -> np.ndarray:
        return np.memmap(folder / name, ml_dtypes.bfloat16, "r", shape=(len(packed), packed.length, columns))

    hidden, there = array("hidden", width), found["taps"]
    streams = array("taps", width * len(there)) if there else None
    wanted = None if list(taps) == there else tuple(there.index(tap) for tap in taps)
    return Store(hidden=hidden, taps=streams, wanted=wanted)


def fill(
    folder: Path,
    packed: Packed,
    target: Target,
    params: Any,
    taps: tuple[int, ...],
    batch: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Store:
    """Capture the features of all rows into a folder, or take up the ones that it holds.

    Args:
        folder: holds the features of one corpus; that of another, or of other taps, is replaced.
        packed: the rows.
        target: the model.
        params: its arrays.
        taps: residual streams to keep.
        batch: rows at a time.
        progress: is told rows done and rows in all. A run that was stopped goes on where it was.

    Raises:
        ValueError: the disk has no room for them.
    """
    width = target.config.hidden_size
    about = {"rows": packed.digest(), "taps": list(taps), "width": width, "length": packed.length}
    found = json.loads((folder / MANIFEST).read_text()) if (folder / MANIFEST).is_file() else None
    if found is None or {key: found[key] for key in about} != about:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MANIFEST).unlink(missing_ok=True)
        for name in ("hidden", "taps"):
            (folder / name).unlink(missing_ok=True)
        need, free = size(packed, width, taps), shutil.disk_usage(folder).free
        if need > free:
            raise ValueError(f"the features need {need / 1e9:.1f} GB, but {folder} has {free / 1e9:.1f} GB free")
        found = {**about, "done": 0}
    mode = "r+" if (folder / "hidden").exists() else "w+"

    def array(name: str, columns: int) -> np.ndarray:
        shape = (len(packed), packed.length, columns)
        return np.memmap(folder / name, ml_dtypes.bfloat16, mode, shape=shape)

    hidden, streams = array("hidden", width), array("taps", width * len(taps)) if taps else None
    for start in range(found["done"], len(packed), batch):
        rows = np.minimum(np.arange(start, start + batch), len(packed) - 1)
        out = captured(target, taps, params, packed.batch(rows))
        hidden[rows] = np.asarray(out.hidden.astype(jnp.bfloat16))
        if streams is not None:
            assert out.taps is not None
            streams[rows] = np.asarray(out.taps.astype(jnp.bfloat16))
        found["done"] = min(start + batch, len(packed))
        if (start // batch) % 16 == 15 or found["done"] == len(packed):
            for mapped in (hidden, streams):
                if isinstance(mapped, np.memmap):
                    mapped.flush()
            (folder / MANIFEST).write_text(json.dumps(found))
        progress(found["done"], len(packed))
    return Store(hidden=hidden, taps=streams)
