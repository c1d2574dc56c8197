"""Fixtures of the accept rules' tests."""

from types import ModuleType

import jax
import numpy as np
import pytest
from support import exact as enumeration

KINDS = ("random", "zeros", "equal", "mixed", "greedy target", "greedy drafter", "greedy", "apart")


@pytest.fixture(scope="session")
def exact() -> ModuleType:
    """The tools of `support.exact`."""
    return enumeration


@pytest.fixture(params=KINDS)
def kind(request) -> str:
    """Every kind of `world`."""
    return request.param


@pytest.fixture(scope="session")
def same_alone():
    """Check that each row of a call equals the call with that row alone, bit for bit."""

    def check(function, *arguments):
        together = function(*arguments)
        rows = jax.tree.leaves(arguments)[0].shape[0]
        for row in range(rows):
            alone = function(*jax.tree.map(lambda x, row=row: x[row : row + 1], arguments))
            for one, many in zip(jax.tree.leaves(alone), jax.tree.leaves(together), strict=True):
                np.testing.assert_array_equal(np.asarray(one)[0], np.asarray(many)[row])

    return check
