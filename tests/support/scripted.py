"""Drafters that propose what a test says, by position."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from specjax.array_types import Array
from specjax.draft import Draft, DraftShape, chain, tree
from specjax.drafters.base import Context, Weightless


@dataclasses.dataclass(frozen=True)
class ScriptedChain(Weightless):
    """Proposes `script[row, position]` at each position; `params` is the script, `int32[b, positions]`.

    -1 in the script ends the draft before it.
    """

    num_speculative_tokens: int = 4
    kind: str = "scripted"

    @property
    def shape(self) -> DraftShape:
        return DraftShape.chain(self.kind, self.num_speculative_tokens)

    def draft(self, params: Array, state: Any, context: Context, shape: DraftShape) -> tuple[Draft, Any]:
        root, script = _look_up(params, context, shape.depth)
        stops = jnp.concatenate([script < 0, jnp.ones_like(script[:, :1], bool)], axis=1)
        lengths = 1 + jnp.argmax(stops, axis=1).astype(jnp.int32)
        return chain(jnp.concatenate([root, jnp.maximum(script, 0)], axis=1), lengths), state


@dataclasses.dataclass(frozen=True)
class ScriptedTree(Weightless):
    """A fixed topology: node `i` at depth `k` proposes `script[row, position + k] + offsets[i]` (mod the vocabulary).

    Offset 0 is the script's own token, any other a wrong one.
    """

    parents: tuple[int, ...] = (-1, 0, 0, 1, 1, 2)
    offsets: tuple[int, ...] = (0, 1, 0, 1, 2, 0)
    vocab: int = 64
    kind: str = "scripted-tree"

    @property
    def depths(self) -> tuple[int, ...]:
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return tuple(depths)

    @property
    def shape(self) -> DraftShape:
        most = max(self.parents.count(parent) for parent in self.parents if parent >= 0)
        return DraftShape(kind=self.kind, depth=max(self.depths), branching=max(most, 2), rows=len(self.parents))

    def draft(self, params: Array, state: Any, context: Context, shape: DraftShape) -> tuple[Draft, Any]:
        root, script = _look_up(params, context, shape.depth)
        by_depth = jnp.concatenate([root, script], axis=1)
        tokens = (by_depth[:, jnp.array(self.depths)] + jnp.array(self.offsets)) % self.vocab
        tokens = tokens.at[:, 0].set(root[:, 0])
        batch = tokens.shape[0]
        parents = jnp.broadcast_to(jnp.array(self.parents, jnp.int32), tokens.shape)
        return tree(tokens, parents, jnp.full((batch,), shape.rows, jnp.int32)), state


def _look_up(script: Array, context: Context, depth: int) -> tuple[Array, Array]:
    """The root `[b, 1]` and the script's next `depth` tokens `[b, depth]`."""
    request = jnp.arange(context.lengths.shape[0])[:, None]
    positions = context.lengths[:, None] + jnp.arange(depth)
    inside = positions < script.shape[1]
    tokens = jnp.where(inside, script[request, jnp.minimum(positions, script.shape[1] - 1)], -1)
    return context.tokens[request, context.lengths[:, None] - 1], tokens.astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class ScriptedRuns(Weightless):
    """As `ScriptedChain`, with at most `params["most"][row]` drafts a round: any K with one compiled engine.

    `params["script"]` is the script of `ScriptedChain`.
    """

    num_speculative_tokens: int = 12
    kind: str = "scripted-runs"

    @property
    def shape(self) -> DraftShape:
        return DraftShape.chain(self.kind, self.num_speculative_tokens)

    def draft(self, params: dict[str, Array], state: Any, context: Context, shape: DraftShape) -> tuple[Draft, Any]:
        root, script = _look_up(params["script"], context, shape.depth)
        script = jnp.where(jnp.arange(shape.depth) < params["most"][:, None], script, -1)
        stops = jnp.concatenate([script < 0, jnp.ones_like(script[:, :1], bool)], axis=1)
        lengths = 1 + jnp.argmax(stops, axis=1).astype(jnp.int32)
        return chain(jnp.concatenate([root, jnp.maximum(script, 0)], axis=1), lengths), state
