"""A request's cached slots shared among programs of a GPU, and the merge of their partial softmaxes."""

import jax.numpy as jnp

from specjax.array_types import Array, Float

PROGRAMS = 256  # two on each multiprocessor of a large GPU
MIN_SLOTS = 256  # of the cache, for a split to be worth its merge
MAX_SPLITS = 32


def choose_splits(programs: int, slots: int) -> int:
    """Splits of each request's slots, a power of two: enough to fill a GPU that `programs` leave idle.

    Args:
        programs: programs of the whole call without splits.
        slots: slots that a request can have.
    """
    wanted = min(PROGRAMS // programs, slots // MIN_SLOTS, MAX_SPLITS)
    return 1 << max(wanted, 1).bit_length() - 1


def merge_splits(out: Float[Array, "c r f"], summed: Float[Array, "c r 1"]) -> Float[Array, "r f"]:
    """Partial outputs of splits, each normalised, weighed by their log2-sum-exp2 (FlashDecoding's merge)."""
    weights = jnp.exp2(summed - jnp.max(summed, axis=0))
    return jnp.sum(weights * out, axis=0) / jnp.sum(weights, axis=0)
