"""A whole pass over one text in plain numpy, float64: what incremental decoding has to reproduce."""

import numpy as np

from specjax.targets.config import DecoderConfig


def _norm(x, weight, eps):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def _linear(p, x):
    return x @ p["weight"].T + p.get("bias", 0.0)


def _rotate(x, positions, theta):
    half = x.shape[-1] // 2
    angles = positions[:, None] * theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    low, high = x[..., :half], x[..., half:]
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


def full_forward(config: DecoderConfig, params, tokens, positions=None, mask=None):
    """One pass over `tokens` (default rope).

    Args:
        config: the architecture.
        params: the decoder's weights, as the engine has them.
        tokens: the text, or the nodes of a tree behind it.
        positions: of each token; 0, 1, 2 ... by default.
        mask: `bool[n, n]`, what each token sees; causal by default. Windows are added to it.

    Returns:
        Logits `[n, v]`, the residual streams (entry `t`: after `t` layers) and the keys and values of each layer,
        `[n, g, f]`.
    """
    assert config.rope.kind == "default"
    c, n = config, len(tokens)
    params = _float64(params)
    positions = np.arange(n) if positions is None else np.asarray(positions)
    mask = np.tril(np.ones((n, n), bool)) if mask is None else mask
    x = params["embedding"][np.asarray(tokens)]
    streams, cache = [x], []
    for index in range(c.num_layers):
        layer = params["layers"][index]
        attention = layer["attention"]
        qkv = _linear(attention["qkv"], _norm(x, layer["attention_norm"]["weight"], c.rms_norm_eps))
        qkv = qkv.reshape(n, c.num_heads + 2 * c.num_kv_heads, c.head_dim)
        q, k, v = np.split(qkv, (c.num_heads, c.num_heads + c.num_kv_heads), axis=1)
        if c.qk_norm:
            q = _norm(q, attention["q_norm"]["weight"], c.rms_norm_eps)
            k = _norm(k, attention["k_norm"]["weight"], c.rms_norm_eps)
        q, k = _rotate(q, positions, c.rope.theta), _rotate(k, positions, c.rope.theta)
        cache.append((k, v))
        ratio, window = c.num_heads // c.num_kv_heads, c.windows[index]
        seen = mask if window is None else mask & (positions[None, :] > positions[:, None] - window)
        s = np.einsum("nhf,jhf->hnj", q, k.repeat(ratio, axis=1)) * c.head_dim**-0.5
        s = np.where(seen, s, -np.inf)
        weights = np.exp(s - s.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        y = np.einsum("hnj,jhf->nhf", weights, v.repeat(ratio, axis=1)).reshape(n, -1)
        x = x + _linear(attention["out"], y)
        gate, up = np.split(
            _linear(layer["mlp"]["gate_up"], _norm(x, layer["mlp_norm"]["weight"], c.rms_norm_eps)), 2, -1
        )
        x = x + _linear(layer["mlp"]["down"], gate / (1 + np.exp(-gate)) * up)
        streams.append(x)
    head = params["embedding"] if c.tie_word_embeddings else params["head"]["weight"]
    return _norm(x, params["norm"]["weight"], c.rms_norm_eps) @ head.T, streams, cache


def _float64(tree):
    if isinstance(tree, dict):
        return {key: _float64(value) for key, value in tree.items()}
    return np.asarray(tree, np.float64)
