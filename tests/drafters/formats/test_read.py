"""Every published packaging is recognised from its files alone and read as one description with equal values."""

import dataclasses
import json

import numpy as np
import pytest
from support import checkpoints
from support.checkpoints import DRAFT_V, TARGET, D, L, Sample, V, array, samples

from specjax.drafters.config import HeadConfig, expected_tensors
from specjax.drafters.formats.detect import detect
from specjax.drafters.formats.files import DrafterError, open_folder
from specjax.drafters.formats.read import is_drafter, load_drafter
from specjax.targets.rope import RopeConfig

SAMPLES = samples()
IDS = [f"{i}-{s.format}" for i, s in enumerate(SAMPLES)]


def sample(format: str) -> Sample:
    return next(s for s in samples() if s.format == format).copy()


def expected_head(s: Sample) -> HeadConfig:
    """The description that a sample must be read as: what all samples share, and its own fields."""
    family = next(f for f in ("peagle", "eagle3", "mtp", "dflash2", "dflash", "dspark", "ubtree") if f in s.format)
    shared = {
        "family": family,
        "num_layers": 1,
        "hidden_size": D,
        "intermediate_size": checkpoints.INNER,
        "num_heads": checkpoints.HEADS,
        "num_kv_heads": checkpoints.KV,
        "head_dim": checkpoints.F,
        "rms_norm_eps": 1e-5,
        "rope": RopeConfig(theta=10000.0),
        "vocab_size": V,
        "draft_vocab_size": V,
        "target_hidden_size": D,
    }
    values = shared | s.head
    if s.format == "dspark-specforge":
        values["rope"] = RopeConfig(theta=10000.0, kind="yarn", factor=32.0, original_max_position_embeddings=64)
    return HeadConfig(**({"windows": (None,) * values["num_layers"]} | values))


@pytest.mark.parametrize("s", SAMPLES, ids=IDS)
def test_detected_and_read(s, tmp_path):
    folder = s.write(tmp_path / "head")
    assert detect(open_folder(folder)) == s.format
    assert is_drafter(folder)
    loaded = load_drafter(folder, TARGET)
    assert loaded.format == s.format
    assert dataclasses.asdict(loaded.config) == dataclasses.asdict(expected_head(s))
    assert {name: x.shape for name, x in loaded.tensors.items()} == expected_tensors(loaded.config)


@pytest.mark.parametrize("s", SAMPLES, ids=IDS)
def test_values_come_through(s, tmp_path):
    """Each canonical tensor has the values of the published one, found by its own name or by an explicit list."""
    tensors = load_drafter(s.write(tmp_path / "head"), TARGET).tensors
    renamed = {
        "mtp-deepseek": {
            "fuse": "eh_proj",
            "embedding_norm": "enorm",
            "hidden_norm": "hnorm",
            "norm": "shared_head.norm",
        },
        "mtp-mimo": {"fuse": "input_proj", "embedding_norm": "token_layernorm", "hidden_norm": "hidden_layernorm"}
        | {"norm": "final_layernorm"},
    }
    renamed["speculators-mtp"] = renamed["mtp-mimo"]
    qwen = {
        "fuse": "fc",
        "embedding_norm": "pre_fc_norm_embedding",
        "hidden_norm": "pre_fc_norm_hidden",
        "norm": "norm",
    }
    for name, values in tensors.items():
        stem = name.removesuffix(".weight")
        if name.startswith("layers.0."):
            theirs = s.prefix + name.removeprefix("layers.0.")
        elif s.format == "mtp-qwen":
            theirs = f"mtp.{qwen[stem]}.weight"
        elif s.format in renamed:
            theirs = f"{s.prefix}{renamed[s.format][stem]}.weight"
        else:
            theirs = next(n for n in (name, f"model.{name}", f"logit_head.{name}") if n in s.tensors)
        np.testing.assert_array_equal(values, s.tensors[theirs].reshape(values.shape), err_msg=name)


def test_unknown_alias_refused_and_known_alias_read(tmp_path):
    """C16: `midlayer.` and `layers.0.` are the same layer; `decoder.` is nobody's."""
    known, unknown = sample("eagle3-specforge"), sample("eagle3-specforge")
    known.tensors = {n.replace("midlayer.", "layers.0."): x for n, x in known.tensors.items()}
    unknown.tensors = {n.replace("midlayer.mlp.up", "decoder.mlp.up"): x for n, x in unknown.tensors.items()}
    want = load_drafter(sample("eagle3-specforge").write(tmp_path / "a"), TARGET)
    got = load_drafter(known.write(tmp_path / "b"), TARGET)
    assert got.config == want.config
    for name in want.tensors:
        np.testing.assert_array_equal(got.tensors[name], want.tensors[name])
    with pytest.raises(DrafterError, match=r"unknown: decoder.mlp.up_proj.weight \[48, 32\]"):
        load_drafter(unknown.write(tmp_path / "c"), TARGET)
    both = sample("eagle3-specforge")
    both.tensors["layers.0.hidden_norm.weight"] = both.tensors["midlayer.hidden_norm.weight"]
    with pytest.raises(DrafterError, match="are the same tensor"):
        load_drafter(both.write(tmp_path / "d"), TARGET)


@pytest.mark.parametrize(
    ("format", "key", "ids", "taps"),
    [
        ("eagle3-safeailab", None, None, (2, 4, 5)),
        ("eagle3-specforge", "eagle_config", {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}, (2, 4, 5)),
        ("eagle3-specforge", "eagle_config", {}, (2, 4, 5)),
        ("speculators-eagle3", "eagle_aux_hidden_state_layer_ids", [2, 4, 5], (2, 4, 5)),
        ("speculators-eagle3", "eagle_aux_hidden_state_layer_ids", None, (2, 4, 5)),
        ("eagle3-deepspec", "target_layer_ids", [-1, 0, 1, 2, 3], (0, 1, 2, 3, 4)),
        ("dspark-deepspec", "target_layer_ids", [-1, 5], (0, 6)),
        ("speculators-dflash", "aux_hidden_state_layer_ids", [0, 6], (0, 6)),
    ],
)
def test_tap_conventions(format, key, ids, taps, tmp_path):
    """Section 1.2: an id is an output (`t = v + 1`), or the layers already executed (`t = v`)."""
    s = sample(format)
    if key is not None:
        s.config[key] = ids
    assert load_drafter(s.write(tmp_path / "head"), TARGET).config.taps == taps


@pytest.mark.parametrize(("nested", "taps"), [([1, 5], (2, 6)), ([-1, 5], (0, 6)), (None, (2, 6))])
def test_zlab_taps(nested, taps, tmp_path):
    s = sample("dflash-zlab")
    s.config["dflash_config"]["target_layer_ids"] = nested  # absent: spread over outputs 1 to L - 3
    assert load_drafter(s.write(tmp_path / "head"), TARGET).config.taps == taps


@pytest.mark.parametrize(
    ("family", "declared", "tokens", "shifted"),
    [
        ("dspark", None, 4, True),
        ("dspark", None, 3, False),
        ("dspark", True, 3, True),
        ("dspark", False, 4, False),
        ("dflash", None, 3, False),
        ("dflash", None, 4, True),
        ("dflash", True, 4, True),
        ("dspark", None, 2, True),
        ("dflash", None, 2, False),
    ],
)
def test_slot_convention_of_speculators(family, declared, tokens, shifted, tmp_path):
    """A stated sample_from_anchor decides; else block_size - speculative_tokens (0 or 1); else the class's default."""
    s = sample(f"speculators-{family}")
    s.config.pop("sample_from_anchor", None)
    if declared is not None:
        s.config["sample_from_anchor"] = declared
    s.config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = tokens
    assert load_drafter(s.write(tmp_path / "head"), TARGET).config.shifted is shifted


def test_noise_is_ignored_and_declared_yarn_is_not(tmp_path):
    deepspec = load_drafter(sample("dspark-deepspec").write(tmp_path / "a"), TARGET)
    assert deepspec.config.rotary_dims is None
    assert any("partial_rotary_factor" in note for note in deepspec.notes)
    eagle = load_drafter(sample("eagle3-deepspec").write(tmp_path / "b"), TARGET)
    assert eagle.config.rope == RopeConfig(theta=10000.0)
    assert load_drafter(sample("dspark-specforge").write(tmp_path / "c"), TARGET).config.rope.kind == "yarn"


@pytest.mark.parametrize("format", ["eagle3-specforge", "dflash-zlab", "speculators-eagle3"])
def test_positions_that_a_head_was_trained_for_are_no_bound(format, tmp_path):
    """Files often say 2048 and are used far beyond: rotation is computed from positions, not read from a table."""
    short, long = sample(format), sample(format)
    for s, most in ((short, 16), (long, 4096)):
        section = s.config.get("transformer_layer_config", s.config)
        section["max_position_embeddings"] = most
    short, long = (load_drafter(s.write(tmp_path / name), TARGET) for s, name in ((short, "a"), (long, "b")))
    assert short.config == long.config


@pytest.mark.parametrize("nested", [True, False])
def test_scales_are_read(nested, tmp_path):
    """Of embeddings and of logits: without them drafts are hot, cold or noise."""
    s = sample("dflash-zlab")
    scales = {"input_embedding_scale": 5.5, "output_multiplier": 0.25, "final_logit_softcapping": 30.0}
    (s.config["dflash_config"] if nested else s.config).update(scales)
    config = load_drafter(s.write(tmp_path / "head"), TARGET).config
    assert (config.embedding_scale, config.output_multiplier, config.logit_softcap) == (5.5, 0.25, 30.0)


@pytest.mark.parametrize("kind", ["yarn", "llama3"])
def test_rope_scaling_is_read(kind, tmp_path):
    from specjax.targets.rope import inv_freq

    s = sample("eagle3-specforge")
    s.config["rope_scaling"] = {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": 512}
    if kind == "llama3":
        s.config["rope_scaling"] |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope = load_drafter(s.write(tmp_path / "head"), TARGET).config.rope
    assert (rope.kind, rope.factor) == (kind, 4.0)
    assert not np.allclose(inv_freq(rope, 8)[0], inv_freq(RopeConfig(theta=10000.0), 8)[0])


@pytest.mark.parametrize(
    ("keys", "causal", "windows"),
    [
        ({}, (False, True), (None, 16)),
        ({"is_causal": False}, (False, False), (None, 16)),
        ({"is_causal": True}, (True, True), (None, 16)),
        ({"sliding_window_non_causal": True}, (False, False), (None, 16)),
    ],
)
def test_sliding_layers_are_causal_unless_told_otherwise(keys, causal, windows, tmp_path):
    s = sample("dflash-zlab")
    s.config |= {
        "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": 16,
        "use_sliding_window": True,
    }
    config = load_drafter(Sample(s.format, s.config | keys, s.tensors, {}).write(tmp_path / "head"), TARGET).config
    assert (config.block_causal, config.windows) == (causal, windows)


def test_tied_head_is_the_drafters_embedding(tmp_path):
    s = sample("eagle3-deepspec")
    del s.tensors["lm_head.weight"]
    s.config["tie_word_embeddings"] = True
    loaded = load_drafter(s.write(tmp_path / "head"), TARGET)
    assert loaded.config.own_head
    np.testing.assert_array_equal(loaded.tensors["lm_head.weight"], s.tensors["embed_tokens.weight"])


def test_codebooks_with_a_module_name(tmp_path):
    s = sample("dflash2-zlab")
    for name in ("predecessor_codebook", "successor_codebook"):
        s.tensors[f"candidate_selector.{name}.weight"] = s.tensors.pop(f"candidate_selector.{name}")
    loaded = load_drafter(s.write(tmp_path / "head"), TARGET)
    np.testing.assert_array_equal(
        loaded.tensors["candidate_selector.successor_codebook"],
        s.tensors["candidate_selector.successor_codebook.weight"],
    )


def test_modules_exported_beside_the_target(tmp_path):
    """`mtp.safetensors` next to the target's own file is read too."""
    import safetensors.numpy

    s = sample("mtp-qwen")
    folder = Sample(s.format, s.config, {n: x for n, x in s.tensors.items() if not n.startswith("mtp.")}, {}).write(
        tmp_path / "t"
    )
    assert not is_drafter(folder)
    safetensors.numpy.save_file(
        {n: x for n, x in s.tensors.items() if n.startswith("mtp.")}, folder / "mtp.safetensors"
    )
    assert load_drafter(folder, TARGET).format == "mtp-qwen"


@pytest.mark.parametrize(
    ("config", "tensors", "format"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, ["midlayer.hidden_norm.weight"], "eagle3-safeailab"),
        ({}, ["model.layers.0.hidden_norm.weight", "model.fc.weight"], "eagle3-specforge"),
        ({}, ["fc.weight", "d2t"], "eagle3-specforge"),
        ({}, ["mask_hidden", "midlayer.hidden_norm.weight"], "peagle-specforge"),
        ({}, ["markov_head.markov_w1.weight"], "dspark-deepspec"),
        ({"dflash_config": {"block_size": 4}}, ["logit_head.markov_head.markov_w1.weight"], "dspark-specforge"),
        ({}, ["candidate_selector.successor_codebook"], "dflash2-zlab"),
        ({}, ["fc.weight", "hidden_norm.weight"], "dflash-zlab"),
        ({}, ["mtp.fc.weight"], "mtp-qwen"),
        ({}, ["model.mtp_layers.0.input_proj.weight"], "mtp-mimo"),
        ({}, ["model.layers.8.eh_proj.weight"], "mtp-deepseek"),
        (
            {"architectures": ["DFlashDraftModel"], "dflash_config": {"projector_type": "dspark"}},
            [],
            "dspark-specforge",
        ),
        ({"speculators_config": {"algorithm": "eagle3"}}, [], "speculators-eagle3"),
        ({"architectures": ["LlamaForCausalLM"]}, ["model.embed_tokens.weight"], None),
    ],
)
def test_detection_by_what_is_there(config, tensors, format, tmp_path):
    assert (
        detect(open_folder(Sample("", config, {n: array(n, 4, 4) for n in tensors}, {}).write(tmp_path / "x")))
        == format
    )


@pytest.mark.parametrize(
    ("config", "tensors", "named"),
    [
        ({"architectures": ["DFlashDraftModel"], "dflash_config": {"projector_type": "domino"}}, [], "'domino'"),
        ({"medusa_num_heads": 4}, [], "Medusa"),
        ({"model_type": "eagle"}, [], "'eagle'"),
        ({"architectures": ["EagleLlamaForCausalLM"]}, [], "EAGLE-1"),
        ({"architectures": ["Gemma4DSparkModel"]}, [], "Gemma 4"),
        ({"speculators_model_type": "xpress"}, [], "'xpress'"),
        ({"model_type": "muse_glimmer_assistant"}, [], "muse_glimmer_assistant"),
        ({}, ["mtp.0.main_proj.weight"], "MTP module of a family"),
    ],
)
def test_unsupported_kinds_are_named(config, tensors, named, tmp_path):
    folder = Sample("", config, {n: array(n, 4, 4) for n in tensors}, {}).write(tmp_path / "x")
    with pytest.raises(DrafterError, match=named):
        is_drafter(folder)
    eagle1 = {"fc.weight": array("fc", D, 2 * D), "embed_tokens.weight": array("e", V, D)}
    with pytest.raises(DrafterError, match="EAGLE-1"):
        is_drafter(Sample("", {"architectures": ["LlamaForCausalLM"]}, eagle1, {}).write(tmp_path / "y"))


def test_plain_model_is_no_drafter(tmp_path):
    folder = Sample("", checkpoints.LLAMA | {"architectures": ["LlamaForCausalLM"]}, {"x": array("x", 2)}, {}).write(
        tmp_path
    )
    assert not is_drafter(folder)
    with pytest.raises(DrafterError, match="draft_model"):
        load_drafter(folder, TARGET)


def test_code_in_the_checkpoint_is_named_and_not_run(tmp_path):
    s = sample("dflash-zlab")
    folder = s.write(tmp_path / "head")
    (folder / "dflash.py").write_text("raise SystemExit('executed')")
    assert any("auto_map" in note for note in load_drafter(folder, TARGET).notes)


def test_config_that_is_no_json(tmp_path):
    folder = sample("dflash-zlab").write(tmp_path / "head")
    (folder / "config.json").write_text(json.dumps([1]))
    with pytest.raises(DrafterError, match="list"):
        load_drafter(folder, TARGET)
    (folder / "config.json").write_text("{")
    with pytest.raises(DrafterError, match="not JSON"):
        load_drafter(folder, TARGET)


def test_draft_vocabulary_constants():
    assert TARGET.num_layers == L and checkpoints.T2D.sum() == DRAFT_V


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("yes", "candidate_head is 'yes', expected"),
        ({"candidates": 8}, "candidate_head is {'candidates': 8}, expected"),
        ({"rank": 4, "width": 2}, "candidate_head is .*width"),
        ({"rank": 0}, rf"candidate_head.rank is 0, expected 1..{D}"),
        ({"rank": D + 1}, f"candidate_head.rank is {D + 1}"),
        ({"rank": "4"}, "candidate_head.rank is '4'"),
        ({"rank": 4, "candidates": V + 1}, f"candidate_head.candidates is {V + 1}, expected 1..{V}"),
    ],
)
def test_a_candidate_head_is_described_as_it_can_be(said, words, tmp_path):
    s = sample("mtp-qwen")
    s.config["candidate_head"] = said
    with pytest.raises(DrafterError, match=words):
        load_drafter(s.write(tmp_path / "head"), TARGET)


@pytest.mark.parametrize("said", [0.5, [0.5, 1.5], [0.5, "0.4"], [True], {"1": 0.5}])
def test_acceptance_that_is_none(said, tmp_path):
    s = sample("mtp-qwen")
    s.config["acceptance"] = said
    with pytest.raises(DrafterError, match="expected a list of shares from 0 to 1"):
        load_drafter(s.write(tmp_path / "head"), TARGET)


def test_a_candidate_head_is_read(tmp_path):
    s = sample("mtp-qwen")
    s.config["candidate_head"] = {"rank": 4, "candidates": 9}
    config = load_drafter(s.write(tmp_path / "head"), TARGET).config
    assert (config.head_rank, config.head_candidates) == (4, 9)
