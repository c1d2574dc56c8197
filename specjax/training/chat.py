"""A chat template seen from the inside: where the user's words begin and end, and what follows an answer."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from specjax.weights.tokenizer import Tokenizer

_MARK = "\u2402"  # stands for a message's words; no template prints it by itself


@dataclasses.dataclass(frozen=True)
class UserTurn:
    """The frame that a chat template puts around the user's first words.

    Attributes:
        opening: ids before them: with these a target writes as the user.
        stop_ids: special tokens that end them.
        stop: text that ends them, where no special token does.
    """

    opening: tuple[int, ...]
    stop_ids: tuple[int, ...]
    stop: tuple[str, ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "UserTurn":
        """The frame of a tokenizer's chat template.

        Raises:
            ValueError: there is no chat template, or it rewrites the user's words.
        """
        text = tokenizer.apply_chat_template([{"role": "user", "content": _MARK}], add_generation_prompt=False)
        opening, found, ending = text.partition(_MARK)
        if not found or not ending:
            raise ValueError("this chat template does not show where a user's words end; give prompts with --prompts")
        first = tokenizer.encode(ending, add_special_tokens=False)[0]
        special = tokenizer.decode([first]) == ""
        return cls(
            opening=tuple(tokenizer.encode(opening, add_special_tokens=False)),
            stop_ids=(first,) if special else (),
            stop=() if special else (ending.rstrip() or ending,),
        )


def next_turn(tokenizer: Tokenizer, messages: Sequence[dict[str, Any]], answer: Sequence[int], user: str) -> list[int]:
    """The ids that follow an answer when the user speaks again, up to the header of the next answer.

    An answer that is encoded again from its text need not give the ids that the target wrote. So its ids stay, and
    only what the template puts behind them is added.

    Args:
        tokenizer: with the chat template.
        messages: the dialogue so far, without the answer.
        answer: ids of the answer; an end token at its end is not repeated.
        user: what the user says next.

    Raises:
        ValueError: the template shows earlier turns differently once more follow.
    """
    before = tokenizer.apply_chat_template(messages)
    after = tokenizer.apply_chat_template(
        [*messages, {"role": "assistant", "content": _MARK}, {"role": "user", "content": user}]
    )
    head, found, tail = after.partition(_MARK)
    if not found or head != before:
        raise ValueError("this chat template rewrites earlier turns, so dialogues must have one turn of the user")
    ids = tokenizer.encode(tail, add_special_tokens=False)
    return ids[1:] if answer[-1] in tokenizer.eos_ids and ids[0] == answer[-1] else ids
