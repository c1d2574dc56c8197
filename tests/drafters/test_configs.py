"""Every configuration that ships is read, built on a tiny target and decodes what the target says."""

import types
from pathlib import Path

import numpy as np
import pytest
import yaml
from support import blocks, checkpoints, engines, toy

from specjax import config as configs
from specjax.engine import drafter as wiring
from specjax.engine.drafter import make_drafter
from specjax.engine.pricing import find_table
from specjax.sampling import SamplingParams
from specjax.targets.config import expected_tensors

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
# What stands where a configuration takes the drafter that comes with specjax: a checkpoint of the packaging.
CHECKPOINTS = {
    "eagle3": "eagle3-specforge",
    "hybrid": "eagle3-specforge",
    "auto": "eagle3-specforge",
    "peagle": "peagle-specforge",
    "mtp": "mtp-qwen",
    "dflash": "dflash-zlab",
    "dspark": "dspark-deepspec",
    "ubtree": "ubtree",
}
PROMPT, NEW = [5, 9, 2], 12


def target():
    """A table of what comes next, with features, in the shape that the checkpoints were made for."""
    _, params = blocks.feature_target(toy.VOCAB)
    streams = np.random.default_rng(1).standard_normal((checkpoints.L, toy.VOCAB, blocks.WIDTH)).astype(np.float32)
    return blocks.FeatureTable(checkpoints.TARGET), params | {"taps": streams}


def read(path: Path, folder: Path):
    """The configuration, with a checkpoint for the target that is decoded here; the probe has tests of its own."""
    values = yaml.safe_load(path.read_text())
    if path.stem in CHECKPOINTS:
        sample = next(s for s in checkpoints.samples() if s.format == CHECKPOINTS[path.stem])
        written = str(sample.copy().write(folder / "head"))
        part = values["drafter"]
        part = part["of"][-1] if path.stem == "auto" else part
        part = part["model"] if part["kind"] == "hybrid" else part
        part["model"] = written
    run = configs.make(values)
    return run.model_copy(update={"drafter": configs.without_probe(run.drafter) or run.drafter})


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_runs(path, tmp_path, monkeypatch):
    model, params = target()
    small = toy.tiny_config()
    tensors = {name: np.zeros(shape, np.float32) for name, shape in expected_tensors(small).items()}
    draft_model = types.SimpleNamespace(config=small, tensors=tensors, tokenizer=None)
    monkeypatch.setattr(wiring, "load_checkpoint", lambda name: draft_model)
    run = read(path, tmp_path)
    if run.drafter.kind == "draft_model":
        run = run.model_copy(update={"drafter": run.drafter.model_copy(update={"probe": None})})
    drafter, weights = make_drafter(run, model, params, None, "float32", lambda note: None)
    assert getattr(drafter, "kind", "none") == run.drafter.kind
    table = None
    if run.drafter.kind == "auto":
        table = find_table(run, model.config, "float32", drafter, lambda note: None)
    engine = toy.engine(drafter, weights, (model, params), table=table)
    engine = engine if table else engines.narrow(engine)
    result = engine.generate(PROMPT, SamplingParams(max_tokens=NEW))
    said, after = [PROMPT[-1]], np.asarray(params["by_token"]).argmax(axis=1)
    for _ in range(NEW):
        said.append(int(after[said[-1]]))
    assert result.token_ids == said[1:]
    # This short text happens to repeat itself, so that lookup drafts too.
    assert (result.spec.drafted > 0) == (drafter is not None) or run.drafter.kind == "auto"
