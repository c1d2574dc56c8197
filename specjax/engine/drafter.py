"""From a drafter's configuration to the drafter and its weights, in the precision and vocabulary of the target."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specjax import config as configs
from specjax.config import AutoConfig, DrafterConfig, DraftModelConfig, HybridConfig, LearnedConfig, RunConfig
from specjax.drafters import learned, registry
from specjax.drafters.config import BLOCK
from specjax.drafters.drafter_set import DrafterSet, menu_of
from specjax.drafters.formats import mtp
from specjax.drafters.formats.detect import detect
from specjax.drafters.formats.files import open_folder
from specjax.drafters.formats.read import LoadedDrafter, load_drafter
from specjax.drafters.probe import probe
from specjax.drafters.shipped import shipped
from specjax.engine.precision import held_dtype, hold
from specjax.engine.pricing import read_table
from specjax.targets import decoder
from specjax.targets.config import DecoderConfig
from specjax.weights.load import load_checkpoint, load_config
from specjax.weights.names import resolve

# Each drafter family by the kind that configs know it by.
_KINDS = {"dflash2": "dflash"}
_PROBED = "Explain in a few sentences why the sky is blue, then give the same explanation to a child."


def recognised(config: RunConfig) -> RunConfig:
    """The configuration with `draft_model` replaced by the learned drafter that its folder turns out to hold.

    A checkpoint with an MTP module inside is taken for that module where it is the target's own; elsewhere it
    is a model that can draft as any other.

    Raises:
        ValueError: a drafter of a kind that is not supported.
    """
    section = _recognised(config.drafter, config.target)
    if section is config.drafter:
        return config
    fields = {name: getattr(config, name) for name in config.model_fields_set}
    return configs.make(fields | {"drafter": section})


def _recognised(chosen: DrafterConfig, target: str) -> DrafterConfig:
    if isinstance(chosen, HybridConfig):
        model = _recognised(chosen.model, target)
        fields = {name: getattr(chosen, name) for name in chosen.model_fields_set}
        return chosen if model is chosen.model else HybridConfig(**(fields | {"model": model}))
    if isinstance(chosen, AutoConfig):
        of = tuple(_recognised(one, target) for one in chosen.of)
        fields = {name: getattr(chosen, name) for name in chosen.model_fields_set}
        same = all(new is old for new, old in zip(of, chosen.of, strict=True))
        return chosen if same else AutoConfig(**(fields | {"of": of}))
    if not isinstance(chosen, DraftModelConfig):
        return chosen
    folder = Path(chosen.model).expanduser()
    kind = kind_of(folder, target) if (folder / "config.json").is_file() else None
    if kind is None:
        return chosen
    given = {name: getattr(chosen, name) for name in chosen.model_fields_set}
    return configs.drafter(given | {"kind": kind})


def kind_of(folder: Path, target: str) -> str | None:
    """The kind of the learned drafter that a folder holds; None for a whole model that is not `target` itself.

    Raises:
        ValueError: a drafter of a kind that is not supported, or files that cannot be read.
    """
    opened = open_folder(folder)
    format = detect(opened)
    if format is None or (format in mtp.FORMATS and folder.resolve() != Path(target).expanduser().resolve()):
        return None
    family = opened.config.get("speculators_model_type") if format.startswith("speculators") else None
    family = family or next(f for f in ("dflash", "dspark", "eagle3", "peagle", "mtp", "ubtree") if f in format)
    return _KINDS.get(family, family)


def check_files(config: RunConfig) -> None:
    """Refuse drafters whose files are not there or cannot be used, from names and shapes, before a weight is read.

    Raises:
        ValueError: see there; everything that does not fit is listed.
    """
    chosen = config.drafter
    if isinstance(chosen, AutoConfig) and chosen.table is not None:
        read_table(chosen.table)
    if isinstance(chosen, HybridConfig | AutoConfig):
        for part in (chosen.model,) if isinstance(chosen, HybridConfig) else chosen.of:
            check_files(config.model_copy(update={"drafter": part}))
    elif isinstance(chosen, LearnedConfig):
        _read(chosen, config.target, load_config(config.target))
    elif isinstance(chosen, DraftModelConfig):
        resolve(chosen.model)


def make_drafter(
    config: RunConfig,
    target: decoder.Target,
    target_params: Any,
    tokenizer: Any,
    dtype: Any,
    note: Callable[[str], None],
) -> tuple[Any, Any]:
    """The drafter that a configuration names, and its weights.

    Args:
        config: the run.
        target: the model that it drafts for.
        target_params: the model's arrays, which the drafter may share.
        tokenizer: the model's tokenizer, or None.
        dtype: dtype of values, as configured.
        note: told what a learned drafter's loader and probe decided.

    Raises:
        ValueError: a drafter that cannot be read or does not fit the target.
    """
    chosen = config.drafter
    if chosen.kind == "none":
        return None, ()
    if isinstance(chosen, HybridConfig):
        parts = {}
        for name in ("model", "lookup"):
            part = config.model_copy(update={"drafter": getattr(chosen, name)})
            parts[name] = make_drafter(part, target, target_params, tokenizer, dtype, note)
        drafters = {name: drafter for name, (drafter, _) in parts.items()}
        hybrid = registry.create(chosen.kind, drafters | {"rows": chosen.rows})
        return hybrid, {name: params for name, (_, params) in parts.items()}
    if isinstance(chosen, AutoConfig):
        each = [
            make_drafter(config.model_copy(update={"drafter": one}), target, target_params, tokenizer, dtype, note)
            for one in chosen.of
        ]
        members = tuple(drafter for drafter, _ in each)
        width, held = target.config.hidden_size, str(held_dtype(dtype))
        drafters = DrafterSet(members, menu_of(members), width, held)
        return drafters, tuple(params for _, params in each)
    sampled = config.draft_sampling == "sampled"
    options = chosen.model_dump(exclude={"kind"})
    if isinstance(chosen, LearnedConfig):
        return _learned(config, target, target_params, tokenizer, held_dtype(dtype), sampled, note)
    if isinstance(chosen, DraftModelConfig):
        if options.pop("probe") is not None:
            raise configs.ConfigError(
                f"probe checks the wiring of a learned drafter, but {chosen.model} is a whole model: leave it out"
            )
        options |= _draft_model(options.pop("model"), target, tokenizer, dtype)
        options |= {"sampled": sampled, "cache_dtype": str(held_dtype(dtype))}
        params = options.pop("params")
        return registry.create(chosen.kind, options), params
    return registry.create(chosen.kind, options), ()


def _folder(chosen: LearnedConfig, target: str) -> Path:
    """Where a learned drafter's files are: the place that is named, the drafter that comes with specjax, or (MTP) the
    target's own.

    Raises:
        ConfigError: none is named, and none comes with specjax.
    """
    if chosen.model is not None:
        path = Path(chosen.model).expanduser()
        return path if path.is_dir() else resolve(chosen.model, drafter=True).path
    found = shipped(target)
    if chosen.kind in found:
        return found[chosen.kind]
    if chosen.kind == "mtp" and (own := resolve(target).path).is_dir():
        return own
    there = f"those that do: {', '.join(found)}" if found else "none does"
    raise configs.ConfigError(
        f"drafter '{chosen.kind}' needs `model`, the folder or hub id of its weights: no {chosen.kind} comes with "
        f"specjax for {target} ({there}); `specjax train run` makes one"
    )


def _learned(config: RunConfig, target, target_params, tokenizer, dtype, sampled: bool, note) -> tuple[Any, Any]:
    chosen = config.drafter
    assert isinstance(chosen, LearnedConfig)
    loaded = _read(chosen, config.target, target.config)
    for said in loaded.notes:
        note(said)
    if chosen.probe:
        prompt = _prompt(tokenizer, target.config.vocab_size)
        loaded, said = probe(loaded, target, target_params, dtype, prompt)
        for line in said:
            note(line)
    return learned.build(
        as_asked(loaded, chosen).config,
        loaded.tensors,
        target,
        target_params,
        dtype,
        sampled=sampled,
        **_options(chosen),
    )


def _read(chosen: LearnedConfig, target: str, model: DecoderConfig) -> LoadedDrafter:
    """The drafter's files, which must be of the kind that the configuration says."""
    loaded = load_drafter(path := _folder(chosen, target), model)
    kind = _KINDS.get(loaded.config.family, loaded.config.family)
    if kind != chosen.kind:
        raise configs.ConfigError(f"{path} holds a drafter of kind '{kind}', the configuration says '{chosen.kind}'")
    return loaded


def as_asked(loaded: LoadedDrafter, chosen: LearnedConfig) -> LoadedDrafter:
    """The drafter with the low-rank head and the window that were asked for; what its file has is kept otherwise."""
    config, changes = loaded.config, {}
    if chosen.head_rank:
        changes |= {"head_rank": chosen.head_rank, "head_candidates": chosen.head_candidates}
    if chosen.window is not None:
        windows = config.windows or (None,) * config.num_layers
        changes["windows"] = tuple(min(own or chosen.window, chosen.window) for own in windows)
        if config.family in BLOCK:  # where nothing is said of it, layers with a window of their own are causal
            changes["block_causal"] = config.block_causal or tuple(own is not None for own in windows)
    return dataclasses.replace(loaded, config=dataclasses.replace(config, **changes))


def _options(chosen: LearnedConfig) -> dict[str, Any]:
    """What is left of a section for the family's `build`."""
    options = chosen.model_dump(exclude={"kind", "model", "probe", "head_rank", "head_candidates", "window"})
    if "topk" in options:
        options |= {"branching": options.pop("topk"), "depth": options.pop("num_speculative_tokens")}
    return options


def _prompt(tokenizer: Any, vocab_size: int) -> list[int]:
    """What the target writes its text for the probe from."""
    if tokenizer is None:
        return list(range(min(8, vocab_size)))
    try:
        return tokenizer.encode_chat([{"role": "user", "content": _PROBED}])
    except ValueError:  # no chat template
        return tokenizer.encode(_PROBED)


def _draft_model(name: str, target: decoder.Target, tokenizer: Any, dtype) -> dict[str, Any]:
    """Load a draft model; its ids must mean what the target's mean."""
    checkpoint = load_checkpoint(name)
    ours, theirs = target.config.vocab_size, checkpoint.config.vocab_size
    if ours != theirs:
        raise configs.ConfigError(
            f"draft model {name!r} has {theirs} tokens, the target {ours}: they must share a vocabulary"
        )
    if tokenizer is not None and tokenizer.fingerprint() != checkpoint.tokenizer.fingerprint():
        raise configs.ConfigError(
            f"draft model {name!r} and the target have different tokenizers: their ids mean different tokens"
        )
    model, params = decoder.from_tensors(checkpoint.config, checkpoint.tensors, dtype)
    return {"model": model, "params": hold(params, dtype)}
