"""`specjax aot`: what it refuses, and what it says about what failed; compiling itself needs the chips' compilers."""

import json

import pytest

from specjax.cli import aot
from specjax.cli.main import main
from specjax.pallas_kernels.aot import CHIPS, tpu_jobs


def test_unknown_chips_and_missing_folders_are_refused(capsys):
    assert main(["aot", "--chips", "tpu-v6e tpu-v99"]) == 2
    assert "unknown chips tpu-v99; known: tpu-v5e" in capsys.readouterr().err
    assert main(["aot", "--json", "/nowhere/aot.json"]) == 2


def test_a_failure_is_shown_and_is_the_exit_code(monkeypatch, capsys, tmp_path):
    good = {"chip": "tpu-v6e", "job": "good", "compile_s": 1.5, "code_bytes": 2048, "ratio": 1.04}
    bad = {"chip": "tpu-v6e", "job": "bad", "error": "MosaicError: no such layout"}
    monkeypatch.setattr(aot, "in_a_process", lambda chip, *options: iter([good] if "--steps" in options else [bad]))
    written = tmp_path / "aot.json"
    assert main(["aot", "--chips", "tpu-v6e", "--json", str(written)]) == 1
    said = capsys.readouterr().out
    assert "1.04" in said
    assert "MosaicError: no such layout" in said
    assert json.loads(written.read_text()) == [bad, good]  # kernels, then whole rounds
    monkeypatch.setattr(aot, "in_a_process", lambda chip, *options: iter([good]))
    assert main(["aot", "--chips", "tpu-v6e,tpu-7x"]) == 0


def test_a_compiler_that_is_missing_is_a_row_with_its_message(monkeypatch):
    monkeypatch.setattr(aot.sys, "executable", "/bin/false")
    (row,) = aot.in_a_process("tpu-v6e", "--short")
    assert row["chip"] == "tpu-v6e" and "error" in row


@pytest.mark.parametrize("short", [True, False])
def test_jobs_are_named_apart(short):
    names = [job.name for job in tpu_jobs(short)]
    assert len(set(names)) == len(names)
    assert all(chip.name == name for name, chip in CHIPS.items())
