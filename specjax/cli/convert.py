"""`specjax convert`: a checkpoint in another format."""

import dataclasses
from typing import Annotated, Literal

import tyro

from specjax.cli import flags

HELP = """Write a model in another format: a Hugging Face folder (safetensors) or an Orbax checkpoint.

  specjax convert smollm2-135m out/smollm2 --format hf --dtype bfloat16
  specjax convert model.gguf out/model --format orbax

Nothing is written unless every tensor fits."""


@dataclasses.dataclass(kw_only=True)
class Convert(flags.CommonFlags):
    """Flags of `specjax convert`."""

    source: Annotated[tyro.conf.Positional[str], flags.text("SOURCE")]
    """smollm2-135m, a model folder, a GGUF file or a hub id."""
    out: Annotated[tyro.conf.Positional[str], flags.text("OUT")]
    """Folder to write; must not exist yet, or be empty."""
    format: Literal["hf", "orbax"] = "hf"
    """What to write."""
    dtype: Annotated[Literal["float32", "bfloat16"] | None, flags.text("float32|bfloat16")] = None
    """Of the written tensors; as they are stored by default, float32 where quantised."""

    def run(self) -> int:
        """Convert; 0."""
        import jax.numpy as jnp

        from specjax.weights.convert import convert

        dtype = None if self.dtype is None else jnp.dtype(self.dtype)  # numpy alone knows no bfloat16
        flags.note(f"wrote {convert(self.source, self.out, format=self.format, dtype=dtype)}")
        return 0
