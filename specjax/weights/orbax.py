"""A model as an Orbax checkpoint: `config.json` and tokenizer files beside a folder `params` of tensors."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from specjax.targets.config import DecoderConfig, expected_tensors
from specjax.weights.check import check_tensors
from specjax.weights.names import ORBAX_FOLDER


def read_orbax(folder: Path, config: DecoderConfig, dtype: Any = None) -> dict[str, np.ndarray]:
    """The tensors of an Orbax checkpoint, checked by name and shape before any is read.

    Raises:
        ValueError: not an Orbax checkpoint.
        TensorError: lists every missing, unknown and misshapen tensor.
    """
    import orbax.checkpoint as ocp

    path = (folder / ORBAX_FOLDER).absolute()
    with ocp.StandardCheckpointer() as checkpointer:
        try:
            described = checkpointer.metadata(path).item_metadata.tree
        except (FileNotFoundError, AttributeError, ValueError) as error:
            raise ValueError(f"{path} is not an Orbax checkpoint: {error}") from error
        check_tensors(str(folder), config, {name: tuple(array.shape) for name, array in described.items()})
        target = {name: np.empty(described[name].shape, described[name].dtype) for name in described}
        restored = checkpointer.restore(path, target)
    arrays = {name: np.asarray(restored[name]) for name in expected_tensors(config)}
    return arrays if dtype is None else {name: array.astype(dtype, copy=False) for name, array in arrays.items()}


def write_orbax(folder: Path, tensors: Mapping[str, np.ndarray], advance) -> None:
    """Write tensors to `folder / params`; `advance` is called with the number of bytes written."""
    import orbax.checkpoint as ocp

    arrays = {name: np.asarray(tensors[name]) for name in tensors}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save((folder / ORBAX_FOLDER).absolute(), arrays)
    advance(sum(array.nbytes for array in arrays.values()))
