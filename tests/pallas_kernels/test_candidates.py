"""What a kernel may choose changes its speed alone: every candidate, interpreted, equals the reference."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu
from support.fused import check
from support.toy import tiny_config

from specjax.pallas_kernels import aot_decode
from specjax.pallas_kernels.decode_step import tpu as step_tpu
from specjax.pallas_kernels.decode_step import triton as step_triton
from specjax.pallas_kernels.decode_step.cut import Cut
from specjax.pallas_kernels.decode_step.tiles import ProductSizes, ProductTiles, StepSizes, StepTiles
from specjax.pallas_kernels.decode_step.weights import Plan
from specjax.pallas_kernels.tree_attention import cases, mosaic_gpu, reference, tpu, triton
from specjax.pallas_kernels.tree_attention.cases import Case
from specjax.pallas_kernels.tree_attention.tiles import TPU_BYTES, MosaicTiles, Sizes, TpuTiles, TritonTiles

STATIC = ("scale", "window", "softcap")
REFERENCE = jax.jit(reference.tree_attention, static_argnames=STATIC)
RACES = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
GPU_RACES = plgpu.InterpretGPUParams(detect_races=True, uninitialized_memory="nan")
SPEED_ALONE = ("warps", "stages")  # which Triton's interpreter does not know

PAGED = Case((300, 17), (3, 2), 3, heads=4, groups=2, dim=48, page=16, slots=512, fill=cases.NAN)
WINDOWED = Case((500, 130), (5, 4), 5, heads=4, groups=2, dim=64, page=256, window=200, fill=cases.NAN, seed=1)
GROUPS = Case((700, 30), (2, 1), 2, heads=6, groups=6, dim=64, slots=1024, dtype="bfloat16", fill=cases.NAN, seed=2)
LARGE_PAGES = dataclasses.replace(GROUPS, page=512)
# Heads of which a kernel has two parts, and rows for two programs.
WIDE = Case((140,), (20,), 20, heads=3, groups=1, dim=80, page=64, fill=cases.NAN, seed=3)


def told_apart(kind, sizes, ignoring=()):
    """The candidates, one of those that differ in `ignoring` alone."""
    rule = {name: getattr(kind.rule(sizes), name) for name in ignoring}
    return list(dict.fromkeys(dataclasses.replace(tiles, **rule) for tiles in kind.candidates(sizes)))


def equal(kernel, case, tiles, **options):
    inputs = cases.build(case)
    run = jax.jit(functools.partial(kernel, tiles=lambda sizes: tiles, **options, **case.options))
    got = np.asarray(run(*inputs.args), np.float32)[inputs.live]
    want = np.asarray(REFERENCE(*inputs.args, **case.options), np.float32)[inputs.live]
    assert np.isfinite(got).all(), tiles
    np.testing.assert_allclose(got, want, atol=cases.TOLERANCE[case.dtype], rtol=0, err_msg=str(tiles))


@pytest.mark.parametrize(
    ("kernel", "tiles", "options"),
    [
        (triton, TritonTiles(queries=16, block=32, part=32, splits=3, warps=4), {"interpret": True}),
        (tpu, TpuTiles(block=256, piece=16, unroll=1, ahead=0), {"interpret": RACES}),
        (mosaic_gpu, MosaicTiles(block=128, stages=3, splits=2), {"interpret": GPU_RACES, "capability": 90}),
    ],
    ids=["triton", "tpu", "mosaic_gpu"],
)
def test_tiles_far_from_the_rule(kernel, tiles, options):
    case = dataclasses.replace(PAGED, dtype="bfloat16")
    sizes = dataclasses.replace(case.sizes, capability=options.get("capability"))
    assert tiles.problem(sizes) is None
    assert tiles != tiles.rule(sizes)
    equal(kernel.tree_attention, case, tiles, **options)


@pytest.mark.slow
@pytest.mark.parametrize("case", [PAGED, WINDOWED, WIDE], ids=lambda case: case.name)
def test_triton(case):
    found = told_apart(TritonTiles, case.sizes, SPEED_ALONE)
    assert len({(t.queries, t.block, t.part, t.splits) for t in found}) >= 6
    for tiles in found:
        equal(triton.tree_attention, case, tiles, interpret=True)


@pytest.mark.slow
@pytest.mark.parametrize("case", [PAGED, WINDOWED, GROUPS, LARGE_PAGES], ids=lambda case: case.name)
def test_tpu(case):
    found = told_apart(TpuTiles, case.sizes)
    assert len(found) >= 4
    for tiles in found:
        equal(tpu.tree_attention, case, tiles, interpret=RACES)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("case", [PAGED, WINDOWED], ids=lambda case: case.name)
def test_mosaic_gpu(case, capability):
    case = dataclasses.replace(case, dtype="bfloat16")
    found = told_apart(MosaicTiles, dataclasses.replace(case.sizes, capability=capability))
    assert {tiles.block for tiles in found} == {64, 128}
    for tiles in found:
        equal(mosaic_gpu.tree_attention, case, tiles, interpret=GPU_RACES, capability=capability)


STEP = tiny_config(hidden_size=160, intermediate_size=272, head_dim=32, max_position_embeddings=1024)
NORMED = tiny_config(family="qwen3", qk_norm=True, hidden_size=192, intermediate_size=320, head_dim=64, windows=())
ROWS = Case((300, 17), (3, 2), 3, page=16, fill=cases.NAN)


def one_after_another(kind, wanted=lambda sizes: True, ignoring=()):
    """Functions from sizes to tiles, as many as there are candidates for the sizes that are `wanted`; else the rule."""
    count, which = 1, 0
    while which < count:

        def tiles(sizes, which=which):
            nonlocal count
            if not wanted(sizes):
                return kind.rule(sizes)
            found = told_apart(kind, sizes, ignoring)
            count = len(found)
            return found[which]

        yield tiles
        which += 1
    assert count > 1


def narrow(sizes):
    return ProductTiles(piece=sizes.half if sizes.normed else 16, inputs=16, warps=4, stages=2)


def test_products_of_narrow_pieces():
    check((functools.partial(step_triton.decode_step, tiles=narrow, interpret=True),), STEP, ROWS, "float32", (1,))


@pytest.mark.slow
@pytest.mark.parametrize("matrix", ["qkv", "gate_up", "down"])
@pytest.mark.parametrize("config", [STEP, NORMED], ids=["llama", "qwen3"])
def test_products(config, matrix):
    for tiles in one_after_another(ProductTiles, lambda sizes: sizes.matrix == matrix, SPEED_ALONE):
        check((functools.partial(step_triton.decode_step, tiles=tiles, interpret=True),), config, ROWS, "float32", (1,))


def banked(banks, sizes):
    return dataclasses.replace(StepTiles.rule(sizes, most=128), banks=banks)


@pytest.mark.parametrize("banks", [2, pytest.param(5, marks=pytest.mark.slow)])
def test_a_ring_of_few_banks(banks):
    """Fewer than a layer has tiles, so that every bank is filled again."""
    run = functools.partial(step_tpu.decode_step, interpret=RACES, tiles=functools.partial(banked, banks))
    check((run,), tiny_config(max_position_embeddings=1024), ROWS, "float32")


def test_a_step_of_16_groups_is_traced():
    plan = dataclasses.replace(LLAMA_8B, groups=16)
    jax.eval_shape(functools.partial(step_tpu.decode_step, plan), *aot_decode.shapes(plan, 1, 8, 2048, None))


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "dim"), [(16, 128), (9, 64)])
def test_steps_of_more_groups_than_stand_side_by_side(heads, dim):
    """In a loop where heads are whole lanes, else one after another in the code."""
    config = tiny_config(
        num_heads=heads, num_kv_heads=heads, head_dim=dim, hidden_size=128, intermediate_size=128, num_layers=1,
        windows=(), max_position_embeddings=1024,
    )  # fmt: skip
    seen = []

    def tiles(sizes):
        seen.append(StepTiles.rule(sizes, most=128))
        return seen[-1]

    check((functools.partial(step_tpu.decode_step, interpret=RACES, tiles=tiles),), config, ROWS, "float32")
    assert {t.unroll for t in seen} == {8 if dim == 128 else 9}


@pytest.mark.slow
def test_steps():
    """All candidates for a step's attention and ring."""
    for tiles in one_after_another(StepTiles):
        run = functools.partial(step_tpu.decode_step, interpret=RACES, tiles=tiles)
        check((run,), tiny_config(max_position_embeddings=1024), ROWS, "float32")


LLAMA_8B = Plan.of(
    dtype="bfloat16", layers=32, hidden=4096, intermediate=14336, heads=32, groups=8, dim=128, eps=1e-5, qk_norm=False
)


def test_every_candidate_is_allowed_and_the_rule_is_the_first():
    plan = LLAMA_8B
    shapes = [(TritonTiles, c.sizes) for c in cases.sweep()] + [(TpuTiles, c.sizes) for c in cases.sweep()]
    shapes += [(MosaicTiles, dataclasses.replace(GROUPS.sizes, capability=c)) for c in (90, 100)]
    shapes += [(ProductTiles, ProductSizes(plan, m, n, v)) for m in plan.matrices for n in (1, 128) for v in (0, 1)]
    shapes += [(Cut, plan.sizes)]
    for kind, sizes in shapes:
        found = list(kind.candidates(sizes))
        assert found[0] == kind.rule(sizes)
        assert len(set(found)) == len(found) > 1
        assert [tiles.problem(sizes) for tiles in found] == [None] * len(found)


def test_rules_take_less_where_vmem_has_no_room():
    wide = Sizes(1, 128, 64, 8, 256, 128, 64, 128, jnp.dtype("bfloat16"))
    assert dataclasses.replace(TpuTiles.rule(wide), block=512).vmem_bytes(wide) > TPU_BYTES
    assert TpuTiles.rule(wide).block == 256
    assert TpuTiles.rule(wide).problem(wide) is None
    for batch, banks in ((4, 12), (8, 6), (16, 4)):
        step = StepSizes(LLAMA_8B, Sizes(batch, 16, 32, 8, 128, 16, 2048, 1, jnp.dtype("bfloat16")))
        tiles = StepTiles.rule(step)
        assert tiles.banks == banks
        assert (tiles.problem(step) is None) == (batch < 16)
