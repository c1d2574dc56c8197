"""The axis letters of the whole house, jaxtyping's aliases, and the `pytree` decorator.

| letter | axis                                   | letter | axis                       |
|--------|----------------------------------------|--------|----------------------------|
| `b`    | batch rows (requests)                  | `v`    | vocabulary                 |
| `t`    | query tokens, or tokens of a buffer    | `d`    | model width                |
| `s`    | cache slots                            | `h`    | query heads                |
| `n`    | nodes of a draft, the root included    | `g`    | key/value heads            |
| `N`    | packed rows: the nodes of all requests | `f`    | head dimension             |
| `k`    | depth of a draft                       | `l`    | layers                     |
| `w`    | 32-bit words of an ancestor mask       |        |                            |

**`p` is the target's distribution, `q` the drafter's.**
"""

import dataclasses
from typing import dataclass_transform

import jax
from jaxtyping import Array, Bool, Float, Int, UInt32

__all__ = ["Array", "Bool", "Float", "Int", "UInt32", "pytree", "static"]


def static(**kwargs):
    """Mark a field of a `pytree` class as part of the tree's structure: hashable, compared at trace time."""
    return dataclasses.field(metadata={"static": True}, **kwargs)


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(static,))
def pytree(cls: type) -> type:
    """Make `cls` a frozen, keyword-only dataclass that JAX sees as a pytree; `static()` fields are its metadata."""
    cls = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
    fields = dataclasses.fields(cls)
    meta = [f.name for f in fields if f.metadata.get("static")]
    data = [f.name for f in fields if not f.metadata.get("static")]
    return jax.tree_util.register_dataclass(cls, data_fields=data, meta_fields=meta)
