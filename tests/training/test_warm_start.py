import dataclasses

import jax.numpy as jnp
import numpy as np
from support import toy

from specjax.drafters.layers import layer_params, mlp
from specjax.training.recipe import head_config, make
from specjax.training.warm_start import _through_heads, random, ridge, target_layer

COUNTS = np.arange(toy.VOCAB) + 1


def config(family, **changes):
    return dataclasses.replace(head_config(make({"drafter": family, "steps": 1}), toy.tiny_config(), COUNTS), **changes)


def test_ridge_finds_a_linear_map_and_shrinks_it():
    rng = np.random.default_rng(0)
    want = rng.standard_normal((3, 5))
    x = rng.standard_normal((400, 5))
    np.testing.assert_allclose(ridge(x, x @ want.T, 1e-9), want, atol=1e-6)
    assert np.linalg.norm(ridge(x, x @ want.T, 1.0)) < 0.7 * np.linalg.norm(want)


def test_values_and_outputs_carry_a_map_that_the_heads_have_room_for():
    c = config("eagle3")
    rng = np.random.default_rng(0)
    rank = c.num_kv_heads * c.head_dim
    want = rng.standard_normal((c.hidden_size, rank)) @ rng.standard_normal((rank, c.hidden_size))
    out = _through_heads(c, random(c, toy.tiny()[1], 0), want)
    v = out["layers.0.self_attn.v_proj.weight"].reshape(c.num_kv_heads, c.head_dim, -1)
    v = np.repeat(v, c.num_heads // c.num_kv_heads, axis=0).reshape(c.num_heads * c.head_dim, -1)
    made = out["layers.0.self_attn.o_proj.weight"] @ v
    np.testing.assert_allclose(made[:, : c.hidden_size], want, atol=1e-8)
    assert not made[:, c.hidden_size :].any()


def test_a_row_attends_to_itself():
    c = config("eagle3")
    out = _through_heads(c, {}, np.eye(c.hidden_size))
    rng = np.random.default_rng(1)
    x = rng.standard_normal((40, 2 * c.hidden_size))
    x[:, : c.hidden_size] *= np.sqrt(c.hidden_size) / np.linalg.norm(x[:, : c.hidden_size], axis=1, keepdims=True)
    q, k = (x @ out[f"layers.0.self_attn.{n}_proj.weight"].T for n in "qk")
    scores = q[:, : c.head_dim] @ k[:, : c.head_dim].T / np.sqrt(c.head_dim)
    own, others = np.diag(scores), scores[~np.eye(40, dtype=bool)]
    assert own.mean() > 5 and abs(others.mean()) < 1


def test_a_layer_of_the_target_is_taken_over():
    params = toy.tiny()[1]
    c = config("mtp")
    tensors = random(c, params, 0) | target_layer(c, params, 1, 0)
    assert len(target_layer(c, params, 1, 0)) == 9
    layer = layer_params(c, tensors, "layers.0", jnp.float32)
    theirs = params["layers"][1]
    np.testing.assert_array_equal(layer["qkv"]["weight"], theirs["attention"]["qkv"]["weight"])
    np.testing.assert_array_equal(layer["gate_up"]["weight"], theirs["mlp"]["gate_up"]["weight"])


def test_a_narrower_layer_keeps_the_strong_neurons():
    target, params = toy.tiny()
    weak = np.arange(0, target.config.intermediate_size, 2)
    last = params["layers"][1]
    mlp_of = last["mlp"] | {"down": {"weight": last["mlp"]["down"]["weight"].at[:, weak].set(0)}}
    params = params | {"layers": params["layers"] | {1: last | {"mlp": mlp_of}}}
    c = config("mtp", intermediate_size=target.config.intermediate_size // 2)
    narrow = layer_params(c, random(c, params, 0) | target_layer(c, params, 1, 0), "layers.0", jnp.float32)
    wide = config("mtp")
    whole = layer_params(wide, random(wide, params, 0) | target_layer(wide, params, 1, 0), "layers.0", jnp.float32)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 4, c.hidden_size)), jnp.float32)
    np.testing.assert_allclose(mlp(c, narrow, x), mlp(wide, whole, x), rtol=1e-4, atol=1e-4)
