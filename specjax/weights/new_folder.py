"""A folder that appears whole or not at all."""

import contextlib
import os
import shutil
from collections.abc import Generator
from pathlib import Path


def free(path: str | os.PathLike) -> Path:
    """The absolute path of a folder that can be written.

    Raises:
        ValueError: it holds something already, or is no folder.
    """
    out = Path(path).expanduser().absolute()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} already holds something; name a folder that does not exist yet, or an empty one")
    return out


@contextlib.contextmanager
def appearing(out: Path) -> Generator[Path]:
    """A folder beside `out` to write to, renamed to `out` in the end; nothing of it stays if anything fails."""
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.partial-{os.getpid()}")
    partial.mkdir()
    try:
        yield partial
        if out.exists():
            out.rmdir()
        partial.rename(out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
