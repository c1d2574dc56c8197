"""From a configuration and a drafter's folder to drafts: detection, options, notes, and the text of plain decoding."""

import dataclasses
import functools

import pytest
from support import chat, checkpoints, toy
from support.checkpoints import Sample

from specjax import config as configs
from specjax.config import ConfigError, RunConfig
from specjax.engine import drafter as wiring
from specjax.engine import load as loading
from specjax.engine.drafter import make_drafter, recognised
from specjax.engine.engine import Engine
from specjax.sampling import SamplingParams

PROMPT, GREEDY = [5, 9, 2, 33, 7], SamplingParams(max_tokens=24, temperature=0.0)


@functools.cache
def target():
    return toy.tiny(num_layers=8, windows=())


def sample(format: str) -> Sample:
    return next(s for s in checkpoints.samples() if s.format == format).copy()


def make(section, **run):
    notes: list[str] = []
    model, params = target()
    config = RunConfig(drafter=configs.drafter(section) if isinstance(section, dict) else section, **run)
    return *make_drafter(config, model, params, None, "float32", notes.append), notes


@pytest.mark.parametrize(
    ("format", "kind"),
    [
        ("eagle3-safeailab", "eagle3"),
        ("peagle-specforge", "peagle"),
        ("speculators-peagle", "peagle"),
        ("speculators-mtp", "mtp"),
        ("dflash-zlab", "dflash"),
        ("dflash2-zlab", "dflash"),
        ("speculators-dflash2", "dflash"),
        ("dspark-liquid", "dspark"),
        ("ubtree", "ubtree"),
    ],
)
def test_a_path_is_recognised(format, kind, tmp_path):
    folder = sample(format).write(tmp_path / "head")
    config = recognised(configs.load(None, [f"drafter={folder}"]))
    assert (config.drafter.kind, config.drafter.model) == (kind, str(folder))
    given = [f"drafter={folder}", "drafter.num_speculative_tokens=2", "drafter.probe=false"]
    drafter = recognised(configs.load(None, given)).drafter
    assert (drafter.num_speculative_tokens, drafter.probe) == (2, False)


def test_a_model_with_a_module_inside_is_one_only_for_itself(tmp_path):
    folder = sample("mtp-qwen").write(tmp_path / "target")
    own = configs.load(None, [f"target={folder}", f"drafter={folder}"])
    assert recognised(own).drafter.kind == "mtp"
    other = configs.load(None, [f"drafter={folder}"])
    assert recognised(other) == other


def test_other_drafters_are_left_alone(tmp_path):
    plain = Sample(
        "", checkpoints.LLAMA | {"architectures": ["LlamaForCausalLM"]}, {"x": checkpoints.array("x", 2)}, {}
    )
    for drafter in ("none", "ngram", str(plain.write(tmp_path / "plain")), "some/name"):
        config = configs.load(None, [f"drafter={drafter}"])
        assert recognised(config) is config


def test_a_whole_model_has_nothing_to_probe():
    with pytest.raises(ConfigError, match="some/model is a whole model"):
        make({"kind": "draft_model", "model": "some/model", "probe": False})


def test_kind_must_be_that_of_the_files(tmp_path):
    folder = sample("dflash-zlab").write(tmp_path / "head")
    with pytest.raises(ConfigError, match="of kind 'dflash', the configuration says 'eagle3'"):
        make({"kind": "eagle3", "model": str(folder), "probe": False})


def test_options_reach_the_drafter(tmp_path):
    eagle, block = sample("eagle3-specforge").write(tmp_path / "a"), sample("dspark-deepspec").write(tmp_path / "b")
    section = {"kind": "eagle3", "model": str(eagle), "probe": False, "num_speculative_tokens": 3, "topk": 2, "rows": 6}
    drafter, params, notes = make(section | {"head_rank": 4, "head_candidates": 8}, draft_sampling="sampled")
    assert (drafter.shape.depth, drafter.shape.branching, drafter.shape.rows, drafter.sampled) == (3, 2, 6, True)
    assert drafter.head.candidates == 8 and params["head"]["down"].shape == (4, 32)
    assert notes == []
    section = {
        "kind": "dspark",
        "model": str(block),
        "probe": False,
        "confidence_threshold": 0.5,
        "num_speculative_tokens": 2,
    }
    drafter, _, notes = make(section)
    assert (drafter.confidence_threshold, drafter.depth, drafter.sampled) == (0.5, 2, False)
    assert any("partial_rotary_factor" in note for note in notes)


def test_a_hybrid_of_a_path(tmp_path):
    """The head that the path holds is found, built with its own defaults or options, and gets the branch beside it."""
    folder = sample("eagle3-safeailab").write(tmp_path / "head")
    given = ["drafter=hybrid", f"drafter.model={folder}"]
    section = recognised(configs.load(None, given)).drafter
    assert (section.kind, section.model.kind, section.model.model) == ("hybrid", "eagle3", str(folder))
    drafter, params, notes = make(
        section.model_copy(update={"model": section.model.model_copy(update={"probe": False})})
    )
    assert (drafter.model.kind, drafter.lookup.kind, drafter.lookup.prompt_lookup_min) == ("eagle3", "ngram", 3)
    assert (drafter.shape.depth, drafter.shape.rows) == (5, 16)
    assert set(params) == {"model", "lookup"} and params["lookup"] == () and "fc" in params["model"]
    assert drafter.taps == drafter.model.taps and notes == []
    given += ["drafter.model.kind=eagle3", "drafter.model.topk=1", "drafter.rows=9", "drafter.lookup=suffix"]
    drafter, _, _ = make(recognised(configs.load(None, [*given, "drafter.model.probe=false"])).drafter)
    assert (drafter.model.shape.is_chain, drafter.lookup.kind, drafter.shape.rows) == (True, "suffix", 9)


def test_the_probe_speaks_as_the_target_is_served(tmp_path, monkeypatch):
    """Trap 17: it reads the target's answer in a chat, where there is a template."""
    prompts = []

    def probe(loaded, target, params, dtype, prompt):
        prompts.append(prompt)
        return loaded, []

    monkeypatch.setattr(wiring, "probe", probe)
    model, params = target()
    run = RunConfig(drafter=configs.drafter({"kind": "ubtree", "model": str(sample("ubtree").write(tmp_path / "a"))}))
    for tokenizer in (chat.letters(), dataclasses.replace(chat.letters(), chat_template=None)):
        make_drafter(run, model, params, tokenizer, "float32", lambda note: None)
    with_template, without = (tokenizer.decode(ids, skip_special_tokens=False) for ids in prompts)
    assert with_template == f"<u>u:{without}</e>\n<u>a:"


@pytest.mark.slow
@pytest.mark.parametrize(("format", "probe"), [("eagle3-specforge", False), ("dflash-zlab", True)])
def test_text_is_that_of_plain_decoding(format, probe, tmp_path):
    folder = sample(format).write(tmp_path / "head")
    kind = format.split("-")[0]
    drafter, params, notes = make({"kind": kind, "model": str(folder), "probe": probe})
    assert sum(note.startswith("probe:") for note in notes) == probe
    want = toy.engine(target=target()).generate(PROMPT, GREEDY)
    got = toy.engine(drafter, params, target=target()).generate(PROMPT, GREEDY)
    assert got.token_ids == want.token_ids


def test_a_window_bounds_every_layer(tmp_path):
    """And changes nothing else: rows of a block see each other as before."""
    block, eagle = sample("dflash-zlab").write(tmp_path / "a"), sample("eagle3-specforge").write(tmp_path / "b")
    wide, _, _ = make({"kind": "dflash", "model": str(block), "probe": False})
    few, _, _ = make({"kind": "dflash", "model": str(block), "probe": False, "window": 16})
    assert (few.windows, few.causal) == ((16, 16), wide.causal)
    few, _, _ = make({"kind": "eagle3", "model": str(eagle), "probe": False, "window": 16})
    assert few.config.windows == (16,)


def test_drafters_are_refused_before_the_target_is_read(tmp_path, monkeypatch):
    """By themselves, in a set, and beside lookup; a good one goes on to the target's weights."""

    class TargetReadError(Exception):
        pass

    def read(name):
        raise TargetReadError

    monkeypatch.setattr(loading, "load_checkpoint", read)
    own = str(sample("mtp-deepseek").write(tmp_path / "target"))
    good, bad = sample("eagle3-specforge").write(tmp_path / "good"), sample("dflash-zlab")
    del bad.tensors["fc.weight"]
    head = {"kind": "dflash", "model": str(bad.write(tmp_path / "bad"))}
    (tmp_path / "empty").mkdir()
    refused = {
        "missing: fc.weight": [head, {"kind": "auto", "of": ["ngram", head]}, {"kind": "hybrid", "model": head}],
        "has no config.json": [str(tmp_path / "empty"), {"kind": "eagle3", "model": str(tmp_path / "empty")}],
        "of kind 'eagle3', the configuration says 'dflash'": [{"kind": "dflash", "model": str(good)}],
    }
    for why, sections in refused.items():
        for section in sections:
            with pytest.raises(ValueError, match=why):
                Engine.load(own, drafter=section, compilation_cache=None)
    for section in (str(good), own, "ngram"):
        with pytest.raises(TargetReadError):
            Engine.load(own, drafter=section, compilation_cache=None)


def test_unreadable_drafter_is_refused_by_name(tmp_path):
    s = sample("eagle3-specforge")
    del s.tensors["midlayer.mlp.up_proj.weight"]
    folder = s.write(tmp_path / "head")
    with pytest.raises(ValueError, match="missing: layers.0.mlp.up_proj.weight"):
        make({"kind": "eagle3", "model": str(folder)})
