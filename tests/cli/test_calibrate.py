"""`specjax calibrate`: what is refused before anything is loaded, and where the table goes."""

import types

import pytest

from specjax.cli import flags
from specjax.cli.main import main
from specjax.engine import calibrate, calibrate_kernels, pricing
from specjax.pallas_kernels import tuning


def test_refusals_load_nothing(engines, capsys, tmp_path):
    assert main(["calibrate"]) == 2
    assert "name them with --drafters" in capsys.readouterr().err
    assert main(["calibrate", "--drafters", "ngram", "--out", str(tmp_path / "none" / "t.json")]) == 2
    assert "its folder does not exist" in capsys.readouterr().err
    assert main(["calibrate", "--drafters", "ngram", "--no-probe"]) == 2
    assert "--no-probe is for learned drafters" in capsys.readouterr().err
    assert main(["calibrate", "--drafters", "ngrams"]) == 2
    assert "did you mean 'ngram'" in capsys.readouterr().err
    assert not engines.made


@pytest.mark.parametrize("named", [True, False])
def test_the_table_is_written_where_it_is_found(engines, capsys, tmp_path, monkeypatch, named):
    written = []
    axes = ((1.0,), (1.0, 2.0), (64.0,))
    table = types.SimpleNamespace(verify=types.SimpleNamespace(axes=axes), draft={"one": 1}, write=written.append)
    monkeypatch.setattr(calibrate, "calibrate", lambda engine, wanted, partial, report: table)
    monkeypatch.setattr(calibrate, "table_path", lambda wanted, batch: tmp_path / f"b{batch}.json")
    monkeypatch.setattr(pricing, "provenance", lambda *about: None)
    real = flags.load_engine

    def with_target(run, *, quiet):
        engine = real(run, quiet=quiet)
        engine.target = types.SimpleNamespace(config=None)
        return engine

    monkeypatch.setattr(flags, "load_engine", with_target)
    out = tmp_path / "mine.json"
    assert main(["calibrate", "--drafters", "ngram", "--batch", "2", *(["--out", str(out)] if named else [])]) == 0
    assert written == [out if named else tmp_path / "b2.json"]
    found = capsys.readouterr()
    assert found.out.strip() == str(written[0])
    assert "1 x 2 x 1 passes" in found.err
    assert engines.made[0].run.drafter.kind == "auto"


def test_kernels_are_refused_where_there_are_none_and_nothing_is_loaded(engines, capsys, tmp_path):
    assert main(["calibrate", "--kernels"]) == 2
    assert "JAX runs on cpu, which has none" in capsys.readouterr().err
    assert main(["calibrate", "--kernels", "-o", "kernels=interpret"]) == 2
    assert main(["calibrate", "--kernels", "--out", str(tmp_path / "t.json")]) == 2
    assert "--out is for the table of rounds" in capsys.readouterr().err
    assert main(["calibrate", "--kernels", "--drafters", "ngram", "--no-probe"]) == 2
    assert "--no-probe is for learned drafters" in capsys.readouterr().err
    assert not engines.made


def test_kernels_are_tuned_for_what_the_configuration_runs(engines, capsys, tmp_path, monkeypatch):
    given = []

    def tune(found, device, partial, report, say):
        given.append((found, device, partial))
        say("tree_attention/tpu: 3 us")
        return [tmp_path / "tree_attention.json"]

    def shapes(load):
        load()
        return ["a shape"] if engines.made[-1].run.batch == 4 else []

    monkeypatch.setattr(calibrate_kernels, "refuse", lambda run, platform: None)
    monkeypatch.setattr(calibrate_kernels, "shapes", shapes)
    monkeypatch.setattr(calibrate_kernels, "calibrate", tune)
    monkeypatch.setattr(tuning, "device", lambda: "tpu-v6e")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["calibrate", "--kernels", "--batch", "4", "-o", "warmup=false", "-o", "drafter=ngram"]) == 0
    partial = tmp_path / "specjax" / "kernels" / "tpu-v6e" / "kernels.partial"
    assert given == [(["a shape"], "tpu-v6e", partial)]
    run = engines.made[0].run
    assert (run.drafter.kind, run.batch, run.warmup, run.kernels) == ("ngram", 4, True, "auto")
    found = capsys.readouterr()
    assert found.out.strip() == str(tmp_path / "tree_attention.json")
    assert "tree_attention/tpu: 3 us" in found.err
    assert main(["calibrate", "--kernels", "--batch", "2"]) == 2
    assert "no Pallas kernel takes the shapes of smollm2-135m here" in capsys.readouterr().err
