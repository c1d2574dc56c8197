"""A decoder whose whole pass is the op `decode_step`: one kernel where the device has it, its reference elsewhere.

Weights exist once, in the op's layout: `fuse` cuts them into tiles, layer after layer, and prefill reads the same ones.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp

from specjax.array_types import Array, Float, Int
from specjax.cache import KVCache
from specjax.draft import Rows
from specjax.pallas_kernels import dispatch
from specjax.pallas_kernels.decode_step.weights import Plan, pack
from specjax.targets import rope
from specjax.targets.config import DecoderConfig
from specjax.targets.decoder import Output, Target
from specjax.targets.layers import project


@dataclasses.dataclass(frozen=True)
class FusedTarget:
    """As `Target`, over the weights that `fuse` makes and a cache with all layers in one array.

    Attributes:
        config: the architecture.
        plan: how its weights are cut.
    """

    config: DecoderConfig
    plan: Plan

    def forward(self, params, rows: Rows, cache: KVCache, committed: Array, taps: tuple[int, ...] = ()) -> Output:
        """One pass over packed rows; see `Target.forward`."""
        c = self.config
        cos, sin = rope.cos_sin(c.rope, c.head_dim, rows.positions, c.max_position_embeddings)
        hidden, tapped, k, v = dispatch.call(
            "decode_step",
            "decode_step",
            self.plan,
            params["fused"],
            self.embed(params, rows.tokens),
            cos,
            sin,
            cache.k[0],
            cache.v[0],
            cache.table,
            committed,
            rows,
            taps=taps,
        )
        return Output(hidden=hidden, taps=tapped, cache=KVCache(k=(k,), v=(v,), table=cache.table))

    def logits(self, params, hidden: Float[Array, "N d"]) -> Float[Array, "N v"]:
        """Float32 logits of post-norm hidden rows."""
        weight = params["embedding"] if self.config.tie_word_embeddings else params["head"]["weight"]
        return project(weight, hidden, out_dtype=jnp.float32)

    def embed(self, params, tokens: Int[Array, " N"]) -> Float[Array, "N d"]:
        """Embedding rows of tokens."""
        return params["embedding"][tokens]

    def init_cache(self, pages: int, page_size: int, dtype, table=None) -> KVCache:
        """An empty cache of this architecture, its layers in one array."""
        c = self.config
        shape = (c.num_layers, pages, c.num_kv_heads, page_size, c.head_dim)
        return KVCache(k=(jnp.zeros(shape, dtype),), v=(jnp.zeros(shape, dtype),), table=table)


def problems(config: DecoderConfig) -> list[str]:
    """What of a decoder the fused step does not have."""
    biases = ("attention_bias", "output_bias", "mlp_bias")
    found = [f"{name} is true" for name in biases if getattr(config, name)]
    return found + ["sliding windows"] * any(window is not None for window in config.windows)


def plan_of(config: DecoderConfig, dtype: Any, int8: bool = False) -> Plan:
    """How the weights of a decoder are cut, and whether they are rounded to 8 bits.

    Raises:
        ValueError: the architecture has what the fused step has not.
    """
    if found := problems(config):
        raise ValueError(
            f"the fused decode step does not have this decoder's {', '.join(found)}: take decode_step 'xla'"
        )
    c = config
    return Plan.of(
        layers=c.num_layers,
        hidden=c.hidden_size,
        intermediate=c.intermediate_size,
        heads=c.num_heads,
        groups=c.num_kv_heads,
        dim=c.head_dim,
        eps=c.rms_norm_eps,
        qk_norm=c.qk_norm,
        dtype=jnp.dtype(dtype).name,
        int8=int8,
    )


def fuse(target: Target, params: Any, int8: bool = False) -> tuple[FusedTarget, Any]:
    """A target and its weights for the fused step: `(target, params)`; the rest stays as it is.

    `int8` rounds the layers' matrices to 8 bits: another model, half the bytes.
    """
    config = target.config
    plan = plan_of(config, params["embedding"].dtype, int8)

    def layer(p):
        attention, mlp = p["attention"], p["mlp"]
        gate, up = jnp.split(mlp["gate_up"]["weight"], 2)
        matrices = {"qkv": attention["qkv"], "out": attention["out"], "down": mlp["down"]}
        norms = {"attention_norm": p["attention_norm"], "mlp_norm": p["mlp_norm"]}
        if config.qk_norm:
            norms |= {name: attention[name] for name in ("q_norm", "k_norm")}
        return {name: x["weight"] for name, x in (matrices | norms).items()} | {"gate": gate, "up": up}

    layers = [layer(params["layers"][i]) for i in range(config.num_layers)]
    rest = {name: x for name, x in params.items() if name != "layers"}
    return FusedTarget(config, plan), rest | {"fused": pack(plan, layers, params["norm"]["weight"])}
