"""`specjax train data` and `specjax train show`, with a target whose words are random letters."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
from support import chat, toy

from specjax.cli import flags
from specjax.cli.main import main
from specjax.cli.train_data import Data
from specjax.training.corpus import Corpus, Origin
from specjax.weights import load

ORIGIN = Origin(target="letters", target_digest="a", tokenizer_digest="b", vocab_size=toy.VOCAB)


@pytest.fixture(scope="module")
def engine():
    target, _ = toy.lookup_target(toy.VOCAB)
    return toy.engine(target=(target, chat.babble()), tokenizer=chat.letters(), batch=2, context=256)


@pytest.fixture
def run(engine, monkeypatch, tmp_path):
    """Runs a command of `specjax train` on that target; `run.asked` are the configurations of the engines it loads."""
    (tmp_path / "heldout.jsonl").write_text('{"turns": ["what is held out?"]}\n')
    monkeypatch.chdir(tmp_path)
    asked = []
    checkpoint = SimpleNamespace(tokenizer=chat.letters())
    monkeypatch.setattr(load, "load_checkpoint", lambda name: checkpoint)
    monkeypatch.setattr(Origin, "of", lambda checkpoint: ORIGIN)
    monkeypatch.setattr(flags, "load_engine", lambda config, quiet: asked.append(config) or engine)

    def command(*argv):
        return main(["train", *argv])

    command.asked = asked
    return command


DATA = ("data", "--out", "c", "--held-out", "heldout.jsonl", "--context", "200", "--answer-tokens", "40")


def test_a_corpus_and_how_fast_it_was_made(run, capsys):
    assert run(*DATA, "--tokens", "60", "--prompt-tokens", "60", "--batch", "2", "--seed", "5") == 0
    out, err = capsys.readouterr()
    assert not out
    corpus = Corpus.open("c", ORIGIN)
    assert corpus.answer_tokens >= 60
    assert f"c holds {corpus.answer_tokens:,} answer tokens in {len(corpus)} dialogues" in err
    assert "tokens/s" in err and "prompts dropped" in err
    assert (run.asked[0].target, run.asked[0].batch, run.asked[0].context) == ("smollm2-135m", 2, 200)

    assert run(*DATA, "--tokens", "60", "--prompt-tokens", "60", "--seed", "5") == 0
    assert len(run.asked) == 1  # it was done already: no engine is loaded again


def test_given_prompts_that_do_not_suffice(run, capsys, tmp_path):
    (tmp_path / "mine.jsonl").write_text('{"prompt": "say it"}\n{"prompt": "What is held out"}\n{"prompt": "do it"}\n')
    assert run(*DATA, "--tokens", "9999", "--prompts", "mine.jsonl", "--temperatures", "0.5") == 1
    err = capsys.readouterr().err
    assert "1 held out" in err and "used up before 9,999" in err
    assert [(d.number, d.temperature) for d in Corpus.open("c").dialogues] == [(0, 0.5), (2, 0.5)]


def test_ctrl_c_keeps_what_is_finished(run, capsys, monkeypatch, engine):
    step, rounds = engine.step, 0

    def interrupted():
        nonlocal rounds
        rounds += 1
        if rounds == 150:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(engine, "step", interrupted)
    command = (*DATA, "--tokens", "300", "--prompt-tokens", "60")
    assert run(*command) == 130
    assert "the same command goes on" in capsys.readouterr().err
    kept = len(Corpus.open("c"))
    assert kept > 0
    assert run(*command) == 0
    assert "going on" in capsys.readouterr().err
    assert len(Corpus.open("c")) > kept


def test_refused_before_anything_is_loaded(run, capsys, tmp_path, monkeypatch):
    (tmp_path / "gsm8k.jsonl").write_text('{"prompt": "x"}\n')
    cases = {
        ("--tokens", "0"): "--tokens must be at least 1",
        ("--tokens", "9", "--prompts", "gsm8k.jsonl"): "for judging drafters",
        ("--tokens", "9", "--temperatures", "-1"): "temperature must be",
        ("--tokens", "9", "--drafter", "nope"): "unknown drafter 'nope'",
    }
    for argv, message in cases.items():
        assert run(*DATA, *argv) == 2
        assert message in capsys.readouterr().err
    assert Path(Data(out="c", tokens=9)._held_out()).is_file()  # elsewhere it is the one that comes with specjax
    monkeypatch.setattr("specjax.__file__", str(tmp_path / "lib" / "specjax" / "__init__.py"))
    assert run("data", "--out", "c", "--tokens", "9") == 2
    assert "--held-out" in capsys.readouterr().err
    assert not run.asked and not (tmp_path / "c").exists()


def test_show(run, capsys):
    run(*DATA, "--tokens", "60", "--prompt-tokens", "60")
    capsys.readouterr()
    assert run("show", "c", "--dialogues", "3") == 0
    out = capsys.readouterr().out
    corpus = Corpus.open("c")
    assert out.startswith(f"{len(corpus)} dialogues, {corpus.tokens} tokens, {corpus.answer_tokens} of them answers\n")
    assert "by temperature: 0: " in out and "recipe: seed 0" in out
    shown = out.split("--- dialogue ")[1:]
    assert len(shown) == min(3, len(corpus))
    by_number = {d.number: d for d in corpus.dialogues}
    for part in shown:
        d = by_number[int(part.split(",")[0])]
        said = chat.letters().decode(d.tokens[d.mask].tolist(), skip_special_tokens=False)
        assert f"<u>a:<<{said}>>" in part


def test_show_finds_held_out_prompts(run, capsys, tmp_path):
    (tmp_path / "mine.jsonl").write_text('{"prompt": "say it"}\n{"prompt": "do it"}\n')
    (tmp_path / "later.jsonl").write_text('{"turns": ["DO it!", "and then?"]}\n{"turns": ["more"]}\n')
    run(*DATA, "--tokens", "9999", "--prompts", "mine.jsonl")
    assert run("show", "c", "--held-out", "heldout.jsonl") == 0
    assert "held out: 0 of its prompts" in capsys.readouterr().out
    assert run("show", "c", "--held-out", "later.jsonl") == 1
    assert "held out: 1 of its prompts are among the 2 of later.jsonl" in capsys.readouterr().out


def test_another_target_is_refused(run, capsys, monkeypatch):
    run(*DATA, "--tokens", "20", "--prompt-tokens", "60")
    monkeypatch.setattr(Origin, "of", lambda checkpoint: dataclasses.replace(ORIGIN, target_digest="z"))
    assert run(*DATA, "--tokens", "20", "--prompt-tokens", "60") == 2
    assert "was written by letters" in capsys.readouterr().err
    assert Corpus.open("c").origin == ORIGIN


def test_commands_are_listed(capsys):
    with pytest.raises(SystemExit) as left:
        main(["train", "--help"])
    assert left.value.code == 0
    out = capsys.readouterr().out
    assert "• data" in out and "• show" in out
    with pytest.raises(SystemExit):
        main(["train", "show", "--help"])
    assert "  specjax train show corpus" in capsys.readouterr().out
