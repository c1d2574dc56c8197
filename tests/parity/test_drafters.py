"""Checkpoints that other packages saved, read by our loaders and run by our drafters, give what those packages compute.

See README.md for the files. Every case goes through `load_drafter` and `learned.build`, as a user's checkpoint does.
"""

import dataclasses
import functools
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from support import toy

from specjax.cache import KVCache
from specjax.drafters import learned
from specjax.drafters.base import Context, Features
from specjax.drafters.formats.read import load_drafter
from specjax.targets import decoder

pytestmark = pytest.mark.parity

GOLDENS = Path(__file__).parent / "goldens" / "drafters"
CASES = sorted(path.name for path in GOLDENS.iterdir() if path.is_dir())
RECURRENT = [name for name in CASES if name.startswith(("eagle3", "peagle", "mtp"))]
BLOCK = [name for name in CASES if name not in RECURRENT]
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}
TARGET = toy.tiny_config(num_layers=8, windows=(), vocab_size=48, hidden_size=16, max_position_embeddings=64)


@functools.cache
def case(name: str):
    """`(drafter, params, golden)`; the target is an embedding and a head, all that a drafter takes of it."""
    golden = dict(np.load(GOLDENS / name / "golden.npz"))
    loaded = load_drafter(GOLDENS / name, TARGET)
    target = decoder.Target(config=TARGET, graph=None)
    params = {
        "embedding": jnp.asarray(golden["embedding"]),
        "head": {"weight": jnp.asarray(golden["head"])},
        "norm": {"weight": jnp.ones((16,))},
    }
    options = {"depth": 3, "branching": 1} if loaded.config.family in ("eagle3", "mtp") else {}
    drafter, ours = learned.build(loaded.config, loaded.tensors, target, params, jnp.float32, **options)
    return drafter, ours, golden


def features(drafter, golden, first: int, last: int) -> Features:
    rows = jnp.asarray(golden["features"][None, first:last])
    named = {"hidden": rows} if drafter.wants_hidden else {"taps": rows}
    return Features(positions=jnp.arange(first, last)[None], count=jnp.array([last - first]), **named)


def started(drafter, params, golden) -> tuple[KVCache, Context]:
    """The state after a prefill of every row with features, and the context of the first draft."""
    tokens = jnp.asarray(golden["tokens"], jnp.int32)
    rows = len(golden["features"])
    state = drafter.init_state(1, 64)
    row, start, count = jnp.int32(0), jnp.int32(0), jnp.int32(rows)
    state = drafter.prefill(params, state, row, tokens, start, count, features(drafter, golden, 0, rows))
    context = Context(
        tokens=jnp.pad(tokens, (0, 64 - len(tokens)))[None],
        lengths=jnp.array([rows + 1]),
        prompt_lengths=jnp.array([rows]),
        active=jnp.array([True]),
        eos=jnp.full((1, 1), -1),
        sampling=None,  # read by sampled drafts only
        features=features(drafter, golden, rows - 1, rows),
    )
    return state, context


@pytest.mark.parametrize("name", CASES)
def test_drafts(name):
    """The greedy chain after the root, through the drafter's public functions."""
    drafter, params, golden = case(name)
    state, context = started(drafter, params, golden)
    draft, _ = drafter.draft(params, state, context, drafter.shape)
    drafts = np.asarray(golden["drafts"])
    assert int(draft.lengths[0]) == 1 + drafter.shape.depth
    # MTP training passes see other keys from the second step on, so only the first draft is comparable.
    np.testing.assert_array_equal(np.asarray(draft.tokens)[0, 1 : 1 + len(drafts)], drafts)
    assert len(drafts) == (1 if name.startswith("mtp") else drafter.shape.depth)


@pytest.mark.parametrize("name", RECURRENT)
def test_rows_with_features(name):
    """Logits of every row, from the target's features."""
    drafter, params, golden = case(name)
    rows = len(golden["features"])
    given = features(drafter, golden, 0, rows)
    tokens = jnp.asarray(golden["tokens"], jnp.int32)[None, 1:]
    cache = drafter.init_state(1, 64)
    out, _ = drafter.take_in(params, cache, tokens, drafter.condition(params, given), given.positions, jnp.array([0]))
    normed = drafter.normed(params, out)
    logits = drafter.head.scores(params["head"], normed).logits[0]
    np.testing.assert_allclose(logits, golden["logits"], **TOLERANCE)
    if "feedback" in golden:
        np.testing.assert_allclose(drafter.feedback(out, normed)[0], golden["feedback"], **TOLERANCE)


@pytest.mark.parametrize("name", [name for name in RECURRENT if name.startswith("eagle3")])
def test_steps_of_the_chain(name):
    """Logits of each draft, the head fed its own output."""
    drafter, params, golden = case(name)
    state, context = started(drafter, params, golden)
    out, state = drafter.newest(params, state, context)
    steps = len(golden["drafts"])
    root = context.lengths - 1
    tile = drafter.empty_tile(root[:, None] + jnp.arange(steps)[None])
    for step in range(steps):
        normed = drafter.normed(params, out)
        logits = drafter.head.scores(params["head"], normed).logits[0, 0]
        np.testing.assert_allclose(logits, golden["chain_logits"][step], **TOLERANCE)
        token = jnp.asarray(golden["drafts"][step], jnp.int32)[None, None]
        seen = (jnp.arange(steps) <= step)[None, None]
        position = (root + step)[:, None]
        condition = drafter.feedback(out, normed)
        out, tile = drafter.rows(params, state, token, condition, position, tile, step, seen, committed=root)


@pytest.mark.parametrize("name", BLOCK)
def test_block_pass(name):
    """Hidden rows of the block, and the logits that the head makes of them."""
    drafter, params, golden = case(name)
    state, context = started(drafter, params, golden)
    hidden = drafter._hidden(params, state, context, drafter.depth)
    np.testing.assert_allclose(hidden[0], golden["hidden"], **TOLERANCE)
    logits = drafter.head.scores(params["head"], hidden).logits[0]
    np.testing.assert_allclose(logits, golden["logits"], **TOLERANCE)


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("dspark")])
def test_confidence(name):
    """The logits of the confidence head, given the drafts before each position."""
    drafter, params, golden = case(name)
    before = np.concatenate([golden["tokens"][-1:], golden["drafts"][:-1]])
    embedded = params["markov"]["w1"][jnp.asarray(before)]
    ours = drafter._confidence(params, jnp.asarray(golden["hidden"]), embedded)
    np.testing.assert_allclose(ours, golden["confidence"], **TOLERANCE)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("eagle3-speculators-qwen3", {"norm_before_residual": False}),
        ("eagle3-speculators-fc-norm", {"norm_output": False}),
        ("dflash-zlab", {"block_causal": (True, True)}),
        ("dflash-zlab-window", {"block_causal": (False, False)}),
        ("dflash-zlab-window", {"windows": (None, None)}),
        ("dspark-specforge-vanilla", {"rope_interleaved": True}),
        ("mtp-speculators-qwen3", {"hidden_first": True}),
        ("mtp-speculators-qwen3-5", {"norm_offset": False}),
        ("mtp-speculators-qwen3-5", {"rotary_dims": None}),
    ],
)
def test_goldens_tell_wirings_apart(name, change):
    """With one switch turned, the numbers are others: the comparisons above would fail."""
    loaded = load_drafter(GOLDENS / name, TARGET)
    drafter, params, golden = case(name)
    turned = dataclasses.replace(drafter.config, **change)
    params = {"embedding": params["embedding"], "head": {"weight": jnp.asarray(golden["head"])}, "norm": {"weight": jnp.ones(16)}}
    target = decoder.Target(config=TARGET, graph=None)
    options = {"depth": 3, "branching": 1} if turned.family in ("eagle3", "mtp") else {}
    other, params = learned.build(turned, loaded.tensors, target, params, jnp.float32, **options)
    state, context = started(other, params, golden)
    if turned.family in ("eagle3", "mtp"):
        rows = len(golden["features"])
        if "norm_output" in change:  # shows from the second step on
            draft, _ = other.draft(params, state, context, other.shape)
            assert not np.array_equal(np.asarray(draft.tokens)[0, 1:], golden["drafts"])
            return
        given = features(other, golden, 0, rows)
        tokens = jnp.asarray(golden["tokens"], jnp.int32)[None, 1:]
        condition = other.condition(params, given)
        out, _ = other.take_in(params, other.init_state(1, 64), tokens, condition, given.positions, jnp.array([0]))
        ours, theirs = other.head.scores(params["head"], other.normed(params, out)).logits[0], golden["logits"]
    else:
        ours, theirs = other._hidden(params, state, context, other.depth)[0], golden["hidden"]
    assert np.abs(np.asarray(ours) - theirs).max() > 0.01
