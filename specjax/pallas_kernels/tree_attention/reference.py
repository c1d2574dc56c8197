"""Tree attention in plain `jnp`: the specification of the op, and the path that runs on a CPU.

Each row sees the committed slots of its request (the last `window` positions of them), its ancestors in the draft and
itself. The mask concerns the draft tile alone: the committed part is a plain loop over blocks of slots, as long as the
longest live request, so a large cache costs nothing while it is empty.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from specjax.array_types import Array, Bool, Float, Int
from specjax.draft import Rows, ancestor_matrix

BLOCK = 128  # slots; a CPU copies a block before it multiplies it, so small ones that stay in its caches are best
NEG = -1e30  # finite: an empty block must not turn into NaN


def tree_attention(
    q: Float[Array, "N h f"],
    k: Float[Array, "N g f"],
    v: Float[Array, "N g f"],
    k_pages: Float[Array, "p g s f"],
    v_pages: Float[Array, "p g s f"],
    table: Int[Array, "b m"] | None,
    committed: Int[Array, " b"],
    rows: Rows,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    padded: Callable | None = None,
) -> Float[Array, "N h f"]:
    """Attention of packed draft rows over committed slots and their own ancestors.

    Args:
        q: rotated queries of the rows.
        k: rotated keys of the rows; the draft tile is read from here, so it never straddles pages.
        v: values of the rows.
        k_pages: cached keys, pages of `s` slots.
        v_pages: cached values.
        table: pages of each request, None for one page a request in order.
        committed: committed slots of each request; later ones are never read.
        rows: request, position and ancestors of each row.
        scale: factor on the scores.
        window: a row at position `i` sees positions `i - window + 1 ... i` only.
        softcap: scores become `softcap * tanh(score / softcap)`.
        padded: what computes the padded batch in place of `attend`.

    Returns:
        Attention outputs in q's dtype; softmax and sums in float32. Padding rows hold finite, meaningless values.
    """
    position = rows.unpack(rows.positions)
    # What unpacking puts behind a request's last row belongs to a neighbour, whose NaN must not reach this one.
    own = jnp.arange(rows.width) < jnp.diff(rows.starts)[:, None]
    out = (padded or attend)(
        rows.unpack(q),
        rows.unpack(k),
        jnp.where(own[:, :, None, None], rows.unpack(v), 0),
        draft_mask(rows, position, window),
        k_pages,
        v_pages,
        table,
        committed,
        position,
        scale=scale,
        window=window,
        softcap=softcap,
    )
    return rows.pack(out)


def attend(
    q: Float[Array, "b n h f"],
    k: Float[Array, "b j g f"],
    v: Float[Array, "b j g f"],
    seen: Bool[Array, "b n j"],
    k_pages: Float[Array, "p g s f"],
    v_pages: Float[Array, "p g s f"],
    table: Int[Array, "b m"] | None,
    committed: Int[Array, " b"],
    position: Int[Array, "b n"],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Float[Array, "b n h f"]:
    """Attention over committed slots and a tile of further keys under an explicit mask; padded batch form.

    Args:
        q: rotated queries.
        k: rotated keys of the tile.
        v: values of the tile.
        seen: which keys of the tile each query sees; every query must see at least one.
        k_pages: cached keys; slots at or past `committed` are never read.
        v_pages: cached values.
        table: pages of each request, None for one page a request in order.
        committed: committed slots of each request.
        position: position of each query; a cached slot's position is its index.
        scale: factor on the scores.
        window: a query at position `i` sees cached positions above `i - window` only (the tile's mask is the caller's).
        softcap: scores become `softcap * tanh(score / softcap)`.

    Returns:
        Outputs in q's dtype; softmax and sums in float32.
    """
    batch, width, heads, dim = q.shape
    groups = k.shape[2]
    ratio = heads // groups
    qb = (q * jnp.asarray(scale, q.dtype)).reshape(batch, width, groups, ratio, dim)
    qb = qb.transpose(0, 2, 3, 1, 4).reshape(batch, groups, ratio * width, dim)

    def scores(keys, seen):
        """Masked f32 scores `[b, g, r * n, j]` of keys `[b, g, j, f]`; `seen` is `[b, 1 or n, j]`."""
        s = jnp.einsum("bgmf,bgjf->bgmj", qb, keys, preferred_element_type=jnp.float32)
        if softcap is not None:
            s = softcap * jnp.tanh(s / softcap)
        s = s.reshape(batch, groups, ratio, width, -1)
        return jnp.where(seen[:, None, None], s, NEG).reshape(batch, groups, ratio * width, -1)

    def weigh(weights, values):
        return jnp.einsum("bgmj,bgjf->bgmf", weights.astype(values.dtype), values, preferred_element_type=jnp.float32)

    block, read = _blocks(k_pages, v_pages, table, batch)

    def cached(index):
        """Keys and values of block `index`, and which of its slots each query sees, `[b, 1 or n, block]`."""
        keys, values = read(index)
        slot = index * block + jnp.arange(block, dtype=jnp.int32)
        below = slot < committed[:, None]
        # A weight of 0 does not stop a NaN that an earlier request has left in a slot.
        values = jnp.where(below[:, None, :, None], values, 0)
        seen = below[:, None] if window is None else below[:, None] & (slot > position[:, :, None] - window)
        return keys, values, seen

    # The tile first: every query sees some of it, so the running maximum is finite from here on.
    s = scores(k.transpose(0, 2, 1, 3), seen)
    top = s.max(-1, keepdims=True)
    weights = jnp.exp(s - top)
    total, out = weights.sum(-1, keepdims=True), weigh(weights, v.transpose(0, 2, 1, 3))

    def add_block(index, carry):
        top, total, out = carry
        keys, values, seen = cached(index)
        s = scores(keys, seen)
        new_top = jnp.maximum(top, s.max(-1, keepdims=True))
        weights, shrink = jnp.exp(s - new_top), jnp.exp(top - new_top)
        return new_top, total * shrink + weights.sum(-1, keepdims=True), out * shrink + weigh(weights, values)

    first = jnp.int32(0)
    if window is not None:
        shortest = jnp.min(jnp.where(committed > 0, committed, jnp.max(committed)))
        first = jnp.maximum(shortest - window + 1, 0) // block
    blocks = -(-jnp.max(committed) // block)
    _, total, out = jax.lax.fori_loop(first, blocks, add_block, (top, total, out))
    out = (out / total).astype(q.dtype).reshape(batch, groups, ratio, width, dim)
    return out.transpose(0, 3, 1, 2, 4).reshape(batch, width, heads, dim)


def draft_mask(rows: Rows, position: Array, window: int | None) -> Array:
    """`[b, n, n]`: which rows of its request each row sees."""
    if rows.ancestors is None:
        index = jnp.arange(rows.width)
        seen = jnp.broadcast_to(index[:, None] >= index, (rows.batch, rows.width, rows.width))
    else:
        seen = ancestor_matrix(rows.unpack(rows.ancestors))
    if window is not None:
        seen = seen & (position[:, None, :] > position[:, :, None] - window)
    # A padding row may have lost its own bit; keep the diagonal so that its softmax stays finite.
    return seen | jnp.eye(rows.width, dtype=bool)


def _blocks(k_pages: Array, v_pages: Array, table: Array | None, batch: int):
    """Slots of a block, and a function that reads block `index` of every request as `[b, g, block, f]` pairs."""
    pages, groups, page_size, dim = k_pages.shape
    if table is None or table.shape[1] == 1:
        block = min(BLOCK, page_size)
        first, count = (0, pages) if table is None else (table[0, 0], 1)
        if count != batch:
            raise ValueError(f"a cache of one page a request needs {batch} pages here, got {count}")

        def read(index):
            start = (first, 0, index * block, 0)
            size = (count, groups, block, dim)
            return jax.lax.dynamic_slice(k_pages, start, size), jax.lax.dynamic_slice(v_pages, start, size)

        if page_size % block:
            raise ValueError(f"cache slots ({page_size}) must be a multiple of the attention block ({block})")
        return block, read

    per_block = max(1, min(BLOCK // page_size, table.shape[1]))
    columns = -(-table.shape[1] // per_block) * per_block
    padded = jnp.pad(table, ((0, 0), (0, columns - table.shape[1])))

    def read_pages(index):
        page = jax.lax.dynamic_slice_in_dim(padded, index * per_block, per_block, axis=1)

        def gather(x):
            return x[page].transpose(0, 2, 1, 3, 4).reshape(batch, groups, per_block * page_size, dim)

        return gather(k_pages), gather(v_pages)

    return per_block * page_size, read_pages
