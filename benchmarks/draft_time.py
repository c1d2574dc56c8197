"""What drafts of a set take by themselves: `python benchmarks/draft_time.py [--batch N] [--drafter KIND]`.

Milliseconds from the dispatch of a draft's program until it is done, median and shortest of so many, with the caches of
the processor emptied before each as a pass empties them. By depth, and by the rows of a request that it takes in.
"""

import argparse
import statistics
import time

import jax
import numpy as np

from specjax.engine import pinned
from specjax.engine.engine import Engine

REPEATS = 30
CONTEXT = 200


def main() -> None:
    """Time every draft program of the set, in turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--drafter", default="eagle3")
    flags = parser.parse_args()
    drafter = {"kind": "auto", "of": ["ngram", {"kind": flags.drafter, "topk": 1}]}
    engine = Engine.load("smollm2-135m", drafter=drafter, context=768, dtype="float32", batch=flags.batch)
    each = np.ones(flags.batch, int)
    state = jax.jit(pinned.pin)(pinned.fresh(engine), CONTEXT * each, each > 0, each.astype(np.int32))
    other, times = np.zeros(8_000_000), {}
    for _ in range(REPEATS):
        for shape, room in engine.programs.drafts:
            other += 1.0
            started = time.perf_counter()
            state, made = engine.programs.draft_as(shape, engine.params, state, room)
            jax.block_until_ready((made, state.lengths))
            times.setdefault((shape.kind, shape.depth, room), []).append((time.perf_counter() - started) * 1e3)
    for (kind, depth, room), found in sorted(times.items()):
        print(f"{kind}, depth {depth}, {room} rows: {statistics.median(found):.2f} ms (shortest {min(found):.2f})")


if __name__ == "__main__":
    main()
