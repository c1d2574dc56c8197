"""Block verification: its law by exact enumeration, and that it accepts no less than chain rejection."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import thresholds

from specjax import draft as trees
from specjax.verify.block import block
from specjax.verify.chain import chain, stop_at

RULE = jax.jit(block)


def law(exact, rule, p, q, depth, length=None, point=False):
    listed = list(thresholds.block(p, q, depth, length or depth + 1, point))
    return exact.judge(rule, list(range(-1, depth)), listed, exact.sampled_variables, exact.sampled_place)


def chain_acceptance(exact, p, q, depth):
    """Mean of accepted drafts under chain rejection, by the formula."""
    parents, mean = list(range(-1, depth)), 0.0
    for probability, tokens in exact.every_draft(q, parents):
        at, alive = exact.prefixes(parents, tokens), 1.0
        for node in range(depth):
            x = tokens[node + 1]
            alive *= min(1.0, p[at[node]][x] / q[at[node]][x])
            mean += probability * alive
    return mean


@pytest.mark.parametrize(("vocab", "depth"), [(4, 1), (3, 2), (3, 3)])
def test_law_is_the_targets(exact, kind, vocab, depth):
    p, q = exact.world(kind, vocab, depth, seed=depth)
    found = law(exact, RULE, p, q, depth)
    assert found.uneven < 5e-6
    assert found.error(p, depth + 1) < 1e-5
    assert found.accepted >= chain_acceptance(exact, p, q, depth) - 1e-5


@pytest.mark.parametrize("seed", range(3))
def test_accepts_more_than_the_chain_rule(exact, seed):
    p, q = exact.world("random", 3, 3, seed=20 + seed)
    assert law(exact, RULE, p, q, 3).accepted > chain_acceptance(exact, p, q, 3) + 1e-3


@pytest.mark.parametrize("kind", ["random", "zeros", "greedy target"])
def test_point_mass_without_q(exact, kind):
    p, q = exact.world(kind, 3, 3, seed=2)
    found = law(exact, RULE, p, q, 3, point=True)
    assert found.uneven < 5e-6
    assert found.error(p, 4) < 1e-5


@pytest.mark.parametrize("length", [1, 2, 3])
def test_padding_nodes_are_never_accepted(exact, length):
    p, q = exact.world("mixed", 3, 3, seed=4)
    found = law(exact, RULE, p, q, 3, length=length)
    assert max(map(len, found.emitted)) == length
    assert found.uneven < 5e-6
    assert found.error(p, length) < 1e-5


def test_wrong_variants_fail_the_check(exact):
    p, q = exact.world("random", 3, 3, seed=7)

    @jax.jit
    def rest_of_the_chain_rule(draft, p, q, u_accept, u_next):
        count = block(draft, p, q, u_accept, u_next).count
        return stop_at(draft, p, q, count, jnp.ones(count.shape), u_next)

    @jax.jit
    def misreported_q(draft, p, q, u_accept, u_next):
        return block(draft, p, 0.8 * q + 0.2 / 3, u_accept, u_next)

    for wrong in (rest_of_the_chain_rule, misreported_q):
        assert law(exact, wrong, p, q, 3).error(p, 4) > 1e-3


def test_one_draft_is_the_chain_rule():
    rng = np.random.default_rng(1)
    rows, vocab = 256, 5
    p, q = (jnp.asarray(rng.dirichlet(np.ones(vocab), (rows, 2)), jnp.float32) for _ in range(2))
    draft = trees.chain(jnp.asarray(rng.integers(vocab, size=(rows, 2)), jnp.int32), jnp.full((rows,), 2))
    u_accept, u_next = (jnp.asarray(rng.random((rows, 2)), jnp.float32) for _ in range(2))
    one, other = RULE(draft, p, q, u_accept, u_next), jax.jit(chain)(draft, p, q, u_accept, u_next)
    assert (one.count == other.count).all()
    assert (one.token == other.token).all()


def test_rows_keep_to_themselves(same_alone):
    rng = np.random.default_rng(3)
    batch, rows, vocab = 16, 6, 4096
    p = rng.dirichlet(np.full(vocab, 0.005), (batch, rows)).astype(np.float32)
    p[::4] = np.eye(vocab)[p[::4].argmax(-1)]  # greedy rows
    q = (0.7 * p + 0.3 / vocab).astype(np.float32)
    tokens = jnp.asarray(rng.permuted(p, axis=1).argmax(-1), jnp.int32).at[:, 1:].set(p.argmax(-1)[:, :-1])
    lengths = jnp.asarray(rng.integers(1, rows + 1, size=batch), jnp.int32)
    u_accept, u_next = (jnp.asarray(rng.random((batch, rows)), jnp.float32) for _ in range(2))

    @jax.jit
    def run(tokens, lengths, *rest):
        return block(trees.chain(tokens, lengths), *rest)

    same_alone(run, tokens, lengths, jnp.asarray(p), jnp.asarray(q), u_accept, u_next)
