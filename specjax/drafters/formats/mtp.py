"""MTP modules that lie inside the target's own checkpoint, whose `config.json` describes them.

DeepSeek and GLM append the module as one layer more (`model.layers.{L}.`), Qwen3-Next and its successors and
MiMo give it a prefix of its own. One module with full attention and a dense MLP is supported; latent
attention and experts are refused by name. Reading is not strict here about the configuration's other keys:
they are the target's, and its reader's business.
"""

import re
from collections.abc import Callable
from typing import Any

from specjax.drafters.formats.files import Folder
from specjax.drafters.formats.keys import Keys, Reading, decoder, rope
from specjax.targets.config import DecoderConfig

FORMATS = ("mtp-deepseek", "mtp-qwen", "mtp-mimo")

_DEEPSEEK = {
    "enorm.weight": "embedding_norm.weight",
    "hnorm.weight": "hidden_norm.weight",
    "eh_proj.weight": "fuse.weight",
    "shared_head.norm.weight": "norm.weight",
    "final_layernorm.weight": "norm.weight",  # Hy3
}
_COPIES = ("embed_tokens.weight", "shared_head.head.weight")  # of the target's embedding and head
_QWEN = {
    "fc.weight": "fuse.weight",
    "pre_fc_norm_embedding.weight": "embedding_norm.weight",
    "pre_fc_norm_hidden.weight": "hidden_norm.weight",
    "norm.weight": "norm.weight",
}
_MIMO = {
    "input_proj.weight": "fuse.weight",
    "token_layernorm.weight": "embedding_norm.weight",
    "hidden_layernorm.weight": "hidden_norm.weight",
    "final_layernorm.weight": "norm.weight",
}
_LATENT = ("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def module_prefix(folder: Folder, format: str) -> str:
    """What precedes the names of the module's tensors: a pattern with the module's number as its group."""
    if format == "mtp-deepseek":
        return r"model\.layers\.(\d+)\."
    return r"mtp\.(?:layers\.(\d+)\.)?" if format == "mtp-qwen" else r"model\.mtp_layers\.(\d+)\."


def read(folder: Folder, target: DecoderConfig, format: str) -> Reading:
    """Read one of `FORMATS` from the target's folder."""
    keys = Keys({"text_config": folder.config.get("text_config") or {}, "": folder.config})
    names, modules = _names(folder, target, format)
    has = set(names.values())
    if len(modules) > 1:
        keys.problems.append(f"it has {len(modules)} MTP modules; one is supported")
    if latent := [name for name in _LATENT if keys.get(name)]:
        keys.problems.append(f"its layer has latent attention (MLA: {', '.join(latent)}), which is not supported")
    if experts := [name for name in _EXPERTS if keys.get(name)]:
        keys.problems.append(f"its layer is a mixture of experts ({', '.join(experts)}); a dense MLP is supported")
    gated = format == "mtp-qwen"
    values: dict[str, Any] = decoder(keys, default_window=False) | rope(keys, partial=True)
    vocab = keys.size("vocab_size")
    values |= {
        "family": "mtp",
        "num_layers": 1,
        "windows": (None,),
        "vocab_size": vocab,
        "draft_vocab_size": vocab,
        "target_hidden_size": values["hidden_size"],
        "qk_norm": gated or "layers.0.self_attn.q_norm.weight" in has,
        "attention_bias": "layers.0.self_attn.q_proj.bias" in has,
        "norm_offset": gated,
        "attention_gate": gated,
        "hidden_first": format == "mtp-mimo",
    }
    notes = [f"it is the MTP module of the target's own checkpoint, {len(names)} tensors"]
    return Reading(values, names, notes, keys.problems, keys.broken)


def _names(folder: Folder, target: DecoderConfig, format: str) -> tuple[dict[str, str], set[str]]:
    """Canonical names of the module's tensors, and the modules' numbers."""
    pattern = re.compile(module_prefix(folder, format) + r"(.+)")
    outer = {"mtp-deepseek": _DEEPSEEK, "mtp-qwen": _QWEN, "mtp-mimo": _MIMO}[format]
    names, modules = {}, set()
    for name in folder.shapes:
        match = pattern.fullmatch(name)
        if match is None or (format == "mtp-deepseek" and int(match[1]) < target.num_layers):
            continue
        number, inner = match[1], match[2]
        if number is not None:
            modules.add(number)
        if format == "mtp-deepseek" and inner in _COPIES:
            continue
        # Qwen's own tensors stand beside `layers.`, the others' among the layer's.
        outside = number is None if format == "mtp-qwen" else inner in outer
        names[name] = outer.get(inner, inner) if outside else f"layers.0.{inner}"
    return names, modules


def found(folder: Folder) -> str | None:
    """Which of `FORMATS` the tensors of a target's folder hold, if any."""
    names = folder.shapes
    tests: dict[str, Callable[[str], bool]] = {
        "mtp-qwen": lambda name: name == "mtp.fc.weight",
        "mtp-mimo": lambda name: name.startswith("model.mtp_layers."),
        "mtp-deepseek": lambda name: re.fullmatch(r"model\.layers\.\d+\.eh_proj\.weight", name) is not None,
    }
    return next((format for format, test in tests.items() if any(map(test, names))), None)
