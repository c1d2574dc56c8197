"""A model drafter and a lookup drafter in one tree: copied text is grafted onto what the model proposes."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.array_types import Array
from specjax.draft import Draft, DraftShape, ancestor_matrix, tree
from specjax.drafters.base import Context, Drafter, Features
from specjax.drafters.draft_model import DraftModel


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hybrid:
    """Drafts of `model` and of `lookup`, merged by prefix.

    Both are functions of the context, so their union needs no `q` and is verified as a tree: a draft that the two share
    is one node, and where they part the target's own choice decides.

    The rows are shared out like this: the branch of `lookup` first, as far as it has found one (copied text is free to
    draft and, where enough of it matches, right more often than a small head), then the nodes of `model` in the order
    in which it lists them, which is best first, as many as fit. A model tree keeps its rows, so a match costs it its
    worst nodes; a model chain and a branch both fit whole. Without a match the draft is the model's. A shape with fewer
    rows than the drafter's own is one with a shorter model chain (a model tree loses its worst nodes).

    `params` and `state` are `{"model": ..., "lookup": ...}`.

    Attributes:
        model: the drafter with weights; chains or trees, not sampled. A node's children must be different tokens.
        lookup: a drafter of chains that are functions of the context: n-gram or suffix.
        rows: verify rows, the root included; None as above.
        kind: the name in configs.
    """

    model: Drafter
    lookup: Drafter
    rows: int | None = None
    kind: str = "hybrid"

    def __post_init__(self):
        for part in (self.model, self.lookup):
            if getattr(part, "sampled", False):
                raise ValueError(f"hybrid: {part.kind} draws its drafts; both parts must be deterministic")
        if not self.lookup.shape.is_chain:
            raise ValueError(f"hybrid: the lookup drafter must draft chains, but {self.lookup.kind} drafts trees")
        if self.lookup.taps or self.lookup.wants_hidden:
            raise ValueError(f"hybrid: {self.lookup.kind} must not read the target's features, as the lookup drafter")
        if self.rows is not None and self.rows <= self._depth:
            raise ValueError(f"hybrid: rows must be at least {self._depth + 1} to hold a whole path, got {self.rows}")
        if isinstance(self.model, DraftModel):  # it has not seen what the branch got accepted
            object.__setattr__(self, "model", dataclasses.replace(self.model, newest=self._depth + 1))

    @property
    def _depth(self) -> int:
        return max(self.model.shape.depth, self.lookup.shape.depth)

    @property
    def taps(self) -> tuple[int, ...]:
        return self.model.taps

    @property
    def wants_hidden(self) -> bool:
        return self.model.wants_hidden

    @property
    def shape(self) -> DraftShape:
        model, lookup = self.model.shape, self.lookup.shape
        rows = model.rows + lookup.depth if model.is_chain else max(model.rows, lookup.rows)
        rows = rows if self.rows is None else self.rows
        return DraftShape(kind=self.kind, depth=self._depth, branching=model.branching + 1, rows=rows)

    def init_state(self, batch: int, capacity: int) -> dict[str, Any]:
        return {name: part.init_state(batch, capacity) for name, part in self._parts()}

    def prefill(
        self, params: Any, state: Any, row: Array, tokens: Array, start: Array, count: Array, features: Features | None
    ) -> dict[str, Any]:
        where = (row, tokens, start, count, features)
        return {name: part.prefill(params[name], state[name], *where) for name, part in self._parts()}

    def finish(self, state: Any, row: Array, tokens: Array, prompt_length: Array, length: Array) -> dict[str, Any]:
        return {name: part.finish(state[name], row, tokens, prompt_length, length) for name, part in self._parts()}

    def draft(self, params: Any, state: Any, context: Context, shape: DraftShape) -> tuple[Draft, dict[str, Any]]:
        """See `Drafter.draft`. Raises ValueError for a shape that no tree of both fits into."""
        if shape.is_chain:
            raise ValueError(f"hybrid drafts trees, but the shape asked for is a chain of depth {shape.depth}")
        drafts, memory = {}, {}
        for name, part in self._parts():
            own, depth = part.shape, min(part.shape.depth, shape.depth)
            if name == "model" and own.is_chain:
                depth = max(depth - (self.shape.rows - shape.rows), 1)
            rows = depth + 1 if own.is_chain else min(own.rows, shape.rows)
            own = dataclasses.replace(own, depth=depth, rows=rows)
            drafts[name], memory[name] = part.draft(params[name], state[name], context, own)
        with jax.named_scope("graft"):
            return graft(drafts["lookup"], drafts["model"], shape.rows), memory

    def _parts(self) -> tuple[tuple[str, Drafter], tuple[str, Drafter]]:
        return ("model", self.model), ("lookup", self.lookup)


def graft(branch: Draft, onto: Draft, rows: int) -> Draft:
    """One tree of the chain `branch` and, after it, the nodes of `onto` that are not on it; at most `rows` nodes.

    A node is its prefix: a node of `onto` is on the branch if its depth is live there and it and all its ancestors
    carry the branch's tokens.
    """
    batch, count = onto.tokens.shape
    request = jnp.arange(batch)[:, None]
    index = jnp.arange(count, dtype=jnp.int32)
    live = index < onto.lengths[:, None]
    depths = jnp.minimum(onto.depths, branch.tokens.shape[1] - 1)
    same = (onto.tokens == branch.tokens[request, depths]) & (onto.depths < branch.lengths[:, None])
    on_branch = live & jnp.all(same[:, None, :] | ~ancestor_matrix(onto.ancestors), axis=2)
    # Where each node goes: along the branch, or behind it in its own order. Parents stay before their children.
    beside = live & ~on_branch
    behind = branch.lengths[:, None] + jnp.cumsum(beside, axis=1, dtype=jnp.int32) - 1
    place = jnp.where(on_branch, onto.depths, behind)
    parent = place[request, jnp.maximum(onto.parents, 0)]

    slots = jnp.arange(rows, dtype=jnp.int32)
    width = min(rows, branch.tokens.shape[1])
    tokens = jnp.zeros((batch, rows), jnp.int32).at[:, :width].set(branch.tokens[:, :width])
    parents = jnp.broadcast_to(slots - 1, (batch, rows))
    lengths = jnp.minimum(branch.lengths[:, None], rows)
    tokens, parents = (jnp.where(slots < lengths, x, 0) for x in (tokens, parents))
    at = jnp.where(beside, place, rows)  # past the end: dropped
    tokens = tokens.at[request, at].set(onto.tokens, mode="drop")
    parents = parents.at[request, at].set(parent, mode="drop")
    total = jnp.minimum(lengths[:, 0] + jnp.sum(beside, axis=1, dtype=jnp.int32), rows)
    scores = None
    if branch.scores is not None and onto.scores is not None:
        scores = jnp.zeros((batch, rows), jnp.float32).at[:, :width].set(branch.scores[:, :width])
        scores = jnp.where(slots < lengths, scores, 0.0).at[request, at].set(onto.scores, mode="drop")
    return tree(tokens, parents, total, scores=scores)
