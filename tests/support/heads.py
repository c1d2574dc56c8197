"""Tiny recurrent heads: random descriptions, and their arithmetic once more in float64 numpy, one row at a time."""

import copy
import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specjax import sampling
from specjax.drafters.base import Context, Features
from specjax.drafters.config import HeadConfig, expected_tensors
from specjax.drafters.probe import read
from specjax.targets.config import RopeConfig
from support import toy

WIDTH, VOCAB = 32, toy.VOCAB


def head_config(family: str, **changes) -> HeadConfig:
    """A head of one layer, width 32, 4 query and 2 key/value heads of 8, for the tiny target."""
    values = {
        "family": family,
        "num_layers": 1,
        "hidden_size": WIDTH,
        "intermediate_size": 48,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "rope": RopeConfig(theta=10000.0),
        "vocab_size": VOCAB,
        "draft_vocab_size": VOCAB,
        "target_hidden_size": WIDTH,
        "taps": () if family == "mtp" else (1, 2, 3),
    }
    return HeadConfig(**(values | changes))


def random_tensors(config: HeadConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights at a scale where everything matters and nothing saturates."""
    rng, tensors = np.random.default_rng(seed), {}
    for name, shape in expected_tensors(config).items():
        if name == "candidate_head.lift.weight":
            continue  # instead of `up`
        if name == "d2t":
            ids = np.sort(rng.permutation(config.vocab_size)[: config.draft_vocab_size])
            tensors[name] = ids - np.arange(config.draft_vocab_size)
        elif "norm" in name:
            tensors[name] = ((0 if config.norm_offset else 1) + 0.4 * rng.standard_normal(shape)).astype(np.float32)
        elif len(shape) == 1:
            tensors[name] = (0.5 * rng.standard_normal(shape)).astype(np.float32)
        else:
            scale = 1.0 if name.startswith("embed") else 2.0 if "v_proj" in name else 1.4
            tensors[name] = (scale * rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)
    return tensors


class Reference:
    """A head that runs rows one after another; a row sees the earlier rows that it is told to.

    Args:
        config: the head.
        tensors: its weights.
        embedding: the target's embedding, used where the head has none.
        output: the target's output head, likewise.
        target_norm: the weight of the target's final norm, for MTP modules that read what comes before it.
    """

    def __init__(self, config: HeadConfig, tensors, embedding, output, target_norm=None):
        self.c = config
        self.t = {name: np.asarray(x, np.float64) for name, x in tensors.items()}
        self.embedding = self.t.get("embed_tokens.weight", np.asarray(embedding, np.float64))
        self.output = self.t.get("lm_head.weight", np.asarray(output, np.float64))
        self.target_norm = None if target_norm is None else np.asarray(target_norm, np.float64)
        self.memory: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in range(config.num_layers)]
        self.positions: list[int] = []

    def copy(self) -> "Reference":
        """The same head with the same rows, to go on from here in another way."""
        other = copy.copy(self)
        other.memory, other.positions = [list(rows) for rows in self.memory], list(self.positions)
        return other

    def norm(self, x, name: str):
        weight = self.t[f"{name}.weight"] + (1 if self.c.norm_offset else 0)
        return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + self.c.rms_norm_eps) * weight

    def condition(self, features: np.ndarray) -> np.ndarray:
        """What a row reads: of taps (EAGLE) or of a hidden state (MTP)."""
        features = np.asarray(features, np.float64)
        if self.c.family == "mtp":
            return features if self.c.hidden_normed else features / self.target_norm
        if self.c.fc_norm:
            each = np.split(features, len(self.c.taps))
            features = np.concatenate([self.norm(x, f"fc_norm.{i}") for i, x in enumerate(each)])
        if self.c.norm_before_fc:
            features = self.norm(features, "input_norm")
        return self.t["fc.weight"] @ features

    def add(self, token: int, condition: np.ndarray, position: int, sees: Sequence[int] | None = None):
        """Run a row that sees the rows `sees` (all by default) and itself; its output before the final norm."""
        c, own = self.c, len(self.positions)
        sees = [*(range(own) if sees is None else sees), own]
        self.positions.append(position)
        x = self.embedding[token] * c.embedding_scale
        if c.blank_start and position == 0:
            x = 0 * x
        if c.family == "mtp":
            parts = [self.norm(x, "embedding_norm"), self.norm(condition, "hidden_norm")]
            stream = self.t["fuse.weight"] @ np.concatenate(parts[::-1] if c.hidden_first else parts)
            read = self.norm(stream, "layers.0.input_layernorm")
        else:
            hidden = self.norm(condition, "layers.0.hidden_norm")
            stream = hidden if c.norm_before_residual else condition
            read = np.concatenate([self.norm(x, "layers.0.input_layernorm"), hidden])
        for i in range(c.num_layers):
            name = f"layers.{i}"
            if i:
                read = self.norm(stream, f"{name}.input_layernorm")
            stream = stream + self._attention(i, read, position, sees)
            n = self.norm(stream, f"{name}.post_attention_layernorm")
            gate, up = (self.t[f"{name}.mlp.{x}_proj.weight"] @ n for x in ("gate", "up"))
            stream = stream + self.t[f"{name}.mlp.down_proj.weight"] @ (gate / (1 + np.exp(-gate)) * up)
        return stream

    def normed(self, out: np.ndarray) -> np.ndarray:
        return self.norm(out, "norm")

    def feedback(self, out: np.ndarray) -> np.ndarray:
        normed = self.c.feedback_normed if self.c.family == "mtp" else self.c.norm_output
        return self.normed(out) if normed else out

    def logits(self, out: np.ndarray) -> np.ndarray:
        """Over the target's vocabulary, -inf where the draft vocabulary has no such token."""
        columns = self.output @ self.normed(out) * self.c.output_multiplier
        if self.c.logit_softcap is not None:
            columns = self.c.logit_softcap * np.tanh(columns / self.c.logit_softcap)
        if "d2t" not in self.t:
            return columns
        logits = np.full(self.c.vocab_size, -np.inf)
        logits[np.arange(len(self.t["d2t"])) + self.t["d2t"].astype(int)] = columns
        return logits

    def _attention(self, i: int, x: np.ndarray, position: int, sees: list[int]) -> np.ndarray:
        c = self.c

        def part(letter: str, heads: int) -> np.ndarray:
            name = f"layers.{i}.self_attn.{letter}_proj"
            y = self.t[f"{name}.weight"] @ x
            return (y + self.t[f"{name}.bias"] if c.attention_bias else y).reshape(heads, -1)

        q, k, v = part("q", c.num_heads), part("k", c.num_kv_heads), part("v", c.num_kv_heads)
        gate = q[:, c.head_dim :]
        q = q[:, : c.head_dim]
        if c.qk_norm:
            q, k = (self.norm(y, f"layers.{i}.self_attn.{n}_norm") for y, n in ((q, "q"), (k, "k")))
        self.memory[i].append((self._rotate(k, position), v))
        q = self._rotate(q, position)
        window = c.windows[i] if c.windows else None
        rows = [r for r in sees if window is None or self.positions[r] > position - window]
        keys, values = (np.stack([self.memory[i][r][part] for r in rows]) for part in (0, 1))
        ratio, out = c.num_heads // c.num_kv_heads, []
        for head in range(c.num_heads):
            scores = keys[:, head // ratio] @ q[head] / np.sqrt(c.head_dim)
            weights = np.exp(scores - scores.max())
            out.append(weights / weights.sum() @ values[:, head // ratio])
        y = np.concatenate(out)
        if c.attention_gate:
            y = y / (1 + np.exp(-gate.reshape(-1)))
        return self.t[f"layers.{i}.self_attn.o_proj.weight"] @ y

    def _rotate(self, x: np.ndarray, position: int) -> np.ndarray:
        """Pair (a, b) of a head's leading dimensions turns by the position; which two are a pair depends."""
        turning = self.c.rotary_dims or self.c.head_dim
        angle = position * self.c.rope.theta ** (-np.arange(0, turning, 2) / turning)
        first, second = np.arange(turning // 2), np.arange(turning // 2, turning)
        if self.c.rope_interleaved:
            first, second = np.arange(0, turning, 2), np.arange(1, turning, 2)
        out = x.copy()
        out[:, first] = x[:, first] * np.cos(angle) - x[:, second] * np.sin(angle)
        out[:, second] = x[:, second] * np.cos(angle) + x[:, first] * np.sin(angle)
        return out


def committed_rows(reference: Reference, tokens: Sequence[int], features: np.ndarray) -> np.ndarray:
    """Add the rows of all committed tokens but the root, each with its features and the next token; the last output."""
    out = None
    for position in range(len(tokens) - 1):
        out = reference.add(tokens[position + 1], reference.condition(features[position]), position)
    return out


def context(
    tokens: np.ndarray,
    lengths: Sequence[int],
    features: np.ndarray,
    counts: Sequence[int],
    *,
    hidden: bool = False,
    eos: Sequence[int] = (-1,),
    active: Sequence[bool] | None = None,
    rows: int = 4,
    **settings,
) -> Context:
    """A context in which the newest `counts` rows with features were just committed.

    Args:
        tokens: `[b, t]`.
        lengths: committed tokens of each request.
        features: taps, or hidden states if `hidden`, of every position: `[b, t, e]`.
        counts: how many rows each request's last round committed.
        hidden: see `features`.
        eos: end tokens.
        active: which requests take part, all by default.
        rows: width of the features' buffers.
        **settings: fields of the sampling state, one value for all requests, or `seed`, `[b, 2]`.
    """
    batch = len(lengths)
    positions = (np.asarray(lengths) - 1 - np.asarray(counts))[:, None] + np.arange(rows)
    newest = np.full((batch, rows, features.shape[-1]), 9.0, np.float32)  # padding must not matter
    for b, count in enumerate(counts):
        newest[b, :count] = features[b, positions[b, :count]]
    state = sampling.neutral(batch)
    seed = settings.pop("seed", np.stack([np.zeros(batch), np.arange(batch)], axis=1))
    changed = {k: jnp.full((batch,), v, getattr(state, k).dtype) for k, v in settings.items()}
    state = dataclasses.replace(state, seed=jnp.asarray(seed, jnp.uint32), **changed)
    return Context(
        tokens=jnp.asarray(tokens, jnp.int32),
        lengths=jnp.asarray(lengths, jnp.int32),
        prompt_lengths=jnp.ones((batch,), jnp.int32),
        active=jnp.asarray([True] * batch if active is None else active),
        eos=jnp.tile(jnp.asarray(eos, jnp.int32), (batch, 1)),
        sampling=state,
        features=Features(
            positions=jnp.asarray(positions, jnp.int32),
            count=jnp.asarray(counts, jnp.int32),
            hidden=jnp.asarray(newest) if hidden else None,
            taps=None if hidden else jnp.asarray(newest),
        ),
    )


def prefilled(drafter, params, tokens, prompt_lengths, features, *, chunk: int, capacity: int = 64):
    """The drafter's state after the prompts of a batch, taken in by chunks of `chunk` rows."""
    hidden = drafter.wants_hidden
    state = drafter.init_state(len(tokens), capacity)
    for b, length in enumerate(prompt_lengths):
        for start in range(0, length, chunk):
            count = min(chunk, length - start)
            pairs = np.zeros((chunk + 1,), np.int32)
            pairs[: count + 1] = tokens[b, start : start + count + 1]
            rows = np.full((1, chunk, features.shape[-1]), 7.0, np.float32)
            rows[0, :count] = features[b, start : start + count]
            state = drafter.prefill(
                params,
                state,
                jnp.int32(b),
                jnp.asarray(pairs),
                jnp.int32(start),
                jnp.int32(count),
                Features(
                    positions=(start + jnp.arange(chunk, dtype=jnp.int32))[None],
                    count=jnp.int32([count]),
                    hidden=jnp.asarray(rows) if hidden else None,
                    taps=None if hidden else jnp.asarray(rows),
                ),
            )
    return state


def expected_chain(config: HeadConfig, tensors, target, depth: int, shift: int = 0):
    """`expected(text)`: the greedy chain after a text by numpy, from what the target makes of that text.

    It ends where two tokens are as good as equal. `shift` reads the features of that many rows later: a wrong wiring.
    """
    model, weights = target
    norm, forward = weights["norm"]["weight"], jax.jit(read, static_argnums=(0, 1))
    reference = Reference(config, tensors, weights["embedding"], weights["head"]["weight"], norm)

    def expected(text) -> list[int]:
        padded = np.zeros((64,), np.int32)
        padded[: len(text)] = text
        cache = model.init_cache(1, 256, jnp.float32)
        hidden, taps = forward(model, config.taps, weights, cache, jnp.asarray(padded))
        features = np.asarray(hidden if config.family == "mtp" else taps)[shift:]
        fresh, chain = reference.copy(), []
        out = committed_rows(fresh, text, features)
        for step in range(depth):
            logits = fresh.logits(out)
            best, other = np.sort(logits)[[-1, -2]]
            if best - other < 1e-3:
                break
            chain.append(int(logits.argmax()))
            out = fresh.add(chain[-1], fresh.feedback(out), len(text) - 1 + step)
        return chain

    return expected
