"""The probe finds a wiring that a checkpoint declares wrongly, and leaves one alone that it declares rightly.

The target counts: after token x comes x + 1. Each drafter below predicts that perfectly, by construction,
when it is wired as its weights mean it, and not at all (or only for two drafts) with one switch the other
way.
"""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
from support import toy

from specjax.drafters import probe as probing
from specjax.drafters.config import HeadConfig, expected_tensors
from specjax.drafters.formats.read import LoadedDrafter
from specjax.drafters.probe import alternatives, probe
from specjax.targets import decoder
from specjax.targets.config import RopeConfig

V = 24
EYE, NEXT = np.eye(V, dtype=np.float32), np.roll(np.eye(V, dtype=np.float32), 1, axis=0)  # NEXT @ e_x = e_{x+1}


@functools.cache
def counting(width: int = V):
    """A target of four layers that count; with `width` 2 V, layer 1 adds what comes after next to the second half."""
    config = toy.tiny_config(
        num_layers=4, windows=(), vocab_size=V, hidden_size=width, intermediate_size=V, num_heads=2, num_kv_heads=1
    )
    target, params = decoder.build(config, seed=0)

    def zero(x):
        return jnp.zeros_like(x)

    for i in range(4):
        layer = params["layers"][i]
        layer["attention"]["out"] = {"weight": zero(layer["attention"]["out"]["weight"])}
        layer["mlp"]["down"] = {"weight": zero(layer["mlp"]["down"]["weight"])}
    params["embedding"] = jnp.asarray(np.pad(EYE, ((0, 0), (0, width - V))))
    params["head"] = {"weight": jnp.asarray(np.pad(NEXT, ((0, 0), (0, width - V))))}
    if width > V:
        both = np.pad(EYE, ((0, 0), (0, width - V)))
        params["layers"][1]["mlp"]["gate_up"] = {"weight": jnp.asarray(np.concatenate([both, both]))}
        params["layers"][1]["mlp"]["down"] = {"weight": jnp.asarray(np.pad(NEXT @ NEXT, ((V, 0), (0, 0))))}
    return target, params


def head(family: str, width: int = V, **changes) -> HeadConfig:
    values = {
        "family": family,
        "num_layers": 1,
        "hidden_size": width,
        "intermediate_size": V,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "rope": RopeConfig(),
        "vocab_size": V,
        "draft_vocab_size": V,
        "target_hidden_size": width,
        "windows": (None,),
    }
    return HeadConfig(**(values | changes))


def loaded(config: HeadConfig, **given) -> LoadedDrafter:
    """Norms of one, everything else 0 but what is given."""
    tensors = {
        name: np.ones(shape, np.float32) if "norm" in name else np.zeros(shape, np.float32)
        for name, shape in expected_tensors(config).items()
    }
    tensors |= {name.replace("__", "."): value for name, value in given.items()}
    return LoadedDrafter(config=config, tensors=tensors, format="somebody's", notes=())


def mtp(**changes) -> LoadedDrafter:
    """Counts on from the token it reads; the hidden state is not looked at."""
    return loaded(head("mtp", **changes), fuse__weight=np.concatenate([EYE, 0 * EYE], axis=1))


def dflash(**changes) -> LoadedDrafter:
    """Each row knows its own token alone: the anchor's row says what comes next, the mask's rows do not."""
    changes = {"block_size": 2, "mask_token_id": 0, "taps": (2,), "shifted": True, "block_causal": (False,)} | changes
    return loaded(head("dflash", **changes))


def taps(**changes) -> LoadedDrafter:
    """Reads what comes after next from the second half of the tap; only tap 2 and later ones have it there."""
    width = 2 * V
    changes = {"taps": (2,), "own_head": True} | changes
    second = np.pad(EYE, ((0, 0), (V, 0)))
    return loaded(head("eagle3", width, **changes), fc__weight=np.eye(width, dtype=np.float32), lm_head__weight=second)


def feedback(**changes) -> LoadedDrafter:
    """Adds the next token to its condition with a weight that wins only over a *normed* condition."""
    changes = {"taps": (2,), "norm_output": True, "own_head": True} | changes
    return loaded(
        head("eagle3", **changes),
        fc__weight=NEXT,
        lm_head__weight=EYE,
        layers__0__mlp__gate_proj__weight=EYE,
        layers__0__mlp__up_proj__weight=EYE,
        layers__0__mlp__down_proj__weight=50 * NEXT,
    )


CASES = [
    pytest.param(mtp, {"hidden_first": True}, "[embedding, hidden]", id="concat order"),
    pytest.param(dflash, {"shifted": False}, "slots that predict the next token", id="slots"),
    pytest.param(taps, {"taps": (1,)}, "taps [2]", id="taps"),
    pytest.param(feedback, {"norm_output": False}, "the normed output", id="feedback"),
]


def run(drafter: LoadedDrafter):
    target, params = counting(drafter.config.target_hidden_size)
    return probe(drafter, target, params, jnp.float32, [3, 4])


@pytest.mark.parametrize(("made", "wrong", "words"), CASES)
def test_a_wrong_switch_is_found(made, wrong, words):
    found, notes = run(made(**wrong))
    assert found.config == made().config
    assert len(notes) == 1 and words in notes[0]


@pytest.mark.parametrize(("made", "wrong", "words"), CASES)
def test_a_right_declaration_is_kept(made, wrong, words):
    del wrong, words
    found, notes = run(made())
    assert found.config == made().config
    depth = min(probing.DRAFTS, 1 if made is dflash else probing.DRAFTS)
    best = 1 if made is taps else depth  # the tap says what comes after next, and no more
    assert notes == [f"probe: the declared wiring holds, the target accepts {best:.2f} of {depth} drafts a round"]


def test_the_text_is_the_targets():
    target, params = counting()
    text = probing.written(target, params, [3, 4], (0, 2), jnp.float32)
    np.testing.assert_array_equal(text.tokens, (3 + np.arange(2 + probing.NEW)) % V)
    np.testing.assert_array_equal(text.taps[0], EYE[text.tokens[:-1]])
    assert text.hidden.shape == (len(text.tokens) - 1, V)


def test_a_drafter_that_never_agrees_is_left_as_declared():
    config = dataclasses.replace(mtp().config, hidden_first=True)
    found, notes = run(loaded(config))  # all zeros: it always drafts token 0
    assert found.config == config
    assert "the declared wiring holds" in notes[0]


def test_our_own_format_leaves_nothing_open():
    drafter = dataclasses.replace(mtp(), format="ubtree")
    assert probe(drafter, None, None, jnp.float32, [1]) == (drafter, [])


def test_taps_stay_inside_the_target():
    groups = alternatives(head("eagle3", taps=(0, 3)), 4)
    assert [change for options in groups for _, change in options] == [{"norm_output": True}]
