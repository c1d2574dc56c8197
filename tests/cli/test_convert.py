"""`specjax convert`: what is handed on to `specjax.weights.convert`."""

from pathlib import Path

import jax.numpy as jnp
import pytest

from specjax.cli.main import main
from specjax.weights import convert


@pytest.fixture
def calls(monkeypatch):
    made = []

    def record(source, out_dir, *, format, dtype):
        made.append((source, out_dir, format, dtype))
        return Path(out_dir)

    monkeypatch.setattr(convert, "convert", record)
    return made


def test_arguments(calls, capsys):
    assert main(["convert", "a.gguf", "out", "--format", "orbax", "--dtype", "bfloat16"]) == 0
    assert main(["convert", "a.gguf", "out"]) == 0
    assert calls == [("a.gguf", "out", "orbax", jnp.bfloat16), ("a.gguf", "out", "hf", None)]
    assert capsys.readouterr() == ("", "wrote out\nwrote out\n")


def test_a_fault_leaves_no_output_and_exits_with_2(tmp_path, capsys):
    """C16, at the command line: the library's own tests cover every kind of damage."""
    assert main(["convert", str(tmp_path / "none"), str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.startswith("error: ")
    assert not (tmp_path / "out").exists()
