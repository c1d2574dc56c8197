"""Logits to `p`, for each node of each row.

Order of the processing: logit bias, repetition penalty, presence and frequency penalties, `min_tokens`; then
temperature, top-k, top-p, min-p (the order of Hugging Face's processors). Nothing here keeps a memory: penalties count
the token buffer and the drafted ancestors of a node each time, so a rejected draft leaves no trace. What no row asks
for is skipped at run time (`lax.cond`), so that one compiled program serves every mix of requests.
"""

import jax.numpy as jnp
from jax import lax

from specjax.array_types import Array, Bool, Float, Int, pytree
from specjax.draft import Draft, ancestor_matrix
from specjax.sampling.draws import sample
from specjax.sampling.state import SamplingState


@pytree
class Seen:
    """What was said before the token that each row of logits decides.

    Attributes:
        tokens: prompt and output of each request, the root of its draft included.
        lengths: committed tokens of each request; what lies at or past them is ignored.
        prompt_lengths: tokens of the prompt.
        eos: ids that end each request, -1 where unused: what `min_tokens` bans.
        draft: the drafts under verification, or None where only committed tokens count (prefill).
        node: node of each row in its request's draft; None without a draft.
        valid: rows that count, or None for all; what another row asks for switches no work on.
    """

    tokens: Int[Array, "b t"]
    lengths: Int[Array, " b"]
    prompt_lengths: Int[Array, " b"]
    eos: Int[Array, "b e"]
    draft: Draft | None = None
    node: Int[Array, " N"] | None = None
    valid: Bool[Array, " N"] | None = None


def target_distribution(
    logits: Float[Array, "N v"],
    request: Int[Array, " N"],
    state: SamplingState,
    position: Int[Array, " N"],
    seen: Seen,
) -> Float[Array, "N v"]:
    """The target's `p` at each row: what the request's parameters make of its logits.

    Args:
        logits: raw logits of the rows.
        request: batch row that each belongs to.
        state: sampling parameters of the batch.
        position: index that the token to be drawn will have in the token buffer (position of the node + 1).
        seen: the tokens that penalties count and the ids that `min_tokens` bans.

    Returns:
        float32 rows that add up to 1; exactly one-hot at temperature 0.
    """
    weights = _target_weights(logits, request, state, position, seen)
    return weights / jnp.sum(weights, axis=-1, keepdims=True)


def draft_distribution(
    logits: Float[Array, "*rows v"],
    temperature: Float[Array, "*rows"],
    top_k: Int[Array, "*rows"],
    top_p: Float[Array, "*rows"],
    min_p: Float[Array, "*rows"],
) -> Float[Array, "*rows v"]:
    """Temperature, top-k, top-p and min-p, without penalties: a drafter's `q` from its logits.

    The filters sort nothing. A threshold is found exactly by bisection over the bits of the floats, and all that is not
    below it stays, ties included.
    """
    weights = _weights(logits.astype(jnp.float32), temperature, top_k, top_p, min_p)
    return weights / jnp.sum(weights, axis=-1, keepdims=True)


def _target_weights(logits, request, state, position, seen) -> Array:
    """`target_distribution` before the division by its sum."""
    logits = _adjust(logits.astype(jnp.float32), request, state, position, seen)
    return _weights(
        logits, state.temperature[request], state.top_k[request], state.top_p[request], state.min_p[request]
    )


def _weights(logits, temperature, top_k, top_p, min_p) -> Array:
    """`draft_distribution` before the division by its sum: the largest weight of a row is 1."""
    greedy = temperature == 0
    best = jnp.max(logits, axis=-1, keepdims=True)
    # What the conditions below yield is one number for each row: a branch that returned the rows would copy them.
    none = jnp.zeros(greedy.shape, jnp.uint32)

    def heat():
        return jnp.exp((logits - best) / jnp.where(greedy, 1, temperature)[..., None])

    def of_top_k():
        need = jnp.minimum(top_k, logits.shape[-1]).astype(jnp.float32)
        return jnp.where(top_k > 0, _threshold(_ordered_bits(logits), jnp.float32(1), need), 0)

    def kept(least):
        return jnp.where(_ordered_bits(logits) >= least[..., None], heat(), 0)

    def of_top_p():
        mass = kept(k)
        return jnp.where(top_p < 1, _threshold(_bits(mass), mass, top_p * jnp.sum(mass, axis=-1)), 0)

    k = lax.cond(jnp.any((top_k > 0) & ~greedy), of_top_k, lambda: none)
    p = lax.cond(jnp.any((top_p < 1) & ~greedy), of_top_p, lambda: none)
    mass = kept(k)
    mass = jnp.where((_bits(mass) >= p[..., None]) & ((mass >= min_p[..., None]) | (logits == best)), mass, 0)
    one_hot = jnp.arange(logits.shape[-1]) == argmax(logits)[..., None]
    return jnp.where(greedy[..., None], one_hot, mass)


def argmax(logits: Float[Array, "*rows v"]) -> Int[Array, "*rows"]:
    """As `jnp.argmax` over the vocabulary: the lowest of the best ids, or of those that are NaN."""
    return lax.platform_dependent(
        logits, cpu=_argmax_by_blocks, default=lambda logits: jnp.argmax(logits, axis=-1).astype(jnp.int32)
    )


def _argmax_by_blocks(logits) -> Array:
    """XLA's CPU backend goes through an argmax number by number; a largest number it finds by vectors."""
    vocab = logits.shape[-1]
    size = next((size for size in (256, 128, 64) if vocab % size == 0 and vocab > size), None)
    if size is None:
        return _first_largest(logits)
    blocks = logits.reshape(*logits.shape[:-1], vocab // size, size)
    block = _first_largest(jnp.max(blocks, axis=-1))
    inside = jnp.take_along_axis(blocks, block[..., None, None], axis=-2)[..., 0, :]
    return block * size + _first_largest(inside)


def _first_largest(x) -> Array:
    best = jnp.max(x, axis=-1, keepdims=True)
    ids = lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    return jnp.min(jnp.where((x == best) | jnp.isnan(x), ids, x.shape[-1] - 1), axis=-1)


def choose(
    logits: Float[Array, "N v"],
    request: Int[Array, " N"],
    state: SamplingState,
    position: Int[Array, " N"],
    seen: Seen,
) -> Int[Array, " N"]:
    """The target's own token at each row (arguments as in `target_distribution`).

    Rows that decide the same position share its random number, on whatever node they stand. With the deterministic tree
    rule a seed therefore gives one text, whatever the drafter.
    """
    sampled = _counting(state.temperature[request] > 0, seen)
    adjusted = jnp.stack(_adjustments(request, state, position, seen))

    def process(logits):
        weights = _target_weights(logits, request, state, position, seen)
        return sample(weights, state.seed[request], position)

    return lax.cond(jnp.any(sampled) | jnp.any(adjusted), process, argmax, logits.astype(jnp.float32))


def logprobs(
    logits: Float[Array, "*rows v"], chosen: Int[Array, "*rows"], top: int
) -> tuple[Float[Array, "*rows"], Int[Array, "*rows"], Int[Array, "*rows top"], Float[Array, "*rows top"]]:
    """Log-probabilities under the raw logits: before bias, penalties, temperature and filters.

    Returns:
        The log-probability of the chosen token; its rank, 1 + the number of larger logits + the number of equal logits
        with a smaller id; and the `top` most likely ids in that same order (all of a smaller vocabulary), with their
        log-probabilities.
    """
    logits = logits.astype(jnp.float32)
    ids = jnp.arange(logits.shape[-1])
    best = jnp.max(logits, axis=-1, keepdims=True)
    # log(1 + rest) keeps its digits where p is all but 1: 0.0 is reported only for a certainty.
    others = jnp.where(ids == argmax(logits)[..., None], 0, jnp.exp(logits - best))
    rest = jnp.log1p(jnp.sum(others, axis=-1, keepdims=True))
    own = jnp.take_along_axis(logits, chosen[..., None], axis=-1)
    ahead = (logits > own) | ((logits == own) & (ids < chosen[..., None]))
    top_logits, top_ids = lax.top_k(logits, min(top, logits.shape[-1]))
    rank = 1 + jnp.sum(ahead, axis=-1, dtype=jnp.int32)
    return (own - best - rest)[..., 0], rank, top_ids, top_logits - best - rest


def _adjustments(request, state, position, seen) -> tuple[Array, Array, Array]:
    """Which rows have a logit bias, which penalties, and which may not end yet."""
    biased = jnp.any(state.bias_tokens >= 0, axis=-1)[request]
    penalised = ((state.repetition != 1) | (state.presence != 0) | (state.frequency != 0))[request]
    held = position < state.min_length[request]
    return _counting(biased, seen), _counting(penalised, seen), _counting(held, seen)


def _counting(rows: Array, seen: Seen) -> Array:
    return rows if seen.valid is None else rows & seen.valid


def _adjust(logits, request, state, position, seen) -> Array:
    """Logit bias, penalties and `min_tokens`, for the rows that ask for them."""
    biased, penalised, held = _adjustments(request, state, position, seen)
    row = jnp.arange(logits.shape[0])[:, None]

    def bias(logits):
        tokens = _or_nowhere(state.bias_tokens[request], logits)
        return logits.at[row, tokens].add(state.bias_values[request], mode="drop")

    def penalise(logits):
        return _penalise(logits, request, state, seen)

    def hold(logits):
        ends = _or_nowhere(jnp.where(held[:, None], seen.eos[request], -1), logits)
        return logits.at[row, ends].set(-jnp.inf, mode="drop")

    def every(logits):
        for asked, apply in ((biased, bias), (penalised, penalise), (held, hold)):
            logits = lax.cond(jnp.any(asked), apply, lambda logits: logits, logits)
        return logits

    return lax.cond(jnp.any(biased | penalised | held), every, lambda logits: logits, logits)


def _penalise(logits, request, state, seen) -> Array:
    """Repetition, presence and frequency penalties of what was committed or drafted before each row's token."""
    rows, vocab = logits.shape
    batch, slots = seen.tokens.shape
    slot = jnp.arange(slots)
    committed = slot < seen.lengths[:, None]
    generated = committed & (slot >= seen.prompt_lengths[:, None])
    own = jnp.arange(batch)[:, None]
    in_text = jnp.zeros((batch, vocab), bool).at[own, jnp.where(committed, seen.tokens, vocab)].set(True, mode="drop")
    counts = jnp.zeros((batch, vocab), jnp.float32)
    counts = counts.at[own, jnp.where(generated, seen.tokens, vocab)].add(1, mode="drop")
    in_text, counts = in_text[request], counts[request]
    if seen.draft is not None:
        above = ancestor_matrix(seen.draft.ancestors)[request, seen.node]
        above = above.at[:, 0].set(False)  # the root is in the buffer already
        drafted = jnp.where(above, seen.draft.tokens[request], vocab)
        counts = counts.at[jnp.arange(rows)[:, None], drafted].add(1, mode="drop")
    repetition = state.repetition[request][:, None]
    scaled = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(in_text | (counts > 0), scaled, logits)
    logits = logits - state.frequency[request][:, None] * counts
    return logits - jnp.where(counts > 0, state.presence[request][:, None], 0)


def _or_nowhere(tokens: Array, logits: Array) -> Array:
    """Unused ids (-1) moved past the vocabulary, where a scatter drops them instead of counting from the end."""
    return jnp.where(tokens < 0, logits.shape[-1], tokens)


def _ordered_bits(x: Array) -> Array:
    """Unsigned integers in the order of the floats `x`."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0, x), jnp.uint32)  # one zero, not two
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits >= sign, ~bits, bits | sign)


def _bits(x: Array) -> Array:
    """Floats that are not negative, as unsigned integers in their own order."""
    return lax.bitcast_convert_type(x, jnp.uint32)


def _threshold(keys: Array, weight: Array, need: Array) -> Array:
    """The largest key such that the keys not below it weigh at least `need`, found bit by bit from the top."""

    def set_bit(i, found):
        candidate = found | (jnp.uint32(1 << 31) >> i.astype(jnp.uint32))
        weighs = jnp.sum(jnp.where(keys >= candidate[..., None], weight, 0), axis=-1)
        return jnp.where(weighs >= need, candidate, found)

    return lax.fori_loop(0, 32, set_bit, jnp.zeros(keys.shape[:-1], jnp.uint32))
