"""Learning curves of several runs in one figure: `python benchmarks/learning_curves.py OUT.png RUN...`.

A run is a folder of `specjax train run`. Left the loss of the steps, right the acceptance length of greedy chains on
the held-out slice of the corpus, both against packed tokens.
"""

import collections
import json
import sys
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

SMOOTH = 20  # steps that a point of the loss is the mean of


def main() -> None:
    """Read, draw, write."""
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    figure = Figure(figsize=(10, 4), layout="constrained")
    loss, length = figure.subplots(1, 2)
    seen: collections.Counter = collections.Counter()
    for folder in map(Path, sys.argv[2:]):
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        drafter = json.loads((folder / "run.json").read_text())["recipe"]["drafter"]
        seen[drafter] += 1
        name = drafter if seen[drafter] == 1 else f"{drafter}, run {seen[drafter]}"
        tokens, losses = (np.array([line[key] for line in lines]) for key in ("tokens", "loss"))
        size = min(SMOOTH, len(losses))
        loss.plot(tokens[size - 1 :] / 1e3, np.convolve(losses, np.ones(size) / size, "valid"), label=name)
        looks = [line for line in lines if line["held_out"]]
        length.plot([x["tokens"] / 1e3 for x in looks], [x["held_out"]["length"] for x in looks], "o-", label=name)
    for axes, title in ((loss, "loss (the families' losses differ)"), (length, "acceptance length, held-out slice")):
        axes.set_xlabel("packed tokens, thousands")
        axes.set_ylabel(title)
        axes.grid(alpha=0.3)
    length.legend()
    figure.savefig(sys.argv[1], dpi=110)


if __name__ == "__main__":
    main()
