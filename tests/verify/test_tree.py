"""The two tree rules: their laws by exact enumeration, siblings and duplicates, and rows that keep to themselves."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import thresholds

from specjax import draft as trees
from specjax import sampling
from specjax.verify.accepted import Accepted, round_uniforms
from specjax.verify.tree import recursive, tree

PAIR, TRIPLE, TWO_LEVELS = [-1, 0, 0], [-1, 0, 0, 0], [-1, 0, 0, 1, 1, 2]
P = np.array([0.5, 0.25, 0.15, 0.1], np.float32)


def depths(parents) -> list[int]:
    found = [0]
    for parent in parents[1:]:
        found.append(found[parent] + 1)
    return found


@jax.jit
def follow(draft, p, q, u_accept, u_next):
    """`tree` with the target's draw at each node as choice."""
    del q, u_accept
    return tree(draft, 2, sampling.pick(p, u_next))


RECURSIVE = jax.jit(lambda draft, *rest: recursive(draft, 2, *rest))


def fixed_law(exact, rule, p, parents, tokens, length=None, sampled=True):
    """The law of `rule` on one deterministic tree; `sampled`: the rule tests nodes, else it draws once a depth."""
    at = exact.prefixes(parents, tokens)
    node_p = np.stack([p[prefix] for prefix in at])
    cuts, left = thresholds.siblings(parents, tokens, node_p, None)
    case = exact.Case(1.0, tokens, node_p, None, cuts, left, length or len(tokens))
    if sampled:
        return exact.judge(rule, parents, [case], exact.sampled_variables, exact.sampled_place)
    level = np.array(depths(parents))

    def variables(case):
        by_depth = [case.p[level == depth] for depth in range(max(level) + 1)]
        return [list(itertools.chain(*map(exact.cumulative, rows))) for rows in by_depth]

    return exact.judge(rule, parents, [case], variables, lambda points: (0 * points[:, level], points[:, level]))


def sampled_law(exact, rule, p, q, parents, length=None):
    """The law of `rule` on trees whose siblings are drawn from `q` without replacement."""
    cases = list(thresholds.recursive(p, q, parents, length))
    return exact.judge(rule, parents, cases, exact.sampled_variables, exact.sampled_place)


@pytest.mark.parametrize(("parents", "vocab"), [(PAIR, 4), (TRIPLE, 4), (TWO_LEVELS, 3), ([-1, 0, 1], 3)])
def test_recursive_law_is_the_targets(exact, kind, parents, vocab):
    depth = max(depths(parents))
    p, q = exact.world(kind, vocab, depth, seed=len(parents))
    found = sampled_law(exact, RECURSIVE, p, q, parents)
    assert found.uneven < 5e-6
    assert found.error(p, depth + 1) < 1e-5
    if kind == "equal":
        assert found.accepted == pytest.approx(depth, abs=1e-5)


@pytest.mark.parametrize("length", [1, 2, 4, 5])
def test_recursive_ignores_padding(exact, length):
    p, q = exact.world("mixed", 3, 2, seed=1)
    found = sampled_law(exact, RECURSIVE, p, q, TWO_LEVELS, length=length)
    assert found.error(p, 3) < 1e-5
    assert max(map(len, found.emitted)) == max(depths(TWO_LEVELS)[:length]) + 1


def test_recursive_stops_at_the_depth_asked_for(exact):
    p, q = exact.world("equal", 3, 2, seed=1)
    found = sampled_law(exact, jax.jit(lambda draft, *rest: recursive(draft, 1, *rest)), p, q, TWO_LEVELS)
    assert found.accepted == pytest.approx(1, abs=1e-5)
    assert found.error(p, 3) < 1e-5


def test_wrong_variants_fail_the_check(exact):
    p, q = exact.world("random", 4, 1, seed=7)

    @jax.jit
    def with_replacement(draft, p, q, u_accept, u_next):
        """The rule for independent siblings, which leaves q alone between them."""
        rows = jnp.arange(p.shape[0])
        r, node = p[:, 0], jnp.zeros(p.shape[0], jnp.int32)
        for child in (1, 2):
            y = draft.tokens[:, child]
            accepted = (node == 0) & (u_accept[:, child] < r[rows, y] / q[rows, 0, y])
            rest = jnp.maximum(r - q[:, 0], 0)
            rest = rest / jnp.maximum(rest.sum(axis=1, keepdims=True), 1e-9)
            r = jnp.where(accepted[:, None], p[:, child], jnp.where((node == 0)[:, None], rest, r))
            node = jnp.where(accepted, child, node)
        path = jnp.stack([jnp.zeros_like(node), node], axis=1)
        return Accepted(path=path, count=(node > 0).astype(jnp.int32), token=sampling.pick(r, u_next[rows, node]))

    @jax.jit
    def swapped_siblings(draft, p, q, u_accept, u_next):
        swapped = trees.tree(draft.tokens[:, jnp.array([0, 2, 1])], draft.parents, draft.lengths, q)
        out = recursive(swapped, 1, p[:, jnp.array([0, 2, 1])], q[:, jnp.array([0, 2, 1])], u_accept, u_next)
        path = jnp.where(out.path > 0, 3 - out.path, 0)
        return Accepted(path=path, count=out.count, token=out.token)

    for wrong in (with_replacement, swapped_siblings):
        assert sampled_law(exact, wrong, p, q, PAIR).error(p, 2) > 1e-3


@pytest.mark.parametrize("kind", ["random", "zeros", "greedy target"])
@pytest.mark.parametrize("tokens", [[0, 1, 2, 0, 2, 1], [0, 2, 0, 1, 1, 2], [0, 1, 1, 0, 1, 2], [0, 0, 0, 0, 0, 0]])
def test_deterministic_trees(exact, kind, tokens):
    """Both rules are exact on a fixed tree, with duplicates or without, and accept the same on average."""
    p, _ = exact.world(kind, 3, 2, seed=3)
    laws = [fixed_law(exact, rule, p, TWO_LEVELS, tokens, sampled=rule is RECURSIVE) for rule in (follow, RECURSIVE)]
    for found in laws:
        assert found.uneven < 5e-6
        assert found.error(p, 3) < 1e-5
    # `tree` keeps to the first copy of a token and recursive rejection tests it first: the same path, the same mean.
    assert laws[0].accepted == pytest.approx(laws[1].accepted, abs=1e-5)


def test_tree_that_draws_from_the_wrong_node_fails_the_check(exact):
    p, _ = exact.world("random", 3, 2, seed=3)

    @jax.jit
    def roots_distribution(draft, p, q, u_accept, u_next):
        return follow(draft, jnp.broadcast_to(p[:, :1], p.shape), q, u_accept, u_next)

    assert fixed_law(exact, roots_distribution, p, TWO_LEVELS, [0, 1, 2, 0, 2, 1], sampled=False).error(p, 3) > 1e-3


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_tree_ignores_padding(exact, length):
    p, _ = exact.world("random", 3, 2, seed=3)
    found = fixed_law(exact, follow, p, TWO_LEVELS, [0, 1, 2, 0, 2, 1], length=length, sampled=False)
    assert found.error(p, 3) < 1e-5
    assert max(map(len, found.emitted)) == max(depths(TWO_LEVELS)[:length]) + 1


SIBLINGS = {  # order of the children: acceptance of each, what is drawn when all fail
    (0, 1): ([0.5, 0.25], [0, 0, 0.6, 0.4]),
    (1, 0): ([0.25, 0.5], [0, 0, 0.6, 0.4]),
    (0, 0): ([0.5, 0.0], [0, 0.5, 0.3, 0.2]),
    (0, 1, 2, 3): ([0.5, 0.25, 0.15, 0.1], None),
    (3, 1, 0, 2): ([0.1, 0.25, 0.5, 0.15], None),
}


@pytest.mark.parametrize("children", SIBLINGS)
@pytest.mark.parametrize("rule", [follow, RECURSIVE])
def test_siblings_exactly(exact, rule, children):
    """A second level under the first child shows that it uses the child's own conditional."""
    acceptance, rest = SIBLINGS[children]
    other = np.array([0.05, 0.15, 0.2, 0.6], np.float32)
    p = {prefix: P if not prefix else np.roll(other, prefix[-1]) for prefix in [(), *((x,) for x in range(4))]}
    p |= {(x, y): np.roll(P, x + y) for x in range(4) for y in range(4)}
    parents, tokens = [-1, *[0] * len(children), 1], [0, *children, 2]
    found = fixed_law(exact, rule, p, parents, tokens, sampled=rule is RECURSIVE)
    assert found.error(p, 3) < 1e-5
    first = [sum(m for text, m in found.emitted.items() if text[0] == x and len(text) > 1) for x in range(4)]
    want = [sum(a for a, x in zip(acceptance, children, strict=True) if x == token) for token in range(4)]
    np.testing.assert_allclose(first, want, atol=1e-5)
    fallen = np.array([found.emitted.get((x,), 0.0) for x in range(4)])
    if rest is None:
        assert fallen.sum() < 1e-6
    else:
        np.testing.assert_allclose(fallen / fallen.sum(), rest, atol=1e-5)
    second = sum(m for text, m in found.emitted.items() if len(text) == 3)
    assert second == pytest.approx(acceptance[0] * p[(children[0],)][2], abs=1e-5)


@jax.jit
def follow_draws(draft, lengths, seed, p):
    return tree(draft, 1, sampling.pick(p, round_uniforms(draft, lengths, seed)[1]))


@jax.jit
def recursive_draws(draft, lengths, seed, p):
    return recursive(draft, 1, p, None, *round_uniforms(draft, lengths, seed))


@pytest.mark.parametrize("rule", [follow_draws, recursive_draws])
@pytest.mark.parametrize("children", SIBLINGS)
def test_siblings_by_draws(rule, children):
    """The same with 200 000 keys; here the node that was accepted is seen, so the second copy shows."""
    draws, rows = 200_000, len(children) + 1
    tokens, parents = ([[0, *children]] * draws, [[-1, *[0] * len(children)]] * draws)
    draft = trees.tree(jnp.asarray(np.array(tokens)), jnp.asarray(np.array(parents)), jnp.full((draws,), rows))
    seed = jnp.stack([jnp.arange(draws, dtype=jnp.uint32), jnp.full((draws,), 9, jnp.uint32)], axis=1)
    out = rule(draft, jnp.full((draws,), 12), seed, jnp.broadcast_to(P, (draws, rows, 4)))
    accepted, token = np.asarray(out.path[:, 1]), np.asarray(out.token)
    first = np.where(accepted > 0, np.array([0, *children])[accepted], token)
    np.testing.assert_allclose(np.bincount(first, minlength=4) / draws, P, atol=0.005)
    by_child = np.bincount(accepted, minlength=rows)[1:] / draws
    want, rest = SIBLINGS[children]
    np.testing.assert_allclose(by_child, want, atol=0.005)
    if children == (0, 0):
        assert by_child[1] == 0
    if rest is None:
        assert (accepted > 0).all()
    else:
        fallen = token[accepted == 0]
        np.testing.assert_allclose(np.bincount(fallen, minlength=4) / fallen.size, rest, atol=0.007)


def test_greedy_path():
    """A hand-made tree: the argmax is followed, a token that only another branch has is not."""
    draft = trees.tree(jnp.array([[7, 1, 2, 3, 4, 5]]), jnp.array([TWO_LEVELS]), jnp.array([6]))
    for choice, path, token in (
        ([2, 9, 5, 9, 9, 8], [0, 2, 5], 8),
        ([2, 9, 3, 9, 9, 8], [0, 2, 0], 3),
        ([1, 4, 5, 9, 6, 8], [0, 1, 4], 6),
        ([5, 4, 5, 9, 6, 8], [0, 0, 0], 5),
    ):
        out = tree(draft, 2, jnp.array([choice]))
        assert out.path.tolist() == [path]
        assert (out.count.item(), out.token.item()) == (np.count_nonzero(path), token)


@pytest.mark.parametrize("name", ["tree", "recursive", "recursive without q"])
def test_rows_keep_to_themselves(same_alone, name):
    """Greedy and warm rows, different trees and live lengths in one call equal their own calls."""
    rng = np.random.default_rng(3)
    batch, rows, vocab, depth = 12, 9, 4096, 4
    parents = np.stack([[-1, *(rng.integers(j) for j in range(1, rows))] for _ in range(batch)]).astype(np.int32)
    p = rng.dirichlet(np.full(vocab, 0.002), (batch, rows)).astype(np.float32)
    p[::4] = np.eye(vocab)[p[::4].argmax(-1)]
    q = (0.7 * p + 0.3 / vocab).astype(np.float32)
    tokens = np.take_along_axis(p.argmax(-1), np.maximum(parents, 0), axis=1).astype(np.int32)
    tokens[:, 5:] = rng.integers(vocab, size=(batch, rows - 5))
    lengths = rng.integers(1, rows + 1, size=batch).astype(np.int32)
    u_accept, u_next = (rng.random((batch, rows)).astype(np.float32) for _ in range(2))

    @jax.jit
    def run(tokens, parents, lengths, p, q, u_accept, u_next):
        draft = trees.tree(tokens, parents, lengths)
        if name == "tree":
            return tree(draft, depth, sampling.pick(p, u_next))
        return recursive(draft, depth, p, None if "without" in name else q, u_accept, u_next)

    inputs = [jnp.asarray(x) for x in (tokens, parents, lengths, p, q, u_accept, u_next)]
    assert int(run(*inputs).count.max()) >= 2
    same_alone(run, *inputs)
