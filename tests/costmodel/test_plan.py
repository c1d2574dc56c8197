"""Plans on paper: the planner's own rates, crossings, and what memory holds."""

import dataclasses

import numpy as np
import pytest

from specjax.costmodel import menu, tables
from specjax.costmodel.facts import find
from specjax.costmodel.plan import TooLargeError, check_memory, crossings, plan
from specjax.costmodel.planner import Planner
from specjax.costmodel.roofline import Setup
from specjax.costmodel.shapes import DRAFTERS, TARGETS
from specjax.draft import PLAIN, DraftShape

SHAPES = menu.shapes(["ngram", "eagle3", "mtp"])


def table(device="h100", target="llama-3.1-8b"):
    return tables.load(tables.shipped(device, target))


@pytest.mark.parametrize("batch", [1, 16, 256])
def test_rates_are_the_planners(batch):
    """A planner that has learned nothing, with a pass for every whole shape, expects the same of the choice."""
    made = plan(table(), SHAPES, batch, 1024)  # a context at which the planner's rounded one is exact
    counts = sorted({batch * shape.rows for shape in SHAPES})
    for outlook in made.outlooks:
        menu_of_one = [outlook.shape] if outlook.shape.depth else []
        planner = Planner(table(), menu_of_one, counts, batch, explore=False)
        decision = planner.decide(np.arange(batch), 1024.0)
        assert decision.rate >= outlook.rate * (1 - 1e-9)  # plain, or a narrower pass of the shape, may be better
        assert decision.plain == pytest.approx(made.plain.rate)
    best = Planner(table(), SHAPES, counts, batch, explore=False).decide(np.arange(batch), 1024.0)
    assert best.rate >= made.choice.rate * (1 - 1e-9)
    assert [o.rate for o in made.outlooks] == sorted((o.rate for o in made.outlooks), reverse=True)


def test_heat_lowers_what_drafts_bring():
    cold, hot = (plan(table(), SHAPES, 8, 2048, temperature).choice.rate for temperature in (0.0, 1.0))
    assert hot < cold


def test_shapes_cross_below_plain_as_requests_grow():
    batches = (1, 8, 64, 256, 512)
    plans = [plan(table("tpu-v5e"), SHAPES, batch, 512) for batch in batches]
    found = crossings(plans)
    tree = DraftShape("eagle3", 7, 4, 32)
    assert found[tree] in batches
    for made in plans:
        rate = next(o.rate for o in made.outlooks if o.shape == tree)
        assert (rate < made.plain.rate) == (made.batch >= found[tree])
        assert made.choice.rate >= made.plain.rate
    assert PLAIN not in found


def test_the_schema():
    found = plan(table(), SHAPES, 4, 2048).to_json()
    assert found.keys() == {"batch", "shape", "predicted_rate", "plain_rate", "table_source"}
    assert found["shape"].keys() == {"drafter", "depth", "branching", "rows"}
    assert found["table_source"] == "roofline"
    assert found["predicted_rate"] >= found["plain_rate"] > 0


def test_a_load_that_does_not_fit_is_refused_with_what_would():
    setup = Setup(find("h100"), 1, TARGETS["llama-3.1-8b"], "bfloat16")
    lookup = [DRAFTERS["ngram"]]
    check_memory(setup, lookup, 64, 4096)
    with pytest.raises(TooLargeError) as refused:
        check_memory(setup, lookup, 512, 8192)
    # 73.6 GB less 16.1 GB of weights, at 131072 bytes a token.
    most = int((0.92 * 80e9 - 2 * TARGETS["llama-3.1-8b"].parameters) / 131072)
    assert f"{most // 8192} requests of 8192 tokens" in str(refused.value)
    assert f"512 requests of {most // 512} tokens" in str(refused.value)
    for count in range(2, 30):
        if f"{count} devices" in str(refused.value):
            check_memory(dataclasses.replace(setup, count=count), lookup, 512, 8192)
            with pytest.raises(TooLargeError):
                check_memory(dataclasses.replace(setup, count=count - 1), lookup, 512, 8192)
            break
    else:
        pytest.fail(str(refused.value))
    with pytest.raises(TooLargeError, match="what would fit: 3 devices"):
        check_memory(Setup(find("l4"), 1, TARGETS["qwen3-32b"], "bfloat16"), lookup, 1, 512)
    with pytest.raises(TooLargeError, match="dtype bfloat16"):
        check_memory(Setup(find("h100"), 1, TARGETS["dense-27b"], "float32"), lookup, 1, 512)
    with pytest.raises(TooLargeError, match="without learned drafters"):
        check_memory(Setup(find("l4"), 1, TARGETS["llama-3.1-8b"], "bfloat16"), list(DRAFTERS.values()), 1, 8192)
