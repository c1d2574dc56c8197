"""DSpark (arXiv 2607.05147): a block of drafts made consistent from left to right, and cut where confidence ends.

The backbone is DFlash's, with shifted slots. A Markov head corrects each position's logits by the token that was
actually drafted before it; a confidence head says how likely the target is to accept each draft.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.array_types import Array, Float, Int
from specjax.draft import Draft, DraftShape
from specjax.drafters.base import Context
from specjax.drafters.block import root
from specjax.drafters.block_drafter import BlockDrafter, build_drafter
from specjax.drafters.config import HeadConfig
from specjax.drafters.head import Scores
from specjax.targets.decoder import Target
from specjax.targets.layers import project


@dataclasses.dataclass(frozen=True, kw_only=True)
class DSpark(BlockDrafter):
    """A chain whose position k scores `U_k + W2 phi_k`, where phi reads the token before, `x`, through `e = W1[x]`.

    `vanilla`: phi = e. `gated`: phi = sigmoid(gate [h; e]) * e. `rnn`: [g, c, o] = joint [s; e; h], s becomes
    sigmoid(g) * s + (1 - sigmoid(g)) * tanh(c) from 0 at the root, phi = tanh(o). With rank 0 there is no such term.

    The confidence of draft k is `sigmoid((w [h_k; e_{k-1}] + b) / temperature_k)`, the predicted chance that the target
    accepts it once it has accepted all before. The draft ends before the first one below the threshold. That is decided
    by features and by the tokens before k, never by token k, so a sampled draft stays lossless.

    Attributes:
        confidence_threshold: least confidence of a draft; 0 keeps the whole block.
        calibration: temperature of the confidence at each position, as fitted on data; empty for 1.
    """

    kind: str = "dspark"
    confidence_threshold: float = 0.0
    calibration: tuple[float, ...] = ()

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "calibration", tuple(self.calibration))
        c, threshold = self.config, self.confidence_threshold
        faults = {
            f"confidence_threshold must lie in [0, 1], got {threshold}": not 0 <= threshold <= 1,
            f"a confidence_threshold of {threshold} needs a confidence head; there is none": threshold
            and not c.confidence,
            "a confidence_threshold cuts chains; for a tree set tree_budget instead": threshold and self.drafts_trees,
            "calibration is read only where confidence_threshold is above 0": self.calibration and not threshold,
            f"{len(self.calibration)} calibration temperatures for {self.depth} positions": self.calibration
            and len(self.calibration) < self.depth,
            f"calibration temperatures must be positive, got {self.calibration}": not all(
                math.isfinite(t) and t > 0 for t in self.calibration
            ),
            "the confidence head reads the Markov embedding, but markov_rank is 0": c.confidence
            and c.confidence_with_markov
            and not c.markov_rank,
        }
        if found := [fault for fault, holds in faults.items() if holds]:
            raise ValueError(f"{self.kind}: " + "; ".join(found))

    def propose(self, params: Any, hidden: Float[Array, "b k d"], context: Context, shape: DraftShape) -> Draft:
        scores = self.head.scores(params["head"], hidden)
        batch, depth, _ = hidden.shape
        # Columns are the same for all positions, or (candidates) each position has its own.
        own = None if scores.columns is None else (scores.ids, scores.columns)

        def walk(carry, position):
            token, memory = carry
            index, h, logits, own = position
            ids, columns = (scores.ids, None) if own is None else (own[0][:, None], own[1])
            e = params["markov"]["w1"][token] if self.config.markov_rank else None
            if e is not None:
                phi, memory = self._markov(params["markov"], e, h, memory)
                logits = logits + self._bias(params["markov"]["w2"], phi, columns)
            confidence = self._confidence(params, h, e) if self.confidence_threshold else jnp.zeros((batch,))
            here = Scores(logits=logits[:, None], ids=ids)
            chosen = jax.tree.map(lambda x: x[:, 0], self.choose(here, context, index[None]))
            return (chosen.tokens, memory), (chosen, confidence)

        memory = jnp.zeros((batch, self.config.markov_rank), jnp.float32)
        each = jax.tree.map(lambda x: x.swapaxes(0, 1), (hidden, scores.logits, own))
        each = (jnp.arange(depth), *each)
        _, chosen = jax.lax.scan(walk, (root(context), memory), each)
        chosen, confidence = jax.tree.map(lambda x: x.swapaxes(0, 1), chosen)
        if not self.confidence_threshold:
            return self.chain(context, chosen, jnp.ones(confidence.shape, bool))
        temperature = jnp.asarray(self.calibration[:depth] or (1.0,) * depth, jnp.float32)
        return self.chain(context, chosen, jax.nn.sigmoid(confidence / temperature) >= self.confidence_threshold)

    def _markov(self, params: Any, e: Float[Array, "b r"], h: Float[Array, "b d"], memory: Float[Array, "b r"]):
        """What W2 multiplies, and the recurrent state after the token before."""
        kind = self.config.markov
        if kind == "vanilla":
            return e, memory
        if kind == "gated":
            gate = project(params["gate"], jnp.concatenate([h, e], axis=-1), out_dtype=jnp.float32)
            return jax.nn.sigmoid(gate + params["gate_bias"]) * e, memory
        inputs = jnp.concatenate([memory.astype(e.dtype), e, h], axis=-1)
        joint = project(params["joint"], inputs, out_dtype=jnp.float32) + params["joint_bias"]
        keep, new, out = jnp.split(joint, 3, axis=-1)
        keep = jax.nn.sigmoid(keep)
        return jnp.tanh(out), keep * memory + (1 - keep) * jnp.tanh(new)

    @staticmethod
    def _bias(
        w2: Float[Array, "v r"], phi: Float[Array, "b r"], columns: Int[Array, "b c"] | None
    ) -> Float[Array, "b c"]:
        """The Markov term of every token of the draft vocabulary, or of the given ones."""
        if columns is None:
            return project(w2, phi.astype(w2.dtype), out_dtype=jnp.float32)
        return jnp.einsum("br,bcr->bc", phi.astype(w2.dtype), w2[columns], preferred_element_type=jnp.float32)

    def _confidence(self, params: Any, h: Float[Array, "b d"], e: Float[Array, "b r"] | None) -> Float[Array, " b"]:
        """The confidence head's logit."""
        x = jnp.concatenate([h, e], axis=-1) if self.config.confidence_with_markov else h
        head = params["confidence"]
        return x.astype(jnp.float32) @ head["weight"][0].astype(jnp.float32) + head["bias"][0]


def build(
    config: HeadConfig,
    tensors: Mapping[str, np.ndarray],
    target: Target,
    target_params: Any,
    dtype: Any,
    **options: Any,
) -> tuple[DSpark, Any]:
    """A DSpark drafter from its tensors; see `specjax.drafters.learned.build`."""
    drafter, params = build_drafter(DSpark, config, tensors, target, target_params, dtype, options)

    def get(name: str) -> Array:
        return jnp.asarray(tensors[name], dtype)

    if config.markov_rank:
        markov = {"w1": get("markov_head.markov_w1.weight"), "w2": get("markov_head.markov_w2.weight")}
        for name, kind in (("gate", "gated"), ("joint", "rnn")):
            if config.markov == kind:
                prefix = f"markov_head.{name}_proj"
                markov |= {name: get(f"{prefix}.weight"), f"{name}_bias": get(f"{prefix}.bias")}
        params["markov"] = markov
    if config.confidence:
        params["confidence"] = {"weight": get("confidence_head.proj.weight"), "bias": get("confidence_head.proj.bias")}
    return drafter, params
