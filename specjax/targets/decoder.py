"""One decoder family: Llama 2/3, SmolLM2, Mistral, Qwen2/2.5 and Qwen3, chosen by `DecoderConfig`.

Layers are unrolled and each has its own buffers (a scan over stacked weights takes twice as long on XLA's CPU backend);
q, k and v are one matrix, gate and up another. Nothing is held by the module: the cache comes in and goes out.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax import cache as kv
from specjax.array_types import Array, Float, Int, pytree
from specjax.cache import KVCache
from specjax.draft import Rows
from specjax.pallas_kernels.tree_attention.op import tree_attention
from specjax.targets import rope
from specjax.targets.config import DecoderConfig
from specjax.targets.layers import INIT_STD, Projection, RMSNorm, project, rotate


@pytree
class Output:
    """What a pass returns: post-final-norm hidden rows, the taps asked for, and the cache with the rows written."""

    hidden: Float[Array, "N d"]
    taps: Float[Array, "N e"] | None
    cache: KVCache


class Attention(nnx.Module):
    def __init__(self, config: DecoderConfig, window: int | None, rngs: nnx.Rngs, dtype):
        self.config, self.window = config, window
        c = config
        size = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
        self.qkv = Projection(c.hidden_size, size, bias=c.attention_bias, rngs=rngs, dtype=dtype)
        self.out = Projection(c.num_heads * c.head_dim, c.hidden_size, bias=c.output_bias, rngs=rngs, dtype=dtype)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps, dtype) if c.qk_norm else None
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps, dtype) if c.qk_norm else None

    def __call__(self, x, cos, sin, k_pages, v_pages, table, committed, rows: Rows):
        y, k_pages, v_pages = self.attend(*self.project(x, cos, sin), k_pages, v_pages, table, committed, rows)
        return self.out(y), k_pages, v_pages

    def project(self, x: Float[Array, "N d"], cos, sin) -> tuple[Array, Array, Array]:
        """Queries `[N, h, f]`, keys and values `[N, g, f]`, rotated."""
        c = self.config
        qkv = self.qkv(x).reshape(x.shape[0], c.num_heads + 2 * c.num_kv_heads, c.head_dim)
        q, k, v = jnp.split(qkv, (c.num_heads, c.num_heads + c.num_kv_heads), axis=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def attend(self, q, k, v, k_pages, v_pages, table, committed, rows: Rows) -> tuple[Array, Array, Array]:
        """What the heads see, behind each other `[N, h * f]`, and the pages with the rows' keys and values written."""
        k_pages = kv.write(k_pages, k, table, rows)
        v_pages = kv.write(v_pages, v, table, rows)
        scale = self.config.head_dim**-0.5
        with jax.named_scope("tree_attention"):
            y = tree_attention(q, k, v, k_pages, v_pages, table, committed, rows, scale=scale, window=self.window)
        return y.reshape(q.shape[0], -1), k_pages, v_pages


class MLP(nnx.Module):
    """SwiGLU (arXiv 2002.05202), gate and up in one matrix."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, dtype):
        c = config
        self.gate_up = Projection(c.hidden_size, 2 * c.intermediate_size, bias=c.mlp_bias, rngs=rngs, dtype=dtype)
        self.down = Projection(c.intermediate_size, c.hidden_size, bias=c.mlp_bias, rngs=rngs, dtype=dtype)

    def __call__(self, x: Float[Array, "N d"]) -> Float[Array, "N d"]:
        gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
        return self.down(jax.nn.silu(gate) * up)


class Layer(nnx.Module):
    def __init__(self, config: DecoderConfig, window: int | None, rngs: nnx.Rngs, dtype):
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.attention = Attention(config, window, rngs, dtype)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.mlp = MLP(config, rngs, dtype)

    def __call__(self, x, cos, sin, k_pages, v_pages, table, committed, rows: Rows):
        with jax.named_scope("attention"):
            y, k_pages, v_pages = self.attention(
                self.attention_norm(x), cos, sin, k_pages, v_pages, table, committed, rows
            )
            x = x + y
        with jax.named_scope("mlp"):
            return x + self.mlp(self.mlp_norm(x)), k_pages, v_pages


class Decoder(nnx.Module):
    """The decoder. `__call__` is one pass over packed rows; the head is a separate call on the rows that need it."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, dtype=jnp.float32):
        self.config = config
        table = INIT_STD * jax.random.normal(rngs.params(), (config.vocab_size, config.hidden_size), dtype)
        self.embedding = nnx.Param(table)
        self.layers = nnx.List([Layer(config, window, rngs, dtype) for window in config.windows])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        tied = config.tie_word_embeddings
        self.head = None if tied else Projection(config.hidden_size, config.vocab_size, rngs=rngs, dtype=dtype)

    def __call__(self, rows: Rows, cache: KVCache, committed: Int[Array, " b"], taps: tuple[int, ...] = ()) -> Output:
        cos, sin = rope.cos_sin(
            self.config.rope, self.config.head_dim, rows.positions, self.config.max_position_embeddings
        )
        with jax.named_scope("embed"):
            x = self.embed(rows.tokens)
        k, v, tapped = list(cache.k), list(cache.v), {0: x} if 0 in taps else {}
        for index, layer in enumerate(self.layers):
            graph, params = nnx.split(layer)
            step = (x, cos, sin, k[index], v[index], cache.table, committed, rows)
            x, k[index], v[index] = _run_layer(graph, nnx.to_pure_dict(params), *step)
            if index + 1 in taps:
                tapped[index + 1] = x
        hidden = self.norm(x)
        return Output(
            hidden=hidden,
            taps=jnp.concatenate([tapped[t] for t in taps], axis=-1) if taps else None,
            cache=KVCache(k=tuple(k), v=tuple(v), table=cache.table),
        )

    def embed(self, tokens: Int[Array, " N"]) -> Float[Array, "N d"]:
        return self.embedding[...][tokens]

    def logits(self, hidden: Float[Array, "N d"]) -> Float[Array, "N v"]:
        """Float32 logits of post-norm hidden rows."""
        weight = self.embedding[...] if self.head is None else self.head.weight[...]
        return project(weight, hidden, out_dtype=jnp.float32)


@functools.partial(jax.jit, static_argnums=0)
def _run_layer(graph: Any, params: Any, *args: Any):
    """One layer, traced once for all layers of the same structure; the compiler sees them unrolled all the same."""
    return nnx.merge(graph, params)(*args)


@dataclasses.dataclass(frozen=True)
class Target:
    """A decoder as pure functions of `params`, a plain pytree: what the engine compiles, no Flax in sight.

    Attributes:
        config: the architecture.
        graph: the module's static structure.
    """

    config: DecoderConfig
    graph: Any

    def forward(self, params, rows: Rows, cache: KVCache, committed: Array, taps: tuple[int, ...] = ()) -> Output:
        """One pass over packed rows.

        Args:
            params: the weights.
            rows: packed rows; their keys and values are written to `rows.slots`.
            cache: the requests' cache; slots below `committed` are read.
            committed: committed slots of each request, `[b]`.
            taps: residual streams to return, `t` = layers already executed (0: the embedding output), ascending.

        Returns:
            `Output`; `taps` concatenated along the last axis.
        """
        return nnx.merge(self.graph, params)(rows, cache, committed, taps)

    def logits(self, params, hidden: Float[Array, "N d"]) -> Float[Array, "N v"]:
        """Float32 logits of post-norm hidden rows."""
        return nnx.merge(self.graph, params).logits(hidden)

    def embed(self, params, tokens: Int[Array, " N"]) -> Float[Array, "N d"]:
        """Embedding rows of tokens."""
        return nnx.merge(self.graph, params).embed(tokens)

    def init_cache(self, pages: int, page_size: int, dtype, table=None) -> KVCache:
        """An empty cache of this architecture."""
        c = self.config
        return kv.init(c.num_layers, pages, c.num_kv_heads, page_size, c.head_dim, dtype, table)


def check_taps(config: DecoderConfig, taps: tuple[int, ...]) -> None:
    """Refuse taps that name no residual stream; `t = num_layers` is excluded by convention (HF's is post-norm)."""
    bad = [t for t in taps if not 0 <= t < config.num_layers]
    if bad or list(taps) != sorted(set(taps)):
        raise ValueError(f"taps must be ascending, distinct and in 0..{config.num_layers - 1}; got {taps}")


def build(config: DecoderConfig, dtype=jnp.float32, seed: int = 0) -> tuple[Target, Any]:
    """A target with random weights: `(target, params)`."""
    graph, state = nnx.split(Decoder(config, nnx.Rngs(seed), dtype))
    return Target(config=config, graph=graph), nnx.to_pure_dict(state)


def abstract(config: DecoderConfig, dtype=jnp.float32) -> tuple[Target, Any]:
    """A target and the shapes of its weights, without any: `(target, jax.ShapeDtypeStruct in the params' tree)`."""
    graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0), dtype)))
    return Target(config=config, graph=graph), nnx.to_pure_dict(state)


def from_tensors(config: DecoderConfig, tensors: dict[str, np.ndarray], dtype=jnp.float32) -> tuple[Target, Any]:
    """A target with a checkpoint's weights (HF names and shapes), q/k/v and gate/up joined: `(target, params)`."""
    target, shapes = abstract(config, dtype)

    def array(*names: str):
        parts = [tensors[name] for name in names]
        return jnp.asarray(parts[0] if len(parts) == 1 else np.concatenate(parts), dtype)

    def projection(*names: str, bias: bool = False):
        out = {"weight": array(*(f"{n}.weight" for n in names))}
        return out | {"bias": array(*(f"{n}.bias" for n in names))} if bias else out

    def layer(i: int):
        attn, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        attention = {
            "qkv": projection(f"{attn}.q_proj", f"{attn}.k_proj", f"{attn}.v_proj", bias=config.attention_bias),
            "out": projection(f"{attn}.o_proj", bias=config.output_bias),
        }
        if config.qk_norm:
            attention |= {"q_norm": projection(f"{attn}.q_norm"), "k_norm": projection(f"{attn}.k_norm")}
        return {
            "attention_norm": projection(f"model.layers.{i}.input_layernorm"),
            "attention": attention,
            "mlp_norm": projection(f"model.layers.{i}.post_attention_layernorm"),
            "mlp": {
                "gate_up": projection(f"{mlp}.gate_proj", f"{mlp}.up_proj", bias=config.mlp_bias),
                "down": projection(f"{mlp}.down_proj", bias=config.mlp_bias),
            },
        }

    params = {
        "embedding": array("model.embed_tokens.weight"),
        "layers": {i: layer(i) for i in range(config.num_layers)},
        "norm": projection("model.norm"),
    }
    if not config.tie_word_embeddings:
        params["head"] = projection("lm_head")
    want, got = (jax.tree.map(lambda x: x.shape, tree) for tree in (shapes, params))
    if want != got:
        raise ValueError(f"the checkpoint's tensors do not make this decoder: expected {want}, got {got}")
    return target, params
