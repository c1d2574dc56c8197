"""EAGLE-3 (arXiv 2503.01840) with the switches of its 3.1 successors: one layer that reads three (or five) taps.

    g = fc . [tap, tap, tap]         each tap normed (`fc_norm`), or all of them at once (`norm_before_fc`), or neither
    attention reads [norm(E[next token]), hidden_norm(g)], twice the width
    residual = g, or hidden_norm(g)  (`norm_before_residual`)
    fed back:  the output, or its final norm (`norm_output`), in place of the next g

By default it drafts the dynamic tree of EAGLE-2; with a branching of 1, a chain.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from specjax.array_types import Array, Float
from specjax.draft import DraftShape
from specjax.drafters.base import Features
from specjax.drafters.config import HeadConfig
from specjax.drafters.layers import apply, norm, norm_weight
from specjax.drafters.recurrent import Recurrent, build_recurrent
from specjax.targets.decoder import Target

DEPTH, BRANCHING, ROWS = 5, 4, 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle3(Recurrent):
    """The drafter; `build` makes one with its parameters."""

    def condition(self, params: Any, features: Features) -> Float[Array, "b n d"]:
        assert features.taps is not None
        return self.fuse(params, features.taps)

    def fuse(self, params: Any, taps: Float[Array, "b n e"]) -> Float[Array, "b n d"]:
        """`g` of concatenated taps."""
        eps = self.config.rms_norm_eps
        if self.config.fc_norm:
            each = jnp.split(taps, len(self.config.taps), axis=-1)
            taps = jnp.concatenate([norm(w, x, eps) for w, x in zip(params["fc_norm"], each, strict=True)], axis=-1)
        if self.config.norm_before_fc:
            taps = norm(params["input_norm"], taps, eps)
        return apply(params["fc"], taps.astype(jnp.dtype(self.dtype)))

    def inputs(
        self, params: Any, embedded: Float[Array, "b n d"], condition: Float[Array, "b n d"]
    ) -> tuple[Array, Array]:
        eps = self.config.rms_norm_eps
        hidden = norm(params["hidden_norm"], condition, eps)
        x = jnp.concatenate([norm(params["layers"][0]["input_norm"], embedded, eps), hidden], axis=-1)
        return x, hidden if self.config.norm_before_residual else condition

    def feedback(self, out: Float[Array, "b n d"], normed: Float[Array, "b n d"]) -> Float[Array, "b n d"]:
        return normed if self.config.norm_output else out


def build(
    config: HeadConfig,
    tensors: Mapping[str, np.ndarray],
    target: Target,
    target_params: Any,
    dtype: Any,
    *,
    depth: int = DEPTH,
    branching: int = BRANCHING,
    rows: int | None = None,
    sampled: bool = False,
) -> tuple[Eagle3, dict]:
    """An EAGLE-3 drafter and its parameters.

    Args:
        config: its description.
        tensors: its weights by canonical name.
        target: the target that it drafts for.
        target_params: the target's arrays.
        dtype: dtype of its weights, keys and values.
        depth: drafts on the longest path.
        branching: children of a node, and nodes of a level that are run; 1 drafts a chain.
        rows: verify rows, the root included; 16 for a tree, or as many as it can grow, and `depth + 1` for a chain.
        sampled: draw drafts instead of taking the most likely ones.

    Raises:
        ValueError: a shape that cannot be grown, or a d2t table that does not fit.
    """
    if rows is None:
        rows = depth + 1 if branching == 1 else max(min(ROWS, 1 + branching + (depth - 1) * branching**2), depth + 1)
    shape = DraftShape(kind=config.family, depth=depth, branching=branching, rows=rows)
    drafter, params = build_recurrent(
        Eagle3, config, tensors, target, target_params, dtype, shape=shape, sampled=sampled
    )
    return drafter, params | fusion_params(config, tensors, dtype)


def fusion_params(config: HeadConfig, tensors: Mapping[str, np.ndarray], dtype: Any) -> dict:
    """What turns taps into the first layer's input."""
    params: dict[str, Any] = {
        "fc": {"weight": jnp.asarray(tensors["fc.weight"], dtype)},
        "hidden_norm": norm_weight(config, tensors, "layers.0.hidden_norm"),
    }
    if config.fc_norm:
        params["fc_norm"] = [norm_weight(config, tensors, f"fc_norm.{i}") for i in range(len(config.taps))]
    if config.norm_before_fc:
        params["input_norm"] = norm_weight(config, tensors, "input_norm")
    return params
