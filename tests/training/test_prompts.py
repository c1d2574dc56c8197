"""Which prompts enter a corpus, and which never do."""

import json
from pathlib import Path

import pytest

from specjax.cli import prompts as prompt_sets
from specjax.training import stems
from specjax.training.prompts import (
    LOOP_REPEATS,
    LOOP_TOKENS,
    MAX_PERIOD,
    LoopWatch,
    digest,
    fault,
    held_out,
    normalise,
    refuse_benchmarks,
)

CONFIGS = Path(__file__).parents[2] / "configs" / "prompts"


def test_duplicates_differ_in_case_spacing_and_punctuation_only():
    assert normalise("  What's  the\ntime?") == normalise("what s the TIME") != normalise("what is the time")
    assert digest(["Hi!", "Bye."]) == digest(["hi", "bye"]) != digest(["hi bye"])
    assert 0 <= digest(["x"]) < 2**63


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Write a haiku.", None),
        ("def f(x):\n\treturn x", None),
        ("Wie heißt die Hauptstadt von Österreich?", None),
        ("?!", "empty"),
        ("bell \x07", "unprintable"),
        ("cut \ufffd", "unprintable"),
        ("and so it goes on " * 8, "repetitive"),
        ("one two three four five six seven eight nine ten eleven twelve thirteen fourteen", None),
    ],
)
def test_filters(text, found):
    assert fault(text) == found


def first_loop(tokens) -> int | None:
    watch = LoopWatch()
    return next((i + 1 for i, token in enumerate(tokens) if watch.push(token)), None)


@pytest.mark.parametrize("period", [1, 2, 7, 8, 9, 31, MAX_PERIOD])
def test_a_loop_is_seen_when_it_is_one(period):
    """At its fourth repeat, and not before its 32nd token; whatever stands before it."""
    before = list(range(1000, 1037))
    loop = list(range(period)) * 40
    assert first_loop(before + loop) == len(before) + max(LOOP_REPEATS * period, LOOP_TOKENS)


def test_no_loop():
    assert first_loop(list(range(MAX_PERIOD + 1)) * 10) is None
    assert first_loop([*range(20), 99] * 3) is None
    assert first_loop([x for n in range(60) for x in (5, 6, 100 + n)]) is None


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.parametrize(
    ("name", "record", "shown"),
    [
        ("HumanEval.jsonl", {"prompt": "x"}, "called 'HumanEval.jsonl'"),
        ("mt_bench_questions.jsonl", {"turns": ["x"]}, "called"),
        ("speed-bench_qualitative.jsonl", {"turns": ["x"]}, "called"),
        ("set.jsonl", {"task_id": "HumanEval/12", "prompt": "x"}, "line 2 says task_id 'HumanEval/12'"),
        ("set.jsonl", {"prompt": "x", "source": "openai/gsm8k"}, "source"),
        ("set.jsonl", {"prompt": "x", "canonical_solution": "y", "entry_point": "f"}, "canonical_solution"),
        ("set.jsonl", {"prompt": "x", "answer": "He pays 2 + 3.\n#### 5"}, "####"),
        ("set.jsonl", {"question_id": 81, "category": "writing", "turns": ["x", "y"]}, "question_id"),
    ],
)
def test_benchmarks_are_refused(tmp_path, name, record, shown):
    path = write(tmp_path / name, {"prompt": "an innocent line"}, record)
    with pytest.raises(ValueError, match="for judging drafters") as refused:
        refuse_benchmarks(path)
    assert shown in str(refused.value)


def test_other_sets_are_taken(tmp_path):
    records = [
        {"prompt": "Count to ten.", "category": "writing", "answer": "#### heading"},
        {"turns": ["What is gsm8k?"], "question_id": 7},
    ]
    refuse_benchmarks(write(tmp_path / "mine.jsonl", *records))
    for path in CONFIGS.glob("*.jsonl"):
        refuse_benchmarks(path)


def test_the_held_out_set():
    """Twelve prompts of each category, no two alike, none of them in the demonstration set."""
    found = prompt_sets.read(CONFIGS / "heldout.jsonl")
    by_category = {c.category: sum(d.category == c.category for d in found) for c in found}
    assert by_category == {"chat": 12, "code": 12, "summary": 12, "extraction": 12}
    turns = [turn for c in found for turn in c.turns]
    assert len(held_out(c.turns for c in found)) == len(turns)
    assert all(fault(turn) is None for turn in turns)
    demo = held_out(c.turns for c in prompt_sets.read(CONFIGS / "demo.jsonl"))
    assert demo.isdisjoint(held_out(c.turns for c in found))


def test_stems():
    """Every category comes up as often as its weight says; no stem ends in a space, which would split a word oddly."""
    assert sum(stems.WEIGHTS.values()) == 100 and stems.WEIGHTS.keys() == stems.STEMS.keys()
    every = {name: {h + t for h in heads for t in tails} for name, (heads, tails) in stems.STEMS.items()}
    drawn = [stems.stem(3, number) for number in range(4000)]
    assert not any(stem.endswith((" ", "\t")) for found in every.values() for stem in found)
    for name, found in every.items():
        only = found - set().union(*(other for key, other in every.items() if key != name))
        assert sum(stem in only for stem in drawn) / 40 == pytest.approx(stems.WEIGHTS[name], abs=3)
    assert drawn[:50] == [stems.stem(3, number) for number in range(50)]
    assert drawn[:50] != [stems.stem(4, number) for number in range(50)]
