"""`specjax train run`: what is handed to the trainer. What comes of it is tested there."""

from types import SimpleNamespace

import pytest

from specjax.cli import train_run
from specjax.cli.main import main
from specjax.drafters.formats import read
from specjax.engine import compilation
from specjax.targets import decoder
from specjax.training import corpus, trainer
from specjax.training.recipe import Recipe
from specjax.weights import load


@pytest.mark.parametrize(
    ("drafter", "own", "mask"), [("dspark", None, 7), ("dspark", 5, 5), ("ubtree", None, 7), ("eagle3", None, None)]
)
def test_a_block_drafter_goes_on_with_the_mask_token_of_its_start(drafter, own, mask, monkeypatch, tmp_path):
    """Whatever token the corpus has least: the start has learned what its own stands for."""
    begun = SimpleNamespace(tensors={"norm.weight": 1.0}, config=SimpleNamespace(mask_token_id=7))
    monkeypatch.setattr(compilation, "use_cache", lambda folder: None)
    monkeypatch.setattr(load, "load_checkpoint", lambda name: SimpleNamespace(config=None, tensors={}))
    monkeypatch.setattr(corpus.Origin, "of", lambda checkpoint: None)
    monkeypatch.setattr(corpus.Corpus, "open", lambda folder, origin: None)
    monkeypatch.setattr(decoder, "from_tensors", lambda *args: (None, None))
    monkeypatch.setattr(read, "load_drafter", lambda folder, config: begun)
    monkeypatch.setattr(trainer, "Trainer", lambda recipe, *args, **options: SimpleNamespace(recipe=recipe, **options))
    given = {} if own is None else {"mask_token_id": own}
    recipe = Recipe(drafter=drafter, target="smollm2-135m", start="earlier", minutes=1.0, dtype="float32", **given)
    made, _ = train_run.load(recipe, "corpus", str(tmp_path), resume=False)
    assert made.start == begun.tensors
    assert made.recipe.mask_token_id == mask
    (tmp_path / "checkpoints").mkdir()  # a run that goes on: `run.json` knows
    made, _ = train_run.load(recipe, "corpus", str(tmp_path), resume=True)
    assert made.start is None and made.recipe.mask_token_id == own


@pytest.mark.parametrize("began", [False, True])
def test_stopped_before_the_first_step_it_says_how_to_go_on(began, monkeypatch, tmp_path, capsys):
    """Features take their time; the recipe is kept by then."""
    if began:
        (tmp_path / "run.json").write_text("{}")

    def stop(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(train_run, "load", stop)
    argv = ["train", "run", "--drafter", "mtp", "--corpus", "corpus", "--out", str(tmp_path), "--steps", "1"]
    assert main(argv) == 130
    assert ("--resume goes on" in capsys.readouterr().err) == began
