"""From the tensors that are trained to a loss and to hits: what the two trainers have in common."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from specjax.array_types import Array, Bool, Float, Int, pytree
from specjax.drafters import learned
from specjax.drafters.block_drafter import build_drafter
from specjax.drafters.config import BLOCK, HeadConfig
from specjax.drafters.dflash import DFlash, DFlash2
from specjax.drafters.dspark import DSpark
from specjax.drafters.ubtree import UBTree
from specjax.targets.decoder import Target
from specjax.training import packed_anchors, training_time_test
from specjax.training.features import TargetFeatures, capture
from specjax.training.packing import Batch
from specjax.training.recipe import Recipe
from specjax.training.vocabulary import Columns

_BLOCKS = {"dflash": DFlash, "dflash2": DFlash2, "dspark": DSpark, "ubtree": UBTree}


@pytree
class Sample:
    """What a step reads beside the weights.

    Attributes:
        batch: packed rows.
        features: the target's activations of them, or None where the step makes them itself.
        columns: the tokens that are scored.
        anchors: (block drafters) of the blocks.
    """

    batch: Batch
    features: TargetFeatures | None
    columns: Columns | None
    anchors: Int[Array, "b a"] | None


@pytree
class Hits:
    """How a drafter's chains agree with a text.

    Attributes:
        hit: whether each draft after each root is the text's token, given that the ones before it are.
        valid: the roots that count.
        confidence: logits of DSpark's confidence head, 0 elsewhere.
    """

    hit: Bool[Array, "b r k"]
    valid: Bool[Array, "b r"]
    confidence: Float[Array, "b r k"]


@dataclasses.dataclass(frozen=True)
class Objective:
    """The family's loss as a function of its tensors; hashable, so that it can be a static argument.

    Attributes:
        recipe: the run.
        config: the drafter.
        target: the model that it is for.
        dtype: of products, by name.
    """

    recipe: Recipe
    config: HeadConfig
    target: Target
    dtype: str

    @property
    def is_block(self) -> bool:
        return self.config.family in BLOCK

    def folded(self, tensors: dict[str, Any], scale: Any) -> dict[str, Any]:
        """The drafter's own tensors: `fc` with the scale of the taps folded in."""
        if not self.is_block:
            return tensors
        return tensors | {"fc.weight": tensors["fc.weight"] / scale}

    def build(self, tensors: dict[str, Any], target_params: Any) -> tuple[Any, Any]:
        """The drafter that these tensors make, by the code that loads one; without UBTree's tables of all codes."""
        dtype = jnp.dtype(self.dtype)
        if self.is_block:
            cls = _BLOCKS[self.config.family]
            return build_drafter(cls, self.config, tensors, self.target, target_params, dtype, {})
        options = {"depth": self.recipe.unroll, "branching": 1}
        return learned.build(self.config, tensors, self.target, target_params, dtype, **options)

    def features(self, target_params: Any, sample: Sample) -> TargetFeatures:
        """The sample's features, made now if it has none."""
        if sample.features is not None:
            return sample.features
        return capture(self.target, self.config.taps, target_params, sample.batch)

    def loss(
        self, trained: dict[str, Array], scale: Any, target_params: Any, sample: Sample, features: TargetFeatures
    ) -> tuple[Float[Array, ""], dict[str, Array]]:
        """The family's loss, and `loss_by_slot` and `agreement` of each drafted position."""
        tensors = self.folded(trained, scale)
        drafter, params = self.build(tensors, target_params)
        columns = sample.columns
        assert columns is not None
        head = columns.rows(params["head"]["weight"]).astype(jnp.dtype(self.dtype))
        options = {"decay": self.recipe.decay, "text": self.recipe.labels == "text"}
        if not self.is_block:
            given = (head, columns, sample.batch, features)
            return training_time_test.loss(drafter, params, *given, steps=self.recipe.unroll, **options)
        assert sample.anchors is not None
        given = (tensors, head, columns, sample.batch, features, sample.anchors)
        return packed_anchors.loss(drafter, params, *given, unary_weight=self.recipe.unary_weight, **options)

    def rows(
        self, trained: dict[str, Array], scale: Any, target_params: Any, sample: Sample, features: TargetFeatures
    ) -> Float[Array, "n d"]:
        """What the output head reads along a text, all steps or slots one after another."""
        tensors = self.folded(trained, scale)
        drafter, params = self.build(tensors, target_params)
        if not self.is_block:
            found = jnp.stack(training_time_test.unroll(drafter, params, sample.batch, features, self.recipe.unroll))
        else:
            assert sample.anchors is not None
            found = packed_anchors.blocks(drafter, params, sample.batch, features, sample.anchors)
        return found.reshape(-1, found.shape[-1])

    def hits(
        self, trained: dict[str, Array], scale: Any, target_params: Any, sample: Sample, features: TargetFeatures
    ) -> Hits:
        """Agreement of greedy chains with the text, by the full head."""
        tensors = self.folded(trained, scale)
        drafter, params = self.build(tensors, target_params)
        if not self.is_block:
            steps = self.recipe.unroll
            hit, valid = training_time_test.hits(drafter, params, sample.batch, features, steps)
            return Hits(hit=hit, valid=valid, confidence=jnp.zeros(hit.shape))
        assert sample.anchors is not None
        hit, valid, sure = packed_anchors.hits(drafter, params, tensors, sample.batch, features, sample.anchors)
        return Hits(hit=hit, valid=valid, confidence=sure)

    def anchors(self, batch: Batch, rng: np.random.Generator, count: int) -> np.ndarray | None:
        """Random anchors of packed rows, for a block drafter."""
        return packed_anchors.choose(batch, count, rng) if self.is_block else None
