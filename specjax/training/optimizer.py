"""Muon for matrices, Adam for the rest, and rates that follow the share of the run that is done.

Muon's iteration can cost as much as a small drafter's gradient. It needs no precision, so it runs in the dtype of
products, and it starts from rows that are bounded already, which saves an iteration (arXiv 2512.04632).
"""

from typing import Any

import optax
from optax.contrib import MuonDimensionNumbers, muon

from specjax.training.recipe import Recipe

# Two-dimensional, but a table with a row for each token: rows that a step does not touch must not move.
TABLES = ("markov_w1.weight", "markov_w2.weight", "_codebook", "embed_tokens.weight", "lm_head.weight")


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor is orthogonalised: a matrix that every token goes through."""
    return len(shape) == 2 and min(shape) > 1 and not name.endswith(TABLES)


def build(recipe: Recipe, tensors: dict[str, Any], dtype: Any) -> optax.GradientTransformation:
    """The optimiser at its peak rates; an update is scaled by `rate` before it is applied.

    Args:
        recipe: the rates and the clip.
        tensors: what is trained, by canonical name (matrices are `[out, in]`).
        dtype: of products.
    """
    matrices = {
        name: MuonDimensionNumbers(reduction_axis=1, output_axis=0) if is_matrix(name, x.shape) else None
        for name, x in tensors.items()
    }

    def narrow(updates, params=None):
        del params
        return {name: x.astype(dtype) if matrices[name] else x for name, x in updates.items()}

    return optax.chain(
        optax.clip_by_global_norm(recipe.clip),
        optax.stateless(narrow),
        muon(
            learning_rate=recipe.muon_rate,
            adam_learning_rate=recipe.adam_rate,
            muon_weight_dimension_numbers=matrices,
            preconditioning="aol",
            ns_steps=4,
            mu_dtype=dtype,
        ),
    )


def rate(progress: float, warmup: float) -> float:
    """The part of the peak rate when `progress` (0 to 1) of the run is done: a linear rise, a linear fall to zero."""
    if progress < warmup:
        return progress / warmup
    return max(1 - progress, 0.0) / (1 - warmup)
