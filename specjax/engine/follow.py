"""Drafts, followed by the text that comes: how far each was right, whether it was verified or not.

The tokens that a round emits are the judge of all drafts that are under way: those that a pass verified, what was cut
off them, and those that were made beside a plain round. A draft is done when its text leaves it, or its last node is
reached.
"""

import dataclasses

import numpy as np

from specjax.costmodel.scores import Nodes
from specjax.draft import DraftShape
from specjax.engine.state import Emitted


@dataclasses.dataclass
class Outcome:
    """What became of some drafts of a shape.

    Attributes:
        shape: of the drafts.
        rows: batch rows.
        drafts: drafted nodes of each, the root not counted.
        nodes: the drafts.
        path: which nodes the text goes along, the roots among them.
    """

    shape: DraftShape
    rows: np.ndarray
    drafts: np.ndarray
    nodes: Nodes
    path: np.ndarray


class Followed:
    """The drafts of one round.

    Args:
        shape: their shape.
        rows: batch rows that drafted.
        live: nodes of each, the root included.
        tokens: of the nodes `[row, node]`.
        nodes: their scores and parents.
    """

    def __init__(
        self,
        shape: DraftShape,
        rows: np.ndarray,
        live: np.ndarray,
        tokens: np.ndarray,
        nodes: Nodes,
    ):
        self.shape, self.rows, self.live, self.nodes = shape, rows, np.maximum(live, 1), nodes
        drafted = np.arange(tokens.shape[1]) < self.live[:, None]
        self._tokens = np.where(drafted, tokens, -1)
        self._parents = np.where(drafted, nodes.parents, -2)
        self._node = np.zeros(len(rows), int)
        self._path = np.arange(tokens.shape[1]) == np.zeros((len(rows), 1), int)
        self._open = self.live > 1
        self._told = np.zeros(len(rows), bool)

    @property
    def over(self) -> bool:
        """Whether nothing is left to be told."""
        return bool(self._told.all())

    def advance(self, emitted: Emitted) -> None:
        """Go along with what a round emitted."""
        counts = emitted.counts[self.rows]
        for step in range(int(counts.max(initial=0))):
            going = self._open & (step < counts)
            if not going.any():
                return
            child = (self._parents == self._node[:, None]) & (self._tokens == emitted.tokens[self.rows, step][:, None])
            found = going & child.any(axis=1)
            self._node = np.where(found, child.argmax(axis=1), self._node)
            self._path[found, self._node[found]] = True
            more = (self._parents == self._node[:, None]).any(axis=1)
            self._open &= ~going | (found & more)

    def drop(self, row: int) -> None:
        """The request of a batch row has ended: nobody knows how its text would have gone on."""
        mine = self.rows == row
        self._open &= ~mine
        self._told |= mine

    def outcome(self) -> Outcome | None:
        """The drafts that are done since this was last asked."""
        done = np.flatnonzero(~self._open & ~self._told)
        if not len(done):
            return None
        self._told[done] = True
        return Outcome(
            shape=self.shape,
            rows=self.rows[done],
            drafts=self.live[done] - 1,
            nodes=Nodes(self.nodes.scores[done], self.nodes.parents[done]),
            path=self._path[done],
        )
