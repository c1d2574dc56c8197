"""`specjax convert`: a model, or a drafter, in another format."""

import dataclasses
from typing import Annotated, Any, Literal

import tyro

from specjax.cli import flags

HELP = """Write a model or a drafter in another format.

  specjax convert smollm2-135m out/smollm2 --format hf --dtype bfloat16     a Hugging Face folder (safetensors)
  specjax convert model.gguf out/model --format orbax
  specjax convert eagle3-head out/head --target smollm2-135m                a drafter, in its family's usual format
  specjax convert eagle3-head out/head --target smollm2-135m --format speculators-eagle3
  specjax convert model-with-mtp out/mtp --target model-with-mtp            the MTP module inside a model, by itself

Nothing is written unless every tensor fits; what does not is listed, and the exit code is 2."""


@dataclasses.dataclass(kw_only=True)
class Convert(flags.CommonFlags):
    """Flags of `specjax convert`."""

    source: Annotated[tyro.conf.Positional[str], flags.text("SOURCE")]
    """smollm2-135m, a model folder, a GGUF file, a hub id; with --target, the folder or hub id of a drafter."""
    out: Annotated[tyro.conf.Positional[str], flags.text("OUT")]
    """Folder to write; must not exist yet, or be empty."""
    target: Annotated[str | None, flags.text("MODEL")] = None
    """SOURCE is a drafter, and this the model that it drafts for (only its configuration is read)."""
    format: Annotated[str | None, flags.text("FORMAT")] = None
    """Of a model: hf (the default) or orbax. Of a drafter: its family's usual one, or eagle3-specforge,
    eagle3-deepspec, peagle-specforge, dflash-zlab, dflash2-zlab, dspark-deepspec, dspark-specforge, dspark-liquid,
    ubtree, speculators-{eagle3,peagle,mtp,dflash,dflash2,dspark}; one that has no words for it is refused."""
    dtype: Annotated[Literal["float32", "bfloat16"] | None, flags.text("float32|bfloat16")] = None
    """Of the written tensors; as they are stored by default, float32 where quantised."""

    def run(self) -> int:
        """Convert; 0."""
        import jax.numpy as jnp

        dtype = None if self.dtype is None else jnp.dtype(self.dtype)  # numpy alone knows no bfloat16
        path = self._model(dtype) if self.target is None else self._drafter(self.target, dtype)
        flags.note(f"wrote {path}")
        return 0

    def _model(self, dtype: Any):
        from specjax.drafters.formats import mtp
        from specjax.drafters.formats.convert import drafter_format
        from specjax.weights.convert import convert

        found = drafter_format(self.source)
        if found in mtp.FORMATS:
            flags.note(f"left out: the MTP module inside ({found}); --target {self.source} writes it by itself")
        elif found is not None:
            raise ValueError(
                f"{self.source} holds a drafter ({found}): name the model that it drafts for, --target MODEL"
            )
        return convert(self.source, self.out, format=self.format or "hf", dtype=dtype)

    def _drafter(self, target: str, dtype: Any):
        from specjax.drafters.formats.convert import convert_drafter
        from specjax.weights.load import load_config

        return convert_drafter(self.source, self.out, load_config(target), self.format, dtype, flags.note)
