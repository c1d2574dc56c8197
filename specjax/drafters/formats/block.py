"""Block drafters: z-lab's DFlash and DFlash 2, DeepSpec's DSpark and DFlash, SpecForge's DSpark, LiquidAI's,
and our UBTree.

Tap ids are outputs of layers here, `t = v + 1`. z-lab's slots are in place (the anchor's row drafts nothing);
those of DeepSpec, SpecForge and LiquidAI are shifted. DeepSpec's file is a copy of the target's
configuration, so its rope scaling and partial rotation are noise; a YaRN that SpecForge declares is real.
"""

from typing import Any

from specjax.drafters.config import HeadConfig
from specjax.drafters.formats.files import Folder
from specjax.drafters.formats.keys import Keys, Reading, decoder, rope
from specjax.targets.config import DecoderConfig

FORMATS = ("dflash-zlab", "dflash2-zlab", "dspark-deepspec", "dspark-specforge", "dspark-liquid", "ubtree")

_ARCHITECTURE = {
    "dflash-zlab": "DFlashDraftModel",
    "dflash2-zlab": "DFlash2DraftModel",
    "dspark-deepspec": "Qwen3DSparkModel",
    "dspark-specforge": "DSparkDraftModel",
    "dspark-liquid": "Lfm2DSparkDraftModel",
    "ubtree": "UBTreeDraftModel",
}


def canonical(name: str) -> str:
    """The canonical name of a tensor: early SpecForge files put the heads under `logit_head.`, modules add
    `.weight`.
    """
    name = name.removeprefix("logit_head.")
    if name.startswith("candidate_selector.") and name.endswith("_codebook.weight"):
        name = name.removesuffix(".weight")
    return name


def default_ids(target_layers: int, layers: int) -> tuple[int, ...]:
    """z-lab's rule for `layers` taps: outputs spread evenly over layers 1 to L - 3."""
    if layers == 1:
        return (target_layers // 2,)
    return tuple(round(1 + i * (target_layers - 4) / (layers - 1)) for i in range(layers))


def read(folder: Folder, target: DecoderConfig, format: str) -> Reading:
    """Read one of `FORMATS`."""
    config = folder.config
    sections = {name: config[name] for name in ("dspark_config", "dflash_config", "tree_config") if config.get(name)}
    keys = Keys({**sections, "": config})
    names = {name: canonical(name) for name in folder.shapes}
    has = set(names.values())
    notes: list[str] = []
    deepspec = format == "dspark-deepspec"
    values = decoder(keys) | rope(keys, ignore=("scaling", "partial_rotary_factor") if deepspec else ())
    if deepspec:
        for key in ("rope_scaling", "partial_rotary_factor"):
            if config.get(key):
                notes.append(f"{key} is inherited from the target's configuration and ignored, as DeepSpec's layers do")
    made_for = keys.get("num_target_layers")
    if made_for not in (None, target.num_layers):
        keys.problems.append(f"it was made for a target of {made_for} layers, this one has {target.num_layers}")
    if keys.get("target_layer_ids") is None and not deepspec:
        notes.append("no target_layer_ids in config.json: taps follow the default rule")
    default = None if deepspec else default_ids(target.num_layers, values["num_layers"])
    keys.skip("projector_type", "attention_mode", "tree_config")
    if (runtime := keys.get("runtime_block_size")) is not None:
        notes.append(
            f"runtime_block_size {runtime} is a serving default: set num_speculative_tokens to draft fewer tokens"
        )
    vocab = keys.size("vocab_size")
    causal = keys.get("is_causal")
    symmetric = keys.flag("sliding_window_non_causal", False)
    values |= {
        "family": format.partition("-")[0],
        "qk_norm": True,
        "vocab_size": vocab,
        "draft_vocab_size": keys.size("draft_vocab_size", vocab),
        "target_hidden_size": keys.size("target_hidden_size", values["hidden_size"]),
        "taps": tuple(v + 1 for v in keys.ids("target_layer_ids", default)),
        "rope_interleaved": not keys.flag("rope_is_neox_style", format != "dspark-liquid"),
        "mask_token_id": keys.size("mask_token_id", None, least=0),
        "block_size": keys.size("block_size", 16 if format == "dflash-zlab" else None, least=2),
        "shifted": keys.flag("sample_from_anchor", format.startswith("dspark")),
        "block_causal": tuple(
            (window is not None and not symmetric) if causal is None else bool(causal) for window in values["windows"]
        ),
        "embedding_scale": keys.number("input_embedding_scale", 1.0),
        "output_multiplier": keys.number("output_multiplier", 1.0),
        "logit_softcap": keys.number("final_logit_softcapping", 0.0) or None,
    }
    if format == "dflash2-zlab":
        values |= {"conv_kernel": keys.size("conv_kernel_size", 2), "conv_group": keys.size("conv_group_size", 16)}
        if keys.size("selector_vocab_size", vocab) != vocab:
            keys.problems.append(
                f"selector_vocab_size {keys.get('selector_vocab_size')} beside a vocabulary of {vocab}"
            )
    if format in ("dflash2-zlab", "ubtree"):
        values |= {"selector_rank": keys.size("selector_rank", 256), "selector_top_k": keys.size("selector_top_k", 16)}
    if format == "ubtree":
        values |= {
            "codebook_hidden": keys.size("codebook_hidden"),
            "tree_budget": keys.size("budget", 64),
            "tree_width": keys.size("width", 12),
            "depth_bonus": keys.number("depth_bonus", 0.0),
        }
    if format.startswith("dspark"):
        values |= _dspark(keys, format, values, has)
    return Reading(values, names, notes, keys.problems + keys.unknown(), keys.broken)


def _dspark(keys: Keys, format: str, values: dict[str, Any], has: set[str]) -> dict[str, Any]:
    """The Markov and confidence heads; without either, DeepSpec's file is a DFlash with shifted slots."""
    deepspec = format == "dspark-deepspec"
    rank = keys.size("markov_rank", 0, least=0)
    head = "confidence_head.proj.weight" in has
    confidence = keys.flag("enable_confidence_head", head)
    keys.skip("has_lm_head", "shift_label", "pure_draft_prefix_len")
    return {
        "family": "dspark" if rank or confidence else "dflash",
        "markov_rank": rank,
        "markov": keys.get("markov_head_type", "vanilla"),
        "confidence": confidence,
        # DeepSpec's default is with it, SpecForge's without; neither is meant where there is no Markov head.
        "confidence_with_markov": keys.flag("confidence_head_with_markov", deepspec and rank > 0),
    }


def write(config: HeadConfig, target: DecoderConfig, format: str) -> tuple[dict[str, Any], dict[str, str]]:
    """`config.json` of a block drafter; all tensors keep their canonical names."""
    inner: dict[str, Any] = {
        "target_layer_ids": [t - 1 for t in config.taps],
        "mask_token_id": config.mask_token_id,
        "block_size": config.block_size,
    }
    if format in ("dflash2-zlab", "ubtree"):
        inner |= {"selector_rank": config.selector_rank, "selector_top_k": config.selector_top_k}
    if format == "dflash2-zlab":
        inner |= {"conv_kernel_size": config.conv_kernel, "conv_group_size": config.conv_group}
    if format == "ubtree":
        inner["codebook_hidden"] = config.codebook_hidden
    if format.startswith("dspark"):
        inner |= {
            "markov_rank": config.markov_rank,
            "markov_head_type": config.markov,
            "enable_confidence_head": config.confidence,
            "confidence_head_with_markov": config.confidence_with_markov,
        }
    if format == "dspark-specforge":
        inner["projector_type"] = "dspark"
        inner["attention_mode"] = "mha" if config.num_heads == config.num_kv_heads else "gqa"
    for name, key, default in (
        ("embedding_scale", "input_embedding_scale", 1.0),
        ("output_multiplier", "output_multiplier", 1.0),
        ("logit_softcap", "final_logit_softcapping", None),
    ):
        if getattr(config, name) != default:
            inner[key] = getattr(config, name)
    out: dict[str, Any] = {
        "architectures": [_ARCHITECTURE[format]],
        "model_type": "lfm2" if format == "dspark-liquid" else "qwen3",
        "num_target_layers": target.num_layers,
        "block_size": config.block_size,
    }
    sliding = tuple(window is not None for window in config.windows)
    if config.block_causal != sliding and len(set(config.block_causal)) == 1:  # not what sliding layers imply
        out["is_causal"] = config.block_causal[0]
    if format == "dspark-liquid":
        out["rope_is_neox_style"] = not config.rope_interleaved
    if format == "ubtree":
        out["tree_config"] = {
            "budget": config.tree_budget,
            "width": config.tree_width,
            "depth_bonus": config.depth_bonus,
        }
    return (out | inner if format == "dspark-deepspec" else out | {"dflash_config": inner}), {}
