"""Write a drafter in a published format, or in our own for UBTree: complete and readable again, or not at all."""

import dataclasses
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from specjax.drafters.config import HeadConfig, expected_tensors
from specjax.drafters.formats import block, eagle, speculators
from specjax.drafters.formats.detect import detect
from specjax.drafters.formats.files import SINGLE, Folder
from specjax.drafters.formats.read import interpret
from specjax.targets.config import DecoderConfig
from specjax.weights.new_folder import appearing, free

# What each family is written as when no format is named.
DEFAULTS = {
    "eagle3": "eagle3-specforge",
    "peagle": "speculators-peagle",
    "mtp": "speculators-mtp",
    "dflash": "dflash-zlab",
    "dflash2": "dflash2-zlab",
    "dspark": "dspark-deepspec",
    "ubtree": "ubtree",
}
WRITERS = {
    format: module.write
    for module in (speculators, eagle, block)
    for format in module.FORMATS
    if format != "eagle3-safeailab"  # has no words for taps: an EAGLE-3 head is written as SpecForge does
}


def save_drafter(
    folder: str | Path,
    config: HeadConfig,
    tensors: Mapping[str, np.ndarray],
    format: str | None = None,
    *,
    target: DecoderConfig,
) -> Path:
    """Write a drafter; `load_drafter` reads the same description and the same values back.

    The folder appears whole or not at all: it is written beside its place and renamed.

    Args:
        folder: where to; must not exist, or be empty.
        config: what the drafter is.
        tensors: its weights under their canonical names.
        format: a published format that has words for `config`; None takes the family's usual one.
        target: the model that it was trained for.

    Returns:
        The folder.

    Raises:
        ValueError: tensors that are not the expected ones, a format that cannot express `config`, or a folder in use.
    """
    format = format or DEFAULTS[config.family]
    check_format(format)
    out = free(folder)
    _check_tensors(config, tensors)
    described, names, reasons = _plan(config, tensors, target, format)
    if reasons:
        raise ValueError(
            f"format {format!r} cannot hold this {config.family} drafter:" + "".join(f"\n  - {r}" for r in reasons)
        )
    with appearing(out) as partial:
        (partial / "config.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
        arrays = {names[ours]: np.ascontiguousarray(tensors[ours]) for ours in tensors}
        if "d2t" in tensors:
            arrays["t2d"] = membership(tensors["d2t"], config.vocab_size)
        safetensors.numpy.save_file(arrays, partial / SINGLE, metadata={"format": "pt"})
        (partial / SINGLE).chmod((partial / "config.json").stat().st_mode)
    return out


def check_format(format: str) -> None:
    """Refuse a name that is no format to write."""
    if format not in WRITERS:
        raise ValueError(f"format {format!r} cannot be written; it can be {', '.join(sorted(WRITERS))}")


def holds(config: HeadConfig, tensors: Collection[str], target: DecoderConfig, format: str) -> bool:
    """Whether a format of `WRITERS` has words for a drafter with these tensors."""
    return not _plan(config, tensors, target, format)[2]


def membership(d2t: np.ndarray, vocab_size: int) -> np.ndarray:
    """`t2d`: which target tokens the draft vocabulary has."""
    marks = np.zeros((vocab_size,), bool)
    marks[np.arange(len(d2t)) + d2t] = True
    return marks


def _common(config: HeadConfig, target: DecoderConfig, format: str) -> dict[str, Any]:
    """Keys that every packaging has, at the level where it keeps them."""
    layer: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "attention_bias": config.attention_bias,
        "max_position_embeddings": target.max_position_embeddings,
        "tie_word_embeddings": False,
        **config.rope.to_hf(),
    }
    if config.rotary_dims is not None:
        layer["partial_rotary_factor"] = config.rotary_dims / config.head_dim
    if window := next((w for w in config.windows if w is not None), None):
        kinds = ["full_attention" if w is None else "sliding_attention" for w in config.windows]
        layer |= {"layer_types": kinds, "sliding_window": window, "use_sliding_window": True}
    out: dict[str, Any] = {"transformer_layer_config": layer} if format.startswith("speculators") else layer
    if config.head_rank:
        out["candidate_head"] = {"rank": config.head_rank, "candidates": config.head_candidates}
    if config.acceptance:
        out["acceptance"] = list(config.acceptance)
    return out


def _merged(common: dict[str, Any], described: dict[str, Any]) -> dict[str, Any]:
    layer = common.get("transformer_layer_config")
    if layer is None:
        return common | described
    return common | described | {"transformer_layer_config": described["transformer_layer_config"] | layer}


def _published(ours: str, prefixes: Mapping[str, str]) -> str:
    if ours in prefixes:
        return prefixes[ours]
    prefix = next((p for p in prefixes if p.endswith(".") and ours.startswith(p)), None)
    return ours if prefix is None else prefixes[prefix] + ours.removeprefix(prefix)


def _check_tensors(config: HeadConfig, tensors: Mapping[str, np.ndarray]) -> None:
    expected = expected_tensors(config)
    # A candidate head is factored when it is loaded, unless its factors were trained.
    needed = {name: shape for name, shape in expected.items() if not name.startswith("candidate_head.")}
    faults = [f"missing: {name} {list(shape)}" for name, shape in needed.items() if name not in tensors]
    for name, array in tensors.items():
        if name not in expected:
            faults.append(f"unknown: {name} {list(array.shape)}")
        elif array.shape != expected[name]:
            faults.append(f"misshapen: {name} is {list(array.shape)}, the drafter has {list(expected[name])}")
    if faults:
        raise ValueError(
            f"these are not the tensors of this {config.family} drafter:" + "".join(f"\n  - {f}" for f in faults)
        )


def _plan(
    config: HeadConfig, tensors: Collection[str], target: DecoderConfig, format: str
) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    """What is about to be written: `config.json`, published names of tensors, and why it would not be read back."""
    described, prefixes = WRITERS[format](config, target, format)
    described = _merged(_common(config, target, format), described)
    names = {ours: _published(ours, prefixes) for ours in tensors}
    shapes = {names[ours]: shape for ours, shape in expected_tensors(config).items() if ours in names}
    dtypes = dict.fromkeys(shapes, "F32")
    plan = Folder(path=Path(), config=described, shapes=shapes, dtypes=dtypes, where={}, pickles=())
    if (found := detect(plan)) != format:
        return described, names, [f"it would be read as {found!r}"]
    read, _, problems, _ = interpret(plan, target, format)
    fields = [field.name for field in dataclasses.fields(config)]
    lost = [
        f"{name} {getattr(config, name)!r}" for name in fields if getattr(config, name) != getattr(read, name, None)
    ]
    return described, names, [f"it has no words for {', '.join(lost)}"] if lost else problems
