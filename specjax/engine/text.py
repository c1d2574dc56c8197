"""Tokens to text on the host: characters split over tokens, and stop strings split over tokens, pieces or rounds.

Tokens are taken one at a time whatever the size of a push, so the text, the kept tokens and the finish of a request do
not depend on how many tokens a round emits: streamed text joined is the text that is not streamed.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from specjax.sampling import SamplingParams

REPLACEMENT = "\ufffd"  # what a decoder shows for bytes that are no character, or none yet


class Decoder(Protocol):
    """A tokenizer, as far as text needs one: `tokenizers.Tokenizer` and transformers' tokenizers both are."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str: ...


@dataclasses.dataclass(frozen=True)
class TextDelta:
    """What one push added.

    Attributes:
        text: new text that no later token can take back.
        token_ids: the pushed tokens that count; those behind the one that completes a stop string are gone.
        finished: whether a stop string has ended the request.
        stop: the stop string that did.
    """

    text: str
    token_ids: list[int]
    finished: bool = False
    stop: str | None = None


class TextStream:
    """The text of one request, as it grows.

    Args:
        tokenizer: decodes token ids; special tokens give no text.
        stop: strings that end the request. The one that is complete first wins, and of two that complete together the
            longer one. It ends the text, which holds it only if `include_stop`.
        include_stop: keep the stop string, or the text of an ending token, in the text.
        min_tokens: a stop string completed by an earlier token than this is plain text.
        stop_token_ids: tokens that end the request; the engine stops at them, here they only give no text.

    Raises:
        ValueError: an empty stop string.
    """

    def __init__(
        self,
        tokenizer: Decoder,
        stop: Sequence[str] = (),
        *,
        include_stop: bool = False,
        min_tokens: int = 0,
        stop_token_ids: Iterable[int] = (),
    ):
        if "" in stop:
            raise ValueError("a stop string must not be empty: it would end every request before its first token")
        self._pieces = _Pieces(tokenizer)
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._silent = frozenset(() if include_stop else stop_token_ids)
        self._held = ""  # text that may be the beginning of a stop string
        self._count = 0
        self._matched: str | None = None

    @classmethod
    def of(cls, tokenizer: Any, params: "SamplingParams") -> "TextStream":
        """The text of a request with some parameters; without a tokenizer it has none."""
        if tokenizer is None:
            return cls(NoText())
        return cls(
            tokenizer.backend,
            params.stop,
            include_stop=params.include_stop,
            min_tokens=params.min_tokens,
            stop_token_ids=params.stop_token_ids,
        )

    def push(self, ids: Iterable[int]) -> TextDelta:
        """Take in the tokens of a round, of a chunk or of a whole answer."""
        text, kept = "", []
        for token in ids:
            if self._matched is not None:
                break
            kept.append(token)
            self._count += 1
            if token not in self._silent:
                text += self._release(self._pieces.push(token))
        return TextDelta(text, kept, self._matched is not None, self._matched)

    def finish(self) -> str:
        """The held tail of a request that ended otherwise. A character that was cut in the middle stays away."""
        text, self._held = self._held, ""
        return text

    def _release(self, piece: str) -> str:
        """Add `piece`; return what is certain now."""
        if not self._stop or not piece:
            return piece
        old = len(self._held)
        self._held += piece
        if self._count >= self._min_tokens:
            # A match is new only if it ends in the new piece: an earlier one was completed too early to count.
            starts = [(self._held.find(stop, max(0, old + 1 - len(stop))), stop) for stop in self._stop]
            ends = [(at + len(stop), -len(stop), stop) for at, stop in starts if at >= 0]
            if ends:
                end, _, self._matched = min(ends)
                text, self._held = self._held[: end if self._include_stop else end - len(self._matched)], ""
                return text
        certain = len(self._held) - max(_overlap(self._held, stop) for stop in self._stop)
        text, self._held = self._held[:certain], self._held[certain:]
        return text


class _Pieces:
    """Token by token decoding, in windows: a decoder's treatment of a token depends on the one before it.

    The window starts one piece before the tokens that are new, so that a SentencePiece decoder, which drops the blank
    of the first word, drops it in what is known already. Trailing replacement characters may be the beginning of a
    character and wait; where the next tokens show that they are none, they are released with what follows.
    """

    def __init__(self, tokenizer: Decoder):
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._old = 0  # tokens of the window that the last clean piece ended with
        self._shown = 0  # characters of the window's text that are out

    def push(self, token: int) -> str:
        self._window.append(token)
        text = self._decode(self._window)
        certain = text.rstrip(REPLACEMENT)
        piece = certain[self._shown :]
        self._shown = max(self._shown, len(certain))
        if piece and len(certain) == len(text):
            self._window = self._window[self._old :]
            self._old, self._shown = len(self._window), len(self._decode(self._window))
        return piece

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of `text` that begin `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


class NoText:
    """Stands in where an engine has no tokenizer."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        del ids, skip_special_tokens
        return ""
