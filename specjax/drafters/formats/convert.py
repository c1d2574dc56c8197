"""Convert a learned drafter from the packaging that it came in to another, strictly: everything fits, or nothing is
written.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from specjax.drafters.formats.detect import detect
from specjax.drafters.formats.files import DrafterError, LazyTensors, open_folder
from specjax.drafters.formats.read import LoadedDrafter, load_drafter
from specjax.drafters.formats.write import DEFAULTS, WRITERS, check_format, holds, save_drafter
from specjax.targets.config import DecoderConfig
from specjax.weights.names import resolve
from specjax.weights.new_folder import free

WHOLE_MODEL = {"model.embed_tokens.weight", "model.norm.weight", "model.layers.0.input_layernorm.weight"}


def drafter_format(source: str | os.PathLike) -> str | None:
    """The packaging of the drafter at a path or hub id, or of the MTP module in a model there; None for neither.

    Raises:
        DrafterError: a drafter of a kind that is not supported.
    """
    path = _folder(source)
    if not (path / "config.json").is_file():
        return None
    folder = open_folder(path)
    try:
        return detect(folder)
    except DrafterError:
        if folder.shapes.keys() >= WHOLE_MODEL:
            return None  # a model, whatever else is in it
        raise


def convert_drafter(
    source: str | os.PathLike,
    out_dir: str | os.PathLike,
    target: DecoderConfig,
    format: str | None = None,
    dtype: Any = None,
    note: Callable[[str], None] = lambda text: None,
) -> Path:
    """Write a drafter to a new folder, in a published format (UBTree in ours).

    Args:
        source: its folder or hub id; the target's own folder for an MTP module that lies inside.
        out_dir: where to; must not exist, or be empty. It appears whole or not at all.
        target: the model that it drafts for.
        format: one of `WRITERS`; None is the family's usual one, or the one that the drafter came in where only that
            has words for it.
        dtype: numpy dtype of the written tensors, tables of whole numbers excepted; None keeps what is stored.
        note: told what the reader decided or ignored.

    Returns:
        The folder.

    Raises:
        ValueError: a folder in use, a drafter that cannot be read (`DrafterError`, every reason listed) or does not fit
            the target, or a format that has no words for it.
    """
    if format is not None:
        check_format(format)
    out = free(out_dir)
    loaded = load_drafter(_folder(source), target)
    for said in loaded.notes:
        note(said)
    return save_drafter(out, loaded.config, _as(loaded.tensors, dtype), format or _usual(loaded, target), target=target)


def _folder(source: str | os.PathLike) -> Path:
    path = Path(source).expanduser()
    return path if path.exists() else resolve(source, drafter=True).path


def _usual(loaded: LoadedDrafter, target: DecoderConfig) -> str:
    """The format to write a drafter in where none is asked for."""
    usual, own = DEFAULTS[loaded.config.family], loaded.format
    if own in WRITERS and not holds(loaded.config, loaded.tensors.keys(), target, usual):
        return own
    return usual


def _as(tensors: Mapping[str, np.ndarray], dtype: Any) -> Mapping[str, np.ndarray]:
    if dtype is None:
        return tensors

    def reader(name: str):
        def read() -> np.ndarray:
            values = tensors[name]
            return values if np.issubdtype(values.dtype, np.integer) else values.astype(dtype)

        return read

    return LazyTensors({name: reader(name) for name in tensors})
