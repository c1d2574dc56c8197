"""An engine's counters as Prometheus metrics, read when somebody scrapes: the rounds pay nothing for it.

    registry = CollectorRegistry()
    registry.register(EngineCollector({"ngram": engine}))

Names follow Prometheus' conventions: base units, `_total` on what only grows. Everything counts from the start of the
engine, or from its last `reset`.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from specjax.costmodel.tables import replacing

if TYPE_CHECKING:
    from specjax.engine.engine import Engine
    from specjax.engine.pilot import Pilot

_COUNTERS = {  # name: help, labels beside the engine's
    "requests": ("Requests that were prefilled.", ()),
    "requests_finished": ("Requests that are over: stop, length or abort.", ("reason",)),
    "prompt_tokens": ("Tokens of the prompts that were prefilled.", ()),
    "generated_tokens": ("Tokens generated, the first of each request included.", ()),
    "prefill_seconds": ("Seconds of prefill, each request from its insertion to its first token.", ()),
    "decode_seconds": ("Seconds of rounds, until the tokens are on the host.", ()),
    "rounds": ("Rounds of the batch.", ()),
    "request_rounds": ("Rounds, counted once for each request that took part.", ()),
    "verified_rows": ("Rows that the target verified: a root a request and round, and the drafted tokens.", ()),
    "drafted_tokens": ("Drafted tokens that were verified.", ()),
    "accepted_tokens": ("Drafted tokens that became output.", ()),
    "accepted_tokens_by_position": ("Accepted drafts by their place in the draft, from 1.", ("position",)),
    "planner_rounds": ("Rounds by the planner's reason for their shape.", ("reason",)),
    "planner_shape_rounds": ("Rounds by the kind of drafter that the planner chose; none is plain.", ("kind",)),
    "planner_drafted_tokens": ("Drafted tokens that were verified, by kind of drafter.", ("kind",)),
    "planner_accepted_tokens": ("Drafted tokens that became output, by kind of drafter.", ("kind",)),
    "planner_switches": ("Changes of the draft shape, by reason.", ("reason",)),
    "planner_expected_round_seconds": ("Seconds that the planner expected rounds to take.", ()),
    "planner_actual_round_seconds": ("Seconds that these rounds took.", ()),
    "planner_expected_round_tokens": ("Tokens that the planner expected of rounds.", ()),
    "planner_actual_round_tokens": ("Tokens that these rounds committed.", ()),
    "planner_host_seconds": ("Seconds of the host: decide a shape, fit a draft to its scores, learn.", ("stage",)),
}
_GAUGES = {
    "requests_running": ("Requests that decode now.", ()),
    "requests_waiting": ("Requests that wait for a row of the batch.", ()),
    "batch_rows": ("Requests that can decode together.", ()),
    "free_pages": ("Pages of the cache that no request holds; only with a page size.", ()),
    "decode_tokens_per_second": ("Tokens of rounds per second of rounds, all requests together, since the start.", ()),
    "planner_shape": ("1 for the shape of the last round.", ("kind", "depth", "branching", "rows")),
    "planner_round_time_error": ("Median of |log(actual / expected)| of the newest rounds' seconds.", ()),
    "planner_round_tokens_error": ("Median of |actual - expected| / expected of the newest rounds' tokens.", ()),
    "planner_round_tokens_bias": ("Actual over expected tokens of the newest rounds, less 1.", ()),
    "planner_calibration_error": ("Mean distance of expected and observed acceptance by depth.", ("kind",)),
    "planner_trial_cost_seconds": ("Seconds lost by trials and shadow drafts, less what trials won: may fall.", ()),
}
Sample = tuple[str, tuple[str, ...], float]  # name, values of its labels, value


class EngineCollector(Collector):
    """Metrics of some engines, labelled `engine`. It is registered by whoever wants it, nowhere by itself.

    Args:
        engines: by the name that the label gets.
    """

    def __init__(self, engines: Mapping[str, "Engine"]):
        self.engines = dict(engines)

    def describe(self) -> Iterator[Metric]:
        """The families without values, so that registering reads no engine."""
        return iter(self._families().values())

    def collect(self) -> Iterator[Metric]:
        """The families that have values, as of now."""
        families = self._families()
        for label, engine in self.engines.items():
            for name, labels, value in samples(engine):
                families[name].add_metric([label, *labels], value)
        return (family for family in families.values() if family.samples)

    def _families(self) -> dict[str, Any]:
        return {
            name: kind(f"specjax_{name}", text, labels=["engine", *labels])
            for kind, known in ((CounterMetricFamily, _COUNTERS), (GaugeMetricFamily, _GAUGES))
            for name, (text, labels) in known.items()
        }


def samples(engine: "Engine") -> Iterator[Sample]:
    """What an engine has counted; of its planner too, where it has one."""
    counters, scheduler = engine.counters, engine.scheduler
    spec = counters.spec
    yield "requests", (), counters.requests
    yield from (("requests_finished", (reason,), n) for reason, n in dict(counters.finished).items())
    yield "prompt_tokens", (), counters.prompt_tokens
    yield "generated_tokens", (), counters.tokens
    yield "prefill_seconds", (), counters.prefill_s
    yield "decode_seconds", (), counters.decode_s
    yield "rounds", (), counters.rounds
    yield "request_rounds", (), spec.rounds
    yield "verified_rows", (), spec.rounds + spec.drafted
    yield "drafted_tokens", (), spec.drafted
    yield "accepted_tokens", (), spec.accepted
    for place, count in enumerate(list(spec.accepted_at), 1):
        yield "accepted_tokens_by_position", (str(place),), count
    yield "requests_running", (), len(scheduler.running)
    yield "requests_waiting", (), len(scheduler.waiting)
    yield "batch_rows", (), engine.config.batch
    if scheduler.page_size is not None:
        yield "free_pages", (), scheduler.free_pages
    yield "decode_tokens_per_second", (), counters.tokens_per_s
    if engine.pilot is not None:
        yield from _planned(engine.pilot)


def _planned(pilot: "Pilot") -> Iterator[Sample]:
    books, report = pilot.planner.books, pilot.report()
    for name, counted in (
        ("planner_rounds", books.reasons),
        ("planner_shape_rounds", books.rounds_of),
        ("planner_drafted_tokens", books.drafted),
        ("planner_accepted_tokens", books.accepted),
        ("planner_switches", books.changes),
        ("planner_host_seconds", pilot.host_s),
        ("planner_calibration_error", report["calibration_error"]),
    ):
        yield from ((name, (value,), number) for value, number in dict(counted).items())
    names = ("expected_round_seconds", "actual_round_seconds", "expected_round_tokens", "actual_round_tokens")
    yield from ((f"planner_{name}", (), total) for name, total in zip(names, books.totals, strict=True))
    yield "planner_shape", tuple(str(report["shape"][field]) for field in ("kind", "depth", "branching", "rows")), 1
    yield "planner_round_time_error", (), report["time_error_median"]
    yield "planner_round_tokens_error", (), report["tokens_error_median"]
    yield "planner_round_tokens_bias", (), report["tokens_bias"]
    yield "planner_trial_cost_seconds", (), report["exploration_s"]


def write(path: Path, engines: Mapping[str, "Engine"]) -> None:
    """Write the metrics of some engines in Prometheus' text format; the file appears whole or not at all."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(EngineCollector(engines))
    with replacing(path) as part:
        part.write_bytes(generate_latest(registry))
