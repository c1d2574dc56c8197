"""Which prompts a corpus may hold: normalised, digested, filtered, and never those that drafters are judged on."""

import hashlib
import json
import re
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path

from specjax.training.corpus import Corpus

MAX_PERIOD = 64  # longest phrase, in tokens, whose repetition counts as a loop
LOOP_REPEATS = 4
LOOP_TOKENS = 32

_BENCHMARKS = ("humaneval", "gsm8k", "mtbench", "speedbench")
_MT_BENCH = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}


def normalise(text: str) -> str:
    """`text` without case, punctuation and spacing: two prompts that differ in these alone are duplicates."""
    return " ".join(re.findall(r"\w+", unicodedata.normalize("NFKC", text).casefold()))


def digest(turns: Sequence[str]) -> int:
    """63 bits that stand for the user's turns, up to `normalise`."""
    text = "\n".join(normalise(turn) for turn in turns)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def fault(text: str) -> str | None:
    """Why a written prompt is not worth an answer: `empty`, `unprintable` or `repetitive`; None if it is."""
    if len(normalise(text)) < 3:
        return "empty"
    if any(not c.isprintable() and c not in "\n\t" for c in text) or "\ufffd" in text:
        return "unprintable"
    words = normalise(text).split()
    triples = list(zip(words, words[1:], words[2:], strict=False))
    if len(triples) >= 12 and len(set(triples)) < 0.6 * len(triples):
        return "repetitive"
    return None


class LoopWatch:
    """Sees, token by token, when a text has begun to go round in circles.

    A loop is a phrase of at most `MAX_PERIOD` tokens that stands there `LOOP_REPEATS` times in a row, and over at least
    `LOOP_TOKENS` tokens. What follows would teach a drafter only to copy.
    """

    def __init__(self):
        self._tokens: list[int] = []
        self._runs = [0] * (MAX_PERIOD + 1)  # by period: how many of the last tokens equal the one a period before

    def push(self, token: int) -> bool:
        """Take in a token; whether it completes a loop."""
        recent, looped = self._tokens, False
        for period in range(1, min(MAX_PERIOD, len(recent)) + 1):
            if recent[-period] != token:
                self._runs[period] = 0
                continue
            self._runs[period] += 1
            if self._runs[period] >= max(period * (LOOP_REPEATS - 1), LOOP_TOKENS - period):
                looped = True
        recent.append(token)
        return looped


def refuse_benchmarks(path: str | Path) -> None:
    """Refuse a prompt set that drafters are judged on: HumanEval, GSM8K, MT-Bench or SPEED-Bench.

    It is told by its file's name, by a name that a record gives itself, or by the keys of its records.

    Raises:
        ValueError: it is one of them; the message says what gave it away.
    """
    path = Path(path)
    _refuse(path, f"the file is called {path.name!r}", path.name)
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            record = json.loads(line) if line.strip() else {}
            if isinstance(record, dict):
                _refuse_record(path, number, record)


def _refuse_record(path: Path, number: int, record: dict) -> None:
    for key in ("task_id", "source", "dataset", "benchmark", "id", "question_id", "name"):
        if isinstance(record.get(key), str):
            _refuse(path, f"line {number} says {key} {record[key]!r}", record[key])
    if {"canonical_solution", "entry_point"} <= record.keys():
        _refuse(path, f"line {number} has canonical_solution and entry_point", "HumanEval")
    if isinstance(record.get("answer"), str) and re.search(r"^#### ?-?[\d,.]+$", record["answer"], re.MULTILINE):
        _refuse(path, f"the answer of line {number} ends in '####' and a number", "GSM8K")
    if {"question_id", "category", "turns"} <= record.keys() and record["category"] in _MT_BENCH:
        _refuse(path, f"line {number} has question_id, turns and category {record['category']!r}", "MT-Bench")


def _refuse(path: Path, evidence: str, name: str) -> None:
    found = re.sub(r"[\W_]", "", name.casefold())
    if any(benchmark in found for benchmark in _BENCHMARKS):
        raise ValueError(
            f"{path} looks like a benchmark's prompts ({evidence}): HumanEval, GSM8K, MT-Bench and SPEED-Bench are for "
            "judging drafters, and a drafter that has trained on them cannot be judged. Take other prompts"
        )


def held_out(sets: Iterable[Sequence[str]]) -> frozenset[str]:
    """The normalised turns of prompts that no corpus may hold."""
    return frozenset(normalise(turn) for turns in sets for turn in turns)


def overlap(corpus: Corpus, sets: Iterable[Sequence[str]]) -> list[int]:
    """Numbers of the dialogues whose prompt is one of these, as a whole or as a single turn."""
    barred = set()
    for turns in sets:
        barred |= {digest(turns), *(digest([turn]) for turn in turns)}
    return [d.number for d in corpus.dialogues if d.prompt in barred]
