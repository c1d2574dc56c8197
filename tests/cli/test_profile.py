"""`specjax profile`: what it works out, times, shows, draws and refuses."""

import json

import pytest
from support import toy

from specjax.cli import aot, profile_absent, profile_report
from specjax.cli.main import main
from specjax.costmodel.roofline import Work

ABSENT = ("profile", "--device", "h100", "--target", "llama-3.1-8b")
MLP = 32 * 3 * 4096 * 14336
PHASES = ["draft", "qkv", "attention", "output", "mlp", "head", "accept", "commit", "launch"]


def figures(capsys, *argv) -> dict:
    assert main([*argv, "--json", "-"]) == 0
    return json.loads(capsys.readouterr().out)


def test_an_absent_device_has_the_cost_model_s_phases(capsys):
    found = figures(capsys, *ABSENT, "--batch", "4", "--drafts", "7", "--context", "1000", "--roofline")
    assert [row["phase"] for row in found["phases"]] == PHASES
    rows = {row["phase"]: row for row in found["phases"]}
    assert rows["mlp"]["bytes"] == 2 * MLP
    assert rows["mlp"]["flops"] == 2 * MLP * 4 * 8
    assert rows["mlp"]["roofline_us"] == pytest.approx(2 * MLP / 3.35e6 + 32 * 3 * 2)
    assert rows["attention"]["bytes"] == 4 * 1000 * 131072
    assert rows["attention"]["flops"] == 4 * 32 * 4096 * 32 * 1000
    assert rows["head"]["bytes"] == 2 * 4096 * 128256 + 4 * 32 * 128256
    assert rows["accept"]["bytes"] == 2 * 4 * 32 * 128256
    settings = {"op": "spec_step", "device": "h100", "attached": False, "batch": 4, "rows": 8, "context": 1000}
    assert settings.items() <= found.items()
    assert found["bandwidth"] == 3.35e12
    assert "nothing was compiled" in found["notes"][0]


def test_plain_rounds_have_no_draft_and_fused_ones_one_phase_of_layers(capsys):
    plain = figures(capsys, *ABSENT, "--drafter", "none", "--roofline")
    assert plain["rows"] == 1
    assert [row["phase"] for row in plain["phases"]] == PHASES[1:]
    fused = figures(
        capsys, "profile", "--device", "tpu-v6e", "--target", "qwen3-8b", "--decode-step", "fused", "--roofline"
    )
    assert [row["phase"] for row in fused["phases"]] == ["draft", "layers", *PHASES[5:]]
    (op,) = figures(capsys, "profile", "decode_step", "--device", "tpu-v6e", "--target", "qwen3-8b", "--roofline")[
        "phases"
    ]
    assert op == fused["phases"][1]
    qwen = 36 * (4096 * 128 * 48 + 4096 * 4096 + 3 * 4096 * 12288)
    read = 2 * qwen / 1.638e6 + 1024 * 36 * 2 * 8 * 128 * 2 / 1.638e6
    assert op["roofline_us"] == pytest.approx(read + 1)  # one kernel


def test_a_compiler_that_is_not_here_is_named_with_what_to_do(capsys, monkeypatch):
    monkeypatch.setattr(profile_absent, "COMPILERS", {"tpu": ("no_such.module", "tpu"), "cuda": ("no_such", "cuda")})
    for device, extra in (("tpu-v6e", "tpu"), ("h100", "cuda")):
        (note,) = figures(capsys, "profile", "--device", device, "--target", "llama-3.1-8b")["notes"]
        assert "is not installed here" in note
        assert f"specjax[{extra}]" in note and "make profile" in note
    (note,) = figures(capsys, "profile", "--device", "h200", "--target", "llama-3.1-8b")["notes"]
    assert "no compiler is described for h200" in note


def test_what_compilers_say_stands_beside_the_roofline(capsys, monkeypatch, tmp_path):
    asked = []

    def compiles(chip, *options, module):
        asked.append((chip, json.loads(options[0]), module))
        yield {"total": 3}
        units = {"MXU": 0.25, "VALU": 0.5}
        yield {"phase": "mlp", "job": "mlp", "compiler_us": 6400.0, "bundles": 5000, "units": units, "compile_s": 1.5}
        stages = [{"stage": "block", "bundles": 70, "units": {"MXU": 0.75}}]
        yield {"phase": "attention", "job": "a", "estimate_us": 64.0, "registers": 168, "stages": stages}
        yield {"program": profile_absent.PASS, "compiler_us": 9147.9}

    monkeypatch.setattr(profile_absent, "compiler_missing", lambda device: None)
    monkeypatch.setattr(aot, "in_a_process", compiles)
    written = tmp_path / "profile.json"
    assert main(["profile", "--device", "tpu-v6e", "--target", "llama-3.1-8b", "--json", str(written)]) == 0
    captured = capsys.readouterr()
    said = captured.out
    assert "6400.0" in said and "25%" in said and "  block" in said and "75%" in said and "9147.9" in said
    told = captured.err.splitlines()
    assert told[:2] == ["tpu-v6e: 3 parts to compile", "tpu-v6e: 1 of 3: mlp: 1.5 s"]
    assert told[3].startswith("tpu-v6e: 3 of 3: verify pass less attention")
    rows = {row["phase"]: row for row in json.loads(written.read_text())["phases"]}
    assert rows["mlp"]["compiler_us"] == 6400.0
    assert [rows[name]["state"] for name in ("mlp", "attention", "launch")] == ["compiled", "compiled", "roofline"]
    ((chip, given, module),) = asked
    assert (chip, module) == ("tpu-v6e", "specjax.cli.profile_absent")
    assert given == {
        "target": "llama-3.1-8b",
        "drafter": "ngram",
        "drafts": 5,
        "batch": 1,
        "context": 1024,
        "dtype": "bfloat16",
        "fused": False,
        "op": "spec_step",
    }


def test_a_fused_step_on_a_gpu_is_shown_kernel_by_kernel(capsys, monkeypatch):
    asked = []

    def compiles(chip, *options, module):
        asked.append(json.loads(options[0]))
        yield {"phase": "layers", "stage": "qkv", "job": "qkv", "registers": 80, "roofline_us": 480.0, "bytes": 1.6e9}
        yield {"phase": "layers", "stage": "out", "job": "out", "declined": "200 rows, of 128"}

    monkeypatch.setattr(profile_absent, "compiler_missing", lambda device: None)
    monkeypatch.setattr(aot, "in_a_process", compiles)
    found = figures(capsys, *ABSENT, "--decode-step", "fused")
    layers = found["phases"][1]
    assert (layers["phase"], layers["state"]) == ("layers", "compiled")
    read = (14092.86e6 / 3.35e12) * 1e6  # weights of the layers, keys and values
    assert layers["roofline_us"] == pytest.approx(read + 32 * 5 * 0.002 * 1000, rel=1e-3)  # five kernels a layer
    qkv, out = layers["stages"]
    assert (qkv["registers"], qkv["roofline_us"], qkv["state"]) == (80, 480.0, "compiled")
    assert out["state"] == "declined"
    assert main([*ABSENT, "--decode-step", "fused"]) == 0
    assert "  qkv" in capsys.readouterr().out
    assert figures(capsys, "profile", "decode_step", "--device", "mi300x", "--target", "qwen3-8b")["phases"][0][
        "stages"
    ]
    assert [given["fused"] for given in asked] == [True] * 3


@pytest.mark.parametrize(
    ("device", "options", "said"),
    [
        ("mi300x", [], ["XLA compiles for no AMD GPU that is not here"]),
        ("h100", ["--drafter", "eagle3"], ["default tiles", "eagle3 drafts with weights that are not here"]),
        ("tpu-7x", [], ["one of its two cores", "asked for or not", "of one layer"]),
        ("tpu-v6e", ["--decode-step", "fused"], ["asked for or not", "those of stages as often as they run"]),
    ],
)
def test_what_the_figures_leave_out_is_said(capsys, monkeypatch, device, options, said):
    monkeypatch.setattr(profile_absent, "compiler_missing", lambda device: None)
    monkeypatch.setattr(aot, "in_a_process", lambda *_, **__: iter([]))
    notes = figures(capsys, "profile", "--device", device, "--target", "llama-3.1-8b", *options)["notes"]
    assert len(notes) == len(said)
    assert all(part in note for part, note in zip(said, notes, strict=True))


def test_what_does_not_compile_is_the_exit_code(capsys, monkeypatch):
    failed = [{"phase": "mlp", "job": "mlp", "error": "MosaicError: no such layout"}]
    monkeypatch.setattr(profile_absent, "compiler_missing", lambda device: None)
    monkeypatch.setattr(aot, "in_a_process", lambda *_, **__: iter(failed))
    assert main([*ABSENT]) == 1
    assert "MosaicError: no such layout" in capsys.readouterr().out
    monkeypatch.setattr(
        aot, "in_a_process", lambda *_, **__: iter([{"job": "the compiler's process", "error": "gone"}])
    )
    assert main([*ABSENT]) == 1
    assert "gone" in capsys.readouterr().out


@pytest.fixture
def folder(tmp_path):
    c = toy.tiny_config()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "rms_norm_eps": c.rms_norm_eps,
        "max_position_embeddings": c.max_position_embeddings,
        "hidden_act": "silu",
    }
    made = tmp_path / "tiny"
    made.mkdir()
    (made / "config.json").write_text(json.dumps(config))
    return made


def test_the_device_here_is_measured(capsys, folder, tmp_path):
    plot, written = tmp_path / "profile.svg", tmp_path / "profile.json"
    argv = ("profile", "--target", str(folder), "--random", "--dtype", "float32", "--drafts", "3", "--repeats", "2")
    options = ("--set", "context=64", "--context", "32", "--plot", str(plot), "--json", str(written))
    assert main([*argv, *options]) == 0
    said = capsys.readouterr().out
    assert "all phases" in said and "served round" in said
    found = json.loads(written.read_text())
    assert [row["phase"] for row in found["phases"]] == PHASES
    assert [row["program"] for row in found["programs"]] == ["verify pass", "round", "served round"]
    assert (found["attached"], found["weights"], found["rows"], found["context"]) == (True, "random", 4, 32)
    for row in found["phases"]:
        least, most = row["measured_range_us"]
        assert least <= row["measured_us"] <= most
        assert row["roofline_us"] > 0
    rows = {row["phase"]: row for row in found["phases"]}
    assert rows["qkv"]["bytes"] == 4 * 2 * 32 * 8 * (4 + 2 * 2)
    assert "<svg" in plot.read_text()


def test_measured_rows_are_less_the_launch():
    from specjax.engine.profile import Timed

    times = {"mlp": Timed(5e-3, 4e-3, 9e-3), "head": Timed(1e-4, 1e-4, 1e-4), "launch": Timed(1e-3, 1e-3, 2e-3)}
    mlp, head, launch = profile_report.measured({"mlp": Work(10.0, 20.0, 1e-3)}, times)
    assert mlp["measured_us"] == pytest.approx(4000)
    assert mlp["measured_range_us"] == pytest.approx([3000, 8000])
    assert mlp["of_roofline"] == pytest.approx(0.25)
    assert head["measured_us"] == 0.0
    assert launch["measured_us"] == pytest.approx(1000)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--device", "abacus"], "nothing is known of a device 'abacus'; known are tpu-v5e"),
        (["matmul"], "no op 'matmul'; known are spec_step, tree_attention, decode_step"),
        (["decode_step", "--decode-step", "xla"], "leave --decode-step xla out"),
        (["tree_attention", "--decode-step", "fused"], "the fused step has its attention inside"),
        (["--device", "h100", "--roofline", "--batch", "-3"], "--batch must be at least 1"),
        (["--device", "h100", "--roofline", "--plot", "p.xyz"], "names no kind of picture"),
        (["--device", "h100", "--roofline", "--json", "."], "it is a folder"),
        (["--device", "h100", "--trace", "t", "--random"], "--trace, --random: nothing runs on h100"),
        (["--device", "h100", "--set", "batch=2"], "--set: nothing runs on h100"),
        (["--device", "h100", "--drafter", "psychic"], "no shapes are known for a drafter 'psychic'"),
        (["--device", "h100", "--target", "llama-9"], "no target 'llama-9'"),
        (["--device", "l4", "--target", "qwen3-32b"], "what would fit"),
        (["--roofline"], "name one with --device"),
        (["--drafts", "0"], "--drafts must be 1 to 127"),
        (["--drafts", "3", "--drafter", "none"], "--drafter is none"),
        (["--repeats", "0"], "must be at least 1"),
        (["--drafter", "auto"], "'auto' changes it"),
        (["--device", "h100", "--roofline", "--json", "same.png", "--plot", "same.png"], "cannot hold two outputs"),
        (["--json", "/no/such/folder/p.json"], "its folder does not exist"),
    ],
)
def test_refusals(argv, message, capsys):
    assert main(["profile", *argv]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert not captured.out
