import numpy as np
import pytest

from specjax.training.vocabulary import Chooser


def test_a_step_scores_frequent_tokens_its_own_and_a_sample():
    counts = np.zeros(1000)
    counts[10:20] = 5
    chooser = Chooser(counts=counts, size=100)
    tokens = np.array([[700, 701], [700, 3]])
    columns = chooser.columns(tokens, np.random.default_rng(0))
    ids = np.asarray(columns.ids)
    assert len(ids) == 100 and (np.diff(ids) > 0).all()
    assert set(range(10, 20)) | {3, 700, 701} <= set(ids.tolist())
    assert ids[np.asarray(columns.find(tokens))].tolist() == tokens.tolist()
    certain = np.isin(ids, [*range(10, 20), 3, 700, 701])
    assert (columns.offset[certain] == 0).all()


def test_the_partition_function_is_right_on_average():
    rng = np.random.default_rng(0)
    logits = rng.standard_normal(500)
    chooser = Chooser(counts=rng.random(500), size=60)
    sums = []
    for step in range(300):
        columns = chooser.columns(np.array([[1, 2, 3]]), np.random.default_rng(step))
        sums.append(np.exp(logits[columns.ids] + columns.offset).sum())
    sampled = np.mean(sums)
    assert abs(sampled / np.exp(logits).sum() - 1) < 3 * np.std(sums) / np.sqrt(300) / sampled + 1e-3
    uncorrected = np.exp(logits[columns.ids]).sum()
    assert uncorrected < 0.5 * sampled


def test_a_small_vocabulary_is_scored_whole():
    columns = Chooser(counts=np.ones(8), size=8).columns(np.array([[7]]), np.random.default_rng(0))
    assert columns.ids.tolist() == list(range(8)) and columns.offset is None


def test_a_batch_with_too_many_tokens_is_refused():
    with pytest.raises(ValueError, match="raise vocabulary"):
        Chooser(counts=np.ones(100), size=20).columns(np.arange(50)[None], np.random.default_rng(0))
