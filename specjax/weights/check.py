"""Do the tensors of a checkpoint fit the configuration beside them? Answered from names and shapes alone."""

import re
from collections.abc import Collection, Mapping

from specjax.targets.config import DecoderConfig, expected_tensors

# Buffers that old checkpoints carry and that follow from the configuration.
_HARMLESS = ("rotary_emb.inv_freq", "attn.masked_bias", "self_attn.bias")

# Multi-token-prediction modules inside a target's checkpoint: a drafter's business (`drafters/formats/mtp.py`).
_MTP = re.compile(r"mtp\.|model\.mtp\.|model\.mtp_layers\.")


class TensorError(ValueError):
    """Tensors that do not fit the model. `problems` holds one line for each."""

    def __init__(self, what: str, problems: Collection[str]):
        self.problems = tuple(problems)
        super().__init__(
            f"{what} does not hold the tensors that its configuration asks for:"
            + "".join(f"\n  - {problem}" for problem in self.problems)
        )


def check_tensors(what: str, config: DecoderConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Compare a checkpoint's tensors with those of `config`, before any is read.

    A `lm_head.weight` beside tied embeddings is let through here: whether it is the embedding is a question of values
    (`safetensors.read_tensors` answers it). Buffers that follow from the configuration are allowed, and so are MTP
    modules: by their prefixes, or as a layer past the last one that has a fuse matrix (`eh_proj`).

    Raises:
        TensorError: lists every missing, unknown and misshapen tensor, with both shapes.
    """
    expected = expected_tensors(config)
    allowed = dict(expected)
    if config.tie_word_embeddings:
        allowed["lm_head.weight"] = expected["model.embed_tokens.weight"]
    past = f"model.layers.{config.num_layers}."
    appended = (past,) if f"{past}eh_proj.weight" in shapes else ()
    problems = []
    for name, shape in expected.items():
        if name not in shapes:
            note = " (tie_word_embeddings is false)" if name == "lm_head.weight" else ""
            problems.append(f"missing: {name} {list(shape)}{note}")
    for name, shape in shapes.items():
        if name not in allowed:
            if not (name.endswith(_HARMLESS) or _MTP.match(name) or name.startswith(appended)):
                problems.append(f"unknown: {name} {list(shape)}")
        elif tuple(shape) != allowed[name]:
            problems.append(f"misshapen: {name} is {list(shape)}, the configuration asks for {list(allowed[name])}")
    if problems:
        raise TensorError(what, problems)
