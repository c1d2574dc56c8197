"""Metrics: what a scrape reads is what the engine's results and its planner's report say."""

import collections

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from support import tables, toy

from specjax import config
from specjax.draft import DraftShape
from specjax.drafters.drafter_set import DrafterSet
from specjax.drafters.ngram import NGram
from specjax.engine import metrics
from specjax.engine.pricing import find_table
from specjax.sampling import SamplingParams

LOOKUP = DraftShape.chain("ngram", 3)
DRAFTERS = DrafterSet((NGram(num_speculative_tokens=3, prompt_lookup_min=1),), (LOOKUP,), 32)
RUN = config.make({"target": "toy", "drafter": {"kind": "auto"}, "batch": 2, "context": 96, "dtype": "float32"})
PROMPTS = [[5, 9, 5, 9, 5], [1, 2, 3, 1], [7, 3, 7]]
PARAMS = [SamplingParams(max_tokens=n) for n in (60, 31, 44)]


@pytest.fixture(scope="module")
def piloted():
    target = toy.lookup_target(tables.VOCAB, 128)
    table = find_table(RUN, target[0].config, "float32", DRAFTERS, lambda line: None)
    made = toy.engine(DRAFTERS, ((),), target, table=table, batch=2, context=96)
    made.params["target"] = toy.lookup(tables.VOCAB, 128)
    return made


@pytest.fixture(params=["ngram", "auto"])
def engine(request, piloted):
    """An engine that has just been reset."""
    made = piloted if request.param == "auto" else _lookup()
    made.reset()
    return made


_MADE = {}


def _lookup():
    if "ngram" not in _MADE:
        _MADE["ngram"] = toy.engine(DRAFTERS.members[0], batch=2, page_size=16)
    return _MADE["ngram"]


def scrape(engine) -> dict[str, dict[tuple, float]]:
    """Values by name and by labels (of several: in the order of their names); through the text format."""
    registry = CollectorRegistry()
    registry.register(metrics.EngineCollector({"one": engine}))
    found = collections.defaultdict(dict)
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        assert family.name.startswith("specjax_") and family.documentation.endswith(".")
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("engine") == "one"
            found[sample.name.removeprefix("specjax_")][tuple(value for _, value in sorted(labels.items()))] = (
                sample.value
            )
    return found


def test_counters_are_those_of_the_results(engine):
    results = engine.generate(PROMPTS, PARAMS)
    found = scrape(engine)
    spec = [result.spec for result in results]

    def value(name):
        return found[name][()]

    assert value("requests_total") == 3
    assert found["requests_finished_total"] == collections.Counter((r.finish_reason,) for r in results)
    assert value("prompt_tokens_total") == sum(map(len, PROMPTS))
    assert value("generated_tokens_total") == sum(len(r.token_ids) for r in results)
    assert value("request_rounds_total") == sum(s.rounds for s in spec)
    assert value("drafted_tokens_total") == sum(s.drafted for s in spec)
    assert value("accepted_tokens_total") == sum(s.accepted for s in spec) > 0
    assert value("verified_rows_total") == sum(s.rounds + s.drafted for s in spec)
    assert sum(found["accepted_tokens_by_position_total"].values()) == value("accepted_tokens_total")
    assert max(s.rounds for s in spec) <= value("rounds_total") < value("request_rounds_total")
    assert value("prefill_seconds_total") == pytest.approx(sum(r.timing.prefill_s for r in results))
    # Prefill of a later request is no part of the rounds, but of the time between its neighbours' tokens.
    assert 0 < value("decode_seconds_total") <= sum(r.timing.decode_s for r in results)
    rounds = value("generated_tokens_total") - 3
    assert value("decode_tokens_per_second") == pytest.approx(rounds / value("decode_seconds_total"))
    assert (value("requests_running"), value("requests_waiting"), value("batch_rows")) == (0, 0, 2)
    assert found["free_pages"] == ({} if engine.pilot else {(): engine.scheduler.free_pages})


def test_requests_that_are_under_way_or_given_up(engine):
    first, second, third = (engine.submit(prompt, SamplingParams(max_tokens=40)) for prompt in PROMPTS)
    assert scrape(engine)["requests_waiting"][()] == 3
    engine.step()
    found = scrape(engine)
    assert (found["requests_running"][()], found["requests_waiting"][()]) == (2, 1)
    assert found["rounds_total"][()] == 1
    assert found["request_rounds_total"][()] == 2
    for index in (third, first, third, second):  # one that waits, one that runs, one that is gone, the last
        engine.abort(index)
    found = scrape(engine)
    assert found["requests_finished_total"] == {("abort",): 3}
    assert found["requests_total"][()] == 2
    engine.reset()
    assert scrape(engine)["rounds_total"][()] == 0


def test_a_planners_metrics_are_its_report(piloted):
    piloted.reset()
    results = piloted.generate(PROMPTS, PARAMS)
    found, report = scrape(piloted), piloted.pilot.report()
    assert found["planner_rounds_total"] == {(reason,): n for reason, n in report["reasons"].items()}
    assert sum(found["planner_rounds_total"].values()) == report["rounds"] == found["rounds_total"][()]
    assert sum(found["planner_shape_rounds_total"].values()) == report["rounds"]
    assert set(found["planner_shape_rounds_total"]) <= {("none",), ("ngram",)}
    assert found["planner_drafted_tokens_total"] == {("ngram",): sum(r.spec.drafted for r in results)}
    assert found["planner_accepted_tokens_total"] == {("ngram",): sum(r.spec.accepted for r in results)}
    switched = collections.Counter((one["reason"],) for one in report["switches"])
    assert found["planner_switches_total"] == switched
    assert switched
    assert found["planner_trial_cost_seconds"][()] == report["exploration_s"]
    assert found["planner_calibration_error"] == {("ngram",): report["calibration_error"]["ngram"]}
    assert found["planner_round_time_error"][()] == report["time_error_median"]
    assert found["planner_round_tokens_error"][()] == report["tokens_error_median"]
    assert found["planner_round_tokens_bias"][()] == report["tokens_bias"]
    actual, expected = (found[f"planner_{x}_round_tokens_total"][()] for x in ("actual", "expected"))
    assert actual == found["generated_tokens_total"][()] - 3
    assert report["rounds"] < 256, "the report holds the newest rounds alone"
    assert actual / expected - 1 == pytest.approx(report["tokens_bias"])
    assert found["planner_actual_round_seconds_total"][()] > 0 < found["planner_expected_round_seconds_total"][()]
    shape = report["shape"]
    assert found["planner_shape"] == {tuple(str(shape[k]) for k in ("branching", "depth", "kind", "rows")): 1}
    thought = found["planner_host_seconds_total"]
    assert set(thought) == {("decide",), ("fit",), ("learn",)}
    assert min(thought.values()) > 0
    assert sum(thought.values()) < found["decode_seconds_total"][()]


def test_every_family_has_a_use_and_nothing_registers_itself(engine):
    engine.generate(PROMPTS, PARAMS)
    assert not any(family.name.startswith("specjax") for family in REGISTRY.collect())
    known = {family.name for family in metrics.EngineCollector({}).describe()}
    assert not {family.name for family in metrics.EngineCollector({}).collect()}
    assert {family.name for family in metrics.EngineCollector({"one": engine}).collect()} <= known


def test_engines_side_by_side_in_a_file(piloted, tmp_path):
    path = tmp_path / "two.prom"
    path.write_text("old")
    piloted.reset()
    piloted.generate(PROMPTS[0], PARAMS[0])
    other = _lookup()
    other.reset()
    metrics.write(path, {"auto": piloted, "ngram": other})
    families = list(text_string_to_metric_families(path.read_text()))
    assert len({family.name for family in families}) == len(families)
    rounds = next(family for family in families if family.name == "specjax_rounds")
    assert {s.labels["engine"]: s.value for s in rounds.samples} == {"auto": piloted.counters.rounds, "ngram": 0}
    assert list(tmp_path.iterdir()) == [path]
