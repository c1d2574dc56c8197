"""Prompt sets: what a line may hold, and turns that follow the model's answers."""

import json
from pathlib import Path

import pytest

from specjax.cli import prompts
from specjax.cli.prompts import Conversation
from specjax.sampling import SamplingParams

DEMO = Path(__file__).parents[2] / "configs" / "prompts" / "demo.jsonl"


def write(folder: Path, *records) -> Path:
    path = folder / "set.jsonl"
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records))
    return path


def test_demo_set():
    found = prompts.read(DEMO)
    assert {c.category for c in found} == {"chat", "code", "copying", "extraction", "story"}
    assert any(len(c.turns) == 2 for c in found)


def test_forms(tmp_path):
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}
    path = write(
        tmp_path,
        {"question_id": 7, "category": "qa", "turns": ["a", "", "b", "  "], "reference": []},
        "",
        {"messages": [system, user]},
        {"prompt": "c"},
    )
    assert prompts.read(path) == [
        Conversation(("a", "b"), category="qa", line=1),
        Conversation(("Hi",), before=(system,), line=3),
        Conversation(("c",), line=4),
    ]


def test_all_faulty_lines_are_listed(tmp_path):
    path = write(
        tmp_path,
        {"turns": ["fine"]},
        "{",
        "[1]",
        {"turns": "text"},
        {"turns": ["", " "]},
        {"category": "x"},
        {"turns": ["a"], "prompt": "b"},
        {"messages": [{"role": "assistant", "content": "x"}]},
        {"messages": [{"role": "user"}]},
        {"prompt": "x", "category": 3},
        {"prompt": "x", "max_tokens": 3},
    )
    with pytest.raises(ValueError, match="holds no text") as caught:
        prompts.read(path)
    lines = str(caught.value).splitlines()
    assert [line.split(":")[1] for line in lines] == [str(n) for n in range(2, 12)]


def test_no_prompts(tmp_path):
    with pytest.raises(ValueError, match="holds no prompts"):
        prompts.read(write(tmp_path, ""))
    with pytest.raises(ValueError, match="cannot read the prompts"):
        prompts.read(tmp_path / "none.jsonl")


def test_turns_follow_the_answers(engines):
    from specjax.cli import flags
    from specjax.config import RunConfig

    engine = flags.load_engine(RunConfig(), quiet=True)
    talks = [Conversation(("say one", "say two")), Conversation(("say three",), ({"role": "system", "content": "s"},))]
    results = prompts.answer(engine, talks, SamplingParams())
    assert [[r.text for r in turns] for turns in results] == [["one", "two"], ["three"]]
    first, second = engine.asked
    assert [[m["content"] for m in p] for p in first] == [["say one"], ["s", "say three"]]
    assert [(m["role"], m["content"]) for m in second[0]] == [
        ("user", "say one"),
        ("assistant", "one"),
        ("user", "say two"),
    ]


def test_raw_has_no_turns(engines):
    with pytest.raises(ValueError, match="raw prompts have no turns"):
        prompts.answer(None, [Conversation(("a", "b"))], SamplingParams(), raw=True)
