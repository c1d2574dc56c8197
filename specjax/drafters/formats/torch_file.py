"""Tensors of a file that `torch.save` wrote (`pytorch_model.bin`), read without running anything that is in it.

Such a file is a zip archive: a pickle that says what the tensors are, and the bytes of each storage beside it. A pickle
is a program that may call whatever it can name. The reader below gives it four names, of which three build descriptions
of tensors; at any other one it stops.
"""

import collections
import dataclasses
import io
import math
import pickle
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

# Storages by their class in torch: as safetensors names their type, and numpy's.
_STORAGES: dict[str, tuple[str, Any]] = {
    "DoubleStorage": ("F64", np.float64),
    "FloatStorage": ("F32", np.float32),
    "HalfStorage": ("F16", np.float16),
    "BFloat16Storage": ("BF16", ml_dtypes.bfloat16),
    "LongStorage": ("I64", np.int64),
    "IntStorage": ("I32", np.int32),
    "ShortStorage": ("I16", np.int16),
    "CharStorage": ("I8", np.int8),
    "ByteStorage": ("U8", np.uint8),
    "BoolStorage": ("BOOL", np.bool_),
}


class TorchFileError(ValueError):
    """A file that is not read: damaged, of an old kind, or with more in it than tensors."""


@dataclasses.dataclass(frozen=True)
class _Storage:
    kind: str
    key: str
    size: int


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """A view of a storage, in the interface of a slice of a safetensors file."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def get_dtype(self) -> str:
        return _STORAGES[self.storage.kind][0]

    @property
    def fits(self) -> bool:
        """Whether the view stays inside its storage."""
        if len(self.shape) != len(self.strides) or min((self.offset, *self.shape, *self.strides)) < 0:
            return False
        last = self.offset + sum((n - 1) * step for n, step in zip(self.shape, self.strides, strict=True))
        return 0 in self.shape or last < self.storage.size


class _Unpickler(pickle.Unpickler):
    """Knows ordered dictionaries, tensors and storages."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda storage, offset, shape, strides, *_: _Tensor(storage, offset, tuple(shape), tuple(strides))
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return lambda tensor, *_: tensor
        if module == "torch" and name in _STORAGES:
            return name
        raise TorchFileError(f"it asks for {module}.{name}, which is no tensor; nothing of it was run")

    def persistent_load(self, pid: Any) -> _Storage:
        what, kind, key, _, size = pid
        if what != "storage" or kind not in _STORAGES or not isinstance(key, str) or not isinstance(size, int):
            raise TorchFileError(f"it holds a storage that is not known: {pid!r}")
        return _Storage(kind, key, size)


class TorchFile:
    """The tensors of one file, in the interface of `safetensors.safe_open`; each is read when it is asked for.

    Raises:
        TorchFileError: see there.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            with zipfile.ZipFile(path) as archive:
                names = {info.filename: info for info in archive.infolist()}
                (described,) = [name for name in names if name.endswith("/data.pkl") and name.count("/") == 1]
                self._root = described.removesuffix("data.pkl")
                if f"{self._root}byteorder" in names and archive.read(f"{self._root}byteorder") != b"little":
                    raise TorchFileError("its numbers are big-endian")
                found = _Unpickler(io.BytesIO(archive.read(described))).load()
        except zipfile.BadZipFile:
            raise TorchFileError("it is damaged, truncated, or of the kind before PyTorch 1.6") from None
        except TorchFileError:
            raise
        except Exception as error:  # a pickle can fail in any way
            raise TorchFileError(f"its list of tensors cannot be read: {type(error).__name__}: {error}") from None
        if not isinstance(found, dict) or not all(isinstance(x, _Tensor) for x in found.values()):
            raise TorchFileError("it holds something other than tensors by name")
        self._tensors: dict[str, _Tensor] = {str(name): tensor for name, tensor in found.items()}
        for name, tensor in self._tensors.items():
            info = names.get(f"{self._root}data/{tensor.storage.key}")
            size = tensor.storage.size * np.dtype(_STORAGES[tensor.storage.kind][1]).itemsize
            if info is None or info.file_size != size or info.compress_type != zipfile.ZIP_STORED or not tensor.fits:
                raise TorchFileError(f"tensor {name} does not fit the bytes that are there for it")

    def keys(self) -> Iterable[str]:
        return self._tensors.keys()

    def get_slice(self, name: str) -> _Tensor:
        return self._tensors[name]

    def get_tensor(self, name: str) -> np.ndarray:
        tensor = self._tensors[name]
        with zipfile.ZipFile(self.path) as archive:
            raw = archive.read(f"{self._root}data/{tensor.storage.key}")
        values = np.frombuffer(raw, _STORAGES[tensor.storage.kind][1])[tensor.offset :]
        if math.prod(tensor.shape) == 0:
            return np.zeros(tensor.shape, values.dtype)
        strides = [step * values.itemsize for step in tensor.strides]
        return np.ascontiguousarray(np.lib.stride_tricks.as_strided(values, tensor.shape, strides))
