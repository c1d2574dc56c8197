"""A low-rank candidate head for a drafter that is trained: from the rows that it makes, then from its full head.

The truncated singular value decomposition of a head is best for rows that point everywhere alike. A drafter's rows do
not: they crowd into few directions. The first stage therefore factors the head *as those rows see it*: the least
squares of its logits over them. The second trains both factors on the cross-entropy to the full head's distribution
(forward KL, Adam), so that what counts is the likely tokens rather than all alike.

The factor that has a row for every token is the full head times a small matrix, which is what is stored: a drafter's
file grows by `2 * rank * width` numbers, whatever the vocabulary.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from specjax.array_types import Array, Float
from specjax.targets.layers import project
from specjax.training import losses

NOISE = 0.02  # in the second stage's start, in units of a factor's size
RIDGE = 1e-4  # of the mean square: directions that no row takes are not blown up


@dataclasses.dataclass(frozen=True)
class Fitted:
    """The factors, and how often the full head's best token was among the candidates of rows that were held out.

    Attributes:
        down: `[rank, d]`.
        lift: `[d, rank]`; the head times this is the other factor.
        recall: by stage: of the plain decomposition, of the one that the rows see, of the trained one.
    """

    down: np.ndarray
    lift: np.ndarray
    recall: tuple[float, float, float]


def fit(
    head: Float[Array, "v d"],
    rows: Float[Array, "n d"],
    *,
    rank: int,
    candidates: int,
    steps: int = 150,
    batch: int = 256,
    rate: float = 1e-3,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Fitted:
    """Fit the factors to a drafter's rows.

    Args:
        head: the full head, in the dtype of products.
        rows: post-norm rows of the drafter, on text that it drafts for; an eighth of them is held out.
        rank: of the factors.
        candidates: tokens that they are to select.
        steps: of the second stage; 0 leaves it out.
        batch: rows of a step.
        rate: peak rate; it falls to zero.
        seed: of the order of the rows.
        progress: is told steps done and steps in all.

    Raises:
        ValueError: a rank above the width, or fewer than 16 rows.
    """
    if not 0 < rank <= head.shape[1]:
        raise ValueError(f"the rank of a candidate head must be in 1..{head.shape[1]} (the head's width), got {rank}")
    if len(rows) < 16:
        raise ValueError(f"a candidate head is fitted to rows of the drafter, at least 16 of them; got {len(rows)}")
    rng = np.random.default_rng(seed)
    rows = rows[rng.permutation(len(rows))]
    kept, held = rows[len(rows) // 8 :], rows[: min(len(rows) // 8, 2048)]
    gram = np.asarray(_gram(head), np.float64)
    found = [_factors(gram, np.eye(len(gram)), rank)]
    covariance = np.asarray(_gram(kept), np.float64) / len(kept)
    found.append(_factors(gram, covariance, rank))
    found.append(_trained(head, kept, found[-1], steps, batch, rate, rng, progress))
    best = jnp.concatenate([_best(head, block) for block in _blocks(held)])
    recall = [float(np.mean([_among(head, down, lift, best, held, candidates)])) for down, lift in found]
    return Fitted(*found[-1], (recall[0], recall[1], recall[2]))


def _factors(gram: np.ndarray, covariance: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """The factors of least squared error of the logits, for rows of a covariance and a head of a Gram matrix.

    With the root S of the covariance, the leading right singular vectors V of `head S` give `down = V' S^-1` and
    `head S V = head lift`.
    """
    values, vectors = np.linalg.eigh(covariance)
    values = np.sqrt(np.maximum(values, 0) + RIDGE * values.mean())
    root, inverse = (vectors * values) @ vectors.T, (vectors / values) @ vectors.T
    leading = np.linalg.eigh(root @ gram @ root)[1][:, ::-1][:, :rank]
    return (leading.T @ inverse).astype(np.float32), (root @ leading).astype(np.float32)


def _trained(
    head: Array,
    rows: Array,
    start: tuple[np.ndarray, np.ndarray],
    steps: int,
    batch: int,
    rate: float,
    rng: np.random.Generator,
    progress: Callable[[int, int], None],
) -> tuple[np.ndarray, np.ndarray]:
    if not steps:
        return start
    size = [float(np.sqrt(np.mean(x * x))) for x in start]
    # Both factors in units of their own size, so that one rate fits both. A direction that neither has would never be
    # found: each would wait for the other, hence the noise.
    factors = tuple(
        jnp.asarray(x / s + NOISE * rng.normal(size=x.shape), jnp.float32) for x, s in zip(start, size, strict=True)
    )
    optimizer = optax.adam(optax.linear_schedule(rate, 0.0, steps))
    state = optimizer.init(factors)
    for step in range(steps):
        picked = rows[rng.integers(0, len(rows), batch)]
        factors, state = _step(optimizer.update, tuple(size), factors, state, head, picked)
        progress(step + 1, steps)
    down, lift = (np.asarray(x) * s for x, s in zip(factors, size, strict=True))
    return down.astype(np.float32), lift.astype(np.float32)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _step(update: Callable, size: tuple[float, float], factors: Any, state: Any, head: Array, rows: Array):
    wanted = jax.nn.softmax(project(head, rows, out_dtype=jnp.float32))

    def loss(factors):
        down, lift = (x * s for x, s in zip(factors, size, strict=True))
        preview = project(head, ((rows @ down.T) @ lift.T).astype(head.dtype), out_dtype=jnp.float32)
        return losses.cross_entropy(wanted, preview).mean()

    updates, state = update(jax.grad(loss)(factors), state)
    return optax.apply_updates(factors, updates), state


@jax.jit
def _gram(rows: Array) -> Array:
    return jnp.einsum("nd,ne->de", rows, rows, preferred_element_type=jnp.float32)


def _blocks(rows: Array, size: int = 256) -> list[Array]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


@jax.jit
def _best(head: Array, rows: Array) -> Array:
    return jnp.argmax(project(head, rows.astype(head.dtype), out_dtype=jnp.float32), axis=-1)


def _among(head: Array, down: np.ndarray, lift: np.ndarray, best: Array, rows: Array, candidates: int) -> float:
    found = [
        _rank(head, jnp.asarray(down), jnp.asarray(lift), b, x)
        for b, x in zip(_blocks(best), _blocks(rows), strict=True)
    ]
    return float(np.mean(np.concatenate(found) < candidates))


@jax.jit
def _rank(head: Array, down: Array, lift: Array, best: Array, rows: Array) -> Array:
    """How many tokens the preview puts above the full head's best one."""
    preview = project(head, ((rows.astype(jnp.float32) @ down.T) @ lift.T).astype(head.dtype), out_dtype=jnp.float32)
    own = jnp.take_along_axis(preview, best[:, None], axis=1)
    return jnp.sum(preview > own, axis=1)
