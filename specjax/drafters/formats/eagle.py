"""EAGLE-3 heads as SafeAILab, SpecForge (also SGLang and NVIDIA), NeMo and DeepSpec publish them, and
SpecForge's P-EAGLE.

They differ in how they name the layer (`midlayer.` or `layers.0.`, with or without `model.` before it) and in
what a tap id means: SafeAILab builds the taps in, the others write the *output* of layer `v`, which is `t = v
+ 1`.
"""

from typing import Any

from specjax.drafters.config import HeadConfig
from specjax.drafters.formats.files import Folder
from specjax.drafters.formats.keys import Keys, Reading, decoder, rope
from specjax.targets.config import DecoderConfig

FORMATS = ("eagle3-safeailab", "eagle3-specforge", "eagle3-deepspec", "peagle-specforge")


def canonical(name: str) -> str:
    """The canonical name of a tensor in any of these packagings."""
    name = name.removeprefix("model.")
    return "layers.0." + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name


def default_taps(target_layers: int) -> tuple[int, ...]:
    """The built-in taps: before layers 2, L/2 and L - 3."""
    return (2, target_layers // 2, target_layers - 3)


def read(folder: Folder, target: DecoderConfig, format: str) -> Reading:
    """Read one of `FORMATS`."""
    nested = folder.config.get("eagle_config") or {}
    keys = Keys({"": folder.config, "eagle_config": nested})
    names = {name: canonical(name) for name in folder.shapes}
    has = set(names.values())
    deepspec, peagle = format == "eagle3-deepspec", format == "peagle-specforge"
    notes: list[str] = []
    values = decoder(keys) | rope(keys, ignore=("scaling", "partial_rotary_factor") if deepspec else ())
    if deepspec:
        taps = tuple(v + 1 for v in keys.ids("target_layer_ids"))
        _note_noise(folder, notes)
    elif format == "eagle3-safeailab":
        taps = default_taps(target.num_layers)
        keys.skip("eagle_aux_hidden_state_layer_ids")
    else:
        ids = keys.get("eagle_aux_hidden_state_layer_ids", None, "target_layer_ids")
        taps = default_taps(target.num_layers)
        if ids is not None:
            taps = tuple(v + 1 for v in keys.ids("eagle_aux_hidden_state_layer_ids", None, "target_layer_ids"))
        else:
            notes.append(f"no tap ids in config.json: the default taps {list(taps)} are used")
    if not keys.flag("use_aux_hidden_state", True):
        keys.problems.append(
            "use_aux_hidden_state is false: a head on the last hidden state alone (EAGLE-1) is not supported"
        )
    if (count := keys.get("num_aux_hidden_states")) not in (None, len(taps)):
        keys.problems.append(f"num_aux_hidden_states is {count}, but there are {len(taps)} taps")
    vocab = keys.size("vocab_size")
    values |= {
        "family": "peagle" if peagle else "eagle3",
        "vocab_size": vocab,
        "draft_vocab_size": keys.size("draft_vocab_size", vocab),
        "target_hidden_size": keys.size("target_hidden_size", values["hidden_size"]),
        "taps": taps,
        # The tensors tell what an older configuration has no word for; a flag that denies them makes them unknown.
        "qk_norm": deepspec or "layers.0.self_attn.q_norm.weight" in has,
        "fc_norm": keys.flag("fc_norm", "fc_norm.0.weight" in has, "use_aux_norm"),
        "norm_before_fc": keys.flag("norm_before_fc", "input_norm.weight" in has),
        "norm_before_residual": keys.flag("norm_before_residual", False),
        "norm_output": keys.flag("norm_output", False),
    }
    parallel = keys.flag("parallel_drafting", peagle)
    if parallel != peagle:
        keys.problems.append(f"parallel_drafting is {parallel}, but the checkpoint is {values['family']}")
    if peagle:
        values["mask_token_id"] = keys.size("mask_token_id", None, "ptd_token_id", "pard_token", least=0)
        values["depths"] = keys.size("num_depths", 8)
    if (layers := keys.get("num_target_layers")) not in (None, target.num_layers):
        keys.problems.append(f"it was made for a target of {layers} layers, this one has {target.num_layers}")
    if format == "eagle3-safeailab" and values["draft_vocab_size"] == vocab and "d2t" in has:
        keys.skip("draft_vocab_size")
    return Reading(values, names, notes, keys.problems + keys.unknown(), keys.broken)


def write(config: HeadConfig, target: DecoderConfig, format: str) -> tuple[dict[str, Any], dict[str, str]]:
    """`config.json` of a head, and the published name of each canonical tensor that differs."""
    ids = [t - 1 for t in config.taps]
    out: dict[str, Any] = {
        "architectures": [_ARCHITECTURE[format]],
        "model_type": "qwen3" if config.qk_norm else "llama",
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "num_target_layers": target.num_layers,
    }
    if format == "eagle3-deepspec":
        return out | {"target_layer_ids": ids}, {}
    out["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True}
    if format == "peagle-specforge":
        out |= {"mask_token_id": config.mask_token_id, "num_depths": config.depths, "parallel_drafting": True}
        return out, {}
    return out, {"layers.0.": "midlayer."}


_ARCHITECTURE = {
    "eagle3-specforge": "LlamaForCausalLMEagle3",
    "eagle3-deepspec": "Qwen3Eagle3Model",
    "peagle-specforge": "PEagleDraftModel",
}


def _note_noise(folder: Folder, notes: list[str]) -> None:
    """DeepSpec copies the target's configuration: what its plain Qwen3 layers do not have is noise."""
    for key in ("rope_scaling", "partial_rotary_factor"):
        if folder.config.get(key):
            notes.append(f"{key} is inherited from the target's configuration and ignored, as DeepSpec's layers do")
