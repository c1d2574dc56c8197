"""What a training run is: one strict description, with the defaults of each family, and the drafter that it makes."""

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import yaml
from pydantic import Field, ValidationError, model_validator

from specjax.config import ConfigError
from specjax.config.drafters import Strict
from specjax.drafters.config import HeadConfig
from specjax.targets.config import DecoderConfig

Family = Literal["eagle3", "mtp", "dflash", "dflash2", "dspark", "ubtree"]
TEST_TIME: tuple[Family, ...] = ("eagle3", "mtp")
BLOCK_ONLY: tuple[Family, ...] = ("dflash", "dflash2", "dspark", "ubtree")
LENGTHS = ("steps", "tokens", "minutes")  # what the length of a run may be given in

# Options that some families have.
OWN: dict[str, tuple[Family, ...]] = {
    **dict.fromkeys(("layers", "block_size", "mask_token_id", "anchors"), BLOCK_ONLY),
    "taps": ("eagle3", *BLOCK_ONLY),
    "unroll": TEST_TIME,
    "markov_rank": ("dspark",),
    "codebook_hidden": ("ubtree",),
    "labels": ("eagle3", "mtp", "dflash", "dflash2", "ubtree"),  # dspark's loss has its own mixture
    **dict.fromkeys(("selector_rank", "selector_top_k", "unary_weight"), ("dflash2", "ubtree")),
}


def owns(family: str, option: str) -> bool:
    """Whether a family has an option."""
    return family in OWN.get(option, (family,))


class Recipe(Strict):
    """A run. None stands for the family's or the target's own value; see `make`.

    Attributes:
        drafter: the family.
        target: the model that it is for.
        layers: decoder layers (block drafters).
        intermediate_size: width of its MLP.
        taps: residual streams that it reads, `t` = target layers executed.
        block_size: rows of a block, the anchor included.
        mask_token_id: what stands for unknown tokens of a block; None takes that of `start`, else the token that the
            corpus has least.
        selector_rank: (dflash2, ubtree) rank of the selector.
        selector_top_k: (dflash2, ubtree) candidates of a position, when drafting.
        codebook_hidden: (ubtree) width of the codebook networks.
        markov_rank: (dspark) rank of the Markov head.
        head_rank: rank of the low-rank head that picks candidates when drafting, fitted to the drafter's rows when the
            drafter is written (`candidate_head.py`); 0 scores every token. The drafter's own training does not read it.
        head_candidates: tokens that it picks.
        start: a folder with a drafter whose tensors are taken over where names and shapes agree, instead of a warm
            start from the target.
        warm_rows: packed rows that the warm start looks at; 0 starts at random.

        length: tokens of a packed row.
        batch: packed rows of a step.
        held_out: fraction of the corpus that is never trained on.
        features: `online` captures the target's features in each step; `cache` once, into files.
        dtype: of products; master weights are always float32. `auto` is bfloat16 where the machine multiplies it.

        unroll: (eagle3, mtp) steps of the training-time test.
        anchors: (block drafters) blocks of a packed row.
        decay: weight of a step (eagle3, mtp: `decay ** k`), or of a slot (`exp(-k / decay)`).
        labels: learn the target's whole distribution, or the `text` alone as the published recipes of dflash and
            mtp do. The distribution says more about each token, which counts while text is short.
        learn: the `answers`, which the target wrote, or `all` tokens, prompts included. The target's distribution is a
            label anywhere in a text, so prompts are text for nothing; acceptance is looked at in answers alone.
        unary_weight: (dflash2, ubtree) weight of the loss of the positions by themselves.
        vocabulary: tokens scored in a step; the vocabulary or more scores all.

        muon_rate: peak rate of matrices (Muon).
        adam_rate: peak rate of everything else (Adam).
        warmup: fraction of the run in which the rates rise; they then fall linearly to zero.
        clip: largest global norm of a gradient.
        steps: length of the run, or
        tokens: ... in packed tokens, or
        minutes: ... in minutes of training.
        evaluate_every: steps between looks at the held-out slice.
        evaluate_rows: packed rows of that slice.
        save_every: steps between checkpoints.
        seed: of everything random.
    """

    drafter: Family
    target: str = "smollm2-135m"
    layers: int = Field(default=1, ge=1)
    intermediate_size: int | None = Field(default=None, ge=1)
    taps: tuple[int, ...] | None = Field(default=None, strict=False)
    block_size: int = Field(default=8, ge=2)
    mask_token_id: int | None = Field(default=None, ge=0)
    selector_rank: int = Field(default=64, ge=1)
    selector_top_k: int = Field(default=16, ge=1)
    codebook_hidden: int = Field(default=256, ge=1)
    markov_rank: int = Field(default=16, ge=0)
    head_rank: int = Field(default=0, ge=0)
    head_candidates: int = Field(default=64, ge=1)
    start: str | None = None
    warm_rows: int = Field(default=64, ge=0)

    length: int = Field(default=512, ge=8)
    batch: int = Field(default=4, ge=1)
    held_out: float = Field(default=0.03, gt=0, lt=1)
    features: Literal["online", "cache"] = "online"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"

    unroll: int = Field(default=3, ge=1)
    anchors: int = Field(default=32, ge=1)
    decay: float = Field(default=0.8, gt=0)
    labels: Literal["target", "text"] = "target"
    learn: Literal["answers", "all"] = "answers"
    unary_weight: float = Field(default=1.0, ge=0)
    vocabulary: int = Field(default=4096, ge=2)

    muon_rate: float = Field(default=0.02, gt=0)
    adam_rate: float = Field(default=1e-3, gt=0)
    warmup: float = Field(default=0.04, ge=0, lt=1)
    clip: float = Field(default=1.0, gt=0)
    steps: int | None = Field(default=None, ge=1)
    tokens: int | None = Field(default=None, ge=1)
    minutes: float | None = Field(default=None, gt=0)
    evaluate_every: int = Field(default=50, ge=1)
    evaluate_rows: int = Field(default=8, ge=1)
    save_every: int = Field(default=100, ge=1)
    seed: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _one_length(self):
        given = [name for name in LENGTHS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"name one length of the run: steps, tokens or minutes (got {', '.join(given) or 'none'})")
        return self

    @model_validator(mode="after")
    def _fits(self):
        wrong = [n for n in OWN if n in self.model_fields_set and not owns(self.drafter, n)]
        if wrong:
            raise ValueError(f"{self.drafter} has no {', '.join(wrong)}")
        if self.taps is not None and list(self.taps) != sorted(set(self.taps)):
            raise ValueError(f"taps must be ascending and distinct, got {list(self.taps)}")
        return self

    @property
    def ahead(self) -> int:
        """Drafts of the longest draft that is trained."""
        if self.drafter in TEST_TIME:
            return self.unroll
        return self.block_size if self.drafter == "dspark" else self.block_size - 1


# What a family has that the defaults above do not say.
DEFAULTS: dict[str, dict[str, Any]] = {
    "mtp": {"decay": 0.6},  # FastMTP (arXiv 2509.18362)
    "dflash": {"decay": 4.0},
    "dflash2": {"decay": 4.0},
    "dspark": {"decay": 4.0, "block_size": 7},
    "ubtree": {"decay": 4.0},
}


def make(values: Mapping[str, Any]) -> Recipe:
    """A recipe from its values; what is not given is the family's default.

    Raises:
        ConfigError: unknown keys, values out of range, or options that the family does not have.
    """
    given = DEFAULTS.get(str(values.get("drafter")), {}) | dict(values)
    try:
        recipe = Recipe.model_validate(given)
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, e['loc'])) or 'recipe'}: {e['msg']}" for e in error.errors()]
        raise ConfigError("the training recipe cannot be honoured:" + "".join(f"\n  - {x}" for x in lines)) from None
    return recipe


def restore(values: Mapping[str, Any]) -> Recipe:
    """The recipe whose `model_dump` these values are, written by this or an earlier version."""
    return make({name: value for name, value in values.items() if owns(values["drafter"], name)})


def load(path: str | Path | None, overrides: Iterable[str] = ()) -> Recipe:
    """A recipe from a YAML file and `key=value` overrides, which win; a length given there is the only one.

    Raises:
        ConfigError: see `make`; or a file that is no mapping.
    """
    values = {} if path is None else yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    if not isinstance(values, dict):
        raise ConfigError(f"{path} is not a mapping of options")
    given = {}
    for override in overrides:
        name, equals, value = override.partition("=")
        if not equals:
            raise ConfigError(f"{override!r} is not key=value")
        given[name.strip()] = yaml.safe_load(value)
    if not given.keys().isdisjoint(LENGTHS):
        values = {name: value for name, value in values.items() if name not in LENGTHS}
    return make(values | given)


def default_taps(layers: int) -> tuple[int, ...]:
    """EAGLE-3's taps, `2, L // 2, L - 3`, as far as a small target has them."""
    return tuple(sorted({t for t in (2, layers // 2, layers - 3) if 0 < t < layers})) or (0,)


def head_config(recipe: Recipe, target: DecoderConfig, counts: np.ndarray) -> HeadConfig:
    """The drafter that a recipe makes for a target.

    Args:
        recipe: the run.
        target: the model.
        counts: how often each token comes in the corpus.
    """
    block = recipe.drafter in BLOCK_ONLY
    config = HeadConfig(
        family=recipe.drafter,
        num_layers=recipe.layers,
        hidden_size=target.hidden_size,
        intermediate_size=recipe.intermediate_size or target.intermediate_size,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        rms_norm_eps=target.rms_norm_eps,
        rope=target.rope,
        qk_norm=block or target.qk_norm,
        windows=(None,) * recipe.layers,
        vocab_size=target.vocab_size,
        draft_vocab_size=target.vocab_size,
        target_hidden_size=target.hidden_size,
        taps=() if recipe.drafter == "mtp" else recipe.taps or default_taps(target.num_layers),
        fc_norm=recipe.drafter == "eagle3",
    )
    if not block:
        return config
    mask = int(np.argmin(counts)) if recipe.mask_token_id is None else recipe.mask_token_id
    more: dict[str, Any] = {
        "mask_token_id": mask,
        "block_size": recipe.block_size,
        "block_causal": (False,) * recipe.layers,
    }
    selector = {"selector_rank": recipe.selector_rank, "selector_top_k": recipe.selector_top_k}
    if recipe.drafter == "dflash2":
        more |= selector | {"conv_kernel": 2, "conv_group": 16}
    if recipe.drafter == "dspark":
        more |= {"shifted": True, "markov_rank": recipe.markov_rank, "confidence": True}
        more["confidence_with_markov"] = recipe.markov_rank > 0
    if recipe.drafter == "ubtree":
        tree = {"codebook_hidden": recipe.codebook_hidden, "tree_budget": 31, "tree_width": 8}
        more |= selector | tree
    return dataclasses.replace(config, **more)
