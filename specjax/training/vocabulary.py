"""The tokens that a training step scores.

A full softmax over a large vocabulary costs more than a small drafter. A step scores some of it instead: tokens that
are frequent in the corpus, all tokens of its own batch, and a fresh random sample of the others, whose logits are
raised by the log of how many tokens each of them stands for. The partition function is then right on average.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np

from specjax.array_types import Array, Float, Int, pytree
from specjax.targets.layers import project


@pytree
class Columns:
    """The tokens that a step scores, ascending.

    Attributes:
        ids: the tokens; all of them where `offset` is None.
        offset: added to each token's logit, the target's and the drafter's alike.
    """

    ids: Int[Array, " c"]
    offset: Float[Array, " c"] | None

    def find(self, tokens: Int[Array, "*n"]) -> Int[Array, "*n"]:
        """The columns of tokens, which must be among them."""
        return tokens if self.offset is None else jnp.searchsorted(self.ids, tokens).astype(jnp.int32)

    def rows(self, table: Float[Array, "v d"]) -> Float[Array, "c d"]:
        """The rows of a table for these tokens."""
        return table if self.offset is None else table[self.ids]

    def logits(self, head: Float[Array, "c d"], hidden: Float[Array, "*n d"]) -> Float[Array, "*n c"]:
        """Float32 logits of hidden rows, by the head's rows for these tokens."""
        flat = project(head, hidden.reshape(-1, hidden.shape[-1]).astype(head.dtype), out_dtype=jnp.float32)
        return self.shifted(flat.reshape(*hidden.shape[:-1], -1))

    def shifted(self, logits: Float[Array, "*n c"]) -> Float[Array, "*n c"]:
        """Logits of these tokens with their offsets."""
        return logits if self.offset is None else logits + self.offset


@dataclasses.dataclass(frozen=True, eq=False)
class Chooser:
    """Chooses the columns of each step.

    Attributes:
        counts: how often each token of the vocabulary is to be learned in the corpus.
        size: columns; at least the vocabulary: all tokens, always.
    """

    counts: np.ndarray
    size: int

    def columns(self, tokens: np.ndarray, rng: np.random.Generator) -> Columns:
        """The columns for a batch: half of them frequent tokens, then the batch's own, the rest at random.

        Raises:
            ValueError: the batch has more different tokens than there are columns for.
        """
        vocab = len(self.counts)
        if self.size >= vocab:
            return Columns(ids=np.arange(vocab, dtype=np.int32), offset=None)
        chosen = np.zeros((vocab,), bool)
        chosen[np.argsort(-self.counts, kind="stable")[: self.size // 2]] = True
        chosen[tokens.reshape(-1)] = True
        room = self.size - int(chosen.sum())
        if room < 1:
            raise ValueError(
                f"a batch has so many different tokens that {self.size} columns cannot hold them beside the frequent "
                "ones: raise vocabulary"
            )
        others = np.flatnonzero(~chosen)
        sample = rng.choice(others, room, replace=False)
        offset = np.zeros((vocab,), np.float32)
        offset[sample] = np.log(len(others) / room)
        chosen[sample] = True
        ids = np.flatnonzero(chosen).astype(np.int32)
        return Columns(ids=ids, offset=offset[ids])
