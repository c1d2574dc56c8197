"""The planner on paper: exactly the optimum, plain under load, corrections, changes, trials and their purse."""

import dataclasses
import itertools

import numpy as np
import pytest

from specjax.costmodel import menu
from specjax.costmodel.acceptance import Acceptance
from specjax.costmodel.books import OPENING, PURSE
from specjax.costmodel.planner import Planner
from specjax.costmodel.priors import Prior
from specjax.costmodel.scores import Nodes
from specjax.costmodel.tables import Grid, Provenance, Table
from specjax.draft import PLAIN, DraftShape

SHAPES = (
    DraftShape.chain("ngram", 3),
    DraftShape.chain("mtp", 1),
    DraftShape.chain("mtp", 3),
    DraftShape("eagle3", 2, 2, 4),
)
AXES = ((1, 2, 4), (1, 2, 4), (100, 1000))


def table(seed: int = 0, *, source="measured", **fields) -> Table:
    """Random prices that grow with everything."""
    rng = np.random.default_rng(seed)

    def grid(axes):
        steps = rng.uniform(0.05, 1.0, [len(a) for a in axes])
        for axis in range(len(axes)):
            steps = np.cumsum(steps, axis=axis)
        return Grid.of(axes, steps / steps.size, source)

    drafts = {shape: grid((AXES[0], AXES[2])) for shape in SHAPES}
    return Table(Provenance("paper", 1, "toy", "float32"), grid(AXES), drafts, 0.02, **fields)


def planner(prices, batch=3, *, shapes=SHAPES, counts=None, **options) -> Planner:
    counts = menu.widths(batch, 4) if counts is None else counts
    return Planner(prices, shapes, counts, batch, **options)


def brute_force(plan: Planner, rows: np.ndarray, context: float) -> float:
    """The best rate over all shapes, all passes, and all prefixes of every request's nodes."""
    quote = plan.prices.quote(len(rows), context)
    factors = plan.prices.factors()
    rates = plan.acceptance.rates(rows)
    live = plan.acceptance.live(rows)
    best = len(rows) / ((quote.draft[0] + quote.verify[quote.least]) * factors[0, quote.least])
    for index, shape in enumerate(plan.menu[1:], 1):
        curve, made = plan.acceptance.curve[shape], plan.acceptance.outlines[shape]
        nodes = np.cumprod(rates[:, curve].T, axis=1)[:, made.depths - 1] * made.shares * live[curve][:, None]
        drafting = live[curve].mean()
        for place, count in enumerate(plan.prices.counts):
            if count <= len(rows):
                continue
            spare = count - len(rows)
            tokens = max(
                len(rows) + sum(nodes[r, :n].sum() for r, n in enumerate(each))
                for each in itertools.product(range(nodes.shape[1] + 1), repeat=len(rows))
                if sum(each) <= spare
            )
            full = (quote.draft[index] + quote.verify[place]) * factors[index, place]
            bare = (quote.draft[index] + quote.verify[quote.least]) * factors[index, quote.least]
            best = max(best, tokens / (drafting * full + (1 - drafting) * bare))
    return best


@pytest.mark.parametrize("seed", range(12))
def test_the_choice_is_the_optimum(seed):
    plan = planner(table(seed), explore=False)
    rng = np.random.default_rng(seed)
    rows = np.arange(3)
    for _ in range(10):  # requests that differ, costs that were corrected
        shape = SHAPES[rng.integers(len(SHAPES))]
        drafts = np.full(3, shape.rows - 1)
        plan.acceptance.observe(shape, rows, drafts, np.minimum(rng.integers(0, 4, 3), shape.depth))
        plan.prices.observe(plan.menu.index(shape), rng.integers(2, 4), 1.0, rng.uniform(0.7, 1.4))
    decision = plan.decide(rows, 500.0)
    assert decision.rate == pytest.approx(brute_force(plan, rows, 500.0))
    assert decision.budgets.sum() <= max(decision.rows, 3)


def test_plain_when_drafts_cost_more_than_they_bring():
    free = table(1)
    dear = dataclasses.replace(
        free, draft={s: Grid.of(g.axes, g.seconds + 50, "measured") for s, g in free.draft.items()}
    )
    decision = planner(dear).decide(np.arange(3), 500.0)
    assert decision.shape == PLAIN
    assert decision.budgets.tolist() == [1, 1, 1]
    assert decision.rate == pytest.approx(decision.plain)


def flat(draft: float = 0.1, row: float = 0.001, *, source="measured", **fields) -> Table:
    """Rows cost `row` each after the first second, drafting costs `draft`."""
    verify = [[[1 + row * b * r + 1e-9 * c for c in AXES[2]] for r in AXES[1]] for b in AXES[0]]
    drafts = {s: Grid.of((AXES[0], AXES[2]), np.full((3, 2), draft), source) for s in SHAPES}
    return Table(Provenance("paper", 1, "toy", "float32"), Grid.of(AXES, verify, source), drafts, 1e-6, **fields)


def play(plan, accepted, rounds, *, slower=None, batch=3, shadow=None):
    """Rounds in which each request accepts `accepted` drafts (of those verified); returns the decisions."""
    rows, made = np.arange(batch), []
    for _ in range(rounds):
        decision = plan.decide(rows, 500.0)
        live = np.full(batch, decision.shape.rows - 1)
        decision = plan.fit(decision, rows, live, 500.0)
        index = plan.menu.index(decision.shape)
        quote = plan.prices.quote(batch, 500.0)
        seconds = quote.draft[index] + quote.verify[int(np.searchsorted(plan.prices.counts, decision.rows))]
        seconds = seconds * (slower or {}).get(decision.shape, 1.0) + plan.extra(decision, batch, 500.0)
        drafts = decision.budgets - 1
        took = np.minimum(np.minimum(accepted, drafts), decision.shape.depth)
        plan.observe(decision, rows, 500.0, seconds=seconds, count=decision.rows, drafts=drafts, accepted=took)
        if decision.shadow is not None and shadow is not None:
            drafts = np.full(batch, decision.shadow.rows - 1)
            plan.shadow(decision.shadow, rows, drafts, np.full(batch, min(shadow, decision.shadow.depth)))
        made.append(decision)
    return made


def test_a_trial_ends_when_it_has_lost_more_than_there_was_to_spend():
    plan = planner(flat(0.4, source="roofline"))
    while play(plan, 0, 1)[0].reason != "trial":
        assert plan.books.rounds < 400
    for purse, goes_on in ((0.5, True), (-0.5, True), (-1.5, False)):
        plan._trials._trying, plan._trials._left = (1, len(plan.prices.counts) - 1), 5  # one of several rounds
        plan.books.purse = purse
        assert (plan.decide(np.arange(3), 500.0).reason == "trial") == goes_on
        assert (plan._trials._trying is not None) == goes_on


def test_requests_that_predict_well_get_the_rows():
    chain = SHAPES[2]
    plan = planner(flat(), shapes=(chain,), counts=(3, 6), explore=False)
    for _ in range(40):
        plan.acceptance.observe(chain, np.arange(3), np.full(3, 3), np.array([3, 0, 0]))
    decision = plan.decide(np.arange(3), 500.0)
    assert decision.shape == chain
    assert decision.budgets.tolist() == [4, 1, 1]


def test_drafts_that_are_never_accepted_end_in_plain_decoding():
    made = play(planner(flat(0.3)), 0, 200)
    assert sum(d.shape == PLAIN for d in made[100:]) >= 95


def test_a_slow_shape_is_left_and_a_good_one_kept():
    plan = planner(flat())
    first = play(plan, 3, 20)[-1].shape
    assert first.depth == 3
    made = play(plan, 3, 60, slower={first: 4.0})
    assert sum(d.shape == first for d in made[40:]) < 5


def test_prices_converge_to_what_rounds_take():
    plan = planner(flat(), explore=False)
    made = play(plan, 3, 60, slower=dict.fromkeys((PLAIN, *SHAPES), 1.3))
    assert made[-1].seconds == pytest.approx(1.3 * made[0].seconds, rel=0.02)
    assert plan.report()["time_error_median"] < 0.03


def test_one_pause_of_the_machine_changes_nothing():
    plan = planner(flat(), explore=False)
    chosen = play(plan, 3, 30)[-1].shape
    play(plan, 3, 1, slower=dict.fromkeys((PLAIN, *SHAPES), 50.0))
    assert play(plan, 3, 1)[0].shape == chosen


def test_a_change_waits_until_it_pays():
    """With a switch that costs ten rounds, small gains do not make the planner move at once; free ones do."""

    def changed(switch):
        plan = planner(flat(switch=switch), explore=False)
        plan.books.current = SHAPES[1]
        made = play(plan, 3, 60)
        assert made[-1].shape.depth == 3
        return next(i for i, d in enumerate(made) if d.shape != SHAPES[1])

    assert changed(0.0) == 0
    assert 5 < changed(10.0) < 60
    assert planner(flat(switch=1e6), explore=False).decide(np.arange(3), 500.0).reason == "stay"


def test_a_drafter_that_was_off_pays_its_way_back():
    prices = flat(catch_up={"mtp": (1.0, 0.5), "eagle3": (1.0, 0.5)})
    plan = planner(prices, explore=False, ring=4)
    plan.books.current = PLAIN
    plan.books.missed["mtp"] = 100.0
    decision = plan.decide(np.arange(3), 500.0)._replace(shape=SHAPES[2], shadow=None)
    assert plan.extra(decision, 3, 500.0) == pytest.approx(1 + 0.5 * 100)
    play(plan, 0, 20)
    assert plan.books.missed["mtp"] <= 4 * 3  # no more than the ring holds of each request


def test_trials_cost_no_more_than_the_purse():
    careful = planner(flat(0.4, source="roofline"))
    made = play(careful, 0, 400)
    total = sum(d.seconds for d in made)
    assert careful.books.spent <= OPENING * 1.1 + PURSE * total * 1.1
    assert any(d.reason == "trial" or d.shadow is not None for d in made)
    assert not any(d.reason == "trial" or d.shadow for d in play(planner(flat(0.4), explore=False), 0, 50))


def test_shadow_drafts_bring_a_drafter_in():
    """A drafter that is expected to lose, and would win: a plain round with its drafts beside it is cheaper than a
    round on trial, and shows it.
    """
    chain = SHAPES[2]
    acceptance = Acceptance([chain], 3, {"mtp": Prior((0.35,))})
    plan = planner(flat(0.02, 0.1), shapes=(chain,), counts=(3, 12), acceptance=acceptance)
    made = play(plan, 3, 100, shadow=3)
    first = made[0]
    assert first.shape == PLAIN
    assert any(d.shadow == chain for d in made)
    assert made[-1].shape == chain
    assert made[-1].rate > 1.5 * first.rate
    acceptance = Acceptance([chain], 3, {"mtp": Prior((0.35,))})
    shy = planner(flat(0.02, 0.1), shapes=(chain,), counts=(3, 12), acceptance=acceptance, explore=False)
    assert {d.shape for d in play(shy, 3, 100)} == {PLAIN}


def test_behind_plain_only_sure_gains_are_taken():
    plan = planner(flat(0.3, source="roofline"))
    plan.books.ahead = -5.0
    decision = plan.decide(np.arange(3), 500.0)
    assert decision.reason in ("sure", "trial")
    assert decision.shape == PLAIN or decision.rate > decision.plain


def test_report_tells_every_switch():
    plan = planner(flat())
    play(plan, 3, 40)
    report = plan.report()
    assert report["rounds"] == 40
    assert report["switches"][0]["from"]["kind"] == "none"
    assert report["switches"][-1]["to"] == report["shape"]
    assert set(report["calibration_error"]) == {"ngram", "mtp", "eagle3"}


def test_fit_runs_a_plain_pass_when_nothing_was_proposed():
    plan = planner(flat(), explore=False)
    decision = plan.decide(np.arange(3), 500.0)
    assert decision.shape.depth
    fitted = plan.fit(decision, np.arange(3), np.zeros(3, int), 500.0)
    assert fitted.rows == 3
    assert fitted.budgets.tolist() == [1, 1, 1]
    fitted = plan.fit(decision, np.arange(3), np.array([2, 0, 0]), 500.0)
    assert fitted.budgets.tolist()[1:] == [1, 1]
    assert fitted.budgets[0] <= 3


def promised(chance: float, batch: int = 3, depth: int = 3) -> Nodes:
    """Chains whose every node was given one chance."""
    scores = np.tile(np.arange(depth + 1) * np.log(chance), (batch, 1))
    return Nodes(scores, np.tile(np.arange(-1, depth), (batch, 1)))


def riding(draft: float = 0.005, row: float = 0.2, **fields):
    """A planner in which an average n-gram draft does not pay, and a plain round of it with a draft beside."""
    chain = DraftShape.chain("ngram", 3)
    plan = Planner(flat(draft, row, **fields), (chain,), (3, 6, 12), 3, scored=True)
    for _ in range(60):
        plan.acceptance.observe(chain, np.arange(3), np.full(3, 3), np.zeros(3, int))
    for _ in range(200):  # whatever was to be tried has been tried
        decision = plan.decide(np.arange(3), 500.0)
        if decision.ride:
            return plan, decision
        plan.observe(
            decision,
            np.arange(3),
            500.0,
            seconds=decision.seconds,
            count=decision.rows,
            drafts=np.zeros(3, int),
            accepted=np.zeros(3, int),
        )
    raise AssertionError("never rides")


def test_a_draft_that_rides_along_is_verified_if_its_scores_promise_enough():
    plan, decision = riding()
    assert decision.shape == PLAIN
    assert decision.shadow == DraftShape.chain("ngram", 3)
    rows, live = np.arange(3), np.full(3, 3)
    kept = plan.fit(decision, rows, live, 500.0, promised(0.05))
    assert (kept.shape, kept.shadow, kept.rows) == (PLAIN, decision.shadow, 3)
    taken = plan.fit(decision, rows, live, 500.0, promised(0.95))
    assert (taken.shape, taken.shadow, taken.reason) == (decision.shadow, None, "scores")
    assert taken.rows > 3
    assert taken.rate > decision.rate
    one = promised(0.05)
    one.scores[1] = promised(0.99).scores[1]
    assert plan.fit(decision, rows, live, 500.0, one).budgets.tolist()[::2] == [1, 1]


def test_what_came_of_a_score_outweighs_it():
    plan, decision = riding()
    rows, live, nodes = np.arange(3), np.full(3, 3), promised(0.9)
    for _ in range(100):
        plan.learn(decision.shadow, rows, live, nodes, np.tile([True, False, False, False], (3, 1)))
    assert plan.fit(decision, rows, live, 500.0, nodes).shape == PLAIN


def looking(head=0.5, words=0.9, wait=1e-6):
    """A planner that knows how often a lookup and a head are accepted; the lookup finds something every other time."""
    cheap, dear = DraftShape.chain("ngram", 3), DraftShape.chain("eagle3", 2)
    table = flat(1e-6, 0.05)
    grid = Grid.of((AXES[0], AXES[2]), np.full((3, 2), 0.1), "measured")
    table = dataclasses.replace(table, draft={**table.draft, dear: grid}, catch_up={"eagle3": (0.0, 0.0)}, fixed=wait)
    plan = Planner(table, (cheap, dear), (1, 2, 3, 4), 1, scored=True)
    rows, rng = np.arange(1), np.random.default_rng(0)
    for number in range(200):
        had = np.array([3 * (number % 2)])
        plan.acceptance.observe(cheap, rows, had, np.minimum(rng.geometric(1 - words, 1) - 1, had))
        plan.acceptance.observe(dear, rows, np.array([2]), np.minimum(rng.geometric(1 - head, 1) - 1, 2))
    decisions = []
    for _ in range(60):
        decision = plan.decide(rows, 500.0)
        decisions.append(decision)
        about = {"seconds": decision.seconds, "count": 1, "drafts": np.zeros(1, int), "accepted": np.zeros(1, int)}
        plan.observe(decision, rows, 500.0, **about)
    return plan, [d for d in decisions if d.reason in ("best", "sure")][-1], cheap, dear


def chain_of(said, nodes):
    return Nodes(np.log(said) * np.arange(nodes, dtype=float)[None], np.arange(nodes)[None] - 1)


def test_a_lookup_is_made_before_a_dear_draft_and_may_save_it():
    plan, decision, cheap, dear = looking()
    assert decision.looks and (decision.shape, decision.shadow) == (dear, cheap)
    rows = np.arange(1)
    found = plan.fit(decision, rows, np.array([3]), 500.0, chain_of(0.95, 4))
    assert (found.shape, found.shadow, found.reason) == (cheap, None, "scores") and found.budgets.tolist() == [4]
    for nothing in (np.array([0]), chain_of(0.95, 4)), (np.array([3]), chain_of(0.02, 4)):
        live, nodes = nothing
        turned = plan.fit(decision, rows, live, 500.0, nodes)
        assert (turned.shape, turned.shadow, turned.looks) == (dear, None, False)
        fewer = decision._replace(budgets=np.array([3, 3]))  # a second request has ended since
        assert plan.fit(fewer, rows, live, 500.0, nodes).budgets.tolist() == [1]
        drafted = plan.fit(turned, rows, np.array([2]), 500.0, chain_of(0.9, 3))
        assert drafted.shape == dear and drafted.budgets.tolist() == [3]
        assert plan.fit(turned, rows, np.array([2]), 500.0, chain_of(0.02, 3)).budgets.tolist() == [1]


@pytest.mark.parametrize("requests", [1, 2])
def test_a_trial_verifies_the_pass_that_is_on_trial(requests):
    """Though the scores promise nothing: its time is what is to be learned. What the draft cannot fill is not run."""
    chain, rows = SHAPES[2], np.arange(requests)
    plan = planner(
        flat(0.4), shapes=(chain,), counts=tuple(requests * n for n in range(1, chain.rows + 1)), scored=True
    )
    nodes = Nodes(
        np.tile(chain_of(0.02, chain.rows).scores, (requests, 1)), np.tile(np.arange(chain.rows) - 1, (requests, 1))
    )
    wide, live = requests * chain.rows, np.full(requests, chain.depth)
    trial = plan.decide(rows, 500.0)._replace(shape=chain, shadow=None, reason="trial", rows=wide)
    assert plan.fit(trial, rows, live, 500.0, nodes).rows == wide
    assert plan.fit(trial, rows, np.ones(requests, int), 500.0, nodes).budgets.tolist() == [2] * requests
    assert plan.fit(trial._replace(reason="best", tokens=999.0), rows, live, 500.0, nodes).rows == requests


def test_a_drafter_comes_back_when_as_much_was_lost_as_its_return_costs():
    """Not never, because a single round is not worth it, and not at once, because the lookups may go on."""
    plan, decision, _, dear = looking()
    rows, nothing = np.arange(1), (np.array([0]), chain_of(0.95, 4))
    plan.prices.table.catch_up["eagle3"] = (1.0, 0.0)  # a plain round takes as long
    plan.books.missed["eagle3"] = 4.0
    assert plan.fit(decision, rows, nothing[0], 500.0, nothing[1]).shape == dear  # its draft takes so many in itself
    for _ in range(2):
        plan.books.missed["eagle3"], lost = 9.0, 0.0
        while (fitted := plan.fit(decision, rows, nothing[0], 500.0, nothing[1])).shape == PLAIN:
            assert (fitted.reason, fitted.budgets.tolist()) == ("scores", [1])
            lost += fitted.seconds * (
                1 - fitted.rate / (decision.tokens / (decision.seconds + plan.prices.table.fixed))
            )
        assert fitted.shape == dear and 0.5 < lost <= 1.0
        # The next decision knows at once that it is back, though the round is learned from later.
        assert plan.committed(fitted, 1, 500.0, 2) == 1.0 and plan.books.missed["eagle3"] == 0.0


def test_a_dear_draft_is_made_right_behind_the_lookups_while_these_seldom_help():
    """A wait takes 0.02 here and the dear draft 0.1: worth it from one lookup in six that is verified."""
    plan, decision, cheap, dear = looking(wait=0.02)
    rows = np.arange(1)
    nothing, good = (np.array([0]), chain_of(0.95, 4)), (np.array([3]), chain_of(0.95, 4))

    def after(live, nodes):
        for _ in range(100):
            fitted = plan.fit(decision, rows, live, 500.0, nodes)
        for _ in range(60):
            made = plan.decide(rows, 500.0)
            if made.looks:
                return made, fitted
        raise AssertionError("never looks first")

    assert decision.beside is None
    made, fitted = after(*nothing)
    assert (made.shape, made.shadow, made.beside) == (dear, cheap, dear)
    assert (fitted.shape, fitted.beside) == (dear, None)
    turned = plan.fit(made, rows, *nothing[:1], 500.0, nothing[1])
    assert (turned.shape, turned.shadow, turned.beside, turned.looks) == (dear, None, None, False)
    # Where the lookup is verified after all, the dear draft was made for nothing, and its maker misses nothing.
    found = plan.fit(made, rows, good[0], 500.0, good[1])
    assert (found.shape, found.shadow, found.beside) == (cheap, None, dear)
    assert plan.extra(found, 1, 500.0) == pytest.approx(0.1)
    plan.books.missed["eagle3"] = 5.0
    before, seconds = plan.prices.factors().copy(), found.seconds + 0.1
    plan.observe(found, rows, 500.0, seconds=seconds, count=4, drafts=np.array([3]), accepted=np.array([3]))
    assert plan.books.missed["eagle3"] == 0.0
    np.testing.assert_allclose(plan.prices.factors(), before, rtol=0.01)  # the dear draft is no part of its price
    made, _ = after(*good)
    assert (made.shape, made.shadow, made.beside) == (dear, cheap, None)


def test_a_dear_draft_that_is_no_better_than_a_plain_round_is_not_made():
    plan, decision, cheap, _ = looking(head=0.02)
    assert decision.shape in (cheap, PLAIN) and not decision.looks
    left = plan.fit(decision, np.arange(1), np.array([0]), 500.0, chain_of(0.9, 4))
    assert left.budgets.tolist() == [1] and left.shape.kind != "eagle3"


def test_the_text_judges_drafts_whether_they_were_verified_or_not():
    """Cut by its scores to nothing, a drafter that is right is found to be."""
    plan, decision = riding()
    shape, rows, live = decision.shadow, np.arange(3), np.full(3, 3)
    before = plan.acceptance.rates(rows, curve=0)[:, 0].mean()
    for _ in range(40):
        nothing = np.zeros(3, int)
        about = {"seconds": decision.seconds, "count": 3, "drafts": nothing, "accepted": nothing}
        plan.observe(decision, rows, 500.0, **about)
        plan.learn(shape, rows, live, promised(0.5), np.ones((3, 4), bool))
    after = plan.acceptance.rates(rows, curve=0)[:, 0]
    assert before < 0.2 and (after > 0.6).all()


def test_the_text_says_how_deep_a_draft_was_right():
    """The root is no accepted draft: first drafts that are always right and second ones that never are."""
    plan, decision = riding()
    rows, live, path = np.arange(3), np.full(3, 3), np.tile([True, True, False, False], (3, 1))
    for _ in range(60):
        plan.acceptance.age()
        plan.learn(decision.shadow, rows, live, promised(0.5), path)
    first, second = plan.acceptance.rates(rows, curve=0)[:2, 0]
    assert (first > 0.8).all() and (second < 0.3).all()


def test_rounds_of_any_kind_make_what_is_known_older():
    """Acceptance and scores that were learned, and round times that were seen: all of it fades while others run."""
    plan, decision = riding()
    rows, live = np.arange(3), np.full(3, 3)
    for _ in range(20):
        plan.learn(decision.shadow, rows, live, promised(0.5), np.ones((3, 4), bool))
    nothing = np.zeros(3, int)

    def pass_by(rounds):
        for _ in range(rounds):
            about = {"seconds": 1.0, "count": 3, "drafts": nothing, "accepted": nothing}
            plan.observe(decision._replace(shadow=None), rows, 500.0, **about)

    pass_by(8)
    trials, seen = plan.acceptance.trials(decision.shadow), plan.scores._tally.sum()
    plan.prices._seen[1] = priced = 10.0
    pass_by(80)
    assert plan.acceptance.trials(decision.shadow) == pytest.approx(trials * (1 - 1 / 400) ** 80)
    assert plan.scores._tally.sum() == pytest.approx(seen * (1 - 1 / 200) ** 80)
    np.testing.assert_allclose(plan.prices._seen[1], priced * (1 - 1 / 200) ** 80)


@pytest.mark.parametrize("fields", [{"draft": 0.02}, {"draft": 1e-6, "aside": (0.01, 0.005)}])
def test_fares_run_out(fields):
    """Rides that gain nothing cost 0.2 % of the time once the first money is spent, so most rounds have none.

    That holds for what the host does about a draft, too, however little its making takes.
    """
    plan, decision = riding(**fields)
    assert plan.extra(decision, 3, 500.0) == pytest.approx(0.02, rel=1e-3)
    rides = 0
    for number in range(2000):
        decision = plan.decide(np.arange(3), 500.0)
        seconds = decision.seconds + plan.extra(decision, 3, 500.0)
        nothing = np.zeros(3, int)
        plan.observe(decision, np.arange(3), 500.0, seconds=seconds, count=3, drafts=nothing, accepted=nothing)
        rides += decision.ride and number >= 500
    assert 0 < rides < 0.25 * 1500


def test_nothing_rides_without_scores():
    plan, _ = riding()
    plan.scored = False
    assert not any(plan.decide(np.arange(3), 500.0).ride for _ in range(20))
