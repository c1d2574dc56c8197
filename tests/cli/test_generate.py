"""`specjax generate`: what goes to stdout, and nothing else does."""

import io
import json
import sys

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support import checkpoints, tables
from support.text import byte_level

from specjax.cli import flags
from specjax.cli.main import main

TOP = ["text", "token_ids", "finish_reason", "usage", "spec", "timing"]


def test_text(engines, capsys):
    assert main(["generate", "say hello", "--drafter", "ngram"]) == 0
    out, err = capsys.readouterr()
    assert out == "hello\n"
    assert "3 + 5 tokens" in err
    assert engines.made[0].run.drafter.kind == "ngram"


def test_json(engines, capsys):
    assert main(["generate", "say hello", "--json", "--max-tokens", "4"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == TOP
    assert found["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    assert list(found["spec"]) == ["rounds", "drafted", "accepted", "acceptance_length", "per_position"]
    assert found["timing"] == {"prefill_s": 0.5, "decode_s": 0.03, "tokens_per_s": pytest.approx(3 / 0.03)}
    assert (found["text"], found["finish_reason"]) == ("hell", "length")


def test_json_with_logprobs(engines, capsys):
    main(["generate", "say hi", "--json", "--logprobs", "1"])
    found = json.loads(capsys.readouterr().out)
    assert list(found) == [*TOP, "logprobs"]
    assert found["logprobs"][0] == {"token": ord("h"), "logprob": -0.5, "rank": 1, "top": [[ord("h"), -0.5]]}


def test_explain(engines, capsys):
    assert main(["generate", "say hi", "--drafter", "auto", "--explain"]) == 0
    out, err = capsys.readouterr()
    assert out == "hi\n"
    assert "12 rounds, now eagle3 3x4, 12 rows" in err
    assert "time of a round: off by 5.0% in the median" in err
    assert "rounds by reason: best 30, scores 10" in err
    assert "ngram said and was right (drafts): 0.50 -> 0.41 (12)" in err
    assert "acceptance: ngram 0.031" in err
    assert "host 0.80% of the time of rounds (decide 0.25%, fit 0.05%, learn 0.50%)" in err
    assert "trials and shadow drafts 0.50%" in err
    assert "14 changes of shape, the newest 12" in err
    assert err.count("round 3: plain -> ngram x5 (trial)") == 12
    assert main(["generate", "say hi", "--drafter", "ngram", "--explain"]) == 2
    assert "drafter 'ngram' has none" in capsys.readouterr().err


def test_logprobs_are_for_json(engines, capsys):
    assert main(["generate", "say hi", "--logprobs", "1"]) == 2
    assert "add --json" in capsys.readouterr().err
    assert not engines.made


def test_stdin_that_is_no_text(engines, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"say \xff\xfe"), encoding="utf-8"))
    assert main(["generate", "-"]) == 2
    assert "stdin is not UTF-8" in capsys.readouterr().err
    assert not engines.made


def test_streamed_text_is_the_text(engines, capsys):
    assert main(["generate", "say hello", "--stream"]) == 0
    assert capsys.readouterr().out == "hello\n"
    assert not engines.made[0].asked  # `stream`, not `generate`, has answered


def test_stdin(engines, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("say there"))
    assert main(["generate", "-", "--raw"]) == 0
    assert capsys.readouterr().out == "there\n"
    assert engines.made[0].asked == [["say there"]]


def test_prompts_one_object_a_line_in_order(engines, capsys, tmp_path):
    path = tmp_path / "set.jsonl"
    path.write_text('{"turns": ["say one", "say two"]}\n{"prompt": "say three"}\n')
    assert main(["generate", "--prompts", str(path), "--json", "--batch", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = [json.loads(line) for line in lines]
    assert [(one["text"], one["line"], one["turn"]) for one in found] == [("one", 1, 1), ("two", 1, 2), ("three", 2, 1)]
    assert engines.made[0].run.batch == 4


@pytest.mark.parametrize(
    "argv",
    [
        ["--drafter", "./some/head"],  # what it holds is found out later
        ["--drafter", "mtp"],
        ["--speculative-config", '{"method": "eagle3", "model": "x"}'],
        ["--drafter", "hybrid", "-o", "drafter.model=./some/head"],
    ],
)
def test_no_probe(argv, engines):
    assert main(["generate", "say hi", *argv, "--no-probe"]) == main(["generate", "say hi", *argv]) == 0
    drafters = [engine.run.drafter for engine in engines.made]
    without, by_default = (drafter.model if drafter.kind == "hybrid" else drafter for drafter in drafters)
    assert without.probe is False and by_default.probe in (None, True)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "give a prompt, or --prompts"),
        (["hi", "--prompts", "x.jsonl"], "give a prompt, or --prompts"),
        (["hi", "--stream", "--json"], "--stream shows one text"),
        ([""], "the prompt is empty"),
        (["hi", "--temperature", "-1"], "temperature"),
        (["hi", "--drafter", "ngrm"], "did you mean 'ngram'"),
        (["hi", "-o", "drafter.k=3", "--drafter", "ngram"], "unknown key 'drafter.k'"),
        (["hi", "--drafter", "ngram", "--speculative-config", "{}"], "both name a drafter"),
        (["hi", "--drafter", "ngram", "--no-probe"], "--no-probe is for learned drafters"),
        (["hi", "--metrics", "nowhere/out.prom"], "cannot write nowhere/out.prom: its folder does not exist"),
        (["hi", "--metrics", "/"], "cannot write /: it is a folder"),
    ],
)
def test_refused_before_anything_loads(argv, words, engines, capsys):
    assert main(["generate", *argv]) == 2
    out, err = capsys.readouterr()
    assert (out, words in err, engines.made) == ("", True, [])


def test_a_drafters_path_takes_its_own_options(engines, tmp_path):
    sample = next(s for s in checkpoints.samples() if s.format == "eagle3-specforge")
    head = sample.copy().write(tmp_path / "head")
    assert main(["generate", "hi", "--drafter", str(head), "-o", "drafter.topk=2", "-o", "drafter.rows=6"]) == 0
    drafter = engines.made[0].run.drafter
    assert (drafter.kind, drafter.model, drafter.topk, drafter.rows) == ("eagle3", str(head), 2, 6)


def test_metrics_are_those_of_the_answers(monkeypatch, capsys, tmp_path):
    """A tiny engine of its own in place of the stand-in: what it wrote is what it answered."""
    engine = tables.engine(drafts=tables.scripts([[0] * 40], 3), tokenizer=byte_level([b"a", b"b"]))
    engine.reset()
    monkeypatch.setattr(engine, "encode", lambda prompt, *, raw=False: [1, 0, 1])
    monkeypatch.setattr(flags, "load_engine", lambda run, *, quiet, check: engine)
    path = tmp_path / "out.prom"
    argv = ["generate", "hi", "--metrics", str(path), "--max-tokens", "20"]
    assert main([*argv, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    found = {
        sample.name: sample
        for family in text_string_to_metric_families(path.read_text())
        for sample in family.samples
        if set(sample.labels) == {"engine"}
    }
    assert {sample.labels["engine"] for sample in found.values()} == {engine.drafter.kind}
    assert found["specjax_generated_tokens_total"].value == len(answer["token_ids"]) == 20
    assert found["specjax_accepted_tokens_total"].value == answer["spec"]["accepted"] > 0
    assert found["specjax_request_rounds_total"].value == answer["spec"]["rounds"]
    assert found["specjax_decode_tokens_per_second"].value > 0
    assert main([*argv, "--stream"]) == 0
    assert "specjax_generated_tokens_total{engine=" in path.read_text()
    assert engine.counters.tokens == 40
    assert list(tmp_path.iterdir()) == [path]


def test_a_prompt_that_the_engine_would_refuse_is_refused_before_anything_is_compiled(engines, capsys, tmp_path):
    assert main(["generate", "this is far too long"]) == 2
    assert "the prompt has 9000 tokens" in capsys.readouterr().err
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "short"}\n\n{"turns": ["far too long"]}\n')
    for command in (["generate", "--prompts", str(path)], ["bench", "--prompts", str(path)]):
        assert main(command) == 2
        out, err = capsys.readouterr()
        assert "line 3: the prompt has 9000 tokens" in err and not out
    assert len(engines.made) == 3 and engines.compiled == 0
