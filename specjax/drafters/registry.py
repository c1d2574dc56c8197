"""Drafters by the names that configs give them."""

import dataclasses
import difflib
import functools
from collections.abc import Iterable, Mapping
from typing import Any

from specjax.drafters.base import Drafter

# Fields of a drafter that say what it is, not how it is set.
_NOT_OPTIONS = ("kind", "taps", "wants_hidden")


@functools.cache
def kinds() -> Mapping[str, type]:
    """The drafters by kind. A new one is one file, and an import and a line here."""
    from specjax.drafters.draft_model import DraftModel
    from specjax.drafters.hybrid import Hybrid
    from specjax.drafters.ngram import NGram
    from specjax.drafters.suffix import Suffix

    return {
        "ngram": NGram,
        "suffix": Suffix,
        "draft_model": DraftModel,
        "hybrid": Hybrid,
    }


def create(kind: str, options: Mapping[str, Any] | None = None) -> Drafter:
    """The drafter `kind` with `options`; what is not given keeps the drafter's own default.

    Raises:
        ValueError: an unknown kind or option (with the nearest known name and all valid ones), an option missing that
            has no default, or a value that the drafter refuses.
    """
    if kind not in kinds():
        raise ValueError(f"unknown drafter {kind!r}{_hint(kind, kinds())}")
    cls, options = kinds()[kind], dict(options or {})
    fields = [field for field in dataclasses.fields(cls) if field.init and field.name not in _NOT_OPTIONS]
    valid = [field.name for field in fields]
    unset = dataclasses.MISSING
    faults = [f"has no option {name!r}{_hint(name, valid)}" for name in options if name not in valid] + [
        f"needs the option {field.name!r}"
        for field in fields
        if field.default is unset and field.default_factory is unset and field.name not in options
    ]
    if faults:
        raise ValueError("; ".join(f"drafter '{kind}' {fault}" for fault in faults))
    return cls(**options)


def _hint(name: str, valid: Iterable[str]) -> str:
    """The rest of an error message: the nearest valid name, if one is near, and all of them."""
    valid = sorted(valid)
    near = difflib.get_close_matches(name, valid, n=1)
    return (f", did you mean '{near[0]}'?" if near else ";") + f" Valid: {', '.join(valid)}"
