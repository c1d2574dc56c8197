"""Tiny checkpoints, written the way others write them."""

import json
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import safetensors.numpy
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from specjax.targets.config import DecoderConfig, expected_tensors

BASE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}> {% endif %}"
)
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def tokens() -> list[str]:
    """A byte-level vocabulary of 96: three control tokens, printable ASCII less three, one merged pair, and a blank."""
    return ["<unk>", "<s>", "</s>", "Ġ", *(chr(c) for c in range(33, 124)), "ab"]


def hf_config(family: str = "llama", **changes) -> dict:
    names = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    return BASE | {"model_type": family, "architectures": [names[family] + "ForCausalLM"]} | changes


def random_tensors(config: dict, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = expected_tensors(DecoderConfig.from_hf(config))
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.fixture
def hf_folder(tmp_path):
    """A function that writes a Hugging Face folder and returns it with its tensors."""

    def write(config=None, tensors=None, shards=1, name="model"):
        config = hf_config() if config is None else config
        tensors = random_tensors(config) if tensors is None else tensors
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        backend = tokenizers.Tokenizer(models.BPE({t: i for i, t in enumerate(tokens())}, [("a", "b")]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens([tokenizers.AddedToken(t, special=True) for t in tokens()[:3]])
        backend.save(str(folder / "tokenizer.json"))
        settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": TEMPLATE}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        if shards == 1:
            safetensors.numpy.save_file(tensors, folder / "model.safetensors")
            return folder, tensors
        where = {}
        for shard in range(shards):
            file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
            part = {name: tensors[name] for name in list(tensors)[shard::shards]}
            safetensors.numpy.save_file(part, folder / file)
            where |= dict.fromkeys(part, file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
        return folder, tensors

    return write


def permute(values: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to query and key rows of a llama."""
    return (
        values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
    )


def write_gguf(path, config: dict, tensors: dict[str, np.ndarray], kind=gguf.GGMLQuantizationType.F32, **extra) -> None:
    """A GGUF file as llama.cpp's converter writes it: matrices as `kind`, vectors as F32."""
    arch = {"mistral": "llama"}.get(config["model_type"], config["model_type"])
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config.get("rope_theta", 10000.0))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens())
    writer.add_token_types([3] * 3 + [1] * 93)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, values in tensors.items():
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config["num_attention_heads"] if "q_proj" in name else config["num_key_value_heads"]
            values = permute(values, heads)
        add_tensor(writer, gguf_name(name), values, kind if values.ndim == 2 else gguf.GGMLQuantizationType.F32)
    for name, values in extra.items():
        add_tensor(writer, name.replace("__", "."), values, gguf.GGMLQuantizationType.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tensor(writer, name: str, values: np.ndarray, kind) -> None:
    writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)


def gguf_name(name: str) -> str:
    stem, suffix = name.rsplit(".", 1)
    if stem in GGUF_NAMES:
        return f"{GGUF_NAMES[stem]}.{suffix}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{GGUF_NAMES[part]}.{suffix}"


@pytest.fixture
def make():
    """The functions above, for the tests beside this file."""
    return SimpleNamespace(
        add_tensor=add_tensor,
        gguf_name=gguf_name,
        hf_config=hf_config,
        permute=permute,
        random_tensors=random_tensors,
        write_gguf=write_gguf,
    )
