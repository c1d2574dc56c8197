"""Prompt sets: JSONL with `turns`, `messages` or `prompt`, and an optional `category`; and how they are answered."""

import dataclasses
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specjax.engine.engine import Engine
    from specjax.engine.request import Result
    from specjax.sampling import SamplingParams

UNNAMED = "all"


@dataclasses.dataclass(frozen=True)
class Conversation:
    """One line of a prompt set.

    Attributes:
        turns: what the user says; each turn but the first follows the model's answer to the one before.
        before: messages that stand before the first turn.
        category: the line's group in reports.
        line: where it stands in its file, from 1; 0 for one of no file.
    """

    turns: tuple[str, ...]
    before: tuple[dict[str, Any], ...] = ()
    category: str = UNNAMED
    line: int = 0


def read(path: str | Path) -> list[Conversation]:
    """Read a JSONL prompt set; other keys of a line (ids, references) are left alone, those of sampling refused.

    Raises:
        ValueError: the file cannot be read, or its faulty lines, all listed.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the prompts: {error}") from None
    found, faults = [], []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            found.append(dataclasses.replace(_conversation(json.loads(line)), line=number))
        except ValueError as error:
            faults.append(f"{path}:{number}: {error}")
    if faults:
        raise ValueError("\n".join(faults))
    if not found:
        raise ValueError(f"{path} holds no prompts")
    return found


def answer(
    engine: "Engine",
    conversations: Sequence[Conversation],
    params: "SamplingParams",
    *,
    raw: bool = False,
    seeds: Sequence[int | None] | None = None,
) -> list[list["Result"]]:
    """Decode every turn of every conversation, as many at a time as the engine's batch holds.

    Args:
        engine: what decodes.
        conversations: from `read`.
        params: of every request.
        raw: prompts go in as they are, without the chat template; only for a single turn.
        seeds: one a conversation, in place of the one of `params`.

    Returns:
        For each conversation, the results of its turns.

    Raises:
        ValueError: `raw` with several turns or with messages.
    """
    _check_raw(conversations, raw)
    own = [params if seeds is None else dataclasses.replace(params, seed=seeds[i]) for i in range(len(conversations))]
    histories = [list(c.before) for c in conversations]
    results: list[list[Result]] = [[] for _ in conversations]
    for turn in range(max(len(c.turns) for c in conversations)):
        going = [i for i, c in enumerate(conversations) if turn < len(c.turns)]
        for i in going:
            histories[i].append({"role": "user", "content": conversations[i].turns[turn]})
        prompts = [conversations[i].turns[turn] if raw else list(histories[i]) for i in going]
        for i, result in zip(going, engine.generate(prompts, [own[i] for i in going], raw=raw), strict=True):
            results[i].append(result)
            histories[i].append({"role": "assistant", "content": result.text})
    return results


def answered(
    engine: "Engine", conversations: Sequence[Conversation], params: "SamplingParams", *, raw: bool = False
) -> Iterator[tuple[Conversation, int, "Result"]]:
    """As `answer`, each as soon as it and all before it are there: the conversation, the turn from 1, the result."""
    _check_raw(conversations, raw)
    if all(len(c.turns) == 1 for c in conversations):
        texts = [_first(conversation, raw) for conversation in conversations]
        for conversation, result in zip(conversations, engine.results(texts, params, raw=raw), strict=True):
            yield conversation, 1, result
        return
    for group in itertools.batched(conversations, engine.config.batch):
        for conversation, turns in zip(group, answer(engine, group, params), strict=True):
            for number, result in enumerate(turns, start=1):
                yield conversation, number, result


def check(
    engine: "Engine", conversations: Sequence[Conversation], params: "SamplingParams", *, raw: bool = False
) -> None:
    """Refuse what the engine would: the first turn of each conversation, and parameters.

    Raises:
        ValueError: with the line of the file, where there are several.
    """
    _check_raw(conversations, raw)
    for conversation in conversations:
        try:
            engine.check(_first(conversation, raw), params, raw=raw)
        except ValueError as error:
            raise ValueError(f"line {conversation.line}: {error}" if conversation.line else str(error)) from None


def _first(conversation: Conversation, raw: bool) -> Any:
    text = conversation.turns[0]
    return text if raw else [*conversation.before, {"role": "user", "content": text}]


def _check_raw(conversations: Sequence[Conversation], raw: bool) -> None:
    if raw and any(len(c.turns) != 1 or c.before for c in conversations):
        raise ValueError("raw prompts have no turns: leave --raw out for prompts with several turns or messages")


def _sampling() -> set[str]:
    from specjax.sampling import SamplingParams

    return {field.name for field in dataclasses.fields(SamplingParams)}


def _conversation(record: Any) -> Conversation:
    if not isinstance(record, dict):
        raise ValueError("a line must be a JSON object")
    if own := sorted(record.keys() & _sampling()):
        raise ValueError(f"{', '.join(own)} cannot be set for one line: give sampling parameters for all, as flags")
    given = [key for key in ("turns", "messages", "prompt") if key in record]
    if len(given) != 1:
        raise ValueError(f"a line needs exactly one of turns, messages and prompt, got {given or 'none'}")
    category = record.get("category", UNNAMED)
    if not isinstance(category, str):
        raise ValueError(f"category must be a string, got {category!r}")
    if given == ["messages"]:
        return _from_messages(record["messages"], category)
    turns = record["turns"] if given == ["turns"] else [record["prompt"]]
    if not isinstance(turns, list) or not all(isinstance(turn, str) for turn in turns):
        raise ValueError(f"{given[0]} must hold text, got {turns!r}")
    turns = tuple(turn for turn in turns if turn.strip())  # published sets ship placeholders
    if not turns:
        raise ValueError(f"{given[0]} holds no text")
    return Conversation(turns, category=category)


def _from_messages(messages: Any, category: str) -> Conversation:
    shaped = isinstance(messages, list) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in messages
    )
    if not shaped or not messages or messages[-1]["role"] != "user":
        raise ValueError("messages must be a list of role and content, the last one the user's")
    return Conversation((messages[-1]["content"],), tuple(messages[:-1]), category)
