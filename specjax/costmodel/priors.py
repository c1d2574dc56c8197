"""Acceptance before a round was seen, by kind of drafter, and the outline of the trees that a drafter grows.

The numbers are conditional: the chance that a draft is accepted given that all before it were, for chat-like text at
temperature 0. They are starting points of an estimate that follows the traffic (`acceptance.py`), nothing more.
"""

import dataclasses
import functools
import heapq
from collections.abc import Mapping

import numpy as np

from specjax.draft import DraftShape

SIBLING = 0.3  # chance that the next candidate is the token, where all before it were not
HOT = 0.8  # factor on the odds of acceptance at temperature 1: DFlash falls from 4.27 to 3.78 tokens a round


@dataclasses.dataclass(frozen=True)
class Prior:
    """Of one kind of drafter.

    Attributes:
        chain: conditional acceptance of a chain's drafts by depth; the last holds for all deeper ones.
        live: share of the rounds in which the drafter proposes anything.
        source: where the numbers come from.
    """

    chain: tuple[float, ...]
    live: float = 1.0
    source: str = ""

    def at(self, depth: int) -> np.ndarray:
        """Conditional acceptance at depths 1 to `depth`."""
        return np.array([self.chain[min(i, len(self.chain) - 1)] for i in range(depth)])


PRIORS: Mapping[str, Prior] = {
    "ngram": Prior((0.55, 0.7, 0.75, 0.8), 0.35, "chat and stories, SmolLM2-135M on a CPU: 1.2 to 1.6 tokens a round"),
    "suffix": Prior((0.55, 0.7, 0.75, 0.8), 0.4, "as n-gram; it matches a little more often"),
    "eagle3": Prior((0.72, 0.7, 0.68, 0.66, 0.64), 1.0, "chains of 3 to 5 in served chat: 2.3 to 3 tokens a round"),
    "mtp": Prior(
        (0.8, 0.68, 0.58), 1.0, "second token 0.8 to 0.9 in the DeepSeek-V3 report; less when one module is reused"
    ),
    "dflash": Prior(
        (0.8, 0.79, 0.78, 0.77, 0.76, 0.75, 0.72, 0.7), 1.0, "Qwen3-4B, mean over tasks: 4.27 tokens a round"
    ),
    "peagle": Prior((0.72, 0.68, 0.64, 0.6), 1.0, "as EAGLE-3, less with depth: drafts do not see each other"),
    "ubtree": Prior((0.8, 0.79, 0.78, 0.77, 0.76, 0.75, 0.72, 0.7), 1.0, "as DFlash, on whose backbone it stands"),
    "hybrid": Prior((0.74, 0.72, 0.71, 0.7, 0.69), 1.0, "as EAGLE-3, and a little more where text is copied"),
    "dspark": Prior((0.835,), 1.0, "Qwen3-4B, block 7, mean of eight tasks: 4.7 tokens a round"),
}


@dataclasses.dataclass(frozen=True)
class Outline:
    """The nodes that a shape is expected to have, the likeliest first; the root is left out.

    Attributes:
        parents: index of each node's parent, -1 for the root.
        depths: 1 for the root's children.
        ranks: which candidate of its parent a node is, 0 for the likeliest.
        shares: chance of a node over the chance that the accepted path reaches its depth at all.
        levels: conditional acceptance of each depth: that some node of it is accepted, given one of the depth above.
    """

    parents: np.ndarray
    depths: np.ndarray
    ranks: np.ndarray
    shares: np.ndarray
    levels: np.ndarray


@functools.cache
def outline(shape: DraftShape, prior: Prior) -> Outline:
    """The likeliest tree of a shape under a prior: nodes are taken in the order of their chances.

    A node's first candidate has the chain's acceptance; each further one catches `SIBLING` of what is left.
    """
    chain = prior.at(max(shape.depth, 1))
    heap = [(-float(chain[0]), 0, -1, 1, 0)] if shape.depth else []
    nodes: list[tuple[float, int, int, int]] = []  # chance, parent, depth, rank
    order = 1  # breaks ties in favour of what was found first
    while heap and len(nodes) < shape.rows - 1:
        negative, _, parent, depth, rank = heapq.heappop(heap)
        chance, index = -negative, len(nodes)
        nodes.append((chance, parent, depth, rank))
        if rank + 1 < shape.branching:
            heapq.heappush(heap, (negative * _next(chain[depth - 1], rank), order, parent, depth, rank + 1))
        if depth < shape.depth:
            heapq.heappush(heap, (-chance * float(chain[depth]), order + 1, index, depth + 1, 0))
        order += 2
    chances, parents, depths, ranks = (np.array(x) for x in zip(*nodes, strict=True)) if nodes else (np.zeros(0),) * 4
    mass = np.array([chances[depths == k].sum() for k in range(1, shape.depth + 1)])
    # A depth that the likeliest nodes do not reach is one that a draft may reach all the same: the chain speaks for it.
    above = np.concatenate([[1.0], mass[:-1]])[: shape.depth]
    levels = np.where(mass > 0, mass / np.where(above > 0, above, 1.0), chain[: shape.depth])
    shares = chances / mass[depths - 1] if shape.depth else chances
    return Outline(parents.astype(int), depths.astype(int), ranks.astype(int), shares, levels)


def _next(first: float, rank: int) -> float:
    """Chance of candidate `rank + 1` over that of candidate `rank`."""
    return SIBLING * (1 - first) / first if rank == 0 else 1 - SIBLING
