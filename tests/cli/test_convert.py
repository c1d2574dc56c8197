"""`specjax convert`: models are handed on to `specjax.weights.convert`, drafters are converted here, tiny ones."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from support.checkpoints import TARGET, array, samples

from specjax.cli.main import main
from specjax.drafters.formats.read import load_drafter
from specjax.weights import convert


@pytest.fixture
def calls(monkeypatch):
    made = []

    def record(source, out_dir, *, format, dtype):
        made.append((source, out_dir, format, dtype))
        return Path(out_dir)

    monkeypatch.setattr(convert, "convert", record)
    return made


@pytest.fixture
def target(tmp_path):
    """A model folder that the drafters of `support.checkpoints` were made for, with an MTP module inside."""
    return str(sample("mtp-deepseek").write(tmp_path / "target"))


def sample(format: str):
    return next(s for s in samples() if s.format == format).copy()


def test_arguments(calls, capsys, tmp_path):
    (tmp_path / "a.gguf").touch()
    source = str(tmp_path / "a.gguf")
    assert main(["convert", source, "out", "--format", "orbax", "--dtype", "bfloat16"]) == 0
    assert main(["convert", source, "out"]) == 0
    assert calls == [(source, "out", "orbax", jnp.bfloat16), (source, "out", "hf", None)]
    assert capsys.readouterr() == ("", "wrote out\nwrote out\n")


def test_a_fault_leaves_no_output_and_exits_with_2(tmp_path, capsys):
    """C16, at the command line: the library's own tests cover every kind of damage."""
    assert main(["convert", str(tmp_path / "none"), str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.startswith("error: ")
    assert not (tmp_path / "out").exists()


def test_a_drafter_in_another_format_and_dtype(target, tmp_path, capsys):
    source, out = sample("eagle3-safeailab").write(tmp_path / "head"), tmp_path / "out"
    given = ["convert", str(source), str(out), "--target", target, "--format", "speculators-eagle3"]
    assert main([*given, "--dtype", "bfloat16"]) == 0
    assert capsys.readouterr() == ("", f"wrote {out}\n")
    loaded = load_drafter(out, TARGET)
    assert (loaded.format, loaded.tensors["fc.weight"].dtype) == ("speculators-eagle3", jnp.bfloat16)
    assert loaded.config == load_drafter(source, TARGET).config
    assert main(given) == 2  # it is there already
    assert "already holds something" in capsys.readouterr().err


def test_a_module_inside_a_model(calls, target, tmp_path, capsys):
    """With its model as target it is written by itself; without, it is said that it is left out."""
    assert main(["convert", target, str(tmp_path / "mtp"), "--target", target]) == 0
    assert load_drafter(tmp_path / "mtp", TARGET).format == "speculators-mtp"
    assert "it is the MTP module of the target's own checkpoint" in capsys.readouterr().err
    assert main(["convert", target, "model"]) == 0
    assert calls == [(target, "model", "hf", None)]
    assert f"left out: the MTP module inside (mtp-deepseek); --target {target} writes it" in capsys.readouterr().err


def test_a_drafter_needs_its_target(calls, tmp_path, capsys):
    source = sample("ubtree").write(tmp_path / "head")
    assert main(["convert", str(source), str(tmp_path / "out")]) == 2
    assert "holds a drafter (ubtree): name the model that it drafts for, --target MODEL" in capsys.readouterr().err
    assert not calls and not (tmp_path / "out").exists()


def renamed(s):
    s.tensors["decoder.mlp.up_proj.weight"] = s.tensors.pop("midlayer.mlp.up_proj.weight")
    return ["unknown: decoder.mlp.up_proj.weight [48, 32]", "missing: layers.0.mlp.up_proj.weight [48, 32]"]


def missing(s):
    del s.tensors["midlayer.mlp.down_proj.weight"], s.tensors["norm.weight"]
    return ["missing: layers.0.mlp.down_proj.weight [32, 48]", "missing: norm.weight [32]"]


def extra(s):
    s.tensors["adapter.weight"] = array("adapter", 3, 5)
    return ["unknown: adapter.weight [3, 5]"]


def misshapen(s):
    s.tensors["fc.weight"] = array("fc", 64, 96)
    return ["misshapen: fc.weight is [64, 96], the configuration asks for [32, 96]"]


def of_no_rope(s):
    s.config["rope_scaling"] = {"rope_type": "foo", "factor": 2.0}
    return ["rope type 'foo' is not known"]


def of_another_width(s):
    s.config |= {"vocab_size": 100, "target_hidden_size": 48}
    return ["a vocabulary of 100, the target has 64", "width 48, this one has 32"]


@pytest.mark.parametrize("damage", [renamed, missing, extra, misshapen, of_no_rope, of_another_width])
def test_a_damaged_drafter_exits_with_2_and_writes_nothing(damage, target, tmp_path, capsys):
    """C16: every offending key is listed, with both shapes."""
    s = sample("eagle3-specforge")
    expected = damage(s)
    source, out = s.write(tmp_path / "head"), tmp_path / "out"
    before = sorted(tmp_path.iterdir())
    assert main(["convert", str(source), str(out), "--target", target]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and all(line in said for line in expected)
    assert sorted(tmp_path.iterdir()) == before


def test_known_names_are_read_rope_and_a_tied_head_survive(target, tmp_path):
    """C16: `layers.0.` is `midlayer.`; yarn stays yarn; a tied head comes out as the embedding."""
    s = sample("eagle3-specforge")
    s.tensors = {name.replace("midlayer.", "layers.0."): x for name, x in s.tensors.items()}
    s.tensors = {name: x for name, x in s.tensors.items() if name not in ("lm_head.weight", "d2t", "t2d")}
    s.tensors["embed_tokens.weight"] = array("embed_tokens.weight", 64, 32)
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    s.config |= {"draft_vocab_size": 64, "tie_word_embeddings": True, "rope_scaling": yarn}
    assert main(["convert", str(s.write(tmp_path / "head")), str(tmp_path / "out"), "--target", target]) == 0
    loaded = load_drafter(tmp_path / "out", TARGET)
    assert (loaded.config.rope.kind, loaded.config.rope.factor) == ("yarn", 4.0)
    for name in ("lm_head.weight", "embed_tokens.weight"):
        np.testing.assert_array_equal(loaded.tensors[name], s.tensors["embed_tokens.weight"])
    name = "mlp.up_proj.weight"
    np.testing.assert_array_equal(loaded.tensors[f"layers.0.{name}"], s.tensors[f"layers.0.{name}"])
