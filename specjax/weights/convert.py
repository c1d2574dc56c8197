"""Convert a model between the formats that `load_checkpoint` reads: to a Hugging Face folder, or to Orbax."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from specjax.targets.config import expected_tensors
from specjax.weights.load import Checkpoint, load_checkpoint
from specjax.weights.new_folder import appearing, free
from specjax.weights.orbax import write_orbax
from specjax.weights.safetensors import write_tensors

SHARD_BYTES = 5_000_000_000


def convert(
    source: str | os.PathLike,
    out_dir: str | os.PathLike,
    format: Literal["hf", "orbax"] = "hf",
    dtype: Any = None,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write a model to a new folder, with its configuration, tokenizer and chat template.

    The folder appears whole or not at all: it is written beside its place and renamed.

    Args:
        source: see `names.resolve`.
        out_dir: where to; must not exist, or be empty.
        format: `hf` (safetensors, read by transformers and others) or `orbax`.
        dtype: numpy dtype of the written tensors; None keeps what is stored (float32 where it is quantised).
        shard_bytes: (hf) the most bytes of one file.

    Returns:
        The folder.

    Raises:
        ValueError: an unknown format, an `out_dir` that holds files, or a source that cannot be read.
    """
    if format not in ("hf", "orbax"):
        raise ValueError(f"format {format!r} is not known; known are 'hf' and 'orbax'")
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes must be at least 1, got {shard_bytes}")
    out = free(out_dir)
    checkpoint = load_checkpoint(source, dtype)
    with appearing(out) as partial:
        _write(checkpoint, partial, format, shard_bytes)
    return out


def _write(checkpoint: Checkpoint, folder: Path, format: str, shard_bytes: int) -> None:
    config, tensors = checkpoint.config, checkpoint.tensors
    dtype = tensors["model.embed_tokens.weight"].dtype
    _json(folder / "config.json", config.to_hf() | {"torch_dtype": dtype.name})
    generation = {"bos_token_id": config.bos_token_id, "eos_token_id": list(config.eos_token_ids)}
    _json(
        folder / "generation_config.json", {key: value for key, value in generation.items() if value not in (None, [])}
    )
    checkpoint.tokenizer.save(folder)
    total = dtype.itemsize * sum(math.prod(shape) for shape in expected_tensors(config).values())
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    with Progress(*columns) as progress:
        task = progress.add_task("writing tensors", total=total)

        def advance(done: int) -> None:
            progress.advance(task, done)

        if format == "hf":
            write_tensors(folder, tensors, shard_bytes, advance)
        else:
            write_orbax(folder, tensors, advance)


def _json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
