"""EAGLE-3: its arithmetic against numpy, what it is fed, its trees, and its place in the engine."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import blocks, engines, heads, laws, toy
from support.heads import (
    VOCAB,
    WIDTH,
    Reference,
    committed_rows,
    context,
    head_config,
    prefilled,
    random_tensors,
)

from specjax.draft import DraftShape
from specjax.drafters import learned
from specjax.drafters.eagle3 import Eagle3
from specjax.drafters.recurrent import draw
from specjax.sampling import SamplingParams

LAYERS = 4


def target(**changes):
    """A tiny target with enough layers to tap."""
    return toy.tiny(num_layers=LAYERS, windows=(None,) * LAYERS, **changes)


def eagle(config, seed=0, dtype=jnp.float32, **options):
    """A drafter with random weights: `(drafter, params, reference)`."""
    tensors = random_tensors(config, seed)
    model, weights = target()
    drafter, params = learned.build(config, tensors, model, weights, dtype, **options)
    output = np.asarray(weights["head"]["weight"])
    if not config.own_head and "d2t" in tensors:
        output = output[np.arange(config.draft_vocab_size) + tensors["d2t"]]
    return drafter, params, Reference(config, tensors, weights["embedding"], output)


def some_text(batch: int, length: int, width: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Random tokens and features of every position."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, VOCAB, (batch, length)), rng.standard_normal((batch, length, width)).astype(np.float32)


def softmax(logits: np.ndarray) -> np.ndarray:
    mass = np.exp(logits - logits.max())
    return mass / mass.sum()


def q_of_path(reference: Reference, root: int, newest: np.ndarray, drafts) -> list[np.ndarray]:
    """The q at the root and at each of `drafts`, given those; `newest` is the last committed row's output."""
    out, found = newest, [softmax(reference.logits(newest))]
    seen = list(range(len(reference.positions)))
    for step, token in enumerate(drafts):
        own = len(reference.positions)
        out = reference.add(int(token), reference.feedback(out), root + step, seen)
        seen.append(own)
        found.append(softmax(reference.logits(out)))
    return found


# Switches in groups that can stand together, and for each switch what its absence would be: every one must matter.
VARIANTS = {
    "plain": ({}, {}),
    "3.1": (
        {"fc_norm": True, "norm_output": True, "qk_norm": True},
        {"fc_norm": False, "norm_output": False, "qk_norm": False},
    ),
    "normed residual": (
        {"norm_before_fc": True, "norm_before_residual": True, "attention_bias": True},
        {"norm_before_fc": False, "norm_before_residual": False, "attention_bias": False},
    ),
    "own vocabulary": (
        {
            "draft_vocab_size": 40,
            "own_head": True,
            "own_embedding": True,
            "embedding_scale": 0.01,  # small enough for the epsilon of the norm that follows
            "output_multiplier": 0.5,
            "logit_softcap": 2.0,
            "windows": (4,),
        },
        {"embedding_scale": 1.0, "output_multiplier": 1.0, "logit_softcap": None, "windows": (None,)},
    ),
    "rotation": (
        {"rope_interleaved": True, "rotary_dims": 4, "norm_offset": True, "qk_norm": True},
        {"rope_interleaved": False, "rotary_dims": None, "norm_offset": False},
    ),
    "narrow": ({"hidden_size": 16, "own_head": True, "own_embedding": True}, {}),
    "deep": (
        {"num_layers": 2, "windows": (3, None), "taps": (0, 1, 2, 3), "attention_gate": True, "rope_interleaved": True},
        {"num_layers": 1, "windows": (None, None), "rope_interleaved": False, "attention_gate": False},
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_forward_equals_numpy(name):
    """The q of every node of sampled chains: after a prefill in chunks, and after a round that was accepted in part.

    Each switch set the other way gives another q: `1 + w` norms, the pairs that rotate and how many, d2t, what is fed
    back, scales and caps. So do stale rows, and positions by row instead of by depth.
    """
    changes, others = VARIANTS[name]
    config = head_config("eagle3", **changes)
    drafter, params, reference = eagle(config, depth=3, branching=1, sampled=True)
    tokens, features = some_text(2, 24, len(config.taps) * WIDTH)
    prompts, accepted = [9, 6], [3, 1]

    def both_rounds(params):
        state = prefilled(drafter, params, tokens, prompts, features, chunk=4)
        first, state = drafter.draft(params, state, context(tokens, [10, 7], features, [1, 1]), drafter.shape)
        after = context(tokens, [10 + accepted[0], 7 + accepted[1]], features, accepted)
        second, _ = drafter.draft(params, state, after, drafter.shape)
        return first, second

    for draft, lengths in zip(jax.jit(both_rounds)(params), ([10, 7], [13, 8]), strict=True):
        assert np.asarray(draft.lengths).tolist() == [4, 4]
        for b, length in enumerate(lengths):
            fresh = reference.copy()
            newest = committed_rows(fresh, tokens[b, :length], features[b])
            drafted = np.asarray(draft.tokens)[b, 1:]
            want = np.stack(q_of_path(fresh, length - 1, newest, drafted[:2]))
            got = np.asarray(draft.q)[b]
            np.testing.assert_allclose(got[:3], want, atol=2e-5)
            assert not got[3].any()
            assert (got[np.arange(3), drafted] > 0).all()
            for field, value in others.items():
                wrong = reference.copy()
                wrong.c = dataclasses.replace(config, **{field: value})
                newest = committed_rows(wrong, tokens[b, :length], features[b])
                there = np.stack(q_of_path(wrong, length - 1, newest, drafted[:2]))
                assert np.abs(there - want).max() > 1e-3, field


def test_taps_order_and_tap_values_matter():
    """Its taps are raw residual streams: what comes after the last layer is normed, and is none."""
    drafter, _, _ = eagle(head_config("eagle3", taps=(0, 2, 3)))
    assert drafter.taps == (0, 2, 3) and not drafter.wants_hidden
    with pytest.raises(ValueError, match=r"taps must be ascending, distinct and in 0..3; got \(1, 2, 4\)"):
        eagle(head_config("eagle3", taps=(1, 2, 4)))


class Recording(Eagle3):
    """An EAGLE-3 drafter that writes down which rows its layers were given."""

    def rows(self, params, cache, tokens, condition, positions, tile, at, seen, *, committed):
        jax.debug.callback(LOG.append, (tokens, positions, condition[..., 0]), ordered=True)
        return super().rows(params, cache, tokens, condition, positions, tile, at, seen, committed=committed)


LOG: list = []


def recorded(chunk: int):
    """Rows of a prompt of 7, of the draft behind it, and of the extend after 2 of 3 drafts were accepted."""
    config = head_config("eagle3")
    drafter, params, reference = eagle(config, depth=3, branching=1)
    drafter = Recording(**{f.name: getattr(drafter, f.name) for f in dataclasses.fields(drafter)})
    tokens, features = some_text(1, 16, 3 * WIDTH)
    LOG.clear()
    state = prefilled(drafter, params, tokens, [7], features, chunk=chunk)
    jax.effects_barrier()
    prompt = list(LOG)
    LOG.clear()
    draft, state = drafter.draft(params, state, context(tokens, [8], features, [1]), drafter.shape)
    jax.effects_barrier()
    round_one = list(LOG)
    LOG.clear()
    drafter.draft(params, state, context(tokens, [11], features, [3]), drafter.shape)
    jax.effects_barrier()
    return tokens[0], features[0], reference, draft, prompt, round_one, list(LOG)


@pytest.mark.parametrize("chunk", [7, 4])
def test_what_the_layers_are_fed(chunk):
    """Feature i stands with token i + 1, at position i; drafts go on from there with the head's own output."""
    tokens, features, reference, draft, prompt, round_one, extend = recorded(chunk)

    def pairs(entry, count):
        token, position, condition = (np.asarray(x)[0, :count] for x in entry)
        return position.tolist(), token.tolist(), condition

    met = [pairs(entry, min(chunk, 7 - i * chunk)) for i, entry in enumerate(prompt)]
    positions = [p for entry in met for p in entry[0]]
    assert positions == list(range(7))
    assert [t for entry in met for t in entry[1]] == tokens[1:8].tolist()  # the last one was just sampled
    want = [reference.condition(features[i])[0] for i in range(7)]
    np.testing.assert_allclose(np.concatenate([entry[2] for entry in met]), want, atol=1e-5)

    # The newest prompt row is taken in again (it predicts draft 1); drafts 2 and 3 come from positions 7 and 8.
    first, second, third = round_one
    assert pairs(first, 1)[:2] == ([6], [tokens[7]])
    drafted = np.asarray(draft.tokens)[0]
    assert pairs(second, 1)[:2] == ([7], [drafted[1]])
    assert pairs(third, 1)[:2] == ([8], [drafted[2]])
    newest = committed_rows(reference, tokens[:8], features)
    np.testing.assert_allclose(pairs(second, 1)[2], reference.feedback(newest)[:1], atol=1e-5)
    after = reference.add(int(drafted[1]), reference.feedback(newest), 7)
    np.testing.assert_allclose(pairs(third, 1)[2], reference.feedback(after)[:1], atol=1e-5)

    # After 2 of 3 drafts: the target's features of positions 7 to 9, with tokens 8 to 10.
    position, token, condition = pairs(extend[0], 3)
    assert (position, token) == ([7, 8, 9], tokens[8:11].tolist())
    np.testing.assert_allclose(condition, [reference.condition(features[i])[0] for i in (7, 8, 9)], atol=1e-5)


def brute_force_tree(reference: Reference, newest: np.ndarray, tokens, shape: DraftShape):
    """The dynamic tree in plain Python: every beam node runs with its own copy of the rows above it."""

    def children(path, out, total, above):
        logits = above.logits(out)
        logprobs = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        best = np.argsort(-logprobs, kind="stable")[: shape.branching]
        return [((*path, int(token)), total + logprobs[token], out, above) for token in best]

    root = int(tokens[-1])
    pool = children((root,), newest, 0.0, reference)
    beam = list(pool)
    for level in range(shape.depth - 1):
        grown = []
        for path, total, parent_out, above in beam:
            own = above.copy()
            out = own.add(path[-1], own.feedback(parent_out), len(tokens) - 1 + level)
            grown += children(path, out, total, own)
        pool += grown
        beam = sorted(grown, key=lambda node: -node[1])[: shape.branching]
    order = sorted(range(len(pool)), key=lambda i: -pool[i][1])[: shape.rows - 1]
    kept = [pool[i][0] for i in order]
    number = {(root,): 0} | {path: i + 1 for i, path in enumerate(kept)}
    return [root] + [path[-1] for path in kept], [-1] + [number[path[:-1]] for path in kept]


@pytest.mark.parametrize("changes", [{}, {"norm_output": True, "draft_vocab_size": 30, "windows": (5,)}])
def test_tree_equals_brute_force(changes):
    """The default tree, of the shape that is configured and of smaller ones from a menu; trap 18 among others."""
    config = head_config("eagle3", **changes)
    drafter, params, reference = eagle(config)
    assert drafter.shape == DraftShape("eagle3", depth=5, branching=4, rows=16)
    tokens, features = some_text(3, 24, 3 * WIDTH, seed=4)
    lengths = [10, 7, 13]
    state = prefilled(drafter, params, tokens, [n - 1 for n in lengths], features, chunk=16)
    for shape in (drafter.shape, DraftShape("eagle3", 3, 3, 8), DraftShape("eagle3", 2, 1, 3)):
        draft, _ = jax.jit(drafter.draft, static_argnums=3)(
            params, state, context(tokens, lengths, features, [1] * 3), shape
        )
        assert draft.q is None
        for b, length in enumerate(lengths):
            fresh = reference.copy()
            newest = committed_rows(fresh, tokens[b, :length], features[b])
            want = brute_force_tree(fresh, newest, tokens[b, :length].tolist(), shape)
            assert int(draft.lengths[b]) == shape.rows
            assert np.asarray(draft.tokens)[b].tolist() == want[0]
            assert np.asarray(draft.parents)[b].tolist() == want[1]


def test_an_end_token_is_never_drafted():
    """Neither it nor anything behind it; a chain ends before it."""
    drafter, params, _ = eagle(head_config("eagle3"))
    tokens, features = some_text(1, 24, 3 * WIDTH, seed=2)
    state = prefilled(drafter, params, tokens, [9], features, chunk=16)
    chain = DraftShape("eagle3", 5, 1, 6)
    run = jax.jit(drafter.draft, static_argnums=3)

    def draft(shape, eos):
        return run(params, state, context(tokens, [10], features, [1], eos=[eos]), shape)[0]

    free = np.asarray(draft(chain, -1).tokens)[0]
    end = int(free[3])
    cut = draft(chain, end)
    assert int(cut.lengths[0]) == 1 + free[1:].tolist().index(end)
    tree = np.asarray(draft(drafter.shape, -1).tokens)[0]
    ended = draft(drafter.shape, end)
    assert end in tree
    assert end not in np.asarray(ended.tokens)[0, 1 : int(ended.lengths[0])]


def test_taking_the_same_rows_in_twice_changes_nothing():
    """Drafting twice gives the same draft; requests that are not active write nothing."""
    drafter, params, _ = eagle(head_config("eagle3"), depth=3, branching=2, rows=6)
    tokens, features = some_text(2, 24, 3 * WIDTH, seed=3)
    state = prefilled(drafter, params, tokens, [9, 9], features, chunk=16)
    run = jax.jit(drafter.draft, static_argnums=3)
    now = context(tokens, [13, 10], features, [3, 1], active=[True, False])
    first, after = run(params, state, now, drafter.shape)
    second, _ = run(params, after, now, drafter.shape)
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(after.k[0][1], state.k[0][1])
    changed = np.abs(np.asarray(after.k[0][0] - state.k[0][0])).max(axis=(0, 2)) > 0
    assert np.flatnonzero(changed).tolist() == [9, 10, 11]


def test_draft_vocabulary_of_a_sampled_tree():
    """Mass on the draft vocabulary alone, and on every drawn child; a request at T = 0 draws the argmax first."""
    config = head_config("eagle3", draft_vocab_size=20)
    drafter, params, _ = eagle(config, depth=3, branching=3, rows=10, sampled=True)
    tokens, features = some_text(2, 24, 3 * WIDTH, seed=5)
    state = prefilled(drafter, params, tokens, [9, 9], features, chunk=16)
    run = jax.jit(drafter.draft, static_argnums=3)
    draft, _ = run(params, state, context(tokens, [10, 10], features, [1, 1]), drafter.shape)
    ids = np.asarray(params["head"]["ids"])
    q, drafted, parents = (np.asarray(x) for x in (draft.q, draft.tokens, draft.parents))
    outside = np.setdiff1d(np.arange(VOCAB), ids)
    assert not q[..., outside].any() and np.isin(drafted[:, 1:], ids).all()
    for b, node in itertools.product(range(2), range(1, 10)):
        assert q[b, parents[b, node], drafted[b, node]] > 0
    greedy, _ = run(params, state, context(tokens, [10, 10], features, [1, 1], temperature=0.0), drafter.shape)
    q, drafted, parents = (np.asarray(x) for x in (greedy.q, greedy.tokens, greedy.parents))
    for b in range(2):
        kids = drafted[b, parents[b] == 0]
        assert q[b, 0].tolist() == np.eye(VOCAB)[kids[0]].tolist()  # one-hot, on the child that is tested first
        assert len(set(kids.tolist())) == len(kids)


def oracle(taps=(1, 2, 3)):
    """A bigram target, and a head that knows it: what follows a token is in the token's embedding.

    The target's layers add nothing, so its choice depends on the last token alone. The head's attention sees only the
    row itself (a window of 1) and copies the normed embedding, so it makes the same choice.
    """
    model, weights = target()
    layers = [dict(layer) for layer in weights["layers"].values()]
    for layer in layers:
        for block, out in (("attention", "out"), ("mlp", "down")):
            layer[block] = layer[block] | {out: {"weight": jnp.zeros_like(layer[block][out]["weight"])}}
    weights = weights | {"layers": dict(enumerate(layers))}
    config = head_config("eagle3", num_kv_heads=4, windows=(1,), taps=taps, norm_before_residual=True)
    tensors = random_tensors(config, seed=1)
    eye, nothing = np.eye(WIDTH, dtype=np.float32), np.zeros
    tensors |= {
        "fc.weight": nothing((WIDTH, len(taps) * WIDTH), np.float32),
        "layers.0.hidden_norm.weight": nothing(WIDTH, np.float32),  # the residual is nothing too
        "layers.0.input_layernorm.weight": np.ones(WIDTH, np.float32),
        "layers.0.self_attn.v_proj.weight": np.concatenate([eye, nothing((WIDTH, WIDTH), np.float32)], axis=1),
        "layers.0.self_attn.o_proj.weight": eye,
        "layers.0.mlp.down_proj.weight": nothing((WIDTH, 48), np.float32),
        "norm.weight": np.asarray(weights["norm"]["weight"]),
    }
    return (model, weights), config, tensors


def test_an_oracle_is_always_accepted():
    """Every draft of a chain, at any depth of context and over two batch rows; and nothing is copied to build it."""
    (model, weights), config, tensors = oracle()
    drafter, params = learned.build(config, tensors, model, weights, jnp.float32, depth=3, branching=1)
    assert params["embedding"] is weights["embedding"] and params["head"]["weight"] is weights["head"]["weight"]
    engine = engines.narrow(toy.engine(drafter, params, (model, weights), batch=2))
    for result in engine.generate([[5, 9, 3], [7, 1, 4, 8, 2, 6, 11]], SamplingParams(max_tokens=81)):
        assert (result.spec.rounds, result.spec.accepted) == (20, 60)  # 1 from prefill, then 20 rounds of 4


def small(dtype=jnp.float32, **options):
    """A random head on the small target: `(drafter, params, target)`."""
    model, weights = laws.small_target(dtype)
    config = head_config("eagle3", taps=(0, 1), vocab_size=laws.SMALL_VOCAB, draft_vocab_size=laws.SMALL_VOCAB)
    drafter, params = learned.build(config, random_tensors(config), model, weights, dtype, **options)
    return drafter, params, (model, weights)


def test_greedy_text_and_trees():
    laws.check_greedy(*small(depth=4, branching=3, rows=10))


def test_greedy_text_and_chains():
    """Drafts are those that numpy makes of the right activations of the target: row i, after the tapped layers."""
    drafter, params, target = small(depth=3, branching=1)
    tensors = random_tensors(drafter.config)
    right = heads.expected_chain(drafter.config, tensors, target, 3)
    laws.check_greedy(drafter, params, target, right)
    text = laws.PROMPTS[2]
    late = heads.expected_chain(drafter.config, tensors, target, 3, shift=1)
    assert any(right(text[:n]) != late(text[:n]) for n in range(4, 10))


def test_bfloat16():
    laws.check_bfloat16(*small(jnp.bfloat16, depth=3, branching=2, rows=6))


@pytest.mark.parametrize(
    ("rule", "options"),
    [("recursive", {"depth": 2, "branching": 2, "rows": 6}), ("chain", {"depth": 2, "branching": 1})],
)
def test_sampled_drafts_follow_the_target(rule, options):
    """With a draft vocabulary that lacks a token of the target."""
    model, weights = blocks.feature_target(laws.VOCAB)
    config = head_config(
        "eagle3", taps=(0, 1), vocab_size=laws.VOCAB, draft_vocab_size=laws.VOCAB - 1, own_head=True, windows=(6,)
    )
    drafter, params = learned.build(
        config, random_tensors(config), model, weights, jnp.float32, sampled=True, **options
    )
    laws.check_sampled(drafter, params, (model, weights), rule)


def test_children_are_drawn_without_replacement():
    """Ordered pairs and triples have the law of successive draws; what is left behind the support is the best of it."""
    q = np.array([0.5, 0.3, 0.0, 0.15, 0.05, 0.0], np.float32)
    logits = np.array([0.0, 0.0, 2.0, 0.0, 0.0, 1.0], np.float32)
    draws = 40_000
    u = np.random.default_rng(0).random((draws, 3), np.float32)
    triples = np.asarray(jax.jit(draw)(jnp.tile(q, (draws, 1)), jnp.tile(logits, (draws, 1)), u))
    law, counts = np.zeros((6, 6, 6)), np.zeros((6, 6, 6))
    for a, b, c in itertools.permutations(range(6), 3):
        law[a, b, c] = q[a] * q[b] / (1 - q[a]) * q[c] / (1 - q[a] - q[b])
    np.add.at(counts, tuple(triples.T), 1)
    assert abs(laws.chi_square(counts, law)) < 4
    one_hot = jnp.eye(6)[1][None]
    assert np.asarray(draw(one_hot, jnp.asarray(logits)[None], jnp.zeros((1, 4)))).tolist() == [[1, 2, 5, 0]]


def test_one_program_for_every_round():
    """Positions, counts and which requests are active are data: drafting again compiles nothing."""
    drafter, params, _ = eagle(head_config("eagle3"), depth=2, branching=2, rows=4)
    tokens, features = some_text(2, 24, 3 * WIDTH)
    state = drafter.init_state(2, 64)
    run = jax.jit(drafter.draft, static_argnums=3)
    for lengths, counts, active in (([10, 7], [1, 1], [True, True]), ([13, 8], [3, 1], [True, False])):
        _, state = run(params, state, context(tokens, lengths, features, counts, active=active), drafter.shape)
    assert run._cache_size() == 1


def test_a_head_that_does_not_fit_is_refused():
    """Before anything is computed, with both sides named."""
    model, weights = target()

    def build(tensors=None, **changes):
        config = head_config("eagle3", **changes)
        return learned.build(config, random_tensors(config) | (tensors or {}), model, weights, jnp.float32)

    with pytest.raises(ValueError, match="made for a vocabulary of 70, the target has 64"):
        build(vocab_size=70, draft_vocab_size=70)
    with pytest.raises(ValueError, match="made for a width of 48, the target has 32"):
        build(target_hidden_size=48)
    with pytest.raises(ValueError, match="embedding of width 32 but is 16 wide"):
        build(hidden_size=16)
    with pytest.raises(ValueError, match=r"fc.weight is \(32, 64\), expected \(32, 96\); odd \(1,\) is not known"):
        build({"fc.weight": np.zeros((32, 64)), "odd": np.zeros(1)})
    with pytest.raises(ValueError, match="no drafter of family 'medusa'; families are eagle3"):
        learned.build(dataclasses.replace(head_config("eagle3"), family="medusa"), {}, model, weights, jnp.float32)
    config = head_config("eagle3")
    with pytest.raises(ValueError, match="branching 70 exceeds the 64 tokens"):
        learned.build(config, random_tensors(config), model, weights, jnp.float32, branching=70)
