"""The random numbers of a round: new in each round where they must be, bound to the position where they may be."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import draft as trees
from specjax import sampling
from specjax.verify.accepted import live_nodes, round_uniforms
from specjax.verify.block import block


def chains(batch: int, rows: int) -> trees.Draft:
    return trees.chain(jnp.zeros((batch, rows), jnp.int32), jnp.full((batch,), rows))


def seeds(batch: int) -> jnp.ndarray:
    return jnp.stack([jnp.arange(batch, dtype=jnp.uint32), jnp.full((batch,), 3, jnp.uint32)], axis=1)


def test_live_nodes():
    draft = trees.chain(jnp.zeros((3, 4), jnp.int32), jnp.array([1, 3, 4]))
    assert live_nodes(draft).tolist() == [[True, False, False, False], [True, True, True, False], [True] * 4]


def test_tests_are_new_in_each_round_and_draws_follow_the_position():
    first = round_uniforms(chains(2, 4), jnp.array([10, 20]), seeds(2))
    later = round_uniforms(chains(2, 4), jnp.array([12, 22]), seeds(2))
    assert not np.intersect1d(first[0], later[0]).size
    np.testing.assert_array_equal(first[1][:, 2:], later[1][:, :2])
    assert np.unique(np.concatenate([*first, later[0]])).size == 3 * 8


def test_rows_and_widths_do_not_matter():
    wide = round_uniforms(chains(5, 6), jnp.arange(10, 15), seeds(5))
    alone = round_uniforms(chains(1, 3), jnp.array([12]), seeds(5)[2:3])
    for many, one in zip(wide, alone, strict=True):
        np.testing.assert_array_equal(many[2, :3], one[0])


def test_siblings_share_the_draw_but_not_the_test():
    draft = trees.tree(jnp.zeros((1, 3), jnp.int32), jnp.array([[-1, 0, 0]]), jnp.array([3]))
    u_accept, u_next = round_uniforms(draft, jnp.array([7]), seeds(1))
    assert u_next[0, 1] == u_next[0, 2]
    assert u_accept[0, 1] != u_accept[0, 2]


@pytest.mark.parametrize("fresh", [True, False])
def test_block_verification_over_rounds(fresh):
    """Rounds of K=2 with the house's numbers keep the law of p; keyed by position alone they would not."""
    draws, depth, vocab, horizon = 100_000, 2, 2, 4
    p, q = np.array([0.6, 0.4], np.float32), np.array([0.25, 0.75], np.float32)
    node_p, node_q = (np.broadcast_to(x, (draws, depth + 1, vocab)) for x in (p, q))
    node, rows, step = np.arange(depth), np.arange(draws)[:, None], np.arange(depth + 1)

    @jax.jit
    def run(seed):
        def round_(_, state):
            text, lengths = state
            position, index = (lengths - 1, node) if fresh else (lengths, 0)
            keyed = position[:, None] if fresh else position[:, None] + node
            u_draft = sampling.uniforms(seed[:, None], keyed, sampling.DRAFT, index)
            drafted = sampling.pick(jnp.asarray(node_q[:, :depth]), u_draft)
            draft = trees.chain(jnp.pad(drafted, ((0, 0), (1, 0))), jnp.full((draws,), depth + 1), node_q)
            u_accept, u_next = round_uniforms(draft, lengths, seed)
            if not fresh:
                u_accept = sampling.uniforms(seed[:, None], lengths[:, None] - 1 + draft.depths, sampling.ACCEPT)
            out = block(draft, jnp.asarray(node_p), jnp.asarray(node_q), u_accept, u_next)
            drafted = jnp.pad(drafted, ((0, 0), (0, 1)))
            emitted = jnp.where(step == out.count[:, None], out.token[:, None], drafted)
            text = text.at[rows, lengths[:, None] + step].set(emitted)  # what lies past the count is overwritten
            return text, lengths + out.count + 1

        start = jnp.zeros((draws, 1 + horizon * (depth + 1)), jnp.int32), jnp.ones((draws,), jnp.int32)
        return jax.lax.fori_loop(0, horizon, round_, start)[0][:, 1 : 1 + horizon]

    text = np.asarray(run(seeds(draws)))
    found = np.bincount(text @ (vocab ** np.arange(horizon)), minlength=vocab**horizon) / draws
    digits = (np.arange(vocab**horizon)[:, None] // vocab ** np.arange(horizon)) % vocab
    error = np.abs(found - p[digits].prod(axis=1)).max()
    assert error < 0.005 if fresh else error > 0.01, error
