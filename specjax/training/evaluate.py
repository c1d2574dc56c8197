"""How long drafts would be accepted: greedy chains along a text that the target wrote.

While all earlier drafts of a chain are right, the text is what the drafter itself has drafted, so a chain along the
text has exactly the hits that decoding would have, from any root. No round has to be run.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from specjax.training.objective import Objective, Sample
from specjax.training.packing import Batch, Packed


@dataclasses.dataclass(frozen=True)
class Acceptance:
    """Acceptance over the roots of a text.

    Attributes:
        length: tokens of a round, the target's own included.
        by_slot: how often each draft is accepted once all before it are.
        roots: roots that were looked at.
    """

    length: float
    by_slot: tuple[float, ...]
    roots: int

    @classmethod
    def of(cls, hit: np.ndarray, valid: np.ndarray) -> "Acceptance":
        """From hits `[..., r, k]` of roots `[..., r]`."""
        hit = hit[valid]
        reached = np.cumprod(np.pad(hit, ((0, 0), (1, 0)), constant_values=1), axis=1)
        tried, right = reached[:, :-1].sum(axis=0), reached[:, 1:].sum(axis=0)
        by_slot = tuple(float(r / t) if t else 0.0 for r, t in zip(right, tried, strict=True))
        return cls(length=1 + float(right.sum()) / max(len(hit), 1), by_slot=by_slot, roots=len(hit))


def acceptance(
    objective: Objective,
    run: Callable[..., Any],
    state: tuple[Any, Any, Any],
    packed: Packed,
    batch: int,
    anchors: int,
    keep: Callable[[Any], None] = lambda hits: None,
) -> Acceptance:
    """Acceptance of a drafter over packed rows.

    Args:
        objective: the drafter's family and target.
        run: `Objective.hits` after `Objective.features`, compiled: a function of `(*state, sample)`.
        state: trained tensors, the scale of the taps, the target's arrays.
        packed: the rows.
        batch: rows at a time.
        anchors: roots of a row that are looked at, for a block drafter (the others look at all).
        keep: is handed the hits of each batch.
    """
    rng = np.random.default_rng(0)
    found, valid = [], []
    for start in range(0, len(packed), batch):
        rows = packed.batch(np.minimum(np.arange(start, start + batch), len(packed) - 1))
        sample = Sample(batch=rows, features=None, columns=None, anchors=objective.anchors(rows, rng, anchors))
        hits = run(*state, sample)
        keep(hits)
        count = min(batch, len(packed) - start)
        found.append(np.asarray(hits.hit)[:count])
        valid.append(np.asarray(hits.valid)[:count])
    return Acceptance.of(np.concatenate(found), np.concatenate(valid))


def ngram_acceptance(packed: Packed, depth: int, longest: int = 5, shortest: int = 2) -> Acceptance:
    """What prompt lookup would reach on the same roots: what followed the last `longest` (down to `shortest`) tokens
    when they last occurred in the dialogue, `depth` drafts.
    """
    rows: Batch = packed.batch(np.arange(len(packed)))
    found = []
    for tokens, mask, segments in zip(rows.tokens, rows.mask, rows.segments, strict=True):
        for number in range(1, int(segments.max()) + 1):
            span = segments == number
            found += _lookup(tokens[span].tolist(), mask[span], depth, longest, shortest)
    hit = np.array(found, bool).reshape(-1, depth)
    return Acceptance.of(hit, np.ones((len(hit),), bool))


def _lookup(tokens: list[int], mask: np.ndarray, depth: int, longest: int, shortest: int) -> list[list[bool]]:
    """Hits of each root of one dialogue."""
    last: dict[tuple[int, ...], int] = {}  # the end of the newest occurrence of each n-gram
    rows = []
    for root in range(len(tokens) - 1):
        place = None
        for n in range(longest, shortest - 1, -1):
            gram = tuple(tokens[max(root + 1 - n, 0) : root + 1])
            if len(gram) == n and gram in last:
                place = last[gram]
                break
        if mask[root] and mask[root + 1]:
            row = [False] * depth
            for k in range(depth):
                at = root + 1 + k
                if place is None or at >= len(tokens) or not mask[at] or place + 1 + k > root:
                    break
                row[k] = tokens[place + 1 + k] == tokens[at]
            rows.append(row)
        for n in range(shortest, longest + 1):
            if root + 1 >= n:
                last[tuple(tokens[root + 1 - n : root + 1])] = root
    return rows
