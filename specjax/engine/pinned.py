"""States that are set to a case, so that an engine's programs can be timed on it without requests."""

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from specjax.engine.state import State

if TYPE_CHECKING:
    from specjax.engine.engine import Engine


def fresh(engine: "Engine") -> State:
    """An empty state in which every row has its pages."""
    state = engine.programs.initial()
    for row in range(engine.config.batch if engine.config.page_size is not None else 0):
        state = engine.programs.insert(state, row, engine.intake.idle(row))
    return state


def pin(state: State, lengths: jax.Array, active: jax.Array, rows: jax.Array) -> State:
    """The state with so many tokens committed, and a draft of so many rows standing."""
    draft = dataclasses.replace(state.draft, lengths=rows)
    limits = jnp.full_like(state.limits, state.tokens.shape[1])
    eos = jnp.full_like(state.eos, -1)
    return dataclasses.replace(state, lengths=lengths, active=active, draft=draft, limits=limits, eos=eos)
