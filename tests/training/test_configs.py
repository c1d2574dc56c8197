from pathlib import Path

import numpy as np
import pytest

from specjax.drafters.config import expected_tensors
from specjax.training.recipe import head_config, load
from specjax.weights.load import load_checkpoint

FILES = sorted((Path(__file__).parents[2] / "configs" / "train").glob("*.yaml"))


@pytest.fixture(scope="module")
def target():
    return load_checkpoint("smollm2-135m").config


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_shipped_recipe_makes_a_small_drafter(path, target):
    recipe = load(path)
    assert recipe.drafter == path.stem
    assert recipe.target == "smollm2-135m"
    config = head_config(recipe, target, np.ones(target.vocab_size))
    # Of the candidate head, what is written: the full head times `lift` makes the other factor.
    written = {name: shape for name, shape in expected_tensors(config).items() if name != "candidate_head.up.weight"}
    assert 2 * sum(int(np.prod(shape)) for shape in written.values()) < 11e6
