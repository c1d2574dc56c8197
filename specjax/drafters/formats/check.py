"""What must hold between a drafter's description, its tensors and its target, beyond names and shapes."""

import warnings
from collections.abc import Mapping

import numpy as np

from specjax.drafters.config import BLOCK, HeadConfig, expected_tensors
from specjax.drafters.head import check_d2t
from specjax.targets.config import DecoderConfig

_BUFFERS = ("rotary_emb.inv_freq",)  # what old checkpoints carry, and what follows from the configuration


def description_problems(c: HeadConfig, target: DecoderConfig) -> list[str]:
    """Why a description cannot be honoured for a target, one line each."""
    found = []
    if c.vocab_size != target.vocab_size:
        found.append(f"it was made for a vocabulary of {c.vocab_size}, the target has {target.vocab_size}")
    if c.target_hidden_size != target.hidden_size:
        found.append(f"it was made for a target of width {c.target_hidden_size}, this one has {target.hidden_size}")
    for owned, what in ((c.own_embedding, "embedding"), (c.own_head, "head")):
        if not owned and c.hidden_size != target.hidden_size:
            found.append(
                f"it shares the target's {what}, but is {c.hidden_size} wide and the target {target.hidden_size}"
            )
    if c.draft_vocab_size > c.vocab_size:
        found.append(f"draft_vocab_size {c.draft_vocab_size} exceeds the vocabulary of {c.vocab_size}")
    if c.draft_vocab_size != c.vocab_size and not c.own_head:
        found.append(f"a draft vocabulary of {c.draft_vocab_size} beside one of {c.vocab_size} needs lm_head.weight")
    if list(c.taps) != sorted(set(c.taps)):
        found.append(f"taps {list(c.taps)} must ascend")
    if outside := [t for t in c.taps if not 0 <= t < target.num_layers]:
        found.append(f"taps {outside} (layers executed) are outside 0 to {target.num_layers - 1} of this target")
    if c.mask_token_id is not None and c.mask_token_id >= c.vocab_size:
        found.append(f"mask token {c.mask_token_id} is outside the {c.vocab_size} rows of the embedding")
    if c.num_heads % c.num_kv_heads:
        found.append(f"{c.num_heads} query heads cannot be shared out to {c.num_kv_heads} key/value heads")
    dims = c.head_dim if c.rotary_dims is None else c.rotary_dims
    if dims % 2 or not 4 <= dims <= c.head_dim:
        found.append(f"{dims} of {c.head_dim} head dimensions cannot rotate: an even number of at least 4 must")
    if len(c.windows) != c.num_layers:
        found.append(f"{len(c.windows)} attention windows for {c.num_layers} layers")
    if c.markov not in ("vanilla", "gated", "rnn"):
        found.append(f"markov_head_type {c.markov!r} is not known; known are vanilla, gated, rnn")
    if c.confidence and c.confidence_with_markov and not c.markov_rank:
        found.append("confidence_head_with_markov needs a markov_rank")
    if c.conv_kernel and c.hidden_size % max(c.conv_group, 1):
        found.append(f"conv_group_size {c.conv_group} does not divide the width {c.hidden_size}")
    if c.conv_kernel > c.block_size:
        found.append(f"conv_kernel_size {c.conv_kernel} exceeds the block of {c.block_size}")
    if c.selector_top_k > c.vocab_size:
        found.append(f"selector_top_k {c.selector_top_k} exceeds the vocabulary of {c.vocab_size}")
    if c.fc_norm and c.norm_before_fc:
        found.append("fc_norm and norm_before_fc exclude each other")
    if c.family in BLOCK and c.draft_vocab_size != c.vocab_size and c.family in ("dflash2", "ubtree"):
        found.append(f"{c.family} needs the full vocabulary of {c.vocab_size}, it has {c.draft_vocab_size}")
    return found


def tensor_problems(c: HeadConfig, names: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Missing, unknown, doubled and misshapen tensors, with both shapes.

    Args:
        c: the description.
        names: canonical name of each tensor, by its name in the files.
        shapes: shape of each tensor, by its name in the files.
    """
    expected, found, seen = expected_tensors(c), [], {}
    for name, ours in names.items():
        if ours in seen:
            found.append(f"{name} and {seen[ours]} are the same tensor, {ours}")
        seen[ours] = name
        if ours not in expected:
            if ours != "t2d" and not ours.endswith(_BUFFERS):
                found.append(f"unknown: {name} {list(shapes[name])}")
        elif _squeezed(shapes[name]) != _squeezed(expected[ours]):
            found.append(
                f"misshapen: {name} is {list(shapes[name])}, the configuration asks for {list(expected[ours])}"
            )
    for ours, shape in expected.items():
        if ours not in seen and not (ours.startswith("candidate_head.") or ours == "lm_head.weight"):
            note = ""
            if ours == "d2t":
                note = f": the drafter has {c.draft_vocab_size} tokens and the target {c.vocab_size}, nothing maps them"
            found.append(f"missing: {ours} {list(shape)}{note}")
    return found


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """P-EAGLE's `mask_hidden` is stored `[1, 1, 3 H]`; leading ones carry nothing."""
    while len(shape) > 1 and shape[0] == 1:
        shape = shape[1:]
    return shape


def vocabulary_problems(c: HeadConfig, d2t: np.ndarray, t2d: np.ndarray | None) -> list[str]:
    """What is wrong with the tables of a draft vocabulary: `d2t` holds offsets, `t2d` marks the members."""
    if not np.issubdtype(d2t.dtype, np.integer):
        return [f"d2t holds {d2t.dtype}, not whole numbers"]
    if c.draft_vocab_size == c.vocab_size:
        return ["d2t renumbers a full vocabulary, which is not supported"] if d2t.any() else []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # said when the drafter is built
            check_d2t(d2t, t2d, c.draft_vocab_size, c.vocab_size)
    except ValueError as error:
        return [str(error)]
    return []
