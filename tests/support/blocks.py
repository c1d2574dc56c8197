"""Tiny block drafters with random weights, their arithmetic in numpy float64, and a table target that has features."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from specjax import sampling
from specjax.drafters import learned
from specjax.drafters.base import Context, Features
from specjax.drafters.config import HeadConfig, expected_tensors
from specjax.targets.config import RopeConfig
from specjax.targets.decoder import Output
from support import toy

VOCAB, WIDTH, MASK = toy.VOCAB, 32, 63


def head_config(family="dflash", **changes) -> HeadConfig:
    """One layer of width 32 on the tiny target: 4 query and 2 key/value heads of 8, two taps, a block of 5."""
    values = {
        "family": family,
        "num_layers": 1,
        "hidden_size": WIDTH,
        "intermediate_size": 48,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-6,
        "rope": RopeConfig(theta=100.0),
        "qk_norm": True,
        "vocab_size": VOCAB,
        "draft_vocab_size": VOCAB,
        "target_hidden_size": WIDTH,
        "taps": (0, 1),
        "mask_token_id": MASK,
        "block_size": 5,
    }
    families = {
        "dflash2": {"conv_kernel": 2, "conv_group": 8, "selector_rank": 6, "selector_top_k": 7},
        "dspark": {"shifted": True, "markov_rank": 6, "confidence": True},
        "ubtree": {"selector_rank": 6, "selector_top_k": 7, "codebook_hidden": 10, "tree_budget": 16, "tree_width": 6},
    }
    return HeadConfig(**(values | families.get(family, {}) | changes))


def random_tensors(config: HeadConfig, seed: int = 0, scale: float = 0.35) -> dict[str, np.ndarray]:
    """Weights at a scale where every part of the arithmetic shows in the result."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in expected_tensors(config).items():
        if name == "candidate_head.lift.weight":
            continue  # instead of `up`
        x = scale * rng.standard_normal(shape)
        if "norm" in name and not config.norm_offset:
            x = 1 + x
        tensors[name] = x.astype(np.float32)
    if "d2t" in tensors:
        ids = np.sort(rng.choice(config.vocab_size, config.draft_vocab_size, replace=False))
        tensors["d2t"] = ids - np.arange(config.draft_vocab_size)
    return tensors


def build(config: HeadConfig, tensors=None, target=None, dtype=jnp.float32, **options):
    """`(drafter, params)` on the tiny target or on `target = (target, params)`."""
    model, params = target or toy.tiny()
    return learned.build(config, tensors or random_tensors(config), model, params, dtype, **options)


# ---------------------------------------------------------------- what a drafter is given


def context(rows, lengths, width=0, features=None, eos=(), active=None, **settings) -> Context:
    """A context of token `rows`; `settings` are fields of the sampling state, one value for all or one each."""
    tokens = np.zeros((len(rows), max(width, *(len(row) for row in rows))), np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    batch = len(rows)
    state = sampling.neutral(batch)
    for name, value in settings.items():
        field = getattr(state, name)
        state = dataclasses.replace(state, **{name: jnp.broadcast_to(jnp.asarray(value, field.dtype), field.shape)})
    return Context(
        tokens=jnp.asarray(tokens),
        lengths=jnp.asarray(lengths, jnp.int32),
        prompt_lengths=jnp.ones((batch,), jnp.int32),
        active=jnp.ones((batch,), bool) if active is None else jnp.asarray(active),
        eos=jnp.asarray([[*eos, *[-1] * (4 - len(eos))]] * batch, jnp.int32),
        sampling=state,
        features=features,
    )


def features(taps, start, count) -> Features:
    """Rows `taps[b, n]` at positions `start[b] ...`, the first `count[b]` of them live."""
    taps = jnp.asarray(taps, jnp.float32)
    positions = jnp.asarray(start, jnp.int32)[:, None] + jnp.arange(taps.shape[1], dtype=jnp.int32)
    return Features(positions=positions, count=jnp.asarray(count, jnp.int32), taps=taps)


def ragged(taps) -> Features:
    """All rows of `taps[b]`, from position 0 on, padded to the longest."""
    longest = max(len(rows) for rows in taps)
    padded = np.stack([np.pad(rows, ((0, longest - len(rows)), (0, 0)), constant_values=9.0) for rows in taps])
    return features(padded, [0] * len(taps), [len(rows) for rows in taps])


def first_draft(drafter, params, context, capacity=64):
    """The draft for a context whose features hold all that the drafter is ever told."""
    state = drafter.init_state(context.tokens.shape[0], capacity)
    return jax.jit(lambda p, s, c: drafter.draft(p, s, c, drafter.shape)[0])(params, state, context)


@functools.partial(jax.jit, static_argnums=0)
def _prefill(drafter, params, state, row, start, count, given):
    tokens = jnp.zeros((given.taps.shape[1] + 1,), jnp.int32)
    return drafter.prefill(params, state, row, tokens, start, count, given)


def prefilled(drafter, params, taps, lengths, capacity=64, chunk=None):
    """The drafter's state after `lengths[b]` positions with features `taps[b]`, in chunks of 8 or `chunk`."""
    state = drafter.init_state(len(lengths), capacity)
    for row, length in enumerate(lengths):
        size = chunk or 8
        for start in range(0, length, size):
            rows = np.zeros((1, size, taps[row].shape[-1]), np.float32)
            count = min(size, length - start)
            rows[0, :count] = taps[row][start : start + count]
            rows[0, count:] = 7.0  # padding that must leave no trace
            given = features(rows, [start], [count])
            state = _prefill(drafter, params, state, jnp.int32(row), jnp.int32(start), jnp.int32(count), given)
    return state


# ---------------------------------------------------------------- the arithmetic, once more


def norm(config, weight, x):
    weight = np.asarray(weight, np.float64) + (1 if config.norm_offset else 0)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + config.rms_norm_eps) * weight


def rotated(config, x, positions):
    """`x[n, h, f]` rotated: pair i by `position * theta ** (-2i/f)`; neighbours or halves are the pairs."""
    turning = config.rotary_dims or config.head_dim
    x, rest = x[..., :turning], x[..., turning:]
    half = turning // 2
    speed = config.rope.theta ** (-2 * np.arange(half) / turning) / (config.rope.factor or 1)
    angle = np.outer(positions, speed)[:, None]
    low, high = (x[..., 0::2], x[..., 1::2]) if config.rope_interleaved else (x[..., :half], x[..., half:])
    turned = low * np.cos(angle) - high * np.sin(angle), high * np.cos(angle) + low * np.sin(angle)
    if config.rope_interleaved:
        return np.concatenate([np.stack(turned, axis=-1).reshape(x.shape), rest], axis=-1)
    return np.concatenate([*turned, rest], axis=-1)


def silu(x):
    return x / (1 + np.exp(-x))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def sees(query, key, anchor, window, causal):
    """Whether the row at position `query` sees position `key`; context lies before the anchor, the block from there."""
    if window is not None and abs(query - key) >= window:
        return False
    return key < anchor or not causal or key <= query


def convolved(config, tensors, prefix, n, x, side):
    """A dynamic convolution, row by row and channel by channel, with kernels made from `n`."""
    base = tensors[f"{prefix}.base_kernel"].astype(np.float64)
    made = n @ tensors[f"{prefix}.kernel_projection.weight"].astype(np.float64).T
    made = made.reshape(len(n), 2, config.conv_kernel, -1)
    out = np.zeros_like(x)
    for t in range(len(x)):
        for offset in range(min(config.conv_kernel, t + 1)):
            for channel in range(x.shape[1]):
                factor = base[side, offset, channel] + made[t, side, offset, channel // config.conv_group]
                out[t, channel] += factor * x[t - offset, channel]
    return out


def hidden(config, tensors, embedding, taps, anchor, rows):
    """Post-norm rows of a block of `rows` after context features `taps[s]`, of one request, from scratch."""
    w = {name: np.asarray(x, np.float64) for name, x in tensors.items()}
    c = norm(config, w["hidden_norm.weight"], np.asarray(taps, np.float64) @ w["fc.weight"].T)
    x = np.asarray(embedding, np.float64)[[anchor] + [config.mask_token_id] * (rows - 1)] * config.embedding_scale
    start = len(c)
    positions = np.arange(start + rows)
    ratio = config.num_heads // config.num_kv_heads
    for i in range(config.num_layers):
        window = config.windows[i] if config.windows else None
        causal = config.block_causal[i] if config.block_causal else window is not None

        def of(name, i=i):
            return w[f"layers.{i}.{name}"]

        def heads(x, name, of=of):
            y = x @ of(f"self_attn.{name}_proj.weight").T
            y = y + of(f"self_attn.{name}_proj.bias") if config.attention_bias else y
            y = y.reshape(len(x), -1, config.head_dim)
            return norm(config, of(f"self_attn.{name}_norm.weight"), y) if config.qk_norm and name != "v" else y

        n = norm(config, of("input_layernorm.weight"), x)
        y = convolved(config, tensors, f"layers.{i}.attention_conv", n, n, 0) if config.conv_kernel else n
        q = rotated(config, heads(y, "q"), positions[start:])
        k = rotated(config, heads(np.concatenate([c, y]), "k"), positions)
        v = heads(np.concatenate([c, y]), "v")
        out = np.zeros((rows, config.num_heads, config.head_dim))
        for row in range(rows):
            keys = [p for p in positions if sees(start + row, p, start, window, causal)]
            for head in range(config.num_heads):
                score = k[keys, head // ratio] @ q[row, head] / np.sqrt(config.head_dim)
                weight = np.exp(score - score.max())
                out[row, head] = weight / weight.sum() @ v[keys, head // ratio]
        out = out.reshape(rows, -1) @ of("self_attn.o_proj.weight").T
        x = x + (convolved(config, tensors, f"layers.{i}.attention_conv", n, out, 1) if config.conv_kernel else out)
        n = norm(config, of("post_attention_layernorm.weight"), x)
        y = convolved(config, tensors, f"layers.{i}.mlp_conv", n, n, 0) if config.conv_kernel else n
        out = (silu(y @ of("mlp.gate_proj.weight").T) * (y @ of("mlp.up_proj.weight").T)) @ of("mlp.down_proj.weight").T
        x = x + (convolved(config, tensors, f"layers.{i}.mlp_conv", n, out, 1) if config.conv_kernel else out)
    return norm(config, w["norm.weight"], x)


def logits(config, weight, rows):
    """What a full head makes of hidden rows."""
    y = rows @ np.asarray(weight, np.float64).T * config.output_multiplier
    return y if config.logit_softcap is None else config.logit_softcap * np.tanh(y / config.logit_softcap)


def log_softmax(x):
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


# ---------------------------------------------------------------- a target with features


@dataclasses.dataclass(frozen=True)
class FeatureTable(toy.LookupTarget):
    """A `LookupTarget` with residual streams: tap `t` of a row is `taps[t, token] * cos(position + 1)`.

    Its hidden states are as wide: token and position, and beside them what the first stream has there.
    """

    def forward(self, params, rows, cache, committed, taps=()) -> Output:
        out = super().forward(params, rows, cache, committed)
        wave = jnp.cos(rows.positions + 1.0)[:, None]
        streams = [params["taps"][t][rows.tokens] * wave for t in taps]
        hidden = jnp.concatenate([out.hidden, (params["taps"][0][rows.tokens] * wave)[:, 2:]], axis=-1)
        return dataclasses.replace(out, hidden=hidden, taps=jnp.concatenate(streams, axis=-1) if streams else None)


@functools.cache
def feature_target(vocab: int, seed: int = 0, spread: float = 1.5):
    """`(target, params)`: random next-token logits by last token, random features, random embedding."""
    rng = np.random.default_rng(seed)
    target = FeatureTable(toy.tiny_config(vocab_size=vocab))
    params = toy.lookup(vocab, by_token=spread * rng.standard_normal((vocab, vocab)))
    params["taps"] = jnp.asarray(rng.standard_normal((target.config.num_layers, vocab, WIDTH)), jnp.float32)
    params["embedding"] = jnp.asarray(rng.standard_normal((vocab, WIDTH)), jnp.float32)
    return target, params
