"""The planner against fixed shapes on paper, everywhere: `python benchmarks/planner_sweep.py [--rounds N] [DEVICE...]`.

For every shipped device (or those named) and every target, from 1 to 512 requests that keep the batch full: the best
fixed shape and the planner, over plain decoding. Single-threaded; all devices take hours, one takes some minutes.
"""

import argparse

from specjax.costmodel import tables
from specjax.costmodel.facts import devices
from specjax.costmodel.shapes import TARGETS
from specjax.costmodel.simulate import Load, compare
from specjax.draft import PLAIN

KINDS = ("ngram", "eagle3", "dspark")


def main() -> None:
    """Print a line for each load, and the worst ratio to the best fixed shape at the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("devices", nargs="*", default=list(devices()))
    parser.add_argument("--rounds", type=int, default=800)
    parser.add_argument("--targets", nargs="*", default=list(TARGETS))
    parser.add_argument("--requests", nargs="*", type=int, default=[1, 8, 64, 512])
    flags = parser.parse_args()
    worst = 9.0
    for device in flags.devices:
        for target in flags.targets:
            table = tables.load(tables.shipped(device, target))
            for requests in flags.requests:
                load = Load(requests, requests * 40, length=200)
                fixed, run, _ = compare(load, table, KINDS, rounds=flags.rounds)
                shape = max(fixed, key=lambda s: fixed[s].rate)
                best, plain = fixed[shape].rate, fixed[PLAIN].rate
                worst = min(worst, run.rate / best)
                print(
                    f"{device:>8} {target:<14} {requests:>4} requests: best fixed {best / plain:.3f} of plain "
                    f"({shape.kind}, {shape.rows} rows), planner {run.rate / plain:.3f}, ratio {run.rate / best:.3f}",
                    flush=True,
                )
    print(f"worst ratio of the planner to the best fixed shape: {worst:.3f}")


if __name__ == "__main__":
    main()
