"""The run configuration: strict, all faults at once, each with its place and the nearest known name."""

import dataclasses
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from specjax import config
from specjax.config import ConfigError, RunConfig

CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("*.yaml"))


def write(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text)
    return path


def test_imports_no_jax():
    code = "import sys, specjax.config; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configs_load(path):
    assert config.load(path).drafter.kind == {"plain": "none"}.get(path.stem, path.stem)


def test_defaults_and_values(tmp_path):
    assert config.load(None) == RunConfig()
    run = config.load(write(tmp_path, "batch: 3\ndrafter:\n  kind: ngram\n  prompt_lookup_max: 3\n"))
    assert (run.batch, run.drafter.kind, run.drafter.prompt_lookup_max) == (3, "ngram", 3)
    assert config.load(write(tmp_path, "")) == RunConfig()


@pytest.mark.parametrize(
    ("options", "drafter"),
    [(config.NgramConfig, "ngram.NGram"), (config.SuffixConfig, "suffix.Suffix")],
    ids=["ngram", "suffix"],
)
def test_options_are_the_drafters_own(options, drafter):
    """The configuration offers what the drafter takes, with the same defaults."""
    module, name = drafter.split(".")
    drafter = getattr(importlib.import_module(f"specjax.drafters.{module}"), name)
    taken = {field.name: field.default for field in dataclasses.fields(drafter)}
    assert {name: field.default for name, field in options.model_fields.items()} == taken


LEARNED = (
    config.Eagle3Config,
    config.PEagleConfig,
    config.MTPConfig,
    config.DFlashConfig,
    config.DSparkConfig,
    config.UBTreeConfig,
)


@pytest.mark.parametrize("options", LEARNED, ids=lambda options: options.model_fields["kind"].default)
def test_options_of_learned_drafters_are_their_own(options):
    """What is left of a section for `build` is what `build` takes, with the same defaults."""
    from specjax.drafters import dflash, dspark, eagle3, mtp, peagle, ubtree
    from specjax.engine.drafter import _options

    section = options(model="x")
    given = _options(section) | {"sampled": False}
    kind = section.kind
    if kind in ("eagle3", "mtp", "peagle"):
        build = {"eagle3": eagle3, "mtp": mtp, "peagle": peagle}[kind].build
        taken = {n: p.default for n, p in inspect.signature(build).parameters.items() if p.kind is p.KEYWORD_ONLY}
    else:
        drafter = {"dflash": dflash.DFlash, "dspark": dspark.DSpark, "ubtree": ubtree.UBTree}[kind]
        own = ("config", "head", "max_position", "dtype", "kind", "wants_hidden")
        taken = {field.name: field.default for field in dataclasses.fields(drafter) if field.name not in own}
    assert given == taken


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{kind: eagle3, model: x, tree: ddtree}", "unknown key 'drafter.tree'"),
        ("{kind: dflash, model: x, head_candidates: 8}", "set head_rank too"),
        ("{kind: dspark, model: x, confidence_threshold: 1.5}", "less than or equal to 1"),
        ("{kind: ubtree, model: x, tree: none}", "'ubtree' or 'ddtree'"),
    ],
)
def test_learned_drafters_are_read_strictly(text, words, tmp_path):
    with pytest.raises(ConfigError, match=words):
        config.load(write(tmp_path, f"drafter: {text}"))


def test_hybrid_sections(tmp_path):
    """Its parts are written as `drafter` itself is: a kind, a path, or a section."""
    for text in ("{kind: hybrid, model: ./head}", "{kind: hybrid, model: {kind: draft_model, model: ./head}}"):
        hybrid = config.load(write(tmp_path, f"drafter: {text}")).drafter
        assert (hybrid.model.kind, hybrid.model.model) == ("draft_model", "./head")
        assert (hybrid.lookup.kind, hybrid.lookup.prompt_lookup_min, hybrid.rows) == ("ngram", 3, None)
    given = ["drafter=hybrid", "drafter.model=mtp", "drafter.model.topk=2", "drafter.lookup=suffix"]
    hybrid = config.load(None, [*given, "drafter.lookup.num_speculative_tokens=9"]).drafter
    assert (hybrid.model.kind, hybrid.model.topk, hybrid.lookup.kind) == ("mtp", 2, "suffix")
    assert hybrid.num_speculative_tokens == 9
    with pytest.raises(ConfigError, match=r"context \(8\) must exceed num_speculative_tokens \(9\)"):
        config.load(None, [*given, "drafter.lookup.num_speculative_tokens=9", "context=8"])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{kind: hybrid, model: ngram}", "unknown model 'ngram'; known kinds: draft_model, eagle3"),
        ("{kind: hybrid, model: mtp, lookup: mtp}", "unknown lookup 'mtp'; known kinds: ngram, suffix"),
        ("{kind: hybrid, model: {kind: eagle3, model: x, tpk: 2}}", "unknown key 'drafter.model.tpk'.*mean 'topk'"),
        ("{kind: hybrid, model: mtp, lookup: {kind: ngram, max_depth: 3}}", "unknown key 'drafter.lookup.max_depth'"),
        ("{kind: hybrid, model: mtp, rows: 1}", "drafter.rows: .*greater than or equal to 2"),
        ("{kind: hybrid, model: {topk: 2}}", "'drafter.model' needs a 'kind': draft_model"),
    ],
)
def test_hybrid_sections_are_read_strictly(text, words, tmp_path):
    with pytest.raises(ConfigError, match=words):
        config.load(write(tmp_path, f"drafter: {text}"))


def test_hybrid_drafts_are_deterministic(tmp_path):
    with pytest.raises(ConfigError, match="'hybrid' has none"):
        config.load(write(tmp_path, "draft_sampling: sampled\ndrafter: {kind: hybrid, model: mtp}"))


def test_a_set_of_drafters(tmp_path):
    """Its members are written as `drafter` itself is; alone it is prompt lookup, or plain decoding where that pays."""
    assert [one.kind for one in config.load(None, ["drafter=auto"]).drafter.of] == ["ngram"]
    text = "drafter: {kind: auto, of: [suffix, ./head, {kind: mtp, num_speculative_tokens: 2}], table: x.json}"
    chosen = config.load(write(tmp_path, text)).drafter
    assert [one.kind for one in chosen.of] == ["suffix", "draft_model", "mtp"]
    assert (chosen.of[1].model, chosen.of[2].num_speculative_tokens) == ("./head", 2)
    assert (chosen.num_speculative_tokens, chosen.table) == (5, "x.json")
    assert config.load(None, ["drafter=auto", "drafter.of=suffix"]).drafter.of[0].kind == "suffix"
    quiet = config.without_probe(chosen)
    assert [getattr(one, "probe", None) for one in quiet.of] == [None, False, False]
    assert config.without_probe(config.load(None, ["drafter=auto"]).drafter) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{kind: auto, of: []}", "'of' names no drafter"),
        ("{kind: auto, of: [ngram, ngram]}", "ngram is there more than once"),
        ("{kind: auto, of: [ngrams]}", "unknown drafter 'ngrams'; did you mean 'ngram'"),
        ("{kind: auto, of: [none]}", "unknown drafter 'none'"),
        (
            "{kind: auto, of: [{kind: ngram, prompt_lookup_mn: 2}]}",
            "unknown key 'drafter.of.0.prompt_lookup_mn'; did you mean 'prompt_lookup_min'",
        ),
        ("{kind: auto, oof: [ngram]}", "unknown key 'drafter.oof'; did you mean 'of'"),
    ],
)
def test_a_set_of_drafters_is_read_strictly(text, words, tmp_path):
    with pytest.raises(ConfigError, match=words):
        config.load(write(tmp_path, f"drafter: {text}"))


def test_learned_drafters_may_sample(tmp_path):
    text = "draft_sampling: sampled\ndrafter: {kind: dspark, model: x, calibration: [1.0, 2.0]}\n"
    assert config.load(write(tmp_path, text)).drafter.calibration == (1.0, 2.0)
    assert config.load(None, ["drafter.kind=mtp"]).drafter.model is None


def test_an_override_is_not_blamed_on_the_file(tmp_path):
    path = write(tmp_path, "drafter:\n  kind: ngram\n  num_speculative_tokens: 3\n")
    with pytest.raises(ConfigError) as caught:
        config.load(path, ["drafter.num_speculative_tokens=0"])
    assert "got 0" in str(caught.value)
    assert "line" not in str(caught.value)


@pytest.mark.parametrize("kind", ["ngram", "suffix", "mtp", "eagle3", "dflash"])
def test_no_more_drafts_than_kernels_take(kind):
    model = [] if kind in ("ngram", "suffix") else ["drafter.model=x"]
    with pytest.raises(ConfigError, match="less than or equal to 127"):
        config.load(None, [f"drafter={kind}", *model, "drafter.num_speculative_tokens=128"])


def test_frozen():
    with pytest.raises(ValueError, match="frozen"):
        RunConfig().batch = 2


@pytest.mark.parametrize(
    ("text", "kind", "model"),
    [("none", "none", None), ("ngram", "ngram", None), ("./drafts/small", "draft_model", "./drafts/small")],
)
def test_bare_drafter(text, kind, model, tmp_path):
    for run in (config.load(write(tmp_path, f"drafter: {text}")), config.load(None, [f"drafter={text}"])):
        assert run.drafter.kind == kind
        assert getattr(run.drafter, "model", None) == model


def test_all_faults_at_once_with_lines_and_suggestions(tmp_path):
    path = write(
        tmp_path, "bach: 2\ncontext: many\ndrafter:\n  kind: ngram\n  num_spec_tokens: 4\n  prompt_lookup_min: 0\n"
    )
    with pytest.raises(ConfigError) as caught:
        config.load(path)
    message = str(caught.value)
    assert f"{path} has 4 faults" in message
    assert "line 1: unknown key 'bach'; did you mean 'batch'?" in message
    assert "line 2: context: input should be a valid integer, got 'many'" in message
    assert "line 5: unknown key 'drafter.num_spec_tokens'; did you mean 'num_speculative_tokens'?" in message
    assert "line 6: drafter.prompt_lookup_min" in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("drafter: ngrm", "unknown drafter 'ngrm'; did you mean 'ngram'?"),
        ("drafter: {prompt_lookup_max: 3}", "'drafter' needs a 'kind'"),
        ("drafter: {kind: draft_model}", "'drafter.model' is missing"),
        (
            "drafter: {kind: ngram, prompt_lookup_min: 5, prompt_lookup_max: 3}",
            r"prompt_lookup_min \(5\) must not exceed prompt_lookup_max \(3\)",
        ),
        ("drafter: {kind: ngram, prompt_lookup_max: 0}", "greater than or equal to 1"),
        ("drafter: 3", "drafter: input should be"),
        ("batch: true", "batch: input should be a valid integer, got True"),
        ("batch: 1\nbatch: 2", "line 2: 'batch' stands on line 1 already"),
        ("context: 100\npage_size: 16", "multiple of page_size"),
        ("context: 8\ndrafter: {kind: ngram, num_speculative_tokens: 8}", "must exceed num_speculative_tokens"),
        ("draft_sampling: sampled\ndrafter: ngram", "'ngram' has none"),
        ("accept: block", "is for sampled drafts"),
        ("- 1", "must hold keys and values"),
        ("a: [", "is not YAML"),
    ],
)
def test_refused(text, words, tmp_path):
    with pytest.raises(ConfigError, match=words):
        config.load(write(tmp_path, text))


def test_missing_file(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        config.load(tmp_path / "none.yaml")


def test_overrides():
    run = config.load(None, ["drafter=ngram", "drafter.num_speculative_tokens=4", "page_size=16", "page_size=null"])
    assert (run.drafter.num_speculative_tokens, run.page_size) == (4, None)


def test_overrides_leave_the_rest_of_the_file(tmp_path):
    path = write(tmp_path, "drafter: {kind: ngram, prompt_lookup_min: 3, prompt_lookup_max: 5}\n")
    assert config.load(path, ["drafter.prompt_lookup_max=4"]).drafter.prompt_lookup_min == 3


@pytest.mark.parametrize("text", ["batch", "=3", "drafter..kind=ngram", "batch.size=3", "batch=[", "drafter.modle=x"])
def test_refused_overrides(text):
    with pytest.raises(ConfigError):
        config.load(None, ["batch=1", text])


def test_speculative_config():
    read = config.from_speculative_config
    ngram = read('{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2}')
    assert (ngram.num_speculative_tokens, ngram.prompt_lookup_max, ngram.prompt_lookup_min) == (5, 4, 2)
    alone = read('{"method": "ngram", "prompt_lookup_max": 6}')
    assert (alone.prompt_lookup_min, alone.prompt_lookup_max) == (6, 6)
    assert read('{"method": "suffix", "suffix_decoding_max_tree_depth": 9}').max_depth == 9
    assert read('{"model": "./small", "num_speculative_tokens": 2}').model == "./small"


@pytest.mark.parametrize(
    ("method", "kind", "options"),
    [
        ("eagle3", "eagle3", {"topk": 1, "num_speculative_tokens": 3}),
        ("p_eagle", "peagle", {"num_speculative_tokens": 3}),
        ("mtp", "mtp", {"topk": 1}),
        ("dflash", "dflash", {"tree": "none"}),
        ("dspark", "dspark", {"num_speculative_tokens": 3}),
    ],
)
def test_speculative_config_of_learned_drafters(method, kind, options):
    """As in vLLM, they draft chains."""
    made = config.from_speculative_config(f'{{"method": "{method}", "model": "x", "num_speculative_tokens": 3}}')
    assert (made.kind, made.model) == (kind, "x")
    assert {name: getattr(made, name) for name in options} == options


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"method": "ngram", "prompt_lookup_mx": 3}', "'prompt_lookup_mx' for method 'ngram'; did you mean"),
        ('{"method": "ngrams"}', "unknown method 'ngrams'; did you mean 'ngram'"),
        ('{"num_speculative_tokens": 3}', "needs a 'method' .ngram, .*or the 'model'"),
        ('{"method": "ngram", "num_speculative_tokens": "3"}', "valid integer"),
        ("[1]", "must be a JSON object"),
        ("{", "is not JSON"),
    ],
)
def test_refused_speculative_config(text, words):
    with pytest.raises(ConfigError, match=words):
        config.from_speculative_config(text)
