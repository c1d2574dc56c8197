"""UBTree and DDTree: the trees against plain Python on tiny sizes, the selector against numpy, and an engine."""

import functools
import heapq
import itertools

import jax
import numpy as np
import pytest
from support import blocks, laws, toy

from specjax.drafters import supertree

TAPS = 2 * blocks.WIDTH
LENGTHS, ANCHORS = (9, 4), (5, 17)


def algorithm_1(candidates, scores, width, budget, bonus=0.0):
    """UBTree's tree of one request, by its definition: `{prefix of tokens: score}`.

    A prefix ranks no better than its own prefixes; of equals the shorter one wins.
    """
    level, supertree = {(): 0.0}, {}
    rank = {(): np.inf}
    for d, tokens in enumerate(candidates):
        extensions = {}
        for prefix, score in level.items():
            a = list(candidates[d - 1]).index(prefix[-1]) if d else 0
            row = scores[d][a if len(scores[d]) > 1 else 0]
            for token, value in zip(tokens, row, strict=True):
                extensions[(*prefix, int(token))] = score + value + bonus
        best = sorted(extensions, key=lambda prefix: -extensions[prefix])[:width]
        level = {prefix: extensions[prefix] for prefix in best if extensions[prefix] > -np.inf}
        for prefix, score in level.items():
            rank[prefix] = min(score, rank[prefix[:-1]])
            supertree[prefix] = score
    kept = sorted(supertree, key=lambda prefix: (-rank[prefix], len(prefix)))[:budget]
    return {prefix: supertree[prefix] for prefix in kept}


def prefixes(draft, row=0):
    """The live nodes of a draft as prefixes, in their order; parents must come first."""
    tokens, parents = np.asarray(draft.tokens)[row], np.asarray(draft.parents)[row]
    found = [()]
    for node in range(1, int(draft.lengths[row])):
        assert 0 <= parents[node] < node
        found.append((*found[parents[node]], int(tokens[node])))
        assert int(draft.depths[row, node]) == len(found[-1])  # positions follow depth, not order
    return found[1:]


def random_problem(seed, depth, count, rows, batch=1):
    rng = np.random.default_rng(seed)
    candidates = np.stack([[rng.permutation(50)[:count] for _ in range(depth)] for _ in range(batch)])
    scores = blocks.log_softmax(2 * rng.standard_normal((batch, depth, rows, count))).astype(np.float32)
    return candidates, scores


def grown(candidates, scores, **options):
    grow = jax.jit(functools.partial(supertree.grow, **options))
    return grow(np.zeros(len(candidates), np.int32), candidates.astype(np.int32), scores)


@pytest.mark.parametrize(
    ("depth", "count", "width", "budget"),
    [(1, 3, 2, 2), (3, 4, 3, 6), (4, 3, 5, 10), (5, 6, 4, 20), (2, 2, 6, 9), (4, 5, 2, 7)],
)
@pytest.mark.parametrize("bonus", [0.0, 0.8])
def test_algorithm_1(depth, count, width, budget, bonus):
    """Same nodes, best first, in every request of a batch; a depth bonus included."""
    candidates, scores = random_problem(depth * 10 + width, depth, count, count, batch=4)
    draft = grown(candidates, scores, width=width, budget=budget, bonus=bonus)
    assert draft.tokens.shape == (4, 1 + budget)
    for row in range(4):
        want = algorithm_1(candidates[row], scores[row], width, budget, bonus)
        got = prefixes(draft, row)
        assert set(got) == set(want) and len(got) == len(set(got))
        assert all(prefix[:-1] in {(), *want} for prefix in got)
        if not bonus:
            assert got == list(want)


def test_the_best_of_all_extensions():
    """The beam ranks all extensions together: where one parent is far ahead, it gets every place."""
    candidates = np.array([[[1, 2], [3, 4]]])
    scores = np.log(np.array([[[[0.9, 0.1], [0.9, 0.1]], [[0.5, 0.5], [0.99, 0.01]]]], np.float32))
    draft = grown(candidates, scores, width=2, budget=4)
    assert set(prefixes(draft)) == {(1,), (2,), (1, 3), (1, 4)}


def test_on_paper():
    """Three depths, two candidates, width 2, budget 4, in percent.

    Depth 1: a 60, b 40. Depth 2: a -> c 10, d 90; b -> c 80, d 20. So ad 54, bc 32; (bd 8, ac 6) fall off.
    Depth 3: after c -> e 70, f 30; after d -> e 50, f 50. So ade 27, adf 27 (bce 22.4 falls off).
    Best four of {a 60, b 40, ad 54, bc 32, ade 27, adf 27}: a, ad, b, bc.
    """
    a, b, c, d, e, f = range(10, 16)
    candidates = np.array([[[a, b], [c, d], [e, f]]])
    percent = [[[60, 40], [60, 40]], [[10, 90], [80, 20]], [[70, 30], [50, 50]]]
    scores = np.log(np.array([percent], np.float32) / 100)
    draft = grown(candidates, scores, width=2, budget=4)
    np.testing.assert_array_equal(draft.tokens, [[0, a, d, b, c]])
    np.testing.assert_array_equal(draft.parents, [[-1, 0, 1, 0, 3]])
    np.testing.assert_array_equal(draft.lengths, [5])
    assert set(prefixes(grown(candidates, scores, width=2, budget=6))) == {
        (a,),
        (b,),
        (a, d),
        (b, c),
        (a, d, e),
        (a, d, f),
    }


def test_a_node_is_its_prefix():
    """The same tokens at every depth and under every parent are different nodes."""
    candidates = np.array([[[7, 8]] * 3])
    scores = np.log(np.full((1, 3, 1, 2), 0.5, np.float32))
    draft = grown(candidates, scores, width=8, budget=14)
    assert set(prefixes(draft)) == {p for n in (1, 2, 3) for p in itertools.product((7, 8), repeat=n)}


def test_ties_keep_ancestors():
    """A path of certainties: all its nodes tie, and the ones nearest to the root are kept."""
    candidates = np.tile(np.arange(6)[:, None] * 10 + np.array([1, 2]), (1, 1, 1))
    scores = np.where(np.arange(2) == 0, 0.0, -np.inf).astype(np.float32)
    scores = np.broadcast_to(scores, (1, 6, 1, 2))
    draft = grown(candidates, scores, width=3, budget=4)
    assert prefixes(draft) == [(1,), (1, 11), (1, 11, 21), (1, 11, 21, 31)]


def test_ruled_out_candidates():
    """-inf leaves no node; what is left over is padding."""
    candidates, scores = random_problem(5, 3, 3, 3)
    scores[:, :, :, 1] = -np.inf
    draft = grown(candidates, scores, width=4, budget=20)
    got = prefixes(draft)
    assert set(got) == set(algorithm_1(candidates[0], scores[0], 4, 20)) and 3 < len(got) < 20
    assert not any(prefix[d] == candidates[0, d, 1] for prefix in got for d in range(len(prefix)))
    assert not np.asarray(draft.tokens)[0, 1 + len(got) :].any()


def heap(candidates, scores, budget):
    """DDTree by its heap: pop the best prefix of ranks, push its first child and its next sibling."""
    order = np.argsort(-scores, axis=1, kind="stable")
    ranked = np.take_along_axis(scores, order, axis=1).astype(np.float64)
    queue, found = [(-ranked[0, 0], (0,))], []
    while queue and len(found) < budget:
        cost, ranks = heapq.heappop(queue)
        found.append(tuple(int(candidates[d, order[d, r]]) for d, r in enumerate(ranks)))
        d = len(ranks) - 1
        if d + 1 < len(scores):
            heapq.heappush(queue, (cost - ranked[d + 1, 0], (*ranks, 0)))
        if ranks[-1] + 1 < scores.shape[1]:
            sibling = cost + ranked[d, ranks[-1]] - ranked[d, ranks[-1] + 1]
            heapq.heappush(queue, (sibling, (*ranks[:-1], ranks[-1] + 1)))
    return found


@pytest.mark.parametrize(("depth", "count", "budget"), [(1, 4, 3), (4, 8, 8), (6, 12, 12), (3, 4, 30), (7, 31, 31)])
def test_best_first(depth, count, budget):
    candidates, scores = random_problem(depth, depth, count, 1, batch=3)
    best_first = jax.jit(functools.partial(supertree.best_first, budget=budget))
    draft = best_first(np.zeros(3, np.int32), candidates.astype(np.int32), scores[:, :, 0])
    for row in range(3):
        assert prefixes(draft, row) == heap(candidates[row], scores[row, :, 0], budget)


# ---------------------------------------------------------------- the drafter


def taps():
    rng = np.random.default_rng(7)
    return [rng.standard_normal((length - 1, TAPS)).astype(np.float32) for length in LENGTHS]


def drafted(config, eos=(), **options):
    """The draft, and in numpy the unary logits and hidden rows of each request."""
    tensors = blocks.random_tensors(config)
    tensors = {name: x * (5 if "selector" in name and "log_" not in name else 1) for name, x in tensors.items()}
    drafter, params = blocks.build(config, tensors, **options)
    rows = [[3] * (length - 1) + [anchor] for length, anchor in zip(LENGTHS, ANCHORS, strict=True)]
    context = blocks.context(rows, LENGTHS, eos=eos, features=blocks.ragged(taps()))
    draft = blocks.first_draft(drafter, params, context)
    embedding, head, depth = toy.tiny()[1]["embedding"], toy.tiny()[1]["head"]["weight"], drafter.depth
    rows = depth if config.shifted else depth + 1
    hidden = [
        blocks.hidden(config, tensors, embedding, t, a, rows)[-depth:] for t, a in zip(taps(), ANCHORS, strict=True)
    ]
    return draft, np.stack(hidden), blocks.logits(config, head, np.stack(hidden)), tensors, embedding


def selector_scores(config, tensors, embedding, hidden, unary, anchor, count):
    """Candidates of each depth, best first, and their log-probabilities after each candidate of the depth before."""
    w = {name.removeprefix("bigram_selector."): np.asarray(x, np.float64) for name, x in tensors.items()}

    def code(side, token):
        row = np.asarray(embedding, np.float64)[token]
        return w[f"{side}.fc2.weight"] @ blocks.silu(w[f"{side}.fc1.weight"] @ row)

    candidates, scores, before = [], [], [anchor] * count
    for d in range(len(hidden)):
        ids = np.argsort(-unary[d], kind="stable")[:count]
        wanted = w["hidden_projection.weight"] @ hidden[d]
        pairs = np.array([[(wanted * code("phi", a)) @ code("psi", b) for b in ids] for a in before])
        alpha, scale = np.exp(w["log_alpha"][d]), np.exp(w["log_lambda"][d])
        candidates.append(ids)
        scores.append(blocks.log_softmax(alpha * unary[d, ids] + scale * pairs))
        before = ids
    return np.array(candidates), np.array(scores)


@pytest.mark.parametrize(
    "options", [{}, {"tree_width": 3, "top_k": 4, "tree_budget": 9}, {"num_speculative_tokens": 2, "tree_budget": 8}]
)
def test_tree_of_the_selector(options):
    config = blocks.head_config("ubtree", tree_budget=20)
    draft, hidden, unary, tensors, embedding = drafted(config, **options)
    budget = options.get("tree_budget", 20)
    for row, anchor in enumerate(ANCHORS):
        count, width = options.get("top_k", config.selector_top_k), options.get("tree_width", config.tree_width)
        candidates, scores = selector_scores(config, tensors, embedding, hidden[row], unary[row], anchor, count)
        assert prefixes(draft, row) == list(algorithm_1(candidates, scores, width, budget))


def test_the_selector_matters():
    """Codes of zero leave the calibrated unaries: a different tree."""
    config = blocks.head_config("ubtree")
    draft, hidden, unary, tensors, embedding = drafted(config)
    blank = tensors | {name: 0 * x for name, x in tensors.items() if "hidden_projection" in name}
    without = algorithm_1(*selector_scores(config, blank, embedding, hidden[0], unary[0], ANCHORS[0], 7), 6, 16)
    assert set(prefixes(draft)) != set(without)


def test_end_tokens_are_no_nodes():
    """The target emits an end token by itself, so no row is spent on one or on what would follow it."""
    config = blocks.head_config("ubtree")
    draft, *_ = drafted(config)
    end = prefixes(draft)[0][0]
    cut, *_ = drafted(config, eos=(end,))
    assert any(end in prefix for prefix in prefixes(draft))
    assert not any(end in prefix for row in range(2) for prefix in prefixes(cut, row))
    others = {prefix for prefix in prefixes(draft) if end not in prefix}
    assert others <= set(prefixes(cut)) and int(cut.lengths[0]) == int(draft.lengths[0])


@pytest.mark.parametrize("family", ["dflash", "dflash2", "dspark", "ubtree"])
def test_ddtree_on_every_backbone(family):
    """Markov heads and selectors have no say: positions are scored apart from each other."""
    config = blocks.head_config(family)
    draft, _, unary, _, _ = drafted(config, tree="ddtree", tree_budget=12)
    for row in range(2):
        scores = blocks.log_softmax(unary[row])
        candidates = np.broadcast_to(np.arange(blocks.VOCAB), scores.shape)
        assert prefixes(draft, row) == heap(candidates, scores, 12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tree": "none"}, "ubtree, ddtree"),
        ({"sampled": True}, "deterministic"),
        ({"top_k": 65}, "1..64"),
        ({"tree_width": 0}, "tree_width"),
        ({"tree": "ddtree", "top_k": 4}, "belong to tree 'ubtree'"),
        ({"tree_budget": 3}, "path of 4"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(ValueError, match=message):
        blocks.build(blocks.head_config("ubtree"), **options)


def test_default_rows():
    """32 verify rows, or fewer where the drafter's file asks for fewer."""
    assert blocks.build(blocks.head_config("ubtree", tree_budget=64))[0].shape.rows == 32
    assert blocks.build(blocks.head_config("ubtree", tree_budget=16))[0].shape.rows == 17


# ---------------------------------------------------------------- in an engine


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("ubtree", {"tree_budget": 7, "tree_width": 3}),
        pytest.param("dflash", {"tree": "ddtree", "tree_budget": 7}, marks=pytest.mark.slow),
    ],
)
def test_in_an_engine(family, options):
    laws.check_greedy(*laws.small(family, options=options))
