"""DFlash and DFlash 2: what is drafted, against numpy, and what comes out of an engine."""

import jax.numpy as jnp
import numpy as np
import pytest
from support import blocks, laws, toy

from specjax.drafters.head import Head
from specjax.sampling import DRAFT, uniforms

TAPS = 2 * blocks.WIDTH
LENGTHS, ANCHORS = (9, 4), (5, 17)


def taps(seed=7):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((length - 1, TAPS)).astype(np.float32) for length in LENGTHS]


def given(**settings):
    rows = [[3] * (length - 1) + [anchor] for length, anchor in zip(LENGTHS, ANCHORS, strict=True)]
    return blocks.context(rows, LENGTHS, features=blocks.ragged(taps()), **settings)


def drafted(config, tensors=None, context=None, **options):
    """The draft of a fresh state, and the hidden rows and unary logits of each request in numpy."""
    tensors = tensors or blocks.random_tensors(config)
    drafter, params = blocks.build(config, tensors, **options)
    draft = blocks.first_draft(drafter, params, context or given())
    embedding = toy.tiny()[1]["embedding"]
    rows = drafter.depth if config.shifted else drafter.depth + 1
    hidden = [blocks.hidden(config, tensors, embedding, t, a, rows) for t, a in zip(taps(), ANCHORS, strict=True)]
    hidden = np.stack(hidden)[:, -drafter.depth :]
    return draft, hidden, blocks.logits(config, tensors.get("lm_head.weight", toy.tiny()[1]["head"]["weight"]), hidden)


@pytest.mark.parametrize("shifted", [False, True])
def test_argmax_chain(shifted):
    """The whole block as a chain; the slot convention decides which row speaks of which position."""
    draft, _, logits = drafted(blocks.head_config(shifted=shifted))
    np.testing.assert_array_equal(draft.tokens[:, 1:], logits.argmax(-1))
    np.testing.assert_array_equal(draft.tokens[:, 0], ANCHORS)
    np.testing.assert_array_equal(draft.lengths, [6, 6] if shifted else [5, 5])
    assert draft.q is None


def test_slot_conventions_differ():
    """Read with the wrong convention, the same weights draft something else."""
    in_place, shifted = (drafted(blocks.head_config(shifted=x))[0].tokens for x in (False, True))
    assert (np.asarray(in_place)[:, 1:] != np.asarray(shifted)[:, 1:5]).any()


def test_cut_before_an_end_token():
    """The end token itself is left to the target; the other request goes on."""
    _, _, logits = drafted(blocks.head_config())
    end = int(logits[0].argmax(-1)[2])
    draft, _, _ = drafted(blocks.head_config(), context=given(eos=(end,)))
    first = list(logits[0].argmax(-1)).index(end)
    others = [list(row.argmax(-1)).index(end) if end in row.argmax(-1) else 4 for row in logits]
    assert others[0] == first
    np.testing.assert_array_equal(draft.lengths, [1 + n for n in others])


def conditioned(logits, temperature, top_k):
    kept = np.where(logits >= np.sort(logits)[-top_k], logits, -np.inf) if top_k else logits
    return np.exp(blocks.log_softmax(kept / temperature))


def picked(q, u):
    return int(np.searchsorted(np.cumsum(q), u * q.sum(), side="right"))


def test_sampled_slots():
    """Slots are drawn independently; q is what each was drawn from, at the request's temperature and top-k."""
    settings = {"temperature": [0.7, 0.0], "top_k": [5, 0], "seed": [[0, 3], [0, 4]]}
    draft, _, logits = drafted(blocks.head_config(), context=given(**settings), sampled=True)
    u = np.asarray(uniforms(jnp.array([0, 3], jnp.uint32), jnp.int32(LENGTHS[0] - 1), DRAFT, jnp.arange(4)))
    for slot in range(4):
        q = conditioned(logits[0, slot], 0.7, 5)
        np.testing.assert_allclose(draft.q[0, slot], q, atol=1e-4)
        assert (np.asarray(draft.q)[0, slot] > 0).sum() == 5
        assert int(draft.tokens[0, slot + 1]) == picked(q, u[slot])
    # At temperature 0 q is a point mass on the argmax.
    np.testing.assert_array_equal(draft.tokens[1, 1:], logits[1].argmax(-1))
    np.testing.assert_array_equal(draft.q[1, :4], np.eye(blocks.VOCAB)[logits[1].argmax(-1)])
    np.testing.assert_array_equal(draft.q[:, 4], 0)


def test_sampled_drafts_are_not_cut_by_themselves():
    everything = tuple(range(4))
    draft, _, _ = drafted(blocks.head_config(), context=given(temperature=5.0, eos=everything), sampled=True)
    np.testing.assert_array_equal(draft.lengths, [5, 5])


def test_reduced_vocabulary():
    """Drafts and q are over target ids: d2t holds offsets."""
    config = blocks.head_config(draft_vocab_size=20, own_head=True)
    tensors = blocks.random_tensors(config)
    ids = np.arange(20) + tensors["d2t"]
    draft, _, logits = drafted(config, tensors)
    np.testing.assert_array_equal(draft.tokens[:, 1:], ids[logits.argmax(-1)])
    draft, _, _ = drafted(config, tensors, context=given(temperature=1.0), sampled=True)
    np.testing.assert_allclose(np.asarray(draft.q)[:, :4][..., ids], np.exp(blocks.log_softmax(logits)), atol=1e-4)
    outside = np.setdiff1d(np.arange(blocks.VOCAB), ids)
    assert not np.asarray(draft.q)[..., outside].any()
    assert np.isin(draft.tokens[:, 1:], ids).all()


# ---------------------------------------------------------------- DFlash 2


def selector_scores(config, tensors, hidden, logits, before):
    """The candidates of one position, best first, and their scores after token `before`."""
    ids = np.argsort(-logits, kind="stable")[: config.selector_top_k]
    wanted = hidden @ tensors["candidate_selector.hidden_projection.weight"].astype(np.float64).T
    query = tensors["candidate_selector.predecessor_codebook"][before] * wanted
    return ids, logits[ids] + tensors["candidate_selector.successor_codebook"][ids] @ query


def test_walk():
    """Each position takes the best of its candidates after the token chosen before it, whatever the unaries say."""
    config = blocks.head_config("dflash2")
    tensors = blocks.random_tensors(config)
    draft, hidden, logits = drafted(config, tensors)
    for row, token in enumerate(ANCHORS):
        for slot in range(4):
            ids, scores = selector_scores(config, tensors, hidden[row, slot], logits[row, slot], token)
            token = ids[scores.argmax()]
            assert int(draft.tokens[row, slot + 1]) == token
    assert (np.asarray(draft.tokens)[:, 1:] != logits.argmax(-1)).any()  # the selector had a say


def test_sampled_walk():
    """Q is the softmax over the candidates given the token that was drawn, with nothing outside them."""
    config = blocks.head_config("dflash2")
    tensors = blocks.random_tensors(config)
    draft, hidden, logits = drafted(config, tensors, context=given(temperature=3.0, seed=[1, 9]), sampled=True)
    for row, token in enumerate(ANCHORS):
        u = np.asarray(uniforms(jnp.array([1, 9], jnp.uint32), jnp.int32(LENGTHS[row] - 1), DRAFT, jnp.arange(4)))
        for slot in range(4):
            ids, scores = selector_scores(config, tensors, hidden[row, slot], logits[row, slot], token)
            q = np.exp(blocks.log_softmax(scores / 3.0))
            want = np.zeros(blocks.VOCAB)
            want[ids] = q
            np.testing.assert_allclose(draft.q[row, slot], want, atol=1e-4)
            assert int(draft.tokens[row, slot + 1]) == ids[picked(q, u[slot])]
            token = int(draft.tokens[row, slot + 1])


def test_walk_on_paper():
    """Two positions, three candidates, rank 1: all scores can be added up by hand.

    Unary logits are (2, 1, 0) for tokens 0, 1, 2 at both positions and h = 1. A = (0, 1, -1, 2), B = (0, 1, 3, 0).
    After the root, token 3: 2 + 0, 1 + 2, 0 + 6, so token 2. After token 2: 2 + 0, 1 - 1, 0 - 3, so token 0.
    Token 1 would be followed by 2 + 0, 1 + 1, 0 + 3, so by token 2.
    """
    config = blocks.head_config(
        "dflash2",
        hidden_size=1,
        conv_kernel=0,
        vocab_size=4,
        draft_vocab_size=4,
        selector_rank=1,
        selector_top_k=3,
        mask_token_id=3,
    )
    from specjax.drafters.dflash import DFlash2

    drafter = DFlash2(config=config, head=Head(vocab_size=4, columns=4), max_position=64, num_speculative_tokens=2)
    params = {
        "head": {"weight": jnp.array([[2.0], [1.0], [0.0], [-9.0]])},
        "selector": {
            "hidden": jnp.ones((1, 1)),
            "predecessor": jnp.array([[0.0], [1.0], [-1.0], [2.0]]),
            "successor": jnp.array([[0.0], [1.0], [3.0], [0.0]]),
        },
    }
    draft = drafter.propose(params, jnp.ones((2, 2, 1)), blocks.context([[0, 3], [1]], [2, 1]), drafter.shape)
    np.testing.assert_array_equal(draft.tokens, [[3, 2, 0], [1, 2, 0]])


@pytest.mark.parametrize("top_k", [0, 65])
def test_candidates_out_of_range(top_k):
    with pytest.raises(ValueError, match="1..64"):
        blocks.build(blocks.head_config("dflash2", selector_top_k=top_k))


# ---------------------------------------------------------------- in an engine


@pytest.mark.parametrize("family", ["dflash", pytest.param("dflash2", marks=pytest.mark.slow)])
def test_in_an_engine(family):
    laws.check_greedy(*laws.small(family))


@pytest.mark.parametrize(
    ("family", "rule"),
    [("dflash", "block"), ("dflash2", "chain"), pytest.param("dflash2", "block", marks=pytest.mark.slow)],
)
def test_sampled_law(family, rule):
    laws.check_sampled(*laws.tabled(family, sampled=True), rule)


@pytest.mark.parametrize("family", ["dflash", "dflash2"])
def test_bfloat16(family):
    """Weights, keys and values in bfloat16; scores and q in float32 all the same."""
    config = blocks.head_config(family)
    drafter, params = blocks.build(config, dtype=jnp.bfloat16, sampled=True)
    draft = blocks.first_draft(drafter, params, given(temperature=1.0))
    assert drafter.init_state(1, 8).k[0].dtype == jnp.bfloat16
    assert draft.q.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(draft.q)[:, :4].sum(-1), 1, atol=1e-5)
    full, *_ = drafted(config, context=given(temperature=1.0), sampled=True)
    # The same law of the first draft up to the rounding of bfloat16.
    assert np.abs(np.asarray(draft.q)[:, 0] - np.asarray(full.q)[:, 0]).sum(-1).max() < 0.5
