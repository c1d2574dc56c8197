"""The output head: draft vocabularies, the target's own head, candidates by low rank."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from support import toy
from support.heads import VOCAB, WIDTH, head_config, random_tensors

from specjax import sampling
from specjax.drafters import learned
from specjax.drafters.head import (
    Head,
    best_columns,
    build_head,
    check_d2t,
    nearly_best_columns,
    recall,
    svd_factors,
)

OFFSETS = np.array([0, 1, 2, 4])  # target ids 0, 2, 4, 7


def tabled(offsets=OFFSETS, vocab=8, **changes):
    """A head of 4 draft tokens whose logits are the hidden row itself."""
    config = head_config("eagle3", vocab_size=vocab, draft_vocab_size=4, hidden_size=4, own_head=True, **changes)
    tensors = {"lm_head.weight": np.eye(4, dtype=np.float32)} | ({} if offsets is None else {"d2t": offsets})
    return build_head(config, tensors, {}, jnp.float32)


def settings(temperature: float, **changes):
    state = sampling.neutral(1)
    values = {name: jnp.full((1,), v, getattr(state, name).dtype) for name, v in changes.items()}
    return dataclasses.replace(state, temperature=jnp.full((1,), temperature), **values)


def test_d2t_holds_offsets():
    """Proposals are target ids; q has mass on nothing else, at T = 1 and at T = 0 (trap 8)."""
    head, params = tabled()
    rows = jnp.asarray([[[0.0, 1.0, 2.0, 3.0], [5.0, 1.0, 6.0, 3.0]]])
    scores = head.scores(params, rows)
    assert scores.best().tolist() == [[7, 4]]
    tokens, values = scores.top(4)
    assert tokens.tolist() == [[[7, 4, 2, 0], [4, 0, 7, 2]]]
    np.testing.assert_allclose(values, np.sort(np.asarray(jax.nn.log_softmax(rows)))[..., ::-1], atol=1e-6)
    q = np.asarray(scores.spread(head.distribution(scores, settings(1.0)), 8))
    np.testing.assert_allclose(q[..., [0, 2, 4, 7]], jax.nn.softmax(rows), atol=1e-6)
    assert not q[..., [1, 3, 5, 6]].any()
    greedy = np.asarray(scores.spread(head.distribution(scores, settings(0.0)), 8))
    np.testing.assert_array_equal(greedy[0], np.eye(8)[[7, 4]])


def test_requests_shape_q_each_for_itself():
    head, params = tabled()
    scores = head.scores(params, jnp.asarray([[[0.0, 1.0, 2.0, 3.0]]]))
    q = np.asarray(head.distribution(scores, settings(0.5, top_k=2)))[0, 0]
    want = np.exp(np.array([2.0, 3.0]) / 0.5)
    np.testing.assert_allclose(q, [0, 0, *(want / want.sum())], atol=1e-6)


def test_absent_with_unequal_sizes_is_refused():
    """Both sizes are named, and nothing has been built."""
    with pytest.raises(ValueError, match=r"has 4 tokens and the target's has 8, but there is no d2t"):
        tabled(offsets=None)
    config = head_config("eagle3", draft_vocab_size=20)
    tensors = random_tensors(config)
    del tensors["d2t"]
    model, weights = toy.tiny(num_layers=4, windows=(None,) * 4)
    with pytest.raises(ValueError, match=r"has 20 tokens and the target's has 64, but there is no d2t"):
        learned.build(config, tensors, model, weights, jnp.float32)


@pytest.mark.parametrize("offsets", [None, np.zeros(4, np.int64)])
def test_equal_sizes_are_the_identity(offsets):
    """No table is kept, and the lowered program has neither a gather nor a scatter."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        head, params = tabled(offsets, vocab=4)
    assert "ids" not in params

    def both(params, rows):
        scores = head.scores(params, rows)
        return scores.best(), scores.spread(head.distribution(scores, settings(1.0)), 4)

    def lowered(params):
        return jax.jit(both).lower(params, jnp.ones((1, 1, 4))).as_text()

    assert "gather" not in lowered(params) and "scatter" not in lowered(params)
    mapped = lowered(params | {"ids": jnp.arange(4)})
    assert "gather" in mapped and "scatter" in mapped  # the search finds them where they are
    assert both(params, jnp.asarray([[[0.0, 3.0, 1.0, 2.0]]]))[0].tolist() == [[1]]


def test_contradicting_tables_are_refused():
    member = np.isin(np.arange(8), [0, 2, 4, 7])
    assert check_d2t(OFFSETS, member, 4, 8).tolist() == [0, 2, 4, 7]
    member[[4, 5]] = False, True
    with pytest.raises(ValueError, match=r"t2d marks 4 of 8 target ids, d2t maps to 4 of 8, and they are not the same"):
        check_d2t(OFFSETS, member, 4, 8)
    with pytest.raises(ValueError, match="t2d marks 3 of 7"):
        check_d2t(OFFSETS, np.ones(7) * (np.arange(7) < 3), 4, 8)


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([0, 1, 2], r"d2t has shape \(3,\), the draft vocabulary 4 tokens"),
        ([0, 2, 4, 7], r"maps to target ids 0..10, the target has 0..7: d2t must hold offsets"),
        ([-1, 1, 2, 4], r"maps to target ids -1..7"),
        ([1, 0, 2, 4], r"maps 4 draft tokens to 3 different target ids"),
    ],
)
def test_damaged_tables_are_refused(offsets, message):
    with pytest.raises(ValueError, match=message):
        check_d2t(np.array(offsets), None, 4, 8)


def test_all_zeros_are_taken_with_one_warning():
    with pytest.warns(UserWarning, match=r"target ids 0..3 of 8 only") as caught:
        head, params = tabled(np.zeros(4, np.int64))
    assert len(caught) == 1
    assert params["ids"].tolist() == [0, 1, 2, 3]
    scores = head.scores(params, jnp.asarray([[0.0, 1.0, 2.0, 3.0]]))
    assert scores.best().tolist() == [3]
    assert np.asarray(scores.spread(scores.logits, 8)).shape == (1, 8)


def test_the_targets_head_is_shared():
    """By reference, tied or not; a reduced vocabulary takes its rows."""
    _, weights = toy.tiny()
    config = head_config("eagle3")
    assert build_head(config, {}, weights, jnp.float32)[1]["weight"] is weights["head"]["weight"]
    tied = {name: x for name, x in weights.items() if name != "head"}
    assert build_head(config, {}, tied, jnp.float32)[1]["weight"] is weights["embedding"]
    few = dataclasses.replace(config, draft_vocab_size=4)
    _, params = build_head(few, {"d2t": OFFSETS}, weights, jnp.float32)
    np.testing.assert_array_equal(params["weight"], weights["head"]["weight"][np.array([0, 2, 4, 7])])


def test_multiplier_and_softcap():
    """Trap 14: both, and in this order."""
    head, params = tabled(output_multiplier=2.0, logit_softcap=3.0)
    rows = jnp.asarray([[0.0, 0.5, 1.0, 4.0]])
    np.testing.assert_allclose(head.scores(params, rows).logits, 3 * np.tanh(2 * np.asarray(rows) / 3), atol=1e-6)


def random_head(rank: int, candidates: int, seed: int = 0, draft_vocab: int = VOCAB):
    """A head whose rows lie near a subspace of 8 dimensions, as trained heads do."""
    rng = np.random.default_rng(seed)
    weight = rng.standard_normal((draft_vocab, 8)) @ rng.standard_normal((8, WIDTH))
    weight = (weight + 0.05 * rng.standard_normal(weight.shape)).astype(np.float32)
    config = head_config(
        "eagle3", own_head=True, draft_vocab_size=draft_vocab, head_rank=rank, head_candidates=candidates
    )
    tensors = random_tensors(config, seed) | {"lm_head.weight": weight}
    del tensors["candidate_head.down.weight"], tensors["candidate_head.up.weight"]
    head, params = build_head(config, tensors, {}, jnp.float32)
    return head, params, rng.standard_normal((50, WIDTH)).astype(np.float32)


@pytest.mark.parametrize("draft_vocab", [VOCAB, 40])
def test_candidates_have_exact_logits(draft_vocab):
    """The low-rank scores choose; the logits are the full head's, on the same target ids, and q lives on them alone."""
    head, params, rows = random_head(8, 6, draft_vocab=draft_vocab)
    full, few = head.full_scores(params, rows), head.scores(params, rows)
    assert few.logits.shape == (50, 6) and head.width == 6
    whole = np.asarray(full.spread(full.logits, VOCAB))
    ids = np.asarray(few.ids)
    np.testing.assert_allclose(few.logits, np.take_along_axis(whole, ids, axis=1), rtol=1e-5, atol=1e-4)
    # Those with the largest low-rank scores: near a head of rank 8, the largest logits.
    down, up = (np.asarray(params[name]) for name in ("down", "up"))
    columns = np.argsort(-(rows @ down.T @ up.T), axis=1)[:, :6]
    target_ids = np.asarray(params["ids"]) if draft_vocab < VOCAB else np.arange(VOCAB)
    np.testing.assert_array_equal(ids, np.sort(target_ids[columns], axis=1))
    q = few.spread(head.distribution(jax.tree.map(lambda x: x[None], few), settings(1.0))[0], VOCAB)
    want = np.exp(np.asarray(few.logits, np.float64))
    np.testing.assert_allclose(
        np.take_along_axis(np.asarray(q), ids, axis=1), want / want.sum(-1, keepdims=True), atol=1e-5
    )
    assert (np.count_nonzero(q, axis=1) <= 6).all()
    tokens, _ = few.top(3)
    assert (np.asarray(tokens) == np.asarray(few.best())[:, None])[:, 0].all()


def test_recall_grows_with_rank_and_candidates():
    found = {key: float(recall(*random_head(*key))) for key in ((1, 2), (8, 2), (8, 12))}
    assert found[1, 2] < found[8, 2] <= found[8, 12] == 1.0
    head, params = build_head(head_config("eagle3"), {}, toy.tiny()[1], jnp.float32)
    assert float(recall(head, params, jnp.ones((3, WIDTH)))) == 1.0


def test_svd_factors_are_the_truncated_decomposition():
    weight = np.random.default_rng(0).standard_normal((50, 12)).astype(np.float32)
    down, up = svd_factors(weight, 5)
    u, s, vt = np.linalg.svd(weight.astype(np.float64), full_matrices=False)
    np.testing.assert_allclose(up @ down, (u[:, :5] * s[:5]) @ vt[:5], atol=1e-4)
    with pytest.raises(ValueError, match=r"must be in 1..12 \(the head's width\), got 13"):
        svd_factors(weight, 13)


def test_given_factors_are_used_and_too_many_candidates_refused():
    config = head_config("eagle3", own_head=True, head_rank=4, head_candidates=6)
    tensors = random_tensors(config)
    _, params = build_head(config, tensors, {}, jnp.float32)
    np.testing.assert_array_equal(params["down"], tensors["candidate_head.down.weight"])
    np.testing.assert_array_equal(params["up"], tensors["candidate_head.up.weight"])
    with pytest.raises(ValueError, match="65 head candidates of a draft vocabulary of 64"):
        build_head(dataclasses.replace(config, head_candidates=65), tensors, {}, jnp.float32)


def test_bfloat16_logits_are_float32():
    head, params = build_head(
        head_config("eagle3"), {}, {"embedding": jnp.ones((VOCAB, WIDTH), jnp.bfloat16)}, jnp.bfloat16
    )
    assert isinstance(head, Head)
    assert head.scores(params, jnp.ones((2, WIDTH), jnp.bfloat16)).logits.dtype == jnp.float32


@pytest.mark.parametrize(("columns", "count"), [(100, 8), (4000, 8), (4097, 16), (4096, 4)])
def test_best_columns_are_those_of_a_sort(columns, count):
    scores = np.random.default_rng(columns).permutation(3 * columns).reshape(3, columns).astype(np.float32)
    scores[0, -count:] += 1e6  # all in the last, unfilled group
    found = np.sort(best_columns(jnp.asarray(scores), count), axis=1)
    np.testing.assert_array_equal(found, np.sort(np.argsort(-scores, axis=1)[:, :count], axis=1))


def test_a_tpu_selects_columns_with_its_own_operation():
    """Lowered for a TPU, the selection is one approximate top-k, and no group of columns is gathered."""
    scores = jax.ShapeDtypeStruct((3, 4096), jnp.float32)
    text = {
        platform: str(export.export(jax.jit(lambda s: best_columns(s, 8)), platforms=[platform])(scores).mlir_module())
        for platform in ("tpu", "cpu")
    }
    assert "ApproxTopK" in text["tpu"] and "gather" not in text["tpu"]
    assert "ApproxTopK" not in text["cpu"] and "gather" in text["cpu"]
    drawn = np.random.default_rng(0).normal(size=(3, 4096)).astype(np.float32)
    found = np.asarray(nearly_best_columns(jnp.asarray(drawn), 16))  # a CPU takes the best ones
    np.testing.assert_array_equal(np.sort(found, axis=1), np.sort(np.argsort(-drawn, axis=1)[:, :16], axis=1))
