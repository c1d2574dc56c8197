"""The fused step against the ordinary one: rows, taps, cache and greedy ids; and what it copies."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from support.fused import check, close, make
from support.toy import tiny_config

from specjax.cache import KVCache
from specjax.draft import Rows
from specjax.pallas_kernels import dispatch, traffic
from specjax.pallas_kernels.decode_step import reference, tpu
from specjax.pallas_kernels.decode_step.tiles import StepTiles
from specjax.pallas_kernels.decode_step.weights import Plan, Weights, pack, product
from specjax.pallas_kernels.tree_attention import cases
from specjax.pallas_kernels.tree_attention.cases import Case
from specjax.pallas_kernels.tree_attention.tpu_request import bounds_of
from specjax.targets import fused, rope

SIMULATED = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
SMALL = functools.partial(StepTiles.rule, most=128)  # contexts are several of these blocks
RUNS = reference.decode_step, functools.partial(tpu.decode_step, interpret=SIMULATED, tiles=SMALL)

CONFIGS = {
    "toy": tiny_config(max_position_embeddings=1024),
    "smollm2": tiny_config(
        hidden_size=576, intermediate_size=1536, num_heads=9, num_kv_heads=3, head_dim=64, tie_word_embeddings=True
    ),
    "qwen3": tiny_config(
        family="qwen3", qk_norm=True, hidden_size=256, intermediate_size=384, num_layers=3, head_dim=128, windows=()
    ),
}
RAGGED = Case((300, 17, 0, 129), (7, 3, 0, 5), 7, page=16, fill=cases.NAN)
DENSE = Case((300, 15), (7, 3), 7, fill=cases.NAN)
ONE = Case((511,), (1,), 1, slots=768, fill=cases.NAN)


def test_interpreted_equals_the_ordinary_step():
    check(RUNS, CONFIGS["toy"], RAGGED)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "case", "dtype", "taps"),
    [
        ("toy", DENSE, "float32", (1,)),
        ("smollm2", ONE, "float32", ()),
        ("smollm2", RAGGED, "bfloat16", (0, 1)),
        ("qwen3", RAGGED, "float32", (0, 1, 2)),
        ("qwen3", DENSE, "bfloat16", (2,)),
        ("qwen3", Case((130,), (20,), 20, page=64), "float32", ()),
    ],
    ids=str,
)
def test_interpreted_equals_the_ordinary_step_everywhere(name, case, dtype, taps):
    check(RUNS, CONFIGS[name], case, dtype, taps)


@pytest.mark.slow
def test_interpreted_int8_equals_its_reference():
    """The same rounded weights on both sides; the model itself is another one than in bfloat16."""
    target, params, rows, cache, committed, live = make(CONFIGS["qwen3"], RAGGED, "bfloat16")
    one, cut = fused.fuse(target, params, int8=True)
    assert cut["fused"].tiles.dtype == jnp.int8
    cos, sin = rope.cos_sin(target.config.rope, target.config.head_dim, rows.positions, 1024)
    stacked = np.stack(cache.k), np.stack(cache.v)
    args = cut["fused"], one.embed(cut, rows.tokens), cos, sin, *stacked, cache.table, committed, rows
    simulated = functools.partial(tpu.decode_step, interpret=SIMULATED, tiles=SMALL)
    want, got = (jax.jit(functools.partial(run, one.plan))(*args) for run in (reference.decode_step, simulated))
    close(got[0][live], want[0][live], "bfloat16")


@pytest.mark.parametrize("int8", [False, True])
def test_products_of_tiles_are_products_with_the_matrices(int8):
    sizes = {"layers": 2, "hidden": 200, "intermediate": 300, "heads": 4, "groups": 2, "dim": 64, "eps": 1e-5}
    plan = Plan.of(dtype="float32", int8=int8, qk_norm=False, **sizes)
    rng = np.random.default_rng(0)
    shapes = {"qkv": (512, 200), "out": (200, 256), "gate": (300, 200), "up": (300, 200), "down": (200, 300)}
    norms = dict.fromkeys(("attention_norm", "mlp_norm"), np.ones(200, np.float32))

    def matrix(size):
        """Whole numbers up to 127 times a power of two for each output: 8 bits hold them exactly."""
        whole = rng.integers(-127, 128, size).astype(np.float32)
        whole[:, 0] = 127
        return whole * 2.0 ** rng.integers(-9, -5, (size[0], 1)).astype(np.float32)

    layers = [{name: matrix(size) for name, size in shapes.items()} for _ in range(2)]
    weights = pack(plan, [layer | norms for layer in layers], np.ones(200, np.float32))
    for name, index in (("qkv", 0), ("out", 1), ("gate_up", 1), ("down", 0)):
        parts = [layers[index][part] for part in (name.split("_") if name == "gate_up" else [name])]
        x = rng.normal(size=(3, parts[0].shape[1])).astype(np.float32)
        got = np.asarray(product(plan, weights, index, name, x))
        np.testing.assert_allclose(got, x @ np.concatenate(parts).T, atol=1e-3)


LLAMA_8B = {"layers": 32, "hidden": 4096, "intermediate": 14336, "heads": 32, "groups": 8, "dim": 128, "eps": 1e-5}
QWEN3_8B = LLAMA_8B | {"layers": 36, "intermediate": 12288}


@pytest.mark.parametrize(("sizes", "qk_norm"), [(LLAMA_8B, False), (QWEN3_8B, True)])
def test_an_8b_models_weights_are_copied_once(sizes, qk_norm):
    plan = Plan.of(dtype="bfloat16", qk_norm=qk_norm, **sizes)
    args, scalars = abstract(plan, batch=2, width=8, slots=4096, committed=(1000, 130))
    moved = traffic.count(functools.partial(tpu.decode_step, plan), *args, scalars=scalars)
    inputs = plan.hidden * (plan.heads + 2 * plan.groups) * plan.dim + plan.heads * plan.dim * plan.hidden
    matrices = plan.layers * (inputs + 3 * plan.hidden * plan.intermediate)
    assert moved.read["tiles"] == 2 * matrices
    # Keys of whole pieces of 256 slots, and the sublanes around the new rows, read and written back.
    slot, around = plan.groups * plan.dim * 2, 2 * 16
    assert moved.read["k_cache"] == plan.layers * slot * (1024 + 256 + around)
    assert moved.written["k_cache"] == moved.written["v_cache"] == plan.layers * slot * around


def abstract(plan, batch, width, slots, committed):
    """Shapes of a call, dense cache, and the values of its scalar operands; every row is live."""
    shape, ints, count = jax.ShapeDtypeStruct, jnp.int32, batch * width
    row = shape((count,), ints)
    fields = dict.fromkeys(("tokens", "request", "node", "positions", "slots"), row)
    valid, starts = shape((count,), jnp.bool_), shape((batch + 1,), ints)
    rows = Rows(**fields, valid=valid, ancestors=shape((count, 1), ints), starts=starts, width=width)
    kind = jnp.dtype(plan.dtype)
    weights = Weights(
        tiles=shape((plan.layers * plan.tiles, plan.columns, plan.rows), plan.tile_dtype),
        scales=None,
        norms=shape((plan.layers, 2, plan.hidden), kind),
        head_norms=shape((plan.layers, 2, plan.dim), kind) if plan.qk_norm else None,
        final_norm=shape((plan.hidden,), kind),
    )
    turn = shape((count, plan.dim // 2), jnp.float32)
    cache = shape((plan.layers, batch, plan.groups, slots, plan.dim), kind)
    args = (weights, shape((count, plan.hidden), kind), turn, turn, cache, cache, None, shape((batch,), ints), rows)
    committed = np.array(committed, np.int32)
    static = tpu.step_of(plan, rows, cache, None)
    scalars = bounds_of(static.shape, jnp.asarray(committed)), committed, np.full(batch, width), np.arange(batch)
    return args, scalars


def test_what_the_kernel_does_not_have_is_declined():
    target, params, rows, cache, committed, _ = make(CONFIGS["toy"], Case((4,), (40,), 40), "float32")
    one, cut = fused.fuse(target, params)
    stacked = KVCache(k=(np.stack(cache.k),), v=(np.stack(cache.v),))
    with pytest.raises(NotImplementedError, match="40 rows of a request, of 32"):
        tpu.decode_step(
            one.plan, cut["fused"], cut["embedding"], None, None, *stacked.k, *stacked.v, None, committed, rows
        )
    with pytest.raises(ValueError, match="does not have this decoder's mlp_bias is true, sliding windows"):
        fused.plan_of(tiny_config(mlp_bias=True, windows=(None, 8)), jnp.float32)


def test_tiles_are_the_matrices_and_waste_little():
    for sizes in (LLAMA_8B, QWEN3_8B):
        plan = Plan.of(dtype="bfloat16", qk_norm=False, **sizes)
        assert plan.rows * plan.columns * 2 == 2**21
    assert dispatch.backends("decode_step", "auto", "tpu") == ("tpu",)
