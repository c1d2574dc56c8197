"""Sampling: what a request may ask for, and how logits become `p`, and `p` a token, for each node of each row.

Order of the processing: logit bias, repetition penalty, presence and frequency penalties, `min_tokens`; then
temperature, top-k, top-p, min-p (the order of Hugging Face's processors). Nothing here keeps a memory: penalties count
the token buffer and the drafted ancestors of a node each time, so a rejected draft leaves no trace. What no row asks
for is skipped at run time (`lax.cond`), so that one compiled program serves every mix of requests.

A row never depends on its neighbours: its parameters, its counts and its random numbers are its own.
"""

import dataclasses
import secrets
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specjax.array_types import Array, Bool, Float, Int, UInt32, pytree
from specjax.draft import Draft, ancestor_matrix

MAX_LOGPROBS = 20
MAX_BIAS = 300

# Streams of random numbers. SAMPLE is keyed by the position of the token that it draws. ACCEPT and DRAFT are keyed by
# the position of the round's root, with the index inside the round of what is tested or drawn: a round may look at
# drafts past the ones it accepts, so the same position must get fresh numbers when it is drafted again.
SAMPLE, ACCEPT, DRAFT = 0, 1, 2

_LANES = 128
_FLOAT32 = np.finfo(np.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """What one request asks for. Every field can come from JSON or from a command line; lists become tuples.

    Attributes:
        max_tokens: most tokens to generate, the end token included.
        temperature: divides the logits; 0 takes the argmax (lowest id on ties) and makes the filters irrelevant.
        top_k: keep the k largest logits, 0 = off. Logits equal to the k-th are all kept.
        top_p: keep the fewest tokens, most probable first, that hold this much of the mass (after top-k); 1 = off.
            Tokens exactly as probable as the last one kept are kept too.
        min_p: keep tokens at least this fraction as probable as the most probable one; 0 = off.
        repetition_penalty: divides the logits > 0 of the tokens in prompt and output, multiplies the others; 1 = off.
        presence_penalty: subtracted from the logit of every token generated so far (the prompt does not count).
        frequency_penalty: subtracted once per occurrence among the generated tokens (the prompt does not count).
        logit_bias: token id to a value added to its logit, at most 300 of them.
        min_tokens: end tokens cannot be drawn before this many tokens have been generated.
        seed: 64-bit seed; the same seed gives the same text, alone or in a batch. None draws a fresh one.
        stop: strings that end the text; a single string is taken as one.
        stop_token_ids: token ids that end the text, beside the model's own.
        include_stop: keep the matched stop string in the text.
        ignore_eos: go on past the model's end tokens.
        logprobs: report the log-probability of each token and of this many most likely ones (0: of the token alone).
            They are the raw log-softmax, before bias, penalties, temperature and filters. None = off.

    Raises:
        ValueError: a value is out of its range; the message names the field, the value and the range.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    min_tokens: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self):
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        # JSON has no integer keys.
        object.__setattr__(self, "logit_bias", {_integer("logit_bias id", k): v for k, v in self.logit_bias.items()})

        _require("max_tokens", self.max_tokens, _is_int(self.max_tokens) and self.max_tokens >= 1, "an integer >= 1")
        _require("temperature", self.temperature, _finite(self.temperature) and self.temperature >= 0, "finite, >= 0")
        _require("top_k", self.top_k, _is_int(self.top_k) and self.top_k >= 0, "an integer >= 0 (0 = off)")
        _require("top_p", self.top_p, _finite(self.top_p) and 0 < self.top_p <= 1, "in (0, 1]")
        _require("min_p", self.min_p, _finite(self.min_p) and 0 <= self.min_p <= 1, "in [0, 1]")
        penalty = self.repetition_penalty
        _require("repetition_penalty", penalty, _finite(penalty) and penalty > 0, "finite, > 0 (1 = off)")
        for name in ("presence_penalty", "frequency_penalty"):
            _require(name, getattr(self, name), _finite(getattr(self, name)), "finite")
        for token, value in self.logit_bias.items():
            _require(f"logit_bias[{token}]", value, _finite(value), "finite")
        if len(self.logit_bias) > MAX_BIAS:
            raise ValueError(f"logit_bias has {len(self.logit_bias)} entries, at most {MAX_BIAS} are taken")
        _require("min_tokens", self.min_tokens, _is_int(self.min_tokens) and self.min_tokens >= 0, "an integer >= 0")
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})")
        if self.seed is not None:
            _check_seed(self.seed)
        for text in stop:
            if not isinstance(text, str) or not text:
                raise ValueError(f"stop must be non-empty strings, got {text!r}: it would match everywhere")
        for token in self.stop_token_ids:
            _require("stop_token_ids", token, _is_int(token), "integers")
        valid = self.logprobs is None or (_is_int(self.logprobs) and 0 <= self.logprobs <= MAX_LOGPROBS)
        _require("logprobs", self.logprobs, valid, f"None or an integer in 0..{MAX_LOGPROBS}")


@pytree
class SamplingState:
    """The sampling parameters of a batch, one entry a request.

    Attributes:
        temperature, top_k, top_p, min_p, repetition, presence, frequency: as in `SamplingParams`.
        bias_tokens: token ids that `bias_values` are added to, -1 where unused.
        min_length: no end token below this position (prompt length + `min_tokens`).
        seed: the two words of the request's 64-bit seed, high word first.
        logprobs: whether the request reports log-probabilities.
    """

    temperature: Float[Array, " b"]
    top_k: Int[Array, " b"]
    top_p: Float[Array, " b"]
    min_p: Float[Array, " b"]
    repetition: Float[Array, " b"]
    presence: Float[Array, " b"]
    frequency: Float[Array, " b"]
    bias_tokens: Int[Array, "b e"]
    bias_values: Float[Array, "b e"]
    min_length: Int[Array, " b"]
    seed: UInt32[Array, "b 2"]
    logprobs: Bool[Array, " b"]


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


def neutral(batch: int, max_bias: int = MAX_BIAS) -> SamplingState:
    """Parameters that ask for nothing (temperature 1, all else off): what empty and padding rows carry."""
    return SamplingState(
        temperature=jnp.ones((batch,), jnp.float32),
        top_k=jnp.zeros((batch,), jnp.int32),
        top_p=jnp.ones((batch,), jnp.float32),
        min_p=jnp.zeros((batch,), jnp.float32),
        repetition=jnp.ones((batch,), jnp.float32),
        presence=jnp.zeros((batch,), jnp.float32),
        frequency=jnp.zeros((batch,), jnp.float32),
        bias_tokens=jnp.full((batch, max_bias), -1, jnp.int32),
        bias_values=jnp.zeros((batch, max_bias), jnp.float32),
        min_length=jnp.zeros((batch,), jnp.int32),
        seed=jnp.zeros((batch, 2), jnp.uint32),
        logprobs=jnp.zeros((batch,), bool),
    )


def row_values(
    params: SamplingParams,
    *,
    prompt_length: int,
    vocab_size: int,
    seed: int | None = None,
    max_bias: int = MAX_BIAS,
) -> SamplingState:
    """One request's row of a `SamplingState`, as numpy values without the batch axis. Runs on the host.

    Args:
        params: what the request asks for.
        prompt_length: tokens of its prompt.
        vocab_size: tokens of the target's vocabulary.
        seed: used instead of `params.seed` if given (several answers to one request); without either, a fresh one.
        max_bias: entries of the state's bias arrays.

    Raises:
        ValueError: a token id is outside the vocabulary, or there are more biases than `max_bias`.
    """
    for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
        for token in ids:
            if not 0 <= token < vocab_size:
                raise ValueError(f"{name} names token {token}; the target's vocabulary is 0..{vocab_size - 1}")
    if len(params.logit_bias) > max_bias:
        raise ValueError(f"logit_bias has {len(params.logit_bias)} entries, this engine takes {max_bias}")
    seed = params.seed if seed is None else seed
    if seed is None:
        seed = secrets.randbits(64)
    _check_seed(seed)
    bias_tokens = np.full((max_bias,), -1, np.int32)
    bias_values = np.zeros((max_bias,), np.float32)
    bias_tokens[: len(params.logit_bias)] = list(params.logit_bias)
    bias_values[: len(params.logit_bias)] = list(params.logit_bias.values())
    return SamplingState(
        # Below float32's smallest normal number a division would flush to one by zero.
        temperature=np.float32(params.temperature if params.temperature >= _FLOAT32.tiny else 0),
        top_k=np.int32(min(params.top_k, vocab_size)),
        top_p=np.float32(params.top_p),
        min_p=np.float32(params.min_p),
        repetition=np.float32(params.repetition_penalty),
        presence=np.float32(params.presence_penalty),
        frequency=np.float32(params.frequency_penalty),
        bias_tokens=bias_tokens,
        bias_values=bias_values,
        min_length=np.int32(prompt_length + params.min_tokens),
        seed=np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32),
        logprobs=np.bool_(params.logprobs is not None),
    )


def set_row(state: SamplingState, row: Int[Array, ""], values: SamplingState) -> SamplingState:
    """`state` with row `row` (may be traced) replaced by `values`, as `row_values` makes them."""
    return jax.tree.map(lambda rows, value: rows.at[row].set(value), state, values)


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
    logits = _adjust(logits.astype(jnp.float32), request, state, position, seen)
    return draft_distribution(
        logits, state.temperature[request], state.top_k[request], state.top_p[request], state.min_p[request]
    )


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
    logits = logits.astype(jnp.float32)
    greedy = temperature == 0
    best = jnp.max(logits, axis=-1, keepdims=True)
    mass = jnp.exp((logits - best) / jnp.where(greedy, 1, temperature)[..., None])

    def keep_top_k(mass):
        keys = _ordered_bits(logits)
        threshold = _threshold(keys, jnp.float32(1), jnp.minimum(top_k, logits.shape[-1]).astype(jnp.float32))
        return jnp.where((keys >= threshold[..., None]) | (top_k == 0)[..., None], mass, 0)

    def keep_top_p(mass):
        keys = lax.bitcast_convert_type(mass, jnp.uint32)  # mass >= 0: its bits are in its own order
        threshold = _threshold(keys, mass, top_p * jnp.sum(mass, axis=-1))
        return jnp.where((keys >= threshold[..., None]) | (top_p >= 1)[..., None], mass, 0)

    mass = lax.cond(jnp.any((top_k > 0) & ~greedy), keep_top_k, lambda mass: mass, mass)
    mass = lax.cond(jnp.any((top_p < 1) & ~greedy), keep_top_p, lambda mass: mass, mass)
    mass = jnp.where((mass >= min_p[..., None]) | (logits == best), mass, 0)  # the largest mass is 1
    one_hot = jnp.arange(logits.shape[-1]) == jnp.argmax(logits, axis=-1, keepdims=True)
    return jnp.where(greedy[..., None], one_hot, mass / jnp.sum(mass, axis=-1, keepdims=True))


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
        p = target_distribution(logits, request, state, position, seen)
        return sample(p, state.seed[request], position)

    def argmax(logits):
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)

    return lax.cond(jnp.any(sampled) | jnp.any(adjusted), process, argmax, logits.astype(jnp.float32))


def sample(
    p: Float[Array, "*rows v"], seed: UInt32[Array, "*rows 2"], position: Int[Array, "*rows"]
) -> Int[Array, "*rows"]:
    """A token of `p` for `position`, drawn with the SAMPLE stream."""
    return pick(p, uniforms(seed, position, SAMPLE))


def uniforms(
    seed: UInt32[Array, "*rows 2"], position: Int[Array, "*rows"], stream: int, index: Int[Array, "*rows"] | int = 0
) -> Float[Array, "*rows"]:
    """Uniform numbers in [0, 1) with 24 bits: threefry's `fold_in` of seed, position, stream and index.

    A number depends on its own four arguments only, not on what else is drawn beside it. The arguments broadcast.
    """

    def word(seed, position, index):
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        for data in (position, stream, index):
            key = jax.random.fold_in(key, data)
        return jax.random.key_data(key)[0]

    position, index = jnp.asarray(position), jnp.asarray(index)
    shape = jnp.broadcast_shapes(seed.shape[:-1], position.shape, index.shape)
    flat = [jnp.broadcast_to(x, shape).reshape(-1) for x in (position, index)]
    words = jax.vmap(word)(jnp.broadcast_to(seed, (*shape, 2)).reshape(-1, 2), *flat)
    return ((words >> 8).astype(jnp.float32) * 2**-24).reshape(shape)


def pick(p: Float[Array, "*rows v"], u: Float[Array, "*rows"]) -> Int[Array, "*rows"]:
    """The token at which the cumulative sum of `p` passes `u` times its total.

    `p` needs no normalisation. A token with `p == 0` is never returned, whatever the rounding of the sums. Works on the
    sums of blocks first, so only one block has its running sum taken.
    """
    vocab = p.shape[-1]
    lanes = min(_LANES, vocab)
    p = jnp.pad(p, [(0, 0)] * (p.ndim - 1) + [(0, -vocab % lanes)])
    p = p.reshape(*p.shape[:-1], -1, lanes)
    sums = jnp.sum(p, axis=-1)
    ends = jnp.cumsum(sums, axis=-1)
    target = u * ends[..., -1]
    block = _first_past(sums, ends, target)
    before = jnp.take_along_axis(ends, jnp.maximum(block - 1, 0)[..., None], axis=-1)[..., 0]
    inside = jnp.take_along_axis(p, block[..., None, None], axis=-2)[..., 0, :]
    lane = _first_past(inside, jnp.cumsum(inside, axis=-1), target - jnp.where(block > 0, before, 0))
    return block * lanes + lane


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
    others = jnp.where(ids == jnp.argmax(logits, axis=-1, keepdims=True), 0, jnp.exp(logits - best))
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


def _threshold(keys: Array, weight: Array, need: Array) -> Array:
    """The largest key such that the keys not below it weigh at least `need`, found bit by bit from the top."""

    def set_bit(i, found):
        candidate = found | (jnp.uint32(1 << 31) >> i.astype(jnp.uint32))
        weighs = jnp.sum(jnp.where(keys >= candidate[..., None], weight, 0), axis=-1)
        return jnp.where(weighs >= need, candidate, found)

    return lax.fori_loop(0, 32, set_bit, jnp.zeros(keys.shape[:-1], jnp.uint32))


def _first_past(weights: Array, ends: Array, target: Array) -> Array:
    """First index of positive weight whose running sum is past `target`, else the last of positive weight."""
    index = jnp.arange(weights.shape[-1], dtype=jnp.int32)
    positive = weights > 0
    none = weights.shape[-1]
    first = jnp.min(jnp.where(positive & (ends > target[..., None]), index, none), axis=-1)
    last = jnp.max(jnp.where(positive, index, 0), axis=-1)
    return jnp.where(first < none, first, last)


def _require(name: str, value: object, holds: bool, wanted: str) -> None:
    if not holds:
        raise ValueError(f"{name} must be {wanted}, got {value!r}")


def _check_seed(seed: int) -> None:
    _require("seed", seed, _is_int(seed) and 0 <= seed < 2**64, "an integer in 0..2**64 - 1")


def _is_int(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _finite(value: object) -> bool:
    return isinstance(value, int | float | np.floating) and abs(float(value)) <= float(_FLOAT32.max)


def _integer(name: str, value: object) -> int:
    try:
        return int(str(value))
    except ValueError:
        raise ValueError(f"{name} must be a token id, got {value!r}") from None
