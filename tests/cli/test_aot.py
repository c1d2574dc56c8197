"""`specjax aot`: what it refuses, and what it says about what failed; compiling itself needs the chips' compilers."""

import json
from pathlib import Path

import jax
import pytest

from specjax.cli import aot, profile_absent
from specjax.cli.main import main
from specjax.pallas_kernels.aot import CHIPS
from specjax.pallas_kernels.aot_attention import jobs


@pytest.fixture(autouse=True)
def compilers(monkeypatch):
    """As if they were installed."""
    monkeypatch.setattr(profile_absent, "compiler_missing", lambda name: None)


def test_without_the_compilers_nothing_begins(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(profile_absent, "compiler_missing", lambda name: "why" if name == "mi300x" else None)
    written = tmp_path / "aot.json"
    assert main(["aot", "--chips", "mi300x h100", "--json", str(written)]) == 2
    said = capsys.readouterr().err
    assert "the compilers for mi300x are not installed here: `make aot`" in said
    assert not written.exists()


def test_no_chips_are_not_all_of_them(capsys):
    assert main(["aot", "--chips", " "]) == 2
    assert "--chips names none; known: tpu-v5e" in capsys.readouterr().err


def test_whoever_stops_asking_ends_the_work(tmp_path, monkeypatch):
    """The compiler's process ends, and takes its temporary files along."""
    (tmp_path / "compiles.py").write_text(
        "import json, signal, sys, tempfile, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"
        "with tempfile.TemporaryDirectory(dir=sys.argv[1]) as folder:\n"
        "    print(json.dumps({'folder': folder}), flush=True)\n"
        "    time.sleep(600)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    rows = aot.in_a_process(str(tmp_path), module="compiles")
    folder = Path(next(rows)["folder"])
    assert folder.is_dir()
    rows.close()
    assert not folder.exists()


def test_unknown_chips_and_missing_folders_are_refused(capsys):
    assert main(["aot", "--chips", "tpu-v6e tpu-v99"]) == 2
    assert "unknown chips tpu-v99; known: tpu-v5e" in capsys.readouterr().err
    assert main(["aot", "--json", "/nowhere/aot.json"]) == 2


def test_a_failure_is_shown_and_is_the_exit_code(monkeypatch, capsys, tmp_path):
    good = {"chip": "tpu-v6e", "job": "good", "compile_s": 1.5, "code_bytes": 2048, "ratio": 1.04}
    bad = {"chip": "tpu-v6e", "job": "bad", "error": "MosaicError: no such layout"}
    monkeypatch.setattr(
        aot, "in_a_process", lambda chip, *options: iter([good] if options[-1:] == ("0",) else [] if options else [bad])
    )
    written = tmp_path / "aot.json"
    assert main(["aot", "--chips", "tpu-v6e", "--json", str(written)]) == 1
    said = capsys.readouterr().out
    assert "1.04" in said
    assert "MosaicError: no such layout" in said
    found = json.loads(written.read_text())
    assert found["rows"] == [bad, good]  # kernels, then whole rounds
    assert found["versions"]["jax"] == jax.__version__
    monkeypatch.setattr(aot, "in_a_process", lambda chip, *options: iter([good]))
    assert main(["aot", "--chips", "tpu-v6e,tpu-7x"]) == 0


def test_what_is_done_is_kept_when_the_rest_is_interrupted(monkeypatch, tmp_path):
    written, first = tmp_path / "aot.json", {"chip": "h100", "job": "first", "compile_s": 1.0}

    def compiles(chip, *options):
        yield first
        raise KeyboardInterrupt

    monkeypatch.setattr(aot, "in_a_process", compiles)
    with pytest.raises(KeyboardInterrupt):
        aot.Aot(chips="h100", json=str(written)).run()
    assert json.loads(written.read_text())["rows"] == [first]
    assert [path.name for path in tmp_path.iterdir()] == ["aot.json"]


def test_kernels_and_rounds_by_name(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(aot, "in_a_process", lambda chip, *options: asked.append((chip, *options)) or iter([]))
    chips = ("aot", "--chips", "mi300x h100")
    assert main([*chips]) == 0
    rounds = [("h100", "--round", str(number)) for number in range(4)]
    assert asked == [("mi300x",), ("h100",), *rounds]  # XLA compiles for no AMD GPU that is not there
    asked.clear()
    assert main([*chips, "--what", "rounds"]) == 0
    assert asked == rounds
    asked.clear()
    assert main([*chips, "--what", "kernels", "--short"]) == 0
    assert asked == [("mi300x", "--short"), ("h100", "--short")]
    for wrong, message in ((["--what", "steps"], "got 'steps'"), (["--what", "rounds", "--short"], "kernels alone")):
        assert main([*chips, *wrong]) == 2
        assert message in capsys.readouterr().err


def test_a_compiler_that_is_missing_is_a_row_with_its_message(monkeypatch):
    monkeypatch.setattr(aot.sys, "executable", "/bin/false")
    (row,) = aot.in_a_process("tpu-v6e", "--short")
    assert row["chip"] == "tpu-v6e" and "error" in row


@pytest.mark.parametrize("short", [True, False])
def test_jobs_are_named_apart(short):
    names = [job.name for job in jobs(short)]
    assert len(set(names)) == len(names)
    assert all(chip.name == name for name, chip in CHIPS.items())
