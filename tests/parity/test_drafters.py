"""Checkpoints that other packages saved, read by our loaders and run by our drafters, give what those packages compute.

See README.md for the files. Every case goes through `load_drafter` and `learned.build`, as a user's checkpoint does.
"""

import dataclasses
import functools
from pathlib import Path

import jax
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
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}
TARGET = toy.tiny_config(num_layers=8, windows=(), vocab_size=48, hidden_size=16, max_position_embeddings=64)


@functools.cache
def golden(name: str) -> dict[str, np.ndarray]:
    return dict(np.load(GOLDENS / name / "golden.npz"))


@functools.cache
def ours(name: str, **change) -> dict[str, np.ndarray]:
    """What our drafter computes with a case's checkpoint, by the names of the golden file."""
    given = {key: jnp.asarray(value) for key, value in golden(name).items()}
    loaded = load_drafter(GOLDENS / name, TARGET)
    # Of the target a drafter takes an embedding and a head.
    params = {
        "embedding": given["embedding"],
        "head": {"weight": given["head"]},
        "norm": {"weight": jnp.ones((16,))},
    }
    config = dataclasses.replace(loaded.config, **change)
    options = {"depth": 3, "branching": 1} if config.family in ("eagle3", "mtp") else {}
    target = decoder.Target(config=TARGET, graph=None)
    drafter, weights = learned.build(config, loaded.tensors, target, params, jnp.float32, **options)
    compute = recurrent if config.family in ("eagle3", "peagle", "mtp") else block
    return jax.tree.map(np.asarray, jax.jit(functools.partial(compute, drafter))(weights, given))


def features(drafter, given, first: int, last: int) -> Features:
    rows = given["features"][None, first:last]
    named = {"hidden": rows} if drafter.wants_hidden else {"taps": rows}
    return Features(positions=jnp.arange(first, last)[None], count=jnp.array([last - first]), **named)


def started(drafter, params, given) -> tuple[KVCache, Context]:
    """The state after a prefill of every row with features, and the context of the first draft."""
    tokens = given["tokens"].astype(jnp.int32)
    rows = len(given["features"])
    state = drafter.init_state(1, 64)
    row, start, count = jnp.int32(0), jnp.int32(0), jnp.int32(rows)
    state = drafter.prefill(params, state, row, tokens, start, count, features(drafter, given, 0, rows))
    context = Context(
        tokens=jnp.pad(tokens, (0, 64 - len(tokens)))[None],
        lengths=jnp.array([rows + 1]),
        prompt_lengths=jnp.array([rows]),
        active=jnp.array([True]),
        eos=jnp.full((1, 1), -1),
        sampling=None,  # read by sampled drafts only
        features=features(drafter, given, rows - 1, rows),
    )
    return state, context


def drafted(drafter, params, state, context):
    draft, _ = drafter.draft(params, state, context, drafter.shape)
    return {"drafts": draft.tokens[0, 1:], "live": draft.lengths[0]}


def recurrent(drafter, params, given) -> dict:
    """The chain, the logits of every row with features, and those of each draft with the golden ones before it."""

    def logits(out):
        return drafter.head.scores(params["head"], drafter.normed(params, out)).logits[0]

    whole = features(drafter, given, 0, len(given["features"]))
    tokens = given["tokens"].astype(jnp.int32)[None, 1:]
    condition = drafter.condition(params, whole)
    out, _ = drafter.take_in(params, drafter.init_state(1, 64), tokens, condition, whole.positions, jnp.array([0]))
    state, context = started(drafter, params, given)
    found = drafted(drafter, params, state, context) | {"logits": logits(out)}
    found["feedback"] = drafter.feedback(out, drafter.normed(params, out))[0]
    if drafter.config.family != "eagle3":
        return found
    out, state = drafter.newest(params, state, context)
    steps, root = len(given["drafts"]), context.lengths - 1
    tile = drafter.empty_tile(root[:, None] + jnp.arange(steps)[None])
    chain = []
    for step in range(steps):
        chain.append(logits(out)[0])
        token = given["drafts"][step].astype(jnp.int32)[None, None]
        seen = (jnp.arange(steps) <= step)[None, None]
        condition = drafter.feedback(out, drafter.normed(params, out))
        position = (root + step)[:, None]
        out, tile = drafter.rows(params, state, token, condition, position, tile, step, seen, committed=root)
    return found | {"chain_logits": jnp.stack(chain)}


def block(drafter, params, given) -> dict:
    """The chain, the block's hidden rows and logits, and DSpark's confidence with the golden drafts before each."""
    state, context = started(drafter, params, given)
    hidden = drafter.hidden(params, state, context, drafter.depth)
    logits = drafter.head.scores(params["head"], hidden).logits[0]
    found = drafted(drafter, params, state, context) | {"hidden": hidden[0], "logits": logits}
    if "confidence" in given:
        before = jnp.concatenate([given["tokens"][-1:], given["drafts"][:-1]])
        embedded = params["markov"]["w1"][before]
        found["confidence"] = drafter._confidence(params, hidden[0], embedded)
    return found


@pytest.mark.parametrize("name", CASES)
def test_drafts_and_numbers(name):
    """The greedy chain after the root through the drafter's public functions, and the numbers on the way to it."""
    want, got = golden(name), ours(name)
    count = len(want["drafts"])
    # MTP training passes see other keys from the second step on, so only the first draft is comparable.
    assert count == (1 if name.startswith("mtp") else got["live"] - 1)
    np.testing.assert_array_equal(got["drafts"][:count], want["drafts"])
    shared = {"logits", "chain_logits", "feedback", "hidden", "confidence"} & want.keys() & got.keys()
    assert "logits" in shared and (name in RECURRENT or "hidden" in shared)
    for what in shared:
        np.testing.assert_allclose(got[what], want[what], **TOLERANCE, err_msg=what)


@pytest.mark.parametrize(
    ("name", "change", "what"),
    [
        ("eagle3-speculators-qwen3", {"norm_before_residual": False}, "logits"),
        ("eagle3-speculators-fc-norm", {"norm_output": False}, "chain_logits"),
        ("dflash-zlab", {"block_causal": (True, True)}, "hidden"),
        ("dflash-zlab-window", {"block_causal": (False, False)}, "hidden"),
        ("dflash-zlab-window", {"windows": (None, None)}, "hidden"),
        ("dspark-specforge-vanilla", {"rope_interleaved": True}, "hidden"),
        ("mtp-speculators-qwen3", {"hidden_first": True}, "logits"),
        ("mtp-speculators-qwen3-5", {"norm_offset": False}, "logits"),
        ("mtp-speculators-qwen3-5", {"rotary_dims": None}, "logits"),
    ],
)
def test_goldens_tell_wirings_apart(name, change, what):
    """With one switch turned, the numbers are others: the comparison above would fail."""
    assert np.abs(ours(name, **change)[what] - golden(name)[what]).max() > 0.01
