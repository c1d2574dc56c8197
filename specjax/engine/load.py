"""Names to engines: read a target and a drafter, check that they fit each other, compile with a progress bar."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from specjax import config as configs
from specjax.config import DrafterConfig, RunConfig
from specjax.drafters.drafter_set import DrafterSet
from specjax.engine.compilation import use_cache
from specjax.engine.drafter import check_files, make_drafter, recognised
from specjax.engine.precision import hold, value_dtype
from specjax.engine.pricing import find_table
from specjax.pallas_kernels import dispatch
from specjax.targets import decoder, fused
from specjax.targets.config import DecoderConfig
from specjax.weights.load import load_checkpoint


def load_engine(
    engine: type,
    config: RunConfig | str,
    *,
    quiet: bool,
    overrides: Mapping[str, Any],
    check: Callable[[Any], None] | None = None,
):
    """`Engine.load`."""
    config = _with_overrides(config if isinstance(config, RunConfig) else RunConfig(target=config), overrides)
    config = recognised(config)
    check_files(config)
    dispatch.backends("tree_attention", config.kernels, jax.default_backend())  # refuses what there is not
    use_cache(config.compilation_cache)
    dtype = value_dtype(config.dtype)
    checkpoint = load_checkpoint(config.target)
    config, model = _fit_context(config, checkpoint.config)
    target, params = decoder.from_tensors(model, checkpoint.tensors, dtype)
    params = hold(params, dtype)
    if config.decode_step == "fused":
        target, params = fused.fuse(target, params, int8=config.quantization == "int8")
    note = _noting(quiet)
    drafter, drafter_params = make_drafter(config, target, params, checkpoint.tokenizer, dtype, note)
    table = find_table(config, target.config, dtype, drafter, note) if isinstance(drafter, DrafterSet) else None
    with _compiling(quiet) as progress:
        return engine(
            target,
            params,
            tokenizer=checkpoint.tokenizer,
            drafter=drafter,
            drafter_params=drafter_params,
            config=config,
            table=table,
            progress=progress,
            check=check,
        )


def with_drafter(engine, drafter: Any, *, quiet: bool, overrides: Mapping[str, Any]):
    """`Engine.with_drafter`."""
    own = {name: getattr(engine.config, name) for name in ("target", "dtype", "decode_step", "quantization")}
    fixed = [name for name, value in own.items() if overrides.get(name, value) != value]
    if fixed:
        raise configs.ConfigError(
            f"with_drafter shares the weights that are there, so {' and '.join(fixed)} cannot change: use Engine.load"
        )
    chosen = drafter if isinstance(drafter, DrafterConfig) else configs.drafter(drafter)
    config = recognised(_with_overrides(engine.config, {"drafter": chosen, **overrides}))
    dtype = value_dtype(config.dtype)
    target, params = engine.target, engine.params["target"]
    most = target.config.max_position_embeddings
    if config.context > most:
        raise configs.ConfigError(f"context is {config.context}, but the target was loaded for {most} positions")
    note = _noting(quiet)
    made, drafter_params = make_drafter(config, target, params, engine.tokenizer, dtype, note)
    table = find_table(config, target.config, dtype, made, note) if isinstance(made, DrafterSet) else None
    with _compiling(quiet) as progress:
        return type(engine)(
            target,
            params,
            tokenizer=engine.tokenizer,
            drafter=made,
            drafter_params=drafter_params,
            config=config,
            table=table,
            progress=progress,
        )


def _with_overrides(config: RunConfig, overrides: Mapping[str, Any]) -> RunConfig:
    if not overrides:
        return config
    given = {name: getattr(config, name) for name in config.model_fields_set}
    return configs.make(given | dict(overrides))


def _fit_context(config: RunConfig, model: DecoderConfig) -> tuple[RunConfig, DecoderConfig]:
    """A context that the model's positions cover: the default shrinks to them, a larger one asked for is refused.

    `dynamic` rope has no such end; it is stretched to the context.
    """
    most = model.max_position_embeddings
    if config.context <= most:
        return config, model
    if model.rope.kind == "dynamic":
        return config, dataclasses.replace(model, max_position_embeddings=config.context)
    if "context" in config.model_fields_set:
        raise configs.ConfigError(
            f"context is {config.context}, but {config.target} was made for {most} positions: lower context, or give "
            "the model a rope scaling in its config.json"
        )
    return _with_overrides(config, {"context": most}), model


def _noting(quiet: bool) -> Callable[[str], None]:
    """Says on standard error what was decided about a drafter."""
    console = Console(stderr=True)
    return lambda text: None if quiet else console.print(f"drafter: {text}", markup=False, highlight=False)


@contextlib.contextmanager
def _compiling(quiet: bool) -> Iterator[Callable[[str, int, int], None] | None]:
    """A progress bar over the programs that warm-up compiles, on standard error."""
    if quiet:
        yield None
        return
    columns = (
        TextColumn("compiling {task.fields[program]:<18}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    console, started, count = Console(stderr=True), time.perf_counter(), 0
    if not console.is_terminal:
        console.print("compiling programs (the first start takes longest)", highlight=False)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("compile", total=None, program="")

        def report(program: str, done: int, total: int) -> None:
            nonlocal count
            count = done
            bar.update(task, completed=done, total=total, program=program)

        yield report
    console.print(f"{count} programs ready in {time.perf_counter() - started:.0f} s", highlight=False)
