"""Dynamic trees against a plain reference, and the shape of trees of sampled children."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.draft import DraftShape
from specjax.drafters import growth
from specjax.drafters.growth import Children

VOCAB = 11


def reference_tree(score, root: int, shape: DraftShape) -> tuple[list[int], list[int]]:
    """Tokens and parents of the tree: `score(path)` gives the log-probabilities of what follows a path of tokens.

    Scores are added in float32, so that ties are the same ties.
    """
    k = shape.branching

    def children(path, total):
        values = score(path)
        best = sorted(range(VOCAB), key=lambda token: (-values[token], token))[:k]
        return [((*path, token), np.float32(total + values[token])) for token in best]

    pool = children((root,), np.float32(0))
    beam = list(pool)
    for _ in range(shape.depth - 1):
        level = [child for path, total in beam for child in children(path, total)]
        pool += level
        beam = sorted(level, key=lambda node: -node[1])[:k]
    order = sorted(range(len(pool)), key=lambda i: -pool[i][1])[: shape.rows - 1]
    kept = [pool[i][0] for i in order if pool[i][1] > -np.inf]
    number = {(root,): 0} | {path: i + 1 for i, path in enumerate(kept)}
    return [root] + [path[-1] for path in kept], [-1] + [number[path[:-1]] for path in kept]


def hashed(seed: int, coarse: bool):
    """Random log-probabilities of what follows a path; `coarse` ones are full of ties."""

    def score(path):
        rng = np.random.default_rng([seed, *path])
        if coarse:
            return rng.choice(np.array([0, -0.5, -1, -np.inf], np.float32), size=VOCAB, p=[0.05, 0.1, 0.1, 0.75])
        logits = rng.standard_normal(VOCAB).astype(np.float32)
        return logits - np.log(np.exp(logits).sum(dtype=np.float32))

    return score


def grown(scores, roots, shape: DraftShape):
    """The tree of the shipped growth; `expand` asks the host for the children of each node's path."""

    def ask(paths):
        """Children of paths `[b, n, depth]`, padded with -1."""
        answer = np.zeros((*paths.shape[:2], VOCAB), np.float32)
        for b, n in itertools.product(*map(range, paths.shape[:2])):
            answer[b, n] = scores[b](tuple(int(t) for t in paths[b, n] if t >= 0))
        return answer

    def children(paths):
        shapes = jax.ShapeDtypeStruct((*paths.shape[:2], VOCAB), jnp.float32)
        values, tokens = jax.lax.top_k(jax.pure_callback(ask, shapes, paths), shape.branching)
        return Children(tokens=tokens, values=values)

    def expand(paths, beam):
        paths = jnp.take_along_axis(paths, beam.parents[:, :, None], axis=1)
        paths = paths.at[:, :, 1 + beam.level].set(beam.tokens)
        return paths, children(paths)

    @jax.jit
    def run(roots):
        paths = jnp.full((len(scores), shape.branching, shape.depth + 1), -1).at[:, :, 0].set(roots[:, None])
        return growth.grow(expand, roots, children(paths[:, :1]), paths, shape)

    return run(jnp.asarray(roots, jnp.int32))


SHAPES = [(5, 4, 16), (3, 2, 9), (1, 3, 4), (2, 3, 13), (4, 1, 5), (6, 3, 7)]


@pytest.mark.parametrize(("depth", "branching", "rows"), SHAPES)
def test_equals_the_reference(depth, branching, rows):
    """Every request of a batch: tokens, parents and order, ties and forbidden children included."""
    shape = DraftShape("tree", depth, branching, rows)
    scores, roots = [hashed(seed, coarse=seed % 2 == 1) for seed in range(16)], list(np.arange(16) % VOCAB)
    out = grown(scores, roots, shape)
    for b, score in enumerate(scores):
        tokens, parents = reference_tree(score, roots[b], shape)
        live = int(out.lengths[b])
        assert live == len(tokens)
        assert np.asarray(out.tokens)[b, :live].tolist() == tokens
        assert np.asarray(out.parents)[b, :live].tolist() == parents
        # Any prefix is a tree, and padding is a valid node too.
        every = np.asarray(out.parents)[b]
        assert every[0] == -1 and (every[1:] >= 0).all() and (every < np.arange(rows)).all()
    assert len({int(n) for n in out.lengths}) > 1  # some trees have fewer nodes than rows


@pytest.mark.parametrize(("depth", "branching", "rows"), [(5, 4, 16), (3, 3, 8), (4, 1, 5)])
def test_sampled_children_never_shape_the_tree(depth, branching, rows):
    """With values by rank, the topology is the same whatever was drawn, and each node has its first children."""
    shape = DraftShape("tree", depth, branching, rows)
    values = jnp.asarray(growth.rank_values(branching))
    vocab = 50

    def draw(key, n):
        tokens = jax.random.randint(key, (6, n, branching), 0, vocab)
        return Children(
            tokens=tokens,
            values=jnp.broadcast_to(values, tokens.shape),
            q=jax.random.uniform(jax.random.fold_in(key, 1), (6, n, vocab)),
        )

    def expand(carry, beam):
        key, met = carry
        children = draw(jax.random.fold_in(key, beam.level), branching)
        level = (children.tokens, children.q, beam.tokens)
        met = jax.tree.map(lambda all_, x: all_.at[beam.level].set(x), met, level)
        return (key, met), children

    key, levels = jax.random.key(0), max(depth - 1, 0)
    first = draw(jax.random.key(9), 1)
    met = (
        jnp.zeros((levels, 6, branching, branching), jnp.int32),
        jnp.zeros((levels, 6, branching, vocab)),
        jnp.zeros((levels, 6, branching), jnp.int32),
    )
    out = growth.grow(expand, jnp.zeros((6,), jnp.int32), first, (key, met), shape)
    parents = np.asarray(out.parents)
    assert (parents == parents[0]).all() and (np.asarray(out.lengths) == rows).all()
    # The first child stands before the second: what is kept of each node's children is a prefix of the draw order.
    tokens = np.asarray(out.tokens)
    kept = np.flatnonzero(parents[0] == 0)
    np.testing.assert_array_equal(tokens[:, kept], np.asarray(first.tokens)[:, 0, : len(kept)])
    # q at the root is what its children were drawn from, and nodes of the deepest level have none.
    np.testing.assert_array_equal(np.asarray(out.q)[:, 0], np.asarray(first.q)[:, 0])
    deep = [d == depth for d in _depths(parents[0])]
    assert not np.asarray(out.q)[:, deep].any()
    if depth > 1:
        inner = sorted({p for p in parents[0] if p > 0})
        assert np.asarray(out.q)[:, inner].any(axis=-1).all()


def test_q_and_seen_follow_their_nodes():
    """Each node's q is the row that its own token and its ancestors' made, read from what `expand` saw."""
    shape, vocab = DraftShape("tree", 4, 3, 12), 7

    def of(paths):
        """A q that names the path: token counts, weighted by depth."""
        weights = jnp.arange(1, paths.shape[-1] + 1)
        return jnp.sum(jax.nn.one_hot(paths, vocab) * weights[:, None], axis=-2)

    def children(paths):
        tokens = (jnp.sum(jnp.maximum(paths, 0), axis=-1)[..., None] * 3 + jnp.arange(3) + paths.shape[-1]) % vocab
        return Children(tokens=tokens, values=jnp.broadcast_to(growth.rank_values(3), tokens.shape), q=of(paths))

    def expand(carry, beam):
        paths, history = carry
        paths = jnp.take_along_axis(paths, beam.parents[:, :, None], axis=1)
        paths = paths.at[:, :, 1 + beam.level].set(beam.tokens)
        history = jax.lax.dynamic_update_slice(history, beam.tokens, (0, beam.level * 3))
        # The rows that a node sees hold exactly the tokens of its path.
        seen = jnp.sum(jnp.where(beam.seen, history[:, None, :] + 1, 0), axis=-1)
        path = jnp.sum(paths[:, :, 1:] + 1, axis=-1)
        return (paths, history), Children(
            tokens=children(paths).tokens,
            values=children(paths).values,
            q=of(paths) + 1000.0 * (seen != path)[..., None],
        )

    roots = jnp.arange(5, dtype=jnp.int32)
    paths = jnp.full((5, 3, 5), -1).at[:, :, 0].set(roots[:, None])
    out = growth.grow(expand, roots, children(paths[:, :1]), (paths, jnp.zeros((5, 9), jnp.int32)), shape)
    tokens, parents, q = (np.asarray(x) for x in (out.tokens, out.parents, out.q))
    for b, node in itertools.product(range(5), range(12)):
        path, at = [], node
        while at >= 0:
            path, at = [int(tokens[b, at]), *path], parents[b, at]
        padded = np.full(5, -1)
        padded[: len(path)] = path
        if node in parents[b]:  # a leaf may or may not have been run
            np.testing.assert_array_equal(q[b, node], np.asarray(of(jnp.asarray(padded))))


def test_more_rows_than_the_tree_can_grow_are_refused():
    with pytest.raises(ValueError, match=r"depth 2 and branching 2 grows 6 nodes at most, but 16 rows"):
        growth.check_shape(DraftShape("tree", 2, 2, 16))


def _depths(parents) -> list[int]:
    depths = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths
