"""The metadata of a GGUF file as a decoder configuration. Key names are those of the GGUF specification."""

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from specjax.targets.config import ConfigError, DecoderConfig, RopeConfig, checked


def read_metadata(metadata: Mapping[str, Any], tensors: Collection[str] = ()) -> DecoderConfig:
    """Read the metadata of a GGUF file.

    Args:
        metadata: key to value, as in the file (`general.architecture`, `llama.block_count`, ...).
        tensors: names of the file's tensors, which alone tell whether the head is tied and whether biases exist.

    Raises:
        ConfigError: as `DecoderConfig.from_hf`.
    """
    found: list[str] = []
    arch = metadata.get("general.architecture")
    if arch not in ("llama", "qwen2", "qwen3"):
        raise ConfigError("GGUF file", [f"architecture {arch!r} is not known; known are llama, qwen2, qwen3"])

    def get(key: str, default: Any = None) -> Any:
        value = metadata.get(f"{arch}.{key}", default)
        if isinstance(value, list):
            if len(set(value)) != 1:
                found.append(f"{arch}.{key} differs from layer to layer: {value}")
            value = value[0] if value else None
        return _shortest(value) if isinstance(value, float) else value

    required = ("block_count", "embedding_length", "feed_forward_length", "attention.head_count", "context_length")
    missing = [key for key in (*required, "attention.layer_norm_rms_epsilon") if get(key) is None]
    if missing:
        raise ConfigError("GGUF file", [f"metadata key '{arch}.{key}' is missing" for key in missing])
    heads, hidden, context = get("attention.head_count"), get("embedding_length"), get("context_length")
    head_dim = get("attention.key_length", hidden // heads if heads else 0)
    if get("attention.value_length", head_dim) != head_dim:
        found.append(f"values of width {get('attention.value_length')} beside keys of {head_dim} are not supported")
    if get("rope.dimension_count", head_dim) != head_dim:
        found.append(f"only {get('rope.dimension_count')} of {head_dim} head dimensions rotate; all must")
    if get("expert_count"):
        found.append(f"mixture of {get('expert_count')} experts is not supported")
    window = get("attention.sliding_window")
    if window and window < context and arch != "llama":
        found.append(f"sliding window {window} without a list of its layers is not supported for {arch}")
    # llama.cpp files Mistral under "llama"; only the window tells them apart, and it covers every layer.
    family = "mistral" if arch == "llama" and window else arch
    layers = get("block_count")
    vocab = get("vocab_size") or len(metadata.get("tokenizer.ggml.tokens", ()))
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    values = {
        "family": family,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": get("feed_forward_length"),
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": float(get("attention.layer_norm_rms_epsilon")),
        "rope": _rope(get, context, found),
        "max_position_embeddings": context,
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors or arch == "qwen2",
        "output_bias": "blk.0.attn_output.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "qk_norm": arch == "qwen3",
        "windows": (window,) * layers if family == "mistral" else (),
        "eos_token_ids": tuple(dict.fromkeys(end for end in ends if end is not None)),
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
    }
    return checked("GGUF file", values, found)


def _shortest(value: float) -> float:
    """GGUF stores float32; 9.999999747378752e-06 was written as 1e-05 and is read as such."""
    return float(str(np.float32(value)))


def _rope(get: Callable[..., Any], context: int, found: list[str]) -> RopeConfig:
    kind, factor = get("rope.scaling.type", "none"), get("rope.scaling.factor")
    theta = float(get("rope.freq_base", 10_000.0))
    if kind == "none":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=factor)
    if kind != "yarn":
        found.append(f"rope scaling type {kind!r} is not known; known are none, linear, yarn")
        return RopeConfig(theta=theta)
    for key in ("yarn_ext_factor", "yarn_log_multiplier", "yarn_attn_factor", "attn_factor"):
        if get(f"rope.scaling.{key}") not in (None, 1.0, 0.0):
            found.append(f"rope scaling key {key!r} = {get(f'rope.scaling.{key}')} is not supported")
    original = get("rope.scaling.original_context_length") or (math.ceil(context / factor) if factor else None)
    fast, slow = get("rope.scaling.yarn_beta_fast"), get("rope.scaling.yarn_beta_slow")
    return RopeConfig(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=fast,
        beta_slow=slow,
    )
