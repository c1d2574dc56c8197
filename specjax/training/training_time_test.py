"""Training-time test: EAGLE-3 (arXiv 2503.01840) and MTP are trained on what they will read when they draft.

Step 0 pairs each position's target features with the next token. Each later step moves one token on and reads the
head's own output of the step before, in place of features. Row `i` of step `s` has position `i + s` and sees the rows
of step 0 up to `i`, and those of the later steps that grew from `i` itself: what a drafted row sees when drafting.
"""

from typing import Any

import jax
import jax.numpy as jnp

from specjax.array_types import Array, Bool, Float
from specjax.drafters.base import Features
from specjax.drafters.embedding import embed
from specjax.drafters.layers import apply, attention_inputs, mlp, norm
from specjax.drafters.recurrent import Recurrent
from specjax.targets import rope
from specjax.training import losses
from specjax.training.attention import attend
from specjax.training.features import TargetFeatures
from specjax.training.packing import Batch
from specjax.training.vocabulary import Columns


def unroll(
    drafter: Recurrent, params: Any, batch: Batch, features: TargetFeatures, steps: int
) -> list[Float[Array, "b t d"]]:
    """Post-norm rows of each step: row `i` of step `s` speaks of token `i + 2 + s`.

    Rows whose tokens lie behind the end of the row hold finite, meaningless values.
    """
    c = drafter.config
    count, length = batch.tokens.shape
    whole = Features(
        positions=batch.positions,
        count=jnp.full((count,), length),
        hidden=features.hidden,
        taps=features.taps,
    )
    condition = drafter.condition(params, whole)
    index = jnp.arange(length)
    seen = (batch.segments[:, :, None] == batch.segments[:, None, :]) & (index <= index[:, None])
    first: list[tuple[Array, Array]] = []
    grown: list[list[tuple[Array, Array]]] = [[] for _ in range(c.num_layers)]
    rows = []
    for step in range(steps):
        tokens = jnp.pad(batch.tokens[:, 1 + step :], ((0, 0), (0, min(1 + step, length))))
        x, residual = drafter.inputs(params, embed(c, params["embedding"], tokens), condition)
        positions = (batch.positions + step).reshape(-1)
        cos, sin = rope.cos_sin(c.rope, c.rotary_dims or c.head_dim, positions, drafter.max_position)
        out = residual
        for i, layer in enumerate(params["layers"]):
            if i:
                x, residual = norm(layer["input_norm"], out, c.rms_norm_eps), out
            q, k, v, gate = attention_inputs(c, layer, x, cos, sin)
            if step == 0:
                first.append((k, v))
            else:
                grown[i].append((k, v))
            y = _attend(q, first[i], grown[i], _near(seen, batch, step, c.windows[i] if c.windows else None))
            y = y.reshape(*y.shape[:2], -1)
            if gate is not None:
                y = y * jax.nn.sigmoid(gate)
            out = residual + apply(layer["out"], y)
            out = out + mlp(c, layer, out)
        normed = drafter.normed(params, out)
        rows.append(normed)
        condition = drafter.feedback(out, normed)
    return rows


def _near(seen: Bool[Array, "b t t"], batch: Batch, step: int, window: int | None) -> Bool[Array, "b t t"]:
    """Which rows of step 0 a row of `step` sees, under a sliding window."""
    if window is None:
        return seen
    return seen & (batch.positions[:, None, :] > batch.positions[:, :, None] + step - window)


def _attend(q, first, grown, seen) -> Float[Array, "b t h f"]:
    """Attention over the rows of step 0 that are seen, and over the row's own later ones."""
    count, length, heads, dim = q.shape
    keys, values = first
    q = q * jnp.asarray(dim**-0.5, q.dtype)
    # A later row of one's own is one key for each row: no matrix, a product of numbers.
    grouped = q.reshape(count, length, keys.shape[2], -1, dim)
    near = [
        jnp.einsum("btgrf,btgf->btgr", grouped, k, preferred_element_type=jnp.float32).reshape(count, length, heads)
        for k, _ in grown
    ]
    near = jnp.stack(near, axis=-1) if near else jnp.zeros((count, length, heads, 0))
    out, weights = attend(q, keys, values, seen, near)
    for i, (_, v) in enumerate(grown):
        out = out + weights[..., i, None] * jnp.repeat(v, heads // v.shape[2], axis=2)
    return out


def loss(
    drafter: Recurrent,
    params: Any,
    head: Float[Array, "c d"],
    columns: Columns,
    batch: Batch,
    features: TargetFeatures,
    *,
    steps: int,
    decay: float,
    text: bool,
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """The weighted cross-entropy of all steps, and what each step reached.

    Step `k` weighs `decay ** k`, normalised to 1 in all. Its labels are the target's distribution along the text, or
    (`text`) the text itself.

    Args:
        drafter: the head.
        params: its arrays.
        head: the output head's rows for `columns`, in the dtype of products.
        columns: the tokens that are scored.
        batch: packed rows.
        features: the target's activations of them.
        steps: unrolled steps.
        decay: see above.
        text: see above.
    """
    length = batch.tokens.shape[1]
    p = jax.nn.softmax(columns.logits(head, features.hidden))
    weights = jnp.asarray([decay**k for k in range(steps)])
    total, agreed, each = jnp.zeros(()), [], []
    for k, rows in enumerate(unroll(drafter, params, batch, features, steps)):
        live = length - 2 - k  # rows whose label lies within the packed row
        logits = columns.logits(head, rows[:, :live])
        label, valid = p[:, 1 + k : 1 + k + live], batch.ahead(2 + k)[:, :live]
        if text:
            values = losses.token_loss(logits, columns.find(batch.tokens[:, 2 + k :]))
        else:
            values = losses.cross_entropy(label, logits)
        each.append(losses.mean(values, valid.astype(jnp.float32)))
        agreed.append(losses.agreement(label, logits, valid))
        total = total + weights[k] / weights.sum() * each[-1]
    return total, {"loss_by_slot": jnp.stack(each), "agreement": jnp.stack(agreed)}


def hits(
    drafter: Recurrent, params: Any, batch: Batch, features: TargetFeatures, steps: int
) -> tuple[Bool[Array, "b t k"], Bool[Array, "b t"]]:
    """Whether each draft after each root is the text's next token, and which roots count.

    Root `r` is followed by drafts `r + 1 ... r + steps`; the later ones are those of a draft whose earlier tokens were
    all right. A draft behind the end of what the target wrote is no hit.
    """
    found = []
    for k, rows in enumerate(unroll(drafter, params, batch, features, steps)):
        best = jax.lax.map(lambda row: drafter.head.full_scores(params["head"], row).best(), rows)
        wanted = jnp.pad(batch.tokens[:, 1 + k :], ((0, 0), (0, 1 + k)))
        # Row i belongs to root i + 1.
        best = jnp.pad(best[:, :-1], ((0, 0), (1, 0)))
        found.append((best == wanted) & batch.ahead(1 + k))
    roots = batch.mask & batch.ahead(1) & (batch.positions > 0)
    return jnp.stack(found, axis=-1), roots
