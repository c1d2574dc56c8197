"""What a run is: frozen, strict configuration, read from YAML, from dotted overrides and from vLLM's JSON.

Nothing here imports JAX. Whatever cannot be honoured is refused before anything is loaded, and all faults of a file
are listed at once, each with its line and, for an unknown key, with the nearest known one.
"""

import difflib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator


class ConfigError(ValueError):
    """A configuration that cannot be honoured; the message lists every fault."""


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class DrafterConfig(_Strict):
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
    num_speculative_tokens: int = Field(default=5, ge=1)
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
    num_speculative_tokens: int = Field(default=5, ge=1)
    max_depth: int = Field(default=24, ge=1)
    max_spec_factor: float = Field(default=1.0, ge=0.0, allow_inf_nan=False)
    max_spec_offset: float = Field(default=0.0, allow_inf_nan=False)
    min_token_prob: float = Field(default=0.1, ge=0.0, le=1.0)
    ring: int = Field(default=16384, ge=0)
    occurrences: int = Field(default=128, ge=1)


class DraftModelConfig(DrafterConfig):
    """A smaller model with the target's vocabulary: `model` is a folder, a GGUF file or a model name."""

    kind: Literal["draft_model"] = "draft_model"
    samples: ClassVar[bool] = True
    model: str
    num_speculative_tokens: int = Field(default=4, ge=1)


# A new drafter: its options above, and its name in this line.
AnyDrafter = NoDrafter | NgramConfig | SuffixConfig | DraftModelConfig

_DRAFTERS: dict[str, type[DrafterConfig]] = {c.model_fields["kind"].default: c for c in get_args(AnyDrafter)}
DRAFTER_KINDS = tuple(_DRAFTERS)


class RunConfig(_Strict):
    """One run of the engine: a target, a drafter, and how they decode.

    Attributes:
        target: a known name, a folder with safetensors, or a GGUF file.
        drafter: a kind, a path to a draft model, or a section with `kind` and its options.
        dtype: of weights and activations; `auto` is float32 on a CPU and bfloat16 elsewhere.
        context: cache slots of each request, prompt and drafts included.
        batch: requests that decode together.
        page_size: tokens of a cache page; None keeps each request in one page.
        accept: the accept rule; `auto` takes the one that fits the drafts.
        draft_sampling: `deterministic` candidates (same seed, same text, with any drafter), or drafts `sampled` from q.
        prefill_chunk: prompt tokens processed at once.
        warmup: compile everything before the first request.
        compilation_cache: folder for compiled programs, `auto` for the user's cache folder, None for none.
        seed: requests that name no seed get this one plus their number; None draws fresh ones.
    """

    target: str = "smollm2-135m"
    drafter: Annotated[AnyDrafter, Field(discriminator="kind")] = NoDrafter()
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    context: int = Field(default=2048, ge=2)
    batch: int = Field(default=1, ge=1)
    page_size: int | None = Field(default=None, ge=1)
    accept: Literal["auto", "tree", "chain", "block", "recursive"] = "auto"
    draft_sampling: Literal["deterministic", "sampled"] = "deterministic"
    prefill_chunk: int = Field(default=256, ge=1)
    warmup: bool = True
    compilation_cache: str | None = "auto"
    seed: Annotated[int, Field(ge=0)] | None = 0

    @model_validator(mode="before")
    @classmethod
    def _bare_drafter(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and isinstance(data.get("drafter"), str):
            return {**data, "drafter": _section(data["drafter"])}
        return data

    @model_validator(mode="after")
    def _honoured(self):
        if self.page_size is not None and self.context % self.page_size:
            raise ValueError(f"context ({self.context}) must be a multiple of page_size ({self.page_size})")
        drafts = getattr(self.drafter, "num_speculative_tokens", 0)
        if drafts + 1 > self.context:
            raise ValueError(f"context ({self.context}) must exceed num_speculative_tokens ({drafts})")
        if self.draft_sampling == "sampled" and not self.drafter.samples:
            raise ValueError(
                f"draft_sampling 'sampled' needs a drafter with a distribution to sample from, and "
                f"'{self.drafter.kind}' has none; leave it 'deterministic' or take a model drafter"
            )
        if self.accept in ("block", "recursive") and self.draft_sampling != "sampled":
            raise ValueError(
                f"accept '{self.accept}' is for sampled drafts; set draft_sampling to 'sampled', or accept to 'auto'"
            )
        return self


def drafter(value: str | Mapping[str, Any]) -> DrafterConfig:
    """A drafter's configuration from its kind, from the path of a draft model, or from its options.

    Raises:
        ConfigError: an unknown kind, option or type, all listed.
    """
    return make({"drafter": value}).drafter


def make(values: Mapping[str, Any], *, lines: Mapping[str, int] | None = None, source: str = "") -> RunConfig:
    """A `RunConfig` of `values`; `lines` gives the line of each dotted key in the file `source`, for messages.

    Raises:
        ConfigError: lists all unknown keys, wrong types and refused combinations.
    """
    try:
        return RunConfig.model_validate(dict(values))
    except ValidationError as error:
        faults = [_fault(e, lines or {}) for e in error.errors(include_url=False)]
    raise ConfigError(_listed(faults, source or "the configuration"))


def load(path: str | Path | None, overrides: Iterable[str] = ()) -> RunConfig:
    """Read a YAML (or JSON) run configuration, then apply dotted overrides such as `drafter.num_speculative_tokens=3`.

    Args:
        path: the file; None starts from the defaults.
        overrides: `key=value`, the value in YAML (`batch=4`, `page_size=null`, `drafter=suffix`).

    Raises:
        ConfigError: the file cannot be read, or holds anything that is unknown, twice there, or of a wrong type.
    """
    values, lines, source = ({}, {}, "") if path is None else (*_read(Path(path)), str(path))
    for override in overrides:
        _override(values, override)
    return make(values, lines=lines, source=source)


# vLLM's names of `--speculative-config`, by method: theirs -> ours.
_SPECULATIVE_KEYS = {
    "ngram": {
        "num_speculative_tokens": "num_speculative_tokens",
        "prompt_lookup_max": "prompt_lookup_max",
        "prompt_lookup_min": "prompt_lookup_min",
    },
    "suffix": {
        "num_speculative_tokens": "num_speculative_tokens",
        "suffix_decoding_max_tree_depth": "max_depth",
        "suffix_decoding_max_spec_factor": "max_spec_factor",
        "suffix_decoding_min_token_prob": "min_token_prob",
    },
    "draft_model": {"num_speculative_tokens": "num_speculative_tokens", "model": "model"},
}


def from_speculative_config(text: str) -> DrafterConfig:
    """A drafter from the JSON that vLLM's `--speculative-config` takes.

    As there, one of `prompt_lookup_min` and `prompt_lookup_max` alone sets both, and `model` alone means `draft_model`.

    Raises:
        ConfigError: not a JSON object, an unknown method or key (with the nearest known one), a wrong type.
    """
    try:
        given = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"the speculative config is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise ConfigError(f"the speculative config must be a JSON object, got {text!r}")
    method = given.pop("method", "draft_model" if "model" in given else None)
    if method not in _SPECULATIVE_KEYS:
        raise ConfigError(f"unknown method {method!r}{_nearest(str(method), _SPECULATIVE_KEYS, 'methods')}")
    names = _SPECULATIVE_KEYS[method]
    unknown = [key for key in given if key not in names]
    if unknown:
        faults = [f"unknown key '{key}' for method '{method}'{_nearest(key, names, 'keys')}" for key in unknown]
        raise ConfigError(_listed(faults, "the speculative config"))
    options = {names[key]: value for key, value in given.items()}
    bounds = {"prompt_lookup_min", "prompt_lookup_max"} & options.keys()
    if len(bounds) == 1:
        options |= dict.fromkeys(("prompt_lookup_min", "prompt_lookup_max"), options[bounds.pop()])
    return drafter({"kind": method, **options})


def _section(text: str) -> dict[str, str]:
    """A bare drafter string as a section: one of the kinds, else the path or name of a draft model."""
    if text in _DRAFTERS:
        return {"kind": text}
    if "/" in text or "\\" in text or Path(text).exists():
        return {"kind": "draft_model", "model": text}
    return {"kind": text}  # refused by its name


def _read(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """The mapping of a YAML file, and the line of each dotted key."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    try:
        values, node = yaml.safe_load(text), yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from None
    if values is None:
        return {}, {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold keys and values, got {type(values).__name__}")
    lines, twice = {}, []
    _walk(node, "", lines, twice)
    if twice:
        raise ConfigError(_listed(twice, str(path)))
    return values, lines


def _walk(node: yaml.Node, prefix: str, lines: dict[str, int], twice: list[str]) -> None:
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        name, line = f"{prefix}{key.value}", key.start_mark.line + 1
        if name in lines:
            twice.append(f"line {line}: '{name}' stands on line {lines[name]} already")
        lines[name] = line
        _walk(value, f"{name}.", lines, twice)


def _override(values: dict[str, Any], text: str) -> None:
    """Set one dotted `key=value` in nested `values`."""
    key, equals, value = text.partition("=")
    *sections, name = key.strip().split(".")
    if not equals or not name or not all(sections):
        raise ConfigError(f"an override is written key=value, as in drafter.num_speculative_tokens=4; got {text!r}")
    for section in sections:
        inner = values.get(section, {})
        inner = _section(inner) if isinstance(inner, str) else inner
        if not isinstance(inner, dict):
            raise ConfigError(f"override {text!r}: '{section}' is {inner!r}, which has no keys")
        values[section] = inner = dict(inner)
        values = inner
    try:
        values[name] = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"override {text!r}: the value is not YAML: {error}") from None


def _fault(error: Any, lines: Mapping[str, int]) -> str:
    """One of pydantic's errors in the words of this file."""
    path = [str(part) for part in error["loc"]]
    fields = RunConfig.model_fields
    if len(path) > 1 and path[0] == "drafter":  # pydantic names the chosen kind as a step of the path
        fields = _DRAFTERS[path[1]].model_fields
        del path[1]
    key = ".".join(path)
    place = f"line {lines[key]}: " if key in lines else ""
    if error["type"] == "extra_forbidden":
        return f"{place}unknown key '{key}'{_nearest(path[-1], fields, 'keys')}"
    if error["type"] == "union_tag_invalid":
        kind = error["ctx"]["tag"]
        return f"{place}unknown drafter {kind!r}{_nearest(str(kind), _DRAFTERS, 'kinds')}, or the path of a draft model"
    if error["type"] == "union_tag_not_found":
        return f"{place}'{key}' needs a 'kind': {', '.join(_DRAFTERS)}"
    if error["type"] == "missing":
        return f"{place}'{key}' is missing"
    message = error["msg"].removeprefix("Value error, ")
    shown = f", got {error['input']!r}" if path and error["type"] != "value_error" else ""
    return f"{place}{key + ': ' if key else ''}{message[0].lower()}{message[1:]}{shown}"


def _nearest(name: str, known: Iterable[str], what: str) -> str:
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"; did you mean '{close[0]}'?" if close else f"; known {what}: {', '.join(known)}"


def _listed(faults: list[str], source: str) -> str:
    if len(faults) == 1:
        return f"{source}: {faults[0]}"
    return f"{source} has {len(faults)} faults:\n" + "\n".join(f"  - {fault}" for fault in faults)
