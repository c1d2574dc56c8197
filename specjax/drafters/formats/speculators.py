"""Checkpoints of the `speculators` library: eagle3, peagle, mtp, dflash, dflash2 and dspark.

The layer's own configuration is nested in `transformer_layer_config`, tap ids count the layers already
executed (that is `t` itself), and the embedding and the head are the verifier's unless the file has them.
"""

from typing import Any

from specjax.drafters.config import HeadConfig
from specjax.drafters.formats.files import Folder
from specjax.drafters.formats.keys import Keys, Reading, decoder, rope
from specjax.targets.config import ARCHITECTURES, DecoderConfig

FORMATS = tuple(f"speculators-{family}" for family in ("eagle3", "peagle", "mtp", "dflash", "dflash2", "dspark"))

# Layers by model_type: (per-head norms, norms with 1 + w, output gate).
_LAYERS = {
    "llama": (False, False, False),
    "qwen3": (True, False, False),
    "qwen3_next": (True, True, True),
    "qwen3_5_text": (True, True, True),
}
_MTP_NAMES = {
    "input_proj.weight": "fuse.weight",
    "hidden_layernorm.weight": "hidden_norm.weight",
    "token_layernorm.weight": "embedding_norm.weight",
    "final_layernorm.weight": "norm.weight",
}
_CLASSES = {
    "eagle3": "Eagle3Speculator",
    "peagle": "PEagleSpeculator",
    "mtp": "MTPDraftModel",
    "dflash": "DFlashSpeculator",
    "dflash2": "DFlash2DraftModel",
    "dspark": "DSparkSpeculator",
}


def read(folder: Folder, target: DecoderConfig, format: str) -> Reading:
    """Read one of `FORMATS`."""
    family = format.removeprefix("speculators-")
    config = folder.config
    layer, about = config.get("transformer_layer_config"), config.get("speculators_config") or {}
    keys = Keys({"": config, "transformer_layer_config": layer if isinstance(layer, dict) else {}})
    keys.skip("speculators_config", "speculators_model_type", "speculators_version")
    notes: list[str] = []
    if not isinstance(layer, dict):
        keys.problems.append("config key 'transformer_layer_config' is missing")
    _verifier(about, target, keys, notes)
    kind = (layer or {}).get("model_type", "qwen3")
    known = {
        "mtp": ("llama", "qwen3", "qwen3_next", "qwen3_5_text"),
        "eagle3": ("llama", "qwen3"),
        "peagle": ("llama", "qwen3"),
    }.get(family, ("qwen3",))
    if kind not in known:
        keys.problems.append(f"{family} with layers of model_type {kind!r} is not supported, only {', '.join(known)}")
    qk_norm, offset, gate = _LAYERS.get(kind, (False, False, False))
    if family == "mtp" and gate:  # the layers of a hybrid target; the module's one layer has full attention
        keys.skip("layer_types", "use_sliding_window", "full_attention_interval", *_LINEAR)
    values = decoder(keys, default_window=not (family == "mtp" and gate)) | rope(keys, partial=gate)
    vocab = keys.size("vocab_size")
    values |= {
        "family": family,
        "qk_norm": qk_norm,
        "norm_offset": offset,
        "attention_gate": gate,
        "vocab_size": vocab,
        "draft_vocab_size": keys.size("draft_vocab_size", vocab),
        "target_hidden_size": keys.size("target_hidden_size", values["hidden_size"]),
    }
    names = {name: name for name in folder.shapes}
    if family == "mtp":
        _mtp(folder, keys, values, names)
    elif family in ("eagle3", "peagle"):
        values |= _eagle(keys, about, family, target)
    else:
        values |= _block(keys, about, family, target, values, notes)
    return Reading(values, names, notes, keys.problems + keys.unknown(), keys.broken)


_LINEAR = tuple(
    f"linear_{x}" for x in ("conv_kernel_dim", "key_head_dim", "num_key_heads", "num_value_heads", "value_head_dim")
)
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def _mtp(folder: Folder, keys: Keys, values: dict[str, Any], names: dict[str, str]) -> None:
    modules = keys.size("num_nextn_predict_layers", 1)
    if modules != 1:
        keys.problems.append(f"it has {modules} MTP modules; one is supported")
    if any(keys.get(name) for name in _EXPERTS):
        keys.problems.append("its layer is a mixture of experts; MTP modules with a dense MLP are supported")
    values["num_layers"], values["windows"] = 1, values["windows"][:1]
    for name in folder.shapes:
        inner = name.removeprefix("mtp_layers.0.")
        if inner != name:
            names[name] = _MTP_NAMES.get(inner, f"layers.0.{inner}")


def _eagle(keys: Keys, about: Any, family: str, target: DecoderConfig) -> dict[str, Any]:
    default = (2, target.num_layers // 2, target.num_layers - 3)
    values: dict[str, Any] = {"taps": keys.ids("eagle_aux_hidden_state_layer_ids", default)}
    for flag in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
        values[flag] = keys.flag(flag, False)
    if family == "peagle":
        values["mask_token_id"] = keys.size("mask_token_id", None, "ptd_token_id", "pard_token", least=0)
        values["depths"] = keys.size("num_depths", _tokens(about) or 8)
    return values


def _block(
    keys: Keys, about: Any, family: str, target: DecoderConfig, values: dict[str, Any], notes: list[str]
) -> dict[str, Any]:
    ids = keys.ids("aux_hidden_state_layer_ids")
    taps = tuple(t for t in ids if t != target.num_layers)
    if taps != ids:
        notes.append(
            f"tap {target.num_layers} is the target's last hidden state, which only training reads; it is left out"
        )
    block, tokens = keys.size("block_size", 8, least=2), _tokens(about)
    declared = keys.flag("sample_from_anchor", family == "dspark")
    stated = "sample_from_anchor" in keys.sections[""]
    shifted = declared if stated or tokens is None or block - tokens not in (0, 1) else block == tokens
    if not stated:
        notes.append(
            f"sample_from_anchor is absent: a block of {block} rows makes {block if shifted else block - 1} drafts"
        )
    symmetric = keys.flag("sliding_window_non_causal", family == "dflash2")
    out: dict[str, Any] = {
        "taps": taps,
        "qk_norm": True,
        "block_size": block,
        "shifted": shifted,
        "mask_token_id": keys.size("mask_token_id", None, least=0),
        "block_causal": tuple(window is not None and not symmetric for window in values["windows"]),
    }
    if family == "dflash2":
        out |= {
            "conv_kernel": keys.size("conv_kernel_size", 2),
            "conv_group": keys.size("conv_group_size", 16),
            "selector_rank": keys.size("selector_rank", 256),
            "selector_top_k": keys.size("selector_top_k", 16),
        }
    if family == "dspark":
        out |= {
            "markov_rank": keys.size("markov_rank", 256, least=0),
            "markov": keys.get("markov_head_type", "vanilla"),
            "confidence": keys.flag("enable_confidence_head", True),
            "confidence_with_markov": keys.flag("confidence_head_with_markov", True),
        }
    return out


def _tokens(about: Any) -> int | None:
    """`speculative_tokens` of the default proposal method."""
    methods = about.get("proposal_methods") or []
    chosen = [m for m in methods if m.get("proposal_type") == about.get("default_proposal_method")] or methods
    return chosen[0].get("speculative_tokens") if chosen else None


def _verifier(about: Any, target: DecoderConfig, keys: Keys, notes: list[str]) -> None:
    verifier = about.get("verifier") or {}
    ours, theirs = ARCHITECTURES.get(target.family, target.family), verifier.get("architectures") or []
    if theirs and ours not in theirs:
        keys.problems.append(f"it was made for a verifier of {', '.join(theirs)}, the target is {ours}")
    if verifier.get("name_or_path"):
        notes.append(f"it was made for {verifier['name_or_path']}")


def write(config: HeadConfig, target: DecoderConfig, format: str) -> tuple[dict[str, Any], dict[str, str]]:
    """`config.json` of a drafter, and the published prefix of each canonical one that differs."""
    family = config.family
    block = family in ("dflash", "dflash2", "dspark")
    kind = "qwen3_5_text" if config.attention_gate else "qwen3" if config.qk_norm else "llama"
    drafts = config.depths or 5
    out: dict[str, Any] = {
        "architectures": [_CLASSES[family]],
        "speculators_model_type": family,
        "transformer_layer_config": {"model_type": kind},
        "draft_vocab_size": config.draft_vocab_size,
    }
    if family == "mtp":
        out["num_nextn_predict_layers"] = 1
    if family in ("eagle3", "peagle"):
        out |= {
            "eagle_aux_hidden_state_layer_ids": list(config.taps),
            "target_hidden_size": config.target_hidden_size,
            **{
                flag: getattr(config, flag)
                for flag in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
            },
        }
    if family == "peagle":
        out["mask_token_id"] = config.mask_token_id
    if block:
        drafts = config.block_size if config.shifted else config.block_size - 1
        out |= {
            "aux_hidden_state_layer_ids": list(config.taps),
            "target_hidden_size": config.target_hidden_size,
            "block_size": config.block_size,
            "sample_from_anchor": config.shifted,
            "mask_token_id": config.mask_token_id,
            "sliding_window_non_causal": not any(config.block_causal),
        }
    if family == "dflash2":
        out |= {"conv_kernel_size": config.conv_kernel, "conv_group_size": config.conv_group}
        out |= {"selector_rank": config.selector_rank, "selector_top_k": config.selector_top_k}
    if family == "dspark":
        out |= {
            "markov_rank": config.markov_rank,
            "markov_head_type": config.markov,
            "enable_confidence_head": config.confidence,
            "confidence_head_with_markov": config.confidence_with_markov,
        }
    out["speculators_config"] = {
        "algorithm": family,
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": drafts}],
        "default_proposal_method": "greedy",
        "verifier": {"name_or_path": None, "architectures": [ARCHITECTURES[target.family]]},
    }
    inverse = {ours: f"mtp_layers.0.{theirs}" for theirs, ours in _MTP_NAMES.items()}
    return out, inverse | {"layers.0.": "mtp_layers.0."} if family == "mtp" else {}
