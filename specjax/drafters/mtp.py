"""MTP: the multi-token-prediction module that comes with a target (DeepSeek-V3, arXiv 2412.19437, section 2.2).

    z = fuse . [norm_e(E[next token]), norm_h(h)]     or [norm_h(h), norm_e(...)] (`hidden_first`: MiMo)
    one decoder layer of the target's kind on z, a final norm, the target's head

One module predicts one token more than the target does. Applied again to its own output it predicts further ones, which
is how it drafts a chain. The families differ in what `h` is:

| family                        | target's h     | fed back           | else                                         |
|-------------------------------|----------------|--------------------|----------------------------------------------|
| DeepSeek-V3, GLM-4.5 to 5     | after its norm | after the own norm |                                              |
| Qwen3-Next, Qwen3.5 and later | after its norm | after the own norm | `1 + w` norms, output gate, partial rotation |
| MiMo                          | after its norm | after the own norm | hidden first, biases on q, k and v           |

vLLM serves all of them with a row of position 0 that reads no token. Modules are trained without, so that is not done
unless the probe finds that the target agrees with it clearly more often (`blank_start`).
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

DEPTH = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class MTP(Recurrent):
    """The drafter; `build` makes one with its parameters."""

    def condition(self, params: Any, features: Features) -> Float[Array, "b n d"]:
        assert features.hidden is not None
        if self.config.hidden_normed:
            return features.hidden.astype(jnp.dtype(self.dtype))
        # Without the target's norm weight, what is left of its final norm is a factor for each row, and the module's
        # own norm, which comes next, takes that out again.
        return (features.hidden.astype(jnp.float32) / params["target_norm"]).astype(jnp.dtype(self.dtype))

    def inputs(
        self, params: Any, embedded: Float[Array, "b n d"], condition: Float[Array, "b n d"]
    ) -> tuple[Array, Array]:
        eps = self.config.rms_norm_eps
        parts = [norm(params["embedding_norm"], embedded, eps), norm(params["hidden_norm"], condition, eps)]
        if self.config.hidden_first:
            parts.reverse()
        z = apply(params["fuse"], jnp.concatenate(parts, axis=-1))
        return norm(params["layers"][0]["input_norm"], z, eps), z

    def feedback(self, out: Float[Array, "b n d"], normed: Float[Array, "b n d"]) -> Float[Array, "b n d"]:
        return normed if self.config.feedback_normed else out


def build(
    config: HeadConfig,
    tensors: Mapping[str, np.ndarray],
    target: Target,
    target_params: Any,
    dtype: Any,
    *,
    depth: int = DEPTH,
    branching: int = 1,
    rows: int | None = None,
    sampled: bool = False,
) -> tuple[MTP, dict]:
    """An MTP drafter and its parameters.

    Args:
        config: its description.
        tensors: its weights by canonical name.
        target: the target that it drafts for.
        target_params: the target's arrays.
        dtype: dtype of its weights, keys and values.
        depth: drafts on the longest path; the module is applied again for each after the first.
        branching: children of a node; 1 drafts a chain, more a dynamic tree as EAGLE-3 does.
        rows: verify rows, the root included; by default those of a chain, or all that the tree can grow.
        sampled: draw drafts instead of taking the most likely ones.

    Raises:
        ValueError: a module of another width than the target, a shape that cannot be grown, or hidden states asked for
            before a final norm that cannot be undone.
    """
    if config.hidden_size != config.target_hidden_size:
        raise ValueError(
            f"an MTP module is fed the target's hidden states and then its own, so the widths must be equal: "
            f"it has {config.hidden_size}, the target {config.target_hidden_size}"
        )
    if rows is None:
        rows = depth + 1 if branching == 1 else 1 + branching + (depth - 1) * branching**2
    shape = DraftShape(kind=config.family, depth=depth, branching=branching, rows=rows)
    drafter, params = build_recurrent(MTP, config, tensors, target, target_params, dtype, shape=shape, sampled=sampled)
    params |= {
        "fuse": {"weight": jnp.asarray(tensors["fuse.weight"], dtype)},
        "embedding_norm": norm_weight(config, tensors, "embedding_norm"),
        "hidden_norm": norm_weight(config, tensors, "hidden_norm"),
    }
    if not config.hidden_normed:
        weight = target_params["norm"]["weight"].astype(jnp.float32)
        if not np.asarray(weight).all():
            raise ValueError(
                "this MTP module reads hidden states before the target's final norm, whose weight has zeros: what they "
                "hide cannot be recovered"
            )
        params["target_norm"] = weight
    return drafter, params
