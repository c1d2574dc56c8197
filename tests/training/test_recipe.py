import numpy as np
import pytest
from support import toy

from specjax.config import ConfigError
from specjax.drafters.formats.read import load_drafter
from specjax.drafters.learned import check_tensors
from specjax.training.export import export
from specjax.training.optimizer import is_matrix, rate
from specjax.training.recipe import default_taps, head_config, load, make, restore
from specjax.training.warm_start import random


def test_a_file_yields_to_overrides_and_to_nothing_else(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("drafter: dspark\nsteps: 10\nbatch: 2\n")
    recipe = load(path, ["batch=3", "taps=[1, 2]"])
    assert restore(recipe.model_dump(mode="json")) == recipe
    assert (recipe.batch, recipe.taps, recipe.block_size, recipe.decay) == (3, (1, 2), 7, 4.0)


def test_a_length_of_the_command_takes_the_place_of_the_files(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("drafter: mtp\nminutes: 30\n")
    assert (load(path).steps, load(path).minutes) == (None, 30)
    for name in ("steps", "tokens"):
        recipe = load(path, [f"{name}=7"])
        assert (getattr(recipe, name), recipe.minutes) == (7, None)
    with pytest.raises(ConfigError, match="name one length"):
        load(path, ["steps=7", "tokens=7"])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"drafter": "eagle3"}, "name one length"),
        ({"drafter": "eagle3", "steps": 1, "minutes": 1.0}, "name one length"),
        ({"drafter": "eagle3", "steps": 1, "anchors": 4}, "eagle3 has no anchors"),
        ({"drafter": "mtp", "steps": 1, "taps": (1,)}, "mtp has no taps"),
        ({"drafter": "dspark", "steps": 1, "labels": "text"}, "dspark has no labels"),
        ({"drafter": "dflash", "steps": 1, "taps": (2, 1)}, "ascending"),
        ({"drafter": "dflash", "steps": 1, "rate": 1}, "rate"),
        ({"drafter": "medusa", "steps": 1}, "drafter"),
    ],
)
def test_what_cannot_be_honoured_is_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        make(values)


@pytest.mark.parametrize("family", ["eagle3", "mtp", "dflash", "dflash2", "dspark", "ubtree"])
def test_a_recipe_makes_a_drafter_that_has_its_tensors_and_a_format(family, tmp_path):
    target = toy.tiny_config()
    config = head_config(make({"drafter": family, "steps": 1}), target, np.arange(64) + 1)
    assert config.taps == (() if family == "mtp" else (1,))
    tensors = random(config, toy.tiny()[1], 0)
    check_tensors(config, tensors)
    loaded = load_drafter(export(tmp_path / "drafter", config, tensors, target, "how"), target)
    assert loaded.config == config


def test_default_taps():
    assert default_taps(30) == (2, 15, 27)
    assert default_taps(1) == (0,)


def test_rates_rise_and_fall_to_zero():
    assert [rate(x, 0.2) for x in (0, 0.1, 0.2, 0.6, 1.0, 1.1)] == [0, 0.5, 1, 0.5, 0, 0]
    assert rate(0, 0) == 1


def test_tables_of_tokens_are_no_matrices():
    assert is_matrix("layers.0.mlp.up_proj.weight", (8, 4))
    assert not is_matrix("markov_head.markov_w2.weight", (64, 4))
    assert not is_matrix("candidate_selector.predecessor_codebook", (64, 4))
    assert not is_matrix("confidence_head.proj.weight", (1, 9))
    assert not is_matrix("norm.weight", (8,))
