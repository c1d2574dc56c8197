"""What the planner costs the host: `python benchmarks/decision_time.py`.

Microseconds of processor time of a decision, by live rows: what else runs on the machine is not counted, though it
empties the caches.
"""

import statistics
from time import process_time

import numpy as np

from specjax.costmodel import menu, tables
from specjax.costmodel.planner import Planner

KINDS = ("ngram", "eagle3", "mtp", "dspark")
ROUNDS = 400


def main() -> None:
    """Print medians and the middle four fifths over random rounds."""
    table = tables.load(tables.shipped("h100", "llama-3.1-8b"))
    shapes = menu.shapes(KINDS)
    print(f"{len(shapes)} shapes of {', '.join(KINDS)}; microseconds, median (10th to 90th percentile)")
    for batch in (1, 8, 64, 512):
        rng = np.random.default_rng(0)
        planner = Planner(table, shapes, menu.widths(batch, max(s.rows for s in shapes)), batch)
        rows = np.arange(batch)
        for row in rows.tolist():
            planner.start(row)
        times: dict[str, list[float]] = {"decide": [], "fit": [], "observe": []}
        for _ in range(ROUNDS):
            began = process_time()
            decision = planner.decide(rows, 1000.0)
            decided = process_time()
            live = np.full(batch, decision.shape.rows - 1)
            decision = planner.fit(decision, rows, live, 1000.0)
            fitted = process_time()
            drafts = decision.budgets - 1
            accepted = np.minimum(rng.geometric(0.35, batch) - 1, np.minimum(drafts, decision.shape.depth))
            resumed = process_time()
            planner.observe(
                decision, rows, 1000.0, seconds=decision.seconds, count=decision.rows, drafts=drafts, accepted=accepted
            )
            observed = process_time()
            for name, spent in zip(times, (decided - began, fitted - decided, observed - resumed), strict=True):
                times[name].append(spent * 1e6)
        shown = [
            f"{n} {statistics.median(t):.0f} ({np.quantile(t, 0.1):.0f} to {np.quantile(t, 0.9):.0f})"
            for n, t in times.items()
        ]
        print(f"{batch:>4} rows: " + ", ".join(shown))


if __name__ == "__main__":
    main()
