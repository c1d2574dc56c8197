"""One section a drafter: its kind, and the options that it honours."""

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

MOST_DRAFTS = 127  # with the root, the 128 verify rows of a request that kernels are made for


class ConfigError(ValueError):
    """A configuration that cannot be honoured; the message lists every fault."""


class Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class DrafterConfig(Strict):
    """What all drafters' options share: `kind`, and the drafts of one round.

    `num_speculative_tokens` counts drafts only: the root (the last committed token) is verified with them, but is not
    one of them, and a round emits at most one token more than it drafts.
    """

    kind: str
    samples: ClassVar[bool] = False  # whether the drafter has a distribution `q` to sample drafts from


class NoDrafter(DrafterConfig):
    """Plain decoding."""

    kind: Literal["none"] = "none"


class NgramConfig(DrafterConfig):
    """Prompt lookup: what followed the last `prompt_lookup_max` (down to `_min`) tokens when they last occurred."""

    kind: Literal["ngram"] = "ngram"
    num_speculative_tokens: int = Field(default=5, ge=1, le=MOST_DRAFTS)
    prompt_lookup_min: int = Field(default=2, ge=1)
    prompt_lookup_max: int = Field(default=5, ge=1)

    @model_validator(mode="after")
    def _ordered(self):
        low, high = self.prompt_lookup_min, self.prompt_lookup_max
        if low > high:
            raise ValueError(f"prompt_lookup_min ({low}) must not exceed prompt_lookup_max ({high})")
        return self


class SuffixConfig(DrafterConfig):
    """Suffix decoding (arXiv 2411.04975): counted continuations in this request and in earlier answers.

    `ring` is the number of tokens of earlier answers that are remembered; `specjax.drafters.suffix` tells the rest.
    """

    kind: Literal["suffix"] = "suffix"
    num_speculative_tokens: int = Field(default=5, ge=1, le=MOST_DRAFTS)
    max_depth: int = Field(default=24, ge=1)
    max_spec_factor: float = Field(default=1.0, ge=0.0, allow_inf_nan=False)
    max_spec_offset: float = Field(default=0.0, allow_inf_nan=False)
    min_token_prob: float = Field(default=0.1, ge=0.0, le=1.0)
    ring: int = Field(default=16384, ge=0)
    occurrences: int = Field(default=128, ge=1)


class DraftModelConfig(DrafterConfig):
    """A smaller model with the target's vocabulary: `model` is a folder, a GGUF file or a model name.

    Where the folder turns out to hold a learned drafter, that drafter's kind is used, with its own defaults; `probe`
    is for that case alone.
    """

    kind: Literal["draft_model"] = "draft_model"
    samples: ClassVar[bool] = True
    model: str
    num_speculative_tokens: int = Field(default=4, ge=1, le=MOST_DRAFTS)
    probe: bool | None = None


class LearnedConfig(DrafterConfig):
    """What drafters with weights of their own share.

    `model` is the folder (or hub id) of the drafter; its format is found from its files. Without it, it is the drafter
    that comes with specjax for the target (`drafts/<target>/<kind>`). `probe` runs the drafter on a short text of the
    target and corrects a switch that its files state wrongly. With a `head_rank`, a low-rank head picks
    `head_candidates` tokens, which alone are scored exactly; 0 scores every token. `window` bounds the positions that
    each layer sees, the newest ones: beyond the lengths that it was trained on, a drafter does better with fewer.
    """

    samples: ClassVar[bool] = True
    model: str | None = None
    probe: bool = True
    head_rank: int = Field(default=0, ge=0)
    head_candidates: int = Field(default=64, ge=1)
    window: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _ranked(self):
        if "head_candidates" in self.model_fields_set and not self.head_rank:
            raise ValueError("head_candidates are those of a low-rank head: set head_rank too")
        return self


class Eagle3Config(LearnedConfig):
    """EAGLE-3: trees of `topk` children a node, or chains (`topk: 1`), at most `rows` verify rows with the root."""

    kind: Literal["eagle3"] = "eagle3"
    num_speculative_tokens: int = Field(default=5, ge=1, le=MOST_DRAFTS)
    topk: int = Field(default=4, ge=1)
    rows: int | None = Field(default=None, ge=2, le=MOST_DRAFTS + 1)


class PEagleConfig(LearnedConfig):
    """P-EAGLE: a chain from one pass; as many drafts as it was trained for unless fewer are asked for."""

    kind: Literal["peagle"] = "peagle"
    num_speculative_tokens: int | None = Field(default=None, ge=1, le=MOST_DRAFTS)


class MTPConfig(LearnedConfig):
    """A multi-token-prediction module; without a `model`, and where none comes with specjax, the target's own."""

    kind: Literal["mtp"] = "mtp"
    num_speculative_tokens: int = Field(default=3, ge=1, le=MOST_DRAFTS)
    topk: int = Field(default=1, ge=1)
    rows: int | None = Field(default=None, ge=2, le=MOST_DRAFTS + 1)


class BlockConfig(LearnedConfig):
    """What block drafters share: None drafts the trained block; `ddtree` makes a tree of at most `tree_budget`
    drafts.
    """

    num_speculative_tokens: int | None = Field(default=None, ge=1, le=MOST_DRAFTS)
    tree: Literal["none", "ddtree"] = "none"
    tree_budget: int | None = Field(default=None, ge=1, le=MOST_DRAFTS)


class DFlashConfig(BlockConfig):
    """DFlash and DFlash 2."""

    kind: Literal["dflash"] = "dflash"


class DSparkConfig(BlockConfig):
    """DSpark: its chain ends before the first draft whose confidence is below the threshold."""

    kind: Literal["dspark"] = "dspark"
    confidence_threshold: float = Field(default=0.0, ge=0.0, le=1.0)
    calibration: Annotated[tuple[float, ...], Field(strict=False)] = ()


class UBTreeConfig(BlockConfig):
    """UBTree: a tree of `tree_width` nodes a level from `top_k` candidates; None takes what the drafter's file says."""

    kind: Literal["ubtree"] = "ubtree"
    tree: Literal["ubtree", "ddtree"] = "ubtree"  # type: ignore[assignment]
    tree_width: int | None = Field(default=None, ge=1)
    top_k: int | None = Field(default=None, ge=1)


class GraftedNgramConfig(NgramConfig):
    """Prompt lookup beside a model: from three equal tokens on a copy is right more often than a small head's drafts,
    below that less often.
    """

    prompt_lookup_min: int = Field(default=3, ge=1)


_Learned = Eagle3Config | PEagleConfig | MTPConfig | DFlashConfig | DSparkConfig | UBTreeConfig


class HybridConfig(DrafterConfig):
    """A copied branch grafted onto a model's drafts, in one tree of at most `rows` verify rows with the root.

    `model` is a section, a kind or a path, as `drafter` itself (by default EAGLE-3 as it comes with specjax); `lookup`
    is `ngram`, `suffix` or a section of these. Without `rows` a model tree keeps its own number, and a model chain gets
    the branch's beside its own.
    """

    kind: Literal["hybrid"] = "hybrid"
    model: Annotated[DraftModelConfig | _Learned, Field(discriminator="kind")] = Eagle3Config()
    lookup: Annotated[GraftedNgramConfig | SuffixConfig, Field(discriminator="kind")] = GraftedNgramConfig()
    rows: int | None = Field(default=None, ge=2, le=MOST_DRAFTS + 1)

    @field_validator("model", "lookup", mode="before")
    @classmethod
    def _bare(cls, value: Any) -> Any:
        return bare_section(value) if isinstance(value, str) else value

    @property
    def num_speculative_tokens(self) -> int:
        """Drafts on the longest path, as far as the configuration says."""
        drafts = self.model.num_speculative_tokens  # type: ignore[attr-defined]
        return max(drafts or 0, self.lookup.num_speculative_tokens)


_Member = NgramConfig | SuffixConfig | DraftModelConfig | _Learned | HybridConfig


class AutoConfig(DrafterConfig):
    """A set of drafters, of which every round uses the one that promises the most tokens per second, or none.

    `of` are sections, kinds or paths, as `drafter` itself. What a round costs is read from a latency table: `table`
    names its file; None takes the one that was measured on this device (`specjax calibrate`), else the one that comes
    with specjax, else an estimate from the device's data sheet.
    """

    kind: Literal["auto"] = "auto"
    of: Annotated[tuple[Annotated[_Member, Field(discriminator="kind")], ...], Field(strict=False)] = (NgramConfig(),)
    table: str | None = None

    @field_validator("of", mode="before")
    @classmethod
    def _bare(cls, value: Any) -> Any:
        each = [value] if isinstance(value, str) else value
        if not isinstance(each, list | tuple):
            return value
        return [bare_section(one) if isinstance(one, str) else one for one in each]

    @model_validator(mode="after")
    def _different(self):
        kinds = [one.kind for one in self.of]
        if not kinds:
            raise ValueError("'of' names no drafter; plain decoding alone is drafter 'none'")
        if twice := sorted({kind for kind in kinds if kinds.count(kind) > 1}):
            raise ValueError(f"a set holds one drafter of a kind, but {', '.join(twice)} is there more than once")
        return self

    @property
    def num_speculative_tokens(self) -> int:
        """Drafts on the longest path, as far as the configuration says."""
        return max(one.num_speculative_tokens or 0 for one in self.of)


# A new drafter: its options above, and its name in this line and in `_Member`.
AnyDrafter = NoDrafter | _Member | AutoConfig


def by_kind(choices: Any) -> dict[str, type[DrafterConfig]]:
    """The sections of a union by their `kind`."""
    return {choice.model_fields["kind"].default: choice for choice in get_args(choices)}


DRAFTERS = by_kind(AnyDrafter)
DRAFTER_KINDS = tuple(DRAFTERS)


def bare_section(text: str) -> dict[str, str]:
    """A bare drafter string as a section: one of the kinds, else the path or name of a model.

    What the path holds, a model or a learned drafter, is found out when it is loaded (`engine.drafter.recognised`).
    """
    if text not in DRAFTERS and ("/" in text or "\\" in text or Path(text).exists()):
        return {"kind": "draft_model", "model": text}
    return {"kind": text}  # where it is none, refused by its name


def without_probe(chosen: DrafterConfig) -> DrafterConfig | None:
    """The section with its drafter's wiring taken as declared; None where there is no wiring to check."""
    if isinstance(chosen, HybridConfig):
        return chosen.model_copy(update={"model": without_probe(chosen.model)})
    if isinstance(chosen, AutoConfig):
        found = [without_probe(one) for one in chosen.of]
        of = tuple(new or old for new, old in zip(found, chosen.of, strict=True))
        return chosen.model_copy(update={"of": of}) if any(found) else None
    if isinstance(chosen, LearnedConfig | DraftModelConfig):
        return chosen.model_copy(update={"probe": False})
    return None
