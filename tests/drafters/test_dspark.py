"""DSpark: Markov heads against numpy, the confidence cut and what it may depend on, and what comes out of an engine."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
from support import blocks, engines, laws, toy

from specjax.sampling import DRAFT, SamplingParams, uniforms

TAPS = 2 * blocks.WIDTH
LENGTHS, ANCHORS, DEPTH = (9, 4), (5, 17), 5
HEADS = ("vanilla", "gated", "rnn")


def taps():
    rng = np.random.default_rng(7)
    return [rng.standard_normal((length - 1, TAPS)).astype(np.float32) for length in LENGTHS]


def given(**settings):
    rows = [[3] * (length - 1) + [anchor] for length, anchor in zip(LENGTHS, ANCHORS, strict=True)]
    return blocks.context(rows, LENGTHS, features=blocks.ragged(taps()), **settings)


@functools.cache
def weights(config):
    """Random weights with Markov and confidence heads strong enough to have a say."""
    tensors = blocks.random_tensors(config)
    return {name: x * (6 if "markov_w" in name else 1) for name, x in tensors.items()}


def drafted(config, context=None, **options):
    """The draft, and in numpy the hidden rows and unary logits."""
    tensors = weights(config)
    drafter, params = blocks.build(config, tensors, **options)
    draft = blocks.first_draft(drafter, params, context or given())
    embedding = toy.tiny()[1]["embedding"]
    rows = zip(taps(), ANCHORS, strict=True)
    hidden = np.stack([blocks.hidden(config, tensors, embedding, t, a, DEPTH) for t, a in rows])
    return draft, hidden, blocks.logits(config, toy.tiny()[1]["head"]["weight"], hidden)


class Walk:
    """The Markov head of one request in numpy, fed the tokens that were really drafted."""

    def __init__(self, config, hidden, unary):
        self.config, self.hidden, self.unary = config, hidden, unary
        self.w = {name: np.asarray(x, np.float64) for name, x in weights(config).items()}
        self.memory = np.zeros(config.markov_rank)

    def logits(self, slot, before):
        """Logits of `slot` after the token `before`; call once a slot, in order."""
        e, h = self.w["markov_head.markov_w1.weight"][before], self.hidden[slot]
        phi = e
        if self.config.markov == "gated":
            gate = (
                self.w["markov_head.gate_proj.weight"] @ np.concatenate([h, e]) + self.w["markov_head.gate_proj.bias"]
            )
            phi = blocks.sigmoid(gate) * e
        if self.config.markov == "rnn":
            inputs = np.concatenate([self.memory, e, h])
            joint = self.w["markov_head.joint_proj.weight"] @ inputs + self.w["markov_head.joint_proj.bias"]
            g, c, o = np.split(joint, 3)
            phi = np.tanh(o)
            self.memory = blocks.sigmoid(g) * self.memory + (1 - blocks.sigmoid(g)) * np.tanh(c)
        return self.unary[slot] + self.w["markov_head.markov_w2.weight"] @ phi

    def confidence(self, slot, before, temperature=1.0):
        x = self.hidden[slot]
        if self.config.confidence_with_markov:
            x = np.concatenate([x, self.w["markov_head.markov_w1.weight"][before]])
        logit = self.w["confidence_head.proj.weight"][0] @ x + self.w["confidence_head.proj.bias"][0]
        return blocks.sigmoid(logit / temperature)


@pytest.mark.parametrize("markov", HEADS)
def test_walk(markov):
    """Draft k is the best after draft k - 1 as it was chosen, not after the mask and not after the unary favourite."""
    config = blocks.head_config("dspark", markov=markov)
    draft, hidden, unary = drafted(config)
    np.testing.assert_array_equal(draft.lengths, [6, 6])  # shifted slots: a block of 5 makes 5 drafts
    for row, token in enumerate(ANCHORS):
        walk = Walk(config, hidden[row], unary[row])
        for slot in range(DEPTH):
            token = walk.logits(slot, token).argmax()
            assert int(draft.tokens[row, slot + 1]) == token
    assert (np.asarray(draft.tokens)[:, 1:] != unary.argmax(-1)).any()


@pytest.mark.parametrize("markov", HEADS)
def test_sampled_walk(markov):
    """Q is the exact distribution of each draft given the drafts that were really drawn before it."""
    config = blocks.head_config("dspark", markov=markov)
    draft, hidden, unary = drafted(config, given(temperature=2.0, seed=[0, 5]), sampled=True)
    for row, token in enumerate(ANCHORS):
        walk = Walk(config, hidden[row], unary[row])
        u = uniforms(jnp.array([0, 5], jnp.uint32), jnp.int32(LENGTHS[row] - 1), DRAFT, jnp.arange(DEPTH))
        for slot in range(DEPTH):
            q = np.exp(blocks.log_softmax(walk.logits(slot, token) / 2.0))
            np.testing.assert_allclose(draft.q[row, slot], q, atol=1e-4)
            token = int(draft.tokens[row, slot + 1])
            assert token == int(np.searchsorted(np.cumsum(q), float(u[slot])))


def test_without_a_markov_head():
    config = blocks.head_config("dspark", markov_rank=0, confidence=False)
    draft, _, unary = drafted(config)
    np.testing.assert_array_equal(draft.tokens[:, 1:], unary.argmax(-1))


@pytest.mark.parametrize("draft_vocab", [blocks.VOCAB, 40])
def test_candidate_head(draft_vocab):
    """With all tokens as candidates, columns in another order, nothing changes: nor where W2 has rows for some only."""
    config = blocks.head_config("dspark", draft_vocab_size=draft_vocab, own_head=True)
    full, few = (
        blocks.build(dataclasses.replace(config, **ranked), weights(config))
        for ranked in ({}, {"head_rank": 32, "head_candidates": draft_vocab})
    )
    full, few = (np.asarray(blocks.first_draft(*built, given()).tokens) for built in (full, few))
    np.testing.assert_array_equal(few, full)
    ids = np.arange(draft_vocab) + weights(config).get("d2t", 0)
    assert np.isin(full[:, 1:], ids).all()


# ---------------------------------------------------------------- the confidence cut


@pytest.mark.parametrize(("with_markov", "calibration"), [(True, ()), (False, ()), (True, (0.5, 2.0, 0.25, 1.0, 3.0))])
def test_confidence_cut(with_markov, calibration):
    """The draft ends before the first slot whose confidence is below the threshold, be it the first."""
    config = blocks.head_config("dspark", confidence_with_markov=with_markov)
    whole, hidden, unary = drafted(config)
    confidence = np.zeros((2, DEPTH))
    for row, anchor in enumerate(ANCHORS):
        walk, before = Walk(config, hidden[row], unary[row]), [anchor, *np.asarray(whole.tokens)[row, 1:]]
        for slot in range(DEPTH):
            confidence[row, slot] = walk.confidence(slot, before[slot], calibration[slot] if calibration else 1.0)
    for threshold in (np.sort(confidence.ravel())[5] + 1e-4, 1.0):
        cut, _, _ = drafted(config, confidence_threshold=float(threshold), calibration=calibration)
        want = [1 + int(np.cumprod(row >= threshold).sum()) for row in confidence]
        np.testing.assert_array_equal(cut.lengths, want)
        np.testing.assert_array_equal(cut.tokens[0, : want[0]], whole.tokens[0, : want[0]])
    assert want == [1, 1]


def test_cut_does_not_anticipate():
    """Whether draft k is kept is a function of the drafts before it: rows that agree on those agree on that.

    256 rows with the same context and different seeds; 7 tokens, so that prefixes repeat and part at every depth.
    """
    rows = 256
    config = blocks.head_config("dspark", vocab_size=7, draft_vocab_size=7, mask_token_id=6)
    target = toy.tiny(vocab_size=7)
    drafter, params = blocks.build(config, weights(config), target, sampled=True, confidence_threshold=0.5)
    rng = np.random.default_rng(3)
    same = np.broadcast_to(rng.standard_normal((8, TAPS)).astype(np.float32), (rows, 8, TAPS))
    context = blocks.context(
        [[1] * 9] * rows,
        [9] * rows,
        features=blocks.features(same, [0] * rows, [8] * rows),
        temperature=20.0,
        seed=np.stack([np.zeros(rows), np.arange(rows)], axis=1),
    )
    draft = blocks.first_draft(drafter, params, context)
    tokens, lengths = np.asarray(draft.tokens), np.asarray(draft.lengths)
    decisions, would_be = {}, {}
    for row in range(rows):
        for k in range(1, min(lengths[row], DEPTH) + 1):  # all drafts before k were kept
            prefix = tuple(tokens[row, :k])
            decisions.setdefault(prefix, set()).add(lengths[row] > k)
            would_be.setdefault(prefix, set()).add(tokens[row, k])
    assert all(len(kept) == 1 for kept in decisions.values())
    # There was something to see: several tokens at k under one decision, and decisions that differ with the prefix.
    assert any(len(different) > 3 for different in would_be.values())
    assert {len(prefix) for prefix in decisions} == {1, 2, 3, 4, 5}
    assert any({True, False} <= {kept for prefix, (kept,) in decisions.items() if len(prefix) == k} for k in (2, 3))


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"confidence": False}, {"confidence_threshold": 0.5}, "needs a confidence head"),
        ({}, {"confidence_threshold": 1.5}, r"\[0, 1\]"),
        ({}, {"confidence_threshold": 0.5, "tree": "ddtree"}, "cuts chains"),
        ({}, {"calibration": (1.0,) * 5}, "read only where"),
        ({}, {"confidence_threshold": 0.5, "calibration": (1.0,) * 4}, "4 calibration temperatures for 5"),
        ({}, {"confidence_threshold": 0.5, "calibration": (1.0, 1.0, 0.0, 1.0, 1.0)}, "positive"),
        ({"markov_rank": 0}, {}, "markov_rank is 0"),
    ],
)
def test_refusals(changes, options, message):
    config = blocks.head_config("dspark", **changes)
    tensors = blocks.random_tensors(config)
    with pytest.raises(ValueError, match=message):
        blocks.build(config, tensors, **options)


# ---------------------------------------------------------------- in an engine


@pytest.mark.slow
@pytest.mark.parametrize(("markov", "threshold"), [("rnn", 0.5), ("vanilla", 0.0)])
def test_in_an_engine(markov, threshold):
    laws.check_greedy(*laws.small("dspark", markov=markov, options={"confidence_threshold": threshold}))


@pytest.mark.parametrize(("rule", "threshold"), [("block", 0.3), pytest.param("chain", 0.3, marks=pytest.mark.slow)])
def test_sampled_law(rule, threshold):
    """Also with drafts cut by confidence: lossless, since the cut does not anticipate."""
    laws.check_sampled(*laws.tabled("dspark", sampled=True, confidence_threshold=threshold), rule)


def test_an_oracle_is_always_right():
    """A Markov head that knows the target's bigrams: every draft is accepted, at every depth of the context."""
    vocab = 8
    config = blocks.head_config(
        "dspark",
        vocab_size=vocab,
        draft_vocab_size=vocab,
        mask_token_id=0,
        markov_rank=vocab,
        confidence=False,
        own_head=True,
    )
    after = np.random.default_rng(0).permutation(vocab)
    tensors = blocks.random_tensors(config)
    tensors["lm_head.weight"] = np.zeros_like(tensors["lm_head.weight"])
    tensors["markov_head.markov_w1.weight"] = np.eye(vocab, dtype=np.float32)
    model, params = blocks.feature_target(vocab)
    params = params | {"by_token": jnp.asarray(10 * np.eye(vocab)[after], jnp.float32)}
    tensors["markov_head.markov_w2.weight"] = np.asarray(np.eye(vocab)[after].T, np.float32)
    drafter, weights = blocks.build(config, tensors, (model, params))
    engine = engines.narrow(toy.engine(drafter, weights, (model, params), batch=2))
    results = engine.generate([[1, 2, 3], [4] * 30], SamplingParams(max_tokens=1 + 6 * 8))
    for result, last in zip(results, (3, 4), strict=True):
        want = [int(after[last])]
        while len(want) < 49:
            want.append(int(after[want[-1]]))
        assert result.token_ids == want
        assert (result.spec.rounds, result.spec.accepted) == (8, 40)
