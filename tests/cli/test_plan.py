"""`specjax plan`: what is printed, and what is refused."""

import dataclasses
import json

import pytest

from specjax.cli.main import main
from specjax.costmodel import tables
from specjax.costmodel.shapes import TARGETS


@pytest.fixture(autouse=True)
def no_measured_tables(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def plan(capsys, *argv) -> list[dict]:
    assert main(["plan", *argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)["plans"]


def test_json(capsys):
    argv = ("--device", "h100", "--target", "llama-3.1-8b", "--drafters", "eagle3,ngram", "--context", "4096")
    found = plan(capsys, *argv, "--batch", "1,64")
    assert [p["batch"] for p in found] == [1, 64]
    assert plan(capsys, *argv, "--batch", "1", "64") == found
    for each in found:
        assert each.keys() == {"batch", "shape", "predicted_rate", "plain_rate", "table_source"}
        assert each["shape"]["drafter"] in ("eagle3", "ngram", "none")
        assert each["predicted_rate"] >= each["plain_rate"]
        assert each["table_source"] == "roofline"


def test_plain_decoding_alone(capsys):
    (busy,) = plan(capsys, "--device", "tpu-v5e", "--drafters", "none", "--batch", "512", "--context", "512")
    assert busy["shape"] == {"drafter": "none", "depth": 0, "branching": 1, "rows": 1}
    assert busy["predicted_rate"] == busy["plain_rate"]


def test_tables_for_people(capsys):
    assert main(["plan", "--device", "TPU v6 lite", "--target", "Qwen/Qwen3-8B", "--batch", "8"]) == 0
    out = capsys.readouterr().out
    assert "qwen3-8b, bfloat16, 1 x tpu-v6e" in out
    assert "prices: compiler+roofline" in out  # the pass was compiled, drafts were not
    assert "below plain from" in out
    assert "plain" in out
    assert "then" in out  # the runner-up


def test_folders_of_targets_and_drafters(capsys, tmp_path):
    known = TARGETS["llama-3.1-8b"]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": known.layers,
        "hidden_size": known.hidden,
        "intermediate_size": known.inner,
        "num_attention_heads": known.heads,
        "num_key_value_heads": known.kv_heads,
        "vocab_size": known.vocab,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
    }
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    argv = ("--device", "h100", "--drafters", "mtp", "--batch", "8")
    mine = plan(capsys, *argv, "--target", str(folder))
    shipped = plan(capsys, *argv, "--target", "llama-3.1-8b")
    assert mine[0]["shape"] == shipped[0]["shape"]
    assert mine[0]["predicted_rate"] == pytest.approx(shipped[0]["predicted_rate"], rel=1e-3)


def test_a_given_table_is_used_or_refused(capsys, tmp_path):
    table = tables.load(tables.shipped("h100", "llama-3.1-8b"))
    twice = dataclasses.replace(table, verify=dataclasses.replace(table.verify, seconds=2 * table.verify.seconds))
    twice.write(tmp_path / "t.json")
    argv = ("--target", "llama-3.1-8b", "--drafters", "ngram", "--batch", "1")
    normal = plan(capsys, "--device", "h100", *argv)
    slow = plan(capsys, "--device", "h100", *argv, "--table", str(tmp_path / "t.json"))
    assert slow[0]["plain_rate"] < 0.6 * normal[0]["plain_rate"]
    assert main(["plan", "--device", "h200", *argv, "--table", str(tmp_path / "t.json")]) == 2
    assert "device: the table has 'h100', this is 'h200'" in capsys.readouterr().err


def test_a_stale_measured_table_is_passed_over_aloud(capsys, tmp_path):
    table = tables.load(tables.shipped("h100", "llama-3.1-8b"))
    foreign = dataclasses.replace(table, provenance=dataclasses.replace(table.provenance, dtype="int8"))
    foreign.write(tmp_path / "cache" / "specjax" / "tables" / "h100" / "llama-3.1-8b.json")
    assert main(["plan", "--device", "h100", "--target", "llama-3.1-8b", "--batch", "1"]) == 0
    assert "dtype: the table has 'int8', this is 'bfloat16'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--device", "h100", "--target", "llama-3.1-8b", "--batch", "512", "--context", "8192"], "what would fit"),
        (["--device", "abacus"], "nothing is known of a device 'abacus'"),
        (["--device", "h100", "--target", "llama-9"], "no target 'llama-9'"),
        (["--device", "h100", "--drafters", "ngram,psychic"], "no shapes are known for a drafter 'psychic'"),
        (["--device", "h100", "--batch", "0"], "--batch must be positive"),
        (["--device", "h100", "--dtype", "float4"], "--dtype must be"),
        (["--device", "h100", "--context", "0"], "must be at least 1"),
        (["--device", "h100", "--temperature", "nan"], "--temperature at least 0"),
        (["--device", "h100", "--plot", "/no/such/folder/p.png"], "its folder does not exist"),
        (["--device", "h100", "--table", "/no/such.json"], "is not a latency table"),
    ],
)
def test_refusals(argv, message, capsys):
    assert main(["plan", *argv]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert not captured.out


def test_plot(tmp_path, capsys):
    path = tmp_path / "plan.svg"
    assert main(["plan", "--device", "h100", "--drafters", "mtp", "--batch", "1", "--plot", str(path)]) == 0
    text = path.read_text()
    assert "planner" in text or "<svg" in text
    assert [p.name for p in tmp_path.glob("*plan*")] == ["plan.svg"]
