"""Conversion: what is written is read back the same, whole or not at all."""

import json

import ml_dtypes
import numpy as np
import pytest

from specjax.weights import convert as module
from specjax.weights.convert import convert
from specjax.weights.load import load_checkpoint

ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


def same(one, other) -> None:
    assert one.config == other.config
    assert one.tensors.keys() == other.tensors.keys()
    for name in one.tensors:
        np.testing.assert_array_equal(one.tensors[name], other.tensors[name], err_msg=name)
        assert one.tensors[name].dtype == other.tensors[name].dtype
    assert one.tokenizer.fingerprint() == other.tokenizer.fingerprint()
    for field in ("special_tokens", "chat_template", "eos_ids"):
        assert getattr(one.tokenizer, field) == getattr(other.tokenizer, field)


@pytest.mark.parametrize("format", ["hf", "orbax"])
@pytest.mark.parametrize("tied", [True, False])
def test_round_trips(make, tmp_path, format, tied):
    config = make.hf_config("qwen3", tie_word_embeddings=tied, eos_token_id=2, bos_token_id=1)
    make.write_gguf(tmp_path / "m.gguf", config, make.random_tensors(config))
    out = convert(tmp_path / "m.gguf", tmp_path / "deep" / "out", format)
    assert load_checkpoint(out).source.kind == {"hf": "hf-folder", "orbax": "orbax"}[format]
    same(load_checkpoint(tmp_path / "m.gguf"), load_checkpoint(out))
    assert [path.name for path in out.parent.iterdir()] == ["out"]  # nothing temporary stays


@pytest.mark.parametrize("format", ["hf", "orbax"])
def test_rope_scaling_end_tokens_and_bfloat16_survive(make, hf_folder, tmp_path, format):
    folder, tensors = hf_folder(make.hf_config(rope_theta=5000.0, rope_scaling=ROPE, eos_token_id=[2, 5]))
    out = convert(folder, tmp_path / "out", format, ml_dtypes.bfloat16)
    got = load_checkpoint(out)
    assert got.config == load_checkpoint(folder).config and got.config.eos_token_ids == (2, 5)
    for name, values in tensors.items():
        assert got.tensors[name].dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(got.tensors[name], values.astype(ml_dtypes.bfloat16))
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_shards_hold_every_tensor_once(hf_folder, tmp_path):
    folder, tensors = hf_folder()
    out = convert(folder, tmp_path / "out", shard_bytes=40_000)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert set(index["weight_map"]) == set(tensors) and sorted(set(index["weight_map"].values())) == files
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors" and len(files) > 2
    assert index["metadata"]["total_size"] == sum(values.nbytes for values in tensors.values())
    assert all((out / file).stat().st_size < 45_000 for file in files)
    same(load_checkpoint(folder), load_checkpoint(out))


def test_transformers_reads_the_configuration(make, hf_folder, tmp_path):
    from transformers import AutoConfig

    folder, _ = hf_folder(make.hf_config(rope_theta=5000.0, rope_scaling=ROPE))
    config = AutoConfig.from_pretrained(convert(folder, tmp_path / "out"))
    assert type(config).__name__ == "LlamaConfig" and config.num_key_value_heads == 2 and config.head_dim == 16
    assert {key: config.rope_parameters[key] for key in ROPE} == ROPE and config.rope_parameters["rope_theta"] == 5000.0


def test_an_occupied_folder_is_refused_and_an_empty_one_used(hf_folder, tmp_path):
    folder, _ = hf_folder()
    (tmp_path / "out").mkdir()
    assert convert(folder, tmp_path / "out") == tmp_path / "out"
    before = sorted((tmp_path / "out").iterdir())
    with pytest.raises(ValueError, match="already holds something"):
        convert(folder, tmp_path / "out")
    assert sorted((tmp_path / "out").iterdir()) == before


def test_nothing_is_left_of_a_failure(hf_folder, tmp_path, monkeypatch):
    folder, _ = hf_folder()
    before = sorted(tmp_path.iterdir())

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(module, "write_tensors", fail)
    with pytest.raises(OSError, match="disk full"):
        convert(folder, tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == before


def test_a_damaged_source_writes_nothing(make, hf_folder, tmp_path):
    tensors = make.random_tensors(make.hf_config())
    del tensors["model.norm.weight"]
    folder, _ = hf_folder(tensors=tensors)
    with pytest.raises(ValueError, match=r"missing: model\.norm\.weight"):
        convert(folder, tmp_path / "deep" / "out")
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


@pytest.mark.parametrize(
    ("arguments", "message"), [({"format": "pickle"}, "format 'pickle'"), ({"shard_bytes": 0}, "at least 1")]
)
def test_options_are_checked(hf_folder, tmp_path, arguments, message):
    folder, _ = hf_folder()
    with pytest.raises(ValueError, match=message):
        convert(folder, tmp_path / "out", **arguments)


def test_a_damaged_orbax_folder(hf_folder, tmp_path):
    folder, _ = hf_folder()
    out = convert(folder, tmp_path / "out", "orbax")
    config = json.loads((out / "config.json").read_text()) | {"tie_word_embeddings": False, "intermediate_size": 128}
    (out / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"mlp\.up_proj\.weight is \[96, 64\], the configuration asks for \[128, 64\]"):
        load_checkpoint(out)
    for path in (out / "params").iterdir():
        if path.is_file():
            path.unlink()
    with pytest.raises(ValueError, match="is not an Orbax checkpoint"):
        load_checkpoint(out)
