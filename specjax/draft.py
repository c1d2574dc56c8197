"""The word that drafters, verify, engine and planner share: a draft is a tree.

A chain is a tree with one child a node, "no draft" is a tree with only its root. Node 0 is the root: the last
committed token, which the target has not processed yet. Parents stand before their children, so any prefix of
the nodes is a valid tree. Position of a node = position of the root + its depth.
"""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.array_types import Array, Float, Int, pytree, static

WORD_BITS = 32


@dataclasses.dataclass(frozen=True, order=True)
class DraftShape:
    """The static shape of a draft; one entry of the menu, compiled once.

    Attributes:
        kind: the drafter that makes it (`none`, `ngram`, ...).
        depth: the most drafted tokens on one path (0: no draft).
        branching: the most children of a node (1: a chain).
        rows: the most verify rows of a request, the root included.
    """

    kind: str = "none"
    depth: int = 0
    branching: int = 1
    rows: int = 1

    def __post_init__(self):
        if self.rows < self.depth + 1:
            raise ValueError(f"a draft of depth {self.depth} needs at least {self.depth + 1} rows, got {self.rows}")
        if self.branching < 1 or self.depth < 0:
            raise ValueError(
                f"depth must be at least 0 and branching at least 1, got {self.depth} and {self.branching}"
            )
        if self.branching == 1 and self.rows != self.depth + 1:
            raise ValueError(f"a chain of depth {self.depth} has {self.depth + 1} rows, got {self.rows}")

    @property
    def is_chain(self) -> bool:
        return self.branching == 1

    @classmethod
    def chain(cls, kind: str, depth: int) -> "DraftShape":
        """A chain of `depth` drafts after the root."""
        return cls(kind=kind, depth=depth, branching=1, rows=depth + 1)


PLAIN = DraftShape()


@pytree
class Draft:
    """Proposed tokens of a batch, as one tree a request.

    Attributes:
        tokens: node tokens; `tokens[:, 0]` is the root.
        parents: index of each node's parent, -1 for the root; always smaller than the node's own index.
        depths: distance from the root.
        ancestors: bit `j % 32` of word `j // 32` is set where node `j` is an ancestor of the node, or the node itself.
        lengths: live nodes of each request, the root included; nodes past it are padding.
        q: the drafter's distribution *at* each node: the one from which the children of the node were drawn (aligned
            with the target's `p` at that node), or None where the draft is a deterministic function of the context.
        scores: the drafter's own log chance of the path to each node, 0 at the root, in float32; None where drafts are
            drawn: what was drawn must not decide what is verified.
    """

    tokens: Int[Array, "b n"]
    parents: Int[Array, "b n"]
    depths: Int[Array, "b n"]
    ancestors: Int[Array, "b n w"]
    lengths: Int[Array, " b"]
    q: Float[Array, "b n v"] | None = None
    scores: Float[Array, "b n"] | None = None


def words(rows: int) -> int:
    """Ancestor-mask words that `rows` nodes need."""
    return -(-rows // WORD_BITS)


def chain_parents(batch: int, rows: int) -> Int[Array, "b n"]:
    """Parents of a chain: `[-1, 0, 1, ...]` for each request."""
    return jnp.broadcast_to(jnp.arange(-1, rows - 1, dtype=jnp.int32), (batch, rows))


def topology(parents: Int[Array, "b n"]) -> tuple[Int[Array, "b n"], Int[Array, "b n w"]]:
    """Depths and ancestor bit words of trees given by their parents (each before its children)."""
    batch, rows = parents.shape
    request, node = jnp.arange(batch)[:, None], jnp.arange(rows, dtype=jnp.int32)
    own = node[:, None] // WORD_BITS == jnp.arange(words(rows))
    bits = jnp.where(own, (1 << (node % WORD_BITS))[:, None], 0)
    bits, up = jnp.broadcast_to(bits, (batch, *bits.shape)), parents
    # Each turn adds what the node `up` has gathered: it doubles the generations that a node looks back.
    for _ in range((rows - 1).bit_length()):
        above = jnp.maximum(up, 0)
        bits = bits | jnp.where((up >= 0)[..., None], bits[request, above], 0)
        up = jnp.where(up >= 0, up[request, above], -1)
    return jnp.sum(jax.lax.population_count(bits), axis=-1) - 1, bits


def chain(
    tokens: Int[Array, "b n"],
    lengths: Int[Array, " b"],
    q: Float[Array, "b n v"] | None = None,
    scores: Float[Array, "b n"] | None = None,
) -> Draft:
    """A chain draft of `tokens` (the root first)."""
    batch, rows = tokens.shape
    index = jnp.arange(rows, dtype=jnp.int32)
    word, bit = index // WORD_BITS, index % WORD_BITS
    # Node i sees nodes 0..i: full words below its own, the low bits of its own, nothing above.
    own = jnp.where(bit == WORD_BITS - 1, -1, (1 << jnp.minimum(bit + 1, WORD_BITS - 1)) - 1)
    column = jnp.arange(words(rows), dtype=jnp.int32)
    bits = jnp.where(column < word[:, None], -1, jnp.where(column == word[:, None], own[:, None], 0))
    return Draft(
        tokens=tokens,
        parents=chain_parents(batch, rows),
        depths=jnp.broadcast_to(index, (batch, rows)),
        ancestors=jnp.broadcast_to(bits.astype(jnp.int32), (batch, rows, words(rows))),
        lengths=lengths,
        q=q,
        scores=scores,
    )


def tree(
    tokens: Int[Array, "b n"],
    parents: Int[Array, "b n"],
    lengths: Int[Array, " b"],
    q: Float[Array, "b n v"] | None = None,
    scores: Float[Array, "b n"] | None = None,
) -> Draft:
    """A tree draft of `tokens` (the root first) under `parents`."""
    depths, ancestors = topology(parents)
    return Draft(
        tokens=tokens, parents=parents, depths=depths, ancestors=ancestors, lengths=lengths, q=q, scores=scores
    )


def widen(draft: Draft, rows: int) -> Draft:
    """The same trees in buffers of `rows` nodes; drafts without `q` only."""
    more = rows - draft.tokens.shape[1]

    def pad(x: Array, by: int, value: int = 0) -> Array:
        return jnp.pad(x, [(0, 0), (0, more)] + [(0, by)] * (x.ndim - 2), constant_values=value)

    return Draft(
        tokens=pad(draft.tokens, 0),
        parents=pad(draft.parents, 0),
        depths=pad(draft.depths, 0),
        ancestors=pad(draft.ancestors, words(rows) - draft.ancestors.shape[-1]),
        lengths=draft.lengths,
        scores=None if draft.scores is None else pad(draft.scores, 0),
    )


def ancestor_matrix(ancestors: Int[Array, "*batch n w"]) -> Array:
    """Bit words as booleans: `[..., i, j]` is true where node `j` is node `i` or one of its ancestors."""
    nodes = jnp.arange(ancestors.shape[-2])
    picked = jnp.take(ancestors, nodes // WORD_BITS, axis=-1)
    return ((picked >> (nodes % WORD_BITS)) & 1).astype(bool)


@pytree
class Rows:
    """The packed rows of one target pass: the live nodes of all requests, one after another.

    A padded batch is the special case in which every request has `width` rows; with one request the rows are its nodes.

    Attributes:
        tokens: token of each row.
        request: batch row that each belongs to.
        node: index of the row in its request's tree.
        positions: rotary position, i.e. committed length + depth.
        slots: cache slot (within the request) that the row's key and value are written to.
        valid: false for padding rows, which must write nowhere that is ever read.
        ancestors: ancestor words of each row, or None where rows form a chain (each sees all earlier ones).
        starts: first row of each request, and the end of the last one.
        width: the most rows of one request.
    """

    tokens: Int[Array, " N"]
    request: Int[Array, " N"]
    node: Int[Array, " N"]
    positions: Int[Array, " N"]
    slots: Int[Array, " N"]
    valid: Array
    ancestors: Int[Array, "N w"] | None
    starts: Int[Array, " b1"]
    width: int = static()

    @property
    def batch(self) -> int:
        return self.starts.shape[0] - 1

    @property
    def count(self) -> int:
        return self.tokens.shape[0]

    def unpack(self, x: Array) -> Array:
        """`[N, ...]` to the padded `[b, width, ...]`; what lies past a request's rows is unspecified but finite."""
        if self.batch == 1:
            return x[None]
        index = self.starts[:-1, None] + jnp.arange(self.width, dtype=jnp.int32)
        return x[jnp.minimum(index, self.count - 1)]

    def pack(self, x: Array) -> Array:
        """The padded `[b, width, ...]` to `[N, ...]`."""
        if self.batch == 1:
            return x[0]
        return x[self.request, jnp.minimum(self.node, self.width - 1)]


def pack(draft: Draft, committed: Int[Array, " b"], count: int, width: int, active: Array) -> Rows:
    """Lay the live nodes of `draft` out as `count` packed rows.

    Args:
        draft: the trees; only the first `width` nodes of a request are used.
        committed: tokens of each request whose keys and values are in the cache (= position and slot of the root).
        count: packed rows of the program; at least the sum of the live lengths of the active requests.
        width: the most rows of a request in this program.
        active: requests that take part; others get no row.

    Returns:
        `Rows`. With one request, row `i` is node `i` and `count == width`.
    """
    batch = draft.tokens.shape[0]
    lengths = jnp.where(active, jnp.minimum(draft.lengths, width), 0)
    index = jnp.arange(count, dtype=jnp.int32)
    if batch == 1:
        if count != width:
            raise ValueError(f"one request packs to its width: {count} rows for a width of {width}")
        request, node, valid = jnp.zeros((count,), jnp.int32), index, index < lengths[0]
        starts = jnp.array([0, count], jnp.int32)
    else:
        ends = jnp.cumsum(lengths, dtype=jnp.int32)
        starts = jnp.concatenate([jnp.zeros((1,), jnp.int32), ends])
        valid = index < ends[-1]
        request = jnp.minimum(jnp.sum(index[:, None] >= ends[None, :], axis=1, dtype=jnp.int32), batch - 1)
        node = jnp.clip(index - starts[request], 0, width - 1)
    root = committed[request]
    return Rows(
        tokens=draft.tokens[request, node],
        request=request,
        node=node,
        positions=root + draft.depths[request, node],
        slots=root + node,
        valid=valid,
        ancestors=draft.ancestors[request, node][:, : words(width)],
        starts=starts,
        width=width,
    )


def chunk(tokens: Int[Array, " N"], start: Int[Array, ""], count: Int[Array, ""] | int) -> Rows:
    """Consecutive tokens of one request as packed rows, each seeing all earlier ones: prefill.

    Args:
        tokens: the tokens, padded behind the first `count`.
        start: position and cache slot of the first.
        count: real tokens.
    """
    size = tokens.shape[0]
    index = jnp.arange(size, dtype=jnp.int32)
    return Rows(
        tokens=tokens,
        request=jnp.zeros((size,), jnp.int32),
        node=index,
        positions=start + index,
        slots=start + index,
        valid=index < count,
        ancestors=None,
        starts=jnp.array([0, size], jnp.int32),
        width=size,
    )
