"""Packed anchors: many blocks of a packed row in one pass, for DFlash, DFlash 2, DSpark and UBTree.

Every anchor starts a block of its own. A block's rows see the context strictly before its anchor (the anchor's
features do not exist when drafting) and the rows of their own block, nothing of other blocks. Context keys are made
once for all.

The four families score a position alike: the head's logits, and a term that knows the token before. Training scores
all columns of the step with both; drafting takes the few best.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.array_types import Array, Bool, Float, Int, pytree
from specjax.drafters.block import block_mask
from specjax.drafters.block_drafter import BlockDrafter, trained_drafts
from specjax.drafters.embedding import embed
from specjax.targets.layers import project
from specjax.training import losses
from specjax.training.attention import attend
from specjax.training.features import TargetFeatures
from specjax.training.packing import Batch
from specjax.training.vocabulary import Columns


@pytree
class Slots:
    """The drafted positions of blocks; the slots of block `a` of row `b` are `k` tokens after its anchor, from 1.

    Attributes:
        index: index of each slot's token in the packed row.
        tokens: its token.
        before: the token before it.
        valid: slots to learn: those before the first one that the target did not write.
    """

    index: Int[Array, "b a k"]
    tokens: Int[Array, "b a k"]
    before: Int[Array, "b a k"]
    valid: Bool[Array, "b a k"]


def choose(packed: Batch, count: int, rng: np.random.Generator) -> np.ndarray:
    """Random anchors `[b, a]` among the tokens that the target wrote and followed up on, -1 where a row has too few.

    An anchor is a token that the target wrote: when drafting, the first root is the token that prefill sampled.
    """
    mask, segments = np.asarray(packed.mask), np.asarray(packed.segments)
    usable = mask[:, :-1] & mask[:, 1:] & (segments[:, :-1] == segments[:, 1:])
    anchors = np.full((len(mask), count), -1, np.int32)
    for row, free in enumerate(usable):
        found = rng.permutation(np.flatnonzero(free))[:count]
        anchors[row, : len(found)] = np.sort(found)
    return anchors


def slots_of(batch: Batch, anchors: Int[Array, "b a"], drafts: int) -> Slots:
    """What follows each anchor."""
    length = batch.tokens.shape[1]
    anchor = jnp.maximum(anchors, 0)
    index = anchor[:, :, None] + 1 + jnp.arange(drafts)
    inside = jnp.minimum(index, length - 1)

    def pick(x, at):
        return jnp.take_along_axis(x, at.reshape(x.shape[0], -1), axis=1).reshape(at.shape)

    same = pick(batch.segments, inside) == pick(batch.segments, anchor)[:, :, None]
    valid = same & pick(batch.mask, inside) & (index < length) & (anchors >= 0)[:, :, None]
    valid = jnp.cumprod(valid.astype(jnp.int32), axis=-1).astype(bool)
    return Slots(index=inside, tokens=pick(batch.tokens, inside), before=pick(batch.tokens, inside - 1), valid=valid)


def blocks(
    drafter: BlockDrafter, params: Any, batch: Batch, features: TargetFeatures, anchors: Int[Array, "b a"]
) -> Float[Array, "b a k d"]:
    """Post-norm rows of the drafted positions of every block."""
    c = drafter.config
    count, each = anchors.shape
    size = c.block_size
    anchor = jnp.maximum(anchors, 0)
    start = jnp.take_along_axis(batch.positions, anchor, axis=1)
    own = jnp.take_along_axis(batch.segments, anchor, axis=1)
    assert features.taps is not None
    context = drafter.context_keys(params, drafter.context_features(params, features.taps), batch.positions)
    before = jnp.arange(batch.tokens.shape[1]) < anchor[:, :, None]
    before = before & (batch.segments[:, None, :] == own[:, :, None])
    masks = jnp.full((count * each, size - 1), c.mask_token_id, jnp.int32)
    first = jnp.take_along_axis(batch.tokens, anchor, axis=1).reshape(-1, 1)
    x = embed(c, params["embedding"], jnp.concatenate([first, masks], axis=1))
    positions = start[:, :, None] + jnp.arange(size)

    def attention(i, q, k, v):
        window, causal = drafter.windows[i], drafter.causal[i]
        seen = jnp.broadcast_to(before[:, :, None, :], (count, each, size, before.shape[-1]))
        if window is not None:
            seen = seen & (batch.positions[:, None, None, :] > positions[..., None] - window)
        q, k, v = (t.reshape(count, each, *t.shape[1:]) for t in (q, k, v))
        context_k, context_v = context[i]
        y = _attend(q, k, v, context_k, context_v, seen, block_mask(size, window, causal))
        return y.reshape(count * each, size, *y.shape[3:])

    rows = drafter.network(params, x, positions.reshape(count * each, size), attention)
    return rows.reshape(count, each, *rows.shape[1:])


def _attend(q, k, v, context_k, context_v, before, own) -> Float[Array, "b a n h f"]:
    """Rows of blocks over the context that each block sees and over its own rows."""
    count, each, size, heads, dim = q.shape
    groups, rows = k.shape[3], each * size
    q = q * jnp.asarray(dim**-0.5, q.dtype)
    grouped = q.reshape(count, each, size, groups, heads // groups, dim)
    near = jnp.einsum("bangrf,bamgf->bangrm", grouped, k, preferred_element_type=jnp.float32)
    near = jnp.where(own[:, None, None], near, -1e30).reshape(count, rows, heads, size)
    seen = before.reshape(count, rows, -1)
    out, weights = attend(q.reshape(count, rows, heads, dim), context_k, context_v, seen, near)
    weights = weights.reshape(count, each, size, groups, heads // groups, size)
    out = out.reshape(count, each, size, groups, heads // groups, dim)
    return (out + jnp.einsum("bangrm,bamgf->bangrf", weights, v)).reshape(count, each, size, heads, dim)


# ---------------------------------------------------------------- the term that knows the token before


def pair_term(
    config: Any,
    tensors: Any,
    embedding: Float[Array, "v d"],
    columns: Columns,
    rows: Float[Array, "b a k d"],
    before: Int[Array, "b a k"],
    dtype: Any,
) -> tuple[Float[Array, "b a k c"], Float[Array, "k"]]:
    """What a family adds to the logits of each position, given the token before it; and its factor on those logits.

    DFlash 2: `<A(a) * (W h), B(b)>`. UBTree: `lambda <(P h) * phi(a), psi(b)>`, with alpha as the factor. DSpark:
    `W2 phi`, where phi reads the Markov embedding of the token before.
    """
    shape = before.shape
    flat = rows.reshape(-1, rows.shape[-1]).astype(dtype)

    def get(name: str) -> Array:
        return tensors[name].astype(dtype)

    def term(left: Array, right: Array) -> Array:
        return project(right, left.astype(dtype), out_dtype=jnp.float32).reshape(*shape, -1)

    one = jnp.ones((shape[-1],))
    if config.family == "dspark":
        w1, w2 = tensors["markov_head.markov_w1.weight"], tensors["markov_head.markov_w2.weight"]
        return term(w1[before.reshape(-1)], columns.rows(w2).astype(dtype)), one
    if config.family == "dflash2":
        wanted = project(get("candidate_selector.hidden_projection.weight"), flat, out_dtype=jnp.float32)
        left = tensors["candidate_selector.predecessor_codebook"][before.reshape(-1)]
        right = columns.rows(tensors["candidate_selector.successor_codebook"])
        return term(left * wanted, right.astype(dtype)), one

    def codes(side: str, ids: Array) -> Array:
        inner = project(get(f"bigram_selector.{side}.fc1.weight"), embedding[ids].astype(dtype), jnp.float32)
        return project(get(f"bigram_selector.{side}.fc2.weight"), jax.nn.silu(inner).astype(dtype), jnp.float32)

    wanted = project(get("bigram_selector.hidden_projection.weight"), flat, out_dtype=jnp.float32)
    left = codes("phi", before.reshape(-1)) * wanted
    scale = jnp.exp(tensors["bigram_selector.log_lambda"])[: shape[-1], None]
    return scale * term(left, codes("psi", columns.ids).astype(dtype)), jnp.exp(tensors["bigram_selector.log_alpha"])


def confidence(config: Any, tensors: Any, rows: Float[Array, "b a k d"], before: Int[Array, "b a k"]) -> Array:
    """DSpark's confidence logit of each draft, given the token before it."""
    x = rows.astype(jnp.float32)
    if config.confidence_with_markov:
        x = jnp.concatenate([x, tensors["markov_head.markov_w1.weight"][before]], axis=-1)
    return x @ tensors["confidence_head.proj.weight"][0] + tensors["confidence_head.proj.bias"][0]


# ---------------------------------------------------------------- losses


def loss(
    drafter: BlockDrafter,
    params: Any,
    tensors: Any,
    head: Float[Array, "c d"],
    columns: Columns,
    batch: Batch,
    features: TargetFeatures,
    anchors: Int[Array, "b a"],
    *,
    decay: float,
    text: bool,
    unary_weight: float,
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """The family's loss over all valid slots; slot `k` (from 0) weighs `exp(-k / decay)`.

    DFlash: cross-entropy of the head. DFlash 2 and UBTree: that, times `unary_weight`, and the cross-entropy of the
    selector's scores. DSpark: 0.1 cross-entropy to the text, 0.9 of the L1 distance to the target, and the binary
    cross-entropy of the confidence to the chance of acceptance, of the Markov-corrected logits (arXiv 2607.05147).

    Args:
        drafter: the drafter.
        params: its arrays.
        tensors: the same by canonical name.
        head: the output head's rows for `columns`.
        columns: the tokens that are scored.
        batch: packed rows.
        features: the target's activations of them.
        anchors: of the blocks, -1 for none.
        decay: see above.
        text: labels of the first two losses: the text itself, or the target's distribution along it.
        unary_weight: see above.
    """
    c = drafter.config
    slots = slots_of(batch, anchors, trained_drafts(c))
    rows = blocks(drafter, params, batch, features, anchors)
    unary = columns.logits(head, rows)
    p = jax.nn.softmax(columns.logits(head, features.hidden))
    # The target's distribution of a token is its output at the token before.
    at = (slots.index - 1).reshape(p.shape[0], -1)
    p = jnp.take_along_axis(p, at[:, :, None], axis=1).reshape(*slots.index.shape, -1)
    column = columns.find(slots.tokens)
    weight = slots.valid * jnp.exp(-jnp.arange(slots.valid.shape[-1]) / decay)

    def entropy(logits: Array) -> Array:
        return losses.token_loss(logits, column) if text else losses.cross_entropy(p, logits)

    scored = unary
    if c.family == "dflash":
        values = entropy(unary)
    else:
        scored = unary
        if c.family != "dspark" or c.markov_rank:
            term, factor = pair_term(
                c, tensors, params["embedding"], columns, rows, slots.before, jnp.dtype(drafter.dtype)
            )
            scored = factor[: unary.shape[2], None] * unary + term
        if c.family == "dspark":
            far = losses.distance(p, scored)
            values = 0.1 * losses.token_loss(scored, column) + 0.9 * far
            if c.confidence:
                chance = jax.lax.stop_gradient(1 - far / 2)
                values = values + losses.binary(confidence(c, tensors, rows, slots.before), chance)
        else:
            values = unary_weight * entropy(unary) + entropy(scored)
    by_slot = jax.vmap(losses.mean, in_axes=2)(values, slots.valid.astype(jnp.float32))
    agreed = jax.vmap(losses.agreement, in_axes=2)(p, scored, slots.valid)
    return losses.mean(values, weight), {"loss_by_slot": by_slot, "agreement": agreed}


def hits(
    drafter: BlockDrafter,
    params: Any,
    tensors: Any,
    batch: Batch,
    features: TargetFeatures,
    anchors: Int[Array, "b a"],
) -> tuple[Bool[Array, "b a k"], Bool[Array, "b a"], Float[Array, "b a k"]]:
    """Whether each draft after each anchor is the text's next token, given that those before it are; which anchors
    count; and DSpark's confidence logits (zeros without them).
    """
    c = drafter.config
    slots = slots_of(batch, anchors, trained_drafts(c))
    rows = blocks(drafter, params, batch, features, anchors)
    columns = Columns(ids=jnp.arange(c.vocab_size), offset=None)
    paired = c.family != "dflash" and (c.family != "dspark" or c.markov_rank > 0)

    def best(group):
        rows, before = (x[None] for x in group)
        logits = columns.logits(params["head"]["weight"], rows)
        if paired:
            term, factor = pair_term(c, tensors, params["embedding"], columns, rows, before, jnp.dtype(drafter.dtype))
            logits = factor[: logits.shape[2], None] * logits + term
        return jnp.argmax(logits, axis=-1)[0]

    found = jax.lax.map(best, (rows, slots.before)) == slots.tokens
    sure = confidence(c, tensors, rows, slots.before) if c.confidence else jnp.zeros(found.shape)
    return found & slots.valid, anchors >= 0, sure
