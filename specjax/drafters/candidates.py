"""What a low-rank candidate head is worth on real text: what it finds of the full head's best tokens, and its time.

The text is the target's own. The drafter is run at every position of it, as if a round began there, and both heads read
the rows that it makes. They are timed in turns, so that a drifting clock hits both alike.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from specjax.array_types import Array
from specjax.drafters.head import recall
from specjax.drafters.probe import at_every_root, read
from specjax.targets.decoder import Target

TOKENS = 128  # of each text at most, the newest
TOP, REPEATS = (1, 4, 16), 20


@dataclasses.dataclass(frozen=True)
class CandidateReport:
    """What was found.

    Attributes:
        rank: rank of the preview scores.
        candidates: tokens that they select.
        columns: tokens that the full head scores.
        positions: rows that `recall` is the mean over.
        recall: by k, the share of the full head's k best tokens that are among the candidates.
        rows: rows of one timed call, those that the head reads at once.
        candidate_ms: median time of a call, with the choice of the best tokens.
        full_ms: of the full head.
    """

    rank: int
    candidates: int
    columns: int
    positions: int
    recall: dict[int, float]
    rows: int
    candidate_ms: float
    full_ms: float


def report(
    drafter: Any, params: Any, target: Target, target_params: Any, texts: Sequence[Sequence[int]], batch: int = 1
) -> CandidateReport | None:
    """Compare a drafter's candidate head with its full head.

    Args:
        drafter: a drafter with an output head.
        params: its weights.
        target: the model that it drafts for.
        target_params: the model's arrays.
        texts: ids of texts of the target, prompts included. They are cut to one length, so that one program serves
            all: `TOKENS`, or the longest text if that is shorter; shorter texts are left out.
        batch: requests that decode together, for the timed rows.

    Returns:
        The report; None where the drafter has no candidate head.

    Raises:
        ValueError: no text of two tokens.
    """
    head = getattr(drafter, "head", None)
    if head is None or not head.candidates:
        return None
    length = min(TOKENS, max(map(len, texts), default=0))
    if length < 2:
        raise ValueError("a candidate head is measured along a text of the target, of two tokens at least")
    whole = [jnp.asarray(text[-length:], jnp.int32) for text in texts if len(text) >= length]
    rows = jnp.concatenate([_scored(drafter, target, params, target_params, text) for text in whole])
    top = [k for k in TOP if k <= head.candidates]
    found = {k: float(jax.jit(functools.partial(recall, head, k=k))(params["head"], rows)) for k in top}

    count = batch * drafter.scored_at_once
    few = jnp.resize(rows, (count, rows.shape[-1]))
    best = min(drafter.shape.branching, head.candidates)
    calls = {
        "candidate": jax.jit(lambda p, x: head.scores(p, x).top(best)),
        "full": jax.jit(lambda p, x: head.full_scores(p, x).top(best)),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(1 + REPEATS):
        for name, call in calls.items():
            started = time.perf_counter()
            jax.block_until_ready(call(params["head"], few))
            if turn:  # the first turn compiles
                times[name].append(1e3 * (time.perf_counter() - started))
    return CandidateReport(
        rank=params["head"]["down"].shape[0],
        candidates=head.candidates,
        columns=head.columns,
        positions=rows.shape[0],
        recall=found,
        rows=count,
        candidate_ms=statistics.median(times["candidate"]),
        full_ms=statistics.median(times["full"]),
    )


@functools.partial(jax.jit, static_argnums=(0, 1))
def _scored(drafter: Any, target: Target, params: Any, target_params: Any, tokens: Array) -> Array:
    """The rows `[positions * n, d]` that the head reads when a draft starts at each position of a text."""
    cache = target.init_cache(1, 2 * TOKENS, jnp.dtype(drafter.dtype))
    hidden, taps = read(target, drafter.taps, target_params, cache, tokens)
    given = {"hidden": hidden} if drafter.wants_hidden else {"taps": taps}
    roots = jnp.arange(1, tokens.shape[0], dtype=jnp.int32)
    rows = drafter.scored(params, *at_every_root(drafter, params, tokens, given, roots))
    return rows.reshape(-1, rows.shape[-1])
