"""Frequency tables against transformers' own, kind by kind (tests/parity/goldens/rope.json)."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.targets.rope import RopeConfig, cos_sin, inv_freq

CASES = json.loads((Path(__file__).parents[1] / "parity" / "goldens" / "rope.json").read_text())


def read(case) -> RopeConfig:
    config = {"rope_parameters": case["rope_parameters"], "max_position_embeddings": case["max_position_embeddings"]}
    rope, problems = RopeConfig.from_hf(config)
    assert problems == []
    return rope


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['name']}-{case['seq_len']}")
def test_frequencies_match_transformers(case):
    got, scale = inv_freq(read(case), case["head_dim"], case["seq_len"])
    assert got.dtype == np.float32 and got.shape == (case["head_dim"] // 2,)
    np.testing.assert_allclose(got, np.array(case["inv_freq"]), rtol=5e-7, atol=0)
    assert scale == pytest.approx(case["attention_scaling"], rel=1e-12)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['name']}-{case['seq_len']}")
def test_both_spellings_of_a_configuration_agree(case):
    scaling = dict(case["rope_parameters"])
    old = {"rope_theta": scaling.pop("rope_theta"), "max_position_embeddings": case["max_position_embeddings"]}
    old["rope_scaling"] = None if scaling["rope_type"] == "default" else scaling
    rope = read(case)
    assert RopeConfig.from_hf(old) == (rope, [])
    legacy = dict(scaling)
    legacy["type"] = legacy.pop("rope_type")
    assert RopeConfig.from_hf(old | {"rope_scaling": legacy}) == (rope, [])
    assert RopeConfig.from_hf(rope.to_hf() | {"max_position_embeddings": case["max_position_embeddings"]}) == (rope, [])


@pytest.mark.parametrize("name", ["default-64", "yarn-mscale"])
def test_tables_are_cos_and_sin_of_position_times_frequency(name):
    case = next(case for case in CASES if case["name"] == name)
    positions = np.array([[0, 1, 7], [100, 1000, 4095]])
    cos, sin = jax.jit(lambda p: cos_sin(read(case), case["head_dim"], p, 8192))(jnp.asarray(positions))
    angles = positions[..., None] * np.array(case["inv_freq"])
    assert cos.shape == sin.shape == (2, 3, case["head_dim"] // 2) and cos.dtype == jnp.float32
    # A float32 angle of 4000 radians is known to about 2e-4.
    np.testing.assert_allclose(cos, np.cos(angles) * case["attention_scaling"], atol=5e-4)
    np.testing.assert_allclose(sin, np.sin(angles) * case["attention_scaling"], atol=5e-4)
    np.testing.assert_array_equal(cos[0, 0], np.full(cos.shape[-1], np.float32(case["attention_scaling"])))


DYNAMIC = RopeConfig(kind="dynamic", factor=4.0, original_max_position_embeddings=512)


def test_dynamic_is_default_up_to_the_original_length_and_moves_beyond():
    positions = jnp.arange(512)
    plain = cos_sin(RopeConfig(), 64, positions, 512)
    for longest in (1, 512):
        for got, want in zip(cos_sin(DYNAMIC, 64, positions, longest), plain, strict=True):
            np.testing.assert_array_equal(got, want)
    assert float(jnp.abs(cos_sin(DYNAMIC, 64, positions, 1024)[0] - plain[0]).max()) > 0.1


@pytest.mark.parametrize("length", [100, 513, 4096])
def test_dynamic_takes_a_traced_length_instead(length):
    positions = jnp.arange(64)
    traced = jax.jit(lambda n: cos_sin(DYNAMIC, 64, positions, 512, seq_len=n))(jnp.int32(length))
    for got, want in zip(traced, cos_sin(DYNAMIC, 64, positions, length), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-5)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rope_scaling": {"rope_type": "foo"}}, "rope type 'foo' is not known"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "rope type 'longrope' is not known"),
        ({"rope_scaling": {"type": "linear"}}, "'linear' needs 'factor'"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor must be at least 1"),
        ({"rope_scaling": {"type": "linear", "factor": "4"}}, "factor must be a number"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 3.0}}, "does not read 'beta_fast'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "mystery": 3.0}}, "'mystery' is not known"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}, "partial_rotary_factor 0.25"),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}, "rope_theta is 10000.0 beside 1000000.0"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": {"factor": 4.0}},
            "disagree on 'factor'",
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4.0, "high_freq_factor": 1.0}},
            "must exceed low_freq_factor",
        ),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 64}},
            "scales against max_position_embeddings",
        ),
    ],
)
def test_what_cannot_be_honoured_is_named(config, message):
    _, problems = RopeConfig.from_hf({"max_position_embeddings": 128} | config)
    assert any(message in problem for problem in problems), problems
