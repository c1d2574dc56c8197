"""The prompt files of `configs/prompts`: all of them are read, and a prompt stands in one of them only."""

import itertools
from pathlib import Path

import pytest

from specjax.cli import prompts
from specjax.training.prompts import fault, held_out

FOLDER = Path(__file__).parents[2] / "configs" / "prompts"
FILES = sorted(FOLDER.glob("*.jsonl"))
CLASSES = FOLDER / "classes.jsonl"


def test_the_files_are_found():
    assert {path.name for path in FILES} >= {"classes.jsonl", "demo.jsonl", "heldout.jsonl"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_line_is_a_named_conversation(path):
    """Read without a fault, each with a category, no turn twice, none that is empty or unprintable."""
    found = prompts.read(path)
    assert all(c.category != prompts.UNNAMED and not c.before for c in found)
    turns = [turn for c in found for turn in c.turns]
    assert len(held_out(c.turns for c in found)) == len(turns)
    assert [turn for turn in turns if fault(turn)] == []


@pytest.mark.parametrize(
    "pair", list(itertools.combinations(FILES, 2)), ids=lambda pair: "-".join(p.stem for p in pair)
)
def test_no_prompt_stands_in_two_files(pair):
    """Up to case, spacing and punctuation, so that what is tuned on one file can be judged on another."""
    first, second = (held_out(c.turns for c in prompts.read(path)) for path in pair)
    assert first & second == set()


def test_the_classes():
    """Sixteen prompts of one turn for each of five kinds of answer, kind after kind."""
    found = prompts.read(CLASSES)
    assert all(len(c.turns) == 1 for c in found)
    order = [(category, len(list(group))) for category, group in itertools.groupby(c.category for c in found)]
    assert order == [(category, 16) for category in ("chat", "code", "copying", "story", "extraction")]
