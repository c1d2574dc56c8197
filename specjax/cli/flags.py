"""Flags that several commands share, and what they turn into. Nothing here imports JAX, so that `--help` is quick."""

import dataclasses
import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from specjax import config
from specjax.config import DrafterConfig, RunConfig

if TYPE_CHECKING:
    from specjax.engine.engine import Engine
    from specjax.sampling import SamplingParams

Repeated = tyro.conf.UseAppendAction


def text(metavar: str) -> Any:
    """A flag whose value is shown as `metavar` in the help."""
    return tyro.conf.arg(
        metavar=metavar, help_behavior_hint=lambda default: "" if default == "None" else f"({default})"
    )


@dataclasses.dataclass(kw_only=True)
class CommonFlags:
    """Of every command."""

    debug: bool = False
    """Show the traceback of an error."""


@dataclasses.dataclass(kw_only=True)
class SetupFlags(CommonFlags):
    """What to run: a configuration file, changed by the flags below, changed by --set."""

    config: Annotated[str | None, text("FILE.yaml")] = None
    """Run configuration; see configs/."""
    target: Annotated[str | None, text("MODEL")] = None
    """smollm2-135m, a model folder, a GGUF file or a hub id."""
    dtype: Annotated[Literal["auto", "float32", "bfloat16"] | None, text("auto|float32|bfloat16")] = None
    """Of weights and activations."""
    batch: Annotated[int | None, text("N")] = None
    """Requests that decode together."""
    decode_step: Annotated[Literal["auto", "fused", "xla"] | None, text("auto|fused|xla")] = None
    """All layers of the target as one kernel, or one by one; auto is one by one."""
    overrides: Annotated[tuple[str, ...], tyro.conf.arg(name="set", aliases=["-o"], metavar="KEY=VALUE"), Repeated] = ()
    """Any option of the run configuration, e.g. -o drafter.num_speculative_tokens=4 (counts drafts, not the root)."""

    def run_config(self, drafter: str | dict[str, Any] | None = None) -> RunConfig:
        """The configuration of these flags and a drafter; the file yields to flags, flags to --set."""
        if isinstance(drafter, str) and (Path(drafter).expanduser() / "config.json").is_file():
            from specjax.engine.drafter import kind_of

            # A learned drafter is named by its kind, so that its options can be set.
            kind = kind_of(Path(drafter).expanduser(), self.target or "")
            drafter = drafter if kind is None else {"kind": kind, "model": drafter}
        flags = self.options() | {"drafter": drafter}
        given = [f"{name}={json.dumps(value)}" for name, value in flags.items() if value is not None]
        return config.load(self.config, [*given, *self.overrides])

    def options(self) -> dict[str, Any]:
        """Options of the configuration that have flags, by name; None where nothing was said."""
        return {name: getattr(self, name) for name in ("target", "dtype", "batch", "decode_step")}


@dataclasses.dataclass(kw_only=True)
class EngineFlags(SetupFlags):
    """The same, and how."""

    kernels: Annotated[
        Literal["auto", "reference", "pallas", "interpret"] | None, text("auto|reference|pallas|interpret")
    ] = None
    """Pallas kernels or plain JAX; auto takes kernels where the platform has them."""

    def options(self) -> dict[str, Any]:
        """As `SetupFlags.options`."""
        return super().options() | {"kernels": self.kernels}


@dataclasses.dataclass(kw_only=True)
class DrafterFlags(EngineFlags):
    """An engine with one drafter."""

    drafter: Annotated[str | None, text("KIND|PATH")] = None
    """none, ngram, suffix, another kind, or the path of a draft model or of a learned drafter."""
    speculative_config: Annotated[str | None, text("JSON")] = None
    """The drafter in vLLM's words, e.g. '{"method": "ngram", "num_speculative_tokens": 4}'."""
    no_probe: bool = False
    """Take a learned drafter's wiring as its files declare it, without trying it on a text of the target."""

    def run_config(self, drafter: str | dict[str, Any] | None = None) -> RunConfig:
        """As `EngineFlags.run_config`; ValueError for --no-probe with a drafter that has no wiring."""
        run = super().run_config(drafter)
        return run.model_copy(update={"drafter": unprobed([run.drafter])[0]}) if self.no_probe else run

    def named_drafter(self) -> str | dict[str, Any] | None:
        """The drafter of these flags, for `run_config`."""
        if self.speculative_config is None:
            return self.drafter
        if self.drafter is not None:
            raise ValueError("--drafter and --speculative-config both name a drafter; leave one out")
        return config.from_speculative_config(self.speculative_config).model_dump(exclude_unset=True)


@dataclasses.dataclass(kw_only=True)
class SamplingFlags:
    """The fields of `SamplingParams`, with its defaults."""

    max_tokens: Annotated[int, text("N")] = 128
    """Most tokens to generate."""
    temperature: Annotated[float, text("T")] = 0.0
    """0 takes the most likely token."""
    top_k: Annotated[int, text("K")] = 0
    """Keep the K most likely tokens; 0 is off."""
    top_p: Annotated[float, text("P")] = 1.0
    """Keep the fewest tokens that hold this mass; 1 is off."""
    min_p: Annotated[float, text("P")] = 0.0
    """Keep tokens at least this fraction as likely as the best; 0 is off."""
    repetition_penalty: Annotated[float, text("X")] = 1.0
    """Of tokens in prompt and output; 1 is off."""
    presence_penalty: Annotated[float, text("X")] = 0.0
    """Of every token generated so far."""
    frequency_penalty: Annotated[float, text("X")] = 0.0
    """The same, once per occurrence."""
    logit_bias: Annotated[str | None, text("JSON")] = None
    """Added to logits, e.g. '{"42": -100}'."""
    min_tokens: Annotated[int, text("N")] = 0
    """No end before this many tokens."""
    seed: Annotated[int | None, text("N")] = None
    """The same seed gives the same text."""
    stop: Annotated[tuple[str, ...], text("TEXT"), Repeated] = ()
    """End at this text; may be given several times."""
    stop_token_ids: Annotated[tuple[int, ...], text("ID"), Repeated] = ()
    """End at this token; may be given several times."""
    include_stop: bool = False
    """Keep the stop text."""
    ignore_eos: bool = False
    """Go on past the model's end tokens."""
    logprobs: Annotated[int | None, text("N")] = None
    """Report log-probabilities, of the token and the N most likely ones."""

    def params(self) -> "SamplingParams":
        """The sampling parameters of these flags; ValueError for values out of range."""
        from specjax.sampling import SamplingParams

        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(SamplingFlags)}
        if values["logit_bias"] is None:
            del values["logit_bias"]
        else:
            values["logit_bias"] = _json_object("--logit-bias", values["logit_bias"])
        return SamplingParams(**values)


def unprobed(drafters: Sequence[DrafterConfig]) -> list[DrafterConfig]:
    """What --no-probe makes of drafters; ValueError if none of them has a wiring to check."""
    without = [config.without_probe(drafter) for drafter in drafters]
    if not any(without):
        kinds = ", ".join(drafter.kind for drafter in drafters) or "none"
        raise ValueError(f"--no-probe is for learned drafters, whose files declare a wiring; not for: {kinds}")
    return [new or old for new, old in zip(without, drafters, strict=True)]


def check_outputs(*paths: str | None) -> None:
    """Refuse files that cannot be written, before anything is loaded; None is a file that nobody wants.

    Files are written beside their place and moved there whole, so a device or a pipe would be replaced.
    """
    wanted = [path for path in paths if path is not None]
    places = [Path(path).absolute() for path in wanted]
    for path, place in zip(wanted, places, strict=True):
        if not place.parent.is_dir():
            raise ValueError(f"cannot write {path}: its folder does not exist")
        if place.is_dir():
            raise ValueError(f"cannot write {path}: it is a folder")
        if place.exists() and not place.is_file():
            raise ValueError(f"cannot write {path}: it is no regular file")
        try:
            with tempfile.TemporaryFile(dir=place.parent):
                pass
        except OSError as error:
            raise ValueError(f"cannot write {path}: its folder takes no files ({error.strerror})") from None
    if twice := [place for place in places if places.count(place) > 1]:
        raise ValueError(f"{twice[0].name} cannot hold two outputs: give each a file of its own")


def check_plot(path: str | None) -> None:
    """Refuse a picture that cannot be drawn or written, before anything is loaded."""
    if path is None:
        return
    check_outputs(path)
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install 'specjax[plot]'")
    from matplotlib.backend_bases import FigureCanvasBase

    known, suffix = FigureCanvasBase.get_supported_filetypes(), Path(path).suffix.removeprefix(".").lower()
    if suffix and suffix not in known:
        raise ValueError(f"--plot: {path} names no kind of picture; known are {', '.join(sorted(known))}")


def write_metrics(path: str | None, engines: Mapping[str, "Engine"]) -> None:
    """Write what engines have counted for Prometheus, if there is a path."""
    if path is not None:
        from specjax.engine import metrics

        metrics.write(Path(path), engines)


def load_engine(run: RunConfig, *, quiet: bool, check: Callable[["Engine"], None] | None = None) -> "Engine":
    """The engine of a configuration; `check` may refuse before anything is compiled."""
    from specjax.engine.engine import Engine

    return Engine.load(run, quiet=quiet, check=check)


def note(message: str) -> None:
    """A line for the reader; results alone go to stdout."""
    print(message, file=sys.stderr, flush=True)


def _json_object(flag: str, given: str) -> dict[str, Any]:
    try:
        value = json.loads(given)
    except json.JSONDecodeError as error:
        raise ValueError(f"{flag} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{flag} must be a JSON object, got {given}")
    return value
