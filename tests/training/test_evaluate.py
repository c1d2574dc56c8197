import numpy as np
from support.training import ORIGIN

from specjax.training.corpus import Corpus, Dialogue
from specjax.training.evaluate import Acceptance, ngram_acceptance
from specjax.training.packing import pack


def test_acceptance_ends_at_the_first_miss():
    hit = np.array([[1, 1, 0], [1, 0, 1], [0, 1, 1], [1, 1, 1]], bool)
    found = Acceptance.of(hit, np.array([True, True, True, False]))
    assert found.length == 1 + (2 + 1 + 0) / 3
    assert found.by_slot == (2 / 3, 1 / 2, 0.0)
    assert found.roots == 3


def test_lookup_along_a_text():
    tokens = np.array([1, 2, 3, 4, 9, 1, 2, 3, 4, 8], np.int32)
    corpus = Corpus([Dialogue(tokens=tokens, mask=np.arange(10) >= 5)], ORIGIN)
    found = ngram_acceptance(pack(corpus, 12), depth=3)
    # Roots 1 2 3 4 of the second half: after 1 nothing matches; "1 2" brings 3 4 9, "2 3" 4 9 1, "3 4" 9 1 2.
    assert found.roots == 4
    assert found.length == 1 + (0 + 2 + 1 + 0) / 4
