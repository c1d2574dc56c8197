"""Drafters by name."""

import pytest

from specjax.drafters.ngram import NGram
from specjax.drafters.registry import create, kinds
from specjax.drafters.suffix import Suffix


def test_options_reach_the_drafter():
    assert create("ngram", {"prompt_lookup_max": 7}) == NGram(prompt_lookup_max=7)
    assert create("suffix", {"ring": 0, "min_token_prob": 0.3}) == Suffix(ring=0, min_token_prob=0.3)


@pytest.mark.parametrize("kind", ["ngram", "suffix"])
def test_every_kind_has_defaults_and_bears_its_name(kind):
    drafter = create(kind)
    assert drafter.kind == kind
    assert drafter.shape.kind == kind
    assert hash(drafter) == hash(create(kind))


def test_unknown_kind():
    with pytest.raises(ValueError, match=r"unknown drafter 'n-gram', did you mean 'ngram'\? Valid: .*ngram, suffix"):
        create("n-gram")
    with pytest.raises(ValueError, match="unknown drafter 'zzz'; Valid: " + ", ".join(sorted(kinds()))):
        create("zzz")


def test_unknown_options_are_all_named():
    with pytest.raises(ValueError, match=r"no option 'max_dept', did you mean 'max_depth'\?.*; .*no option 'kind'"):
        create("suffix", {"max_dept": 3, "kind": "ngram"})


def test_an_option_without_a_default_must_be_given():
    with pytest.raises(ValueError, match="drafter 'draft_model' needs the option 'model'"):
        create("draft_model")


@pytest.mark.parametrize("name", ["kind", "taps", "wants_hidden"])
def test_what_a_drafter_is_cannot_be_set(name):
    with pytest.raises(ValueError, match=f"has no option '{name}'"):
        create("draft_model", {"model": None, name: ()})


def test_the_drafters_own_checks_apply():
    with pytest.raises(ValueError, match="prompt_lookup_min"):
        create("ngram", {"prompt_lookup_min": 0})
