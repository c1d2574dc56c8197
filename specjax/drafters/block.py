"""What the block drafters share: one pass of a small bidirectional decoder over a block of unknown tokens.

DFlash (arXiv 2602.06036) turns the target's residual streams into the context feature `c_p = hidden_norm(fc . taps_p)`
of each processed position, and each layer makes a key and a value of it. These depend on nothing else, so they are
computed once and kept: one cache slot a committed position, a dense row a request. The anchor (the root) has not been
processed, so its features do not exist yet and the context ends right before it. The block `[anchor, MASK, MASK, ...]`
attends to the context and to itself and is thrown away.

A family adds what it makes of the block's hidden rows: `propose`.
"""

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from specjax import cache as kv
from specjax import sampling
from specjax.array_types import Array, Bool, Float, Int
from specjax.cache import KVCache
from specjax.draft import Draft, DraftShape, chain
from specjax.drafters import supertree
from specjax.drafters.base import Context, Features
from specjax.drafters.config import BLOCK, HeadConfig
from specjax.drafters.embedding import build_embedding, embed
from specjax.drafters.head import Head, Scores, build_head
from specjax.drafters.layers import apply, layer_params, norm, norm_weight, rotate_heads
from specjax.drafters.ngram import copied_draft
from specjax.pallas_kernels.tree_attention.reference import attend
from specjax.targets import rope
from specjax.targets.decoder import Target
from specjax.targets.layers import project

SLOT_MULTIPLE = 256  # the reference attention reads whole blocks
TREE_BUDGET = 31  # drafted nodes of a tree: with the root, 32 verify rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockDrafter(abc.ABC):
    """A drafter that predicts all positions of a block in one pass.

    Attributes:
        config: the shape and the arithmetic of the network.
        head: what turns its hidden rows into scores.
        max_position: most positions of the target (what `dynamic` rotation is stretched to).
        num_speculative_tokens: drafted positions. The block is as long as that needs; None is the block that the
            drafter was trained with. Shorter is fine, longer than trained is refused.
        sampled: draw drafts from the drafter's own distribution, with the request's temperature and filters, and return
            it as `q`; otherwise drafts are a function of the context.
        tree: `ddtree` drafts the tree of the most probable prefixes when positions are scored apart from each other;
            `none` drafts as the family does.
        tree_budget: drafted nodes of a tree; None is 31, or fewer where the drafter's file asks for fewer.
        dtype: dtype of weights, keys and values, by name.
    """

    config: HeadConfig
    head: Head
    max_position: int
    num_speculative_tokens: int | None = None
    sampled: bool = False
    tree: Literal["none", "ddtree"] = "none"
    tree_budget: int | None = None
    dtype: str = "float32"
    kind: str = "block"
    wants_hidden: bool = False

    def __post_init__(self):
        c = self.config
        if c.family not in BLOCK or c.block_size < 2 - c.shifted or c.mask_token_id is None:
            raise ValueError(
                f"{self.kind}: a block drafter needs a block family ({', '.join(BLOCK)}), a block_size and a "
                f"mask_token_id; got {c.family}, {c.block_size} and {c.mask_token_id}"
            )
        if not 0 <= c.mask_token_id < c.vocab_size:
            raise ValueError(f"{self.kind}: mask_token_id {c.mask_token_id} is not in the vocabulary of {c.vocab_size}")
        for name in ("windows", "block_causal"):
            if len(getattr(c, name)) not in (0, c.num_layers):
                raise ValueError(f"{self.kind}: {len(getattr(c, name))} {name} for {c.num_layers} layers")
        if c.attention_gate:
            raise ValueError(f"{self.kind}: block drafters have no attention gate, but the description asks for one")
        most = trained_drafts(c)
        if not 1 <= self.depth <= most:
            raise ValueError(
                f"{self.kind}: num_speculative_tokens must be in 1..{most} (its block of {c.block_size} makes {most} "
                f"drafts), got {self.depth}"
            )
        if self.tree not in self._trees():
            raise ValueError(f"{self.kind}: tree must be one of {', '.join(self._trees())}, got {self.tree!r}")
        if self.drafts_trees and self.sampled:
            raise ValueError(f"{self.kind}: trees are deterministic; draft_sampling 'sampled' needs tree 'none'")
        if self.drafts_trees and self.budget < self.depth:
            raise ValueError(
                f"{self.kind}: a tree_budget of {self.budget} nodes cannot hold a path of {self.depth}; raise it, or "
                "lower num_speculative_tokens"
            )

    @classmethod
    def _trees(cls) -> tuple[str, ...]:
        return ("none", "ddtree")

    @property
    def taps(self) -> tuple[int, ...]:
        return self.config.taps

    @property
    def depth(self) -> int:
        """Drafted positions of a full draft."""
        return trained_drafts(self.config) if self.num_speculative_tokens is None else self.num_speculative_tokens

    @property
    def budget(self) -> int:
        """Drafted nodes of a tree."""
        asked = self.config.tree_budget or TREE_BUDGET
        return min(asked, TREE_BUDGET) if self.tree_budget is None else self.tree_budget

    @property
    def drafts_trees(self) -> bool:
        return self.tree != "none"

    @property
    def shape(self) -> DraftShape:
        if not self.drafts_trees:
            return DraftShape.chain(self.kind, self.depth)
        branching = max(2, min(self.budget, self.head.width))
        return DraftShape(kind=self.kind, depth=self.depth, branching=branching, rows=1 + self.budget)

    def init_state(self, batch: int, capacity: int) -> KVCache:
        """Keys and values of the context, none yet."""
        c, slots = self.config, -(-capacity // SLOT_MULTIPLE) * SLOT_MULTIPLE
        return kv.init(c.num_layers, batch, c.num_kv_heads, slots, c.head_dim, jnp.dtype(self.dtype))

    def prefill(
        self, params: Any, state: KVCache, row: Array, tokens: Array, start: Array, count: Array, features: Features
    ) -> KVCache:
        """Keep the context features of a chunk; the tokens themselves are not read."""
        del tokens, start
        return self._remember(params, state, jnp.reshape(row, (1,)), dataclasses.replace(features, count=count[None]))

    def draft(self, params: Any, state: KVCache, context: Context, shape: DraftShape) -> tuple[Draft, KVCache]:
        """See `Drafter.draft`. Raises ValueError for a shape that the drafter cannot fill."""
        if shape.is_chain == self.drafts_trees or not 1 <= shape.depth <= self.depth:
            raise ValueError(
                f"{self.kind} drafts {'trees' if self.drafts_trees else 'chains'} of depth 1 to {self.depth}, but the "
                f"shape asked for has depth {shape.depth} and branching {shape.branching}"
            )
        if context.features is not None:
            everyone = jnp.arange(context.lengths.shape[0], dtype=jnp.int32)
            state = self._remember(params, state, everyone, context.features)
        with jax.named_scope("block"):
            hidden = self._hidden(params, state, context, shape.depth)
        with jax.named_scope("propose"):
            if self.tree == "ddtree":
                return self._best_first(params, hidden, context, shape), state
            return self.propose(params, hidden, context, shape), state

    def finish(self, state: KVCache, row: Array, tokens: Array, prompt_length: Array, length: Array) -> KVCache:
        del row, tokens, prompt_length, length
        return state

    @abc.abstractmethod
    def propose(self, params: Any, hidden: Float[Array, "b k d"], context: Context, shape: DraftShape) -> Draft:
        """The family's draft from the block's post-norm hidden rows, one for each drafted position."""

    # ------------------------------------------------------------------ the network

    def _remember(self, params: Any, state: KVCache, request: Int[Array, " b"], features: Features) -> KVCache:
        """Write the keys and values of the context features of `features.count` rows of each request.

        A row always lands in the slot of its position, so taking the same rows in twice changes nothing, and what an
        unaccepted draft has left behind is never there: drafts are not written.
        """
        steps = features.positions.shape[1]
        c = apply(params["fc"], features.taps.astype(jnp.dtype(self.dtype)))
        c = norm(params["hidden_norm"], c, self.config.rms_norm_eps)
        live = jnp.arange(steps) < features.count[:, None]
        slot = jnp.where(live, features.positions, state.page_size)  # past the end: dropped
        turn = self._turn(features.positions)
        keys, values = [], []
        for layer, k_slots, v_slots in zip(params["layers"], state.k, state.v, strict=True):
            k, v = self._keys_values(layer, c, turn)
            for new, slots, into in ((k, k_slots, keys), (v, v_slots, values)):
                into.append(slots.at[request[:, None], :, slot].set(new, mode="drop"))
        return KVCache(k=tuple(keys), v=tuple(values), table=None)

    def _hidden(self, params: Any, state: KVCache, context: Context, depth: int) -> Float[Array, "b k d"]:
        """Post-norm hidden rows of the `depth` drafted positions."""
        c, eps = self.config, self.config.rms_norm_eps
        batch, rows = context.lengths.shape[0], depth if c.shifted else depth + 1
        start = jnp.maximum(context.lengths - 1, 0)
        masks = jnp.full((batch, rows - 1), c.mask_token_id, jnp.int32)
        x = embed(c, params["embedding"], jnp.concatenate([root(context)[:, None], masks], axis=1))
        position = start[:, None] + jnp.arange(rows, dtype=jnp.int32)
        committed = jnp.where(context.active, start, 0)
        turn = self._turn(position)
        windows = c.windows or (None,) * c.num_layers
        causal = c.block_causal or tuple(window is not None for window in windows)

        def attention(i, layer, n):
            q = self._heads(layer, "q", n, c.num_heads)[0]
            if c.qk_norm:
                q = norm(layer["q_norm"], q, eps)
            k, v = self._keys_values(layer, n, turn)
            seen = jnp.broadcast_to(block_mask(rows, windows[i], causal[i]), (batch, rows, rows))
            cached = (state.k[i], state.v[i], None, committed, position)
            y = attend(turn(q), k, v, seen, *cached, scale=c.head_dim**-0.5, window=windows[i])
            return apply(layer["out"], y.reshape(batch, rows, -1))

        def mlp(layer, n):
            gate, up = jnp.split(apply(layer["gate_up"], n), 2, axis=-1)
            return apply(layer["down"], jax.nn.silu(gate) * up)

        for i, layer in enumerate(params["layers"]):
            n = norm(layer["input_norm"], x, eps)
            before, after = self._convolutions(layer.get("attention_conv"), n)
            x = x + after(attention(i, layer, before(n)))
            n = norm(layer["mlp_norm"], x, eps)
            before, after = self._convolutions(layer.get("mlp_conv"), n)
            x = x + after(mlp(layer, before(n)))
        hidden = norm(params["norm"], x, eps)
        # In place, row j speaks of its own position: the anchor's row has nothing to say.
        return hidden if c.shifted else hidden[:, 1:]

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
            earlier = (jnp.pad(wide, ((0, 0), (o, 0), (0, 0)))[:, :rows] for o in range(c.conv_kernel))
            return sum(kernel[:, :, side, o] * row for o, row in enumerate(earlier)).astype(x.dtype)

        return (lambda x: convolve(0, x)), (lambda x: convolve(1, x))

    # ------------------------------------------------------------------ from logits to drafts

    def choose(self, scores: Scores, context: Context, index: Int[Array, " n"]) -> tuple[Array, Array | None]:
        """Tokens `[b, n]` drafted from scores `[b, n, c]`, and the `q` `[b, n, v]` that they were drawn from (or None).

        `index` numbers the drafts within the round, from 0.
        """
        if not self.sampled:
            return scores.best(), None
        q = self.head.distribution(scores, context.sampling)
        # Keyed by the root, not by the drafted position: block verification looks past what it accepts, so a position
        # that is drafted again must get a fresh number.
        position = (context.lengths - 1)[:, None]
        u = sampling.uniforms(context.sampling.seed[:, None], position, sampling.DRAFT, index)
        tokens = scores.tokens(sampling.pick(q, u)[..., None])[..., 0]
        return tokens, scores.spread(q, self.config.vocab_size)

    def chain(self, context: Context, tokens: Int[Array, "b k"], q: Array | None, kept: Bool[Array, "b k"]) -> Draft:
        """A chain of `tokens` after the root, up to the first that is not kept.

        Whether a token is kept must not depend on the token itself or on later ones. A deterministic draft also ends
        before an end token; a sampled one is never cut by its own tokens: that would bias the law.

        Args:
            context: what is committed.
            tokens: target ids.
            q: what each was drawn from, over the target's vocabulary; None for a deterministic draft.
            kept: which tokens to propose.
        """
        if q is None:
            return copied_draft(context, tokens, kept)
        lengths = 1 + jnp.sum(jnp.cumprod(kept.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
        # q at a node is what its child was drawn from; the last node has no child.
        q = jnp.pad(q, ((0, 0), (0, 1), (0, 0)))
        return chain(jnp.concatenate([root(context)[:, None], tokens], axis=1), lengths, q)

    def _best_first(self, params: Any, hidden: Array, context: Context, shape: DraftShape) -> Draft:
        """DDTree over what the head says of each position by itself."""
        ids, scores = self.head.scores(params["head"], hidden).top(min(shape.rows - 1, self.head.width))
        scores = without_ends(scores, ids, context)
        return supertree.best_first(root(context), ids, scores, budget=shape.rows - 1)


def trained_drafts(config: HeadConfig) -> int:
    """Drafts of a block as long as it was trained."""
    return config.block_size if config.shifted else config.block_size - 1


def block_mask(rows: int, window: int | None, causal: bool) -> Bool[Array, "n j"]:
    """Which rows of its block each row sees: all, or none later; with a window, none `window` or more away."""
    ahead = jnp.arange(rows) - jnp.arange(rows)[:, None]
    seen = ahead <= 0 if causal else jnp.ones((rows, rows), bool)
    return seen if window is None else seen & (jnp.abs(ahead) < window)


def without_ends(scores: Float[Array, "b k c"], ids: Int[Array, "b k c"], context: Context) -> Float[Array, "b k c"]:
    """-inf where a candidate would end the request: the target emits such a token by itself, a node gains nothing."""
    ends = jnp.any(ids[..., None] == context.eos[:, None, None, :], axis=-1)
    return jnp.where(ends, -jnp.inf, scores)


def root(context: Context) -> Int[Array, " b"]:
    """The newest committed token of each request."""
    return jnp.take_along_axis(context.tokens, jnp.maximum(context.lengths - 1, 0)[:, None], axis=1)[:, 0]


def build_drafter(
    cls: type[BlockDrafter],
    config: HeadConfig,
    tensors: Mapping[str, np.ndarray],
    target: Target,
    target_params: Any,
    dtype: Any,
    options: Mapping[str, Any],
) -> tuple[Any, dict[str, Any]]:
    """A drafter of class `cls` and the parameters of its backbone; the family adds its own.

    Raises:
        ValueError: an option that the family does not have, or options and a description that do not go together.
    """
    own = ("config", "head", "max_position", "dtype", "kind", "wants_hidden")
    valid = [field.name for field in dataclasses.fields(cls) if field.name not in own]
    if unknown := ", ".join(sorted(set(options) - set(valid))):
        raise ValueError(f"{config.family} drafters have no option {unknown}; valid: {', '.join(valid)}")
    head, head_params = build_head(config, tensors, target_params, dtype)
    fixed = {"config": config, "head": head, "max_position": target.config.max_position_embeddings}
    drafter = cls(**fixed, dtype=str(jnp.dtype(dtype)), kind=config.family, **options)
    params = {
        "embedding": build_embedding(config, tensors, target_params, dtype),
        "head": head_params,
        "fc": {"weight": jnp.asarray(tensors["fc.weight"], dtype)},
        "hidden_norm": norm_weight(config, tensors, "hidden_norm"),
        "norm": norm_weight(config, tensors, "norm"),
        "layers": tuple(_layer(config, tensors, f"layers.{i}", dtype) for i in range(config.num_layers)),
    }
    return drafter, params


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
