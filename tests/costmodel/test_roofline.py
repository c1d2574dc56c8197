"""Sizes against published counts, and round times against figures worked out by hand."""

import pytest

from specjax.costmodel import menu, roofline
from specjax.costmodel.facts import find
from specjax.costmodel.priors import PRIORS
from specjax.costmodel.roofline import Setup
from specjax.costmodel.shapes import DRAFTERS, TARGETS, ModelShape, target
from specjax.draft import DraftShape

LLAMA = TARGETS["llama-3.1-8b"]
H100 = Setup(find("h100"), 1, LLAMA, "bfloat16")


@pytest.mark.parametrize(
    ("name", "billions"),
    [("smollm2-135m", 0.1345), ("llama-3.1-8b", 8.03), ("qwen3-8b", 8.19), ("qwen3-32b", 32.8), ("dense-27b", 26.7)],
)
def test_parameters_are_the_published_ones(name, billions):
    assert TARGETS[name].parameters == pytest.approx(billions * 1e9, rel=0.005)


def test_names():
    assert target("meta-llama/Llama-3.1-8B-Instruct") is LLAMA
    assert target("Qwen/Qwen3-32B") is TARGETS["qwen3-32b"]
    assert target("Qwen/Qwen4-8B") is None


def test_shape_of_a_config_json():
    config = {
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
    }
    assert ModelShape.from_config("llama-3.1-8b", config) == LLAMA


def test_a_plain_step_reads_the_weights_and_the_cache():
    matrices = LLAMA.parameters - LLAMA.head_parameters  # the embedding is not read
    cache = 4 * 1000 * LLAMA.kv_bytes("bfloat16")
    logits = 3 * 4 * 4 * 128256
    ops = 32 * 8 * 2e-6
    assert LLAMA.kv_bytes("bfloat16") == 131072
    assert roofline.verify(H100, 4, 4, 1000) == pytest.approx((2 * matrices + cache + logits) / 3.35e12 + ops)


def test_many_rows_are_bound_by_arithmetic():
    per_row = (roofline.verify(H100, 512, 8192, 512) - roofline.verify(H100, 512, 4096, 512)) / 4096
    matrices = LLAMA.parameters - LLAMA.head_parameters
    logits = 3 * 4 * 128256 / 3.35e12
    assert per_row == pytest.approx(2 * matrices / 989.4e12 + logits, rel=0.01)


def test_two_devices_share_the_bytes_and_pay_for_talking():
    two = Setup(H100.device, 2, LLAMA, "bfloat16")
    one_time, two_time = roofline.verify(H100, 1, 1, 512), roofline.verify(two, 1, 1, 512)
    ops, talk = 32 * 8 * 2e-6, 2 * 32 * (4096 * 2 / 450e9 + 4e-6)
    assert two_time == pytest.approx((one_time - ops) / 2 + ops + talk)


def test_serial_drafters_pay_for_each_level_and_block_drafters_once():
    def seconds(kind, depth):
        return roofline.draft(H100, DRAFTERS[kind], DraftShape.chain(kind, depth), 1, 512)

    assert seconds("mtp", 4) - seconds("mtp", 3) == pytest.approx(seconds("mtp", 3) - seconds("mtp", 2), rel=0.01)
    assert seconds("mtp", 4) > 1.5 * seconds("mtp", 2)
    assert seconds("dflash", 15) < 1.1 * seconds("dflash", 3)
    assert seconds("dspark", 7) > seconds("dflash", 7)
    assert seconds("ngram", 16) == seconds("ngram", 3) < seconds("mtp", 1)


def test_eagle_reads_its_own_small_head():
    """One level: its layer, the projection of three taps and 32,000 rows of a head."""
    shape = DraftShape.chain("eagle3", 1)
    d = 4096
    matrices = LLAMA.layer_parameters + d * 128 * (32 + 16) + 3 * d * d + 32000 * d
    cache, logits = 512 * LLAMA.kv_bytes("bfloat16", 1), 3 * 4 * 32000
    expected = (2 * matrices + cache + logits) / 3.35e12 + 8 * 2e-6 + 40e-6
    assert roofline.draft(H100, DRAFTERS["eagle3"], shape, 1, 512) == pytest.approx(expected)


def test_memory():
    held = roofline.memory(H100, [DRAFTERS["ngram"]], 8, 4096)
    assert held == pytest.approx(2 * 8.03e9 + 8 * 4096 * 131072, rel=0.001)
    assert roofline.memory(H100, [DRAFTERS["eagle3"]], 8, 4096) > held


def test_every_priced_drafter_has_shapes_and_priors():
    assert DRAFTERS.keys() == PRIORS.keys()
    for shape in menu.shapes(DRAFTERS)[1:]:
        assert roofline.draft(H100, DRAFTERS[shape.kind], shape, 4, 1024) > 0
    with pytest.raises(ValueError, match="no shapes are known for a drafter 'psychic'"):
        menu.shapes(["psychic"])


def test_phases_of_a_round_add_up_and_are_the_sizes_of_their_matrices():
    shape = DraftShape.chain("eagle3", 3)
    found = roofline.round_phases(H100, DRAFTERS["eagle3"], shape, 8, 32, 2000)
    assert list(found) == ["draft", "qkv", "attention", "output", "mlp", "head", "accept", "commit", "launch"]
    parts = roofline.draft(H100, DRAFTERS["eagle3"], shape, 8, 2000), roofline.verify(H100, 8, 32, 2000)
    assert roofline.total(found.values()).seconds == pytest.approx(sum(parts) + roofline.fixed(H100))
    qkv, output, mlp = (32 * n for n in (4096 * 128 * 48, 4096 * 4096, 3 * 4096 * 14336))
    for name, size, ops in (("qkv", qkv, 3), ("output", output, 1), ("mlp", mlp, 3)):
        assert (found[name].bytes, found[name].flops) == (2 * size, 2 * size * 32)
        assert found[name].seconds == pytest.approx(2 * size / 3.35e12 + 32 * ops * 2e-6)
    assert found["attention"].bytes == 8 * 2000 * 131072
    assert found["attention"].flops == 2 * 2 * 32 * 4096 * 32 * 2000  # scores and sums, of all layers
    assert found["accept"].bytes == 2 * 4 * 32 * 128256
    assert "draft" not in roofline.round_phases(H100, None, menu.PLAIN, 8, 8, 2000)
