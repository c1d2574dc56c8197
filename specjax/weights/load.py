"""Load a model by name or path: configuration, tensors and tokenizer, whatever they are stored in."""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from specjax.targets.config import DecoderConfig
from specjax.weights.names import Source, resolve
from specjax.weights.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A model in memory.

    Attributes:
        config: what the decoder is.
        tensors: every tensor of `expected_tensors(config)`, under its Hugging Face name and in its shape.
        tokenizer: the tokenizer; its `eos_ids` are those of the configuration.
        source: where it came from.
    """

    config: DecoderConfig
    tensors: Mapping[str, np.ndarray]
    tokenizer: Tokenizer
    source: Source


def load_config(name_or_path: str | os.PathLike) -> DecoderConfig:
    """What a model is, without its weights.

    Args:
        name_or_path: see `names.resolve`.

    Raises:
        ValueError: the name is unknown, or what it names is not a model that can be run.
    """
    source = resolve(name_or_path)
    if source.kind == "gguf":
        from specjax.weights.gguf import GGUFFile, read_gguf_config

        return read_gguf_config(GGUFFile(source.path))
    from specjax.weights.safetensors import read_config

    return read_config(source.path)


def load_checkpoint(name_or_path: str | os.PathLike, dtype: Any = None) -> Checkpoint:
    """Find and read a model.

    The ids that end a text are those of `generation_config.json`, else of `config.json`, else the tokenizer's.

    Args:
        name_or_path: see `names.resolve`.
        dtype: a numpy dtype (`ml_dtypes.bfloat16` included) for all tensors; None keeps what is stored, float32 where
            it is quantised.

    Raises:
        ValueError: the name is unknown, or what it names is not a model that can be run; nothing is half loaded.
    """
    source = resolve(name_or_path)
    if source.kind == "gguf":
        from specjax.weights.gguf import GGUFFile, read_gguf
        from specjax.weights.gguf_tokenizer import gguf_tokenizer

        file = GGUFFile(source.path)
        tokenizer = gguf_tokenizer(file.metadata)
        config, tensors = read_gguf(file, dtype)
    else:
        from specjax.weights.safetensors import read_config, read_tensors
        from specjax.weights.tokenizer import read_tokenizer

        config = read_config(source.path)
        tokenizer = read_tokenizer(source.path)
        if source.kind == "orbax":
            from specjax.weights.orbax import read_orbax

            tensors = read_orbax(source.path, config, dtype)
        else:
            tensors = read_tensors(source.path, config, dtype)
    if not config.eos_token_ids:
        config = dataclasses.replace(config, eos_token_ids=tokenizer.eos_ids)
    tokenizer = dataclasses.replace(tokenizer, eos_ids=config.eos_token_ids)
    if extra := range(config.vocab_size, tokenizer.vocab_size):
        names = ", ".join(repr(tokenizer.id_to_token(index)) for index in extra[:3])
        raise ValueError(
            f"{source.path}: the tokenizer has {tokenizer.vocab_size} tokens and the model's vocabulary "
            f"{config.vocab_size}; the model has no row for {names}{' ...' if len(extra) > 3 else ''}: "
            "remove what was added to the tokenizer"
        )
    return Checkpoint(config=config, tensors=tensors, tokenizer=tokenizer, source=source)
