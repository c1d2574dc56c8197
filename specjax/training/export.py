"""A trained drafter as a folder in its family's published format, with a README of how it came to be."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from specjax.drafters.config import HeadConfig
from specjax.drafters.formats.write import DEFAULTS, save_drafter
from specjax.targets.config import DecoderConfig
from specjax.training.recipe import owns


def export(
    folder: Path, config: HeadConfig, tensors: Mapping[str, np.ndarray], target: DecoderConfig, readme: str
) -> Path:
    """Write a drafter in bfloat16, in place of what the folder held before.

    Args:
        folder: where to; made whole beside its place, then renamed.
        config: the drafter.
        tensors: its weights by canonical name.
        target: the model that it is for.
        readme: text of README.md.

    Returns:
        The folder.
    """
    beside = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(beside, ignore_errors=True)
    save_drafter(
        beside, config, {k: np.asarray(x).astype(ml_dtypes.bfloat16) for k, x in tensors.items()}, target=target
    )
    (beside / "README.md").write_text(readme, encoding="utf-8")
    if folder.exists():
        shutil.rmtree(folder)
    return beside.rename(folder)


def readme(
    config: HeadConfig,
    recipe: Mapping[str, Any],
    data: Mapping[str, Any],
    metrics: Sequence[Mapping[str, Any]],
    command: str,
    calibration: Sequence[float] = (),
) -> str:
    """How a drafter was trained: command, data, length, and what the held-out slice said on the way.

    Args:
        config: the drafter.
        recipe: the run's options.
        data: the corpus: `dialogues`, `rows`, `learned` (tokens with the mask set).
        metrics: lines of `metrics.jsonl`.
        command: what started the run.
        calibration: DSpark's temperatures, see `calibrate.py`.
    """
    looks = [line for line in metrics if line["held_out"]]
    last = metrics[-1]
    kept = looks if len(looks) <= 12 else [looks[i] for i in np.linspace(0, len(looks) - 1, 12).round().astype(int)]
    rows = [
        f"| {line['step']} | {line['tokens']:,} | {line['loss']:.3f} | {line['held_out']['length']:.3f} | "
        + " ".join(f"{x:.2f}" for x in line["held_out"]["by_slot"])
        + " |"
        for line in kept
    ]
    own = {n: x for n, x in recipe.items() if owns(config.family, n) and n != "start" and x is not None}
    options = ", ".join(f"{name} {value}" for name, value in own.items())
    lines = [
        f"# {config.family} drafter for {recipe['target']}",
        "",
        f"Trained with specjax, in the format `{DEFAULTS[config.family]}`. Use it:",
        "",
        "```sh",
        f'specjax generate --target {recipe["target"]} --drafter THIS_FOLDER "Write a haiku."',
        "```",
        "",
        "## How it was trained",
        "",
        "```sh",
        command,
        "```",
        "",
        f"Data: {data['dialogues']:,} dialogues that the target wrote, {data['learned']:,} tokens to learn, packed "
        f"into {data['rows']:,} rows. Length of the run: {last['step']:,} steps, {last['tokens']:,} packed tokens, "
        f"{last['seconds'] / 60:.1f} minutes ({100 * last['progress']:.0f} % of the schedule).",
        "",
        f"Options: {options}.",
        "",
        "Acceptance on a held-out slice of the corpus: greedy chains along the target's own text, tokens a round with "
        "the target's own included, and how often each draft is accepted once those before it are.",
        "",
        "| step | packed tokens | loss | acceptance length | by draft |",
        "|---|---|---|---|---|",
        *rows,
        "",
    ]
    if calibration:
        lines += [
            "Temperatures of the confidence head, fitted on the held-out slice (`drafter.calibration`): "
            f"{json.dumps([round(x, 3) for x in calibration])}.",
            "",
        ]
    return "\n".join(lines)
