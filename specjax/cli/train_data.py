"""`specjax train data` and `show`: a corpus of a target's own answers is made, and looked at."""

import contextlib
import dataclasses
import signal
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

import specjax
from specjax.cli import flags, prompts

if TYPE_CHECKING:
    from specjax.config import RunConfig
    from specjax.training.generate import DataRecipe, Progress
    from specjax.training.writer import Writer

DATA_HELP = """Make a corpus: dialogues whose answers the target wrote, with their loss masks.

  specjax train data --target smollm2-135m --out corpus --tokens 300000
  specjax train data --target smollm2-135m --out corpus --tokens 600000            goes on where that one ended
  specjax train data --target Qwen/Qwen3-0.6B --out corpus --tokens 1000000 --prompts mine.jsonl
  specjax train data --out corpus --tokens 300000 --temperatures 0 0.7 1 --batch 64

A drafter learns to foresee its own target, so the answers must be the target's. An instruct target also writes the
prompts: it is given the opening of a user's turn, with or without a first word or two, and says what a user would.
Prompts that do not end, that repeat themselves or others, or that stand in the held-out set are dropped; so are sets
that drafters are judged on (HumanEval, GSM8K, MT-Bench, SPEED-Bench). Answers that go round in circles are cut.

Stop it at any time, with Ctrl-C or otherwise: all finished dialogues are kept, and the same command goes on from there
to the very corpus that an uninterrupted run would have made. The speed grows with --batch until the machine's
arithmetic is used up; more memory is all that a large one costs."""

SHOW_HELP = """Show what a corpus holds, and some of its dialogues.

  specjax train show corpus
  specjax train show corpus --dialogues 10 --seed 3
  specjax train show corpus --held-out configs/prompts/heldout.jsonl

Text that the target wrote as the assistant, on which a drafter is trained, stands between the marks << and >>."""

HELD_OUT = "configs/prompts/heldout.jsonl"


@dataclasses.dataclass(kw_only=True)
class Data(flags.CommonFlags):
    """Flags of `specjax train data`."""

    out: Annotated[str, flags.text("FOLDER")]
    """Folder of the corpus; an unfinished one is gone on with."""
    tokens: Annotated[int, flags.text("N")]
    """Answer tokens that the corpus shall hold: those that a drafter is trained on."""
    target: Annotated[str, flags.text("MODEL")] = "smollm2-135m"
    """smollm2-135m, a model folder, a GGUF file or a hub id."""
    prompts: Annotated[str | None, flags.text("FILE.jsonl")] = None
    """Prompts to answer, a line a conversation: {"turns": [...]}, {"messages": [...]} or {"prompt": "..."}."""
    held_out: Annotated[str | None, flags.text("FILE.jsonl")] = None
    """Prompts that must not enter the corpus, because drafters are measured on them; configs/prompts/heldout.jsonl."""
    temperatures: Annotated[tuple[float, ...], flags.text("T")] = (0.0, 0.7)
    """Of the answers, in turns."""
    prompt_tokens: Annotated[int, flags.text("N")] = 256
    """Most tokens of a prompt that the target writes."""
    answer_tokens: Annotated[int, flags.text("N")] = 384
    """Most tokens of an answer."""
    context: Annotated[int, flags.text("N")] = 704
    """Most tokens of a dialogue, the answer to come included."""
    seed: Annotated[int, flags.text("N")] = 0
    """The same seed gives the same corpus."""
    batch: Annotated[int, flags.text("N")] = 16
    """Dialogues that are decoded together; changes the speed only."""
    drafter: Annotated[str, flags.text("KIND|PATH")] = "none"
    """Speculate while generating; changes the speed only. Pays with a small --batch."""
    dtype: Annotated[Literal["auto", "float32", "bfloat16"], flags.text("auto|float32|bfloat16")] = "auto"
    """Of weights and activations."""

    def run(self) -> int:
        """Write the corpus; 0, or 1 if the prompts did not suffice."""
        from specjax import config
        from specjax.training.corpus import Origin
        from specjax.training.generate import DataRecipe
        from specjax.training.prompts import held_out, refuse_benchmarks
        from specjax.training.writer import Writer
        from specjax.weights.load import load_checkpoint

        if self.tokens < 1:
            raise ValueError(f"--tokens must be at least 1, got {self.tokens}")
        given = None
        if self.prompts is not None:
            given = tuple(prompts.read(self.prompts))
            refuse_benchmarks(self.prompts)
        recipe = DataRecipe(
            seed=self.seed,
            temperatures=self.temperatures,
            prompt_tokens=self.prompt_tokens,
            answer_tokens=self.answer_tokens,
            context=self.context,
            given=given,
        )
        barred = held_out(c.turns for c in prompts.read(self._held_out()))
        run = config.make(
            {
                "target": self.target,
                "drafter": self.drafter,
                "dtype": self.dtype,
                "batch": self.batch,
                "context": self.context,
                "prefill_chunk": 64,
            }
        )
        origin = Origin.of(load_checkpoint(self.target))
        with contextlib.closing(Writer(self.out, origin, recipe.describe(), self.tokens)) as writer:
            stopped = self._fill(writer, run, recipe, barred)
        flags.note(f"{self.out} holds {writer.answer_tokens:,} answer tokens in {writer.dialogues:,} dialogues")
        if stopped:
            flags.note("stopped; the same command goes on from here")
            return 130
        if not writer.done:
            flags.note(f"the prompts are used up before {self.tokens:,} answer tokens: give more of them")
        return 0 if writer.done else 1

    def _fill(self, writer: "Writer", run: "RunConfig", recipe: "DataRecipe", barred: frozenset[str]) -> bool:
        """Write dialogues until there are enough; whether someone stopped it before."""
        from specjax.training.generate import generate

        if writer.answer_tokens:
            flags.note(f"{self.out} holds {writer.answer_tokens:,} of {self.tokens:,} answer tokens; going on")
        if writer.done:
            return False
        engine = flags.load_engine(run, quiet=False)
        try:
            with _terminating(), _progress(writer.goal) as report:
                flags.note(summary(generate(engine, writer, recipe, barred, report)))
        except KeyboardInterrupt:
            return True
        return False

    def _held_out(self) -> str:
        """The prompts that must stay out: those that are named, or the ones that come with specjax."""
        if self.held_out is not None:
            return self.held_out
        for root in (Path(), Path(specjax.__file__).parents[1]):
            if (root / HELD_OUT).exists():
                return str(root / HELD_OUT)
        raise ValueError(f"there is no {HELD_OUT} here: name the prompts to measure drafters on (--held-out)")


@dataclasses.dataclass(kw_only=True)
class Show(flags.CommonFlags):
    """Flags of `specjax train show`."""

    corpus: Annotated[tyro.conf.Positional[str], flags.text("FOLDER")]
    """A corpus, also one that is being written."""
    dialogues: Annotated[int, flags.text("N")] = 2
    """Dialogues to print, drawn at random."""
    seed: Annotated[int, flags.text("N")] = 0
    """Which ones."""
    held_out: Annotated[str | None, flags.text("FILE.jsonl")] = None
    """Prompts that must not be in it; exit code 1 if one is."""
    target: Annotated[str | None, flags.text("MODEL")] = None
    """Whose tokenizer shows them, if the target is found under another name now."""

    def run(self) -> int:
        """Print; 0, or 1 if a prompt stands in it that must not."""
        import numpy as np

        from specjax.training.corpus import Corpus, Origin, read_manifest
        from specjax.training.prompts import overlap
        from specjax.weights.load import load_checkpoint

        manifest = read_manifest(Path(self.corpus))
        checkpoint = load_checkpoint(self.target or manifest["origin"]["target"])
        corpus = Corpus.open(self.corpus, Origin.of(checkpoint))
        print(f"{len(corpus):,} dialogues, {corpus.tokens:,} tokens, {corpus.answer_tokens:,} of them answers")
        print("by temperature: " + ", ".join(f"{t:g}: {n:,}" for t, n in _by_temperature(corpus).items()))
        print(f"dropped: {manifest['dropped'] or 'none'} of {manifest['tried']:,} tried")
        print("recipe: " + ", ".join(f"{key} {value}" for key, value in manifest["recipe"].items()))
        found = []
        if self.held_out is not None:
            sets = [c.turns for c in prompts.read(self.held_out)]
            found = overlap(corpus, sets)
            print(f"held out: {len(found)} of its prompts are among the {len(sets)} of {self.held_out}")
        chosen = np.random.default_rng(self.seed).permutation(len(corpus))[: self.dialogues]
        for i in chosen.tolist():
            tokens, mask = corpus[i]
            print(f"\n--- dialogue {corpus.dialogues[i].number}, temperature {corpus.dialogues[i].temperature:g}")
            print(marked(checkpoint.tokenizer, tokens, mask))
        return 1 if found else 0


def marked(tokenizer: Any, tokens: Any, mask: Any) -> str:
    """The text of a dialogue, special tokens included, with `<<` and `>>` around what the target wrote."""
    import numpy as np

    edges = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(tokens)]
    pieces = []
    for start, end in zip(edges, edges[1:], strict=False):
        text = tokenizer.decode(tokens[start:end].tolist(), skip_special_tokens=False)
        pieces.append(f"<<{text}>>" if mask[start] else text)
    return "".join(pieces)


def summary(progress: "Progress") -> str:
    """What a run has done, in one line."""
    dropped = ", ".join(f"{count} {reason}" for reason, count in progress.dropped.items()) or "none"
    every = progress.decoded / progress.seconds if progress.seconds else 0.0
    return (
        f"this run: {progress.dialogues:,} dialogues, {progress.answered:,} answer tokens in {progress.seconds:.0f} s: "
        f"{progress.tokens_per_s:.1f} tokens/s ({every:.1f} with the prompts); {progress.looped} answers cut; "
        f"prompts dropped: {dropped}"
    )


def _by_temperature(corpus: Any) -> dict[float, int]:
    """Answer tokens by temperature."""
    found: dict[float, int] = {}
    for d in corpus.dialogues:
        found[d.temperature] = found.get(d.temperature, 0) + int(d.mask.sum())
    return dict(sorted(found.items()))


@contextlib.contextmanager
def _terminating() -> Generator[None]:
    """Makes a polite `kill` stop as Ctrl-C does."""

    def stop(number: int, frame: Any) -> None:
        del number, frame
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _progress(goal: int) -> Generator[Callable[["Progress"], None]]:
    """A progress bar on stderr; where stderr is no terminal, a line every half minute."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _every(30.0, lambda progress: flags.note(_line(progress)))
        return
    columns = (TextColumn("answer tokens"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[speed]}"))
    with Bar(*columns, console=console) as bar:
        task = bar.add_task("data", total=goal, speed="")
        yield _every(0.2, lambda p: bar.update(task, completed=min(p.answer_tokens, goal), speed=_speed(p)))


def _every(seconds: float, show: Callable[["Progress"], None]) -> Callable[["Progress"], None]:
    """Calls `show` at most so often."""
    last = time.monotonic()

    def report(progress: "Progress") -> None:
        nonlocal last
        if time.monotonic() - last >= seconds:
            last = time.monotonic()
            show(progress)

    return report


def _line(progress: "Progress") -> str:
    return f"{progress.answer_tokens:,} of {progress.goal:,} answer tokens, {_speed(progress)}"


def _speed(progress: "Progress") -> str:
    left = progress.seconds_left
    shown = "" if left is None else f", {left / 60:.0f} min left" if left < 7200 else f", {left / 3600:.1f} h left"
    return f"{progress.dialogues:,} dialogues, {progress.tokens_per_s:.1f} tokens/s{shown}"
