"""The trained drafters in `drafts/`: of a size that a clone can carry, found by their files, and of some use."""

import json
from pathlib import Path

import pytest

from specjax import Engine, RunConfig, SamplingParams
from specjax.drafters.formats.read import load_drafter
from specjax.drafters.shipped import shipped
from specjax.weights.load import load_checkpoint

TARGET = "smollm2-135m"
FOLDERS = shipped(TARGET)
HELD_OUT = Path(__file__).parents[2] / "configs" / "prompts" / "heldout.jsonl"


@pytest.fixture(scope="module")
def target():
    return load_checkpoint(TARGET).config


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


@pytest.mark.parametrize("family", FOLDERS)
def test_is_read_as_any_other(family, target):
    loaded = load_drafter(FOLDERS[family], target)
    assert loaded.config.family == family
    assert size(FOLDERS[family]) < 11e6
    assert "How it was trained" in (FOLDERS[family] / "README.md").read_text()


def test_there_is_one_of_each_kind_and_a_clone_stays_light():
    assert set(FOLDERS) == {"dflash", "dspark", "eagle3", "mtp", "ubtree"}
    assert sum(map(size, FOLDERS.values())) < 42e6


@pytest.mark.slow
def test_eagle3_drafts_what_the_target_says():
    """On prompts that it was not trained on: the text is plain decoding's, in far fewer rounds."""
    options = {"target": TARGET, "context": 512, "dtype": "float32"}
    prompts = [json.loads(line)["turns"][0] for line in HELD_OUT.read_text().splitlines()[::20]]
    params = SamplingParams(max_tokens=40)
    plain = Engine.load(RunConfig(**options), quiet=True)
    drafting = plain.with_drafter({"kind": "eagle3", "probe": False})
    rounds = tokens = 0
    for prompt in prompts:
        result = drafting.generate(prompt, params)
        assert result.token_ids == plain.generate(prompt, params).token_ids
        rounds, tokens = rounds + result.spec.rounds, tokens + len(result.token_ids) - 1
    assert tokens / rounds > 1.5
