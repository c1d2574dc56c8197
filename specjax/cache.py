"""The key/value cache: pages addressed through a table, and pure functions on it.

A page holds `page_size` slots of one request, for all its key/value heads: `[pages, g, page_size, f]`, heads outside
slots so that a request's keys of one head are contiguous. Slot `s` of request `b` lives in page
`table[b, s // page_size]` at offset `s % page_size`. *Dense* is the special case of one page a request (`table` is
None, the identity): it compiles to plain slicing.

Only slots below a request's committed length are ever read as cache; what lies above is scratch for draft rows, so a
rejected draft costs nothing and an accepted path is moved to be contiguous by `commit`.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from specjax.array_types import Array, Float, Int, pytree
from specjax.draft import Rows

BLOCK = 256  # dense rows hold a multiple of so many slots: backends read blocks of it, or parts of one


def whole_blocks(slots: int) -> int:
    """The slots of a dense row that holds at least `slots`."""
    return -(-slots // BLOCK) * BLOCK


@pytree
class KVCache:
    """Keys and values of all layers, one buffer a layer.

    Attributes:
        k: keys after rotation, one array a layer, or a single `[l, p, g, s, f]` for a target that reads them as one.
        v: values, likewise.
        table: page of each run of `page_size` slots of each request, or None: page `b` is request `b`'s only page.
    """

    k: tuple[Float[Array, "p g s f"], ...]
    v: tuple[Float[Array, "p g s f"], ...]
    table: Int[Array, "b m"] | None = None

    @property
    def page_size(self) -> int:
        return self.k[0].shape[-2]

    @property
    def whole_rows(self) -> bool:
        """Whether a request is one page, so that its slots are contiguous."""
        return self.table is None or self.table.shape[1] == 1

    def request(self, row: Array) -> "KVCache":
        """The same buffers, seen as the cache of the single request `row`."""
        if self.table is not None:
            return KVCache(k=self.k, v=self.v, table=jax.lax.dynamic_slice_in_dim(self.table, row, 1))
        if self.k[0].shape[-4] == 1:
            return self
        return KVCache(k=self.k, v=self.v, table=jnp.reshape(row, (1, 1)).astype(jnp.int32))


def init(layers: int, pages: int, heads: int, page_size: int, head_dim: int, dtype, table=None) -> KVCache:
    """An empty cache: `layers` pairs of `[pages, heads, page_size, head_dim]`."""

    def buffers():
        return tuple(jnp.zeros((pages, heads, page_size, head_dim), dtype) for _ in range(layers))

    return KVCache(k=buffers(), v=buffers(), table=table)


def write(pages: Float[Array, "p g s f"], new: Float[Array, "N g f"], table: Array | None, rows: Rows) -> Array:
    """Store the keys (or values) of packed rows at their slots; padding rows reach no slot that is ever read."""
    if rows.batch == 1 and (table is None or table.shape[1] == 1):
        # One request in one page: its rows are consecutive slots. Padding rows fall beyond the live ones.
        page = 0 if table is None else table[0, 0]
        block = jnp.swapaxes(new, 0, 1)[None].astype(pages.dtype)
        return jax.lax.dynamic_update_slice(pages, block, (page, 0, rows.slots[0], 0))
    page, offset = _locate(rows.request, rows.slots, table, pages.shape[2])
    page = jnp.where(rows.valid, page, pages.shape[0])
    return pages.at[page, :, offset].set(new.astype(pages.dtype), mode="drop")


def commit(cache: KVCache, committed: Int[Array, " b"], path: Int[Array, "b n"], count: Int[Array, " b"]) -> KVCache:
    """Gather the rows of an accepted path to be contiguous.

    Args:
        cache: holds the draft rows of request `b` at slots `committed[b] + node`.
        committed: committed slots of each request before this round.
        path: nodes of the path, the root (node 0) first; increasing, so a row only ever moves down.
        count: accepted nodes after the root; later entries of `path` are not moved.

    Returns:
        The cache with node `path[b, i]` at slot `committed[b] + i`. A row moves without a new rotation: it was
        rotated by its depth, which is `i`.
    """
    batch, steps = path.shape
    request = jnp.broadcast_to(jnp.arange(batch, dtype=jnp.int32)[:, None], (batch, steps))
    step = jnp.broadcast_to(jnp.arange(steps, dtype=jnp.int32), (batch, steps))
    moved = (step <= count[:, None]) & (path != step)
    source = _locate(request, committed[:, None] + path, cache.table, cache.page_size)
    to_page, to_offset = _locate(request, committed[:, None] + step, cache.table, cache.page_size)
    to_page = jnp.where(moved, to_page, cache.k[0].shape[-4])

    def move(pages):
        rows = pages[source[0], :, source[1]]
        return pages.at[to_page, :, to_offset].set(rows, mode="drop")

    return KVCache(k=_each(move, cache.k), v=_each(move, cache.v), table=cache.table)


def _each(function, buffers: Sequence[Array]) -> tuple[Array, ...]:
    return tuple(jax.vmap(function)(x) if x.ndim == 5 else function(x) for x in buffers)


def _locate(request: Array, slots: Array, table: Array | None, page_size: int) -> tuple[Array, Array]:
    """Page and offset of slots; a slot past the table's end lands out of range, where scatters drop it."""
    if table is None:
        return request, slots
    column = slots // page_size
    page = table.at[request, column].get(mode="fill", fill_value=jnp.iinfo(jnp.int32).max)
    return page, slots % page_size
