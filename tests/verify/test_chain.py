"""Chain rejection: its law by exact enumeration, the numbers of a worked example, and rows that keep to themselves."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import thresholds

from specjax import draft as trees
from specjax import sampling
from specjax.verify.chain import chain

RULE = jax.jit(chain)


def law(exact, rule, p, q, depth, length=None, point=False):
    listed = list(thresholds.chain(p, q, depth, length or depth + 1, point))
    return exact.judge(rule, list(range(-1, depth)), listed, exact.sampled_variables, exact.sampled_place)


@pytest.mark.parametrize(("vocab", "depth"), [(4, 1), (3, 2), (3, 3)])
def test_law_is_the_targets(exact, kind, vocab, depth):
    p, q = exact.world(kind, vocab, depth, seed=depth)
    found = law(exact, RULE, p, q, depth)
    assert found.uneven < 5e-6
    assert found.error(p, depth + 1) < 1e-5


def test_expected_acceptance(exact):
    p, q = exact.world("random", 3, 2, seed=5)
    expected = 0.0
    for probability, (_, x, y) in exact.every_draft(q, [-1, 0, 1]):
        first = min(1, p[()][x] / q[()][x])
        expected += probability * first * (1 + min(1, p[(x,)][y] / q[(x,)][y]))
    assert law(exact, RULE, p, q, 2).accepted == pytest.approx(expected, abs=1e-5)


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


def test_no_draft_at_all():
    draft = trees.chain(jnp.array([[2]]), jnp.array([1]))
    out = RULE(draft, jnp.array([[[0.0, 0.0, 1.0]]]), None, jnp.zeros((1, 1)), jnp.full((1, 1), 0.5))
    assert out.path.tolist() == [[0]]
    assert (out.count.item(), out.token.item()) == (0, 2)


def test_wrong_variants_fail_the_check(exact):
    """The enumeration can fail: three plausible mistakes, each far outside the tolerance."""
    p, q = exact.world("random", 3, 2, seed=7)

    @jax.jit
    def no_rest(draft, p, q, u_accept, u_next):
        out = chain(draft, p, q, u_accept, u_next)
        rows = jnp.arange(p.shape[0])
        return dataclasses.replace(out, token=sampling.pick(p[rows, out.count], u_next[rows, out.count]))

    @jax.jit
    def misreported_q(draft, p, q, u_accept, u_next):
        return chain(draft, p, 0.8 * q + 0.2 / 3, u_accept, u_next)

    @jax.jit
    def shifted_q(draft, p, q, u_accept, u_next):
        return chain(draft, p, jnp.roll(q, 1, axis=1), u_accept, u_next)

    for wrong in (no_rest, misreported_q, shifted_q):
        assert law(exact, wrong, p, q, 2).error(p, 3) > 1e-3


def test_only_the_last_nodes_draw_is_used(exact):
    rng = np.random.default_rng(0)
    rows, depth, vocab = 64, 3, 4
    p, q = (jnp.asarray(rng.dirichlet(np.ones(vocab), (rows, depth + 1)), jnp.float32) for _ in range(2))
    draft = trees.chain(jnp.asarray(rng.integers(vocab, size=(rows, depth + 1)), jnp.int32), jnp.full((rows,), 4))
    u_accept, u_next, other = (jnp.asarray(rng.random((rows, depth + 1)), jnp.float32) for _ in range(3))
    out = RULE(draft, p, q, u_accept, u_next)
    mixed = jnp.where(jnp.arange(depth + 1) == out.count[:, None], u_next, other)
    assert (RULE(draft, p, q, u_accept, mixed).token == out.token).all()
    assert len(set(out.count.tolist())) == depth + 1


def settings(row: dict, rows: int):
    """Temperature, top-k, top-p and min-p, for `rows` rows each."""
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | row
    dtypes = (jnp.float32, jnp.int32, jnp.float32, jnp.float32)
    return [jnp.full((rows,), value, dtype) for value, dtype in zip(values.values(), dtypes, strict=True)]


def test_rows_keep_to_themselves(same_alone):
    """Greedy, warm, top-k and top-p rows of different live lengths in one call equal their own calls."""
    rng = np.random.default_rng(3)
    asked = [{"temperature": 0.0}, {"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.8, "temperature": 1.3}] * 2
    batch, rows, vocab = len(asked), 5, 4096  # XLA's CPU code for a few hundred values depends on the rows beside them
    options = [jnp.stack(x) for x in zip(*(settings(row, rows) for row in asked), strict=True)]
    p_logits = jnp.asarray(rng.normal(size=(batch, rows, vocab)), jnp.float32)
    q_logits = p_logits + jnp.asarray(rng.normal(size=(batch, rows, vocab)) * 0.5, jnp.float32)
    lengths = jnp.asarray(rng.integers(1, rows + 1, size=batch), jnp.int32)
    seed = jnp.asarray(rng.integers(2**32, size=(batch, 1, 2)), jnp.uint32)

    @jax.jit
    def run(p_logits, q_logits, lengths, seed, *options):
        p = sampling.draft_distribution(p_logits, *options)
        q = sampling.draft_distribution(q_logits, *options)
        u = [sampling.uniforms(seed, jnp.arange(rows), stream) for stream in range(3)]
        drafts = jnp.roll(sampling.pick(q, u[sampling.DRAFT]), 1, axis=1)
        draft = trees.chain(drafts, lengths, q)
        return p, chain(draft, p, q, u[sampling.ACCEPT], u[sampling.SAMPLE])

    same_alone(run, p_logits, q_logits, lengths, seed, *options)


P, Q = np.array([0.5, 0.25, 0.15, 0.1]), np.array([0.1, 0.2, 0.3, 0.4])
DRAWS = 200_000


@jax.jit
def one_draft(seed, *options):
    """One round of one draft for each seed, from the logits of P and Q."""
    p, q = (sampling.draft_distribution(jnp.log(jnp.asarray(x, jnp.float32))[None], *options) for x in (P, Q))
    position, node = jnp.array(10), jnp.arange(2)
    drafted = sampling.pick(jnp.broadcast_to(q, (DRAWS, 4)), sampling.uniforms(seed, position, sampling.DRAFT))
    tokens = jnp.stack([jnp.zeros_like(drafted), drafted], axis=1)
    draft = trees.chain(tokens, jnp.full((DRAWS,), 2))
    u_accept, u_next = (
        sampling.uniforms(seed[:, None], position, stream, node) for stream in (sampling.ACCEPT, sampling.SAMPLE)
    )
    out = chain(draft, *(jnp.broadcast_to(x, (DRAWS, 2, 4)) for x in (p, q)), u_accept, u_next)
    return p[0], drafted, out.count, out.token


@pytest.mark.parametrize(
    ("options", "want_p", "acceptance"),
    [
        ({}, [0.5, 0.25, 0.15, 0.1], 0.5500),
        ({"temperature": 0.5}, [0.7246, 0.1812, 0.0652, 0.0290], 0.2609),
        ({"temperature": 2.0}, [0.3701, 0.2617, 0.2027, 0.1655], 0.7610),
        # top-p 0.9 drops the last of p (0.1) and the first of q (0.1); top-k 2 leaves {0, 1} and {2, 3}.
        ({"top_p": 0.9}, [0.5 / 0.9, 0.25 / 0.9, 0.15 / 0.9, 0], 0.2 / 0.9 + 0.15 / 0.9),
        ({"top_k": 2}, [2 / 3, 1 / 3, 0, 0], 0.0),
    ],
)
def test_worked_example(options, want_p, acceptance):
    """V=4, one draft, 200 000 keys: marginal, acceptance and what is drawn after a rejection."""
    seed = jnp.stack([jnp.arange(DRAWS, dtype=jnp.uint32), jnp.full((DRAWS,), 7, jnp.uint32)], axis=1)
    p, drafted, count, token = map(np.asarray, one_draft(seed, *settings(options, 1)))
    np.testing.assert_allclose(p, want_p, atol=5e-5)
    assert count.mean() == pytest.approx(acceptance, abs=0.005)
    first = np.bincount(np.where(count == 1, drafted, token), minlength=4) / DRAWS
    np.testing.assert_allclose(first, want_p, atol=0.005)
    if not options:
        after_rejection = np.bincount(token[count == 0], minlength=4) / (count == 0).sum()
        np.testing.assert_allclose(after_rejection, [0.8889, 0.1111, 0, 0], atol=0.005)
        # Comparing the draft with an independent sample of the target would accept far less.
        target = np.random.default_rng(0).choice(4, size=DRAWS, p=P)
        assert (drafted == target).mean() == pytest.approx(0.185, abs=0.005)


@pytest.mark.parametrize(("temperature", "acceptance"), [(0.5, 0.3754), (2.0, 0.6682)])
def test_drafter_that_ignores_the_temperature_is_still_lossless(exact, temperature, acceptance):
    """The target follows the request, the drafter samples at 1 and says so: exact, with another acceptance."""
    warm = P ** (1 / temperature) / (P ** (1 / temperature)).sum()
    p = {(): warm} | {(x,): warm for x in range(4)}
    q = dict.fromkeys(p, Q)
    found = law(exact, RULE, p, q, 1)
    assert found.accepted == pytest.approx(acceptance, abs=1e-4)
    assert found.error(p, 2) < 1e-5
