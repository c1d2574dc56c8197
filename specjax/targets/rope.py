"""Rotary position embedding: its configuration, the frequency table of each kind, and cos/sin tables.

Rotation is the half-split ("NeoX") one of the Hugging Face checkpoints: dimension `i` turns with dimension
`i + f/2` by `position * inv_freq[i]`. The kinds are those of transformers' `modeling_rope_utils`:

- `default`: `theta ** (-2i/f)` (Su et al., 2021, RoFormer).
- `linear`: positions divided by `factor` (Chen et al., 2023, position interpolation).
- `dynamic`: NTK-aware base that grows with the sequence length (bloc97, emozilla, 2023).
- `llama3`: long wavelengths divided by `factor`, short ones kept, a ramp between (Llama 3.1).
- `yarn`: NTK-by-parts with an attention temperature (Peng et al., 2023).
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from specjax.array_types import Array, Float, Int

KINDS = ("default", "linear", "dynamic", "llama3", "yarn")

# The parameters that each kind reads, beside theta: required ones, then optional ones.
_REQUIRED: dict[str, tuple[str, ...]] = {"linear": ("factor",), "dynamic": ("factor",), "yarn": ("factor",)}
_REQUIRED["llama3"] = ("factor", "low_freq_factor", "high_freq_factor")
_OPTIONAL = {"yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Parameters of the rotation; a field that `kind` does not read is None.

    Attributes:
        theta: the base of the wavelengths.
        kind: one of `KINDS`.
        factor: how far the context is stretched.
        original_max_position_embeddings: context length before stretching.
        low_freq_factor: (llama3) wavelengths above `original / low_freq_factor` are stretched fully.
        high_freq_factor: (llama3) wavelengths below `original / high_freq_factor` are kept.
        beta_fast: (yarn) rotations in the original context above which a dimension is kept.
        beta_slow: (yarn) rotations below which it is stretched fully.
        attention_factor: (yarn) scale of cos and sin; None derives it from `factor` and the two mscales.
        mscale: (yarn) see `attention_factor`.
        mscale_all_dim: (yarn) see `attention_factor`.
        truncate: (yarn) round the ramp's ends to whole dimensions.
    """

    theta: float = 10_000.0
    kind: str = "default"
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None

    def problems(self) -> list[str]:
        """What is wrong with these values, one line each; empty when they can be honoured."""
        if self.kind not in KINDS:
            return [f"rope type {self.kind!r} is not known; known are {', '.join(KINDS)}"]
        found = [f"rope type {self.kind!r} needs {name!r}" for name in self.required() if getattr(self, name) is None]
        found += [
            f"rope type {self.kind!r} does not read {field.name!r} (got {getattr(self, field.name)!r})"
            for field in dataclasses.fields(self)
            if field.name not in ("theta", "kind", *self.readable()) and getattr(self, field.name) is not None
        ]
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in ("kind", "truncate") or value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float):
                found.append(f"rope {field.name} must be a number, got {value!r}")
            elif field.name == "factor" and value < 1:
                found.append(f"rope factor must be at least 1, got {value}")
            elif not math.isfinite(value) or value <= 0:
                found.append(f"rope {field.name} must be positive, got {value}")
        if not found and self.kind == "llama3" and self.number("high_freq_factor") <= self.number("low_freq_factor"):
            found.append(
                f"rope high_freq_factor ({self.high_freq_factor}) must exceed low_freq_factor ({self.low_freq_factor})"
            )
        return found

    def required(self) -> tuple[str, ...]:
        """Names of the parameters that this kind cannot do without."""
        names = _REQUIRED.get(self.kind, ())
        return (*names, "original_max_position_embeddings") if self.kind in ("dynamic", "llama3", "yarn") else names

    def readable(self) -> tuple[str, ...]:
        """Names of all parameters that this kind reads, beside theta."""
        return (*self.required(), *_OPTIONAL.get(self.kind, ()))

    def number(self, name: str) -> float:
        """A parameter that this kind cannot do without; `problems` is what makes sure that it is there."""
        return getattr(self, name)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> tuple["RopeConfig", list[str]]:
        """The rotation that a Hugging Face `config.json` describes, in either spelling.

        Reads `rope_theta` and `rope_scaling` of transformers 4 as well as `rope_parameters` of transformers 5.

        Returns:
            The configuration, and what is wrong with it (one line each).
        """
        found = []
        old, new = config.get("rope_scaling") or {}, config.get("rope_parameters") or {}
        given = dict(new) | dict(old)
        for key in set(old) & set(new):
            if old[key] != new[key]:
                found.append(f"rope_scaling and rope_parameters disagree on {key!r}: {old[key]!r} and {new[key]!r}")
        theta = config.get("rope_theta")
        if theta is not None and given.get("rope_theta", theta) != theta:
            found.append(f"rope_theta is {theta!r} beside {given['rope_theta']!r} in the rope parameters")
        kind = given.pop("rope_type", None) or given.get("type") or "default"
        given.pop("type", None)
        theta = given.pop("rope_theta", theta)
        for holder in (config, given):
            if (partial := holder.get("partial_rotary_factor")) not in (None, 1, 1.0):
                found.append(f"partial_rotary_factor {partial!r} is not supported; the whole head must rotate")
        given.pop("partial_rotary_factor", None)
        window = config.get("max_position_embeddings")
        original = given.get("original_max_position_embeddings")
        if kind == "dynamic":
            # transformers scales against max_position_embeddings and never reads the other.
            if original not in (None, window):
                found.append(
                    f"dynamic rope scales against max_position_embeddings ({window}), but "
                    f"original_max_position_embeddings is {original}; make them equal"
                )
            given["original_max_position_embeddings"] = window
        elif kind in ("llama3", "yarn"):
            given["original_max_position_embeddings"] = (
                config.get("original_max_position_embeddings") or original or window
            )
        fields = {field.name for field in dataclasses.fields(cls)} - {"theta", "kind"}
        for key in sorted(set(given) - fields):
            found.append(f"rope parameter {key!r} is not known")
        values = {key: value for key, value in given.items() if key in fields}
        rope = cls(theta=10_000.0 if theta is None else theta, kind=kind, **values)
        return rope, found + rope.problems()

    def to_hf(self) -> dict[str, Any]:
        """Keys of `config.json`, in both spellings, so that transformers 4 and 5 read the same rotation."""
        scaling = {name: getattr(self, name) for name in self.readable() if getattr(self, name) is not None}
        scaling = {"rope_type": self.kind, **scaling}
        return {
            "rope_theta": self.theta,
            "rope_scaling": None if self.kind == "default" else scaling,
            "rope_parameters": {"rope_theta": self.theta, **scaling},
        }


def inv_freq(rope: RopeConfig, head_dim: int, seq_len: int | None = None) -> tuple[np.ndarray, float]:
    """Angular frequencies of a head, and the scale of its cos and sin.

    Args:
        rope: the rotation.
        head_dim: width of a head, even.
        seq_len: sequence length that `dynamic` is stretched to; no other kind reads it.

    Returns:
        `float32[head_dim / 2]` radians per position, and the attention scaling (1.0 but for yarn).
    """
    theta = rope.theta
    if rope.kind == "dynamic":
        theta = theta * _dynamic_stretch(rope, head_dim, seq_len)
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    wave = np.power(float(theta), exponent.astype(np.float64)).astype(np.float32)
    base = np.float32(1.0) / wave
    if rope.kind == "linear":
        return base / np.float32(rope.number("factor")), 1.0
    if rope.kind == "llama3":
        return _llama3(rope, base), 1.0
    if rope.kind == "yarn":
        keep = 1 - _yarn_ramp(rope, head_dim)
        stretched = np.float32(1.0) / (np.float32(rope.number("factor")) * wave)
        return stretched * (1 - keep) + base * keep, _yarn_attention(rope)
    return base, 1.0


def cos_sin(
    rope: RopeConfig,
    head_dim: int,
    positions: Int[Array, "*rows"],
    max_position: int,
    seq_len: int | Array | None = None,
) -> tuple[Float[Array, "*rows half"], Float[Array, "*rows half"]]:
    """Cos and sin of every position, float32, the attention scaling included.

    `dynamic` is the one kind whose frequencies depend on how long the sequence is. A cached key keeps the rotation it
    was written with, so the frequencies must not move while a sequence grows: they are fixed by `max_position`, the
    most positions that the engine can hold. Up to the original context length that is exactly `default`; beyond it,
    it is what transformers computes for a sequence of `max_position` tokens (transformers itself lets the base drift
    and so mixes several in one cache). Every other kind is independent of both lengths.

    Args:
        rope: the rotation.
        head_dim: width of a head, even.
        positions: positions, from 0.
        max_position: length that `dynamic` is stretched to.
        seq_len: if given, the length to stretch to instead, as transformers does for one forward pass without a
            cache; may be a traced scalar.

    Returns:
        Two arrays `[*positions.shape, head_dim / 2]`.
    """
    length = max_position if seq_len is None else seq_len
    if rope.kind == "dynamic" and not isinstance(length, int):
        theta = rope.theta * _dynamic_stretch(rope, head_dim, length)
        frequencies, scale = theta ** -(jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim), 1.0
    else:
        frequencies, scale = inv_freq(rope, head_dim, length if isinstance(length, int) else None)
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def _dynamic_stretch(rope: RopeConfig, head_dim: int, seq_len):
    """What the base is multiplied by for a sequence of `seq_len` tokens; 1 up to the original length."""
    original = rope.number("original_max_position_embeddings")
    if seq_len is None:
        return 1.0
    longest = max(seq_len, original) if isinstance(seq_len, int) else jnp.maximum(seq_len, original)
    return (rope.number("factor") * longest / original - (rope.number("factor") - 1)) ** (head_dim / (head_dim - 2))


def _llama3(rope: RopeConfig, base: np.ndarray) -> np.ndarray:
    original, low, high = (
        rope.number("original_max_position_embeddings"),
        rope.number("low_freq_factor"),
        rope.number("high_freq_factor"),
    )
    wavelength = 2 * np.float32(math.pi) / base
    # 0 at the wavelength `original / low` and beyond (stretched), 1 at `original / high` and below (kept).
    smooth = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0).astype(np.float32)
    return (1 - smooth) * base / np.float32(rope.number("factor")) + smooth * base


def _yarn_ramp(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """0 for dimensions that are kept, 1 for those that are stretched, `float32[head_dim / 2]`."""

    def dimension(rotations: float) -> float:
        turns = rope.number("original_max_position_embeddings") / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast or 32), dimension(rope.beta_slow or 1)
    if rope.truncate is None or rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = (np.arange(head_dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    return np.clip(ramp, 0, 1)


def _yarn_attention(rope: RopeConfig) -> float:
    def temperature(scale: float) -> float:
        return 1.0 if rope.number("factor") <= 1 else 0.1 * scale * math.log(rope.number("factor")) + 1.0

    if rope.attention_factor is not None:
        return float(rope.attention_factor)
    if rope.mscale and rope.mscale_all_dim:
        return temperature(rope.mscale) / temperature(rope.mscale_all_dim)
    return temperature(1.0)
