"""A serving run on paper: requests arrive, decode together, finish; every round takes what a table says.

Deterministic: the text of a request is a function of its number, so whether a draft at a position is accepted does not
depend on the policy, on the batch, or on when the request runs. Prefill is left out; it is the same for all.
"""

import dataclasses
import zlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from specjax.costmodel import menu as menus
from specjax.costmodel.planner import Planner
from specjax.costmodel.priors import PRIORS, SIBLING, Prior, outline
from specjax.costmodel.tables import Table
from specjax.draft import DraftShape

Clock = Callable[[DraftShape, int, int, float], float]  # shape, requests, rows, context -> seconds


@dataclasses.dataclass(frozen=True)
class Text:
    """A class of requests: how well each drafter does on its text.

    Attributes:
        drafters: acceptance by kind; kinds that are missing have their prior.
        share: of the requests.
        temperature: of its requests.
        drift: after this many tokens of a run the odds of acceptance are divided by `worse`; None for never.
        worse: see `drift`.
    """

    drafters: Mapping[str, Prior] = dataclasses.field(default_factory=dict)
    share: float = 1.0
    temperature: float = 0.0
    drift: int | None = None
    worse: float = 1.0

    def prior(self, kind: str) -> Prior:
        return self.drafters.get(kind, PRIORS[kind])


@dataclasses.dataclass(frozen=True)
class Load:
    """Who asks for what, and when.

    Attributes:
        concurrency: rows of the batch; without a `rate` each finished request is followed by the next at once.
        requests: in all.
        length: mean answer length, geometric between a quarter and four times of it.
        prompt: mean tokens in the cache at the start.
        texts: classes of requests.
        rate: arrivals a second (exponential gaps); None keeps the batch full.
        burst: requests that arrive at once.
        seed: of everything drawn.
    """

    concurrency: int
    requests: int
    length: int = 256
    prompt: int = 512
    texts: tuple[Text, ...] = (Text(),)
    rate: float | None = None
    burst: int = 1
    seed: int = 0


@dataclasses.dataclass
class Run:
    """What came of it: one entry a round, and totals.

    Attributes:
        seconds: of each round.
        tokens: committed in each round.
        live: requests of each round.
        shapes: drafted in each round.
        idle: seconds without a request.
    """

    seconds: list[float] = dataclasses.field(default_factory=list)
    tokens: list[int] = dataclasses.field(default_factory=list)
    live: list[int] = dataclasses.field(default_factory=list)
    shapes: list[DraftShape] = dataclasses.field(default_factory=list)
    idle: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens per second of decoding, idle time left out."""
        return sum(self.tokens) / sum(self.seconds)


def simulate(
    load: Load,
    policy: DraftShape | Planner,
    clock: Table | Clock,
    *,
    counts: Sequence[int] | None = None,
    rounds: int | None = None,
    noise: float = 0.0,
) -> Run:
    """Serve a load with one fixed shape (plain decoding is one) or with a planner.

    Args:
        load: the requests.
        policy: a fixed shape, or a planner for `load.concurrency` rows.
        clock: what rounds really take.
        counts: rows of the passes that have programs; None takes the planner's or those of the shape.
        rounds: stop after so many.
        noise: standard deviation of the logarithm of each round's time.
    """
    passes = policy.prices.counts if isinstance(policy, Planner) else menus.widths(load.concurrency, policy.rows)
    passes = np.asarray(passes if counts is None else counts)
    time = clock.round_time if isinstance(clock, Table) else clock
    planner = policy if isinstance(policy, Planner) else None
    world = _World(load)
    run = Run()
    now = 0.0
    while (rounds is None or len(run.seconds) < rounds) and (rows := world.admit(now, planner)) is not None:
        if not len(rows):
            run.idle += world.next_arrival - now
            now = world.next_arrival
            continue
        context = float(world.context(rows).mean())
        jitter = float(np.exp(noise * world.gauss(len(run.seconds))))
        if isinstance(policy, Planner):
            shape, accepted, seconds = _planned(policy, world, rows, context, time, jitter)
        else:
            shape, drafts = policy, world.proposals(policy, rows)
            count = int(passes[min(np.searchsorted(passes, len(rows) + drafts.sum()), len(passes) - 1)])
            accepted = world.accept(shape, rows, drafts)
            seconds = time(shape, len(rows), count, context) * jitter
        now += seconds
        run.seconds.append(float(seconds))
        run.tokens.append(world.commit(rows, accepted))
        run.live.append(len(rows))
        run.shapes.append(shape)
    return run


def _planned(
    planner: Planner, world: "_World", rows: np.ndarray, context: float, time: Clock, jitter: float
) -> tuple[DraftShape, np.ndarray, float]:
    """A round of the planner: its shape, the accepted drafts, and its seconds.

    What taking a shape up and shadow drafts cost is taken from the planner's own books.
    """
    decision = planner.decide(rows, context)
    live = world.proposals(decision.shape, rows)
    decision = planner.fit(decision, rows, live, context)
    drafts = np.minimum(live, decision.budgets - 1)
    accepted = world.accept(decision.shape, rows, drafts)
    seconds = time(decision.shape, len(rows), decision.rows, context) + planner.extra(decision, len(rows), context)
    seconds *= jitter
    planner.observe(decision, rows, context, seconds=seconds, count=decision.rows, drafts=drafts, accepted=accepted)
    if decision.shadow is not None:
        shown = world.proposals(decision.shadow, rows)
        planner.shadow(decision.shadow, rows, shown, world.agree(decision.shadow, rows, shown))
    return decision.shape, accepted, seconds


class _World:
    """Requests, their rows, and their texts."""

    def __init__(self, load: Load):
        self.load = load
        index = np.arange(load.requests)
        self._length = np.clip(_exponential(load.seed, index, 1) * load.length, load.length / 4, load.length * 4)
        self._length = np.maximum(self._length.astype(int), 1)
        self._prompt = np.maximum((_exponential(load.seed, index, 2) * load.prompt).astype(int), 1)
        shares = np.cumsum([text.share for text in load.texts])
        self._text = np.searchsorted(shares / shares[-1], _uniform(load.seed, index, 3), side="right")
        gaps = np.zeros(load.requests) if load.rate is None else _exponential(load.seed, index, 4) / load.rate
        self._arrival = np.cumsum(gaps)[index // load.burst * load.burst]
        self._request = np.full(load.concurrency, -1)
        self._done = np.zeros(load.concurrency, int)
        self._next = 0
        self._committed = 0
        self._outlines: dict[tuple[DraftShape, int], tuple] = {}

    @property
    def next_arrival(self) -> float:
        return float(self._arrival[self._next])

    def admit(self, now: float, planner: Planner | None) -> np.ndarray | None:
        """Fill free rows; the rows that decode, or None when all is done."""
        for row in np.flatnonzero(self._request < 0).tolist():
            if self._next == self.load.requests or self._arrival[self._next] > now:
                break
            self._request[row], self._done[row] = self._next, 0
            if planner:
                planner.start(row, self.load.texts[int(self._text[self._next])].temperature)
            self._next += 1
        rows = np.flatnonzero(self._request >= 0)
        return None if not len(rows) and self._next == self.load.requests else rows

    def context(self, rows: np.ndarray) -> np.ndarray:
        return self._prompt[self._request[rows]] + self._done[rows]

    def proposals(self, shape: DraftShape, rows: np.ndarray) -> np.ndarray:
        """Drafted nodes of each request."""
        if not shape.depth:
            return np.zeros(len(rows), int)
        request = self._request[rows]
        live = np.array([text.prior(shape.kind).live for text in self.load.texts])[self._text[request]]
        drawn = _uniform(self.load.seed, request, 5 + _stream(shape.kind), self._done[rows])
        return np.where(drawn < live, shape.rows - 1, 0)

    def accept(self, shape: DraftShape, rows: np.ndarray, drafts: np.ndarray) -> np.ndarray:
        """Accepted drafts of each request when its first `drafts` nodes are verified; never past its end."""
        return np.minimum(self.agree(shape, rows, drafts), self._length[self._request[rows]] - self._done[rows] - 1)

    def agree(self, shape: DraftShape, rows: np.ndarray, drafts: np.ndarray) -> np.ndarray:
        """How deep the first `drafts` nodes of each request have its text, were it to go on."""
        accepted = np.zeros(len(rows), int)
        if not shape.depth:
            return accepted
        request, done = self._request[rows], self._done[rows]
        for number, text in enumerate(self.load.texts):
            mine = np.flatnonzero(self._text[request] == number)
            if not len(mine):
                continue
            first, child = self._outline(shape, number)
            if text.drift is not None and self._committed >= text.drift:
                first = first / (first + (1 - first) * text.worse)
            level = np.arange(shape.depth)
            stream = 1000 + _stream(shape.kind)
            drawn = _uniform(self.load.seed, request[mine, None], stream, done[mine, None] + level)
            if shape.is_chain:
                accepted[mine] = np.logical_and.accumulate((drawn < first) & (level < drafts[mine, None]), axis=1).sum(
                    1
                )
                continue
            node = np.full(len(mine), -1)
            for depth in level:
                node = child[node, _rank(drawn[:, depth], first[depth], shape.branching)]
                accepted[mine] += (node >= 0) & (node < drafts[mine])
                node = np.where(node < drafts[mine], node, -2)
        return accepted

    def commit(self, rows: np.ndarray, accepted: np.ndarray) -> int:
        """Committed tokens of a round; requests that end free their rows."""
        self._done[rows] += accepted + 1
        ended = rows[self._done[rows] >= self._length[self._request[rows]]]
        self._request[ended] = -1
        tokens = int(accepted.sum()) + len(rows)
        self._committed += tokens
        return tokens

    def gauss(self, number: int) -> float:
        """A standard normal number for a round."""
        draws = [_uniform(self.load.seed, np.array([number]), 7000 + i)[0] for i in range(12)]
        return float(sum(draws) - 6)

    def _outline(self, shape: DraftShape, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Acceptance of first candidates by depth, and the node of each rank under each node (row -1: the root).

        A node that is not there is -2, whose row leads to -2. The tree is the one that the drafter grows, by the
        planner's prior; the text only decides what is accepted.
        """
        if (shape, number) not in self._outlines:
            made = outline(shape, PRIORS[shape.kind])
            child = np.full((shape.rows + 1, shape.branching + 1), -2)
            child[made.parents, made.ranks] = np.arange(len(made.parents))
            self._outlines[shape, number] = self.load.texts[number].prior(shape.kind).at(shape.depth), child
        return self._outlines[shape, number]


def _rank(drawn: np.ndarray, first: float, branching: int) -> np.ndarray:
    """Which candidate is the token, `branching` for none: the first has `first`, each next `SIBLING` of the rest."""
    left = 1 - first
    edges = first + left * (1 - (1 - SIBLING) ** np.arange(branching))
    return np.searchsorted(edges, drawn, side="right")


def _stream(kind: str) -> int:
    return zlib.crc32(kind.encode())


def _uniform(seed: int, index: np.ndarray, stream: int, position: np.ndarray | int = 0) -> np.ndarray:
    """Numbers in [0, 1) that are functions of their arguments (the finaliser of splitmix64)."""
    x = np.asarray(index, np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = x + np.asarray(position, np.uint64) * np.uint64(0xD1B54A32D192ED03)
    x = x + np.uint64(((seed + 1) * 0x2545F4914F6CDD1D + stream * 0x8CB92BA72F3D8DD7) % 2**64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    x = x ^ (x >> np.uint64(31))
    return (x >> np.uint64(11)).astype(float) / 2**53


def _exponential(seed: int, index: np.ndarray, stream: int) -> np.ndarray:
    return -np.log1p(-_uniform(seed, index, stream))


def compare(
    load: Load,
    table: Table,
    kinds: Sequence[str],
    *,
    clock: Table | Clock | None = None,
    rounds: int | None = None,
    noise: float = 0.0,
) -> tuple[dict[DraftShape, Run], Run, Planner]:
    """Every shape of some drafters as a fixed policy, and the planner that chooses among them.

    Args:
        load: the requests, the same for all.
        table: the planner's prices.
        kinds: drafters.
        clock: what rounds really take; None: what the table says.
        rounds: stop each run after so many.
        noise: see `simulate`.

    Returns:
        The runs of the fixed shapes (plain among them), the planner's run, and the planner after it.
    """
    shapes = menus.shapes(kinds)
    counts = menus.widths(load.concurrency, max(shape.rows for shape in shapes))
    truth = table if clock is None else clock
    fixed = {s: simulate(load, s, truth, counts=counts, rounds=rounds, noise=noise) for s in shapes}
    planner = Planner(table, shapes, counts, load.concurrency)
    return fixed, simulate(load, planner, truth, rounds=rounds, noise=noise), planner


def hidden_truth(table: Table, seed: int, off: float = 0.3) -> Clock:
    """What rounds truly take where a table is wrong: each pass and each shape's draft is off by a factor of its own.

    Args:
        table: what the planner believes.
        seed: of the factors.
        off: they lie evenly between 1 - off and 1 + off.
    """
    shapes = list(table.draft)

    def factor(index: int, stream: int) -> float:
        return 1 - off + 2 * off * float(_uniform(seed, np.array([index]), stream)[0])

    def clock(shape: DraftShape, live: int, count: int, context: float) -> float:
        drafted = table.draft_time(shape, live, context) * (factor(shapes.index(shape), 1) if shape.depth else 0.0)
        return float(table.fixed + drafted + table.verify_time(live, count, context) * factor(count, 2))

    return clock
