"""What an engine is made of, in words and numbers."""

import dataclasses
from typing import TYPE_CHECKING, Any

import jax

if TYPE_CHECKING:
    from specjax.engine.engine import Engine


def describe(engine: "Engine") -> dict[str, Any]:
    """Target, drafter, sizes and programs; see `Engine.describe`."""
    c = engine.target.config
    weights = jax.tree.leaves(engine.params["target"])
    cache = engine._state.cache
    return {
        "target": engine.config.target,
        "drafter": engine.drafter.kind if engine.drafter is not None else "none",
        "shape": dataclasses.asdict(engine.programs.stage.shape),
        "accept": engine.programs.stage.rule,
        "dtype": str(weights[0].dtype),
        "device": str(jax.devices()[0].device_kind),
        "batch": engine.config.batch,
        "context": engine.config.context,
        "programs": engine.programs.count,
        "weights_bytes": sum(x.nbytes for x in weights),
        "kv_bytes_per_token": 2 * c.num_layers * c.num_kv_heads * c.head_dim * cache.k[0].dtype.itemsize,
    }
