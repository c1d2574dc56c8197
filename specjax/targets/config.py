"""What a decoder of the Llama line is: one frozen, hashable description, read from `config.json` or GGUF metadata.

Reading is strict: whatever the decoder cannot honour is refused, all of it in one error, before a tensor is opened.
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from specjax.targets.rope import RopeConfig

__all__ = ["ConfigError", "DecoderConfig", "RopeConfig", "expected_tensors"]

# Architecture name of each family in config.json; a family's name is transformers' model_type.
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

# Keys that change the arithmetic in a way the decoder does not have. Absent, null and false are fine.
_UNSUPPORTED = (
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "no_rope_layers",
    "num_experts",
    "num_local_experts",
    "quantization_config",
    "residual_multiplier",
)


class ConfigError(ValueError):
    """A model description that cannot be honoured. `problems` holds one line for each reason."""

    def __init__(self, what: str, problems: Collection[str]):
        self.problems = tuple(problems)
        super().__init__(f"{what} cannot be used:" + "".join(f"\n  - {problem}" for problem in self.problems))


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The shape and the arithmetic of a decoder.

    Attributes:
        family: a key of `ARCHITECTURES`.
        vocab_size: rows of the embedding.
        hidden_size: model width.
        intermediate_size: width of the gated MLP.
        num_layers: decoder layers.
        num_heads: query heads.
        num_kv_heads: key/value heads; divides `num_heads`.
        head_dim: width of a head, even; need not be `hidden_size / num_heads`.
        rms_norm_eps: epsilon of every RMSNorm.
        rope: the rotation.
        max_position_embeddings: context length that the model was made for.
        tie_word_embeddings: the head is the embedding.
        attention_bias: query, key and value projections have biases.
        output_bias: the attention's output projection has one.
        mlp_bias: the MLP's projections have them.
        qk_norm: RMSNorm over each query and key head before the rotation.
        windows: for each layer, how many of the newest positions a query sees (itself included), or None for all.
        eos_token_ids: tokens that end a text.
        bos_token_id: token that starts one, if any.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int | None, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    def __post_init__(self):
        if not self.windows:
            object.__setattr__(self, "windows", (None,) * self.num_layers)
        if problems := self._problems():
            raise ConfigError(f"decoder configuration of family {self.family!r}", problems)

    def _problems(self) -> list[str]:
        found = []
        if self.family not in ARCHITECTURES:
            found.append(f"family {self.family!r} is not known; known are {', '.join(ARCHITECTURES)}")
        sizes = (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
        )
        bad = [name for name in (*sizes, "max_position_embeddings") if not _is_size(getattr(self, name))]
        found += [f"{name} must be a positive integer, got {getattr(self, name)!r}" for name in bad]
        if isinstance(self.rms_norm_eps, bool) or not isinstance(self.rms_norm_eps, float) or self.rms_norm_eps <= 0:
            found.append(f"rms_norm_eps must be a positive number, got {self.rms_norm_eps!r}")
        found += self.rope.problems()
        if bad:
            return found
        if self.num_heads % self.num_kv_heads:
            found.append(f"{self.num_heads} query heads cannot be shared out to {self.num_kv_heads} key/value heads")
        if self.head_dim % 2 or self.head_dim < 4:
            found.append(f"head_dim must be even and at least 4 to rotate, got {self.head_dim}")
        if len(self.windows) != self.num_layers:
            found.append(f"{len(self.windows)} attention windows for {self.num_layers} layers")
        found += [
            f"a window must be a positive integer, got {w!r}"
            for w in set(self.windows)
            if w is not None and not _is_size(w)
        ]
        for token in (*self.eos_token_ids, *(() if self.bos_token_id is None else (self.bos_token_id,))):
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self.vocab_size:
                found.append(f"special token id {token!r} is outside the vocabulary of {self.vocab_size}")
        return found

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "DecoderConfig":
        """Read a Hugging Face `config.json`, as transformers 4 or 5 writes it.

        Raises:
            ConfigError: an unknown architecture, a missing key, or anything that the decoder cannot honour; it lists
                every reason.
        """
        found: list[str] = []
        family = _family(config, found)
        required = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
        required += ["max_position_embeddings", "rms_norm_eps", "hidden_act"]
        # Where transformers' default is not derived from the other keys, a missing key would be a guess.
        required += {"mistral": ["num_key_value_heads"], "qwen2": ["num_key_value_heads"]}.get(family or "", [])
        required += {"qwen3": ["num_key_value_heads", "head_dim"]}.get(family or "", [])
        missing = [key for key in required if config.get(key) is None]
        found += [f"config key {key!r} is missing" for key in missing]
        found += [f"config key {key!r} = {config[key]!r} is not supported" for key in _UNSUPPORTED if config.get(key)]
        if (act := config.get("hidden_act")) not in (None, "silu", "swish"):
            found.append(f"activation {act!r} is not supported, only 'silu'")
        rope, problems = RopeConfig.from_hf(config)
        found += problems
        if family is None or missing:
            raise ConfigError("config.json", found)

        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        head_dim = config.get("head_dim")
        if head_dim is None and _is_size(hidden) and _is_size(heads):
            if hidden % heads:
                found.append(f"head_dim is absent and {heads} heads do not divide the hidden size {hidden}")
            head_dim = hidden // heads
        biased = bool(config.get("attention_bias")) and family in ("llama", "qwen3")
        eos = config.get("eos_token_id")
        layers = config["num_hidden_layers"]
        values = {
            "family": family,
            "vocab_size": config["vocab_size"],
            "hidden_size": hidden,
            "intermediate_size": config["intermediate_size"],
            "num_layers": layers,
            "num_heads": heads,
            "num_kv_heads": config.get("num_key_value_heads") or heads,
            "head_dim": head_dim,
            "rms_norm_eps": config["rms_norm_eps"],
            "rope": rope,
            "max_position_embeddings": config["max_position_embeddings"],
            "tie_word_embeddings": bool(config.get("tie_word_embeddings")),
            "attention_bias": biased or family == "qwen2",
            "output_bias": biased,
            "mlp_bias": bool(config.get("mlp_bias")) and family == "llama",
            "qk_norm": family == "qwen3",
            "windows": _windows(config, family, layers, found) if _is_size(layers) else (),
            "eos_token_ids": () if eos is None else tuple(eos) if isinstance(eos, list | tuple) else (eos,),
            "bos_token_id": config.get("bos_token_id"),
        }
        return checked("config.json", values, found)

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` of this decoder; `from_hf` reads the same configuration back.

        Raises:
            ConfigError: a combination that the family's `config.json` has no words for (a GGUF file may hold one).
        """
        out = {
            "architectures": [ARCHITECTURES[self.family]],
            "model_type": self.family,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "max_position_embeddings": self.max_position_embeddings,
            "tie_word_embeddings": self.tie_word_embeddings,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": self.eos_token_ids[0] if len(self.eos_token_ids) == 1 else list(self.eos_token_ids) or None,
            **self.rope.to_hf(),
        }
        if self.family in ("llama", "qwen3"):
            out["attention_bias"] = self.attention_bias
        if self.family == "llama":
            out["mlp_bias"] = self.mlp_bias
        window = next((w for w in self.windows if w is not None), None)
        if self.family == "mistral":
            out["sliding_window"] = window
        if self.family in ("qwen2", "qwen3"):
            kinds = ["full_attention" if w is None else "sliding_attention" for w in self.windows]
            out |= {"use_sliding_window": window is not None, "sliding_window": window, "layer_types": kinds}
            out["max_window_layers"] = kinds.index("sliding_attention") if window is not None else self.num_layers
        if DecoderConfig.from_hf(out) != self:
            reason = "its biases or attention windows are not those of the family, so config.json cannot express them"
            raise ConfigError(f"decoder configuration of family {self.family!r}", [reason])
        return out

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], tensors: Collection[str] = ()) -> "DecoderConfig":
        """Read the metadata of a GGUF file; see `config_gguf.read_metadata`."""
        from specjax.targets.config_gguf import read_metadata

        return read_metadata(metadata, tensors)


def expected_tensors(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of a decoder under its Hugging Face name, with its shape; matrices are `[out, in]`."""
    d, f, inner = config.hidden_size, config.head_dim, config.intermediate_size
    query, key = config.num_heads * f, config.num_kv_heads * f
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, d)}
    for layer in range(config.num_layers):
        at = f"model.layers.{layer}"
        shapes[f"{at}.input_layernorm.weight"] = (d,)
        linears = {
            "self_attn.q_proj": (query, d, config.attention_bias),
            "self_attn.k_proj": (key, d, config.attention_bias),
            "self_attn.v_proj": (key, d, config.attention_bias),
            "self_attn.o_proj": (d, query, config.output_bias),
            "mlp.gate_proj": (inner, d, config.mlp_bias),
            "mlp.up_proj": (inner, d, config.mlp_bias),
            "mlp.down_proj": (d, inner, config.mlp_bias),
        }
        for name, (rows, columns, bias) in linears.items():
            shapes[f"{at}.{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{at}.{name}.bias"] = (rows,)
        if config.qk_norm:
            shapes[f"{at}.self_attn.q_norm.weight"] = shapes[f"{at}.self_attn.k_norm.weight"] = (f,)
        shapes[f"{at}.post_attention_layernorm.weight"] = (d,)
    shapes["model.norm.weight"] = (d,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, d)
    return shapes


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def checked(what: str, values: dict[str, Any], found: list[str]) -> DecoderConfig:
    """Build the configuration, its own complaints joined to those found while reading."""
    try:
        config = DecoderConfig(**values)
    except ConfigError as error:
        raise ConfigError(what, dict.fromkeys([*found, *error.problems])) from None
    if found:
        raise ConfigError(what, found)
    return config


def _family(config: Mapping[str, Any], found: list[str]) -> str | None:
    named = config.get("model_type")
    architectures = config.get("architectures") or []
    known = {architecture: family for family, architecture in ARCHITECTURES.items()}
    for architecture in architectures:
        if architecture not in known:
            found.append(f"architecture {architecture!r} is not known; known are {', '.join(known)}")
        elif named is not None and known[architecture] != named:
            found.append(f"model_type {named!r} does not belong to architecture {architecture!r}")
    if named is None and architectures:
        return known.get(architectures[0])
    if named not in ARCHITECTURES:
        found.append(f"model_type {named!r} is not known; known are {', '.join(ARCHITECTURES)}")
        return None
    return named


def _windows(config: Mapping[str, Any], family: str, layers: int, found: list[str]) -> tuple[int | None, ...]:
    """Per-layer attention windows, by the rules of each family's transformers configuration."""
    window, kinds = config.get("sliding_window"), config.get("layer_types")
    if family == "llama":
        if window is not None:
            found.append(f"sliding_window {window!r} is not a key of the llama architecture; use mistral or null")
        slides = [False] * layers
    elif family == "mistral":
        slides = [window is not None] * layers
    else:
        window = window if config.get("use_sliding_window") else None
        first = config.get("max_window_layers", 28)
        slides = [window is not None and layer >= first for layer in range(layers)]
    if kinds is not None:
        if unknown := sorted(set(kinds) - {"full_attention", "sliding_attention"}):
            found.append(f"layer types {', '.join(map(repr, unknown))} are not known")
        if len(kinds) != layers:
            found.append(f"layer_types has {len(kinds)} entries for {layers} layers")
        stated = [kind == "sliding_attention" for kind in kinds]
        if any(stated) and window is None:
            found.append("layer_types asks for sliding attention, but no sliding_window is in force")
        if family in ("llama", "mistral") and stated != slides:
            found.append(f"layer_types {kinds} disagrees with sliding_window {window!r} for {family}")
        slides = stated
    return tuple(window if slide else None for slide in slides)
