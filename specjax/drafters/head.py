"""The output head that all learned drafters share: hidden rows to scored target tokens.

A head scores *columns*: every token of the draft vocabulary, or, with a low-rank candidate head, the C tokens that
`(y D^T) E^T` puts highest (the preview idea of SVD-softmax, Shim et al., NIPS 2017). The low-rank scores select and are
never probabilities: the logits of the C are exact, from the real head's rows. `ids` says which target token a column
is; where the draft vocabulary is the target's, there is nothing to map and nothing is mapped.
"""

import dataclasses
import functools
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import sampling
from specjax.array_types import Array, Float, Int, pytree
from specjax.drafters.config import HeadConfig
from specjax.sampling import SamplingState
from specjax.targets.layers import project

GROUP = 64  # columns of a group of `best_columns`
GRAM_ROWS = 8192  # head rows that `svd_factors` widens to float64 at once


@pytree
class Scores:
    """Float32 logits of the columns of some rows.

    Attributes:
        logits: one logit a column.
        ids: target token of each column: for all rows, for each row, or None where column i is token i.
        columns: which tokens of the draft vocabulary they are, where a candidate head has chosen; None for all.
    """

    logits: Float[Array, "*rows c"]
    ids: Int[Array, " c"] | Int[Array, "*rows c"] | None
    columns: Int[Array, "*rows c"] | None = None

    def tokens(self, columns: Int[Array, "*rows k"]) -> Int[Array, "*rows k"]:
        """Target tokens of columns, `k` of each row."""
        if self.ids is None:
            return columns
        if self.ids.ndim == 1:
            return self.ids[columns]
        return jnp.take_along_axis(self.ids, columns, axis=-1)

    def best(self) -> Int[Array, "*rows"]:
        """The target token of the largest logit; the first column on ties."""
        return self.tokens(sampling.argmax(self.logits)[..., None])[..., 0]

    def sureness(self) -> Float[Array, "*rows"]:
        """The chance of the best token, among the columns."""
        return jnp.exp(jnp.max(self.logits, axis=-1) - jax.nn.logsumexp(self.logits, axis=-1))

    def top(self, k: int) -> tuple[Int[Array, "*rows k"], Float[Array, "*rows k"]]:
        """The `k` best target tokens, best first, and their log-probabilities among the columns."""
        best, columns = jax.lax.top_k(jax.nn.log_softmax(self.logits), k)
        return self.tokens(columns), best

    def spread(self, q: Float[Array, "*rows c"], vocab_size: int) -> Float[Array, "*rows v"]:
        """A distribution over columns as one over the target's vocabulary; 0 where there is no column."""
        if self.ids is None:
            return q
        empty = jnp.zeros((*q.shape[:-1], vocab_size), q.dtype)
        if self.ids.ndim == 1:
            return empty.at[..., self.ids].set(q, unique_indices=True)
        return jnp.put_along_axis(empty, self.ids, q, axis=-1, inplace=False)


@dataclasses.dataclass(frozen=True)
class Head:
    """The static half of a head. `params` holds `weight` and, where there are such, `ids`, `down` and `up`.

    Attributes:
        vocab_size: tokens of the target.
        columns: tokens of the draft vocabulary.
        multiplier: factor on logits.
        softcap: logits become `cap * tanh(logits / cap)`, None for as they are.
        candidates: tokens that the low-rank scores select, 0 to score every token.
    """

    vocab_size: int
    columns: int
    multiplier: float = 1.0
    softcap: float | None = None
    candidates: int = 0

    @property
    def width(self) -> int:
        """Columns that are scored."""
        return self.candidates or self.columns

    def scores(self, params: Any, hidden: Float[Array, "*rows d"]) -> Scores:
        """Score the columns of hidden rows (after the drafter's final norm)."""
        rows = hidden.reshape(-1, hidden.shape[-1])
        if self.candidates:
            logits, columns = self._candidates(params, rows)
            columns = columns.reshape(*hidden.shape[:-1], -1)
            ids = params["ids"][columns] if "ids" in params else columns
        else:
            logits, columns = project(params["weight"], rows, out_dtype=jnp.float32), None
            ids = params.get("ids")
        return Scores(logits=self._shaped(logits).reshape(*hidden.shape[:-1], -1), ids=ids, columns=columns)

    def full_scores(self, params: Any, hidden: Float[Array, "*rows d"]) -> Scores:
        """The scores of every token of the draft vocabulary, whether or not there is a candidate head."""
        return dataclasses.replace(self, candidates=0).scores(params, hidden)

    def distribution(self, scores: Scores, state: SamplingState) -> Float[Array, "b n c"]:
        """What each request's parameters make of the scores of its rows `[b, n, c]`: the drafter's q, over columns."""

        def each(values: Array) -> Array:
            return jnp.broadcast_to(values[:, None], scores.logits.shape[:-1])

        filters = (each(x) for x in (state.temperature, state.top_k, state.top_p, state.min_p))
        return sampling.draft_distribution(scores.logits, *filters)

    def _candidates(self, params: Any, rows: Float[Array, "N d"]) -> tuple[Array, Array]:
        """Exact logits of the candidates of each row, and their columns in ascending order."""
        preview = project(params["up"], project(params["down"], rows), out_dtype=jnp.float32)
        columns = jnp.sort(best_columns(preview, self.candidates), axis=-1)
        logits = jnp.einsum("nd,ncd->nc", rows, params["weight"][columns], preferred_element_type=jnp.float32)
        return logits, columns

    def _shaped(self, logits: Array) -> Array:
        if self.multiplier != 1.0:
            logits = logits * self.multiplier
        return logits if self.softcap is None else self.softcap * jnp.tanh(logits / self.softcap)


def build_head(
    config: HeadConfig, tensors: Mapping[str, np.ndarray], target_params: Any, dtype: Any
) -> tuple[Head, dict[str, Array]]:
    """A drafter's head: its own or the target's, which is referred to and not copied.

    A reduced draft vocabulary without a head of its own takes its rows of the target's. Where the configuration asks
    for a candidate head, its factors are those of the file, `down` and `up`; or `down` and the full head times `lift`,
    which is what training stores; or, where the file has none, they are factored from the full head.

    Raises:
        ValueError: the d2t table does not fit the vocabularies, or there are fewer tokens than candidates.
    """
    ids = check_d2t(tensors.get("d2t"), tensors.get("t2d"), config.draft_vocab_size, config.vocab_size)
    if config.own_head:
        weight = jnp.asarray(tensors["lm_head.weight"], dtype)
    else:
        weight = target_params["head"]["weight"] if "head" in target_params else target_params["embedding"]
        weight = weight if ids is None else weight[ids]
    params = {"weight": weight}
    if ids is not None:
        params["ids"] = jnp.asarray(ids)
    candidates = config.head_candidates if config.head_rank else 0
    if candidates:
        if candidates > config.draft_vocab_size:
            raise ValueError(
                f"{candidates} head candidates of a draft vocabulary of {config.draft_vocab_size}: take fewer"
            )
        down, up, lift = (tensors.get(f"candidate_head.{name}.weight") for name in ("down", "up", "lift"))
        if down is None and up is None and lift is None:
            down, up = svd_factors(np.asarray(weight), config.head_rank)
        elif down is None or (up is None) == (lift is None):
            raise ValueError(
                "a candidate head is `down` with `up`, or `down` with `lift`; this file has another part of them"
            )
        elif up is None:
            up = project(jnp.asarray(lift, dtype).T, weight, out_dtype=jnp.float32)
        params |= {"down": jnp.asarray(down, dtype), "up": jnp.asarray(up, dtype)}
    head = Head(
        vocab_size=config.vocab_size,
        columns=config.draft_vocab_size,
        multiplier=config.output_multiplier,
        softcap=config.logit_softcap,
        candidates=candidates,
    )
    return head, params


def check_d2t(d2t: np.ndarray | None, t2d: np.ndarray | None, draft_vocab: int, vocab: int) -> np.ndarray | None:
    """The target token of each draft token, or None where they are the same.

    Args:
        d2t: `target id - draft id` of each draft token, as the published formats store it.
        t2d: whether each target token is in the draft vocabulary, if the file says so.
        draft_vocab: tokens of the draft vocabulary.
        vocab: tokens of the target.

    Raises:
        ValueError: no table although the sizes differ, a table of another length or with ids that are out of range or
            not ascending, or a `t2d` that contradicts it.
    """
    if d2t is None:
        if draft_vocab != vocab:
            raise ValueError(
                f"the draft vocabulary has {draft_vocab} tokens and the target's has {vocab}, but there is no d2t "
                "table that maps one to the other: the checkpoint is incomplete"
            )
        return None
    d2t = np.asarray(d2t).astype(np.int64)
    if d2t.shape != (draft_vocab,):
        raise ValueError(f"d2t has shape {d2t.shape}, the draft vocabulary {draft_vocab} tokens: they must agree")
    ids = np.arange(draft_vocab) + d2t
    if ids.min() < 0 or ids.max() >= vocab:
        raise ValueError(
            f"d2t maps to target ids {ids.min()}..{ids.max()}, the target has 0..{vocab - 1}: d2t must hold offsets "
            "(target id - draft id)"
        )
    if len(np.unique(ids)) != draft_vocab:
        raise ValueError(
            f"d2t maps {draft_vocab} draft tokens to {len(np.unique(ids))} different target ids: each must have its own"
        )
    if t2d is not None:
        member = np.asarray(t2d).astype(bool)
        want = np.zeros((vocab,), bool)
        want[ids] = True
        if member.shape != want.shape or (member != want).any():
            raise ValueError(
                f"t2d marks {int(member.sum())} of {member.size} target ids, d2t maps to {draft_vocab} of {vocab}, "
                "and they are not the same ids: one of the two tables is damaged"
            )
    if draft_vocab == vocab:
        return None
    if not d2t.any():
        warnings.warn(
            f"d2t is all zeros: the drafter can propose the target ids 0..{draft_vocab - 1} of {vocab} only",
            stacklevel=2,
        )
    return ids.astype(np.int32)


def best_columns(scores: Float[Array, "N c"], count: int) -> Int[Array, "N k"]:
    """The `count` best columns of each row, in no order; on a TPU, 99 in 100 of them (see there)."""
    return jax.lax.platform_dependent(
        scores,
        tpu=functools.partial(nearly_best_columns, count=count),
        default=functools.partial(_best_columns, count=count),
    )


def nearly_best_columns(scores: Float[Array, "N c"], count: int) -> Int[Array, "N k"]:
    """Columns among which 99 in 100 of the best are expected, in one pass over the scores (Chern et al. 2022).

    A TPU gathers groups of columns slowly, and has this as an operation of its own: compiled for v6e, 64 of 128,256
    columns for 8 rows take 3.5 us instead of 115, by the compiler's estimate.
    """
    return jax.lax.approx_max_k(scores, count, recall_target=0.99)[1]


def _best_columns(scores: Float[Array, "N c"], count: int) -> Int[Array, "N k"]:
    """They lie in the `count` groups of columns with the best maxima.

    A maximum of each group and two small selections take a quarter of the time of one over a large vocabulary.
    """
    rows, columns = scores.shape
    groups = -(-columns // GROUP)
    if groups <= 2 * count:
        return jax.lax.top_k(scores, count)[1]
    padded = jnp.pad(scores, ((0, 0), (0, groups * GROUP - columns)), constant_values=-jnp.inf)
    _, best = jax.lax.top_k(jnp.max(padded.reshape(rows, groups, GROUP), axis=-1), count)
    few = (best[:, :, None] * GROUP + jnp.arange(GROUP)).reshape(rows, -1)
    _, place = jax.lax.top_k(jnp.take_along_axis(padded, few, axis=1), count)
    return jnp.take_along_axis(few, place, axis=1)


def svd_factors(head: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """The best rank-`rank` factors of a head `[v, d]`: `down [rank, d]` and `up [v, rank]`, in float32.

    `up @ down` is the truncated singular value decomposition, found from the `d x d` Gram matrix: `down` are the
    leading right singular vectors, `up` is the head seen along them.
    """
    if not 0 < rank <= head.shape[1]:
        raise ValueError(f"the rank of a candidate head must be in 1..{head.shape[1]} (the head's width), got {rank}")
    gram = np.zeros((head.shape[1], head.shape[1]), np.float64)
    for start in range(0, len(head), GRAM_ROWS):
        block = head[start : start + GRAM_ROWS].astype(np.float64)
        gram += block.T @ block
    down = np.linalg.eigh(gram)[1].T[::-1][:rank].astype(np.float32)
    return down, head.astype(np.float32) @ down.T


def recall(head: Head, params: Any, hidden: Float[Array, "*rows d"], k: int = 1) -> Float[Array, ""]:
    """Of the full head's `k` best tokens, the share that is among the candidates; 1 for a head without them."""
    if not head.candidates:
        return jnp.float32(1)
    best, _ = head.full_scores(params, hidden).top(k)
    ids = head.scores(params, hidden).ids
    assert ids is not None
    return jnp.mean(jnp.any(best[..., :, None] == ids[..., None, :], axis=-1).astype(jnp.float32))
