"""GGUF files written by the `gguf` package, and the packaged SmolLM2."""

import dataclasses

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from specjax.targets.config import ConfigError, DecoderConfig, RopeConfig
from specjax.targets.rope import inv_freq
from specjax.weights.check import TensorError
from specjax.weights.gguf import GGUFFile, read_gguf, recover_llama3, unpermute
from specjax.weights.load import load_checkpoint
from specjax.weights.names import resolve


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_every_tensor_comes_back_as_quantised(make, tmp_path, family, kind):
    config = make.hf_config(family)
    tensors = make.random_tensors(config)
    make.write_gguf(tmp_path / "m.gguf", config, tensors, kind)
    read, got = read_gguf(GGUFFile(tmp_path / "m.gguf"))
    assert read == DecoderConfig.from_hf(config)
    assert got.keys() == tensors.keys()
    for name, values in tensors.items():
        want = gguf.dequantize(gguf.quantize(values, kind), kind) if values.ndim == 2 else values
        np.testing.assert_array_equal(got[name], want, err_msg=name)
        assert got[name].dtype == np.float32 and got[name].shape == values.shape


@pytest.mark.parametrize(
    "kind", [Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.IQ4_XS, Kind.IQ2_XXS, Kind.TQ1_0]
)
def test_wide_blocks_are_those_of_the_gguf_package(tmp_path, kind):
    block, width = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(0).integers(0, 60, (7, 3 * width), dtype=np.uint8)  # small bytes: finite scales
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("x", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    got = GGUFFile(tmp_path / "m.gguf").tensor("x")
    assert got.shape == (7, 3 * block)
    np.testing.assert_array_equal(got, gguf.dequantize(raw, kind))


def test_large_tensors_are_dequantised_in_pieces(make, tmp_path):
    values = np.random.default_rng(0).normal(size=(300, 1024)).astype(np.float32)  # more than one piece, and a rest
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    make.add_tensor(writer, "x", values, Kind.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    want = gguf.dequantize(gguf.quantize(values, Kind.Q8_0), Kind.Q8_0)
    np.testing.assert_array_equal(GGUFFile(tmp_path / "m.gguf").tensor("x"), want)


def test_the_permutation_is_undone_for_matrices_and_biases(make):
    for shape in [(24, 5), (24,)]:
        values = np.random.default_rng(0).normal(size=shape)
        np.testing.assert_array_equal(unpermute(make.permute(values, 3), 3), values)


def test_biases_untied_heads_and_a_dtype(make, tmp_path):
    config = make.hf_config("llama", attention_bias=True)
    tensors = make.random_tensors(config)
    make.write_gguf(tmp_path / "m.gguf", config, tensors)
    read, got = read_gguf(GGUFFile(tmp_path / "m.gguf"), np.float16)
    assert read.attention_bias and read.output_bias and not read.tie_word_embeddings
    for name, values in tensors.items():
        np.testing.assert_array_equal(got[name], values.astype(np.float16))


def test_a_file_loads_with_its_tokenizer(make, tmp_path):
    config = make.hf_config("qwen3", tie_word_embeddings=True)
    make.write_gguf(tmp_path / "m.gguf", config, make.random_tensors(config))
    checkpoint = load_checkpoint(tmp_path / "m.gguf")
    assert checkpoint.config.tie_word_embeddings and "lm_head.weight" not in checkpoint.tensors
    assert checkpoint.tokenizer.encode("ab a") == [95, 3, 3 + ord("a") - 32]
    assert checkpoint.tokenizer.eos_ids == checkpoint.config.eos_token_ids == (2,)
    assert checkpoint.tokenizer.apply_chat_template([{"role": "user", "content": "x"}]) == "user: x\n> "


def test_misfits_are_listed_together(make, tmp_path):
    config = make.hf_config()
    tensors = make.random_tensors(config)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.norm.weight"] = np.ones(32, np.float32)
    make.write_gguf(tmp_path / "m.gguf", config, tensors, blk__0__mystery__weight=np.ones(3, np.float32))
    with pytest.raises(TensorError) as raised:
        read_gguf(GGUFFile(tmp_path / "m.gguf"))
    assert raised.value.problems == (
        "missing: model.layers.1.mlp.up_proj.weight [96, 64]",
        "misshapen: model.norm.weight is [32], the configuration asks for [64]",
        "unknown: blk.0.mystery.weight [3]",
    )


LLAMA3 = RopeConfig(
    theta=500000.0,
    kind="llama3",
    factor=32.0,
    original_max_position_embeddings=8192,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
)


def divisors(rope: RopeConfig, head_dim: int) -> np.ndarray:
    return inv_freq(RopeConfig(theta=rope.theta), head_dim)[0] / inv_freq(rope, head_dim)[0]


@pytest.mark.parametrize(
    "change", [{}, {"factor": 8.0}, {"original_max_position_embeddings": 4096}, {"high_freq_factor": 8.0}]
)
def test_llama3_scaling_is_recovered_from_its_divisors(make, tmp_path, change):
    rope = dataclasses.replace(LLAMA3, **change)
    config = make.hf_config(rope_theta=500000.0, head_dim=64)
    make.write_gguf(tmp_path / "m.gguf", config, make.random_tensors(config), rope_freqs__weight=divisors(rope, 64))
    read, tensors = read_gguf(GGUFFile(tmp_path / "m.gguf"))
    assert read.rope == rope and "rope_freqs.weight" not in tensors


@pytest.mark.parametrize("factors", [np.linspace(1, 8, 32), np.ones(16), np.full(32, 0.5)])
def test_other_divisors_are_refused(make, factors):
    config = DecoderConfig.from_hf(make.hf_config(rope_theta=500000.0, head_dim=64))
    with pytest.raises(ValueError, match=r"not a llama3 scaling of theta 500000 and head_dim 64"):
        recover_llama3(config, factors.astype(np.float32))


def test_damaged_files_are_named(make, tmp_path):
    config = make.hf_config()
    path = tmp_path / "m.gguf"
    make.write_gguf(path, config, make.random_tensors(config))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) - 20000])
    with pytest.raises(ValueError, match="is truncated: tensor"):
        read_gguf(GGUFFile(path))
    path.write_bytes(whole[:300])
    with pytest.raises(ValueError, match="damaged or truncated"):
        GGUFFile(path)
    path.write_bytes(b"GGUF\x09\0\0\0" + whole[8:])
    with pytest.raises(ValueError, match="GGUF version 9"):
        GGUFFile(path)
    path.write_bytes(b"PK\3\4")
    with pytest.raises(ValueError, match="is not a GGUF file"):
        GGUFFile(path)


def test_another_architecture_is_refused(tmp_path):
    gguf_writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    gguf_writer.write_header_to_file()
    gguf_writer.write_kv_data_to_file()
    gguf_writer.close()
    with pytest.raises(ConfigError, match="architecture 'mamba' is not known"):
        read_gguf(GGUFFile(tmp_path / "m.gguf"))


@pytest.mark.slow  # the gguf package takes seconds to read the vocabulary
def test_smollm2_is_what_the_gguf_package_reads(make):
    file = GGUFFile(resolve("smollm2-135m").path)
    config, tensors = read_gguf(file)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert config.tie_word_embeddings and config.rms_norm_eps == 1e-5 and config.rope.theta == 100000.0
    other = {tensor.name: tensor for tensor in gguf.GGUFReader(file.path).tensors}
    for name, heads in [
        ("model.embed_tokens.weight", 0),
        ("model.layers.7.self_attn.q_proj.weight", 9),
        ("model.layers.7.self_attn.k_proj.weight", 3),
        ("model.layers.29.mlp.down_proj.weight", 0),
        ("model.norm.weight", 0),
    ]:
        source = other[make.gguf_name(name)]
        ours = make.permute(tensors[name], heads) if heads else tensors[name]
        np.testing.assert_array_equal(ours, gguf.dequantize(source.data, source.tensor_type))
