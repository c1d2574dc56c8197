"""Reading and writing decoder configurations, and refusing those that cannot be honoured."""

import dataclasses
import json
from pathlib import Path

import pytest

from specjax.targets.config import ConfigError, DecoderConfig, RopeConfig, expected_tensors

MODELS = sorted((Path(__file__).parents[1] / "parity" / "goldens" / "models").iterdir())

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def family(name: str, **changes) -> dict:
    named = {"model_type": name, "architectures": [name.capitalize() + "ForCausalLM"]}
    return LLAMA | named | ({"head_dim": 16} if name == "qwen3" else {}) | changes


@pytest.mark.parametrize("folder", MODELS, ids=lambda folder: folder.name)
def test_what_transformers_writes_is_read_and_written_back(folder):
    config = DecoderConfig.from_hf(json.loads((folder / "config.json").read_text()))
    assert hash(config) == hash(DecoderConfig.from_hf(config.to_hf()))
    assert config == DecoderConfig.from_hf(config.to_hf())


def test_defaults_of_an_old_llama():
    old = {key: value for key, value in LLAMA.items() if key not in ("num_key_value_heads", "architectures")}
    config = DecoderConfig.from_hf(old)
    assert (config.num_kv_heads, config.head_dim, config.rope) == (4, 8, RopeConfig(theta=10_000.0))
    assert not (config.tie_word_embeddings or config.attention_bias or config.output_bias or config.mlp_bias)
    assert config.windows == (None, None) and config.eos_token_ids == (2,) and config.bos_token_id == 1


@pytest.mark.parametrize(
    ("config", "flags"),
    [
        (family("llama", attention_bias=True), (True, True, False, False)),
        (family("llama", mlp_bias=True), (False, False, True, False)),
        (family("mistral", attention_bias=True), (False, False, False, False)),
        (family("qwen2"), (True, False, False, False)),
        (family("qwen3"), (False, False, False, True)),
        (family("qwen3", attention_bias=True), (True, True, False, True)),
    ],
)
def test_biases_and_norms_of_each_family(config, flags):
    read = DecoderConfig.from_hf(config)
    assert (read.attention_bias, read.output_bias, read.mlp_bias, read.qk_norm) == flags
    names = expected_tensors(read)
    present = [f"model.layers.1.{part}" in names for part in ("self_attn.q_proj.bias", "self_attn.o_proj.bias")]
    present += [f"model.layers.1.{part}" in names for part in ("mlp.down_proj.bias", "self_attn.q_norm.weight")]
    assert tuple(present) == flags


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        (family("mistral", sliding_window=16), (16, 16)),
        (family("mistral", sliding_window=None), (None, None)),
        (family("qwen2", sliding_window=16, use_sliding_window=False), (None, None)),
        (family("qwen2", sliding_window=16, use_sliding_window=True, max_window_layers=1), (None, 16)),
        (family("qwen2", sliding_window=16, use_sliding_window=True), (None, None)),
        (
            family(
                "qwen3", sliding_window=8, use_sliding_window=True, layer_types=["sliding_attention", "full_attention"]
            ),
            (8, None),
        ),
    ],
)
def test_attention_windows(config, windows):
    read = DecoderConfig.from_hf(config)
    assert read.windows == windows
    assert DecoderConfig.from_hf(read.to_hf()) == read


def test_shapes_of_an_untied_grouped_query_model():
    config = DecoderConfig.from_hf(LLAMA | {"head_dim": 20})
    shapes = expected_tensors(config)
    assert len(shapes) == 2 * 9 + 3
    assert shapes["model.embed_tokens.weight"] == shapes["lm_head.weight"] == (64, 32)
    assert shapes["model.layers.0.self_attn.q_proj.weight"] == (80, 32)
    assert shapes["model.layers.0.self_attn.k_proj.weight"] == (40, 32)
    assert shapes["model.layers.0.self_attn.o_proj.weight"] == (32, 80)
    assert shapes["model.layers.1.mlp.down_proj.weight"] == (32, 48)
    assert "lm_head.weight" not in expected_tensors(DecoderConfig.from_hf(LLAMA | {"tie_word_embeddings": True}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}, "architecture 'GPT2LMHeadModel' is not known"),
        ({"architectures": ["Qwen2ForCausalLM"]}, "model_type 'llama' does not belong"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"num_key_value_heads": 3}, "4 query heads cannot be shared out to 3"),
        ({"num_attention_heads": 5, "num_key_value_heads": 5}, "5 heads do not divide the hidden size 32"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"vocab_size": 0}, "vocab_size must be a positive integer, got 0"),
        ({"hidden_size": 32.5, "head_dim": 8}, "hidden_size must be a positive integer, got 32.5"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps must be a positive number"),
        ({"eos_token_id": [2, 64]}, "special token id 64 is outside the vocabulary of 64"),
        ({"rope_scaling": {"rope_type": "foo"}}, "rope type 'foo' is not known"),
        ({"quantization_config": {"bits": 4}}, "'quantization_config'"),
        ({"sliding_window": 16}, "sliding_window 16 is not a key of the llama architecture"),
        ({"layer_types": ["chunked_attention", "full_attention"]}, "'chunked_attention' are not known"),
    ],
)
def test_what_cannot_be_honoured_is_refused(change, message):
    with pytest.raises(ConfigError, match="cannot be used") as raised:
        DecoderConfig.from_hf(LLAMA | change)
    assert any(message in problem for problem in raised.value.problems), raised.value


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "num_hidden_layers", "rms_norm_eps", "hidden_act"])
def test_a_missing_key_is_named(key):
    with pytest.raises(ConfigError, match=f"config key '{key}' is missing"):
        DecoderConfig.from_hf({name: value for name, value in LLAMA.items() if name != key})


def test_qwen3_does_not_guess_its_head_dim():
    with pytest.raises(ConfigError, match="'head_dim' is missing"):
        DecoderConfig.from_hf(family("qwen3", head_dim=None))


def test_all_problems_come_in_one_error():
    broken = LLAMA | {"hidden_act": "relu", "num_key_value_heads": 3, "rope_scaling": {"type": "foo"}}
    with pytest.raises(ConfigError) as raised:
        DecoderConfig.from_hf(broken)
    assert len(raised.value.problems) == 3


def test_what_config_json_cannot_express_is_not_written():
    config = dataclasses.replace(DecoderConfig.from_hf(LLAMA), attention_bias=True)  # of q, k, v alone
    with pytest.raises(ConfigError, match=r"config\.json cannot express"):
        config.to_hf()


GGUF = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 128,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 48,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 9.999999747378752e-06,
    "llama.rope.freq_base": 10000.0,
    "llama.vocab_size": 64,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.eot_token_id": 3,
    "tokenizer.ggml.bos_token_id": 1,
}


def test_gguf_metadata_gives_the_same_configuration():
    config = DecoderConfig.from_gguf(GGUF, ["output.weight"])
    assert config == DecoderConfig.from_hf(LLAMA | {"eos_token_id": [2, 3]})
    assert DecoderConfig.from_gguf(GGUF).tie_word_embeddings


def test_gguf_rope_scaling_and_window():
    scaled = GGUF | {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}
    assert DecoderConfig.from_gguf(scaled).rope == RopeConfig(
        kind="yarn", factor=4.0, original_max_position_embeddings=32
    )
    linear = GGUF | {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    assert DecoderConfig.from_gguf(linear).rope == RopeConfig(kind="linear", factor=2.0)
    windowed = DecoderConfig.from_gguf(GGUF | {"llama.attention.sliding_window": 16})
    assert (windowed.family, windowed.windows) == ("mistral", (16, 16))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"general.architecture": "gemma"}, "architecture 'gemma' is not known"),
        ({"llama.expert_count": 8}, "mixture of 8 experts"),
        ({"llama.rope.dimension_count": 4}, "only 4 of 8 head dimensions rotate"),
        ({"llama.attention.value_length": 4}, "values of width 4 beside keys of 8"),
        ({"llama.rope.scaling.type": "longrope"}, "rope scaling type 'longrope'"),
        ({"llama.attention.head_count_kv": [2, 1]}, "differs from layer to layer"),
        ({"llama.attention.head_count": []}, "'llama.attention.head_count' is missing"),
        ({"llama.block_count": None}, "'llama.block_count' is missing"),
    ],
)
def test_gguf_metadata_that_cannot_be_honoured(change, message):
    with pytest.raises(ConfigError, match=message):
        DecoderConfig.from_gguf(GGUF | change)
