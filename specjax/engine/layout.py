"""How much of everything an engine holds: slots, pages, buffers; and the state in which no request is there yet."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from specjax import sampling
from specjax.cache import whole_blocks
from specjax.config import RunConfig
from specjax.drafters.base import Features
from specjax.drafters.drafter_set import DrafterSet
from specjax.engine import state as device
from specjax.engine.state import State
from specjax.engine.step import Stage

SMALL_CHUNK = 32  # prefill rows of the last, partly filled chunks
MAX_EOS = 16
MAX_BIAS = 300


@dataclasses.dataclass(frozen=True)
class Layout:
    """The sizes that follow from a run's configuration and the widest draft.

    Attributes:
        config: the run.
        rows: rows of the widest draft, the root included.
    """

    config: RunConfig
    rows: int

    @property
    def prefill_sizes(self) -> tuple[int, ...]:
        """Rows of the prefill chunks, small to large."""
        largest = self.config.prefill_chunk
        return (SMALL_CHUNK, largest) if largest > SMALL_CHUNK else (largest,)

    @property
    def capacity(self) -> int:
        """Token slots of a request: its context, and what a draft or a chunk may write past it."""
        return self.config.context + max(self.rows, self.prefill_sizes[-1])

    @property
    def page_slots(self) -> int:
        """Slots of a cache page; without `page_size` a request has one page."""
        if self.config.page_size is None:
            return whole_blocks(self.capacity)
        return self.config.page_size

    @property
    def row_pages(self) -> int:
        """Pages that a request may come to hold."""
        size = self.config.page_size
        return 1 if size is None else -(-(self.config.context + self.rows) // size)

    def initial_state(self, stage: Stage, dtype: Any) -> State:
        """A state without requests, for programs compiled against `stage` and values of `dtype`."""
        config, batch, drafter = self.config, self.config.batch, stage.drafter
        table, pages = None, batch
        if config.page_size is not None:
            table, pages = jnp.zeros((batch, self.row_pages), jnp.int32), 1 + batch * self.row_pages
        features = None  # a set of drafters keeps them itself
        hidden = drafter is not None and drafter.wants_hidden
        width, vocab = stage.target.config.hidden_size, stage.target.config.vocab_size
        if (stage.taps or hidden) and not isinstance(drafter, DrafterSet):
            steps = stage.shape.depth + 1
            features = Features(
                positions=jnp.zeros((batch, steps), jnp.int32),
                count=jnp.zeros((batch,), jnp.int32),
                hidden=jnp.zeros((batch, steps, width), dtype) if hidden else None,
                taps=jnp.zeros((batch, steps, len(stage.taps) * width), dtype) if stage.taps else None,
            )
        sampled = config.draft_sampling == "sampled"
        return device.init(
            cache=stage.target.init_cache(pages, self.page_slots, dtype, table),
            batch=batch,
            capacity=self.capacity,
            rows=self.rows,
            sampling=sampling.neutral(batch, MAX_BIAS),
            max_eos=MAX_EOS,
            features=features,
            drafter=drafter.init_state(batch, self.capacity) if drafter is not None else (),
            draft_q=jnp.zeros((batch, self.rows, vocab), jnp.float32) if sampled else None,
        )
