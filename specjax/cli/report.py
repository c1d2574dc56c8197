"""The figures of a bench: from samples to one plain dictionary, and from that to a table, a JSON file and a plot."""

import dataclasses
import json
import os
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specjax.cli import explain
from specjax.training.prompts import LoopWatch

if TYPE_CHECKING:
    from rich.table import Table

    from specjax.engine.request import Result, SpecStats


@dataclasses.dataclass(frozen=True)
class Sample:
    """What one engine did with the prompts of one category, once.

    Attributes:
        seconds: of rounds.
        tokens: that came out of them; the first of each request is prefill's.
        wall: seconds of everything, prefill included.
        specs: speculation counters, one a request.
        ids: the answers' tokens.
        read_bytes: bytes that the target passes read; None for a batch, whose requests share passes.
        busy: share of the batch's rows that held a request, over the rounds.
        steady: tokens and seconds of the rounds in which every row held one: what a server under that load has all the
            time. None where there were too few requests to tell.
    """

    seconds: float
    tokens: int
    wall: float
    specs: list["SpecStats"]
    ids: list[list[int]]
    read_bytes: float | None
    busy: float = 1.0
    steady: tuple[int, float] | None = None

    @classmethod
    def of_each(cls, results: list["Result"], about: dict[str, Any], wall: float) -> "Sample":
        """Requests that ran alone, in `wall` seconds. A pass reads weights and the cache so far."""
        weights, slot = about["weights_bytes"], about["kv_bytes_per_token"]
        return cls(
            seconds=sum(r.timing.decode_s for r in results),
            tokens=sum(len(r.token_ids) - 1 for r in results),
            wall=wall,
            specs=[r.spec for r in results],
            ids=[r.token_ids for r in results],
            read_bytes=sum(
                r.spec.rounds * (weights + slot * (r.prompt_tokens + len(r.token_ids) / 2)) for r in results
            ),
        )

    @classmethod
    def of_batch(
        cls,
        results: list["Result"],
        seconds: float,
        wall: float,
        rows: int,
        steady: tuple[int, float] | None = None,
    ) -> "Sample":
        """Requests that ran together: `seconds` of rounds, which had room for `rows`; `wall` seconds of everything."""
        return cls(
            seconds=seconds,
            tokens=sum(len(r.token_ids) - 1 for r in results),
            wall=wall,
            specs=[r.spec for r in results],
            ids=[r.token_ids for r in results],
            read_bytes=None,
            busy=sum(r.spec.rounds for r in results) / rows if rows else 1.0,
            steady=steady,
        )

    @classmethod
    def pooled(cls, samples: Iterable["Sample"]) -> "Sample":
        """Several samples as one."""
        samples = list(samples)
        read = [s.read_bytes for s in samples if s.read_bytes is not None]
        steady = [s.steady for s in samples if s.steady is not None]
        return cls(
            seconds=sum(s.seconds for s in samples),
            tokens=sum(s.tokens for s in samples),
            wall=sum(s.wall for s in samples),
            specs=[spec for s in samples for spec in s.specs],
            ids=[ids for s in samples for ids in s.ids],
            read_bytes=sum(read) if len(read) == len(samples) else None,
            busy=sum(s.busy * s.seconds for s in samples) / max(sum(s.seconds for s in samples), 1e-9),
            steady=(sum(n for n, _ in steady), sum(s for _, s in steady)) if len(steady) == len(samples) else None,
        )

    @property
    def speed(self) -> float | None:
        """Tokens per second, under steady load where that is known; None where nothing was decoded."""
        tokens, seconds = self.steady or (self.tokens, self.seconds)
        return tokens / seconds if tokens and seconds > 0 else None

    @property
    def whole_speed(self) -> float:
        """Tokens per second of everything, prefill and the first tokens included."""
        return sum(map(len, self.ids)) / self.wall


Samples = dict[str, list[dict[str, Sample]]]


def summarise(
    machine: dict, settings: dict, about: dict[str, Any], samples: Samples, planned: Sequence[str] = ()
) -> dict[str, Any]:
    """All figures of a bench, ready for JSON.

    Args:
        machine: where it ran, with what memory and products reach there.
        settings: what was asked for.
        about: `Engine.describe()` of the plain engine.
        samples: by drafter, for each repeat, by category; `none` among them.
        planned: drafters that a planner chooses for; each is compared with the best of the others, too.
    """
    parameters = about["weights_bytes"] / (2 if about["dtype"] == "bfloat16" else 4)
    drafters = []
    for name, repeats in samples.items():
        whole = [Sample.pooled(repeat.values()) for repeat in repeats]
        plain = [Sample.pooled(repeat.values()) for repeat in samples["none"]]
        by_category = {
            category: _figures([r[category] for r in repeats], [r[category] for r in samples["none"]], parameters)
            for category in repeats[0]
        }
        pairs = [
            (a, b) for mine, theirs in zip(whole, plain, strict=True) for a, b in zip(mine.ids, theirs.ids, strict=True)
        ]
        drafters.append(
            {
                "drafter": name,
                **_figures(whole, plain, parameters),
                "answers": len(pairs),
                "different_answers": sum(a != b for a, b in pairs),
                "against_best_fixed": _against_best(name, samples, planned) if name in planned else None,
                "by_category": by_category,
            }
        )
    return {"machine": machine, "settings": settings, "drafters": drafters}


def _against_best(name: str, samples: Samples, planned: Sequence[str]) -> dict[str, Any]:
    """By category, a planned drafter's speed over that of the fixed one with the best median, repeat by repeat."""
    found = {}
    for category in samples[name][0]:
        speeds = {
            other: [repeat[category].speed or 0.0 for repeat in repeats]
            for other, repeats in samples.items()
            if other not in planned
        }
        best = max(speeds, key=lambda other: statistics.median(speeds[other]))
        own = [repeat[category].speed for repeat in samples[name]]
        ratios = [mine / theirs for mine, theirs in zip(own, speeds[best], strict=True) if mine and theirs]
        found[category] = {"best": best, **_spread("ratio", ratios), "ratio_interval": _interval(ratios)}
    return found


def _figures(mine: list[Sample], plain: list[Sample], parameters: float) -> dict[str, Any]:
    """Figures of one drafter: counters pooled over the repeats, times as medians with their range."""
    from specjax.engine.request import SpecStats

    spec = SpecStats()
    for sample in mine:
        for one in sample.specs:
            spec.merge(one)
    ratios = [a.speed / b.speed for a, b in zip(mine, plain, strict=True) if a.speed and b.speed]
    whole = [a.whole_speed / b.whole_speed for a, b in zip(mine, plain, strict=True)]
    # A target pass multiplies every parameter with each of its rows: the roots and the drafts.
    rows = [sum(s.rounds + s.drafted for s in sample.specs) for sample in mine]
    return {
        "acceptance_length": spec.acceptance_length,
        "per_position": spec.per_position,
        "of_answers": _of_answers(mine),
        **_spread("tokens_per_s", [sample.speed for sample in mine]),
        **_spread("ratio_to_plain", ratios),
        "ratio_to_plain_interval": _interval(ratios),
        **_spread("ratio_with_prefill", whole),
        "rows_busy": statistics.fmean(sample.busy for sample in mine),
        "steady": statistics.fmean(s.steady[1] / s.seconds for s in mine if s.steady and s.seconds)
        if any(s.steady for s in mine)
        else None,
        **_spread("read_gb_s", [s.read_bytes / s.seconds / 1e9 for s in mine if s.read_bytes and s.seconds]),
        **_spread(
            "gflop_s", [2 * parameters * n / s.seconds / 1e9 for n, s in zip(rows, mine, strict=True) if s.seconds]
        ),
    }


def _of_answers(samples: list[Sample]) -> dict[str, Any]:
    """Mean acceptance length of the answers, each counting the same, and of those that loop and that do not.

    A small model often ends in a loop, which any lookup foresees: a mean over such answers says little of the others.
    """
    lengths: dict[bool, list[float]] = {True: [], False: []}
    for sample in samples:
        for spec, ids in zip(sample.specs, sample.ids, strict=True):
            if spec.rounds:
                watch = LoopWatch()
                lengths[max(map(watch.push, ids), default=False)].append(spec.acceptance_length)
    both = [*lengths[True], *lengths[False]]
    return {
        "mean": statistics.fmean(both) if both else None,
        "mean_looping": statistics.fmean(lengths[True]) if lengths[True] else None,
        "mean_not_looping": statistics.fmean(lengths[False]) if lengths[False] else None,
        "looping": len(lengths[True]),
        "not_looping": len(lengths[False]),
    }


def _interval(ratios: list[float]) -> list[float] | None:
    """The 95 % confidence interval of the mean ratio, by Student's t over the repeats; None for fewer than three."""
    if len(ratios) < 3:
        return None
    from scipy.stats import t

    mean, spread = statistics.fmean(ratios), statistics.stdev(ratios) / len(ratios) ** 0.5
    reach = float(t.ppf(0.975, len(ratios) - 1)) * spread
    return [mean - reach, mean + reach]


def _spread(name: str, values: Iterable[float | None]) -> dict[str, Any]:
    known = [value for value in values if value is not None]
    if not known:
        return {name: None, f"{name}_range": None}
    return {name: statistics.median(known), f"{name}_range": [min(known), max(known)]}


def show(found: dict[str, Any]) -> None:
    """Print the figures as tables on stdout."""
    import sys

    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 150, highlight=False)
    machine, settings = found["machine"], found["settings"]
    console.print(
        f"{settings['target']}, {machine['dtype']}, on {machine['device']} ({machine['cpu']}, {machine['cores']} "
        f"cores); jax {machine['jax']}; batch {settings['batch']}, context {settings['context']}, temperature "
        f"{settings['temperature']}, up to {settings['max_tokens']} tokens, {settings['conversations']} conversations "
        f"of {settings['prompts']}, {settings['times']} times, {settings['repeats']} repeats"
    )
    console.print(f"ceiling: reads {machine['read_gb_s']:.1f} GB/s, products {machine['gflop_s']:.0f} GFLOP/s")
    table = Table(
        "drafter", "acceptance length", "by position", "tokens/s", "ratio to plain", "GB/s", "GFLOP/s", "tokens"
    )
    answers = Table(
        "drafter",
        "mean of answers",
        "of those that loop",
        "of the others",
        "ratio to plain, 95 %",
        "with prefill",
        "rows busy",
        "steady",
    )
    for drafter in found["drafters"]:
        differ = drafter["different_answers"]
        same = f"{differ} of {drafter['answers']} answers differ" if differ else "as plain's"
        table.add_row(
            drafter["drafter"],
            f"{drafter['acceptance_length']:.2f}",
            " ".join(f"{share:.2f}" for share in drafter["per_position"]) or "-",
            _range(drafter, "tokens_per_s", ".1f"),
            _range(drafter, "ratio_to_plain", ".2f"),
            _share(drafter["read_gb_s"], machine["read_gb_s"], ".1f"),
            _share(drafter["gflop_s"], machine["gflop_s"], ".0f"),
            same if settings["temperature"] == 0 else "sampled",
        )
        each, interval = drafter["of_answers"], drafter["ratio_to_plain_interval"]
        answers.add_row(
            drafter["drafter"],
            _number(each["mean"], ".2f"),
            f"{_number(each['mean_looping'], '.2f')} ({each['looping']})",
            f"{_number(each['mean_not_looping'], '.2f')} ({each['not_looping']})",
            "-" if interval is None else f"{interval[0]:.3f} to {interval[1]:.3f}",
            _range(drafter, "ratio_with_prefill", ".2f"),
            f"{drafter['rows_busy']:.0%}",
            _number(drafter["steady"], ".0%"),
        )
    console.print(table)
    console.print(answers)
    names = [drafter["drafter"] for drafter in found["drafters"]]
    table = Table("category", *(f"{name}: length, ratio (95 %)" for name in names))
    for category in found["drafters"][0]["by_category"]:
        cells = [drafter["by_category"][category] for drafter in found["drafters"]]
        table.add_row(category, *map(_category, cells))
    console.print(table)

    for drafter in found["drafters"]:
        if against := drafter["against_best_fixed"]:
            console.print(_best_table(drafter["drafter"], against))
            if drafter.get("planner"):
                console.print(f"{drafter['drafter']}: {explain.cost(drafter['planner'])}")
    for drafter in found["drafters"]:
        if head := drafter["candidate_head"]:
            console.print(_candidate_head(drafter["drafter"], head))


def _best_table(name: str, against: dict[str, Any]) -> "Table":
    from rich.table import Table

    table = Table("category", "best fixed, in hindsight", f"{name} over it", "95 %")
    for category, one in against.items():
        interval = one["ratio_interval"]
        shown = "-" if interval is None else f"{interval[0]:.3f} to {interval[1]:.3f}"
        table.add_row(category, one["best"], _range(one, "ratio", ".3f"), shown)
    return table


def write_json(found: dict[str, Any], path: Path) -> None:
    """Write the figures; the file appears whole or not at all."""
    text = json.dumps(found, indent=2, ensure_ascii=False) + "\n"
    _atomically(path, lambda part: part.write_text(text, encoding="utf-8"))


def write_plot(found: dict[str, Any], path: Path) -> None:
    """Draw acceptance length and ratio to plain, a group of bars a category. The suffix of `path` names the format."""
    from matplotlib.figure import Figure

    drafters = found["drafters"]
    categories = list(drafters[0]["by_category"])
    figure = Figure(figsize=(3.5 + 1.6 * len(categories), 6), layout="constrained")
    titles = (("acceptance_length", "acceptance length (tokens a round)"), ("ratio_to_plain", "speed, ratio to plain"))
    for axes, (key, title) in zip(figure.subplots(2, 1, sharex=True), titles, strict=True):
        width = 0.8 / len(drafters)
        for i, drafter in enumerate(drafters):
            heights = [drafter["by_category"][category][key] or 0.0 for category in categories]
            places = [x + (i - (len(drafters) - 1) / 2) * width for x in range(len(categories))]
            axes.bar(places, heights, width, label=drafter["drafter"])
        axes.axhline(1.0, color="0.5", linewidth=0.8)
        axes.set_ylabel(title)
        axes.set_xticks(range(len(categories)), categories)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right center")
    machine, settings = found["machine"], found["settings"]
    figure.suptitle(
        f"{settings['target']}, {machine['dtype']}, {machine['device']}, batch {settings['batch']}", fontsize=10
    )
    _atomically(path, lambda part: figure.savefig(part, format=path.suffix.removeprefix(".") or "png"))


def _atomically(path: Path, write: Callable[[Path], Any]) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        write(part)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _candidate_head(name: str, head: dict[str, Any]) -> str:
    """One line about a low-rank candidate head."""
    shares = ", ".join(f"{share:.3f} of the best {k}" for k, share in head["recall"].items())
    return (
        f"{name}: candidate head of rank {head['rank']}, {head['candidates']} of {head['columns']} tokens: "
        f"{head['candidate_ms']:.2f} ms against {head['full_ms']:.2f} ms of the full head for {head['rows']} rows; "
        f"recall {shares} over {head['positions']} positions"
    )


def _category(figures: dict[str, Any]) -> str:
    interval = figures["ratio_to_plain_interval"]
    shown = f"{figures['acceptance_length']:.2f}, {_number(figures['ratio_to_plain'], '.2f')}"
    return shown if interval is None else f"{shown} ({interval[0]:.2f}-{interval[1]:.2f})"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _range(figures: dict[str, Any], key: str, form: str) -> str:
    if figures[key] is None:
        return "-"
    low, high = figures[f"{key}_range"]
    return f"{figures[key]:{form}} ({low:{form}}-{high:{form}})"


def _share(value: float | None, of: float, form: str) -> str:
    return "-" if value is None else f"{value:{form}} ({value / of:.0%})"
