"""The trained drafters of a clone: `drafts/<target>/<family>`, in the working folder or beside the package."""

from pathlib import Path

import specjax

FOLDER = "drafts"


def shipped(target: str) -> dict[str, Path]:
    """Folders of the drafters that come with specjax for a target, by family, in alphabetical order."""
    for root in (Path(), Path(specjax.__file__).parents[1]):
        found = {path.parent.name: path.parent for path in sorted((root / FOLDER / target).glob("*/config.json"))}
        if found:
            return found
    return {}
