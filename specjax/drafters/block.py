"""The network of the block drafters: one pass of a small bidirectional decoder over a block of unknown tokens.

DFlash (arXiv 2602.06036) turns the target's residual streams into the context feature `c_p = hidden_norm(fc . taps_p)`
of each processed position, and each layer makes a key and a value of it. These depend on nothing else, so they are
computed once and kept: one cache slot a committed position, a dense row a request. The anchor (the root) has not been
processed, so its features do not exist yet and the context ends right before it. The block `[anchor, MASK, MASK, ...]`
attends to the context and to itself and is thrown away.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import cache as kv
from specjax.array_types import Array, Bool, Float, Int
from specjax.cache import KVCache, whole_blocks
from specjax.drafters.base import Context, Features
from specjax.drafters.config import HeadConfig
from specjax.drafters.embedding import build_embedding, embed
from specjax.drafters.layers import apply, layer_params, norm, norm_weight, rotate_heads
from specjax.pallas_kernels.tree_attention.op import attend
from specjax.targets import rope
from specjax.targets.layers import project


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backbone:
    """The network, with its context kept in a `KVCache`.

    Attributes:
        config: its shape and its arithmetic.
        max_position: most positions of the target (what `dynamic` rotation is stretched to).
        dtype: dtype of weights, keys and values, by name.
    """

    config: HeadConfig
    max_position: int
    dtype: str = "float32"

    def init_state(self, batch: int, capacity: int) -> KVCache:
        """Keys and values of the context, none yet."""
        c, slots = self.config, whole_blocks(capacity)
        return kv.init(c.num_layers, batch, c.num_kv_heads, slots, c.head_dim, jnp.dtype(self.dtype))

    def remember(self, params: Any, state: KVCache, request: Int[Array, " b"], features: Features) -> KVCache:
        """Write the keys and values of the context features of `features.count` rows of each request.

        A row always lands in the slot of its position, so taking the same rows in twice changes nothing, and what an
        unaccepted draft has left behind is never there: drafts are not written.
        """
        steps = features.positions.shape[1]
        assert features.taps is not None  # the engine gives what `taps` asks for
        made = self.context_keys(params, self.context_features(params, features.taps), features.positions)
        live = jnp.arange(steps) < features.count[:, None]
        slot = jnp.where(live, features.positions, state.page_size)  # past the end: dropped
        keys, values = [], []
        for (k, v), k_slots, v_slots in zip(made, state.k, state.v, strict=True):
            for new, slots, into in ((k, k_slots, keys), (v, v_slots, values)):
                into.append(slots.at[request[:, None], :, slot].set(new, mode="drop"))
        return KVCache(k=tuple(keys), v=tuple(values), table=None)

    def hidden(self, params: Any, state: KVCache, context: Context, depth: int) -> Float[Array, "b k d"]:
        """Post-norm hidden rows of the `depth` drafted positions."""
        c = self.config
        batch, rows = context.lengths.shape[0], depth if c.shifted else depth + 1
        start = jnp.maximum(context.lengths - 1, 0)
        masks = jnp.full((batch, rows - 1), c.mask_token_id, jnp.int32)
        x = embed(c, params["embedding"], jnp.concatenate([root(context)[:, None], masks], axis=1))
        position = start[:, None] + jnp.arange(rows, dtype=jnp.int32)
        committed = jnp.where(context.active, start, 0)
        windows, causal = self.windows, self.causal

        def attention(i, q, k, v):
            seen = jnp.broadcast_to(block_mask(rows, windows[i], causal[i]), (batch, rows, rows))
            cached = (state.k[i], state.v[i], None, committed, position)
            return attend(q, k, v, seen, *cached, scale=c.head_dim**-0.5, window=windows[i])

        return self.network(params, x, position, attention)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The sliding window of each layer, None for all positions."""
        return self.config.windows or (None,) * self.config.num_layers

    @property
    def causal(self) -> tuple[bool, ...]:
        """Whether rows of a block see earlier ones only, for each layer."""
        return self.config.block_causal or tuple(window is not None for window in self.windows)

    def network(
        self,
        params: Any,
        x: Float[Array, "b n d"],
        position: Int[Array, "b n"],
        attention: Callable[[int, Array, Array, Array], Float[Array, "b n h f"]],
    ) -> Float[Array, "b k d"]:
        """Blocks of embedded rows through the layers: post-norm rows of the drafted positions.

        Args:
            params: the weights.
            x: embedding rows, whole blocks.
            position: rotary position of each row.
            attention: of layer `i`, from its index and the rows' rotated queries, rotated keys and values; it adds the
                context by itself.
        """
        c, eps = self.config, self.config.rms_norm_eps
        turn = self._turn(position)

        def attended(i, layer, n):
            q = self._heads(layer, "q", n, c.num_heads)[0]
            if c.qk_norm:
                q = norm(layer["q_norm"], q, eps)
            y = attention(i, turn(q), *self._keys_values(layer, n, turn))
            return apply(layer["out"], y.reshape(*n.shape[:2], -1))

        def mlp(layer, n):
            gate, up = jnp.split(apply(layer["gate_up"], n), 2, axis=-1)
            return apply(layer["down"], jax.nn.silu(gate) * up)

        for i, layer in enumerate(params["layers"]):
            n = norm(layer["input_norm"], x, eps)
            before, after = self._convolutions(layer.get("attention_conv"), n)
            x = x + after(attended(i, layer, before(n)))
            n = norm(layer["mlp_norm"], x, eps)
            before, after = self._convolutions(layer.get("mlp_conv"), n)
            x = x + after(mlp(layer, before(n)))
        hidden = norm(params["norm"], x, eps)
        # In place, row j speaks of its own position: the anchor's row has nothing to say.
        return hidden if c.shifted else hidden[:, 1:]

    def context_features(self, params: Any, taps: Float[Array, "b t e"]) -> Float[Array, "b t d"]:
        """What every layer makes keys and values of, for processed positions."""
        c = apply(params["fc"], taps.astype(jnp.dtype(self.dtype)))
        return norm(params["hidden_norm"], c, self.config.rms_norm_eps)

    def context_keys(
        self, params: Any, features: Float[Array, "b t d"], position: Int[Array, "b t"]
    ) -> list[tuple[Array, Array]]:
        """Keys and values `[b, t, g, f]` of context features, for each layer."""
        turn = self._turn(position)
        return [self._keys_values(layer, features, turn) for layer in params["layers"]]

    def _keys_values(self, layer: Any, x: Float[Array, "b n d"], turn: Callable[[Array], Array]) -> tuple[Array, Array]:
        """Rotated keys and values `[b, n, g, f]` of normed block rows, or of context features as they are."""
        k, v = self._heads(layer, "kv", x, self.config.num_kv_heads)
        if self.config.qk_norm:
            k = norm(layer["k_norm"], k, self.config.rms_norm_eps)
        return turn(k), v

    def _heads(self, layer: Any, name: str, x: Float[Array, "b n d"], heads: int) -> tuple[Array, ...]:
        """The projection `name` of rows, in parts of `heads` heads `[b, n, h, f]`."""
        y = apply(layer[name], x).reshape(*x.shape[:2], -1, heads, self.config.head_dim)
        return tuple(y[:, :, part] for part in range(y.shape[2]))

    def _turn(self, positions: Int[Array, "b n"]) -> Callable[[Float[Array, "b n h f"]], Float[Array, "b n h f"]]:
        """The rotation of heads at `positions`."""
        c = self.config
        cos, sin = rope.cos_sin(c.rope, c.rotary_dims or c.head_dim, positions.reshape(-1), self.max_position)
        return lambda x: rotate_heads(x.reshape(-1, *x.shape[2:]), cos, sin).reshape(x.shape)

    def _convolutions(self, conv: Any, n: Float[Array, "b n d"]):
        """The dynamic convolutions before and after a sublayer with input `n` (DFlash 2): functions of rows.

        Tap `o` multiplies the row `o` earlier in the block, nothing before the anchor's; its factors are a base kernel
        and, shared by the channels of a group, a projection of the row that is written.
        """
        if conv is None:
            return (lambda x: x), (lambda x: x)
        c, (batch, rows, width) = self.config, n.shape
        kernel = project(conv["projection"], n.reshape(-1, width), out_dtype=jnp.float32)
        kernel = kernel.reshape(batch, rows, 2, c.conv_kernel, width // c.conv_group)
        kernel = jnp.repeat(kernel, c.conv_group, axis=-1) + conv["base"].astype(jnp.float32)

        def convolve(side, x):
            wide = x.astype(jnp.float32)
            earlier = [jnp.pad(wide, ((0, 0), (o, 0), (0, 0)))[:, :rows] for o in range(c.conv_kernel)]
            return jnp.sum(kernel[:, :, side] * jnp.stack(earlier, axis=2), axis=2).astype(x.dtype)

        return (lambda x: convolve(0, x)), (lambda x: convolve(1, x))


def block_mask(rows: int, window: int | None, causal: bool) -> Bool[Array, "n j"]:
    """Which rows of its block each row sees: all, or none later; with a window, none `window` or more away.

    A window counts from each row's own position, in the block and over the context, in every packaging. Training code
    that lets it end at the anchor's window for the whole block differs by the block's length at the far end alone,
    where no text that the probe could afford reaches.
    """
    ahead = jnp.arange(rows) - jnp.arange(rows)[:, None]
    seen = ahead <= 0 if causal else jnp.ones((rows, rows), bool)
    return seen if window is None else seen & (jnp.abs(ahead) < window)


def root(context: Context) -> Int[Array, " b"]:
    """The newest committed token of each request."""
    return jnp.take_along_axis(context.tokens, jnp.maximum(context.lengths - 1, 0)[:, None], axis=1)[:, 0]


def backbone_params(
    config: HeadConfig, tensors: Mapping[str, np.ndarray], target_params: Any, dtype: Any
) -> dict[str, Any]:
    """The network's arrays from tensors by canonical name; a shared embedding is referred to."""
    return {
        "embedding": build_embedding(config, tensors, target_params, dtype),
        "fc": {"weight": jnp.asarray(tensors["fc.weight"], dtype)},
        "hidden_norm": norm_weight(config, tensors, "hidden_norm"),
        "norm": norm_weight(config, tensors, "norm"),
        "layers": tuple(_layer(config, tensors, f"layers.{i}", dtype) for i in range(config.num_layers)),
    }


def _layer(c: HeadConfig, tensors: Mapping[str, np.ndarray], prefix: str, dtype: Any) -> dict[str, Any]:
    """The arrays of one layer. Queries are apart from keys and values: context features need only the latter."""
    layer = layer_params(c, tensors, prefix, dtype)
    queries = c.num_heads * c.head_dim
    joined = layer.pop("qkv")
    layer |= {"q": {n: x[:queries] for n, x in joined.items()}, "kv": {n: x[queries:] for n, x in joined.items()}}
    if c.conv_kernel:
        for side in ("attention_conv", "mlp_conv"):
            names = {"base": "base_kernel", "projection": "kernel_projection.weight"}
            layer[side] = {name: jnp.asarray(tensors[f"{prefix}.{side}.{key}"], dtype) for name, key in names.items()}
    return layer
