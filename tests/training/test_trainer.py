"""Short runs on the tiny target: a family of either trainer learns, resumes, and drafts what its training promised."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import toy, training

from specjax.cli import train_run
from specjax.drafters import probe
from specjax.drafters.formats.read import load_drafter
from specjax.training import evaluate
from specjax.training.export import export, readme
from specjax.training.features import captured
from specjax.training.objective import Sample
from specjax.training.packing import pack
from specjax.training.recipe import make
from specjax.training.trainer import Trainer

STEPS = 120
COMMON = {
    "target": "toy", "length": 2 * training.LENGTH, "batch": 8, "steps": STEPS, "held_out": 0.1, "vocabulary": 64,
    "evaluate_every": STEPS, "evaluate_rows": 8, "warm_rows": 16, "dtype": "float32", "save_every": 1000,
    "adam_rate": 3e-3,
}  # fmt: skip
FAMILIES = {
    "eagle3": {"unroll": 4, "head_rank": 8, "head_candidates": toy.VOCAB},
    "dspark": {"block_size": 5, "anchors": 12, "markov_rank": 8},
}
OTHERS = {
    "mtp": {"unroll": 3},
    "dflash": {"block_size": 5, "anchors": 12},
    "dflash2": {"block_size": 5, "anchors": 12, "selector_rank": 8, "selector_top_k": 8},
    "ubtree": {"block_size": 5, "anchors": 12, "selector_rank": 8, "selector_top_k": 8, "codebook_hidden": 16},
}


def run(family, folder, options, resume=False):
    target, params = toy.tiny()
    recipe = make(COMMON | {"drafter": family} | options)
    return Trainer(recipe, target, params, training.corpus(300, 0.1), folder, resume=resume)


@pytest.fixture(scope="module", params=FAMILIES)
def trained(request, tmp_path_factory):
    """A complete run, and what it reported."""
    folder = tmp_path_factory.mktemp(request.param) / "run"
    trainer = run(request.param, folder, FAMILIES[request.param])
    lines = []
    assert trainer.run(lines.append)
    return trainer, lines


def learns(trainer, lines):
    held = pack(training.corpus(300, 0.1).split(0.1, 0)[1], trainer.recipe.length)
    lookup = evaluate.ngram_acceptance(held, trainer.recipe.ahead)
    first, last = np.mean([x.loss for x in lines[:8]]), np.mean([x.loss for x in lines[-8:]])
    assert last < first - 0.02
    assert lines[-1].held_out["length"] > lookup.length + 0.2
    assert lines[-1].held_out["length"] > lines[0].held_out["length"] + 0.15


def test_loss_falls_and_acceptance_rises_above_lookup(trained):
    learns(*trained)


def test_eagle_starts_from_a_regression(trained):
    trainer, lines = trained
    if trainer.config.family == "eagle3":
        assert lines[0].rate == 0 and lines[0].held_out["length"] > 1.15  # 1.03 at random


def test_prompts_are_learned_where_the_recipe_says_so_and_never_judged(tmp_path):
    some = run("eagle3", tmp_path / "some", FAMILIES["eagle3"])
    every = run("eagle3", tmp_path / "every", FAMILIES["eagle3"] | {"learn": "all"})
    assert every.packed.mask.sum() == (every.packed.segments > 0).sum() > some.packed.mask.sum()
    np.testing.assert_array_equal(every.held.mask, some.held.mask)


@pytest.mark.slow
@pytest.mark.parametrize("family", OTHERS)
def test_every_other_family_learns(family, tmp_path):
    trainer = run(family, tmp_path / "run", OTHERS[family])
    lines = []
    trainer.run(lines.append)
    learns(trainer, lines)


def test_metrics_hold_every_step(trained):
    trainer, lines = trained
    written = [json.loads(x) for x in (trainer.out / "metrics.jsonl").read_text().splitlines()]
    assert [x["step"] for x in written] == list(range(1, STEPS + 1))
    assert written[-1] == json.loads(json.dumps(dataclasses.asdict(lines[-1])))
    assert written[-1]["progress"] == 1 and written[0]["rate"] < written[10]["rate"]


def test_a_stopped_run_goes_on_to_the_same_numbers(trained, tmp_path):
    whole, lines = trained
    family = whole.config.family
    run(family, tmp_path / "run", FAMILIES[family])  # stopped before its first step
    stopped = run(family, tmp_path / "run", FAMILIES[family], resume=True)
    assert not stopped.run(lambda line: None, lambda: stopped.state.step == 7)
    resumed = run(family, tmp_path / "run", FAMILIES[family], resume=True)
    assert resumed.state.step == 7
    again = []
    resumed.run(again.append, lambda: resumed.state.step == 12)
    assert [x.loss for x in again] == [x.loss for x in lines[7:12]]
    assert [x.loss_by_slot for x in again] == [x.loss_by_slot for x in lines[7:12]]
    written = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(x)["step"] for x in written] == list(range(1, 13))


def test_the_exported_folder_drafts_what_training_promised(trained, tmp_path):
    """The engine's own code, on the folder as it is read back, accepts what the trainer's hits say."""
    trainer, lines = trained
    target, params = toy.tiny()
    metrics = [dataclasses.asdict(x) for x in lines]
    data = {"dialogues": 1, "rows": len(trainer.packed), "learned": int(trainer.packed.mask.sum())}
    text = readme(
        trainer.config, trainer.recipe.model_dump(), data, metrics, "specjax train run", trainer.calibration()
    )
    folder = export(tmp_path / "drafter", trainer.written_config, trainer.tensors(), target.config, text)
    assert f"{metrics[-1]['held_out']['length']:.3f}" in (folder / "README.md").read_text()
    loaded = load_drafter(folder, target.config)
    assert loaded.config == trainer.written_config
    tokens = training.texts(300, 0.1)[7]
    corpus = training.corpus(300, 0.1)
    packed = pack(type(corpus)([corpus.dialogues[7]], corpus.origin), trainer.recipe.length)
    batch = packed.batch(np.array([0]))
    depth, start = 4, training.PROMPT
    roots = np.arange(start, training.LENGTH - depth)
    anchors = None if trainer.config.family == "eagle3" else jnp.asarray(roots)[None]
    sample = Sample(batch=batch, features=None, columns=None, anchors=anchors)
    read = {name: jnp.asarray(x, jnp.float32) for name, x in loaded.tensors.items()}
    features = captured(target, trainer.config.taps, params, batch)
    hits = jax.jit(lambda s, f: trainer.objective.hits(read, jnp.float32(1), params, s, f))(sample, features)
    hit = np.asarray(hits.hit)[0]
    hit = hit[roots] if anchors is None else hit
    promised = np.cumprod(hit[:, :depth], axis=1).sum(axis=1)
    each = np.split(np.asarray(features.taps)[0, : training.LENGTH - 1], len(trainer.config.taps), axis=-1)
    text = probe.Text(
        tokens=tokens,
        start=start,
        hidden=features.hidden[0, : training.LENGTH - 1],
        taps={t: jnp.asarray(x) for t, x in zip(trainer.config.taps, each, strict=True)},
    )
    found = probe.accepted(loaded.config, loaded, text, target, params, jnp.float32)
    assert found.tolist() == promised.tolist()
    assert found.sum() >= 4


def test_a_folder_is_of_one_run(trained, tmp_path):
    trainer, _ = trained
    family = trainer.config.family
    with pytest.raises(ValueError, match="holds a run already"):
        run(family, trainer.out, FAMILIES[family])
    with pytest.raises(ValueError, match="another batch"):
        run(family, trainer.out, FAMILIES[family] | {"batch": 4}, resume=True)
    with pytest.raises(ValueError, match="no run that could be resumed"):
        run(family, tmp_path / "none", FAMILIES[family], resume=True)


def test_the_commands_finish_and_look_at_a_run(trained, tmp_path, monkeypatch, capsys):
    trainer, _ = trained
    monkeypatch.setattr(train_run, "load", lambda *args, **options: (trainer, training.corpus(300, 0.1)))
    out = str(trainer.out)
    picture = tmp_path / "curve.png"
    assert train_run.Run(corpus="corpus", out=out, resume=True, plot=str(picture)).run() == 0
    assert picture.stat().st_size > 1000
    text = (trainer.out / "drafter" / "README.md").read_text()
    assert f"specjax train run --drafter {trainer.config.family} --target toy" in text and "-o warm_rows=16" in text
    assert train_run.Eval(folder=out, corpus="corpus", export=str(tmp_path / "drafter")).run() == 0
    printed = capsys.readouterr().out
    assert trainer.config.family in printed and "ngram" in printed
    written = load_drafter(tmp_path / "drafter", trainer.target.config).config
    assert dataclasses.replace(written, acceptance=()) == trainer.written_config
    looks = [json.loads(line)["held_out"] for line in (trainer.out / "metrics.jsonl").read_text().splitlines()]
    by_slot = [look for look in looks if look][-1]["by_slot"]
    assert 1 <= len(written.acceptance) <= len(by_slot)
    assert written.acceptance == pytest.approx(by_slot[: len(written.acceptance)], abs=1e-3)
    with pytest.raises(ValueError, match="leave the other options out"):
        train_run.Run(corpus="corpus", out=out, resume=True, steps=5).run()


@pytest.mark.slow
def test_two_devices_share_a_batch(tmp_path):
    """The same losses as one device, up to the order of sums; in a process of its own, where the CPU counts as two."""
    script = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
import jax
assert len(jax.devices()) == 2
from pathlib import Path
from training.test_trainer import FAMILIES, run
trainer = run("eagle3", Path({str(tmp_path / "two")!r}), FAMILIES["eagle3"])
print([float(trainer.step(0.5)["loss"]) for _ in range(4)])
assert len(trainer.sample(0).batch.tokens.sharding.device_set) == 2
"""
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    out = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stderr
    one = run("eagle3", tmp_path / "one", FAMILIES["eagle3"])
    want = [float(one.step(0.5)["loss"]) for _ in range(4)]
    np.testing.assert_allclose(json.loads(out.stdout.splitlines()[-1]), want, rtol=1e-3)
