"""`specjax train run` and `eval`: a drafter is trained on a corpus, and looked at."""

import contextlib
import dataclasses
import json
import shlex
import signal
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from specjax.cli import flags
from specjax.cli.flags import Repeated

if TYPE_CHECKING:
    from specjax.training.corpus import Corpus
    from specjax.training.progress import StepReport
    from specjax.training.recipe import Recipe
    from specjax.training.trainer import Trainer

ENOUGH_CHAINS = 50  # that got to a draft, for its share to be written down
RUN_HELP = """Train a drafter on a corpus that its target wrote.

  specjax train run --drafter eagle3 --corpus corpus --out runs/eagle3 --minutes 30
  specjax train run --config configs/train/eagle3.yaml --corpus corpus --out runs/eagle3
  specjax train run --out runs/eagle3 --corpus corpus --resume
  specjax train run --drafter ubtree --corpus corpus --out runs/ubtree --minutes 30 -o start=runs/dflash/drafter

Families: eagle3 and mtp (training-time test); dflash, dflash2, dspark and ubtree (packed anchors). A run holds
checkpoints, metrics.jsonl, and at its end `drafter/`, a folder in the family's
published format. Ctrl-C saves; --resume goes on to the same numbers. The rates fall to zero at the end of the run,
whether that is counted in steps, tokens or minutes. All options: specjax/training/recipe.py."""

EVAL_HELP = """Look at a run's drafter on the whole held-out part of its corpus, with prompt lookup beside it.

  specjax train eval runs/eagle3 --corpus corpus
  specjax train eval runs/eagle3 --corpus corpus --rows 64 --export drafts/eagle3

Greedy chains along the target's text, as decoding at temperature 0 would accept them. `specjax bench` measures speed
and trees."""


@dataclasses.dataclass(kw_only=True)
class Run(flags.CommonFlags):
    """Flags of `specjax train run`."""

    corpus: Annotated[str, flags.text("FOLDER")]
    """What the target wrote; see `specjax train data`."""
    out: Annotated[str, flags.text("FOLDER")]
    """Folder of the run."""
    drafter: Annotated[str | None, flags.text("FAMILY")] = None
    """eagle3, mtp, dflash, dflash2, dspark or ubtree."""
    target: Annotated[str | None, flags.text("MODEL")] = None
    """smollm2-135m, a model folder, a GGUF file or a hub id."""
    config: Annotated[str | None, flags.text("FILE.yaml")] = None
    """A recipe; see configs/train/."""
    steps: Annotated[int | None, flags.text("N")] = None
    """Length of the run in steps, or"""
    tokens: Annotated[int | None, flags.text("N")] = None
    """in packed tokens, or"""
    minutes: Annotated[float | None, flags.text("N")] = None
    """in minutes of training."""
    resume: bool = False
    """Go on with the run in --out, by the recipe that it has."""
    plot: Annotated[str | None, flags.text("FILE.png")] = None
    """Draw the learning curve here."""
    overrides: Annotated[tuple[str, ...], tyro.conf.arg(name="set", aliases=["-o"], metavar="KEY=VALUE"), Repeated] = ()
    """Any option of the recipe, e.g. -o batch=16."""

    def run(self) -> int:
        """Train; 0, or 130 if stopped before the end."""
        from specjax.training import plot

        flags.check_outputs(self.plot)
        recipe = self._recipe()
        try:
            trainer, corpus = load(recipe, self.corpus, self.out, resume=self.resume)
        except KeyboardInterrupt:
            if (Path(self.out) / "run.json").exists():
                flags.note("stopped before the first step; --resume goes on from here")
            raise
        with stopping() as stopped, _bar() as report:
            complete = trainer.run(report, stopped)
        metrics = [json.loads(x) for x in (Path(self.out) / "metrics.jsonl").read_text().splitlines()]
        if self.plot is not None:
            plot.curve(metrics, Path(self.plot))
        folder = write(trainer, corpus, Path(self.out) / "drafter", metrics, self._command(recipe))
        flags.note(f"{folder}: the drafter as it is now")
        if not complete:
            flags.note(f"stopped at {100 * trainer.progress:.0f} %; --resume goes on from here")
        return 0 if complete else 130

    def _recipe(self) -> "Recipe":
        from specjax.training import recipe

        named = {name: getattr(self, name) for name in ("drafter", "target", *recipe.LENGTHS)}
        given = [f"{name}={json.dumps(value)}" for name, value in named.items() if value is not None]
        if not self.resume:
            return recipe.load(self.config, [*given, *self.overrides])
        if given or self.overrides or self.config:
            raise ValueError("--resume goes on by the run's own recipe: leave the other options out")
        return saved_recipe(self.out)

    def _command(self, recipe: "Recipe") -> str:
        """The command that makes this run, its recipe spelled out."""
        from specjax.training.recipe import LENGTHS

        length = next(n for n in LENGTHS if getattr(recipe, n) is not None)
        words = ["specjax", "train", "run", "--drafter", recipe.drafter, "--target", recipe.target]
        words += ["--corpus", "CORPUS", "--out", "RUN", f"--{length}", str(getattr(recipe, length))]
        skip = {"drafter", "target", *LENGTHS}
        for name, value in recipe.model_dump(mode="json", exclude_unset=True).items():
            if name == "start" and value is not None:
                value = "EARLIER_DRAFTER"  # where it lay says nothing to a reader
            if name not in skip and value is not None:
                words += ["-o", f"{name}={value if isinstance(value, str) else json.dumps(value)}"]
        return shlex.join(words)


@dataclasses.dataclass(kw_only=True)
class Eval(flags.CommonFlags):
    """Flags of `specjax train eval`."""

    folder: Annotated[tyro.conf.Positional[str], flags.text("RUN")]
    """Folder of a run."""
    corpus: Annotated[str, flags.text("FOLDER")]
    """Its corpus."""
    rows: Annotated[int, flags.text("N")] = 64
    """Most packed rows to look at."""
    export: Annotated[str | None, flags.text("FOLDER")] = None
    """Write the newest checkpoint's drafter here."""

    def run(self) -> int:
        """Print; 0."""
        from specjax.training import evaluate
        from specjax.training.packing import pack

        recipe = saved_recipe(self.folder)
        if not any((Path(self.folder) / "checkpoints").glob("[0-9]*")):
            raise ValueError(f"{self.folder} holds no checkpoint yet: `specjax train run ... --resume` goes on with it")
        trainer, corpus = load(recipe, self.corpus, self.folder, resume=True)
        held = pack(corpus.split(recipe.held_out, recipe.seed)[1], recipe.length)
        held = held.some(self.rows)
        found = trainer.acceptance(held)
        lookup = evaluate.ngram_acceptance(held, recipe.ahead)
        print(f"{int(held.mask.sum()):,} held-out tokens of {len(held)} rows; tokens a round, greedy chains:")
        for name, x in ((recipe.drafter, found), ("ngram", lookup)):
            shares = " ".join(f"{share:.2f}" for share in x.by_slot)
            print(f"  {name:8} {x.length:.3f}   by draft: {shares}   ({x.roots:,} roots)")
        if self.export is not None:
            metrics = [json.loads(x) for x in (Path(self.folder) / "metrics.jsonl").read_text().splitlines()]
            run = Run(corpus=self.corpus, out=self.folder)
            write(trainer, corpus, Path(self.export), metrics, run._command(recipe))
            flags.note(f"wrote {self.export}")
        return 0


def saved_recipe(folder: str) -> "Recipe":
    """The recipe of a run."""
    from specjax.training import recipe

    path = Path(folder) / "run.json"
    if not path.is_file():
        raise ValueError(f"{folder} holds no run")
    return recipe.restore(json.loads(path.read_text())["recipe"])


def load(recipe: "Recipe", corpus: str, out: str, *, resume: bool) -> tuple["Trainer", "Corpus"]:
    """A run, its target and its corpus, ready to go."""
    import jax

    from specjax.drafters.formats.read import load_drafter
    from specjax.engine.compilation import use_cache
    from specjax.engine.precision import held_dtype
    from specjax.targets import decoder
    from specjax.training.corpus import Corpus, Origin
    from specjax.training.recipe import BLOCK_ONLY
    from specjax.training.trainer import Trainer
    from specjax.weights.load import load_checkpoint

    use_cache("auto")
    checkpoint = load_checkpoint(recipe.target)
    data = Corpus.open(corpus, Origin.of(checkpoint))
    name = "bfloat16" if recipe.dtype == "auto" else recipe.dtype
    dtype = held_dtype(jax.numpy.dtype(name))
    target, params = decoder.from_tensors(checkpoint.config, dict(checkpoint.tensors), dtype)
    start = None
    if recipe.start is not None and not (Path(out) / "checkpoints").is_dir():
        begun = load_drafter(recipe.start, checkpoint.config)
        start, mask = dict(begun.tensors), begun.config.mask_token_id
        if recipe.drafter in BLOCK_ONLY and recipe.mask_token_id is None and mask is not None:
            # It has learned what that token stands for; `run.json` keeps it for a run that goes on.
            recipe = recipe.model_copy(update={"mask_token_id": mask})
    trainer = Trainer(recipe, target, params, data, Path(out), resume=resume, start=start, note=flags.note)
    return trainer, data


def write(trainer: "Trainer", corpus: "Corpus", folder: Path, metrics: list[dict[str, Any]], command: str) -> Path:
    """The drafter as it is now, as a folder."""
    from specjax.training.export import export, readme

    train, _ = corpus.split(trainer.recipe.held_out, trainer.recipe.seed)
    data = {"dialogues": len(train), "rows": len(trainer.packed), "learned": int(trainer.packed.mask.sum())}
    text = readme(
        trainer.config,
        trainer.recipe.model_dump(mode="json"),
        data,
        metrics,
        command,
        trainer.calibration(),
    )
    tensors = trainer.tensors() | trainer.candidate_head()
    config = dataclasses.replace(trainer.written_config, acceptance=_acceptance(metrics))
    return export(folder, config, tensors, trainer.target.config, text)


def _acceptance(metrics: list[dict[str, Any]]) -> tuple[float, ...]:
    """Acceptance by position at the last look at the held-out slice, as deep as enough chains came."""
    looks = [line["held_out"] for line in metrics if line["held_out"]]
    found, chains = [], looks[-1]["roots"] if looks else 0
    for share in looks[-1]["by_slot"] if looks else ():
        if chains < ENOUGH_CHAINS:
            break
        found.append(round(share, 3))
        chains *= share
    return tuple(found)


@contextlib.contextmanager
def stopping() -> Generator[Callable[[], bool]]:
    """Ctrl-C and SIGTERM ask for a stop, after the step that is running."""
    asked = []
    before = {number: signal.signal(number, lambda *_: asked.append(1)) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _bar() -> Generator[Callable[["StepReport"], None]]:
    """A progress bar on stderr; without a terminal, a line where the held-out slice was looked at."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (BarColumn(), TextColumn("{task.percentage:>3.0f} %"), TextColumn("{task.description}"))
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task("compiling", total=1.0)

        def report(line: "StepReport") -> None:
            agreed = " ".join(f"{100 * x:.0f}" for x in line.agreement)
            text = f"loss {line.loss:.3f}, agreement {agreed} %, {line.tokens_per_s:.0f} tokens/s"
            bar.update(task, completed=line.progress, description=text)
            if line.held_out is not None:
                found = f"step {line.step}: loss {line.loss:.3f}, held-out acceptance length"
                console.print(f"{found} {line.held_out['length']:.3f}", highlight=False)

        yield report
