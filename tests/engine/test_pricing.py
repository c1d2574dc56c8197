"""What an engine's planner starts from: acceptance that a drafter's files state, and what tables are keyed by."""

import jax.numpy as jnp
import numpy as np
import pytest
from support import heads, toy

from specjax import config
from specjax.costmodel.priors import PRIORS
from specjax.draft import DraftShape
from specjax.drafters import learned
from specjax.drafters.drafter_set import DrafterSet
from specjax.drafters.hybrid import Hybrid
from specjax.drafters.ngram import NGram
from specjax.engine import load
from specjax.engine.engine import Engine
from specjax.engine.pricing import find_table, priors, provenance

RUN = config.make({"target": "toy", "drafter": {"kind": "auto"}, "dtype": "float32"})
SAID = (0.31, 0.27)


def drafters(said, grafted=False):
    """A set of n-gram and an EAGLE-3 drafter whose files state `said`, and their weights."""
    head = heads.head_config("eagle3", taps=(0, 1), acceptance=said)
    model, params = learned.build(head, heads.random_tensors(head), *toy.tiny(), jnp.float32, depth=3, branching=1)
    lookup = NGram(num_speculative_tokens=3)
    member = Hybrid(model=model, lookup=lookup) if grafted else model
    shapes = (DraftShape.chain("ngram", 3), DraftShape.chain(member.kind, 3))
    weights = {"model": params, "lookup": ()} if grafted else params
    return DrafterSet((lookup, member), shapes, toy.tiny_config().hidden_size, ring=16), ((), weights)


@pytest.mark.parametrize("grafted", [False, True])
def test_a_drafters_own_acceptance_is_where_the_planner_starts(grafted):
    members, params = drafters(SAID, grafted)
    kind = members.members[1].kind
    found = priors(members)
    assert found[kind].chain == SAID
    assert found["ngram"] == PRIORS["ngram"] and found["mtp"] == PRIORS["mtp"]
    table = find_table(RUN, toy.tiny_config(), "float32", members, lambda line: None)
    engine = toy.engine(members, params, table=table)
    start = engine.pilot.planner.acceptance
    chances = start.rates(np.array([0]))[:, start.curve[members.menu[1]], 0]
    np.testing.assert_allclose(chances, [0.31, 0.27, 0.27], atol=1e-6)


def test_without_it_the_kinds_usual_one():
    assert priors(drafters(())[0]) == PRIORS


def test_a_table_holds_whatever_the_acceptance_is():
    said, silent = (provenance(RUN, toy.tiny_config(), "float32", drafters(a)[0]) for a in (SAID, ()))
    assert said == silent


def test_a_table_that_is_none_is_refused_before_a_weight_is_read(tmp_path, monkeypatch):
    def never(*_):
        raise AssertionError("weights were read")

    monkeypatch.setattr(load, "load_checkpoint", never)
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    for path in (tmp_path / "none.json", broken):
        with pytest.raises(config.ConfigError, match=f"drafter.table: .*{path.name}.*specjax calibrate"):
            Engine.load("smollm2-135m", drafter={"kind": "auto", "table": str(path)}, quiet=True)
