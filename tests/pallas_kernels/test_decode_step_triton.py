"""The fused step's Triton blocks, interpreted as plain JAX, against the ordinary step; and what they load."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.fused import check, make
from support.toy import tiny_config

from specjax.pallas_kernels import aot_decode, aot_decode_gpu, dispatch, traffic
from specjax.pallas_kernels.decode_step import triton
from specjax.pallas_kernels.decode_step.weights import Plan
from specjax.pallas_kernels.tree_attention import cases
from specjax.pallas_kernels.tree_attention.cases import Case
from specjax.targets import fused, rope

RUNS = (functools.partial(triton.decode_step, interpret=True),)
CONFIGS = {
    # Inputs are no whole turns of the products' loops, outputs no whole pieces.
    "llama": tiny_config(hidden_size=160, intermediate_size=272, head_dim=32, max_position_embeddings=1024),
    "odd heads": tiny_config(hidden_size=96, head_dim=80, max_position_embeddings=1024),
    "qwen3": tiny_config(family="qwen3", qk_norm=True, hidden_size=192, intermediate_size=320, head_dim=64, windows=()),
    "smollm2": tiny_config(
        hidden_size=576, intermediate_size=1536, num_heads=9, num_kv_heads=3, head_dim=64, tie_word_embeddings=True
    ),
}
PAGED = Case((300, 17, 0, 129), (7, 3, 0, 5), 7, page=16, fill=cases.NAN)
DENSE = Case((300, 15), (7, 3), 7, fill=cases.NAN)
ONE = Case((511,), (1,), 1, slots=768, fill=cases.NAN)
WIDE = Case((130, 40), (48, 40), 48, page=64)


@pytest.mark.parametrize(
    ("name", "case", "dtype", "taps"),
    [
        ("llama", PAGED, "float32", (0, 1)),
        ("qwen3", DENSE, "bfloat16", (0, 2)),
        ("qwen3", ONE, "float32", ()),
    ],
    ids=str,
)
def test_interpreted_equals_the_ordinary_step(name, case, dtype, taps):
    check(RUNS, CONFIGS[name], case, dtype, taps)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "case", "dtype", "taps"),
    [
        ("llama", DENSE, "bfloat16", (1,)),
        ("llama", WIDE, "float32", (2,)),
        ("odd heads", PAGED, "float32", (0, 1)),
        ("odd heads", ONE, "bfloat16", ()),
        ("qwen3", PAGED, "float32", (0, 1, 2)),
        ("qwen3", WIDE, "bfloat16", ()),
        ("smollm2", PAGED, "bfloat16", (0, 1)),
        ("smollm2", dataclasses.replace(DENSE, chain=True), "float32", (1,)),
    ],
    ids=str,
)
def test_interpreted_equals_the_ordinary_step_everywhere(name, case, dtype, taps):
    check(RUNS, CONFIGS[name], case, dtype, taps)


def arguments(name, case, dtype="float32") -> tuple[Plan, list[Any], np.ndarray]:
    """The plan and the other arguments of the op for a case, and its live rows."""
    target, params, rows, cache, committed, live = make(CONFIGS[name], case, dtype)
    one, cut = fused.fuse(target, params)
    cos, sin = rope.cos_sin(target.config.rope, target.config.head_dim, rows.positions, 1024)
    stacked = np.stack(cache.k), np.stack(cache.v)
    x = one.embed(cut, rows.tokens)
    return one.plan, [cut["fused"], x, cos, sin, *stacked, cache.table, committed, rows], live


@pytest.mark.parametrize("case", [PAGED, Case((40,), (3,), 5, page=16, fill=cases.NAN)], ids=["batch", "one request"])
def test_padding_rows_reach_no_other(case):
    """NaN in them: live rows are the same to the bit, and no slot but theirs is written."""
    plan, args, live = arguments("llama", case)
    assert not live.all()
    run = jax.jit(functools.partial(triton.decode_step, plan, interpret=True))
    filled = [jnp.where(live[:, None], args[1], fill) for fill in (0, jnp.nan)]
    want, got = (run(args[0], x, *args[2:]) for x in filled)
    np.testing.assert_array_equal(got[0][live], want[0][live])
    for cache, expected in zip(got[2:], want[2:], strict=True):
        np.testing.assert_array_equal(cache, expected)


@pytest.mark.parametrize("model", ["Llama-3.1-8B", "Qwen3-8B"])
def test_an_8b_models_weights_are_loaded_once(model):
    """Each block, whatever the number of rows; rows themselves are loaded by every program, from a cache."""
    plan = Plan.of(dtype="bfloat16", **aot_decode.MODELS[model])
    for job in aot_decode_gpu.blocks(plan, 1, 8, 1024, "cuda").values():
        moved = traffic.count(job.function, *job.args, scalars=())
        assert moved.read["tiles"] == job.needed
    layer = sum(job.needed for job in aot_decode_gpu.blocks(plan, 1, 128, 1024, "rocm").values())
    inner = 14336 if model == "Llama-3.1-8B" else 12288
    assert layer == 2 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * inner)


def test_programs_fill_a_gpu_and_lines_where_they_can():
    plan = Plan.of(dtype="bfloat16", **aot_decode.MODELS["Llama-3.1-8B"])
    jobs = aot_decode_gpu.blocks(plan, 1, 8, 1024, "cuda")
    calls = [next(traffic.kernels(job.function, *job.args)) for job in jobs.values()]
    assert [call.params["grid_mapping"].grid for call in calls] == [(96,), (128,), (224,), (128,)]


def test_what_the_blocks_do_not_have_is_declined():
    plan, args, _ = arguments("llama", DENSE)
    many: Any = [*args[:-1], dataclasses.replace(args[-1], tokens=jnp.zeros((129,), jnp.int32))]
    with pytest.raises(NotImplementedError, match="129 rows, of 128"):
        triton.decode_step(plan, *many)
    other: Any = [args[0], args[1].astype("bfloat16"), *args[2:]]
    with pytest.raises(NotImplementedError, match="bfloat16 and float32 in a plan for float32"):
        triton.decode_step(plan, *other)
    with pytest.raises(NotImplementedError, match="heads of width 24"):
        triton.decode_step(dataclasses.replace(plan, dim=24), *args)


def test_gpus_take_the_blocks_and_nothing_takes_them_unasked():
    assert (
        dispatch.backends("decode_step", "auto", "gpu")
        == dispatch.backends("decode_step", "auto", "rocm")
        == ("triton",)
    )
    assert dispatch.backends("decode_step", "auto", "cpu") == ()
