"""A corpus from a target: it writes prompts, or is given them, and answers them, many at a time.

Every dialogue has a number, and what it becomes depends on the seed and on that number: its stem, its temperature,
its random draws. Prompts are filtered in the order of the numbers. So a run that was interrupted, even killed, ends
with the dialogues of one that was not.
"""

import dataclasses
import hashlib
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import numpy as np

from specjax.engine.engine import Engine
from specjax.engine.request import Result
from specjax.sampling import SamplingParams
from specjax.training import prompts, stems
from specjax.training.chat import UserTurn, next_turn
from specjax.training.corpus import Dialogue
from specjax.training.writer import Writer

AHEAD = 3  # dialogues under way, in batches: answers of the first, prompts of those that follow


class Conversation(Protocol):
    """What a user says (`specjax.cli.prompts.Conversation` is one)."""

    @property
    def turns(self) -> Sequence[str]: ...

    @property
    def before(self) -> Sequence[dict[str, Any]]: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataRecipe:
    """What decides the dialogues of a corpus, beside the target.

    Attributes:
        seed: of everything that is drawn.
        temperatures: of answers, in turns.
        prompt_tokens: most tokens of a prompt that the target writes; one that does not end before is dropped.
        answer_tokens: most tokens of an answer.
        prompt_temperature: of prompts that the target writes.
        prompt_min_p: of the same; a little of it keeps nonsense away, and dialogues apart.
        context: most tokens of a dialogue; a turn whose answer might not fit is not taken up.
        given: the prompts to answer, or None: the target writes them.

    Raises:
        ValueError: a value that makes no sense.
    """

    seed: int = 0
    temperatures: tuple[float, ...] = (0.0, 0.7)
    prompt_tokens: int = 256
    answer_tokens: int = 384
    prompt_temperature: float = 1.0
    prompt_min_p: float = 0.05
    context: int = 704
    given: tuple[Conversation, ...] | None = None

    def __post_init__(self):
        if not self.temperatures:
            raise ValueError("at least one temperature is needed")
        for temperature in (*self.temperatures, self.prompt_temperature):
            SamplingParams(temperature=temperature)
        SamplingParams(max_tokens=min(self.prompt_tokens, self.answer_tokens))

    def describe(self) -> dict[str, Any]:
        """As the manifest keeps it."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "given"}
        if self.given is None:
            return values | {"prompts": f"written by the target, stems {stems.version()}"}
        said = repr([(tuple(c.turns), tuple(c.before)) for c in self.given])
        return values | {"prompts": f"{len(self.given)} given, {hashlib.sha256(said.encode()).hexdigest()[:12]}"}


@dataclasses.dataclass
class Progress:
    """How far a run is.

    Attributes:
        goal: answer tokens of the whole corpus.
        answer_tokens: in the corpus so far, those under way included.
        decoded: tokens decoded by this run, prompts included.
        answered: answer tokens decoded by this run.
        dialogues: finished by this run.
        dropped: prompts dropped by this run, by reason.
        looped: answers of this run that were cut because they went round in circles.
        seconds: since this run began.
    """

    goal: int
    answer_tokens: int
    decoded: int = 0
    answered: int = 0
    dialogues: int = 0
    dropped: dict[str, int] = dataclasses.field(default_factory=dict)
    looped: int = 0
    seconds: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Answer tokens a second of this run."""
        return self.answered / self.seconds if self.seconds else 0.0

    @property
    def seconds_left(self) -> float | None:
        """At this run's speed; None before there is one."""
        return (self.goal - self.answer_tokens) / self.tokens_per_s if self.answered else None


@dataclasses.dataclass
class _Job:
    """A dialogue under way: what the user says, the ids so far and which of them are the target's."""

    number: int
    turns: tuple[str, ...]
    before: list[dict[str, Any]]
    ids: list[int] = dataclasses.field(default_factory=list)
    mask: list[bool] = dataclasses.field(default_factory=list)
    turn: int = 0
    answer: list[int] = dataclasses.field(default_factory=list)
    watch: prompts.LoopWatch = dataclasses.field(default_factory=prompts.LoopWatch)


def generate(
    engine: Engine,
    writer: Writer,
    recipe: DataRecipe,
    held_out: Collection[str] = frozenset(),
    report: Callable[[Progress], None] = lambda progress: None,
) -> Progress:
    """Fill a corpus until it holds enough, or until the given prompts are used up.

    The writer is not closed, so that its owner closes it in whatever way the run ends.

    Args:
        engine: the target, with a tokenizer; drafts do not change what it writes.
        writer: the corpus, of `recipe.describe()`.
        recipe: what to write.
        held_out: normalised texts (`prompts.held_out`) that no prompt may equal.
        report: called after every round.

    Raises:
        ValueError: no chat template, or a context that is too small for the recipe.
    """
    return _Run(engine, writer, recipe, held_out, report).run()


class _Run:
    def __init__(
        self,
        engine: Engine,
        writer: Writer,
        recipe: DataRecipe,
        held_out: Collection[str],
        report: Callable[[Progress], None],
    ):
        if engine.tokenizer is None:
            raise ValueError("dialogues need a tokenizer with a chat template")
        if engine.config.context < recipe.context:
            raise ValueError(f"the engine's context ({engine.config.context}) is below the recipe's ({recipe.context})")
        self.engine, self.writer, self.recipe, self.held_out, self.report = engine, writer, recipe, held_out, report
        self.tokenizer = engine.tokenizer
        self.frame = UserTurn.of(self.tokenizer) if recipe.given is None else None
        self.kept = writer.kept()
        self.seen: set[int] = set()
        self.writing: dict[int, tuple[int, str]] = {}  # number and stem of prompts that are being written, by request
        self.answering: dict[int, _Job] = {}  # by request
        # Prompts that wait for those before them; or why they are dropped; or None: settled by an earlier run.
        self.undecided: dict[int, _Job | str | None] = {}
        self.open = 0  # dialogues under way
        self.next_number = self.next_decision = 0
        self.progress = Progress(goal=writer.goal, answer_tokens=writer.answer_tokens)

    def run(self) -> Progress:
        started = time.perf_counter()
        try:
            while not self.writer.done:
                self.start_jobs()
                if not self.engine.busy:
                    break
                for index, chunk in self.engine.step():
                    self.progress.decoded += len(chunk.token_ids)
                    if index in self.answering:
                        self.take(index, self.answering[index], chunk.token_ids, chunk.result)
                    elif index in self.writing and chunk.result is not None:
                        self.written(*self.writing.pop(index), chunk.result)
                self.progress.seconds = time.perf_counter() - started
                self.report(self.progress)
        finally:
            for index in (*self.writing, *self.answering):
                self.engine.abort(index)
        return self.progress

    # ---------------------------------------------------------------- prompts

    def start_jobs(self) -> None:
        """Begin the dialogues that come next, so that the batch stays full."""
        while self.open < AHEAD * self.engine.config.batch and self.has_more():
            number = self.next_number
            self.next_number += 1
            if self.writer.settled(number):
                self.decide(number, None)
                continue
            self.open += 1
            if self.recipe.given is not None:
                chosen = self.recipe.given[number]
                self.decide(number, _Job(number, tuple(chosen.turns), [dict(m) for m in chosen.before]))
                continue
            self.write(number)

    def write(self, number: int) -> None:
        """Have the target write a prompt."""
        assert self.frame is not None, "there are given prompts"
        stem = stems.stem(self.recipe.seed, number)
        params = SamplingParams(
            max_tokens=self.recipe.prompt_tokens,
            temperature=self.recipe.prompt_temperature,
            min_p=self.recipe.prompt_min_p,
            seed=self.seed(number, 0),
            stop=self.frame.stop,
            stop_token_ids=self.frame.stop_ids,
        )
        opening = [*self.frame.opening, *self.tokenizer.encode(stem, add_special_tokens=False)]
        self.writing[self.engine.submit(opening, params)] = (number, stem)

    def written(self, number: int, stem: str, result: Result) -> None:
        """The target has written a prompt, or has not come to its end."""
        text = (stem + result.text).strip()
        reason = "unfinished" if result.finish_reason == "length" else prompts.fault(text)
        self.decide(number, reason or _Job(number, (text,), []))

    def has_more(self) -> bool:
        return self.recipe.given is None or self.next_number < len(self.recipe.given)

    def decide(self, number: int, found: _Job | str | None) -> None:
        """Filter the prompts that are next in order, now that this one is there."""
        self.undecided[number] = found
        while self.next_decision in self.undecided:
            number, found = self.next_decision, self.undecided.pop(self.next_decision)
            self.next_decision += 1
            if found is None:
                if number in self.kept:
                    self.seen.add(self.kept[number])
                continue
            reason = found if isinstance(found, str) else self.refuses(found)
            if isinstance(found, _Job) and reason is None:
                self.ask(found)
            elif reason is not None:
                self.open -= 1
                self.progress.dropped[reason] = self.progress.dropped.get(reason, 0) + 1
                self.writer.drop(number, reason)

    def refuses(self, job: _Job) -> str | None:
        """Why a prompt is not answered, or None: then the dialogue holds what is asked first."""
        if any(prompts.normalise(turn) in self.held_out for turn in job.turns):
            return "held out"
        digest = prompts.digest(job.turns)
        if digest in self.seen:
            return "duplicate"
        job.before.append({"role": "user", "content": job.turns[0]})
        job.ids = self.tokenizer.encode_chat(job.before)
        job.mask = [False] * len(job.ids)
        if not self.fits(len(job.ids)):
            return "too long"
        self.seen.add(digest)
        return None

    # ---------------------------------------------------------------- answers

    def fits(self, tokens: int) -> bool:
        return tokens + self.recipe.answer_tokens <= self.recipe.context

    def ask(self, job: _Job) -> None:
        temperature = self.recipe.temperatures[job.number % len(self.recipe.temperatures)]
        params = SamplingParams(
            max_tokens=self.recipe.answer_tokens, temperature=temperature, seed=self.seed(job.number, 1 + job.turn)
        )
        job.answer, job.watch = [], prompts.LoopWatch()
        self.answering[self.engine.submit(job.ids, params)] = job

    def take(self, index: int, job: _Job, tokens: Sequence[int], result: Result | None) -> None:
        """Tokens of an answer."""
        looped = False
        for token in tokens:
            job.answer.append(token)
            looped = job.watch.push(token)
            if looped:
                break
        if looped and result is None:
            self.engine.abort(index)
        if looped or result is not None:
            del self.answering[index]
            self.progress.looped += looped
            self.answered(job, None if looped else result)

    def answered(self, job: _Job, result: Result | None) -> None:
        """An answer is complete (no result: it was cut); go on with the next turn, or keep the dialogue."""
        answer = job.answer
        job.ids += answer
        job.mask += [True] * len(answer)
        self.progress.answered += len(answer)
        self.progress.answer_tokens += len(answer)
        job.turn += 1
        if result is not None and result.finish_reason == "stop" and job.turn < len(job.turns):
            user = job.turns[job.turn]
            more = next_turn(self.tokenizer, job.before, answer, user)
            if self.fits(len(job.ids) + len(more)):
                job.before += [{"role": "assistant", "content": result.text}, {"role": "user", "content": user}]
                job.ids += more
                job.mask += [False] * len(more)
                self.ask(job)
                return
        self.open -= 1
        self.progress.dialogues += 1
        self.writer.add(
            Dialogue(
                tokens=np.array(job.ids, np.int32),
                mask=np.array(job.mask, bool),
                temperature=self.recipe.temperatures[job.number % len(self.recipe.temperatures)],
                prompt=prompts.digest(job.turns),
                number=job.number,
            )
        )

    def seed(self, number: int, turn: int) -> int:
        key = f"{self.recipe.seed} {number} {turn}".encode()
        return int.from_bytes(hashlib.sha256(key).digest()[:8], "big")
