"""Writes a corpus: in order, in whole shards, and so that nothing finished is lost when the process dies."""

import dataclasses
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from specjax.training.corpus import (
    FORMAT,
    MANIFEST,
    Dialogue,
    Origin,
    check_origin,
    read_manifest,
    read_shard,
    write_shard,
    write_whole,
)


class Writer:
    """Adds dialogues to a corpus, in the order of their numbers, until it holds enough of them.

    Dialogues may be handed over in any order: what comes early waits in `pending.jsonl`. So which dialogues a corpus
    holds depends on their numbers alone, not on when they were finished or how often the work was interrupted.

    Args:
        path: the folder; made if it does not exist.
        origin: the target that writes.
        recipe: whatever decides what is written (seeds, temperatures, lengths), as JSON values. A corpus goes on under
            its own recipe only.
        answer_tokens: enough; the dialogue that reaches it is the last one.
        shard_tokens: tokens of a shard, at least.

    Attributes:
        manifest: as on disk.
        answer_tokens: of the dialogues so far that are next in order.
        goal: enough answer tokens.

    Raises:
        ValueError: the folder holds the corpus of another target or of another recipe, or something else, or another
            process is writing it.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        origin: Origin,
        recipe: Mapping[str, Any],
        answer_tokens: int,
        shard_tokens: int = 65536,
    ):
        self.folder, self.goal, self._shard_tokens = Path(path), answer_tokens, shard_tokens
        self._lock = _lock(self.folder)
        try:
            self.manifest = _opened(self.folder, origin, json.loads(json.dumps(recipe)))
        except BaseException:
            os.close(self._lock)
            raise
        self._number = self.manifest["tried"]  # all below are in order
        self.answer_tokens = sum(shard["answer_tokens"] for shard in self.manifest["shards"])
        self._shards = list(self.manifest["shards"])  # full ones
        self._next: list[Dialogue] = []  # in order, and in no full shard yet
        if self._shards and self._shards[-1]["tokens"] < shard_tokens:
            self._next = read_shard(self.folder, self._shards.pop(), self._vocab_size)
        self._dropped = dict(self.manifest["dropped"])
        self._waiting = dict(_read_journal(self._journal, self._number))
        self._rewrite_journal()
        self._advance()

    @property
    def done(self) -> bool:
        """Whether the corpus holds enough."""
        return self.answer_tokens >= self.goal

    @property
    def dialogues(self) -> int:
        """Dialogues so far that are next in order."""
        return sum(shard["dialogues"] for shard in self._shards) + len(self._next)

    def settled(self, number: int) -> bool:
        """Whether the dialogue of this number was added or dropped already."""
        return number < self._number or number in self._waiting

    def kept(self) -> dict[int, int]:
        """The digest of the prompt of every dialogue that was added, by its number."""
        sealed = (d for shard in self._shards for d in read_shard(self.folder, shard, self._vocab_size))
        waiting = (d for d in self._waiting.values() if isinstance(d, Dialogue))
        return {d.number: d.prompt for group in (sealed, self._next, waiting) for d in group}

    def add(self, dialogue: Dialogue) -> None:
        """Keep a finished dialogue; on return it survives the end of the process."""
        self._note(dialogue.number, dialogue)

    def drop(self, number: int, reason: str) -> None:
        """Keep that there is no dialogue of this number, and why."""
        self._note(number, _Dropped(number, reason))

    def close(self) -> None:
        """Write the dialogues that are next in order into a last, short shard; what came early waits unless `done`."""
        if self._number > self.manifest["tried"]:
            self._write_manifest()
        if self.done or not self._waiting:
            self._journal.unlink(missing_ok=True)
        os.close(self._lock)

    # ---------------------------------------------------------------- inside

    @property
    def _journal(self) -> Path:
        return self.folder / "pending.jsonl"

    @property
    def _vocab_size(self) -> int:
        return self.manifest["origin"]["vocab_size"]

    def _note(self, number: int, what: "Dialogue | _Dropped") -> None:
        if self.settled(number):
            raise ValueError(f"dialogue {number} is settled already")
        with open(self._journal, "a", encoding="utf-8") as file:
            file.write(_journal_line(what))
        self._waiting[number] = what
        self._advance()

    def _advance(self) -> None:
        """Take what is next in order; write a shard when there is enough for one."""
        while not self.done and self._number in self._waiting:
            what = self._waiting.pop(self._number)
            self._number += 1
            if isinstance(what, _Dropped):
                self._dropped[what.reason] = self._dropped.get(what.reason, 0) + 1
            else:
                self._next.append(what)
                self.answer_tokens += int(what.mask.sum())
            if sum(len(d.tokens) for d in self._next) >= self._shard_tokens:
                self._write_manifest()
                self._shards, self._next = self.manifest["shards"], []

    def _write_manifest(self) -> None:
        """Write what is next in order as a shard, in the place of a short one, and then the manifest that names it."""
        shards = list(self._shards)
        if self._next:
            shards.append(write_shard(self.folder, len(shards), self._next, self._vocab_size))
        self.manifest |= {"tried": self._number, "dropped": self._dropped, "shards": shards}
        write_whole(self.folder / MANIFEST, (json.dumps(self.manifest, indent=2) + "\n").encode())
        named = {shard["file"] for shard in shards}
        for path in self.folder.glob("shard-*"):
            if path.name not in named:
                path.unlink()
        self._rewrite_journal()

    def _rewrite_journal(self) -> None:
        write_whole(self._journal, "".join(map(_journal_line, self._waiting.values())).encode())


@dataclasses.dataclass(frozen=True)
class _Dropped:
    number: int
    reason: str


def _lock(folder: Path) -> int:
    """Make the folder, and keep other writers out of it until the descriptor is closed or the process ends."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise ValueError(f"{folder} is being written by another process: wait for it, or stop it") from None
    return descriptor


def _opened(folder: Path, origin: Origin, recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest of a corpus to go on with, or of a new one."""
    if (folder / MANIFEST).exists():
        manifest = read_manifest(folder)
        check_origin(folder, Origin(**manifest["origin"]), origin)
        old = manifest["recipe"]
        changed = [k for k in {**old, **recipe} if old.get(k) != recipe.get(k)]
        if changed:
            faults = "; ".join(f"{k}: {old.get(k)!r} there, {recipe.get(k)!r} now" for k in changed)
            raise ValueError(f"{folder} was begun in another way ({faults}): repeat its options or name another folder")
        return manifest
    if any(folder.iterdir()):
        raise ValueError(f"{folder} exists and holds no corpus; name a folder that does not exist yet")
    manifest = {"format": FORMAT, "origin": dataclasses.asdict(origin), "recipe": recipe}
    manifest |= {"tried": 0, "dropped": {}, "shards": []}
    write_whole(folder / MANIFEST, (json.dumps(manifest, indent=2) + "\n").encode())
    return manifest


def _journal_line(what: "Dialogue | _Dropped") -> str:
    record = dataclasses.asdict(what)
    if isinstance(what, Dialogue):
        record |= {"tokens": what.tokens.tolist(), "mask": what.mask.astype(int).tolist()}
    return json.dumps(record) + "\n"


def _read_journal(path: Path, first: int) -> Iterator[tuple[int, "Dialogue | _Dropped"]]:
    """What waits from number `first` on; a last line that was cut in the middle is none."""
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if not line.endswith("\n"):
            return
        record = json.loads(line)
        if record["number"] < first:
            continue
        if "reason" in record:
            yield record["number"], _Dropped(**record)
        else:
            record |= {"tokens": np.array(record["tokens"], np.int32), "mask": np.array(record["mask"], bool)}
            yield record["number"], Dialogue(**record)
