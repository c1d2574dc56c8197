"""What the planner costs the host: `python benchmarks/decision_time.py`.

Microseconds of processor time by live rows: what else runs on the machine is not counted, though it empties the
caches. `learn` holds observing the round and the drafts' scores.
"""

import statistics
from time import process_time

import numpy as np

from specjax.costmodel import menu, tables
from specjax.costmodel.planner import Planner
from specjax.costmodel.scores import Nodes

KINDS = ("ngram", "eagle3", "mtp", "dspark")
ROUNDS = 400


def main() -> None:
    """Print medians, fastest tenths and slowest tenths over random rounds."""
    table = tables.load(tables.shipped("h100", "llama-3.1-8b"))
    shapes = menu.shapes(KINDS)
    print(f"{len(shapes)} shapes of {', '.join(KINDS)}; microseconds, median (10th to 90th percentile)")
    for batch in (1, 8, 64, 512):
        rng = np.random.default_rng(0)
        planner = Planner(table, shapes, menu.widths(batch, max(s.rows for s in shapes)), batch)
        rows = np.arange(batch)
        for row in rows.tolist():
            planner.start(row)
        times: dict[str, list[float]] = {"price": [], "decide": [], "fit": [], "learn": []}
        for number in range(ROUNDS):
            if number % 20 == 0:  # a number of requests and a context that were not met before
                times["price"].append(timed(planner.prices.quote, batch, 2.0 ** (5 + number / 50))[1])
            decision, spent = timed(planner.decide, rows, 1000.0)
            times["decide"].append(spent)
            shape = decision.shape
            live, nodes = np.full(batch, shape.rows - 1), drafts_of(planner, shape, batch, rng)
            decision, spent = timed(planner.fit, decision, rows, live, 1000.0, nodes)
            times["fit"].append(spent)
            drafts = decision.budgets - 1
            accepted = np.minimum(rng.geometric(0.35, batch) - 1, np.minimum(drafts, shape.depth))
            about = {"seconds": decision.seconds, "count": decision.rows, "drafts": drafts, "accepted": accepted}
            _, spent = timed(planner.observe, decision, rows, 1000.0, **about)
            if nodes is not None:
                path = np.arange(shape.rows) <= accepted[:, None]
                spent += timed(planner.learn, shape, rows, live, nodes, path)[1]
            times["learn"].append(spent)
        shown = [
            f"{n} {statistics.median(t):.0f} ({np.quantile(t, 0.1):.0f} to {np.quantile(t, 0.9):.0f})"
            for n, t in times.items()
        ]
        print(f"{batch:>4} rows: " + ", ".join(shown), flush=True)


def timed(call, *args, **options):
    """What a call returns, and its microseconds."""
    began = process_time()
    found = call(*args, **options)
    return found, (process_time() - began) * 1e6


def drafts_of(planner: Planner, shape, batch: int, rng: np.random.Generator) -> Nodes | None:
    """Trees of a shape with random chances."""
    if not shape.depth:
        return None
    parents = np.concatenate([[-1], 1 + planner.acceptance.outlines[shape].parents])
    said, scores = rng.uniform(0.2, 1.0, (batch, shape.rows)), np.zeros((batch, shape.rows))
    for node in range(1, shape.rows):
        scores[:, node] = scores[:, parents[node]] + np.log(said[:, node])
    return Nodes(scores, np.tile(parents, (batch, 1)))


if __name__ == "__main__":
    main()
