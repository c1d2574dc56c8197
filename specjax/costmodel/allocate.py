"""Which draft nodes of a whole batch to verify, when rows cost time.

For any number of rows the best set is that of the likeliest nodes, whichever request they belong to; as a node is never
likelier than its parent, it is a valid tree of each request. So only the number is to be chosen, and as programs exist
for a few numbers alone, all of them are tried: no iteration, and exactly the optimum. Requests that predict well get
deep trees, the others get their root.
"""

import itertools
from collections.abc import Sequence

import numpy as np


def expected(chances: np.ndarray, rows: Sequence[int]) -> np.ndarray:
    """Expected tokens of a round by the total rows of its pass.

    Args:
        chances: of each node `[request, node]`, parents before children, none likelier than its parent; 0 for none.
        rows: totals, roots included; each at least the number of requests.

    Returns:
        Tokens, the target's own one of each request included.
    """
    requests, count = chances.shape[0], chances.size
    return requests + likeliest(chances)[np.minimum(np.asarray(rows) - requests, count)]


def likeliest(chances: np.ndarray) -> np.ndarray:
    """Expected accepted drafts of the likeliest 0, 1, 2, ... nodes, of all requests."""
    flat = chances.flatten("K")  # in whatever order they lie: they are sorted
    flat.sort()
    sums = np.zeros(len(flat) + 1)
    np.add.accumulate(flat[::-1], out=sums[1:])
    return sums


def cut(chances: np.ndarray, rows: np.ndarray, seconds: np.ndarray, rate: float) -> tuple[int, float, np.ndarray]:
    """Drafts that are there, cut to what gains most over a going rate: tokens - rate x seconds.

    For costs of which a part is spent already. It is a step of Dinkelbach's method: at the optimal rate the pass is the
    one of the highest rate.

    Args:
        chances: as in `expected`.
        rows: totals of the passes, ascending.
        seconds: of each pass.
        rate: tokens per second.

    Returns:
        The index of the pass, its expected tokens, and the rows of each request.
    """
    if len(chances) == 1:
        return _cut_one(chances[0].tolist(), rows.tolist(), seconds.tolist(), rate)
    tokens = expected(chances, rows)
    best = int((tokens - rate * seconds).argmax())
    return best, float(tokens[best]), budgets(chances, int(rows[best]))


def _cut_one(chances: list[float], rows: list[int], seconds: list[float], rate: float) -> tuple[int, float, np.ndarray]:
    """`cut` of one request: its nodes stand in order already, and a few numbers are dearer to numpy than to Python."""
    sums = [1.0 + sum for sum in itertools.accumulate(chances, initial=0.0)]
    tokens = [sums[min(total, len(sums)) - 1] for total in rows]
    gains = [made - rate * spent for made, spent in zip(tokens, seconds, strict=True)]
    best = gains.index(max(gains))
    useful = sum(chance > 0 for chance in chances)
    return best, tokens[best], np.array([1 + min(rows[best] - 1, useful)])


def budgets(chances: np.ndarray, rows: int) -> np.ndarray:
    """Rows of each request, its root included, when the pass has `rows` in all. Nodes without a chance get none."""
    requests, nodes = chances.shape
    spare = min(rows - requests, chances.size)
    if spare <= 0 or nodes == 0:
        return np.ones(requests, int)
    if spare == chances.size:  # room for all: nothing to choose
        return 1 + np.count_nonzero(chances > 0, axis=1)
    last = chances.size - spare
    least = np.partition(chances, last, axis=None)[last]  # of those that are taken
    if least <= 0:
        return 1 + np.count_nonzero(chances > 0, axis=1)
    taken = np.count_nonzero(chances > least, axis=1)
    # Of equals the first are taken, so that none goes before its parent: nodes of one request stand parents first.
    equal = np.flatnonzero(chances == least)[: spare - taken.sum()]
    return 1 + taken + np.bincount(equal // nodes, minlength=requests)
