"""The block backbone against its arithmetic in numpy, and what it remembers of the context."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import blocks, toy

from specjax.targets.config import RopeConfig

TAPS = 2 * blocks.WIDTH
LENGTHS = (9, 4, 1)  # committed tokens: 8, 3 and 0 context rows
ANCHORS = (5, 17, 40)

VARIANTS = {
    "in place": {"num_layers": 2},
    "shifted": {"shifted": True},
    "windows": {"num_layers": 2, "windows": (3, None)},
    "windows, seen both ways": {"num_layers": 2, "windows": (3, 4), "block_causal": (False, False)},
    "causal": {"block_causal": (True,)},
    "convolutions": {"conv_kernel": 2, "conv_group": 8},
    "long convolutions": {"conv_kernel": 3, "conv_group": 4},
    "neighbouring pairs": {"rope_interleaved": True, "attention_bias": True},
    "neighbouring pairs, no norms": {"rope_interleaved": True, "qk_norm": False},
    "partial rotation": {"rotary_dims": 4, "rope_interleaved": True},
    "norm offset": {"norm_offset": True},
    "linear rope": {"rope": RopeConfig(theta=100.0, kind="linear", factor=4.0)},
    "embedding scale": {"embedding_scale": 5.65},
    "own embedding": {"own_embedding": True, "taps": (1,)},
    "narrow": {"hidden_size": 16, "own_embedding": True, "own_head": True},
}


@pytest.fixture(scope="module")
def taps():
    rng = np.random.default_rng(7)
    return [rng.standard_normal((length - 1, TAPS)).astype(np.float32) for length in LENGTHS]


def given(**settings):
    """A context whose roots are the anchors; what was said before is not read by the network."""
    rows = [[3] * (length - 1) + [anchor] for length, anchor in zip(LENGTHS, ANCHORS, strict=True)]
    return blocks.context(rows, LENGTHS, **settings)


def block_rows(drafter, params, state, context, depth):
    return np.asarray(jax.jit(drafter.hidden, static_argnums=3)(params, state, context, depth))


@pytest.mark.parametrize(
    ("variant", "depth"), [(variant, None) for variant in VARIANTS] + [("in place", 2), ("shifted", 2), ("windows", 1)]
)
def test_hidden_rows(variant, depth, taps):
    """Every row of the block, batched and with its context kept, is what the formulas give for it alone."""
    config = blocks.head_config(**VARIANTS[variant])
    width = len(config.taps) * blocks.WIDTH
    taps = [rows[:, :width] for rows in taps]
    tensors = blocks.random_tensors(config)
    drafter, params = blocks.build(config, tensors, num_speculative_tokens=depth)
    state = blocks.prefilled(drafter, params, taps, [length - 1 for length in LENGTHS])
    assert drafter.depth == (depth or (5 if config.shifted else 4))
    depth = drafter.depth
    got = block_rows(drafter, params, state, given(), depth)
    embedding = tensors.get("embed_tokens.weight", toy.tiny()[1]["embedding"])
    for row, anchor in enumerate(ANCHORS):
        # In place a draft needs a row more than drafts, and the anchor's is dropped.
        want = blocks.hidden(config, tensors, embedding, taps[row], anchor, depth if config.shifted else depth + 1)
        np.testing.assert_allclose(got[row], want[-depth:], rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(
    "variant", [name for name in VARIANTS if name not in ("in place", "shifted", "own embedding", "narrow")]
)
def test_variants_differ(variant, taps):
    """The test above could not tell these apart if the option changed nothing."""
    config = blocks.head_config(**VARIANTS[variant])
    base = blocks.head_config(num_layers=config.num_layers)
    tensors = blocks.random_tensors(base) | blocks.random_tensors(config)
    embedding = toy.tiny()[1]["embedding"]
    plain = blocks.hidden(base, tensors, embedding, taps[0], 5, 5)
    other = blocks.hidden(config, tensors, embedding, taps[0], 5, 5)
    assert np.abs(plain - other).max() > 0.05


def test_context_is_normed_once(taps):
    """Context features reach keys and values through `hidden_norm` alone; a layer's own norm is for block rows."""
    config = blocks.head_config()
    tensors = blocks.random_tensors(config)
    drafter, params = blocks.build(config, tensors)
    state = blocks.prefilled(drafter, params, taps, [8, 3, 0])
    features = blocks.norm(config, tensors["hidden_norm.weight"], taps[0].astype(np.float64) @ tensors["fc.weight"].T)
    for i in range(config.num_layers):
        values = features @ tensors[f"layers.{i}.self_attn.v_proj.weight"].T
        got = np.asarray(state.v[i])[0, :, :8].swapaxes(0, 1).reshape(8, -1)
        np.testing.assert_allclose(got, values, rtol=1e-4, atol=1e-4)


def test_the_anchor_has_no_features(taps):
    """What stands in the cache at the anchor's position or later is never read."""
    config = blocks.head_config()
    drafter, params = blocks.build(config)
    state = blocks.prefilled(drafter, params, taps, [8, 3, 0])
    poison = jax.tree.map(jnp.asarray, state)
    for row, length in enumerate(LENGTHS):
        poison = jax.tree.map(lambda x, r=row, n=length: x.at[r, :, n - 1 :].set(1e4), poison)
    for depth in (1, 4):
        np.testing.assert_array_equal(
            block_rows(drafter, params, state, given(), depth), block_rows(drafter, params, poison, given(), depth)
        )


def test_context_kept_is_context_recomputed(taps):
    """Chunked prefill, one pass, and rows taken in round by round leave the same block rows."""
    config = blocks.head_config(num_layers=2, windows=(4, None))
    drafter, params = blocks.build(config)
    lengths = [length - 1 for length in LENGTHS]
    whole = blocks.prefilled(drafter, params, taps, lengths)
    chunked = blocks.prefilled(drafter, params, taps, lengths, chunk=3)
    # Two rows of the first request and one of the second come with prefill, the rest with the rounds' features.
    grown = blocks.prefilled(drafter, params, taps, [2, 1, 0])
    shape, take = drafter.shape, jax.jit(lambda s, c: drafter.draft(params, s, c, drafter.shape))
    for start, count in (([2, 1, 0], [3, 2, 0]), ([2, 1, 0], [3, 2, 0]), ([5, 3, 0], [3, 0, 0])):
        rows = np.full((3, 5, TAPS), 9.0, np.float32)  # padding that must leave no trace
        for row in range(3):
            rows[row, : count[row]] = taps[row][start[row] : start[row] + count[row]]
        told = given(features=blocks.features(rows, start, count))
        draft, grown = take(grown, told)
    want = block_rows(drafter, params, whole, given(), shape.depth)
    for state in (chunked, grown):
        np.testing.assert_allclose(block_rows(drafter, params, state, given(), shape.depth), want, rtol=1e-5, atol=1e-5)
    nothing = blocks.features(np.zeros((3, 5, TAPS)), [0, 0, 0], [0, 0, 0])
    fresh, _ = take(whole, given(features=nothing))
    np.testing.assert_array_equal(draft.tokens, fresh.tokens)


def test_rejected_rows_are_overwritten(taps):
    """Rows taken in at positions that a later round fills again are replaced, not mixed."""
    drafter, params = blocks.build(blocks.head_config())
    wrong = [np.concatenate([rows[:2], rows[2:] + 3.0]) for rows in taps]
    state = blocks.prefilled(drafter, params, wrong, [8, 3, 0])
    rows = np.zeros((3, 6, TAPS), np.float32)
    rows[0], rows[1, :1] = taps[0][2:], taps[1][2:]
    told = given(features=blocks.features(rows, [2, 2, 0], [6, 1, 0]))
    _, state = jax.jit(lambda s, c: drafter.draft(params, s, c, drafter.shape))(state, told)
    want = blocks.prefilled(drafter, params, taps, [8, 3, 0])
    got, want = (block_rows(drafter, params, x, given(), 4) for x in (state, want))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_neighbours_do_not_matter(taps):
    """A request's rows are the same alone, and beside an inactive row full of rubbish."""
    drafter, params = blocks.build(blocks.head_config())
    alone = blocks.prefilled(drafter, params, taps[:1], [8])
    want = block_rows(drafter, params, alone, blocks.context([[3] * 8 + [5]], [9]), 4)
    state = blocks.prefilled(drafter, params, taps, [8, 3, 0])
    state = jax.tree.map(lambda x: x.at[1].set(1e30), state)
    got = block_rows(drafter, params, state, given(active=[True, False, True]), 4)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5, atol=1e-5)


def test_head_settings_reach_the_scores(taps):
    """Multiplier, softcap and a reduced vocabulary: drafted ids are target ids of the best scaled logits."""
    config = blocks.head_config(draft_vocab_size=20, own_head=True, output_multiplier=0.7, logit_softcap=3.0)
    tensors = blocks.random_tensors(config)
    drafter, params = blocks.build(config, tensors, tree="ddtree", num_speculative_tokens=1, tree_budget=4)
    state = blocks.prefilled(drafter, params, taps, [8, 3, 0])
    draft, _ = jax.jit(lambda s, c: drafter.draft(params, s, c, drafter.shape))(state, given())
    ids = np.arange(20) + tensors["d2t"]
    for row, anchor in enumerate(ANCHORS):
        rows = blocks.hidden(config, tensors, toy.tiny()[1]["embedding"], taps[row], anchor, 2)
        best = np.argsort(-blocks.logits(config, tensors["lm_head.weight"], rows[1]))[:4]
        np.testing.assert_array_equal(np.asarray(draft.tokens)[row, 1:], ids[best])


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, {"num_speculative_tokens": 5}, "1..4"),
        ({"shifted": True}, {"num_speculative_tokens": 6}, "1..5"),
        ({}, {"num_speculative_tokens": 0}, "1..4"),
        ({}, {"tree": "bushy"}, "none, ddtree"),
        ({}, {"tree": "ddtree", "sampled": True}, "deterministic"),
        ({}, {"tree": "ddtree", "tree_budget": 3}, "path of 4"),
        ({}, {"tree_budget": 9}, "belongs to a tree"),
        ({}, {"temperature": 1.0}, "no option temperature"),
        ({"mask_token_id": None}, {}, "mask_token_id"),
        ({"mask_token_id": 64}, {}, "not in the vocabulary"),
        ({"block_size": 1}, {}, "block_size"),
        ({"windows": (4, 4)}, {}, "2 windows for 1 layers"),
        ({"attention_gate": True}, {}, "no attention gate"),
    ],
)
def test_refusals(changes, options, message):
    with pytest.raises(ValueError, match=message):
        blocks.build(blocks.head_config(**changes), **options)


def test_shapes():
    config = blocks.head_config()
    assert blocks.build(config)[0].shape.rows == 5 and blocks.build(config)[0].shape.is_chain
    assert blocks.build(dataclasses.replace(config, shifted=True))[0].shape.depth == 5
    tree = blocks.build(config, tree="ddtree")[0].shape
    assert (tree.depth, tree.rows, tree.is_chain) == (4, 32, False)
    drafter, params = blocks.build(config)
    with pytest.raises(ValueError, match="depth 1 to 4"):
        drafter.draft(params, drafter.init_state(3, 32), given(), tree)


def test_shares_the_target_arrays():
    """Embedding and head are the target's own arrays, not copies."""
    model, params = toy.tiny()
    _, own = blocks.build(blocks.head_config(), target=(model, params))
    assert own["embedding"] is params["embedding"]
    assert own["head"]["weight"] is params["head"]["weight"]
