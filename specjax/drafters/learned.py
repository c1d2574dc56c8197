"""Learned drafters by family: from one internal description and its tensors to a drafter."""

import importlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from specjax.drafters.base import Drafter
from specjax.drafters.config import HeadConfig, expected_tensors
from specjax.targets.decoder import Target, check_taps

# The module of each family, loaded when it is asked for. It has
# `build(config, tensors, target, target_params, dtype, **options) -> (drafter, params)`.
MODULES = {
    "eagle3": "specjax.drafters.eagle3",
    "peagle": "specjax.drafters.peagle",
    "mtp": "specjax.drafters.mtp",
    "dflash": "specjax.drafters.dflash",
    "dflash2": "specjax.drafters.dflash",
    "dspark": "specjax.drafters.dspark",
    "ubtree": "specjax.drafters.ubtree",
}


def build(
    config: HeadConfig,
    tensors: Mapping[str, np.ndarray],
    target: Target,
    target_params: Any,
    dtype: Any,
    **options: Any,
) -> tuple[Drafter, Any]:
    """A learned drafter for `target`.

    Args:
        config: its description.
        tensors: its weights by canonical name (`expected_tensors(config)`).
        target: the target that it drafts for.
        target_params: the target's arrays; where the drafter shares the embedding or the head, it refers to them.
        dtype: dtype of its weights and of its keys and values.
        **options: settings of the family's drafter (`sampled`, a shape, ...).

    Returns:
        `(drafter, params)`.

    Raises:
        ValueError: an unknown family, a description that does not fit the target, tensors that are missing, not known
            or of another shape (all of them, with both shapes), or an option that the family does not have.
    """
    if config.family not in MODULES:
        raise ValueError(f"no drafter of family {config.family!r}; families are {', '.join(MODULES)}")
    check_target(config, target)
    check_tensors(config, tensors)
    module = importlib.import_module(MODULES[config.family])
    return module.build(config, tensors, target, target_params, dtype, **options)


def check_target(config: HeadConfig, target: Target) -> None:
    """Refuse a description that does not fit the target, naming both sides."""
    theirs = target.config
    faults = [
        f"the drafter was made for a {what} of {ours}, the target has {has}"
        for what, ours, has in (
            ("vocabulary", config.vocab_size, theirs.vocab_size),
            ("width", config.target_hidden_size, theirs.hidden_size),
        )
        if ours != has
    ]
    if not config.own_embedding and config.hidden_size != theirs.hidden_size:
        faults.append(
            f"the drafter shares the target's embedding of width {theirs.hidden_size} but is {config.hidden_size} "
            "wide: it must ship an embedding of its own"
        )
    if not config.own_head and config.hidden_size != theirs.hidden_size:
        faults.append(
            f"the drafter shares the target's head of width {theirs.hidden_size} but is {config.hidden_size} wide: "
            "it must ship a head of its own"
        )
    if faults:
        raise ValueError("; ".join(faults))
    check_taps(theirs, config.taps)


def check_tensors(config: HeadConfig, tensors: Mapping[str, np.ndarray]) -> None:
    """Refuse tensors that are not exactly the expected ones; all faults in one error.

    The low-rank candidate head may be absent: it is computed from the full head then. Whether the vocabulary tables
    must be there, and agree, is for `head.check_d2t` to say.
    """
    want = expected_tensors(config) | {"d2t": (config.draft_vocab_size,), "t2d": (config.vocab_size,)}
    optional = {name for name in want if name.startswith("candidate_head.") or name in ("d2t", "t2d")}
    faults = [f"{name} {want[name]} is missing" for name in want if name not in tensors and name not in optional]
    faults += [f"{name} {tuple(x.shape)} is not known" for name, x in tensors.items() if name not in want]
    faults += [
        f"{name} is {tuple(tensors[name].shape)}, expected {shape}"
        for name, shape in want.items()
        if name in tensors and tuple(tensors[name].shape) != shape
    ]
    if faults:
        raise ValueError(f"the tensors do not make this {config.family} drafter: " + "; ".join(sorted(faults)))
