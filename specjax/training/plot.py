"""The learning curve of a run as a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def curve(metrics: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw loss and held-out acceptance length over packed tokens."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot([x["tokens"] for x in metrics], [x["loss"] for x in metrics], linewidth=0.8)
    left.set(xlabel="packed tokens", ylabel="training loss")
    looks = [x for x in metrics if x["held_out"]]
    right.plot([x["tokens"] for x in looks], [x["held_out"]["length"] for x in looks], marker=".")
    right.set(xlabel="packed tokens", ylabel="held-out acceptance length")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
