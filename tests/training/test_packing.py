import numpy as np
import pytest
from support.training import ORIGIN

from specjax.training.corpus import Corpus, Dialogue
from specjax.training.packing import pack, rows_of_step


def made(*lengths):
    """Dialogues of distinct tokens, the second half of each to be learned."""
    start = np.cumsum([1, *lengths])
    return Corpus(
        [
            Dialogue(tokens=np.arange(a, a + n, dtype=np.int32), mask=np.arange(n) >= n // 2)
            for a, n in zip(start, lengths, strict=False)
        ],
        ORIGIN,
    )


def test_every_dialogue_is_in_one_row_whole():
    corpus = made(5, 3, 7, 2, 4, 6, 1)
    packed = pack(corpus, 8)
    found = []
    for row in range(len(packed)):
        for number in range(1, packed.segments[row].max() + 1):
            span = packed.segments[row] == number
            assert packed.positions[row][span].tolist() == list(range(span.sum()))
            found.append((packed.tokens[row][span].tolist(), packed.mask[row][span].tolist()))
    want = [(corpus[i][0].tolist(), corpus[i][1].tolist()) for i in range(len(corpus))]
    assert sorted(found) == sorted(want)
    assert len(packed) == 4  # 28 tokens in rows of 8
    assert not packed.mask[packed.segments == 0].any()


def test_a_dialogue_longer_than_a_row_is_cut_at_its_end():
    packed = pack(made(11), 8)
    assert packed.tokens[0].tolist() == list(range(1, 9))


def test_ahead_stays_within_the_dialogue():
    packed = pack(made(4, 3), 8)  # [1 2 3 4 | 5 6 7 | pad], learned: 3 4, 6 7
    batch = packed.batch(np.array([0]))
    assert np.asarray(batch.ahead(1))[0].tolist() == [False, True, True, False, True, True, False, False]
    assert np.asarray(batch.ahead(2))[0].tolist() == [True, True, False, False, True, False, False, False]


def test_the_whole_of_a_text_can_be_learned_and_no_padding():
    packed = pack(made(4, 3), 8)
    whole = packed.whole()
    assert whole.mask[0].tolist() == [True] * 7 + [False]
    assert whole.digest() != packed.digest()
    np.testing.assert_array_equal(whole.tokens, packed.tokens)


@pytest.mark.parametrize(("count", "batch"), [(10, 4), (12, 4), (3, 4)])
def test_an_epoch_takes_no_row_twice_unless_there_are_too_few(count, batch):
    steps = max(count // batch, 1)
    for epoch in range(2):
        rows = np.concatenate([rows_of_step(count, batch, epoch * steps + i, seed=1) for i in range(steps)])
        assert len(rows) == steps * batch
        assert len(np.unique(rows)) == min(steps * batch, count)
    assert rows_of_step(count, batch, 0, 1).tolist() != rows_of_step(count, batch, steps, 1).tolist()


def test_a_corpus_without_a_token_to_learn_is_refused():
    corpus = made(4)
    corpus.dialogues[0].mask[:] = False
    with pytest.raises(ValueError, match="no token to learn"):
        pack(corpus, 8)
