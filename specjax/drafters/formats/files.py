"""What lies in a drafter's folder: its configuration, and its tensors by name and shape.

Nothing in it is executed: `pytorch_model.bin` is read by `torch_file.py`, which knows tensors and nothing else, other
pickles are never opened, and the Python files that `auto_map` points at are never imported.
"""

import dataclasses
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from specjax.drafters.formats.torch_file import TorchFile, TorchFileError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED = "pytorch_model.bin"
FLOATS = ("F64", "F32", "F16", "BF16")


class DrafterError(ValueError):
    """A drafter's checkpoint that cannot be used. `problems` holds one line for each reason."""

    def __init__(self, what: str, problems: Collection[str]):
        self.problems = tuple(dict.fromkeys(problems))
        super().__init__(f"{what} cannot be used:" + "".join(f"\n  - {problem}" for problem in self.problems))


@dataclasses.dataclass(frozen=True)
class Folder:
    """An opened drafter; tensors stay on disk until they are asked for.

    Attributes:
        path: the folder.
        config: its `config.json`.
        shapes: shape of each tensor, by its name in the files.
        dtypes: stored type of each tensor, as safetensors names it.
        where: the open file of each tensor.
        pickles: names of pickled weight files.
    """

    path: Path
    config: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]
    where: Mapping[str, Any]
    pickles: tuple[str, ...]

    def tensor(self, name: str) -> np.ndarray:
        """Read one tensor."""
        return self.where[name].get_tensor(name)


class LazyTensors(Mapping[str, np.ndarray]):
    """Tensors by canonical name, each read when it is asked for."""

    def __init__(self, readers: Mapping[str, Callable[[], np.ndarray]]):
        self._readers = dict(readers)

    def __getitem__(self, name: str) -> np.ndarray:
        return self._readers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)


def open_folder(path: str | Path) -> Folder:
    """Open a folder with a `config.json` and safetensors files, or else `pytorch_model.bin`; no tensor is read.

    Raises:
        DrafterError: no such folder, no configuration, a damaged or missing file.
    """
    path = Path(path).expanduser()
    if not (path / "config.json").is_file():
        raise DrafterError(str(path), ["it has no config.json; a drafter is a folder with config.json and safetensors"])
    config = _json(path / "config.json")
    if not isinstance(config, dict):
        raise DrafterError(str(path), [f"config.json holds a {type(config).__name__}, not an object"])
    problems: list[str] = []
    where: dict[str, Any] = {}
    for file in _files(path, problems):
        try:
            opened = TorchFile(file) if file.name == PICKLED else safetensors.safe_open(file, framework="np")
        except TorchFileError as error:
            problems.append(f"{file.name}: {error}")
            problems.append(pickle_advice([file.name]))
            continue
        except (safetensors.SafetensorError, OSError) as error:
            problems.append(f"{file.name} is damaged, truncated or missing: {error}")
            continue
        for name in opened.keys():  # noqa: SIM118 (not a dict)
            if name in where:
                problems.append(f"tensor {name} is in two files, {file.name} the second")
            where[name] = opened
    if problems:
        raise DrafterError(str(path), problems)
    slices = {name: file.get_slice(name) for name, file in where.items()}
    return Folder(
        path=path,
        config=config,
        shapes={name: tuple(part.get_shape()) for name, part in slices.items()},
        dtypes={name: part.get_dtype() for name, part in slices.items()},
        where=where,
        pickles=tuple(sorted(file.name for suffix in ("*.bin", "*.pt", "*.pth") for file in path.glob(suffix))),
    )


def pickle_advice(pickles: Collection[str]) -> str:
    """Why pickled weights are refused, and what to do."""
    name = sorted(pickles)[0]
    return (
        f"a pickle ({name}) runs code when torch opens it, so this one is not read; where you trust it, "
        f'convert it: `safetensors.torch.save_file(torch.load("{name}", weights_only=True), "{SINGLE}")`'
    )


def _files(path: Path, problems: list[str]) -> list[Path]:
    """The files of a folder: one, those of an index, or the pickled one; and MTP modules exported beside them."""
    found: list[Path] = []
    if (path / SINGLE).exists():
        found = [path / SINGLE]
    elif (path / INDEX).exists():
        index = _json(path / INDEX)
        names = sorted(set(index.get("weight_map", {}).values()))
        if outside := [name for name in names if Path(name).name != name]:
            problems.append(f"{INDEX} names files outside its folder: {', '.join(outside)}")
        found = [path / name for name in names if name not in outside]
    elif (path / PICKLED).exists():
        found = [path / PICKLED]
    beside = [path / "mtp.safetensors", *sorted(path.glob("model-mtp*.safetensors"))]
    return found + [file for file in beside if file.exists() and file not in found]


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DrafterError(str(path.parent), [f"{path.name} is not JSON: {error}"]) from error
