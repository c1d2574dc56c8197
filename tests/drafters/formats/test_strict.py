"""C16: a damaged or contradictory checkpoint is refused with every reason at once, and nothing is loaded."""

import jax.numpy as jnp
import numpy as np
import pytest
from support import toy
from support.checkpoints import D2T, DRAFT_V, T2D, TARGET, D, L, Sample, V, array, samples

from specjax.drafters import learned
from specjax.drafters.formats.files import DrafterError
from specjax.drafters.formats.read import load_drafter
from specjax.targets import decoder

SAMPLES = samples()
IDS = [f"{i}-{s.format}" for i, s in enumerate(SAMPLES)]


def sample(format: str) -> Sample:
    return next(s for s in samples() if s.format == format).copy()


def refused(s: Sample, folder, target=TARGET) -> str:
    with pytest.raises(DrafterError) as caught:
        load_drafter(s.write(folder), target)
    return str(caught.value)


def layer_config(s: Sample) -> dict:
    return s.config.get("transformer_layer_config", s.config)


def renamed(s: Sample):
    old = f"{s.prefix}mlp.up_proj.weight"
    new = f"{s.prefix}mlp.raise_proj.weight"
    s.tensors[new] = s.tensors.pop(old)
    return [f"unknown: {new} [48, 32]", "missing: layers.0.mlp.up_proj.weight [48, 32]"]


def missing(s: Sample):
    del s.tensors[f"{s.prefix}mlp.down_proj.weight"]
    return ["missing: layers.0.mlp.down_proj.weight [32, 48]"]


def extra(s: Sample):
    s.tensors[f"{s.prefix}adapter.weight"] = array("adapter", 3, 5)
    return [f"unknown: {s.prefix}adapter.weight [3, 5]"]


def misshapen(s: Sample):
    name = f"{s.prefix}self_attn.o_proj.weight"
    s.tensors[name] = array("o", D, 64)
    return [f"misshapen: {name} is [32, 64], the configuration asks for [32, 32]"]


def unknown_rope(s: Sample):
    layer_config(s)["rope_scaling"] = {"rope_type": "foo", "factor": 2.0}
    layer_config(s).pop("rope_parameters", None)
    return ["rope type 'foo' is not known"]


def without_size(s: Sample):
    del layer_config(s)["intermediate_size"]
    return ["config key 'intermediate_size' is missing"]


def several(s: Sample):
    return [line for damage in (missing, extra, misshapen) for line in damage(s)]


@pytest.mark.parametrize("damage", [renamed, missing, extra, misshapen, unknown_rope, without_size, several])
@pytest.mark.parametrize("s", SAMPLES, ids=IDS)
def test_damaged(s, damage, tmp_path):
    s = s.copy()
    expected = damage(s)
    message = refused(s, tmp_path / "head")
    for line in expected:
        assert line in message


STRUCTURAL = [s for s in SAMPLES if not s.format.startswith("mtp-")]


@pytest.mark.parametrize("s", STRUCTURAL, ids=[f"{i}-{s.format}" for i, s in enumerate(STRUCTURAL)])
def test_unknown_structural_key(s, tmp_path):
    s = s.copy()
    s.config["attention_sink_bias"] = True
    assert "config key 'attention_sink_bias' = True is not known" in refused(s, tmp_path / "head")
    s.config["attention_sink_bias"] = False  # a feature that is off asks for nothing
    load_drafter(s.write(tmp_path / "off"), TARGET)


@pytest.mark.parametrize("s", SAMPLES, ids=IDS)
def test_another_target(s, tmp_path):
    """Widths and vocabularies are named on both sides."""
    wide = toy.tiny_config(num_layers=L, hidden_size=64, vocab_size=100, windows=())
    message = refused(s, tmp_path / "head", wide)
    assert "a vocabulary of 64, the target has 100" in message
    assert "width 32, this one has 64" in message


@pytest.mark.parametrize("format", ["dflash-zlab", "dspark-specforge", "eagle3-specforge"])
def test_another_depth(format, tmp_path):
    s = sample(format)
    s.config["num_target_layers"] = 36
    assert "a target of 36 layers, this one has 8" in refused(s, tmp_path / "head")


@pytest.mark.parametrize("format", ["dflash-zlab", "speculators-dflash", "speculators-peagle", "dspark-deepspec"])
def test_mask_token_outside_the_embedding(format, tmp_path):
    s = sample(format)
    (s.config.get("dflash_config") or s.config)["mask_token_id"] = V
    assert f"mask token {V} is outside the {V} rows" in refused(s, tmp_path / "head")


@pytest.mark.parametrize(
    ("format", "key", "ids"),
    [
        ("dspark-deepspec", "target_layer_ids", [1, L - 1]),
        ("eagle3-specforge", "eagle_config", {"eagle_aux_hidden_state_layer_ids": [1, 3, L - 1]}),
        ("speculators-eagle3", "eagle_aux_hidden_state_layer_ids", [2, 4, L]),
        ("speculators-dflash", "aux_hidden_state_layer_ids", [2, L + 1]),
    ],
)
def test_tap_outside_the_target(format, key, ids, tmp_path):
    s = sample(format)
    s.config[key] = ids
    assert "are outside 0 to 7 of this target" in refused(s, tmp_path / "head")


def test_taps_must_ascend(tmp_path):
    s = sample("dspark-deepspec")
    s.config["target_layer_ids"] = [5, 1]
    assert "taps [6, 2] must ascend" in refused(s, tmp_path / "head")


def test_mixture_of_experts_and_latent_attention_are_named(tmp_path):
    s = sample("mtp-deepseek")
    s.config |= {"kv_lora_rank": 8, "n_routed_experts": 4}
    message = refused(s, tmp_path / "head")
    assert "latent attention" in message and "mixture of experts" in message


def test_several_modules(tmp_path):
    s = sample("mtp-mimo")
    s.tensors |= {n.replace("mtp_layers.0", "mtp_layers.1"): x for n, x in s.tensors.items() if "mtp_layers" in n}
    assert "it has 2 MTP modules; one is supported" in refused(s, tmp_path / "head")


def test_verifier_of_another_family(tmp_path):
    s = sample("speculators-eagle3")
    s.config["speculators_config"]["verifier"]["architectures"] = ["Qwen3ForCausalLM"]
    assert "a verifier of Qwen3ForCausalLM, the target is LlamaForCausalLM" in refused(s, tmp_path / "head")


def test_sections_that_disagree(tmp_path):
    s = sample("dflash-zlab")
    s.config["block_size"] = 8
    assert "dflash_config.block_size is 4 but block_size is 8" in refused(s, tmp_path / "head")


def test_quantised(tmp_path):
    s = sample("dflash-zlab")
    s.config["quantization_config"] = {"quant_method": "fp8"}
    assert "quantised" in refused(s, tmp_path / "a")
    s = sample("dflash-zlab")
    s.tensors["fc.weight"] = s.tensors["fc.weight"].astype(np.int8)
    assert "fc.weight is stored as I8" in refused(s, tmp_path / "b")


# --- C09: the draft vocabulary ---------------------------------------------------------------------------------------


def test_d2t_absent_with_unequal_sizes(tmp_path):
    s = sample("eagle3-specforge")
    del s.tensors["d2t"]
    message = refused(s, tmp_path / "head")
    assert f"missing: d2t [{DRAFT_V}]" in message
    assert f"the drafter has {DRAFT_V} tokens and the target {V}" in message


def test_d2t_absent_or_zero_with_equal_sizes_is_the_identity(tmp_path):
    s = sample("eagle3-specforge")
    s.config["draft_vocab_size"] = V
    s.tensors["lm_head.weight"] = array("h", V, D)
    s.tensors |= {"d2t": np.zeros(V, np.int64), "t2d": np.ones(V, bool)}
    assert "d2t" not in load_drafter(s.write(tmp_path / "a"), TARGET).tensors
    del s.tensors["d2t"], s.tensors["t2d"]
    assert "d2t" not in load_drafter(s.write(tmp_path / "b"), TARGET).tensors
    s.tensors["d2t"] = np.ones(V, np.int64)
    assert "renumbers a full vocabulary" in refused(s, tmp_path / "c")


@pytest.mark.parametrize(
    ("d2t", "t2d", "why"),
    [
        (D2T, np.roll(T2D, 1), "not the same ids"),
        (np.zeros(DRAFT_V, np.int64), np.ones(V, bool), "t2d marks 64 of 64 target ids"),
        (np.arange(0, V, 4), T2D, "d2t must hold offsets"),
        (np.where(np.arange(DRAFT_V) == 1, -1, D2T), None, "16 draft tokens to 15 different target ids"),
        (D2T.astype(np.float32), None, "not whole numbers"),
    ],
)
def test_d2t_that_cannot_be(d2t, t2d, why, tmp_path):
    s = sample("eagle3-specforge")
    s.tensors["d2t"] = d2t
    if t2d is None:
        del s.tensors["t2d"]
    else:
        s.tensors["t2d"] = t2d
    assert why in refused(s, tmp_path / "head")


def test_d2t_of_zeros_is_accepted_with_one_warning(tmp_path):
    s = sample("eagle3-specforge")
    s.tensors |= {"d2t": np.zeros(DRAFT_V, np.int64), "t2d": np.arange(V) < DRAFT_V}
    loaded = load_drafter(s.write(tmp_path / "head"), TARGET)
    np.testing.assert_array_equal(loaded.tensors["d2t"], np.zeros(DRAFT_V))
    params = {"embedding": jnp.zeros((V, D)), "head": {"weight": jnp.zeros((V, D))}}
    with pytest.warns(UserWarning, match="the target ids 0..15 of 64 only") as caught:
        learned.build(loaded.config, loaded.tensors, decoder.Target(TARGET, None), params, jnp.float32)
    assert len(caught) == 1


def test_pickled_token_map_is_named(tmp_path):
    """NeMo keeps its map in `speculative_token_map.pt`."""
    s = sample("eagle3-specforge")
    del s.tensors["d2t"]
    folder = s.write(tmp_path / "head")
    (folder / "speculative_token_map.pt").write_bytes(b"x")
    assert "speculative_token_map.pt" in refused(s, folder)


def test_draft_vocabulary_without_a_head(tmp_path):
    s = sample("eagle3-specforge")
    del s.tensors["lm_head.weight"]
    assert f"a draft vocabulary of {DRAFT_V} beside one of {V} needs lm_head.weight" in refused(s, tmp_path / "head")
