"""Dialogues packed into rows of one length, so that one compiled step serves a whole corpus.

A row holds several dialogues, one after another. They are *segments*: none sees another, and each counts its positions
from 0. No dialogue is split; one that is longer than a row is cut at its end.
"""

import dataclasses
import hashlib

import jax.numpy as jnp
import numpy as np

from specjax.array_types import Array, Bool, Int, pytree
from specjax.training.corpus import Corpus


@pytree
class Batch:
    """Some packed rows.

    Attributes:
        tokens: token ids; 0 behind a row's last dialogue.
        mask: tokens that the target wrote, the ones to learn.
        segments: number of a token's dialogue within its row, from 1; 0 is padding.
        positions: position of a token within its dialogue.
    """

    tokens: Int[Array, "b t"]
    mask: Bool[Array, "b t"]
    segments: Int[Array, "b t"]
    positions: Int[Array, "b t"]

    def ahead(self, steps: int) -> Bool[Array, "b t"]:
        """Whether the token `steps` after each one is of the same dialogue and is to be learned."""
        same = self.segments[:, : self.segments.shape[1] - steps] == self.segments[:, steps:]
        return jnp.pad(same & self.mask[:, steps:] & (self.segments[:, steps:] > 0), ((0, 0), (0, steps)))


@dataclasses.dataclass(frozen=True, eq=False)
class Packed:
    """All rows of a corpus, in host memory; the fields are those of `Batch`, `[rows, t]`."""

    tokens: np.ndarray
    mask: np.ndarray
    segments: np.ndarray
    positions: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def length(self) -> int:
        return self.tokens.shape[1]

    def batch(self, rows: np.ndarray) -> Batch:
        """The rows of these numbers."""
        return Batch(**{field.name: getattr(self, field.name)[rows] for field in dataclasses.fields(self)})

    def some(self, count: int) -> "Packed":
        """At most `count` rows, at even distances."""
        rows = np.unique(np.linspace(0, len(self) - 1, min(count, len(self))).astype(int))
        return Packed(**{field.name: getattr(self, field.name)[rows] for field in dataclasses.fields(self)})

    def whole(self) -> "Packed":
        """The same rows with every token to be learned, those of prompts too."""
        return dataclasses.replace(self, mask=self.segments > 0)

    def digest(self) -> str:
        """A fingerprint of the contents."""
        found = hashlib.sha256()
        for field in dataclasses.fields(self):
            found.update(np.ascontiguousarray(getattr(self, field.name)).tobytes())
        return found.hexdigest()


def pack(corpus: Corpus, length: int) -> Packed:
    """Pack a corpus into rows of `length` tokens, the longest dialogues first, each into the first row with room.

    Raises:
        ValueError: an empty corpus, or one without a token to learn.
    """
    if len(corpus) == 0:
        raise ValueError("the corpus is empty")
    dialogues = [(tokens[:length], mask[:length]) for tokens, mask in (corpus[i] for i in range(len(corpus)))]
    order = sorted(range(len(dialogues)), key=lambda i: -len(dialogues[i][0]))
    room = np.full((len(dialogues),), length)
    count = np.zeros((len(dialogues),), np.int32)
    out = Packed(
        tokens=np.zeros((len(dialogues), length), np.int32),
        mask=np.zeros((len(dialogues), length), bool),
        segments=np.zeros((len(dialogues), length), np.int32),
        positions=np.zeros((len(dialogues), length), np.int32),
    )
    for tokens, mask in (dialogues[i] for i in order):
        row = int(np.argmax(room >= len(tokens)))
        start = length - room[row]
        span = slice(start, start + len(tokens))
        count[row] += 1
        out.tokens[row, span], out.mask[row, span] = tokens, mask
        out.segments[row, span], out.positions[row, span] = count[row], np.arange(len(tokens))
        room[row] -= len(tokens)
    used = int(np.count_nonzero(count))
    out = Packed(**{field.name: getattr(out, field.name)[:used] for field in dataclasses.fields(out)})
    if not out.mask.any():
        raise ValueError("the corpus has no token to learn: its loss masks are empty")
    return out


def rows_of_step(count: int, batch: int, step: int, seed: int) -> np.ndarray:
    """The rows that a step trains on: every epoch goes through all rows in an order of its own.

    A pure function of its arguments, so the data position of a run is its step number. A last, smaller batch of an
    epoch is left out; with fewer rows than a batch, some rows come twice.
    """
    per_epoch = max(count // batch, 1)
    epoch, place = divmod(step, per_epoch)
    order = np.random.default_rng((seed, epoch)).permutation(count)
    return np.resize(order, max(count, batch))[place * batch : (place + 1) * batch]
