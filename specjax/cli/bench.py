"""`specjax bench`: drafters against plain decoding, on the same prompts, in the same process, in turns."""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Generator
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

from specjax import config
from specjax.cli import explain, flags, prompts, report
from specjax.cli.prompts import Conversation
from specjax.cli.report import Sample
from specjax.config import DrafterConfig, NoDrafter

if TYPE_CHECKING:
    from specjax.engine.engine import Engine
    from specjax.sampling import SamplingParams

STEADY = 2  # conversations a row that make a load steady

HELP = """Measure drafters against plain decoding.

  specjax bench --prompts configs/prompts/demo.jsonl --drafters none,ngram,suffix
  specjax bench --prompts mine.jsonl --drafters ngram --repeats 5 --json out.json --plot out.png
  specjax bench --prompts mine.jsonl --batch 8 --times 4 --temperature 0.7
  specjax bench --prompts configs/prompts/heldout.jsonl --drafters all
  specjax bench --prompts configs/prompts/classes.jsonl --drafters none,ngram,eagle3,auto --limit 4

Engines share the target's weights and take turns, so that a drifting clock hits all alike. Compilation and prefill are
not counted; `with prefill` is the ratio to plain where the latter is. Medians over the repeats, with minimum and
maximum; from three repeats on, the 95 % confidence interval of the mean ratio to plain. `auto` is also compared with
the fixed drafter that was best in each category, in hindsight. With --batch, a category of at least two conversations a
row (--times asks them several times) is a steady load: rounds count while every row has a request (`steady`: that share
of the time), as drafts end some answers early, and leave their rows empty only where nobody waits. Above temperature 0
every request has a seed, the same for all engines. --json is written after each repeat. Exit code 1 if float32 tokens
differ from plain's at temperature 0."""


@dataclasses.dataclass(kw_only=True)
class Bench(flags.EngineFlags):
    """Flags of `specjax bench`."""

    prompts: Annotated[str, flags.text("FILE.jsonl")]
    """A line a conversation: {"turns": [...], "category": "..."} or {"messages": [...]}."""
    drafters: Annotated[str, flags.text("KIND|PATH|FILE.yaml,...")] = "none,ngram,suffix"
    """What to compare. A drafter takes its options from the configuration if that is of its kind, or from the drafter
    section of a configuration of its own (FILE.yaml, reported by the file's name). `all` is n-gram,
    suffix, the drafters that come with specjax for the target, n-gram grafted on EAGLE-3 (hybrid), and a planned set of
    n-gram by itself and grafted on EAGLE-3's chains."""
    limit: Annotated[int | None, flags.text("N")] = None
    """Take the first N conversations of each category only."""
    times: Annotated[int, flags.text("N")] = 1
    """Ask every conversation so many times in a repeat: a steady load for a batch that has more rows than a category
    has conversations. Not with a drafter that remembers answers (suffix)."""
    max_tokens: Annotated[int, flags.text("N")] = 128
    """Most tokens of an answer."""
    repeats: Annotated[int, flags.text("R")] = 3
    """Times that every drafter answers everything."""
    temperature: Annotated[float, flags.text("T")] = 0.0
    """0 takes the most likely token."""
    no_probe: bool = False
    """Take the wiring of learned drafters as their files declare it, without trying it on a text of the target."""
    json: Annotated[str | None, flags.text("FILE.json")] = None
    """Write all figures here."""
    plot: Annotated[str | None, flags.text("FILE.png")] = None
    """Draw acceptance length and ratio by category."""
    metrics: Annotated[str | None, flags.text("FILE.prom")] = None
    """Write what the engines have counted in the last repeat here, in Prometheus' text format."""

    def run(self) -> int:
        """Measure, print, write; 1 if tokens differ that must not."""
        from specjax.cli.machine import ceiling, facts
        from specjax.sampling import SamplingParams

        if self.repeats < 1:
            raise ValueError(f"--repeats must be at least 1, got {self.repeats}")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"--limit must be at least 1, got {self.limit}")
        if self.times < 1:
            raise ValueError(f"--times must be at least 1, got {self.times}")
        self._check_outputs()
        conversations = _first(prompts.read(self.prompts), self.limit)
        params = SamplingParams(max_tokens=self.max_tokens, temperature=self.temperature)
        run, drafters = self.run_config(), self._drafters()
        if self.times > 1 and (remembering := [name for name, own in drafters.items() if _remembers(own)]):
            raise ValueError(f"--times asks for answers again, which {', '.join(remembering)} would remember")
        plain = flags.load_engine(
            run.model_copy(update={"drafter": NoDrafter()}),
            quiet=False,
            check=lambda made: prompts.check(made, conversations, params),
        )
        engines = {}
        for name, drafter in drafters.items():
            if name != "none":
                flags.note(f"{name}: compiling")
            engines[name] = plain if name == "none" else plain.with_drafter(drafter)
        about = plain.describe()
        machine = {**facts(), "dtype": about["dtype"], **ceiling(about["dtype"])}
        settings = {
            "target": about["target"],
            "prompts": self.prompts,
            "conversations": len(conversations),
            "times": self.times,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "batch": run.batch,
            "context": run.context,
            "repeats": self.repeats,
        }
        planned = [name for name, engine in engines.items() if engine.pilot is not None]

        def figures(samples: report.Samples) -> dict[str, Any]:
            done = len(samples["none"])
            found = report.summarise(machine, settings | {"repeats": done}, about, samples, planned)
            if self.json is not None:
                report.write_json(found, Path(self.json))
            return found

        with _progress() as tick:
            samples = measure(engines, conversations, params, self.repeats, tick, done=figures, times=self.times)
        found = figures(samples)
        texts = [
            plain.encode(_first_prompt(next(c for c in conversations if c.category == name))) + sample.ids[0]
            for name, sample in samples["none"][0].items()
        ]
        for drafter in found["drafters"]:
            engine = engines[drafter["drafter"]]
            drafter["candidate_head"] = _candidate_head(engine, texts)
            drafter["planner"] = None if engine.pilot is None else engine.pilot.report()
        if self.json is not None:
            report.write_json(found, Path(self.json))
        if self.plot is not None:
            report.write_plot(found, Path(self.plot))
        flags.write_metrics(self.metrics, engines)
        report.show(found)
        for drafter in found["drafters"]:
            if drafter["planner"] is not None:
                print("\n".join(explain.lines(drafter["planner"])))
        must_match = self.temperature == 0 and machine["dtype"] == "float32"
        return 1 if must_match and any(d["different_answers"] for d in found["drafters"]) else 0

    def _drafters(self) -> dict[str, DrafterConfig]:
        """The drafters by name, plain decoding first: every ratio needs it."""
        names = [name.strip() for name in self.drafters.split(",") if name.strip()]
        if not names:
            raise ValueError("--drafters names none: for example --drafters none,ngram")
        if len(set(names)) != len(names):
            raise ValueError(f"--drafters names one twice: {self.drafters}")
        if "none" not in names:
            flags.note("added 'none' to the drafters: the ratio to plain needs it")
        run = self.run_config()
        own, wanted = run.drafter, {}
        for name in names:
            if name == "all":
                wanted |= _all(run.target)
            elif name.endswith((".yaml", ".yml")):
                wanted[Path(name).stem if Path(name).stem not in wanted else name] = config.load(name).drafter
            elif name != "none":
                wanted[name] = own if name == own.kind else config.drafter(name)
        if self.no_probe:
            wanted = dict(zip(wanted, flags.unprobed(list(wanted.values())), strict=True))
        return {"none": NoDrafter()} | wanted

    def _check_outputs(self) -> None:
        """Refuse what cannot be written before anything is measured."""
        flags.check_outputs(self.json, self.metrics, self.plot)
        flags.check_plot(self.plot)


def measure(
    engines: dict[str, "Engine"],
    conversations: list[Conversation],
    params: "SamplingParams",
    repeats: int,
    tick: Callable[[str, int], Any],
    done: Callable[[report.Samples], Any] = lambda samples: None,
    times: int = 1,
) -> report.Samples:
    """Answer everything with every engine, `repeats` times; the order of engines turns round each time.

    Categories take turns in being the first: what an engine costs until it knows its load falls on none of them alone.
    An engine forgets its earlier requests before each repeat: a drafter that learns from answers must not have seen
    the very ones that it is measured on.

    Args:
        engines: by name.
        conversations: what to answer.
        params: of every request; above temperature 0 each repeat gives each conversation a seed, each time.
        repeats: how often.
        tick: called with what begins, and the number of such steps.
        done: called with the samples so far after each repeat.
        times: that every conversation is answered in a repeat.

    Returns:
        By drafter, for each repeat, a sample of each category.
    """
    categories = list(dict.fromkeys(c.category for c in conversations))
    groups = {name: [c for c in conversations if c.category == name] for name in categories}
    samples: dict[str, list[dict[str, Sample]]] = {name: [] for name in engines}
    for engine in engines.values():
        prompts.answer(engine, conversations[:1], dataclasses.replace(params, max_tokens=2))
    total = repeats * len(engines) * len(groups)
    for repeat in range(repeats):
        for name in list(engines)[:: 1 if repeat % 2 == 0 else -1]:
            engines[name].reset()
            first = repeat % len(categories)
            taken = {}
            for category in (*categories[first:], *categories[:first]):
                tick(f"{name}, {category}", total)
                taken[category] = _sample(engines[name], groups[category] * times, params, repeat * times)
            samples[name].append({category: taken[category] for category in categories})
        done(samples)
    return samples


def _first(conversations: list[Conversation], limit: int | None) -> list[Conversation]:
    """The first `limit` conversations of each category."""
    taken: dict[str, int] = {}
    kept = []
    for conversation in conversations:
        taken[conversation.category] = taken.get(conversation.category, 0) + 1
        if limit is None or taken[conversation.category] <= limit:
            kept.append(conversation)
    return kept


def _sample(engine: "Engine", group: list[Conversation], params: "SamplingParams", run: int) -> Sample:
    """A sample of conversations, of which the same one may come several times; `run` counts such runs."""
    seeds: list[int | None] = [None] * len(group)
    if params.temperature > 0:
        lines = [conversation.line for conversation in group]
        seeds = [(run + lines[:place].count(line)) * 1_000_003 + line for place, line in enumerate(lines)]
    about, started, counters = engine.describe(), perf_counter(), engine.counters
    before = dataclasses.replace(counters)
    answers = prompts.answer(engine, group, params, seeds=seeds)
    wall = perf_counter() - started
    results = [result for turns in answers for result in turns]
    if about["batch"] == 1:
        return Sample.of_each(results, about, wall)
    rows = (counters.rounds - before.rounds) * about["batch"]
    full = counters.full_tokens - before.full_tokens, counters.full_s - before.full_s
    steady = full if len(group) >= STEADY * about["batch"] and full[1] else None
    return Sample.of_batch(results, counters.decode_s - before.decode_s, wall, rows, steady)


def _all(target: str) -> dict[str, DrafterConfig]:
    """Everything that can draft for a target without being given a path."""
    from specjax.drafters.shipped import shipped

    families = list(shipped(target))
    found = {name: config.drafter(name) for name in ("ngram", "suffix", *families)}
    members: list[Any] = ["ngram", *families]
    if "eagle3" in families:
        found["hybrid"] = config.drafter("hybrid")
        members = ["ngram", {"kind": "hybrid", "model": {"kind": "eagle3", "topk": 1}}]
    return found | {"auto": config.drafter({"kind": "auto", "of": members})}


def _remembers(drafter: DrafterConfig) -> bool:
    """Whether a drafter, or a part or member of it, looks up what other requests were answered."""
    parts = [getattr(drafter, "lookup", None), getattr(drafter, "model", None), *getattr(drafter, "of", ())]
    return getattr(drafter, "kind", None) == "suffix" or any(_remembers(p) for p in parts if hasattr(p, "kind"))


def _first_prompt(conversation: Conversation) -> list[dict[str, Any]]:
    return [*conversation.before, {"role": "user", "content": conversation.turns[0]}]


def _candidate_head(engine: "Engine", texts: list[list[int]]) -> dict[str, Any] | None:
    """Recall and time of a drafter's candidate head beside its full one, on what the target made of the prompts."""
    from specjax.drafters import candidates

    drafter, params = engine.drafter, engine.params["drafter"]
    if engine.pilot is not None:
        return None  # a set's heads are measured one by one
    if drafter is not None and drafter.kind == "hybrid":
        drafter, params = drafter.model, params["model"]  # type: ignore[attr-defined]
    found = candidates.report(drafter, params, engine.target, engine.params["target"], texts, batch=engine.config.batch)
    return None if found is None else dataclasses.asdict(found)


@contextlib.contextmanager
def _progress() -> Generator[Callable[[str, int], None]]:
    """Progress on stderr, a bar or lines in a log: a function of the step that begins and of the number of steps."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    if not console.is_terminal:
        begun = itertools.count(1)
        yield lambda step, total: flags.note(f"{next(begun)}/{total} {step}")
        return
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("measuring", total=None, completed=-1)
        yield lambda step, total: bar.update(task, description=step, total=total, advance=1)
