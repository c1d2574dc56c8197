"""Where training starts.

Random weights, and then what is known of the target put in: its own layers where shapes agree, and for EAGLE-3 and MTP
a *ridge regression*, which costs seconds and is worth tens of thousands of tokens. MLPs that are not copied start at
zero output, so that they do not disturb what has been put in.

EAGLE-3. The next position's final hidden state is regressed on [normed taps, normed embedding of the next token]. The
part on taps is `fc`. The part on the embedding goes into V and O: queries and keys start as one and the same projection
of the embedding, so that a row attends to itself (its score with itself is a square, with others a chance product), and
the two matrices are the best factors that the heads have room for.

MTP. The residual stream before the target's last layer, at the next position, is regressed on [normed embedding of the
next token, normed hidden state]: that is the fuse matrix. The module's layer is the target's last one, which finishes
the work.

Block drafters. `fc` foresees the next position's final hidden state, and the first layer's values pass its leading
directions on: whatever the context is attended to, what comes out is a guess. (The target's own layers are a bad start:
a block's rows are embeddings, and what those layers make of embeddings is loud and wrong.)
"""

import functools
from typing import Any

import jax
import numpy as np

from specjax.drafters.config import HeadConfig, expected_tensors
from specjax.targets.decoder import Target
from specjax.training.features import captured
from specjax.training.packing import Packed

SELF_SCORE = 8.0  # of a row with itself, when EAGLE-3's attention starts
COOL = 0.3  # the final norm of a random start, in parts of the target's
PENALTY = 1e-2  # of the ridge, in parts of the mean variance


def initial(
    config: HeadConfig,
    target: Target,
    target_params: Any,
    packed: Packed,
    warm_rows: int,
    seed: int,
    batch: int,
    scale: np.ndarray,
) -> dict[str, np.ndarray]:
    """The tensors that training starts from, by canonical name, in float32.

    Args:
        config: the drafter.
        target: the model that it is for.
        target_params: its arrays.
        packed: training rows.
        warm_rows: how many of them the regression sees; 0 leaves what needs none of them.
        seed: of the random part.
        batch: rows at a time.
        scale: of the taps, for a block drafter (see `tap_scale`).
    """
    tensors = random(config, target_params, seed)
    if warm_rows == 0:
        return tensors
    rows = packed.batch(np.random.default_rng(seed).permutation(len(packed))[:warm_rows])
    if config.family == "eagle3":
        return tensors | _eagle3(config, tensors, target, target_params, rows, batch)
    if config.family == "mtp":
        return tensors | _mtp(config, target, target_params, rows, batch)
    return tensors | _block(config, tensors, target, target_params, rows, batch, scale)


def random(config: HeadConfig, target_params: Any, seed: int) -> dict[str, np.ndarray]:
    """Scaled normal matrices, norms of 1; terms that only add to a working drafter start at 0."""
    rng = np.random.default_rng(seed)
    final = COOL * np.asarray(target_params["norm"]["weight"], np.float32)
    zero = ("down_proj.weight", "successor_codebook", "markov_w2.weight", "kernel_projection.weight")
    zero += ("log_alpha", "log_lambda", "confidence_head.proj.weight", ".bias", "psi.fc2.weight")
    tensors = {}
    for name, shape in expected_tensors(config).items():
        if name == "norm.weight":
            x = final
        elif name.endswith("norm.weight") or "fc_norm" in name:
            x = np.ones(shape)
        elif name.endswith(zero):
            x = np.zeros(shape)
        elif name.endswith("base_kernel"):
            x = np.zeros(shape)
            x[:, 0] = 1
        elif "phi.fc1" in name or "psi.fc1" in name:
            size = np.sqrt(np.mean(np.square(np.asarray(target_params["embedding"][:1024], np.float32))))
            x = rng.standard_normal(shape) / (np.sqrt(shape[-1]) * size)
        elif len(shape) == 2 and name.endswith(("codebook", "markov_w1.weight")):
            x = rng.standard_normal(shape)
        else:
            x = rng.standard_normal(shape) / np.sqrt(shape[-1])
        tensors[name] = x.astype(np.float32)
    return tensors


def tap_scale(config: HeadConfig, target: Target, target_params: Any, packed: Packed, rows: int) -> np.ndarray:
    """The deviation of each channel of the taps: a few of a model's channels are thousands of times the others.

    A block drafter's file has no norm between taps and `fc`. It is trained on taps divided by this, and the division
    is folded into `fc` when it is written.
    """
    x = _run(target, config.taps, target_params, packed.batch(np.arange(min(rows, len(packed)))), 8)
    return np.maximum(x["taps"].reshape(-1, x["taps"].shape[-1]).std(axis=0), 1e-3)


def _run(target: Target, taps: tuple[int, ...], params: Any, rows: Any, batch: int) -> dict[str, np.ndarray]:
    """Features of rows in float32, some rows at a time, padding left out: `[n, ...]` by name."""
    count = rows.tokens.shape[0]
    parts = []
    for start in range(0, count, batch):
        some = np.minimum(np.arange(start, start + batch), count - 1)
        part = jax.tree.map(functools.partial(np.take, indices=some, axis=0), rows)
        parts.append(jax.device_get(captured(target, taps, params, part)))
    out = {"hidden": [x.hidden for x in parts]} | ({"taps": [x.taps for x in parts]} if taps else {})
    return {name: np.concatenate(x)[:count].astype(np.float32) for name, x in out.items()}


def _pairs(rows: Any, embedding: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where a token follows in the same dialogue, and the embedding of it, `[b, t]` and `[n, d]`."""
    segments = np.asarray(rows.segments)
    follows = np.zeros(segments.shape, bool)
    follows[:, :-1] = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    after = np.roll(np.asarray(rows.tokens), -1, axis=1)[follows]
    return follows, embedding[after]


def ridge(x: np.ndarray, y: np.ndarray, penalty: float = PENALTY) -> np.ndarray:
    """The matrix `w [y, x]` that makes `x @ w.T` nearest to `y`, with a penalty on its size."""
    gram = x.T @ x
    gram[np.diag_indices_from(gram)] += penalty * np.trace(gram) / len(gram)
    return np.linalg.solve(gram, x.T @ y).T


def _unit(x: np.ndarray, eps: float) -> np.ndarray:
    """RMS norm over the last axis."""
    return x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + eps)


def _eagle3(
    c: HeadConfig, tensors: dict[str, np.ndarray], target: Target, params: Any, rows: Any, batch: int
) -> dict[str, np.ndarray]:
    seen = _run(target, c.taps, params, rows, batch)
    follows, after = _pairs(rows, np.asarray(params["embedding"], np.float32))
    taps = [_unit(x, c.rms_norm_eps) for x in np.split(seen["taps"][follows], len(c.taps), axis=-1)]
    embedded = _unit(after * c.embedding_scale, c.rms_norm_eps)
    final = np.asarray(params["norm"]["weight"], np.float32)
    later = np.roll(seen["hidden"], -1, axis=1)[follows] / np.where(final == 0, 1, final)
    x = np.concatenate([*taps, embedded], axis=-1)
    w = ridge(x, later)
    d, split = c.hidden_size, len(c.taps) * c.target_hidden_size
    out = {"fc.weight": w[:, :split]}
    out |= _through_heads(c, tensors, w[:, split:])
    predicted = x @ w.T
    cosine = np.sum(predicted * later, -1) / (np.linalg.norm(predicted, axis=-1) * np.linalg.norm(later, axis=-1))
    out["norm.weight"] = final * float(np.mean(cosine))
    assert out["fc.weight"].shape == (d, split)
    return {name: value.astype(np.float32) for name, value in out.items()}


def _through_heads(c: HeadConfig, tensors: dict[str, np.ndarray], w: np.ndarray) -> dict[str, np.ndarray]:
    """Attention weights by which each row adds about `w @ (its own embedding)` to its residual."""
    f, d, ratio = c.head_dim, c.hidden_size, c.num_heads // c.num_kv_heads
    u, s, vt = np.linalg.svd(w)
    rank = min(c.num_kv_heads * f, d)
    v = np.zeros((c.num_kv_heads * f, 2 * d))
    v[:rank, :d] = np.sqrt(s[:rank])[:, None] * vt[:rank]
    o = np.zeros((d, c.num_heads, f))
    left = np.zeros((d, c.num_kv_heads * f))
    left[:, :rank] = u[:, :rank] * np.sqrt(s[:rank])
    for head in range(c.num_heads):
        group = head // ratio
        o[:, head] = left[:, group * f : (group + 1) * f] / ratio
    # A square of f terms of size |k|^2 = SELF_SCORE * sqrt(f) in all, of an input of norm sqrt(d).
    size = np.sqrt(SELF_SCORE * np.sqrt(f) / f)
    rng = np.random.default_rng(0)
    k = np.zeros((c.num_kv_heads, f, 2 * d))
    for group in range(c.num_kv_heads):
        k[group, :, :d] = size * np.linalg.qr(rng.standard_normal((d, max(f, 1))))[0].T[:f]
    q = np.repeat(k, ratio, axis=0)
    return {
        "layers.0.self_attn.q_proj.weight": q.reshape(-1, 2 * d),
        "layers.0.self_attn.k_proj.weight": k.reshape(-1, 2 * d),
        "layers.0.self_attn.v_proj.weight": v,
        "layers.0.self_attn.o_proj.weight": o.reshape(d, -1),
    }


def _mtp(c: HeadConfig, target: Target, params: Any, rows: Any, batch: int) -> dict[str, np.ndarray]:
    last = target.config.num_layers - 1
    seen = _run(target, (last,), params, rows, batch)
    follows, after = _pairs(rows, np.asarray(params["embedding"], np.float32))
    x = np.concatenate([_unit(after, c.rms_norm_eps), _unit(seen["hidden"][follows], c.rms_norm_eps)], axis=-1)
    later = np.roll(seen["taps"], -1, axis=1)[follows]
    out = {"fuse.weight": ridge(x, later), "norm.weight": np.asarray(params["norm"]["weight"], np.float32)}
    out |= target_layer(c, params, last, 0)
    return {name: value.astype(np.float32) for name, value in out.items()}


def _block(
    c: HeadConfig, tensors: dict[str, np.ndarray], target: Target, params: Any, rows: Any, batch: int, scale: np.ndarray
) -> dict[str, np.ndarray]:
    seen = _run(target, c.taps, params, rows, batch)
    follows, _ = _pairs(rows, np.asarray(params["embedding"], np.float32))
    final = np.asarray(params["norm"]["weight"], np.float32)
    later = np.roll(seen["hidden"], -1, axis=1)[follows] / np.where(final == 0, 1, final)
    fc = ridge(seen["taps"][follows] / scale, later)
    out = {"fc.weight": fc}
    # The leading directions of what `fc` foresees, through the values of the heads and back.
    foreseen = (seen["taps"][follows] / scale) @ fc.T
    f, d, ratio = c.head_dim, c.hidden_size, c.num_heads // c.num_kv_heads
    rank = min(c.num_kv_heads * f, d)
    lead = np.linalg.eigh(foreseen.T @ foreseen)[1][:, ::-1][:, :rank].T
    v = np.zeros((c.num_kv_heads * f, d))
    v[:rank] = lead
    o = np.repeat(v.T.reshape(d, c.num_kv_heads, f), ratio, axis=1) / ratio
    out |= {"layers.0.self_attn.v_proj.weight": v, "layers.0.self_attn.o_proj.weight": o.reshape(d, -1)}
    return {name: value.astype(np.float32) for name, value in out.items()}


def target_layer(c: HeadConfig, params: Any, source: int, index: int) -> dict[str, np.ndarray]:
    """A layer of the target under a drafter's names, as far as shapes agree.

    A narrower MLP takes the neurons with the largest weights.
    """
    layer = jax.tree.map(lambda x: np.asarray(x, np.float32), params["layers"][source])
    prefix, heads, groups = f"layers.{index}", c.num_heads, c.num_kv_heads
    q, k, v = np.split(layer["attention"]["qkv"]["weight"], [heads * c.head_dim, (heads + groups) * c.head_dim])
    gate, up = np.split(layer["mlp"]["gate_up"]["weight"], 2)
    down = layer["mlp"]["down"]["weight"]
    if c.intermediate_size <= len(gate):
        weight = np.linalg.norm(down, axis=0) * np.linalg.norm(up, axis=1)
        kept = np.sort(np.argsort(-weight)[: c.intermediate_size])
        gate, up, down = gate[kept], up[kept], down[:, kept]
    out = {
        "input_layernorm.weight": layer["attention_norm"]["weight"],
        "post_attention_layernorm.weight": layer["mlp_norm"]["weight"],
        "self_attn.q_proj.weight": q,
        "self_attn.k_proj.weight": k,
        "self_attn.v_proj.weight": v,
        "self_attn.o_proj.weight": layer["attention"]["out"]["weight"],
        "mlp.gate_proj.weight": gate,
        "mlp.up_proj.weight": up,
        "mlp.down_proj.weight": down,
    }
    if c.qk_norm:
        for name in "qk":
            out[f"self_attn.{name}_norm.weight"] = layer["attention"][f"{name}_norm"]["weight"]
    if c.attention_bias:
        bias = layer["attention"]["qkv"]["bias"]
        parts = np.split(bias, [heads * c.head_dim, (heads + groups) * c.head_dim])
        out |= {f"self_attn.{name}_proj.bias": x for name, x in zip("qkv", parts, strict=True)}
    want = expected_tensors(c)
    named = {f"{prefix}.{name}": x for name, x in out.items()}
    return {name: x for name, x in named.items() if want.get(name) == x.shape}
