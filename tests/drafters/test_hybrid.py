"""Grafting a copied branch onto a model's draft: against plain Python, and in an engine."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import blocks, engines, heads, laws, toy, trees
from support.scripted import ScriptedTree

from specjax.draft import chain, tree
from specjax.drafters import hybrid as hybrids
from specjax.drafters import learned
from specjax.drafters.draft_model import DraftModel
from specjax.drafters.drafter_set import menu_of
from specjax.drafters.hybrid import Hybrid, graft
from specjax.drafters.ngram import NGram
from specjax.drafters.suffix import Suffix
from specjax.sampling import SamplingParams


def prefixes(draft, row=0):
    """The live nodes of a draft as prefixes, in their order; parents must come first and depths fit."""
    tokens, parents = np.asarray(draft.tokens)[row], np.asarray(draft.parents)[row]
    assert parents[0] == -1
    found = [()]
    for node in range(1, int(draft.lengths[row])):
        assert 0 <= parents[node] < node
        found.append((*found[parents[node]], int(tokens[node])))
        assert int(draft.depths[row, node]) == len(found[-1])
    return found[1:]


def merged(branch, nodes, rows):
    """The branch first, then the other nodes in their order, as many as fit; a prefix stands once."""
    both = [tuple(branch[: i + 1]) for i in range(len(branch))]
    both += [prefix for prefix in nodes if prefix not in both]
    return both[: rows - 1]


def random_tree(rng, rows):
    """Parents and tokens of a random tree in which siblings differ; few tokens, so that branches often overlap."""
    parents, tokens = trees.random_parents(rng, rows), [9]
    for node in range(1, rows):
        taken = {tokens[other] for other in range(1, node) if parents[other] == parents[node]}
        free = [token for token in range(rows) if token not in taken]
        tokens.append(int(free[rng.integers(min(2, len(free)))]))
    return parents, tokens


@pytest.mark.parametrize("rows", [8, 14, 30])
def test_graft(rows):
    """Union by prefix, in a batch of random trees and branches of every live length; cut at the row budget."""
    rng, batch, count, depth = np.random.default_rng(rows), 64, 12, 6
    parents, tokens = (
        np.array(x, np.int32) for x in zip(*(random_tree(rng, count) for _ in range(batch)), strict=True)
    )
    lengths = rng.integers(1, count + 1, batch).astype(np.int32)
    branch = rng.integers(0, 2, (batch, depth + 1)).astype(np.int32)
    live = rng.integers(1, depth + 2, batch).astype(np.int32)
    for row in range(0, batch, 2):  # half of the branches follow a path of the tree for a while
        path, node = [], int(rng.integers(count))
        while node > 0:
            path.insert(0, tokens[row, node])
            node = parents[row, node]
        branch[row, 1 : 1 + len(path)] = path[:depth]
    branch[:, 0] = tokens[:, 0]
    onto = tree(jnp.asarray(tokens), jnp.asarray(parents), jnp.asarray(lengths))
    got = jax.jit(graft, static_argnums=2)(chain(jnp.asarray(branch), jnp.asarray(live)), onto, rows)
    shared = 0
    for row in range(batch):
        nodes = prefixes(onto, row)
        want = merged(list(branch[row, 1 : live[row]]), nodes, rows)
        assert prefixes(got, row) == want
        shared += len(nodes) + live[row] - 1 > len(want)
        assert not np.asarray(got.tokens)[row, 1 + len(want) :].any()
    assert shared > batch // 4


def test_no_branch_leaves_the_model_draft():
    parents = jnp.array([[-1, 0, 0, 1]])
    onto = tree(jnp.array([[5, 1, 2, 3]]), parents, jnp.array([4]))
    got = graft(chain(jnp.array([[5, 7, 7]]), jnp.array([1])), onto, 4)
    np.testing.assert_array_equal(got.tokens, onto.tokens)
    np.testing.assert_array_equal(got.parents, parents)


def test_a_node_keeps_the_score_of_where_it_comes_from():
    """A node that both have is the branch's."""
    onto = tree(
        jnp.array([[5, 7, 2, 3]]), jnp.array([[-1, 0, 0, 1]]), jnp.array([4]), scores=jnp.array([[0, -0.5, -1, -2.0]])
    )
    branch = chain(jnp.array([[5, 7, 8]]), jnp.array([3]), scores=jnp.array([[0, -0.1, -0.2]]))
    got = graft(branch, onto, 6)
    assert prefixes(got) == [(7,), (7, 8), (2,), (7, 3)]
    np.testing.assert_allclose(np.asarray(got.scores)[0, :5], [0, -0.1, -0.2, -1, -2], rtol=1e-6)


def test_rows():
    """A model tree keeps its rows; a chain and a branch both fit; `rows` overrides."""
    lookup = NGram(num_speculative_tokens=6)
    chained, _ = blocks.build(blocks.head_config())
    treed, _ = blocks.build(blocks.head_config(), tree="ddtree")
    shape = Hybrid(model=chained, lookup=lookup).shape
    assert (shape.depth, shape.rows, shape.is_chain) == (6, 5 + 6, False)
    assert Hybrid(model=treed, lookup=lookup).shape.rows == 32
    assert Hybrid(model=treed, lookup=lookup, rows=20).shape.rows == 20
    assert Hybrid(model=treed, lookup=lookup).taps == (0, 1)
    model = Hybrid(model=DraftModel(model=toy.tiny()[0], num_speculative_tokens=2), lookup=lookup).model
    assert model.newest == 7  # a round commits six copied drafts and a token of the target's


def test_a_sets_menu_holds_shorter_chains_with_the_whole_branch(monkeypatch):
    """The head is then run fewer times, and the copied branch is not cut."""
    target, params = toy.tiny()
    config = heads.head_config("eagle3", taps=(0, 1))
    options = {"depth": 4, "branching": 1}
    model, _ = learned.build(config, heads.random_tensors(config), target, params, jnp.float32, **options)
    lookup = NGram(num_speculative_tokens=3)
    menu = menu_of([Hybrid(model=model, lookup=lookup)])
    assert [shape.rows for shape in menu] == [8, 5, 6, 7]

    class Recorder:
        taps, wants_hidden = (), False

        def __init__(self, shape):
            self.shape, self.asked = shape, []

        def draft(self, params, state, context, shape):
            self.asked.append(shape.depth)
            return None, state

    monkeypatch.setattr(hybrids, "graft", lambda *args: None)
    parts = Recorder(model.shape), Recorder(lookup.shape)
    recorded = Hybrid(model=parts[0], lookup=parts[1])
    nothing = {"model": (), "lookup": ()}
    for shape in menu:
        recorded.draft(nothing, nothing, None, shape)
    assert [part.asked for part in parts] == [[4, 1, 2, 3], [3, 3, 3, 3]]


def test_refusals():
    lookup = NGram(num_speculative_tokens=6)
    chained, _ = blocks.build(blocks.head_config())
    drawn, _ = blocks.build(blocks.head_config(), sampled=True)
    for parts, message in (
        ({"model": drawn, "lookup": lookup}, "dflash draws its drafts"),
        ({"model": DraftModel(model=toy.tiny()[0], sampled=True), "lookup": lookup}, "draft_model draws"),
        ({"model": chained, "lookup": ScriptedTree()}, "must draft chains"),
        ({"model": lookup, "lookup": chained}, "must not read"),
        ({"model": chained, "lookup": lookup, "rows": 6}, "at least 7"),
    ):
        with pytest.raises(ValueError, match=message):
            Hybrid(**parts)


def draft_model():
    """Another model of the small target's vocabulary."""
    model, weights = toy.tiny(vocab_size=laws.SMALL_VOCAB, seed=1)
    return DraftModel(model=model, num_speculative_tokens=3), weights, laws.small_target()


NGRAM = NGram(num_speculative_tokens=4, prompt_lookup_min=1)
SUFFIX = Suffix(num_speculative_tokens=4, ring=0)
PARTS = {
    "n-gram on a tree": (NGRAM, lambda: laws.small("ubtree", options={"tree_budget": 7, "tree_width": 3})),
    "suffix on a chain": (SUFFIX, lambda: laws.small("dflash")),
    "n-gram on a draft model": (NGRAM, draft_model),
}


@pytest.mark.parametrize("name", PARTS)
def test_in_an_engine(name):
    """Drafts are those of a fresh start: what the branch got accepted is taken in like anything else."""
    lookup, parts = PARTS[name]
    model, params, target = parts()
    laws.check_greedy(Hybrid(model=model, lookup=lookup), {"model": params, "lookup": ()}, target)


def test_accepts_what_either_part_would():
    """In a text that repeats itself the branch goes on where the model's drafts end; the first round shows both."""
    model, params, target = laws.small("dflash")
    after = np.roll(np.arange(laws.SMALL_VOCAB), -1)
    target = blocks.feature_target(laws.SMALL_VOCAB)
    target = target[0], target[1] | {"by_token": jnp.asarray(9.0 * np.eye(laws.SMALL_VOCAB)[after], jnp.float32)}
    drafter = Hybrid(model=model, lookup=NGram(num_speculative_tokens=6))
    engine = engines.narrow(toy.engine(drafter, {"model": params, "lookup": ()}, target))
    prompt = [0, 1, 2, 3, 4, 5, 6] * 2
    result = engine.generate(prompt, SamplingParams(max_tokens=1 + 7 * 3))
    assert result.token_ids == [i % 7 for i in range(22)]
    assert result.spec.rounds == 3  # six copied drafts and one token of the target's own a round
    assert result.spec.drafted > 3 * 6  # the model's drafts stood beside them
