"""Drafters that come with specjax: found by target and family, and taken where a configuration names no other."""

import pytest

from specjax.config import ConfigError, LearnedConfig, drafter
from specjax.drafters.shipped import shipped
from specjax.engine.drafter import _folder


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """A folder with an MTP module and an EAGLE-3 head for a target."""
    monkeypatch.chdir(tmp_path)
    for family in ("mtp", "eagle3", "unfinished"):
        (tmp_path / "drafts" / "toy" / family).mkdir(parents=True)
        if family != "unfinished":
            (tmp_path / "drafts" / "toy" / family / "config.json").write_text("{}")
    return tmp_path


def learned(kind: str, **options) -> LearnedConfig:
    chosen = drafter({"kind": kind, **options})
    assert isinstance(chosen, LearnedConfig)
    return chosen


def test_found_by_family(clone):
    assert list(shipped("toy")) == ["eagle3", "mtp"]
    assert shipped("another") == {}


def test_a_bare_kind_is_the_shipped_drafter(clone):
    assert _folder(learned("eagle3"), "toy").resolve() == (clone / "drafts/toy/eagle3").resolve()
    assert _folder(learned("mtp", model=str(clone / "drafts/toy/eagle3")), "toy") == clone / "drafts/toy/eagle3"


def test_what_does_not_come_with_specjax_is_refused_with_what_does(clone):
    with pytest.raises(ConfigError, match=r"no dspark comes with specjax for toy \(those that do: eagle3, mtp\)"):
        _folder(learned("dspark"), "toy")
    with pytest.raises(ConfigError, match=r"for another \(none does\); `specjax train run` makes one"):
        _folder(learned("eagle3"), "another")
