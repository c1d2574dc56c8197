"""What EAGLE-3 and MTP heads share: a small causal decoder that is fed its own output.

Row p of the head pairs what the target made of the token at position p with the *next* token, p + 1, and predicts the
token after that, p + 2. The row of the newest token's predecessor is the last one whose target features exist; from
there on, the head's own output stands in for the target's.

    committed tokens        x0 x1 x2 x3                       (x3 is the root: the target has not seen it)
    rows with features      (f0,x1) (f1,x2) (f2,x3)           -> first draft, y1
    rows of the draft       (own output, y1) ...              -> later drafts

The keys and values of rows with features are kept, one dense cache row a request. After each round the rows just
committed are taken in with their true features; what drafted rows left is never read, because it is never written: they
live in a tile of their own, as long as the draft is being made.

A family says how features are read, what a row's layer reads, and what is fed back.
"""

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import sampling
from specjax.array_types import Array, Bool, Float, Int, pytree
from specjax.cache import KVCache, init
from specjax.draft import Draft, DraftShape, tree
from specjax.drafters import growth
from specjax.drafters.base import Context, Features
from specjax.drafters.config import HeadConfig
from specjax.drafters.embedding import build_embedding, embed
from specjax.drafters.growth import Beam, Children
from specjax.drafters.head import Head, Scores, build_head
from specjax.drafters.layers import apply, attention_inputs, layer_params, mlp, norm, norm_weight
from specjax.pallas_kernels.tree_attention.op import attend
from specjax.targets import rope

SLOT_MULTIPLE = 256  # the reference attention reads whole blocks


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


@dataclasses.dataclass(frozen=True)
class Recurrent(abc.ABC):
    """A drafter whose head is fed its own output.

    Attributes:
        config: the head.
        head: its output head's static half.
        shape: the draft shape when the drafter is named alone.
        max_position: most positions of the target (what `dynamic` rotation is stretched to).
        sampled: draw drafts from the head's distribution, with the request's temperature and filters, and return it as
            `q`; otherwise drafts are its most likely tokens, a function of the context.
        dtype: dtype of weights, keys and values, by name.
        kind: the name in configs.
    """

    config: HeadConfig
    head: Head
    shape: DraftShape
    max_position: int
    sampled: bool = False
    dtype: str = "float32"

    def __post_init__(self):
        growth.check_shape(self.shape)
        if self.shape.branching > self.head.width:
            raise ValueError(
                f"branching {self.shape.branching} exceeds the {self.head.width} tokens that the head scores"
            )

    @property
    def kind(self) -> str:
        return self.config.family

    @property
    def taps(self) -> tuple[int, ...]:
        return self.config.taps

    @property
    def wants_hidden(self) -> bool:
        return not self.config.taps

    # ---------------------------------------------------------------- what a family says

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

    # ---------------------------------------------------------------- the drafter protocol

    def init_state(self, batch: int, capacity: int) -> KVCache:
        c = self.config
        slots = -(-capacity // SLOT_MULTIPLE) * SLOT_MULTIPLE
        return init(c.num_layers, batch, c.num_kv_heads, slots, c.head_dim, jnp.dtype(self.dtype))

    def prefill(
        self,
        params: Any,
        state: KVCache,
        row: Array,
        tokens: Array,
        start: Array,
        count: Array,
        features: Features | None,
    ) -> KVCache:
        del count  # rows past it lie beyond the committed ones, where the next rows overwrite them
        assert features is not None
        view = KVCache(k=state.k, v=state.v, table=jnp.reshape(row, (1, 1)).astype(jnp.int32))
        condition = self.condition(params, features)
        _, tile = self.take_in(params, view, tokens[None, 1:], condition, features.positions, start[None])

        def put(pages, new):
            return jax.lax.dynamic_update_slice(pages, new.swapaxes(1, 2), (row, 0, start, 0))

        return KVCache(k=tuple(map(put, state.k, tile.k)), v=tuple(map(put, state.v, tile.v)))

    def draft(self, params: Any, state: KVCache, context: Context, shape: DraftShape) -> tuple[Draft, KVCache]:
        out, state = self.newest(params, state, context)
        normed = self.normed(params, out)
        first = self.children(self.head.scores(params["head"], normed), context, shape.branching, 0)
        k, rows = shape.branching, growth.run_rows(shape)
        root = context.lengths - 1

        def expand(carry, beam: Beam):
            condition, tile = carry
            condition = jnp.take_along_axis(condition, beam.parents[:, :, None], axis=1)
            positions = jnp.broadcast_to((root + beam.level)[:, None], beam.tokens.shape)
            out, tile = self.rows(
                params, state, beam.tokens, condition, positions, tile, beam.level * k, beam.seen, committed=root
            )
            normed = self.normed(params, out)
            children = self.children(self.head.scores(params["head"], normed), context, k, 1 + beam.level * k)
            return (self.feedback(out, normed), tile), children

        condition = jnp.repeat(self.feedback(out, normed), k, axis=1)
        positions = root[:, None] + jnp.arange(rows, dtype=jnp.int32) // k
        carry = (condition, self.empty_tile(positions))
        token = context.tokens[jnp.arange(root.shape[0]), root]
        grown = growth.grow(expand, token, first, carry, shape)
        return tree(grown.tokens, grown.parents, grown.lengths, grown.q), state

    def finish(self, state: KVCache, row: Array, tokens: Array, prompt_length: Array, length: Array) -> KVCache:
        del row, tokens, prompt_length, length
        return state

    def scored(self, params: Any, state: KVCache, context: Context) -> Float[Array, "b n d"]:
        """The rows that the output head reads first."""
        return self.normed(params, self.newest(params, state, context)[0])

    @property
    def scored_at_once(self) -> int:
        """Rows of a request that the output head reads at once, at most."""
        return self.shape.branching

    # ---------------------------------------------------------------- parts

    def newest(self, params: Any, state: KVCache, context: Context) -> tuple[Float[Array, "b 1 d"], KVCache]:
        """Take the rows in that were committed last: the output of the newest one, and the cache that holds them.

        Doing it twice with the same features writes the same values to the same slots.
        """
        features = context.features
        assert features is not None
        positions = features.positions
        request = jnp.arange(positions.shape[0])[:, None]
        after = jnp.minimum(positions + 1, context.tokens.shape[1] - 1)
        condition = self.condition(params, features)
        out, tile = self.take_in(params, state, context.tokens[request, after], condition, positions, positions[:, 0])
        state = self.keep(state, tile, features, context)
        last = jnp.maximum(features.count - 1, 0)
        return jnp.take_along_axis(out, last[:, None, None], axis=1), state

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

    def children(self, scores: Scores, context: Context, k: int, row: Int[Array, ""] | int) -> Children:
        """The k children of each of `n` nodes, which the draft runs as its rows `row ...` (the root is row 0)."""
        if not self.sampled:
            tokens, values = scores.top(k)
            # An end token has no continuation, and the target emits it without our help.
            ends = jnp.any(tokens[..., None] == context.eos[:, None, None, :], axis=-1)
            return Children(tokens=tokens, values=jnp.where(ends, -jnp.inf, values))
        q = self.head.distribution(scores, context.sampling)
        number = (row + jnp.arange(q.shape[1]))[:, None] * k + jnp.arange(k)
        seed, root = context.sampling.seed[:, None, None], (context.lengths - 1)[:, None, None]
        columns = draw(q, scores.logits, sampling.uniforms(seed, root, sampling.DRAFT, number))
        return Children(
            tokens=scores.tokens(columns),
            values=jnp.broadcast_to(growth.rank_values(k), columns.shape),
            q=scores.spread(q, self.head.vocab_size),
        )


def draw(
    q: Float[Array, "*rows c"], logits: Float[Array, "*rows c"], u: Float[Array, "*rows k"]
) -> Int[Array, "*rows k"]:
    """Columns drawn from `q` without replacement, one for each uniform number; the law is that of Gumbel top-k.

    Where the support of `q` is used up, the best columns outside it follow: they are then a function of the context,
    which the recursive rule takes them for.
    """
    left, columns = q, []
    for i in range(u.shape[-1]):
        best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        column = jnp.where(jnp.any(left > 0, axis=-1), sampling.pick(left, u[..., i]), best)
        columns.append(column)
        taken = jnp.arange(q.shape[-1]) == column[..., None]
        left, logits = jnp.where(taken, 0, left), jnp.where(taken, -jnp.inf, logits)
    return jnp.stack(columns, axis=-1)


def build_params(
    config: HeadConfig, tensors: Mapping[str, np.ndarray], target_params: Any, dtype: Any
) -> tuple[Head, dict]:
    """What every recurrent head has: embedding, layers, final norm, output head."""
    head, head_params = build_head(config, tensors, target_params, dtype)
    params = {
        "embedding": build_embedding(config, tensors, target_params, dtype),
        "layers": [layer_params(config, tensors, f"layers.{i}", dtype) for i in range(config.num_layers)],
        "norm": norm_weight(config, tensors, "norm"),
        "head": head_params,
    }
    return head, params
