"""The latency table that an engine's planner decides by, and what identifies the set-up that it must be made for."""

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from specjax.config import ConfigError, RunConfig
from specjax.costmodel import facts, shapes, tables
from specjax.costmodel.priors import PRIORS, Prior
from specjax.costmodel.roofline import Setup
from specjax.costmodel.shapes import ModelShape
from specjax.costmodel.tables import Provenance, Table
from specjax.drafters.config import HeadConfig
from specjax.drafters.drafter_set import DrafterSet
from specjax.pallas_kernels import cpu
from specjax.targets.config import DecoderConfig


def find_table(
    config: RunConfig, model: DecoderConfig, dtype: Any, drafters: DrafterSet, note: Callable[[str], None]
) -> Table:
    """The table of `drafter.table`, or the best one for this set-up; `note` is told which, and what was passed over.

    Raises:
        ConfigError: the table asked for cannot be read, was made for another set-up, or lacks a shape.
    """
    wanted = provenance(config, model, dtype, drafters)
    asked = getattr(config.drafter, "table", None)
    if asked is not None:
        table = read_table(asked, wanted)
        if missing := [shape for shape in drafters.menu if shape not in table.draft]:
            raise ConfigError(f"drafter.table: {asked} has no draft times of {missing[0]}; make one for these drafters")
        return table
    setup = Setup(facts.find(wanted.device), wanted.devices, model_shape(config.target, model), wanted.dtype)
    table, passed = tables.resolve(wanted, drafters.menu, setup, batch=config.batch)
    for line in passed:
        note(line)
    note(f"round prices are {table.source(drafters.menu[0])} ones ({table.provenance.made_by or 'data sheet'})")
    return table


def read_table(path: str, wanted: Provenance | None = None) -> Table:
    """The table of `drafter.table`, held against what it must have been made for, where that is known already.

    Raises:
        ConfigError: there is none, or it is no table, or another's.
    """
    try:
        table = Table.read(Path(path).expanduser())
        return table if wanted is None else table.require(wanted)
    except ValueError as error:
        raise ConfigError(f"drafter.table: {error}; make one with `specjax calibrate`, or leave it out") from None


def provenance(config: RunConfig, model: DecoderConfig, dtype: Any, drafters: DrafterSet) -> Provenance:
    """What a table must have been made for to hold here."""
    device = jax.devices()[0]
    known = facts.find(device.platform if device.platform == "cpu" else device.device_kind)
    shape = shapes.target(config.target)
    return Provenance(
        device=known.name,
        devices=1,
        target=shape.name if shape is not None else Path(config.target).name,
        dtype=str(jax.numpy.dtype(dtype)),
        target_digest=digest(model),
        drafter_digests={member.kind: digest(_described(member)) for member in drafters.members},
        jax=jax.__version__,
        compiler=_compiler(config) if device.platform == "cpu" else None,
    )


def _compiler(config: RunConfig) -> str:
    """What made the CPU's kernels; a table measured with them does not hold without."""
    made_by = cpu.compiler() if config.kernels == "auto" else None
    return made_by or "xla"


def priors(drafters: DrafterSet) -> dict[str, Prior]:
    """What acceptance of each kind is before a round was seen: what the drafter's files say, else the kind's usual."""
    found = dict(PRIORS)
    for member in drafters.members:
        said = getattr(_described(member), "acceptance", ())
        if said:
            found[member.kind] = Prior(said, PRIORS[member.kind].live, "measured when it was trained")
    return found


def model_shape(name: str, model: DecoderConfig) -> ModelShape:
    """The sizes that price a target."""
    return ModelShape(
        name=name,
        layers=model.num_layers,
        hidden=model.hidden_size,
        inner=model.intermediate_size,
        heads=model.num_heads,
        kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        vocab=model.vocab_size,
        tied=model.tie_word_embeddings,
    )


def digest(description: Any) -> str:
    """Eight hex digits of a frozen description: equal for what costs the same."""
    fields = dataclasses.asdict(description) if dataclasses.is_dataclass(description) else description
    if isinstance(description, HeadConfig):
        del fields["acceptance"]
    return hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode()).hexdigest()[:8]


def _described(member: Any) -> Any:
    """What a drafter's speed depends on: its network's description, or the options of one without."""
    return getattr(member, "config", None) or getattr(getattr(member, "model", None), "config", None) or member
