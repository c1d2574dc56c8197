"""Every registered rule keeps its promises; a new one is picked up from the registry."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import draft as trees
from specjax.verify.registry import get_rule, rules


@pytest.mark.parametrize("name", rules())
def test_rule_follows_a_greedy_target(name):
    """With one-hot distributions every rule accepts the agreeing run and then says what the target says."""
    rule = get_rule(name)
    assert rule.name == name
    wanted = np.array([[1, 2, 0, 3], [1, 0, 2, 3], [3, 0, 0, 1]])  # the target's token at each node
    tokens = jnp.array([[0, 1, 2, 0], [0, 1, 2, 0], [0, 1, 2, 0]])
    draft = trees.chain(tokens, jnp.full((3,), 4))
    if rule.samples:
        p = jnp.asarray(np.eye(4, dtype=np.float32)[wanted])
        q = jnp.asarray(np.eye(4, dtype=np.float32)[np.roll(np.asarray(tokens), -1, axis=1)])
        u = jnp.full((3, 4), 0.999)
        outs = [jax.jit(rule.accept, static_argnums=1)(draft, 3, p, given, u, u) for given in (q, None)]
    else:
        outs = [jax.jit(rule.accept, static_argnums=1)(draft, 3, jnp.asarray(wanted))]
    for out in outs:
        assert out.count.tolist() == [3, 1, 0]
        assert out.token.tolist() == [3, 0, 3]
        assert out.path.tolist() == [[0, 1, 2, 3], [0, 1, 0, 0], [0, 0, 0, 0]]


@pytest.mark.parametrize("name", [name for name, rule in rules().items() if rule.samples and not rule.takes_trees])
def test_chain_rules_refuse_another_depth(name):
    draft = trees.chain(jnp.zeros((1, 4), jnp.int32), jnp.array([4]))
    p = jnp.full((1, 4, 2), 0.5)
    with pytest.raises(ValueError, match=r"4 rows has depth 3, got 2"):
        get_rule(name).accept(draft, 2, p, None, p[..., 0], p[..., 0])


def test_unknown_rule():
    with pytest.raises(ValueError, match=r"'typical'; there are tree, greedy, chain, block, recursive"):
        get_rule("typical")
