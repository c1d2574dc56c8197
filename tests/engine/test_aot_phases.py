"""The parts of a round for an absent chip: which there are, that they are a round's, and how their times add up."""

import dataclasses

import jax
import numpy as np
import pytest
from support import toy

from specjax.cli import profile_absent
from specjax.engine import aot as engine_aot
from specjax.engine import aot_phases
from specjax.pallas_kernels import aot, aot_gpu, traffic

V6E, H100, MI300X = aot.CHIPS["tpu-v6e"], aot_gpu.CHIPS["h100"], aot_gpu.CHIPS["mi300x"]
BLOCKS = ["qkv", "attention", "out", "gate_up", "down"]


def toy_case(drafter="ngram", **changed):
    drafts = 3 if drafter == "ngram" else 0
    given = {"batch": 2, "context": 64, "dtype": "float32"} | changed
    return engine_aot.Case("toy", toy.tiny_config(), drafter, drafts, **given)


@pytest.mark.parametrize("drafter", ["none", "ngram"])
def test_phases_have_the_shapes_of_a_round(drafter):
    """Of one layer; what they take and make is abstract."""
    case = toy_case(drafter)
    drafts, found = case.drafts, {part.phase: part for part in aot_phases.phases(case)}
    assert list(found) == [*["draft"] * (drafts > 0), "qkv", "output", "mlp", "head", "accept", "commit"]
    assert [part.times for part in found.values()] == [*[1] * (drafts > 0), 2, 2, 2, 1, 1, 1]
    assert not any(part.longer for part in found.values())
    made = {name: jax.eval_shape(part.job.function, *part.job.args) for name, part in found.items()}
    assert made["mlp"][1].shape == (2 * (drafts + 1), 32)
    assert made["head"][1].shape == (2 * (drafts + 1), toy.VOCAB)
    assert made["commit"][1].tokens.shape == (2, drafts + 1)
    assert list(found["mlp"].job.args[0]["target"]["layers"]) == [0]


def test_phases_of_layers_are_timed_with_two_and_four_of_them():
    timed = {part.phase: part for part in aot_phases.phases(toy_case(), timed=True)}
    for name in aot_phases.OF_LAYERS:
        layers = {n: list(job.args[0]["target"]["layers"]) for n, job in timed[name].longer.items()}
        assert layers == {2: [0, 1], 4: [0, 1, 2, 3]}
    assert not timed["head"].longer and not timed["commit"].longer


def test_parts_by_chip_and_op():
    """AMD has kernels alone; a fused step is one kernel on a TPU, five a layer on a GPU, and there the whole too."""
    case = dataclasses.replace(toy_case(), model=engine_aot.MODELS["Qwen3-8B"], dtype="bfloat16")

    def names(chip, case, op="spec_step"):
        return [(part.phase, part.stage) for part in aot_phases.parts(case, chip, 512, op)]

    others = [(name, None) for name in ("draft", "head", "accept", "commit")]
    assert names(MI300X, case) == names(H100, case, "tree_attention") == [("attention", None)]
    assert len(names(V6E, case)) == len(names(H100, case)) == 8
    fused = dataclasses.replace(case, fused=True)
    blocks = [("layers", name) for name in BLOCKS]
    assert names(MI300X, fused) == blocks
    assert names(H100, fused, "decode_step") == [("layers", None), *blocks]
    assert names(H100, fused) == [("layers", None), *blocks, *others]
    assert names(V6E, fused) == [("layers", None), *others]
    assert {x.times for x in aot_phases.parts(fused, H100, 512) if x.stage} == {36}


def test_fused_blocks_are_those_of_the_whole_step():
    """Rows of two requests, weights once in all; together the blocks need what the whole step is said to need."""
    case = dataclasses.replace(toy_case(), model=engine_aot.MODELS["Llama-3.1-8B"], dtype="bfloat16", fused=True)
    whole, *blocks = aot_phases.parts(case, H100, 512, "decode_step")
    assert whole.job.needed == sum(part.job.needed * part.times for part in blocks)
    with aot_gpu.traced_for(H100):
        for part in blocks:
            out = jax.tree.leaves(jax.eval_shape(part.job.function, *part.job.args))[0]
            assert out.shape[0] == (2 if part.stage == "attention" else 8)
            if part.stage in ("out", "down"):
                moved = traffic.count(part.job.function, *part.job.args, scalars=()).total
                assert part.job.needed < moved < 2.5 * part.job.needed


def test_a_fused_step_is_refused_where_the_decoder_has_what_it_has_not():
    model = dataclasses.replace(engine_aot.MODELS["Qwen3-8B"], attention_bias=True)
    with pytest.raises(ValueError, match="attention_bias"):
        aot_phases.parts(dataclasses.replace(toy_case(), model=model, fused=True), H100, 512)


def test_times_of_all_layers_lie_on_the_line(monkeypatch, tmp_path):
    """10 µs beside the layers and 30 for each: 36 of them are 1090, whatever the program of one is said to take."""
    case = dataclasses.replace(toy_case(), model=engine_aot.MODELS["Qwen3-8B"], dtype="bfloat16")
    part = next(part for part in aot_phases.phases(case, timed=True) if part.phase == "mlp")

    def estimate(job, chip):
        return 10e-6 + 30e-6 * len(job.args[0]["target"]["layers"])

    monkeypatch.setattr(aot, "estimate", estimate)
    monkeypatch.setattr(
        aot, "run", lambda job, chip, folder: {"compiler_us": 5000.0, "bundles": 70, "roofline_us": 0.0}
    )
    row = profile_absent.of_all(part, profile_absent.on_a_tpu(part, V6E, tmp_path))
    assert row["compiler_us"] == pytest.approx(1090)
    assert (row["bundles"], "roofline_us" in row) == (70, False)

    def unknown(job, chip):
        raise ValueError("the compiler gives no estimate")

    monkeypatch.setattr(aot, "estimate", unknown)
    assert "compiler_us" not in profile_absent.on_a_tpu(part, V6E, tmp_path)


def test_passes_are_cut_and_state_what_attention_costs():
    case = dataclasses.replace(toy_case(), model=engine_aot.MODELS["Qwen3-8B"], dtype="bfloat16")
    passes = aot_phases.cut_passes(case)
    stated = np.array([passes[n][1] for n in (2, 4)])
    assert stated[1] == 2 * stated[0] > 0
    assert [len(passes[n][0].args[0]["target"]["layers"]) for n in (2, 4)] == [2, 4]
