"""A draft packed for the host is the draft, whatever its tree; rows that decode nothing have none."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np

from specjax.draft import tree
from specjax.engine.proposal import Proposal, packed


def test_what_is_packed_comes_out():
    tokens = jnp.array([[7, 1, 2, 3], [9, 4, 5, 0], [8, 6, 6, 6]], jnp.int32)
    parents = jnp.array([[-1, 0, 0, 1], [-1, 0, 1, 2], [-1, 0, 1, 2]], jnp.int32)
    draft = tree(tokens, parents, jnp.array([4, 3, 2], jnp.int32))
    scores = -jnp.arange(12, dtype=jnp.float32).reshape(3, 4) / 7
    state = SimpleNamespace(draft=draft, active=jnp.array([True, True, False]))
    made = Proposal(jax.device_get(packed(state, scores)))
    assert made.live.tolist() == [4, 3, 0]
    found = made.nodes(np.array([1, 0]), 3)
    for got, want in zip(found, (tokens, draft.parents, scores), strict=True):
        np.testing.assert_array_equal(got, np.asarray(want)[[1, 0], :3])
