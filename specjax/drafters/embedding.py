"""The input embedding of a learned drafter: its own, or the target's without a copy."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from specjax.array_types import Array, Float, Int
from specjax.drafters.config import HeadConfig


def build_embedding(config: HeadConfig, tensors: Mapping[str, np.ndarray], target_params: Any, dtype: Any) -> Array:
    """The table `[v, d]`."""
    if config.own_embedding:
        return jnp.asarray(tensors["embed_tokens.weight"], dtype)
    return target_params["embedding"]


def embed(config: HeadConfig, table: Float[Array, "v d"], tokens: Int[Array, "*rows"]) -> Float[Array, "*rows d"]:
    """Embedding rows of tokens, at the drafter's scale."""
    rows = table[tokens]
    return rows if config.embedding_scale == 1.0 else rows * jnp.asarray(config.embedding_scale, rows.dtype)
