"""Hugging Face model folders: `config.json` beside one safetensors file or an index of several.

Pickles (`pytorch_model.bin`) are refused, because opening one runs code from it; `auto_map` in a configuration, which
points at Python files of the checkpoint, is never followed.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from specjax.targets.config import DecoderConfig, expected_tensors
from specjax.weights.check import TensorError, check_tensors

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_FLOATS = ("F64", "F32", "F16", "BF16")


class LazyTensors(Mapping[str, np.ndarray]):
    """Tensors that stay in their files until they are asked for; each access reads anew.

    Args:
        where: the open file of each tensor.
        dtype: numpy dtype to convert to, or None for the stored one.
    """

    def __init__(self, where: Mapping[str, Any], dtype: Any = None):
        self._where, self._dtype = dict(where), dtype

    def __getitem__(self, name: str) -> np.ndarray:
        values = self._where[name].get_tensor(name)
        return values if self._dtype is None else values.astype(self._dtype, copy=False)

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)


def read_config(folder: Path) -> DecoderConfig:
    """The configuration of a model folder; the end tokens of `generation_config.json` take precedence.

    Raises:
        ValueError: a file that is not JSON, or (`ConfigError`) a model that cannot be honoured.
    """
    config = DecoderConfig.from_hf(_json(folder / "config.json"))
    if (folder / "generation_config.json").exists():
        eos = _json(folder / "generation_config.json").get("eos_token_id")
        if eos is not None:
            config = dataclasses.replace(config, eos_token_ids=tuple(eos) if isinstance(eos, list) else (eos,))
    return config


def read_tensors(folder: Path, config: DecoderConfig, dtype: Any = None) -> LazyTensors:
    """The tensors of a model folder, checked by name, shape and type before any is read.

    With tied embeddings a stored `lm_head.weight` is ignored if it is the embedding, value for value, and refused
    otherwise: one of the two statements is then wrong.

    Args:
        folder: the folder.
        config: its configuration.
        dtype: see `LazyTensors`.

    Raises:
        ValueError: no safetensors, a missing or damaged shard.
        TensorError: lists every missing, unknown, misshapen or wrongly typed tensor.
    """
    where: dict[str, Any] = {}
    for path in _files(folder):
        try:
            file = safetensors.safe_open(path, framework="np")
        except safetensors.SafetensorError as error:
            raise ValueError(f"{path} is damaged or truncated: {error}") from error
        for name in file.keys():  # noqa: SIM118 (not a dict)
            if name in where:
                raise ValueError(f"tensor {name} is in two files of {folder}, {path.name} the second")
            where[name] = file
    slices = {name: file.get_slice(name) for name, file in where.items()}
    check_tensors(str(folder), config, {name: tuple(part.get_shape()) for name, part in slices.items()})
    typed = [
        f"{name} is stored as {part.get_dtype()}" for name, part in slices.items() if part.get_dtype() not in _FLOATS
    ]
    if typed:
        raise TensorError(str(folder), [f"{line}; supported are {', '.join(_FLOATS)}" for line in typed])
    if config.tie_word_embeddings and "lm_head.weight" in where:
        raw = LazyTensors(where)
        if not np.array_equal(raw["lm_head.weight"], raw["model.embed_tokens.weight"]):
            problem = "lm_head.weight differs from model.embed_tokens.weight, but tie_word_embeddings is true"
            raise TensorError(str(folder), [f"{problem}; set it to false"])
    return LazyTensors({name: where[name] for name in expected_tensors(config)}, dtype)


def write_tensors(folder: Path, tensors: Mapping[str, np.ndarray], shard_bytes: int, advance) -> None:
    """Write tensors as `model.safetensors`, or as shards and an index where they exceed `shard_bytes`.

    Args:
        folder: an existing folder.
        tensors: name to array; read one shard at a time.
        shard_bytes: the most bytes of a shard (a larger tensor gets one of its own).
        advance: called with the number of bytes after each shard.
    """
    written: list[list[str]] = []
    pending: dict[str, np.ndarray] = {}
    total = 0

    def flush() -> None:
        path = folder / f"{len(written)}.part"
        path.touch()
        mode = path.stat().st_mode  # the library's own temporary file is readable by its owner alone
        safetensors.numpy.save_file(pending, path, metadata={"format": "pt"})
        path.chmod(mode)
        written.append(list(pending))
        advance(sum(array.nbytes for array in pending.values()))
        pending.clear()

    for name in tensors:
        array = np.ascontiguousarray(tensors[name])
        if pending and sum(a.nbytes for a in pending.values()) + array.nbytes > shard_bytes:
            flush()
        pending[name] = array
        total += array.nbytes
    flush()
    count = len(written)
    files = [SINGLE] if count == 1 else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    for number, file in enumerate(files):
        (folder / f"{number}.part").rename(folder / file)
    if count > 1:
        weight_map = {name: file for names, file in zip(written, files, strict=True) for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _files(folder: Path) -> list[Path]:
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    if (folder / INDEX).exists():
        names = sorted(set(_json(folder / INDEX)["weight_map"].values()))
        if outside := [name for name in names if Path(name).name != name]:
            raise ValueError(f"{folder / INDEX} names files outside its folder: {', '.join(outside)}")
        if absent := [name for name in names if not (folder / name).exists()]:
            raise ValueError(f"{folder} lacks {len(absent)} of {len(names)} shards: {', '.join(absent)}")
        return [folder / name for name in names]
    if pickles := sorted(folder.glob("*.bin")) + sorted(folder.glob("*.pt*")):
        raise ValueError(
            f"{folder} holds pickled weights ({pickles[0].name}), which run code when opened and are refused; convert "
            "them with transformers: `AutoModelForCausalLM.from_pretrained(folder).save_pretrained(out)`"
        )
    raise ValueError(f"{folder} has neither {SINGLE} nor {INDEX}")


def _json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
