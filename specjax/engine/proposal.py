"""A draft on its way to the host: one array, as each that is fetched costs the host some microseconds."""

import jax
import jax.numpy as jnp
import numpy as np

from specjax.array_types import Array, Float, Int
from specjax.engine.state import State


def packed(state: State, scores: Float[Array, "b n"]) -> Int[Array, "b e"]:
    """The state's draft with its nodes' scores, in an array of its own; `Proposal` reads it.

    Its columns: live nodes (the root included; 0 where no request decodes), then tokens, parents and scores.
    """
    live = jnp.where(state.active, state.draft.lengths, 0)[:, None]
    bits = jax.lax.bitcast_convert_type(scores.astype(jnp.float32), jnp.int32)
    return jnp.concatenate([live, state.draft.tokens, state.draft.parents, bits], axis=1)


class Proposal:
    """What `packed` holds, on the host.

    Attributes:
        live: live nodes of each batch row.
    """

    def __init__(self, array: np.ndarray):
        self._array, self._nodes = array, array.shape[1] // 3
        self.live = array[:, 0]

    def nodes(self, rows: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens, parents and scores of the first `count` nodes of some batch rows."""
        one = self._array[rows, 1:]
        tokens, parents, bits = (one[:, first : first + count] for first in range(0, 3 * self._nodes, self._nodes))
        return tokens, parents, bits.view(np.float32)
