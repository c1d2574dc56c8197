"""Drafters that take turns: the text stays plain decoding's, and one that sat out drafts as if it never had."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import engines, heads, toy

from specjax import config
from specjax.costmodel.decision import Decision
from specjax.costmodel.planner import Planner
from specjax.draft import PLAIN, DraftShape
from specjax.drafters import learned
from specjax.drafters.drafter_set import DrafterSet
from specjax.drafters.ngram import NGram
from specjax.engine import pilot, step
from specjax.engine.pilot import Pilot
from specjax.engine.pricing import find_table
from specjax.engine.proposal import Proposal
from specjax.sampling import SamplingParams

RING = 16
LOOKUP = DraftShape.chain("ngram", 3)
CHAIN, TREE = DraftShape.chain("eagle3", 2), DraftShape("eagle3", 3, 2, 6)
MODULE = DraftShape.chain("mtp", 2)
MENU = (LOOKUP, CHAIN, TREE, MODULE)
BATCH = 2
PROMPTS = [[5, 9, 5, 9, 5], list(range(20, 43)), [1, 2, 3]]


class Scripted:
    """A planner that is told what to do, and remembers what it was told of the rounds."""

    def __init__(self, turns):
        self.turns, self.round = turns, 0
        self.menu = (PLAIN, *MENU)
        self.place = {shape: index for index, shape in enumerate(self.menu)}
        self.prices = self
        self.draft = np.zeros(len(self.menu))
        self.seen, self.learned, self.shadows, self.started = [], [], [], []

    def quote(self, live, context):
        return self

    def extra(self, decision, live, context):
        return 0.0

    def start(self, row, temperature):
        self.started.append((row, temperature))

    def decide(self, rows, context):
        shape, shadow, *beside = self.turns[self.round % len(self.turns)]
        self.round += 1
        ones = np.ones(len(rows), int)
        told = {"ride": True, "beside": beside[0]} if beside else {}
        return Decision(shape, len(rows), ones, 1.0, 1.0, 1.0, "best", shadow=shadow, **told)

    def fit(self, decision, rows, live, context, nodes):
        """All but the last node of the first request; shadows stay shadows."""
        assert (np.diff(nodes.scores[np.arange(len(rows)), :2], axis=1) <= 0).all()
        budgets = live + 1
        budgets[0] = max(budgets[0] - 1, 1)
        if decision.shadow is not None:
            budgets = np.ones(len(rows), int)
        return decision._replace(rows=int(budgets.sum()), budgets=budgets)

    def committed(self, decision, live, context, accepted):
        return 0.0

    def observe(self, decision, rows, context, *, seconds, count, drafts, accepted, extra):
        assert seconds > 0 and extra == 0.0
        assert (accepted <= drafts).all()
        assert len(rows) + drafts.sum() <= count
        self.seen.append((decision.shape, rows.tolist(), drafts.tolist(), accepted.tolist()))

    def learn(self, shape, rows, drafts, nodes, path):
        accepted = path.sum(axis=1) - 1
        self.learned += [(shape, d, a) for d, a in zip(drafts.tolist(), accepted.tolist(), strict=True)]

    def shadow(self, shape, rows, drafts, accepted):
        self.shadows += [(shape, d, a) for d, a in zip(drafts.tolist(), accepted.tolist(), strict=True)]


@pytest.fixture(scope="module")
def drafters():
    target, params = toy.tiny()
    members, weights = [NGram(num_speculative_tokens=3, prompt_lookup_min=1)], [()]
    for family, options in (("eagle3", {"depth": 3, "branching": 2, "rows": 6}), ("mtp", {"depth": 2})):
        config = heads.head_config(family, **({} if family == "mtp" else {"taps": (0, 1)}))
        tensors = heads.random_tensors(config)
        member, own = learned.build(config, tensors, target, params, jnp.float32, **options)
        members.append(member)
        weights.append(own)
    return DrafterSet(tuple(members), MENU, toy.tiny_config().hidden_size, ring=RING), tuple(weights)


@pytest.fixture(scope="module")
def engine(drafters):
    drafter, params = drafters
    made = toy.engine(drafter, params, batch=BATCH, table=object())
    return made


def piloted(engine, turns):
    """The engine under a scripted planner, and the planner."""
    planner = Scripted(turns)
    engine.reset()
    engine.pilot = Pilot(planner, engine.drafter, engine.programs, thinking=math.inf)
    return planner


NEVER, ALL = [(PLAIN, None)], [(shape, None) for shape in (LOOKUP, CHAIN, PLAIN, TREE, MODULE)]
# Long enough absences that the ring would run over twice.
RARE = [(CHAIN, None), (MODULE, None), *[(PLAIN, None)] * 37, (TREE, None), *[(LOOKUP, None)] * 3]
BEHIND = [*[(PLAIN, None)] * 8, (CHAIN, LOOKUP, CHAIN), *[(PLAIN, None)] * 7, (MODULE, LOOKUP, MODULE)]


@pytest.mark.parametrize("turns", [NEVER, ALL, RARE], ids=["never", "all", "rare"])
def test_text_is_plain_decodings(engine, turns):
    planner = piloted(engine, turns)
    params = [SamplingParams(max_tokens=n, temperature=t, seed=7) for n, t in ((70, 0), (41, 0.8), (55, 0))]
    results = engine.generate(PROMPTS, params)
    for prompt, p, result in zip(PROMPTS, params, results, strict=True):
        assert result.token_ids == engines.solo(prompt, p).token_ids
    assert sum(r.spec.accepted for r in results) == sum(sum(accepted) for *_, accepted in planner.seen)
    assert sorted(planner.started) == [(0, 0), (0, 0), (1, 0.8)] or len(planner.started) == 3
    if turns is NEVER:
        assert all(drafts == [0] * len(rows) for _, rows, drafts, _ in planner.seen)


@pytest.mark.parametrize("turns", [RARE, BEHIND], ids=["rare", "behind lookups"])
def test_a_drafter_that_sat_out_drafts_as_if_it_never_had(engine, drafters, turns):
    """Each draft of a member is what it drafts from the same tokens as a prompt, whatever happened in between."""
    drafter, weights = drafters
    fresh = {
        kind: toy.engine(member, own)
        for kind, member, own in zip(("ngram", "eagle3", "mtp"), drafter.members, weights, strict=True)
    }
    piloted(engine, turns)
    seen = []
    real = engine.programs.draft_as

    def spy(shape, params, state, waiting):
        tokens, lengths = jax.device_get((state.tokens, state.lengths))
        state, made = real(shape, params, state, waiting)
        proposal = Proposal(np.array(made))
        proposed, _, _ = proposal.nodes(np.array([0]), proposal.live[0])
        seen.append((shape, tokens[0, : lengths[0]].tolist(), proposed[0].tolist()))
        return state, made

    engine.programs.draft_as = spy
    try:
        engine.generate(PROMPTS[1], SamplingParams(max_tokens=95))
    finally:
        engine.programs.draft_as = real
    learned_drafts = [entry for entry in seen if entry[0].kind != "ngram"]
    assert {shape for shape, *_ in learned_drafts} == {s for turn in turns for s in turn if s} - {PLAIN, LOOKUP}
    assert len(learned_drafts) >= 5
    for shape, context, proposed in learned_drafts:
        if len(proposed) < 2:
            continue  # the request ended in that round
        assert proposed[: shape.depth] == _drafted(fresh[shape.kind], shape, context)[: shape.depth]


def _drafted(engine, shape: DraftShape, context: list[int]) -> list[int]:
    """What a drafter by itself proposes behind a context, whose last token it has not verified."""
    state = engine._state
    insertion = engine.intake.insertion(_request(context[:-1]), len(context) + 20, None)
    state = engine.programs.insert(jax.tree.map(jnp.copy, state), 0, insertion)
    emitted = None
    for start, size in engine.programs.chunks(len(context) - 1):
        state, emitted = engine.programs.prefill(engine.params, state, 0, start, size)
    assert int(emitted.tokens[0, 0]) == context[-1]
    draft, _ = DRAFT(engine.drafter, shape, engine.params["drafter"], state.drafter, state.context)
    return draft.tokens[0].tolist()


DRAFT = jax.jit(lambda drafter, shape, *rest: drafter.draft(*rest, shape), static_argnums=(0, 1))


def _request(prompt):
    from specjax.engine.request import Request

    return Request(prompt=prompt, params=SamplingParams(max_tokens=20), index=0)


def test_shadows_tell_what_would_have_been_accepted(engine):
    """A script of shadows sees the acceptance that the same drafts have when they are verified."""
    params = SamplingParams(max_tokens=60)
    planner = piloted(engine, [(PLAIN, LOOKUP)])
    engine.generate(PROMPTS[0], params)
    verified = piloted(engine, [(LOOKUP, None)])
    verified.fit = lambda decision, rows, live, context, nodes: decision._replace(budgets=live + 1)
    engine.generate(PROMPTS[0], params)
    assert {shape for shape, *_ in planner.learned} == {LOOKUP}
    # A round whose drafter had nothing is told of as such, once.
    assert planner.shadows and set(planner.shadows) == {(LOOKUP, 0, 0)} == set(verified.shadows)
    assert all(drafts for _, drafts, _ in planner.learned)
    # Every round was plain; each round's shadow is one start of a draft among those that verification steps over.
    assert len(planner.learned) + len(planner.shadows) >= len(verified.seen) - 3
    total = sum(accepted[0] for *_, accepted in verified.seen)
    assert total > 0
    assert sum(accepted for *_, accepted in planner.learned) >= total
    # What a pass accepts is what the text says, but for the drafts that the end of the request cut short.
    assert 0 <= total - sum(accepted for *_, accepted in verified.learned) <= LOOKUP.depth


def test_every_round_is_learned_once_and_of_its_own_draft(engine):
    """Learning waits until the next pass is dispatched, or until its request is over: no draft is judged by the tokens
    of an earlier round, and the last round is not forgotten.
    """
    params = SamplingParams(max_tokens=60)
    planner = piloted(engine, [(LOOKUP, None)])
    planner.fit = lambda decision, rows, live, context, nodes: decision._replace(budgets=live + 1)
    rounds = 0
    for prompt in PROMPTS[:2]:
        rounds += engine.generate(prompt, params).spec.rounds
        assert len(planner.seen) == rounds
    # Rounds without a draft teach nothing of drafts.
    judged = [(LOOKUP, drafts[0], accepted[0]) for _, _, drafts, accepted in planner.seen if drafts[0]]
    assert any(accepted for *_, accepted in judged) and len(judged) < len(planner.seen)
    assert len(judged) - 2 * LOOKUP.depth <= len(planner.learned) <= len(judged)
    hits, learned = ([one for one in found if one[2]] for found in (judged, planner.learned))
    assert learned == hits[: len(learned)] and len(learned) >= max(len(hits) - 2, 3)  # the end of a request cuts some


class Ticking:
    """A clock that moves when it is told to, and by `step` whenever it is read."""

    def __init__(self, step):
        self.now, self.step = 0.0, step

    def __call__(self):
        self.now += self.step
        return self.now


def test_deciding_takes_its_share_of_the_time_and_no_more(engine):
    """Between two decisions the last one stands, unless it was a trial or the requests are not the same any more."""
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    texts = [engines.solo(prompt, params).token_ids for prompt in PROMPTS[:2]]

    def run(thinking, reason="best"):
        planner = piloted(engine, [(LOOKUP, None)])
        decide = planner.decide
        planner.decide = lambda rows, context: decide(rows, context)._replace(reason=reason)
        engine.pilot = Pilot(planner, engine.drafter, engine.programs, thinking=thinking, clock=Ticking(1.0))
        results = [engine.generate(prompt, params) for prompt in PROMPTS[:2]]
        assert [result.token_ids for result in results] == texts
        return planner.round, len(planner.seen)

    decided, rounds = run(thinking=math.inf)
    assert decided == rounds + 2  # a draft that nobody verifies stands when a request ends
    few, rounds = run(thinking=1 / 40)
    assert rounds / 15 < few < rounds / 2
    assert run(thinking=1e-9)[0] == 2  # a request that comes is thought of
    tried, rounds = run(thinking=1e-9, reason="trial")
    assert tried == rounds + 2


def test_following_drafts_takes_its_share_of_the_time_and_no_more(engine, monkeypatch):
    """The first rounds are all learned from, then some: whichever comes when it is time, right or wrong."""
    monkeypatch.setattr(pilot, "EAGER", 10)
    params = SamplingParams(max_tokens=60, ignore_eos=True)

    def told(thinking):
        planner = piloted(engine, [(LOOKUP, None)])
        engine.pilot = Pilot(planner, engine.drafter, engine.programs, thinking=thinking, clock=Ticking(1.0))
        engine.generate(PROMPTS[0], params)
        return len(planner.learned) + len(planner.shadows), len(planner.seen)

    every, rounds = told(math.inf)
    assert rounds - LOOKUP.depth <= every <= rounds
    some, rounds = told(1 / 30)
    assert 10 <= some < 10 + (rounds - 10) / 2
    assert told(1e-9)[0] <= 10


def test_a_shadow_that_its_scores_recommend_is_verified(engine):
    """The planner makes a shadow the shape; the rounds then commit what it drafted."""
    params = SamplingParams(max_tokens=60)
    planner = piloted(engine, [(PLAIN, LOOKUP)])

    def promote(decision, rows, live, context, nodes):
        return decision._replace(shape=LOOKUP, shadow=None, reason="scores", budgets=live + 1)

    planner.fit = promote
    result = engine.generate(PROMPTS[0], params)
    assert result.token_ids == engines.solo(PROMPTS[0], params).token_ids
    assert sum(accepted[0] for *_, accepted in planner.seen) == result.spec.accepted > 0
    assert planner.learned and set(planner.shadows) == {(LOOKUP, 0, 0)}


def test_rounds_that_are_learned_from_together_teach_what_they_do_one_by_one(engine):
    """While a decision stands, several at a time, each with the drafts and the text of its own."""

    def told(thinking):
        planner = piloted(engine, [(CHAIN, None)])
        engine.pilot.thinking = thinking
        calls, committed, observe = [], [], planner.observe
        planner.observe = lambda *args, **kwargs: calls.append(engine.pilot._rounds) or observe(*args, **kwargs)
        planner.committed = lambda *_: float(committed.append(engine.pilot._rounds) or 0)
        engine.generate(PROMPTS[1], SamplingParams(max_tokens=31))
        engine.pilot._settle()
        assert committed == list(range(1, len(calls) + 1))  # who has missed what is told at once in any case
        return planner.seen, planner.learned, calls

    seen, learned, calls = told(math.inf)
    assert len(set(calls)) >= len(calls) - 1  # one by one, the last one when all is over
    together = told(1e-9)
    assert together[:2] == (seen, learned) and len(learned) > 20
    assert len(set(together[2])) <= math.ceil(len(seen) / pilot.TOGETHER) + 1


@pytest.mark.parametrize("shape", [TREE, CHAIN, MODULE], ids=lambda shape: f"{shape.kind}-{shape.rows}")
def test_a_draft_copies_no_cache(engine, shape):
    """Keys and values are written where they lie: at batch 16 copies took a third of the time of a draft of one."""
    state = dataclasses.replace(engine._state, cache=None, draft=None)
    program = jax.jit(functools.partial(step.redraft_as, engine.programs.stage, shape, 3), donate_argnums=1)
    text = program.lower({"drafter": engine.params["drafter"]}, state).compile().as_text()
    place = [member.kind for member in engine.drafter.members].index(shape.kind)
    pages = state.drafter.members[place].k[0]
    kept = f"f32[{','.join(map(str, pages.shape))}]"
    written = [line for line in text.splitlines() if f"= {kept}" in line]
    assert any("scatter" in line for line in written)
    assert not [line for line in written if " copy(" in line]


def test_the_planner_knows_what_a_draft_takes_in_of_itself(engine):
    """Four rounds of the longest kind, or all that may wait; and each program takes in what it says."""
    engine.reset()
    books, drafters = engine.pilot.planner.books, engine.drafter
    assert (books.ring, books.room) == (RING, drafters.room) == (16, 16)
    assert dataclasses.replace(drafters, ring=64).room == 16 and dataclasses.replace(drafters, ring=9).room == 9
    rooms = {shape.kind: [room for other, room in engine.programs.drafts if other == shape] for shape in MENU}
    assert rooms == {"ngram": [16], "eagle3": [3, 4, 16], "mtp": [3, 4, 16]}


def test_every_pass_leaves_the_lookup_that_a_program_of_its_own_would_make(engine):
    """And it stays while a drafter that is off catches up."""
    piloted(engine, [(LOOKUP, None)])
    programs, checked, caught_up = engine.programs, [], []
    verify, catch_up = programs.verify, programs.catch_up

    def compare(width, params, state, budgets):
        state, emitted = verify(width, params, state, budgets)
        left = jax.tree.map(np.asarray, (state.draft, emitted.lookup))
        state, made = programs.draft_as(LOOKUP, params, state)
        for one, other in zip(jax.tree.leaves(left), jax.tree.leaves((state.draft, made)), strict=True):
            np.testing.assert_array_equal(one, other)
        checked.append(np.asarray(emitted.lookup)[:, 0])
        return state, emitted

    def kept(kind, params, state):
        after = catch_up(kind, params, state)
        caught_up.append(after.draft is state.draft)
        return after

    programs.verify, programs.catch_up = compare, kept
    try:
        engine.generate(PROMPTS, SamplingParams(max_tokens=70))
    finally:
        programs.verify, programs.catch_up = verify, catch_up
    live = np.array(checked)
    assert (live > 1).any() and (live == 0).any()  # there are drafts, and rows in which nothing decodes
    assert len(caught_up) > 1 and all(caught_up)


@pytest.mark.parametrize("beside", [None, CHAIN], ids=["waits", "right behind"])
def test_a_dear_draft_is_made_where_the_cheap_one_that_was_made_first_has_nothing(engine, beside):
    """Or is made behind it in any case, and only verified then: that saves the wait. The text stays what it is."""
    params = SamplingParams(max_tokens=60)
    planner = piloted(engine, [(PLAIN, LOOKUP)])
    looks = Decision(CHAIN, 1, np.ones(1, int), 1.0, 1.0, 1.0, "best", shadow=LOOKUP, ride=True, beside=beside)
    planner.decide = lambda rows, context: looks

    def fit(decision, rows, live, context, nodes):
        budgets = live + 1
        if decision.shadow is None:
            return decision._replace(budgets=budgets)
        told = {"shape": LOOKUP, "reason": "scores"} if live.any() else {"shape": CHAIN, "beside": None}
        return decision._replace(**told, shadow=None, ride=False, budgets=budgets)

    planner.fit, drafted, real = fit, [], engine.programs.draft_as

    def spy(shape, params, state, waiting):
        drafted.append(shape)
        return real(shape, params, state, waiting)

    engine.programs.draft_as = spy
    try:
        result = engine.generate(PROMPTS[0], params)
    finally:
        engine.programs.draft_as = real
    assert result.token_ids == engines.solo(PROMPTS[0], params).token_ids
    # What is verified is what the look found, not the draft behind it, which the state holds: the text has all of it.
    copied = [(drafts[0], accepted[0]) for shape, _, drafts, accepted in planner.seen if shape == LOOKUP]
    judged = [(drafts, accepted) for shape, drafts, accepted in planner.learned if shape == LOOKUP]
    assert copied[: len(judged) - 1] == judged[:-1] and sum(accepted for _, accepted in copied) > 0
    shapes = [shape for shape, *_ in planner.seen]
    assert set(shapes) == {LOOKUP, CHAIN}
    # The first look by itself, those behind by the passes; and one dear draft for each round of its own, or for every
    # look (the last one is for nobody).
    dear = shapes.count(CHAIN) if beside is None else len(shapes) + 1
    assert drafted.count(LOOKUP) == 1 and drafted.count(CHAIN) == dear
    assert all(drafts[0] for _, _, drafts, _ in planner.seen[:-2])  # the end leaves no room for some
    assert {shape for shape, *_ in planner.learned} == {LOOKUP, CHAIN}
    assert planner.shadows.count((LOOKUP, 0, 0)) == shapes.count(CHAIN)


@pytest.mark.parametrize("beside", [None, CHAIN], ids=["waits", "right behind"])
def test_requests_of_a_batch_end_while_lookups_are_made_first(engine, beside):
    """The real planner fits drafts for requests of which some have ended since it decided."""
    drafter, counts = engine.drafter, sorted({width.count for width in engine.programs.widths})
    run = config.make({"target": "toy", "drafter": {"kind": "auto"}, "dtype": "float32"})
    table = find_table(run, toy.tiny_config(), "float32", drafter, lambda line: None)
    planner = Planner(table, drafter.menu, counts, BATCH, scored=True)
    decide, looked = planner.decide, []

    def hopeful(rows, context):
        decision = decide(rows, context)
        chain = {"shape": CHAIN, "seconds": decision.seconds, "tokens": 2.9 * len(rows)}
        return decision._replace(shadow=LOOKUP, ride=True, reason="best", beside=beside, going=None, **chain)

    planner.decide = hopeful
    real = engine.programs.draft_as
    engine.reset()
    engine.pilot = Pilot(planner, drafter, engine.programs, thinking=1e-9)
    engine.programs.draft_as = lambda shape, *rest: looked.append(shape) or real(shape, *rest)
    prompts = [*PROMPTS, *PROMPTS]
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (30, 7, 12, 5, 21, 9)]
    try:
        results = engine.generate(prompts, params)
    finally:
        engine.programs.draft_as = real
    for prompt, own, result in zip(prompts, params, results, strict=True):
        assert result.token_ids == engines.solo(prompt, own).token_ids
    assert {LOOKUP, CHAIN} <= set(looked)
    report = engine.pilot.report()
    assert report["reasons"]["best"] > 0 and sum(report["reasons"].values()) == report["rounds"]
    assert all(spent > 0 for spent in report["host_s"].values())


def test_refusals(drafters):
    drafter, params = drafters
    with pytest.raises(ValueError, match="needs a latency table"):
        toy.engine(drafter, params)
    with pytest.raises(ValueError, match="device_rounds must be 1"):
        toy.engine(drafter, params, table=object(), device_rounds=2)
    with pytest.raises(ValueError, match="of different kinds, got ngram, ngram"):
        DrafterSet((NGram(), NGram()), (LOOKUP,), 8)
    with pytest.raises(ValueError, match="no drafter of the set makes .*eagle3"):
        DrafterSet((NGram(),), (CHAIN,), 8)
    with pytest.raises(ValueError, match="as deep as the ring of 4"):
        DrafterSet((NGram(),), (LOOKUP,), 8, ring=4)
