"""Load a learned drafter from whatever packaging its folder holds, strictly: everything fits, or nothing is loaded."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from specjax.drafters.config import HeadConfig, expected_tensors
from specjax.drafters.formats import block, eagle, mtp, speculators
from specjax.drafters.formats.check import description_problems, tensor_problems, vocabulary_problems
from specjax.drafters.formats.detect import detect
from specjax.drafters.formats.files import FLOATS, DrafterError, Folder, LazyTensors, open_folder, pickle_advice
from specjax.targets.config import DecoderConfig

MODULES: dict[str, ModuleType] = {
    format: module for module in (speculators, eagle, block, mtp) for format in module.FORMATS
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedDrafter:
    """A drafter's checkpoint.

    Attributes:
        config: what it is.
        tensors: its weights under their canonical names, read when asked for.
        format: the packaging that it came in.
        notes: what was decided or ignored on the way, for the user.
    """

    config: HeadConfig
    tensors: Mapping[str, np.ndarray]
    format: str
    notes: tuple[str, ...]


def is_drafter(path: str | Path) -> bool:
    """Whether a folder holds a learned drafter (or a target with an MTP module), rather than a plain model.

    Raises:
        DrafterError: a folder that holds a drafter of a kind that is not supported.
    """
    path = Path(path).expanduser()
    return (path / "config.json").is_file() and detect(open_folder(path)) is not None


def load_drafter(path: str | Path, target: DecoderConfig) -> LoadedDrafter:
    """Read a drafter made for `target`.

    Args:
        path: its folder; the target's own one for an MTP module that lies inside.
        target: the configuration of the model that it drafts for.

    Raises:
        DrafterError: what cannot be honoured, all of it: keys, tensors with both shapes, widths. Nothing is
        loaded then.
    """
    folder = open_folder(path)
    format = detect(folder)
    if format is None:
        raise DrafterError(
            str(path), ["it is a plain model, not a learned drafter; as a drafter it is kind 'draft_model'"]
        )
    if not folder.shapes:
        advice = pickle_advice(folder.pickles) if folder.pickles else "it has no safetensors file"
        raise DrafterError(str(path), [advice])
    config, names, problems, notes = interpret(folder, target, format)
    if config is None or problems:
        raise DrafterError(f"{path} ({format})", problems)
    file_names = {ours: name for name, ours in names.items()}
    if "d2t" in file_names:
        d2t, t2d = (folder.tensor(file_names[name]) if name in file_names else None for name in ("d2t", "t2d"))
        if found := vocabulary_problems(config, d2t, t2d):
            raise DrafterError(f"{path} ({format})", found)
    return LoadedDrafter(config=config, tensors=_tensors(folder, config, file_names), format=format, notes=tuple(notes))


def _candidate_head(said: Any, width: int, tokens: int) -> tuple[dict[str, int], list[str]]:
    """The fields of a candidate head `{"rank": ..., "candidates": ...}`, and what is wrong with it."""
    if said is None:
        return {}, []
    if not isinstance(said, dict) or not set(said) <= {"rank", "candidates"} or "rank" not in said:
        return {}, [f'candidate_head is {said!r}, expected {{"rank": N, "candidates": N}}']
    most = {"rank": width, "candidates": tokens}
    wrong = [
        f"candidate_head.{name} is {value!r}, expected 1..{most[name]}"
        for name, value in said.items()
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most[name]
    ]
    return ({} if wrong else {f"head_{name}": value for name, value in said.items()}), wrong


def _acceptance(said: Any) -> tuple[tuple[float, ...], list[str]]:
    """Acceptance by position, and what is wrong with it."""
    if said is None:
        return (), []
    shares = said if isinstance(said, list) else [None]
    if not all(isinstance(x, int | float) and not isinstance(x, bool) and 0 <= x <= 1 for x in shares):
        return (), [f"acceptance is {said!r}, expected a list of shares from 0 to 1, one for each draft"]
    return tuple(map(float, shares)), []


def interpret(
    folder: Folder, target: DecoderConfig, format: str
) -> tuple[HeadConfig | None, dict[str, str], list[str], list[str]]:
    """Names and shapes alone: the description (None if sizes are missing), canonical names, problems, notes."""
    reading = MODULES[format].read(folder, target, format)
    if reading.broken:
        return None, reading.names, reading.problems, reading.notes
    has = set(reading.names.values())
    owns = {"own_embedding": "embed_tokens.weight" in has, "own_head": "lm_head.weight" in has}
    vocab, drafts = reading.values["vocab_size"], reading.values["draft_vocab_size"]
    tied = folder.config.get("tie_word_embeddings") and owns["own_embedding"] and drafts == vocab
    low_rank, wrong = _candidate_head(folder.config.get("candidate_head"), reading.values["hidden_size"], drafts)
    acceptance, odd = _acceptance(folder.config.get("acceptance"))
    config = HeadConfig(
        **reading.values,
        acceptance=acceptance,
        own_embedding=owns["own_embedding"],
        own_head=bool(owns["own_head"] or tied),
        **low_rank,
    )
    notes = list(reading.notes)
    if folder.config.get("auto_map"):
        notes.append("auto_map names Python code in the checkpoint; it is not executed")
    # An identity map that some exporters write beside a full vocabulary is no tensor of the drafter.
    names = {name: ours for name, ours in reading.names.items() if ours != "d2t" or drafts != vocab}
    problems = [*reading.problems, *wrong, *odd, *config.rope.problems(), *description_problems(config, target)]
    problems += tensor_problems(config, names, folder.shapes)
    problems += [
        f"{name} is stored as {folder.dtypes[name]}; supported are {', '.join(FLOATS)}"
        for name, ours in names.items()
        if ours not in ("d2t", "t2d") and folder.dtypes[name] not in FLOATS
    ]
    if any("missing: d2t" in problem for problem in problems) and folder.pickles:
        problems.append(pickle_advice(folder.pickles))
    return config, reading.names, list(dict.fromkeys(problems)), notes


def _tensors(folder: Folder, config: HeadConfig, file_names: Mapping[str, str]) -> LazyTensors:
    """Readers of the expected tensors; a tied head is the drafter's own embedding."""

    def reader(ours: str, shape: tuple[int, ...]):
        stored = file_names.get(ours) or file_names["embed_tokens.weight"]
        return lambda: folder.tensor(stored).reshape(shape)

    return LazyTensors(
        {
            ours: reader(ours, shape)
            for ours, shape in expected_tensors(config).items()
            if ours in file_names or ours == "lm_head.weight"
        }
    )
