"""The layers of a causal head: rows of (token, condition) over a cache of committed rows and a tile of others.

A family says how features are read, what a row's first layer reads, and what is fed back.
"""

import abc
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.array_types import Array, Bool, Float, Int, pytree
from specjax.cache import KVCache, init, whole_blocks
from specjax.drafters.base import Context, Features
from specjax.drafters.config import HeadConfig
from specjax.drafters.embedding import embed
from specjax.drafters.layers import apply, attention_inputs, mlp, norm
from specjax.pallas_kernels.tree_attention.op import attend
from specjax.targets import rope


@pytree
class Tile:
    """Keys and values that are not (or not yet) in the cache, one array a layer.

    Attributes:
        k: rotated keys.
        v: values.
        positions: position of each row of the tile.
    """

    k: tuple[Float[Array, "b j g f"], ...]
    v: tuple[Float[Array, "b j g f"], ...]
    positions: Int[Array, "b j"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Causal(abc.ABC):
    """The layers; what they are made of is in `config`.

    Attributes:
        config: the head.
        max_position: most positions of the target (what `dynamic` rotation is stretched to).
        dtype: dtype of weights, keys and values, by name.
    """

    config: HeadConfig
    max_position: int
    dtype: str = "float32"

    @abc.abstractmethod
    def condition(self, params: Any, features: Features) -> Float[Array, "b n d"]:
        """What a row reads of the target's features."""

    @abc.abstractmethod
    def inputs(
        self, params: Any, embedded: Float[Array, "b n d"], condition: Float[Array, "b n d"]
    ) -> tuple[Array, Array]:
        """What the first layer's attention reads, and its residual."""

    @abc.abstractmethod
    def feedback(self, out: Float[Array, "b n d"], normed: Float[Array, "b n d"]) -> Float[Array, "b n d"]:
        """The condition of the next row, of this row's output before and after the final norm."""

    def init_state(self, batch: int, capacity: int) -> KVCache:
        c = self.config
        slots = whole_blocks(capacity)
        return init(c.num_layers, batch, c.num_kv_heads, slots, c.head_dim, jnp.dtype(self.dtype))

    def take_in(self, params, cache: KVCache, tokens, condition, positions, committed) -> tuple[Array, Tile]:
        """Run consecutive rows with their features: `tokens` are those *after* the rows' positions."""
        width = positions.shape[1]
        seen = jnp.broadcast_to(jnp.tri(width, dtype=bool), (positions.shape[0], width, width))
        tile = self.empty_tile(positions)
        return self.rows(params, cache, tokens, condition, positions, tile, 0, seen, committed=committed)

    def keep(self, state: KVCache, tile: Tile, features: Features, context: Context) -> KVCache:
        """The cache with the first rows of a tile, those with features, at their positions."""
        width = features.positions.shape[1]
        live = (jnp.arange(width) < features.count[:, None]) & context.active[:, None]
        slot = jnp.where(live, features.positions, state.page_size)
        request = jnp.broadcast_to(jnp.arange(slot.shape[0])[:, None], slot.shape)

        def put(pages, new):
            return pages.at[request, :, slot].set(new[:, :width].astype(pages.dtype), mode="drop")

        return KVCache(k=tuple(map(put, state.k, tile.k)), v=tuple(map(put, state.v, tile.v)))

    def empty_tile(self, positions: Int[Array, "b j"]) -> Tile:
        c = self.config

        def buffers():
            shape = (*positions.shape, c.num_kv_heads, c.head_dim)
            return tuple(jnp.zeros(shape, jnp.dtype(self.dtype)) for _ in range(c.num_layers))

        return Tile(k=buffers(), v=buffers(), positions=positions)

    def rows(
        self,
        params: Any,
        cache: KVCache,
        tokens: Int[Array, "b n"],
        condition: Float[Array, "b n d"],
        positions: Int[Array, "b n"],
        tile: Tile,
        at: Int[Array, ""] | int,
        seen: Bool[Array, "b n j"],
        *,
        committed: Int[Array, " b"],
    ) -> tuple[Float[Array, "b n d"], Tile]:
        """Run rows through the layers.

        Args:
            params: the weights.
            cache: committed rows, of which those below `committed` are read.
            tokens: token of each row, the one after its position.
            condition: what each row reads of the target, or of the head's last output.
            positions: rotary position of each row.
            tile: keys and values beside the cache; the rows' own go to its rows `at ...`.
            at: first row of the tile to write.
            seen: which rows of the tile each row sees, its own included.
            committed: committed rows of each request.

        Returns:
            The last layer's output before the final norm, and the tile.
        """
        c = self.config
        embedded = embed(c, params["embedding"], tokens)
        if c.blank_start:
            embedded = jnp.where((positions == 0)[..., None], 0, embedded)
        x, residual = self.inputs(params, embedded, condition)
        cos, sin = rope.cos_sin(c.rope, c.rotary_dims or c.head_dim, positions.reshape(-1), self.max_position)
        keys, values = list(tile.k), list(tile.v)
        out = residual
        for i, layer in enumerate(params["layers"]):
            if i:
                x, residual = norm(layer["input_norm"], out, c.rms_norm_eps), out
            window = c.windows[i] if c.windows else None
            near = seen
            if window is not None:
                near = seen & (tile.positions[:, None, :] > positions[:, :, None] - window)
            q, k, v, gate = attention_inputs(c, layer, x, cos, sin)
            keys[i] = jax.lax.dynamic_update_slice(keys[i], k, (0, at, 0, 0))
            values[i] = jax.lax.dynamic_update_slice(values[i], v, (0, at, 0, 0))
            y = attend(
                q, keys[i], values[i], near, cache.k[i], cache.v[i], cache.table, committed, positions,
                scale=c.head_dim**-0.5, window=window,
            )  # fmt: skip
            y = y.reshape(*y.shape[:2], -1)
            if gate is not None:
                y = y * jax.nn.sigmoid(gate)
            out = residual + apply(layer["out"], y)
            out = out + mlp(c, layer, out)
        return out, Tile(k=tuple(keys), v=tuple(values), positions=tile.positions)

    def normed(self, params: Any, out: Float[Array, "b n d"]) -> Float[Array, "b n d"]:
        """The final norm: what the output head reads."""
        return norm(params["norm"], out, self.config.rms_norm_eps)
