"""Phases of a round: each does its own part of every layer, and all of them are timed."""

import functools

import jax
import jax.numpy as jnp
import pytest
from support import toy

from specjax.draft import Draft, chain, pack
from specjax.drafters.ngram import NGram
from specjax.engine import aot as engine_aot
from specjax.engine import profile
from specjax.targets import phases
from specjax.targets.config import DecoderConfig

ROWS, SLOTS = 4, 256


def case():
    """A tiny target, rows of one request with ten committed slots, and an input for each phase."""
    target, params = toy.tiny()
    c = target.config
    draft: Draft = chain(jnp.zeros((1, ROWS), jnp.int32), jnp.full((1,), ROWS))
    committed = jnp.full((1,), 10, jnp.int32)
    rows = pack(draft, committed, ROWS, ROWS, jnp.ones((1,), bool))
    x = jnp.ones((ROWS, c.hidden_size))
    heads = tuple(jnp.ones((ROWS, n, c.head_dim)) for n in (c.num_heads, c.num_kv_heads, c.num_kv_heads))
    functions = {
        "qkv": lambda params: phases.qkv(target, params, x, rows),
        "attention": lambda params: phases.attention(
            target, params, heads, target.init_cache(1, SLOTS, jnp.float32), committed, rows
        ),
        "output": lambda params: phases.output(target, params, x, heads[0].reshape(ROWS, -1)),
        "mlp": lambda params: phases.mlp(target, params, x),
    }
    return params, functions


OF = {
    "qkv": (("attention_norm",), ("attention", "qkv")),
    "output": (("attention", "out"),),
    "mlp": (("mlp_norm",), ("mlp", "gate_up"), ("mlp", "down")),
}


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("path", sum(OF.values(), ()), ids="/".join)
def test_a_phase_uses_its_own_weights_of_every_layer(layer, path):
    params, functions = case()
    params = jax.tree.map(lambda x: x, params)  # a copy of the dictionaries
    part = functools.reduce(lambda tree, name: tree[name], path, params["layers"][layer])
    part["weight"] = jnp.full_like(part["weight"], jnp.nan)
    touched = {name for name, run in functions.items() if jnp.isnan(jax.tree.leaves(run(params))[0]).any()}
    assert touched == {name for name, paths in OF.items() if path in paths}


def test_attention_writes_and_reads_every_layer():
    params, functions = case()
    y, cache = functions["attention"](params)
    assert jnp.isfinite(y).all()
    for pages in (*cache.k, *cache.v):
        assert (pages[0, :, 10 : 10 + ROWS] == 1).all()
        assert (pages[0, :, :10] == 0).all()


@pytest.fixture(scope="module")
def engine():
    return toy.engine(NGram(num_speculative_tokens=3), (), context=64, batch=2, warmup=False)


def test_every_phase_is_timed_in_the_order_of_a_round(engine, tmp_path):
    seen = []
    found = profile.measure(engine, 32, 2, lambda what, done, total: seen.append((what, done, total)), trace=tmp_path)
    names = ["draft", "qkv", "attention", "output", "mlp", "head", "accept", "commit", profile.LAUNCH, *profile.WHOLE]
    assert list(found) == names
    assert [what for what, _, _ in seen] == [*names, ""]
    assert seen[-1] == ("", len(names), len(names))
    for timed in found.values():
        assert 0 < timed.least <= timed.seconds <= timed.most
    (trace,) = tmp_path.rglob("perfetto_trace.json.gz")
    assert trace.stat().st_size > 0


def test_one_phase_alone(engine):
    assert list(profile.measure(engine, 16, 1, lambda *_: None, only=("head", "launch"))) == ["head", "launch"]


def test_refusals(engine):
    with pytest.raises(ValueError, match="--context must be 1 to 60"):
        profile.measure(engine, 61, 1, lambda *_: None)
    with pytest.raises(ValueError, match="--repeats must be at least 1"):
        profile.measure(engine, 16, 0, lambda *_: None)


def test_random_weights_have_no_learned_drafter(tmp_path):
    run = toy.run_config(drafter={"kind": "eagle3", "model": str(tmp_path)})
    with pytest.raises(ValueError, match="random weights are of the target alone"):
        profile.random_engine(toy.tiny_config(), run)


def test_whole_rounds_fit_the_chips_layer_by_layer_and_fused():
    from specjax.pallas_kernels import aot, aot_gpu

    both = [(name, fused) for name in ("Llama-3.1-8B", "Qwen3-8B") for fused in (False, True)]
    for chip in (aot.CHIPS["tpu-v6e"], aot_gpu.CHIPS["h100"]):
        assert [(case.name, case.fused) for case in engine_aot.cases(chip)] == both
    assert {case.name for case in engine_aot.cases(aot.CHIPS["tpu-v5e"])} == {"Llama-3.2-3B"}
    apart, fused = (engine_aot.job(case) for case in engine_aot.cases(aot_gpu.CHIPS["h100"])[:2])
    assert [job.name for job in (apart, fused)] == [
        f"round Llama-3.1-8B, 8 rows, {how}" for how in ("layer by layer", "fused")
    ]
    matrices = 32 * (4096 * 128 * (2 * 32 + 2 * 8) + 3 * 4096 * 14336) + 4096 * 128256
    norms = 4096 * (2 * 32 + 1)
    assert apart.needed == 2 * (matrices + norms)
    assert fused.needed == apart.needed + 2 * 4096  # the last norm, among the tiles too


def test_known_shapes_are_decoders():
    from specjax.costmodel.shapes import TARGETS
    from specjax.engine.pricing import model_shape

    for name, shape in TARGETS.items():
        model = engine_aot.model_of(shape)
        assert isinstance(model, DecoderConfig)
        assert model_shape(name, model) == shape
    assert engine_aot.model_of(TARGETS["llama-3.1-8b"]).rope.kind == "llama3"
    assert engine_aot.model_of(TARGETS["qwen3-32b"]).qk_norm
