"""Prompts as callers write them: text, messages or ids, one or several."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Prompt = str | Sequence[int] | Sequence[dict]


def encode(tokenizer: Any, prompt: Prompt, raw: bool) -> list[int]:
    """Prompt ids: messages and plain text go through the chat template, `raw` text and ids do not.

    Args:
        tokenizer: `specjax.weights.tokenizer.Tokenizer`, or None where prompts are ids.
        prompt: one prompt.
        raw: leave the chat template out.

    Raises:
        ValueError: what is no prompt, is empty, or needs a tokenizer or a template that is not there.
    """
    if not isinstance(prompt, str | Sequence | np.ndarray) or isinstance(prompt, bytes | bytearray):
        raise ValueError(f"a prompt is text, a list of messages or token ids, got {type(prompt).__name__}")
    if not isinstance(prompt, str) and all(is_id(token) for token in prompt):
        return [int(token) for token in prompt]
    if tokenizer is None:
        raise ValueError("this engine has no tokenizer: give prompts as token ids")
    if isinstance(prompt, str):
        if not prompt:
            raise ValueError("the prompt is empty")
        if any("\ud800" <= letter <= "\udfff" for letter in prompt):
            raise ValueError("the prompt is not valid Unicode: it holds half of a surrogate pair")
        if raw:
            return tokenizer.encode(prompt)
        prompt = [{"role": "user", "content": prompt}]
    if not all(isinstance(message, Mapping) for message in prompt):
        raise ValueError("a prompt is text, a list of messages or token ids; this list holds something else")
    return tokenizer.encode_chat(prompt)


def is_single(prompts: Any) -> bool:
    """Whether this is one prompt: text, ids, or messages."""
    if isinstance(prompts, str):
        return True
    if not isinstance(prompts, Sequence | np.ndarray) or isinstance(prompts, bytes | bytearray):
        return True  # and refused by what reads it
    return len(prompts) > 0 and (is_id(prompts[0]) or isinstance(prompts[0], Mapping))


def is_id(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
