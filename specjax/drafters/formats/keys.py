"""Strict reading of a drafter's `config.json`: every key is read, known to be harmless, or a problem."""

import dataclasses
import re
from collections.abc import Collection, Mapping
from typing import Any

from specjax.targets.rope import KINDS, RopeConfig

# Keys that describe the file, training or generation, and change nothing in a forward pass.
_HARMLESS = re.compile(
    r"_.*|architectures|model_type|auto_map|transformers_version|torch_dtype|dtype|torchscript|use_bfloat16"
    r"|initializer_range|use_cache|pretraining_tp|.*_dropout|dropout|.*_p?drop|rope_table_dtype"
    r"|(bos|eos|pad|sep|cls|unk|decoder_start|image|video|audio|vision_start|vision_end)_token_id"
    r"|max_position_embeddings|max_window_layers|max_length|min_length|tie_word_embeddings|tie_encoder_decoder"
    r"|return_dict|output_.*|id2label|label2id|num_labels|problem_type|is_encoder_decoder|is_decoder|add_cross_attention"
    r"|cross_attention_hidden_size|chunk_size_feed_forward|pruned_heads|tokenizer_class|prefix|finetuning_task"
    r"|task_specific_params|name_or_path|generation_config|license|library_name"
    r"|num_anchors|ttt_length|step_loss_decay|draft_num_hidden_layers|.*_loss_.*|loss_.*|confidence_head_alpha"
    r"|embed_requires_grad|down_sample_ratio(_min)?|selector_loss.*|initializer_.*|bias|candidate_head|acceptance"
)


@dataclasses.dataclass
class Reading:
    """What a packaging says, before anything is checked against the tensors.

    Attributes:
        values: fields of `HeadConfig`; `own_embedding`, `own_head` and the target's sizes are filled in from the files.
        names: canonical name of each tensor, by its name in the files; tensors of others (the target's) are left out.
        notes: what was decided or ignored, for the user.
        problems: why it cannot be used.
        broken: a size is missing, so the shapes of the tensors cannot be told.
    """

    values: dict[str, Any]
    names: dict[str, str]
    notes: list[str]
    problems: list[str]
    broken: bool = False


class Keys:
    """A configuration of one or more sections, the first one that has a key winning.

    Args:
        sections: name to mapping, in order of precedence; the name "" is the top level.
    """

    def __init__(self, sections: Mapping[str, Mapping[str, Any]]):
        self.sections = dict(sections)
        self.problems: list[str] = []
        self.broken = False  # a size is missing, so shapes cannot be told
        self._read = {name for name in sections if name}

    def get(self, name: str, default: Any = None, *aliases: str) -> Any:
        """A key's value, `default` where it is absent or null; two sections that disagree are a problem."""
        names = (name, *aliases)
        self._read.update(names)
        found = [
            (f"{section}.{key}" if section else key, values[key])
            for section, values in self.sections.items()
            for key in names
            if values.get(key) is not None
        ]
        for key, value in found[1:]:
            if value != found[0][1]:
                self.problems.append(f"{found[0][0]} is {found[0][1]!r} but {key} is {value!r}")
        return found[0][1] if found else default

    def size(self, name: str, default: int | None = None, *aliases: str, least: int = 1) -> int:
        """A whole number of at least `least`; without a default it must be there."""
        value = self.get(name, default, *aliases)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            what = "is missing" if value is None else f"must be a whole number of at least {least}, got {value!r}"
            self.problems.append(f"config key {name!r} {what}")
            self.broken = True
            return least
        return value

    def number(self, name: str, default: float | None, *aliases: str) -> float:
        """A real number."""
        value = self.get(name, default, *aliases)
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.problems.append(f"config key {name!r} {'is missing' if value is None else f'is no number: {value!r}'}")
            self.broken = True
            return 1.0
        return float(value)

    def flag(self, name: str, default: bool, *aliases: str) -> bool:
        """True or false."""
        value = self.get(name, default, *aliases)
        if not isinstance(value, bool):
            self.problems.append(f"config key {name!r} must be true or false, got {value!r}")
            return default
        return value

    def ids(self, name: str, default: Collection[int] | None = None, *aliases: str) -> tuple[int, ...]:
        """A list of whole numbers."""
        value = self.get(name, default, *aliases)
        whole = isinstance(value, list | tuple) and all(isinstance(v, int) and not isinstance(v, bool) for v in value)
        if not whole or not value:
            what = "is missing" if value is None else f"must be a list of layers, got {value!r}"
            self.problems.append(f"config key {name!r} {what}")
            self.broken = True
            return ()
        return tuple(value)

    def skip(self, *names: str) -> None:
        """Keys that are known and not needed."""
        self._read.update(names)

    def unknown(self) -> list[str]:
        """One problem for each key that nobody read and that asks for something."""
        return [
            f"config key {f'{section}.{key}' if section else key!r} = {value!r} is not known for this format"
            for section, values in self.sections.items()
            for key, value in values.items()
            if key not in self._read and not _HARMLESS.fullmatch(key) and value not in (None, False, [], {})
        ]


def decoder(keys: Keys, *, default_window: bool = True) -> dict[str, Any]:
    """The fields of a `HeadConfig` that every Llama- or Qwen-style decoder configuration has."""
    hidden, heads = keys.size("hidden_size"), keys.size("num_attention_heads")
    layers = keys.size("num_hidden_layers")
    if keys.get("head_dim") is None and hidden % heads:
        keys.problems.append(f"head_dim is absent and {heads} heads do not divide the hidden size {hidden}")
    if (act := keys.get("hidden_act", "silu")) not in ("silu", "swish"):
        keys.problems.append(f"activation {act!r} is not supported, only 'silu'")
    for name in ("quantization_config", "compression_config"):
        if keys.get(name):
            keys.problems.append(f"its weights are quantised ({name}); a drafter in bfloat16 or float32 is needed")
    return {
        "num_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": keys.size("intermediate_size"),
        "num_heads": heads,
        "num_kv_heads": keys.size("num_key_value_heads", heads),
        "head_dim": keys.size("head_dim", max(hidden // heads, 1)),
        "rms_norm_eps": keys.number("rms_norm_eps", None),
        "attention_bias": keys.flag("attention_bias", False),
        "windows": windows(keys, layers) if default_window else (None,) * layers,
    }


def windows(keys: Keys, layers: int) -> tuple[int | None, ...]:
    """Sliding window of each layer, by `layer_types`, else by `use_sliding_window`."""
    kinds, window = keys.get("layer_types"), keys.get("sliding_window")
    on = keys.get("use_sliding_window")
    if kinds is None:
        first = keys.get("max_window_layers", 28)  # the default of Qwen3's configuration
        return tuple(window if on and layer >= first else None for layer in range(layers))
    if unknown := sorted(set(kinds) - {"full_attention", "sliding_attention"}):
        keys.problems.append(f"layer types {', '.join(map(repr, unknown))} are not known")
    if len(kinds) != layers:
        keys.problems.append(f"layer_types has {len(kinds)} entries for {layers} layers")
    slides = [kind == "sliding_attention" for kind in kinds]
    if any(slides) and (window is None or on is False):
        keys.problems.append("layer_types asks for sliding attention, but no sliding_window is in force")
    return tuple(window if slide else None for slide in slides)


def rope(keys: Keys, *, ignore: Collection[str] = (), partial: bool = False) -> dict[str, Any]:
    """The rotation: fields `rope` and `rotary_dims`.

    Args:
        keys: the configuration.
        ignore: what is inherited noise there: "scaling", "partial_rotary_factor".
        partial: whether `partial_rotary_factor` is honoured where it is declared.
    """
    names = ("rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings")
    given = {name: keys.get(name) for name in (*names, "max_position_embeddings")}
    factor = keys.get("partial_rotary_factor")
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(given[name], Mapping):
            inner = {k: v for k, v in given[name].items() if k not in ("mrope_section", "mrope_interleaved")}
            factor = inner.pop("partial_rotary_factor", None) or factor
            given[name] = inner
    if "scaling" in ignore:
        # Noise of a known kind is ignored; of a rotation that nobody knows, nothing can be said.
        kind = RopeConfig.from_hf(given)[0].kind
        keys.problems += RopeConfig(kind=kind).problems() if kind not in KINDS else []
        theta = (given["rope_parameters"] or {}).get("rope_theta") or given["rope_theta"]
        given = {"rope_theta": theta, "max_position_embeddings": given["max_position_embeddings"]}
    config, problems = RopeConfig.from_hf(given)
    keys.problems += problems
    dims = None
    if factor not in (None, 1, 1.0) and "partial_rotary_factor" not in ignore:
        if partial:
            head = keys.get("head_dim") or keys.size("hidden_size") // keys.size("num_attention_heads")
            dims = int(head * factor)
        else:
            keys.problems.append(f"partial_rotary_factor {factor!r} is not supported here; the whole head must rotate")
    return {"rope": config, "rotary_dims": dims}
