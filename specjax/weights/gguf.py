"""GGUF files: a memory-mapped reader, and the decoder's tensors under their Hugging Face names.

The container is that of the GGUF specification (versions 2 and 3, little-endian): a header, metadata, tensor
descriptions, then aligned tensor data. It is parsed here because the `gguf` package's reader builds an array for each
of the 150 000 strings of a vocabulary, which takes longer than dequantising the model. Dequantisation is that
package's.
"""

import dataclasses
import math
import mmap
import os
import re
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from specjax.targets.config import DecoderConfig, RopeConfig
from specjax.targets.rope import inv_freq
from specjax.weights.check import check_tensors

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

_PIECE = 1 << 16  # values dequantised by one call

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies: shape in numpy's order, GGML type number, and byte offset in the file."""

    shape: tuple[int, ...]
    kind: int
    offset: int


class GGUFFile:
    """A GGUF file, mapped into memory.

    Attributes:
        path: the file.
        metadata: key to value; arrays are lists.
        tensors: name to `TensorInfo`.

    Raises:
        ValueError: not a GGUF file, a version or byte order that is not supported, or a truncated file.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        with open(self.path, "rb") as file:
            if file.read(4) != b"GGUF":
                raise ValueError(f"{self.path} is not a GGUF file: it does not start with 'GGUF'")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            self._parse()
        except (struct.error, IndexError, UnicodeDecodeError) as error:
            raise ValueError(f"{self.path} is damaged or truncated: its header cannot be read ({error})") from error

    def _parse(self) -> None:
        self._at = 4
        version = self._scalar("I")
        if version not in (2, 3):
            raise ValueError(f"{self.path} is GGUF version {version}; versions 2 and 3 (little-endian) are supported")
        tensor_count, key_count = self._scalar("Q"), self._scalar("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = self._string()
            self.metadata[key] = self._value(self._scalar("I"))
        self.tensors: dict[str, TensorInfo] = {}
        for _ in range(tensor_count):
            name = self._string()
            dims = [self._scalar("Q") for _ in range(self._scalar("I"))]
            # GGML lists the fastest dimension first.
            self.tensors[name] = TensorInfo(tuple(reversed(dims)), self._scalar("I"), self._scalar("Q"))
        alignment = self.metadata.get("general.alignment", 32)
        start = -(-self._at // alignment) * alignment
        for name, info in self.tensors.items():
            self.tensors[name] = dataclasses.replace(info, offset=start + info.offset)

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._map, self._at)
        self._at += struct.calcsize("<" + code)
        return value

    def _string(self) -> str:
        length = self._scalar("Q")
        start, self._at = self._at, self._at + length
        if self._at > len(self._map):
            raise IndexError("a string runs past the end of the file")
        return self._map[start : self._at].decode("utf-8")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            inner, count = self._scalar("I"), self._scalar("Q")
            if inner in _SCALARS:
                values = struct.unpack_from(f"<{count}{_SCALARS[inner]}", self._map, self._at)
                self._at += struct.calcsize(f"<{count}{_SCALARS[inner]}")
                return list(values)
            return [self._value(inner) for _ in range(count)]
        if kind not in _SCALARS:
            raise ValueError(f"{self.path} has a metadata value of unknown type {kind}")
        return self._scalar(_SCALARS[kind])

    def tensor(self, name: str) -> np.ndarray:
        """One tensor, dequantised: float32, a new array.

        Raises:
            ValueError: a quantisation that cannot be undone, or data past the end of the file.
        """
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
        from gguf.quants import dequantize

        info = self.tensors[name]
        try:
            kind = GGMLQuantizationType(info.kind)
            block, width = GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            raise ValueError(f"{self.path}: tensor {name} has the unknown GGML type {info.kind}") from None
        if info.shape[-1] % block:
            raise ValueError(f"{self.path}: rows of {info.shape[-1]} in tensor {name} are not whole blocks of {block}")
        size = math.prod(info.shape) // block * width
        if info.offset + size > len(self._map):
            raise ValueError(
                f"{self.path} is truncated: tensor {name} ends at byte {info.offset + size} of {len(self._map)}"
            )
        blocks = np.frombuffer(self._map, np.uint8, size, info.offset).reshape(-1, width)
        out = np.empty((blocks.shape[0], block), np.float32)
        # Pieces that stay in cache, and calls long enough that threads seldom wait for the interpreter lock.
        step = max(1, _PIECE // block)
        try:
            for start in range(0, blocks.shape[0], step):
                piece = blocks[start : start + step]
                out[start : start + step] = dequantize(piece.reshape(1, -1), kind).reshape(-1, block)
        except NotImplementedError:
            raise ValueError(f"{self.path}: tensor {name} is {kind.name}, which cannot be dequantised") from None
        return out.reshape(info.shape)


def read_gguf_config(file: GGUFFile) -> DecoderConfig:
    """The decoder that a GGUF file describes; its tensors are there, and of the right shapes.

    Raises:
        ValueError: metadata that cannot be honoured, or tensors that are missing, unknown or misshapen (all listed).
    """
    config = DecoderConfig.from_gguf(file.metadata, file.tensors)
    shapes = {hf_name(name): info.shape for name, info in file.tensors.items() if name != "rope_freqs.weight"}
    check_tensors(str(file.path), config, shapes)
    if "rope_freqs.weight" in file.tensors:
        config = dataclasses.replace(config, rope=recover_llama3(config, file.tensor("rope_freqs.weight")))
    return config


def read_gguf(file: GGUFFile, dtype: Any = None) -> tuple[DecoderConfig, dict[str, np.ndarray]]:
    """The decoder that a GGUF file holds.

    Args:
        file: the opened file.
        dtype: numpy dtype of the tensors; None is float32.

    Returns:
        The configuration, and the tensors under their Hugging Face names and in their shapes.

    Raises:
        ValueError: see `read_gguf_config`.
    """
    config = read_gguf_config(file)
    sources = {hf_name(name): name for name in file.tensors if name != "rope_freqs.weight"}
    # llama.cpp's llama graph turns neighbouring pairs; its converter reorders query and key rows to match.
    permuted = file.metadata["general.architecture"] == "llama"

    def load(name: str) -> np.ndarray:
        values = file.tensor(sources[name])
        if permuted and (match := re.search(r"\.self_attn\.([qk])_proj\.", name)):
            values = unpermute(values, config.num_heads if match[1] == "q" else config.num_kv_heads)
        return values if dtype is None else values.astype(dtype, copy=False)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        # The largest first, so that the embedding does not trail behind all others.
        names = sorted(sources, key=lambda name: -math.prod(file.tensors[sources[name]].shape))
        loaded = dict(zip(names, pool.map(load, names), strict=True))
    return config, {name: loaded[name] for name in sources}


def hf_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; one that is not known is returned as it is."""
    stem, _, suffix = name.rpartition(".")
    if stem in _TOP_NAMES:
        return f"{_TOP_NAMES[stem]}.{suffix}"
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if match and match[2] in _LAYER_NAMES:
        return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{suffix}"
    return name


def unpermute(values: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's row order of a query or key projection (or its bias).

    Within a head the file's rows are `(0, f/2, 1, f/2 + 1, ...)`: the two halves interleaved.
    """
    half = values.shape[0] // heads // 2
    pairs = values.reshape(heads, half, 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)


def recover_llama3(config: DecoderConfig, factors: np.ndarray) -> RopeConfig:
    """The llama3 rotation behind the per-dimension divisors that llama.cpp stores as `rope_freqs.weight`.

    The converter keeps only the divisors `wavelength' / wavelength`: 1 for short wavelengths, `factor` for long ones,
    and between them the inverse of `s + (1 - s) / factor`, where `s` is linear in the frequency. Two points of that
    line give `original / low` and `original / high`; the scale that they share is fixed by `low = 1`.

    Raises:
        ValueError: divisors that no llama3 rotation makes.
    """
    frequency, _ = inv_freq(RopeConfig(theta=config.rope.theta), config.head_dim)
    factor = round(float(factors.max()), 4)
    candidates = [(8192, 4.0)]
    between = (factors > 1) & (factors < factors.max())
    if factor > 1 and between.sum() >= 2:
        smooth = (1 / factors[between].astype(np.float64) - 1 / factor) / (1 - 1 / factor)
        slope, intercept = np.polyfit(frequency[between].astype(np.float64) / (2 * math.pi), smooth, 1)
        if intercept < 0 < slope:
            candidates.append((round(slope / -intercept), round(1 - 1 / intercept, 3)))
    for original, high in candidates:
        if factors.shape != frequency.shape or config.rope.kind != "default" or factor < 1 or high <= 1:
            break
        rope = RopeConfig(
            theta=config.rope.theta,
            kind="llama3",
            factor=factor,
            original_max_position_embeddings=original,
            low_freq_factor=1.0,
            high_freq_factor=high,
        )
        stretched, _ = inv_freq(rope, config.head_dim)
        if np.allclose(frequency / stretched, factors, rtol=1e-4):
            return rope
    raise ValueError(
        f"rope_freqs.weight holds {factors.shape[0]} divisors from {factors.min():.4g} to {factors.max():.4g} that are "
        f"not a llama3 scaling of theta {config.rope.theta:g} and head_dim {config.head_dim}; convert the model from "
        "its safetensors checkpoint instead"
    )
