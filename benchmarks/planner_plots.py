"""The plots of docs/costmodel.md: `python benchmarks/planner_plots.py published|hidden|bursts OUT.png`."""

import sys

import numpy as np
from matplotlib.figure import Figure

from specjax.costmodel import menu, published, tables
from specjax.costmodel.acceptance import Acceptance
from specjax.costmodel.planner import Planner
from specjax.costmodel.simulate import Load, Text, compare, hidden_truth, simulate
from specjax.draft import PLAIN

KINDS = ("ngram", "eagle3", "dspark")
WINDOW = 40  # rounds of a running mean


def show_published(figure: Figure) -> None:
    """Published cells, 27B on 4 x B300: fixed shapes fall below plain, the planner does not."""
    table, priors = published.table(), published.priors()
    requests, ratios = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512), {}
    for count in requests:
        counts = menu.widths(count, 8)
        load = Load(count, count * 40, length=400, prompt=1024, texts=(Text(priors),))
        rounds = 600 if count < 16 else 200
        acceptance = Acceptance(published.SHAPES, count, priors)
        planner = Planner(table, published.SHAPES, counts, count, acceptance=acceptance)
        plain = simulate(load, PLAIN, table, rounds=rounds).rate
        for shape in published.SHAPES:
            ratios.setdefault(shape.kind, []).append(simulate(load, shape, table, rounds=rounds).rate / plain)
        ratios.setdefault("planner", []).append(simulate(load, planner, table, rounds=rounds).rate / plain)
    axes = figure.subplots()
    for name, values in ratios.items():
        axes.plot(
            requests, values, "k--" if name == "planner" else "-", linewidth=2 if name == "planner" else 1.3, label=name
        )
        print(name, " ".join(f"{value:.2f}" for value in values))
    axes.axhline(1, color="0.5", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(requests, [str(r) for r in requests])
    axes.set_xlabel("requests")
    axes.set_ylabel("tokens/s over plain decoding")
    axes.set_title("published cells at 1 and 512 requests, straight lines between; 27B, 4 x B300", fontsize=9)
    axes.legend()


def show_hidden(figure: Figure) -> None:
    """A device whose costs are off by up to 30 % a cell: how the planner finds the best shape."""
    table, shapes, requests = tables.load(tables.shipped("h100", "llama-3.1-8b")), menu.shapes(KINDS), 32
    counts = menu.widths(requests, 32)
    axes = figure.subplots()
    for seed in range(4):
        clock = hidden_truth(table, seed)
        load = Load(requests, requests * 20, length=200, texts=(Text(drift=requests * 100, worse=2.0),), seed=seed)
        fixed = {s: simulate(load, s, clock, counts=counts, rounds=400) for s in shapes}
        run = simulate(load, Planner(table, shapes, counts, requests), clock, rounds=400, noise=0.02)
        best = max(sum(r.tokens[200:]) / sum(r.seconds[200:]) for r in fixed.values())
        mean = np.convolve(run.tokens, np.ones(WINDOW), "valid") / np.convolve(run.seconds, np.ones(WINDOW), "valid")
        axes.plot(np.arange(len(mean)) + WINDOW, mean / best, linewidth=1.2, label=f"truth {seed}")
        plain = fixed[PLAIN].rate / best
        axes.axhline(plain, color=f"C{seed}", linewidth=0.6, linestyle=":")
        late = sum(run.tokens[200:]) / sum(run.seconds[200:]) / best
        print(f"truth {seed}: plain {plain:.2f}, planner after 200 rounds {late:.3f}")
    axes.axhline(1, color="0.5", linewidth=0.8)
    axes.set_xlabel("rounds")
    axes.set_ylabel("tokens/s over the best fixed shape in hindsight")
    axes.set_title("costs off by up to 30 % a cell, acceptance falls after about 40 rounds; dotted: plain", fontsize=9)
    axes.legend()


def show_bursts(figure: Figure) -> None:
    """Bursts of 128 requests: no one shape is best for all of a burst."""
    table = tables.load(tables.shipped("tpu-v5e", "llama-3.1-8b"))
    load = Load(128, 512, length=100, rate=20.0, burst=128, seed=1)
    fixed, run, _ = compare(load, table, KINDS)
    rates = {f"{s.kind} {s.depth}" + ("" if s.is_chain else f"x{s.branching}"): r.rate for s, r in fixed.items()}
    rates["planner"] = run.rate
    axes = figure.subplots()
    names = sorted(rates, key=lambda name: rates[name])
    axes.barh(
        names, [rates[n] / rates["none 0"] for n in names], color=["k" if n == "planner" else "C0" for n in names]
    )
    axes.axvline(1, color="0.5", linewidth=0.8)
    axes.set_xlabel("tokens/s over plain decoding")
    axes.set_title("bursts of 128 requests that drain to one; Llama-3.1-8B, TPU v5e", fontsize=9)
    print(" ".join(f"{n} {rates[n] / rates['none 0']:.2f}" for n in names))


def main() -> int:
    shows = {"published": show_published, "hidden": show_hidden, "bursts": show_bursts}
    if len(sys.argv) != 3 or sys.argv[1] not in shows:
        print(__doc__, file=sys.stderr)
        return 2
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    shows[sys.argv[1]](figure)
    figure.savefig(sys.argv[2], dpi=80)
    return 0


if __name__ == "__main__":
    sys.exit(main())
