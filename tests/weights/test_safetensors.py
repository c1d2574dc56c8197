"""Hugging Face folders: what is read, and what is refused with everything listed."""

import json

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from specjax.weights.check import TensorError
from specjax.weights.load import load_checkpoint


@pytest.fixture
def config(hf_folder):
    """The configuration that `hf_folder` writes by default."""
    folder, _ = hf_folder(name="default")
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("shards", [1, 3])
def test_single_and_sharded_folders(hf_folder, shards):
    folder, tensors = hf_folder(shards=shards)
    checkpoint = load_checkpoint(folder)
    assert checkpoint.source.kind == "hf-folder" and list(checkpoint.tensors) == list(tensors)
    for name, values in tensors.items():
        np.testing.assert_array_equal(checkpoint.tensors[name], values)
    assert checkpoint.tokenizer.eos_ids == (2,) and checkpoint.tokenizer.bos_id == 1


def test_stored_and_asked_dtypes(hf_folder):
    _, tensors = hf_folder()
    folder, stored = hf_folder(tensors={k: v.astype(ml_dtypes.bfloat16) for k, v in tensors.items()}, name="bf16")
    name = "model.layers.0.mlp.up_proj.weight"
    assert load_checkpoint(folder).tensors[name].dtype == ml_dtypes.bfloat16
    widened = load_checkpoint(folder, np.float32).tensors[name]
    assert widened.dtype == np.float32
    np.testing.assert_array_equal(widened, stored[name].astype(np.float32))


def test_every_misfit_is_listed_with_both_shapes(hf_folder):
    _, tensors = hf_folder()
    del tensors["model.layers.0.self_attn.k_proj.weight"], tensors["lm_head.weight"]
    tensors["model.norm.weight"] = np.ones(128, np.float32)
    tensors["model.layers.2.mlp.up_proj.weight"] = np.ones((96, 64), np.float32)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)  # harmless, as old exports have it
    folder, _ = hf_folder(tensors=tensors, name="damaged")
    with pytest.raises(TensorError) as raised:
        load_checkpoint(folder)
    assert set(raised.value.problems) == {
        "missing: model.layers.0.self_attn.k_proj.weight [32, 64]",
        "missing: lm_head.weight [96, 64] (tie_word_embeddings is false)",
        "misshapen: model.norm.weight is [128], the configuration asks for [64]",
        "unknown: model.layers.2.mlp.up_proj.weight [96, 64]",
    }


@pytest.mark.parametrize(
    "name", ["mtp.fc.weight", "model.mtp_layers.0.input_proj.weight", "model.layers.2.eh_proj.weight"]
)
def test_an_mtp_module_beside_the_target_is_left_to_drafters(hf_folder, name):
    _, tensors = hf_folder()
    extra = {name: np.ones((64, 128), np.float32)}
    if "layers.2" in name:  # the module is one layer more, whole
        extra["model.layers.2.mlp.up_proj.weight"] = np.ones((96, 64), np.float32)
    folder, _ = hf_folder(tensors=tensors | extra, name="with-module")
    assert set(load_checkpoint(folder).tensors) == set(tensors)


def test_a_harmless_buffer_is_let_through(hf_folder):
    _, tensors = hf_folder()
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    folder, _ = hf_folder(tensors=tensors | buffer, name="old")
    assert load_checkpoint(folder).tensors.keys() == tensors.keys()


def test_a_stored_head_beside_tied_embeddings(hf_folder, config):
    tied = config | {"tie_word_embeddings": True}
    _, tensors = hf_folder()
    same = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    folder, _ = hf_folder(tied, same, name="same")
    assert "lm_head.weight" not in load_checkpoint(folder).tensors
    folder, _ = hf_folder(tied, tensors, name="other")
    with pytest.raises(TensorError, match=r"lm_head.weight differs from model.embed_tokens.weight"):
        load_checkpoint(folder)


def test_integer_tensors_are_refused(hf_folder):
    _, tensors = hf_folder()
    name = "model.layers.0.mlp.up_proj.weight"
    folder, _ = hf_folder(tensors=tensors | {name: tensors[name].astype(np.int8)}, name="int8")
    with pytest.raises(TensorError, match=f"{name} is stored as I8; supported are F64, F32, F16, BF16"):
        load_checkpoint(folder)


def test_files_that_are_not_there(hf_folder):
    folder, _ = hf_folder(shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ValueError, match="lacks 1 of 3 shards: model-00002-of-00003.safetensors"):
        load_checkpoint(folder)
    folder, _ = hf_folder(name="none")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="has neither model.safetensors nor"):
        load_checkpoint(folder)
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02")
    with pytest.raises(ValueError, match=r"pickled weights \(pytorch_model.bin\), which run code when opened"):
        load_checkpoint(folder)


def test_damaged_files(hf_folder):
    folder, _ = hf_folder()
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-100])
    with pytest.raises(ValueError, match="is damaged or truncated"):
        load_checkpoint(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        load_checkpoint(folder)


def test_a_tensor_in_two_shards_and_a_shard_outside(hf_folder):
    folder, tensors = hf_folder(shards=2)
    twice = {
        "model.norm.weight": tensors["model.norm.weight"],
        "model.embed_tokens.weight": tensors["model.norm.weight"],
    }
    safetensors.numpy.save_file(twice, folder / "extra.safetensors")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.norm.weight"] = "extra.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="is in two files"):
        load_checkpoint(folder)
    index["weight_map"]["model.norm.weight"] = "../extra.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="names files outside its folder"):
        load_checkpoint(folder)


@pytest.mark.parametrize(("eos", "want"), [(5, (5,)), ([5, 6], (5, 6)), (None, (2,))])
def test_generation_config_names_the_end_tokens(hf_folder, eos, want):
    folder, _ = hf_folder()
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    checkpoint = load_checkpoint(folder)
    assert checkpoint.config.eos_token_ids == checkpoint.tokenizer.eos_ids == want


def test_the_tokenizer_is_the_last_to_name_an_end_token(hf_folder, config):
    folder, _ = hf_folder(config | {"eos_token_id": None})
    assert load_checkpoint(folder).config.eos_token_ids == (2,)


def test_remote_code_is_never_run(hf_folder, config):
    folder, tensors = hf_folder(config | {"auto_map": {"AutoModelForCausalLM": "evil.Model"}})
    (folder / "evil.py").write_text("raise SystemExit('run')")
    assert load_checkpoint(folder).tensors.keys() == tensors.keys()


def test_a_tokenizer_larger_than_the_model_is_refused(hf_folder, config):
    folder, _ = hf_folder(config | {"vocab_size": 64})
    with pytest.raises(ValueError, match="has 96 tokens and the model's vocabulary 64; the model has no row for '"):
        load_checkpoint(folder)
