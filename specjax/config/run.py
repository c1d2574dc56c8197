"""The run: what is read from YAML and dotted overrides, and all faults of it at once."""

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import Field, ValidationError, model_validator

from specjax.config.drafters import AnyDrafter, ConfigError, DrafterConfig, NoDrafter, Strict, bare_section, by_kind


class RunConfig(Strict):
    """One run of the engine: a target, a drafter, and how they decode.

    Attributes:
        target: a known name, a folder with safetensors, or a GGUF file.
        drafter: a kind, a path to a draft model, or a section with `kind` and its options.
        dtype: of weights and activations; `auto` is float32 on a CPU and bfloat16 elsewhere.
        context: cache slots of each request, prompt and drafts included.
        batch: requests that decode together.
        page_size: tokens of a cache page; None keeps each request in one page.
        kernels: `auto` takes Pallas kernels where the platform has them and plain JAX elsewhere; `pallas` refuses a
            platform without; `reference` is plain JAX everywhere; `interpret` simulates kernels, to look for faults.
        decode_step: `fused` runs the target's layers as one op over weights cut into tiles: one kernel on a TPU, five a
            layer on a GPU; `xla` compiles them one by one. `auto` is `xla` until a chip has shown that the other pays.
        quantization: `int8` rounds the layers' matrices of the fused step to 8 bits, a scale for each output.
        accept: the accept rule; `auto` takes the one that fits the drafts.
        draft_sampling: `deterministic` candidates (same seed, same text, with any drafter), or drafts `sampled` from q.
        prefill_chunk: prompt tokens processed at once.
        device_rounds: rounds that stay on the device before the host looks at their tokens; text then comes in larger
            pieces, and a stop string is found up to so many rounds late (what lies behind it is dropped).
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
    kernels: Literal["auto", "reference", "pallas", "interpret"] = "auto"
    decode_step: Literal["auto", "fused", "xla"] = "auto"
    quantization: Literal["none", "int8"] = "none"
    accept: Literal["auto", "tree", "chain", "block", "recursive"] = "auto"
    draft_sampling: Literal["deterministic", "sampled"] = "deterministic"
    prefill_chunk: int = Field(default=256, ge=1)
    device_rounds: int = Field(default=1, ge=1)
    warmup: bool = True
    compilation_cache: str | None = "auto"
    seed: Annotated[int, Field(ge=0)] | None = 0

    @model_validator(mode="before")
    @classmethod
    def _bare_drafter(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and isinstance(data.get("drafter"), str):
            return {**data, "drafter": bare_section(data["drafter"])}
        return data

    @model_validator(mode="after")
    def _honoured(self):
        if self.page_size is not None and self.context % self.page_size:
            raise ValueError(f"context ({self.context}) must be a multiple of page_size ({self.page_size})")
        drafts = getattr(self.drafter, "num_speculative_tokens", None) or 0
        if drafts + 1 > self.context:
            raise ValueError(f"context ({self.context}) must exceed num_speculative_tokens ({drafts})")
        if self.draft_sampling == "sampled" and not self.drafter.samples:
            raise ValueError(
                f"draft_sampling 'sampled' needs a drafter with a distribution to sample from, and "
                f"'{self.drafter.kind}' has none; leave it 'deterministic' or take a model drafter"
            )
        if self.quantization != "none" and self.decode_step != "fused":
            raise ValueError(f"quantization '{self.quantization}' is of the fused step: set decode_step to 'fused'")
        if self.accept in ("block", "recursive") and self.draft_sampling != "sampled":
            raise ValueError(
                f"accept '{self.accept}' is for sampled drafts; set draft_sampling to 'sampled', or accept to 'auto'"
            )
        return self


def drafter(value: str | Mapping[str, Any]) -> DrafterConfig:
    """A drafter's configuration from its kind, from the path of a drafter, or from its options.

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
    raise ConfigError(listed(faults, source or "the configuration"))


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
        key = override.partition("=")[0].strip()
        lines = {name: line for name, line in lines.items() if name != key and not name.startswith(f"{key}.")}
    return make(values, lines=lines, source=source)


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
        raise ConfigError(listed(twice, str(path)))
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
        inner = bare_section(inner) if isinstance(inner, str) else inner
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
    path, fields, kinds = _place([str(part) for part in error["loc"]])
    key = ".".join(path)
    place = f"line {lines[key]}: " if key in lines else ""
    if error["type"] == "extra_forbidden":
        return f"{place}unknown key '{key}'{nearest(path[-1], fields, 'keys')}"
    if error["type"] == "union_tag_invalid":
        kind = error["ctx"]["tag"]
        path_too = " (or give the path of a drafter)" if "draft_model" in kinds else ""
        what = "drafter" if path[-1].isdigit() else path[-1]
        return f"{place}unknown {what} {kind!r}{nearest(str(kind), kinds, 'kinds')}{path_too}"
    if error["type"] == "union_tag_not_found":
        return f"{place}'{key}' needs a 'kind': {', '.join(kinds)}"
    if error["type"] == "missing":
        return f"{place}'{key}' is missing"
    message = error["msg"].removeprefix("Value error, ")
    shown = f", got {error['input']!r}" if path and error["type"] != "value_error" else ""
    return f"{place}{key + ': ' if key else ''}{message[0].lower()}{message[1:]}{shown}"


def _place(steps: list[str]) -> tuple[list[str], Iterable[str], Iterable[str]]:
    """Of pydantic's path: the keys in it, the keys beside the last one, and the kinds of what the last one names.

    Behind a section that has kinds, pydantic's path has the chosen kind as a step.
    """
    path, fields, kinds = [], RunConfig.model_fields, {}
    steps = list(steps)
    while steps:
        path.append(steps.pop(0))
        field = fields.get(path[-1])
        kinds = by_kind(field.annotation) if field is not None and field.discriminator else {}
        if (
            field is not None and steps and steps[0].isdigit()
        ):  # a tuple of sections: `tuple[Annotated[union, ...], ...]`
            path.append(steps.pop(0))
            kinds = by_kind(get_args(get_args(field.annotation)[0])[0])
        if steps and kinds:
            fields = kinds[steps.pop(0)].model_fields
    return path, fields, kinds


def nearest(name: str, known: Iterable[str], what: str) -> str:
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"; did you mean '{close[0]}'?" if close else f"; known {what}: {', '.join(known)}"


def listed(faults: list[str], source: str) -> str:
    if len(faults) == 1:
        return f"{source}: {faults[0]}"
    return f"{source} has {len(faults)} faults:\n" + "\n".join(f"  - {fault}" for fault in faults)
