"""Sizes of targets and drafters: parameters, bytes and arithmetic, without their weights."""

import dataclasses
from collections.abc import Mapping
from typing import Any

BYTES = {"float32": 4, "bfloat16": 2, "float8": 1, "int8": 1}


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """A dense decoder of the Llama line.

    Attributes:
        name: as it is asked for.
        layers: decoder layers.
        hidden: model width.
        inner: width of the gated MLP.
        heads: query heads.
        kv_heads: key/value heads.
        head_dim: width of a head.
        vocab: tokens.
        tied: the head is the embedding.
    """

    name: str
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool = False

    @property
    def qkv_parameters(self) -> int:
        """Of the matrices of one layer that make queries, keys and values."""
        return self.hidden * self.head_dim * (self.heads + 2 * self.kv_heads)

    @property
    def output_parameters(self) -> int:
        """Of one layer's matrix behind attention."""
        return self.hidden * self.head_dim * self.heads

    @property
    def mlp_parameters(self) -> int:
        """Of one layer's gate, up and down."""
        return 3 * self.hidden * self.inner

    @property
    def layer_parameters(self) -> int:
        """Of all matrices of one layer."""
        return self.qkv_parameters + self.output_parameters + self.mlp_parameters

    @property
    def head_parameters(self) -> int:
        return self.hidden * self.vocab

    @property
    def parameters(self) -> int:
        """All matrices that are held; norms and biases are left out."""
        return self.layers * self.layer_parameters + self.head_parameters * (1 if self.tied else 2)

    def kv_bytes(self, dtype: str, layers: int | None = None) -> int:
        """Bytes of keys and values of one token, in all layers or in `layers` of them."""
        return (self.layers if layers is None else layers) * 2 * self.kv_heads * self.head_dim * BYTES[dtype]

    @classmethod
    def from_config(cls, name: str, config: Mapping[str, Any]) -> "ModelShape":
        """The shape that a Hugging Face `config.json` describes."""
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        return cls(
            name=name,
            layers=config["num_hidden_layers"],
            hidden=hidden,
            inner=config["intermediate_size"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or hidden // heads,
            vocab=config["vocab_size"],
            tied=bool(config.get("tie_word_embeddings", False)),
        )


# Of the models' published config.json; dense-27b stands for any dense decoder of 27 billion parameters.
_TARGETS = (
    ModelShape("smollm2-135m", 30, 576, 1536, 9, 3, 64, 49152, tied=True),
    ModelShape("llama-3.1-8b", 32, 4096, 14336, 32, 8, 128, 128256),
    ModelShape("qwen3-8b", 36, 4096, 12288, 32, 8, 128, 151936),
    ModelShape("qwen3-32b", 64, 5120, 25600, 64, 8, 128, 151936),
    ModelShape("dense-27b", 64, 5120, 21504, 40, 8, 128, 151936),
)
TARGETS: Mapping[str, ModelShape] = {shape.name: shape for shape in _TARGETS}


def target(name: str) -> ModelShape | None:
    """A known target by its name or hub id (`Qwen/Qwen3-8B`, `meta-llama/Llama-3.1-8B-Instruct`), or None."""
    short = name.lower().rsplit("/", 1)[-1]
    return TARGETS.get(short.removesuffix("-instruct"))


@dataclasses.dataclass(frozen=True)
class DrafterShape:
    """What a drafter costs, in parts of its target. Layers and heads are of the target's width unless said otherwise.

    Attributes:
        kind: its name in a run configuration.
        layers: decoder layers of one drafting pass.
        parallel: one pass drafts the whole block; else each level of the draft is a pass that waits for the last.
        joined: model widths that are joined into one at the input of a layer (token and feature: 2).
        taps: residual streams of the target that are read, projected to one width for each committed token.
        vocab: tokens of its own head; None where it uses the target's.
        markov: rank of a sequential head (DSpark): one small product a drafted token, each waiting for the last.
    """

    kind: str
    layers: int = 0
    parallel: bool = False
    joined: int = 1
    taps: int = 0
    vocab: int | None = None
    markov: int = 0

    @property
    def learned(self) -> bool:
        return self.layers > 0

    def layer_parameters(self, model: ModelShape) -> int:
        """Of one layer; a joined input widens queries, keys and values, or is fused first: the same order of size."""
        return model.layer_parameters + (self.joined - 1) * model.qkv_parameters

    def fuse_parameters(self, model: ModelShape) -> int:
        """Of the projection of the taps, applied to committed tokens."""
        return self.taps * model.hidden**2

    def head_vocab(self, model: ModelShape) -> int:
        return min(self.vocab or model.vocab, model.vocab)

    def parameters(self, model: ModelShape) -> int:
        """What is held beyond the target: its layers, projections, its own head, its sequential head."""
        own_head = self.head_vocab(model) * model.hidden if self.vocab else 0
        markov = 2 * self.markov * model.vocab
        return self.layers * self.layer_parameters(model) + self.fuse_parameters(model) + own_head + markov


# EAGLE-3 (arXiv 2503.01840): one layer on token and feature, three taps, a reduced vocabulary of 32,000. MTP: one layer
# on token and hidden, the target's head. DFlash and DSpark: five layers over a block, five taps, the target's head;
# DSpark adds a Markov head of rank 256, UBTree a bigram selector of about that size. P-EAGLE is EAGLE-3 in one pass. A
# hybrid costs what its model does, for which EAGLE-3 stands. Lookup drafters have no weights.
_DRAFTERS = (
    DrafterShape("ngram"),
    DrafterShape("suffix"),
    DrafterShape("eagle3", layers=1, joined=2, taps=3, vocab=32000),
    DrafterShape("mtp", layers=1, joined=2),
    DrafterShape("dflash", layers=5, parallel=True, taps=5),
    DrafterShape("dspark", layers=5, parallel=True, taps=5, markov=256),
    DrafterShape("peagle", layers=1, parallel=True, joined=2, taps=3, vocab=32000),
    DrafterShape("ubtree", layers=5, parallel=True, taps=5, markov=256),
    DrafterShape("hybrid", layers=1, joined=2, taps=3, vocab=32000),
)
DRAFTERS: Mapping[str, DrafterShape] = {shape.kind: shape for shape in _DRAFTERS}


def drafter(kind: str) -> DrafterShape:
    """A drafter by its kind.

    Raises:
        ValueError: a kind whose cost is not known here; the known ones are listed.
    """
    if kind not in DRAFTERS:
        raise ValueError(f"no cost is known for a drafter {kind!r}; known kinds are {', '.join(DRAFTERS)}")
    return DRAFTERS[kind]
