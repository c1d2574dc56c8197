"""`python -m specjax.cli.compiled` with a compiler that is made up: what it compiles, keeps and refuses."""

import json

import pytest

from specjax.cli import compiled as command
from specjax.costmodel import build, tables
from specjax.costmodel import compiled as costs
from specjax.costmodel.compiled import LAYERS, REQUESTS, ROWS, Samples

POINTS = len(REQUESTS) * len(ROWS) * len(LAYERS)


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """Files in a folder of their own, and a compiler whose times are linear; what it was asked for."""
    seen = []
    failing = set()

    def in_a_process(chip, given, module):
        for b, r, n in json.loads(given)["todo"]:
            if (b, r, n) in failing:
                yield {"chip": chip, "job": "pass", "error": "out of VMEM"}
                continue
            seen.append((b, r, n))
            yield {
                "requests": b,
                "rows": r,
                "layers": n,
                "us": 700.0 + 300.0 * n + b * r + 100.0 * (n == 32),
                "compile_s": 1.0,
            }

    seen_failing = type("Asked", (list,), {"failing": failing})()
    seen = seen_failing
    monkeypatch.setattr(command.aot, "in_a_process", in_a_process)
    monkeypatch.setattr(command, "versions", lambda: ("1.0", "2.0"))
    monkeypatch.setattr(costs, "file", lambda device, target: tmp_path / "samples" / device / f"{target}.json")
    monkeypatch.setattr(tables, "shipped", lambda device, target: tmp_path / "tables" / device / f"{target}.json")
    return seen


def test_compiles_writes_and_goes_on(asked, tmp_path, capsys, monkeypatch):
    argv = ["tpu-v6e", "--targets", "llama-3.1-8b"]
    assert command.main(argv) == 0
    assert len(asked) == POINTS
    assert f"{POINTS} of {POINTS}: 64 x 8 rows, 4 layers" in capsys.readouterr().err
    written = tables.Table.read(tmp_path / "tables" / "tpu-v6e" / "llama-3.1-8b.json")
    assert written.source() == "compiler"
    assert "libtpu 2.0, jax 1.0" in written.provenance.made_by
    assert command.main(argv) == 0
    assert len(asked) == POINTS  # all there
    assert command.main([*argv, "--check"]) == 0
    assert asked[POINTS:] == [(1, 1, 32)]
    assert "all 32 layers: 10401.0 µs; the line says -0.96%" in capsys.readouterr().err
    monkeypatch.setattr(command, "versions", lambda: ("1.0", "3.0"))  # another compiler's are not mixed in
    assert command.main(argv) == 0
    assert len(asked) == 2 * POINTS + 1


def test_what_was_compiled_before_an_interruption_is_kept(asked, monkeypatch):
    real, left = Samples.write, [3]

    def write(self, path):
        real(self, path)
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt

    monkeypatch.setattr(Samples, "write", write)
    with pytest.raises(KeyboardInterrupt):
        command.main(["tpu-v6e", "--targets", "llama-3.1-8b"])
    done = list(asked)
    assert len(done) == 3
    assert command.main(["tpu-v6e", "--targets", "llama-3.1-8b"]) == 0
    assert len(asked) == POINTS and len(set(asked)) == POINTS


def test_what_does_not_compile_is_the_exit_code_and_leaves_the_rest(asked, tmp_path, capsys):
    asked.failing.add((64, 8, 4))
    assert command.main(["tpu-v6e", "--targets", "llama-3.1-8b"]) == 1
    assert "out of VMEM" in capsys.readouterr().err
    written = tables.Table.read(tmp_path / "tables" / "tpu-v6e" / "llama-3.1-8b.json")
    assert written.verify.source(8, 8, 512) == "compiler"
    assert written.verify.source(64, 8, 512) == "roofline"


def test_refusals(asked, capsys):
    for argv, message in (
        (["tpu-v99"], "unknown tpu-v99; known: a100"),
        (["tpu-v6e", "--targets", "gpt"], "unknown gpt; known: smollm2-135m"),
        (["h100", "--targets", "qwen3-8b"], "h100 is no TPU"),
        (["tpu-v6e", "--targets", "qwen3-32b"], "qwen3-32b is split over"),
    ):
        assert command.main(argv) == 2
        assert message in capsys.readouterr().err
    assert not asked
    assert command.main(["tpu-v6e"]) == 0
    held = [s.target.name for s in build.setups() if s.device.name == "tpu-v6e" and s.count == 1]
    assert len(asked) == POINTS * len(held)
    assert "left out: qwen3-32b" in capsys.readouterr().err


def test_a_missing_compiler_is_said(monkeypatch, capsys):
    from importlib import metadata

    def version(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    assert command.main(["tpu-v6e", "--targets", "llama-3.1-8b"]) == 2
    assert "pip install 'specjax[tpu]'" in capsys.readouterr().err
