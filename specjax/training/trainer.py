"""The loop: sample, step, look at the held-out slice now and then, save, and go on from there.

Everything random is a function of the seed and the step, and what a step computes depends on its number and the state
alone; so a run that was stopped goes on to the same numbers. (A run of so many minutes cannot: its rates follow the
clock. It keeps the minutes that it has used.)
"""

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specjax.drafters.config import HeadConfig
from specjax.targets.decoder import Target
from specjax.training import calibrate, candidate_head, evaluate, features, optimizer, warm_start
from specjax.training.corpus import Corpus
from specjax.training.objective import Objective, Sample
from specjax.training.packing import Packed, pack, rows_of_step
from specjax.training.progress import Checkpoints, Log, State, StepReport
from specjax.training.recipe import Recipe, head_config, restore
from specjax.training.vocabulary import Chooser

HELD_OUT_ANCHORS = 16  # of a packed row, when a block drafter is looked at
HEAD_STEPS, HEAD_ROWS = 16, 16384  # batches that a candidate head is fitted to, and rows that are kept of them


class Trainer:
    """A training run.

    Args:
        recipe: what to do.
        target: the model.
        params: its arrays, in the dtype of products.
        corpus: what it wrote.
        out: folder of the run: checkpoints and metrics; cached features stand beside it, for other runs to share.
        resume: go on with the run in `out`; from its beginning if it was stopped before the first checkpoint.
        start: tensors to start from where names and shapes agree, instead of a warm start.
        note: is told what is being prepared.

    Raises:
        ValueError: `out` holds a run and `resume` is not set, or the other way round; or the run there has another
            recipe or another corpus.
    """

    def __init__(
        self,
        recipe: Recipe,
        target: Target,
        params: Any,
        corpus: Corpus,
        out: Path,
        *,
        resume: bool = False,
        start: dict[str, np.ndarray] | None = None,
        note: Callable[[str], None] = lambda text: None,
    ):
        self.recipe, self.target, self.out, self.note = recipe, target, Path(out), note
        train, held = corpus.split(recipe.held_out, recipe.seed)
        self.packed, self.held = pack(train, recipe.length), pack(held, recipe.length).some(recipe.evaluate_rows)
        if recipe.learn == "all":
            self.packed = self.packed.whole()
        vocab = target.config.vocab_size
        counts = np.bincount(self.packed.tokens[self.packed.mask], minlength=vocab)
        seen = np.bincount(self.packed.tokens[self.packed.segments > 0], minlength=vocab)
        self.chooser = Chooser(counts=counts, size=recipe.vocabulary)
        self.config: HeadConfig = head_config(recipe, target.config, seen)
        self.objective = Objective(recipe, self.config, target, str(jax.tree.leaves(params)[0].dtype))
        # What the loss reads of the target; its layers too where a step makes the features itself.
        # With several devices, each takes some of a batch's rows; weights are everywhere.
        mesh = Mesh(np.array(jax.devices()), ("rows",))
        if recipe.batch % mesh.size:
            raise ValueError(f"a batch of {recipe.batch} rows cannot be shared out to {mesh.size} devices")
        self._rows, self._everywhere = NamedSharding(mesh, PartitionSpec("rows")), NamedSharding(mesh, PartitionSpec())
        self._params = params = jax.device_put(params, self._everywhere)
        self._shared = {name: params[name] for name in ("embedding", "norm", "head") if name in params}
        self._manager = Checkpoints(self.out / "checkpoints")
        self._identify(resume)
        note(f"{len(self.packed)} rows of {recipe.length} tokens, {int(self.packed.mask.sum())} to learn")
        self._store = self._features(note) if recipe.features == "cache" else None
        self.state = self._restored() if self._manager.steps() else self._fresh(start, note)
        for name in ("trained", "optimizer", "scale"):
            setattr(self.state, name, jax.device_put(getattr(self.state, name), self._everywhere))

    # ---------------------------------------------------------------- running

    @property
    def progress(self) -> float:
        """The share of the run that is done."""
        r, s = self.recipe, self.state
        if r.steps is not None:
            return s.step / r.steps
        if r.tokens is not None:
            return s.step * r.batch * r.length / r.tokens
        assert r.minutes is not None
        return s.seconds / (60 * r.minutes)

    def run(self, report: Callable[[StepReport], None], stopped: Callable[[], bool] = lambda: False) -> bool:
        """Train to the end of the run, or until `stopped`, and save.

        Args:
            report: is told of every step.
            stopped: is asked after every step.

        Returns:
            Whether the run is complete.
        """
        r = self.recipe
        log = Log(self.out / "metrics.jsonl", self.state.step)
        before, started = self.state.seconds, perf_counter()
        while self.progress < 1 and not stopped():
            began = perf_counter()
            progress = self.progress
            rate = optimizer.rate(progress, r.warmup)
            metrics = self.step(rate)
            step = self.state.step
            look = step % r.evaluate_every == 0 or step == 1
            held = dataclasses.asdict(self.acceptance()) if look else None
            self.state.seconds = before + perf_counter() - started
            if self.progress >= 1 and held is None:
                held = dataclasses.asdict(self.acceptance())
            line = StepReport(
                step=step,
                tokens=step * r.batch * r.length,
                seconds=round(self.state.seconds, 2),
                progress=round(min(self.progress, 1.0), 5),
                rate=rate,
                loss=float(metrics["loss"]),
                loss_by_slot=np.asarray(metrics["loss_by_slot"]).round(5).tolist(),
                agreement=np.asarray(metrics["agreement"]).round(5).tolist(),
                tokens_per_s=round(r.batch * r.length / (perf_counter() - began), 1),
                held_out=held,
            )
            log.add(line)
            report(line)
            if step % r.save_every == 0:
                self.save()
        self.save()
        return self.progress >= 1

    def step(self, rate: float) -> dict[str, Any]:
        """One step at `rate` parts of the peak rates; its loss and what each slot reached."""
        s = self.state
        sample = self.sample(s.step)
        params = self._shared if sample.features is not None else self._params
        s.trained, s.optimizer, metrics = _step(
            self.objective, s.trained, s.optimizer, s.scale, params, sample, jnp.float32(rate)
        )
        s.step += 1
        return jax.device_get(metrics)

    def sample(self, step: int) -> Sample:
        """What a step reads: a function of its number."""
        r = self.recipe
        rows = rows_of_step(len(self.packed), r.batch, step, r.seed)
        batch = self.packed.batch(rows)
        rng = np.random.default_rng((r.seed, 1, step))
        rows = Sample(
            batch=batch,
            features=None if self._store is None else self._store.batch(rows),
            columns=None,
            anchors=self.objective.anchors(batch, rng, r.anchors),
        )
        return dataclasses.replace(jax.device_put(rows, self._rows), columns=self.chooser.columns(batch.tokens, rng))

    def acceptance(self, packed: Packed | None = None, keep: Callable[[Any], None] = lambda hits: None):
        """`Acceptance` on the held-out slice or on other rows; `keep` is handed the hits of each batch."""
        state = (self.state.trained, self.state.scale, self._params)
        packed = self.held if packed is None else packed
        batch = min(self.recipe.batch, len(self.held))
        return evaluate.acceptance(
            self.objective, functools.partial(_hits, self.objective), state, packed, batch, HELD_OUT_ANCHORS, keep
        )

    def calibration(self) -> list[float]:
        """Temperatures of DSpark's confidence head, fitted on the held-out slice; empty for another family."""
        if not self.config.confidence:
            return []
        hits: list[Any] = []
        self.acceptance(keep=hits.append)
        valid = np.concatenate([np.asarray(x.valid) for x in hits])
        logits, hit = (np.concatenate([np.asarray(getattr(x, n)) for x in hits]) for n in ("confidence", "hit"))
        return calibrate.fit(logits[valid], hit[valid])

    def candidate_head(self) -> dict[str, np.ndarray]:
        """Factors of the candidate head, fitted to rows of the drafter; empty where the recipe has none."""
        r = self.recipe
        if not r.head_rank:
            return {}
        rows = []
        for step in range(HEAD_STEPS):  # rows of steps that are never trained on together
            sample = self.sample(self.state.step + step)
            params = self._shared if sample.features is not None else self._params
            found = _rows(self.objective, self.state.trained, self.state.scale, params, sample)
            rows.append(found[:: max(1, len(found) * HEAD_STEPS // HEAD_ROWS)])
        shared = self._shared.get("head", {}).get("weight", self._shared["embedding"])
        self.note("fitting the candidate head")
        fitted = candidate_head.fit(
            shared, jnp.concatenate(rows), rank=r.head_rank, candidates=r.head_candidates, seed=r.seed
        )
        plain, seen, trained = fitted.recall
        self.note(
            f"candidate head of rank {r.head_rank}: the best token is among {r.head_candidates} candidates in "
            f"{plain:.3f} of rows by the head's own decomposition, {seen:.3f} by one that knows the rows, "
            f"{trained:.3f} trained"
        )
        return {"candidate_head.down.weight": fitted.down, "candidate_head.lift.weight": fitted.lift}

    @property
    def written_config(self) -> HeadConfig:
        """The drafter as it is written: with the candidate head, which training leaves out."""
        r = self.recipe
        return dataclasses.replace(self.config, head_rank=r.head_rank, head_candidates=r.head_candidates)

    def tensors(self) -> dict[str, np.ndarray]:
        """The drafter's own tensors as they are now, float32."""
        return jax.device_get(self.objective.folded(self.state.trained, self.state.scale))

    def save(self) -> None:
        """Write a checkpoint, unless the newest one is of this step."""
        self._manager.save(self.state)

    # ---------------------------------------------------------------- preparing

    def _identify(self, resume: bool) -> None:
        """See that the folder holds this run, or none; write what the run is."""
        about = {"recipe": self.recipe.model_dump(mode="json"), "corpus": self.packed.digest()}
        path = self.out / "run.json"
        if not path.exists():
            if resume:
                raise ValueError(f"{self.out} holds no run that could be resumed")
            if self.out.exists() and any(self.out.iterdir()):
                raise ValueError(f"{self.out} is not empty; name a folder that does not exist yet")
            self.out.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(about, indent=2) + "\n")
            return
        if not resume and self._manager.steps():
            raise ValueError(f"{self.out} holds a run already: resume it, or name another folder")
        found = json.loads(path.read_text())
        there = restore(found["recipe"]).model_dump(mode="json")
        if found["corpus"] != about["corpus"]:
            raise ValueError(
                f"the run in {self.out} was made on other data: a corpus that has grown needs a new run, which may "
                "start from this run's drafter"
            )
        other = {name for name, value in about["recipe"].items() if there[name] != value}
        if other:
            raise ValueError(f"the run in {self.out} has another {', '.join(sorted(other))}: resume it as it is")

    def _features(self, note: Callable[[str], None]) -> features.Store:
        taps = self.config.taps
        need = features.size(self.packed, self.target.config.hidden_size, taps)
        # Beside the run: drafters of one corpus that read the same streams share them.
        stem = f"features-{self.packed.digest()[:12]}"
        for there in sorted(self.out.parent.glob(f"{stem}*")):
            if store := features.take_up(there, self.packed, self.target.config.hidden_size, taps):
                note(f"features are those in {there}")
                return store
        folder, batch = self.out.parent / "-".join([stem, *map(str, taps)]), self.recipe.batch
        note(f"features of {self.packed.tokens.size} tokens: {need / 1e9:.2f} GB in {folder}")

        def progress(done: int, total: int) -> None:
            if done == total or done % (self.recipe.batch * 16) == 0:
                note(f"features: {done} of {total} rows")

        return features.fill(folder, self.packed, self.target, self._params, taps, batch, progress)

    def _fresh(self, start: dict[str, np.ndarray] | None, note: Callable[[str], None]) -> State:
        r, args = self.recipe, (self.config, self.target, self._params, self.packed)
        rows = 0 if start is not None else r.warm_rows
        note(
            "starting from the target" if rows else "starting at random" if start is None else "starting from a drafter"
        )
        scale = warm_start.tap_scale(*args, max(r.warm_rows // 4, 1)) if self.objective.is_block else np.float32(1)
        trained = warm_start.initial(*args, rows, r.seed, r.batch, scale)
        if start is not None:
            own = {name: x for name, x in start.items() if name in trained and trained[name].shape == x.shape}
            if self.objective.is_block and "fc.weight" in own:
                own["fc.weight"] = own["fc.weight"] * scale
            note(f"{len(own)} of {len(trained)} tensors are taken over")
            trained |= {name: np.asarray(x, np.float32) for name, x in own.items()}
        start_of = optimizer.build(r, trained, self.objective.dtype).init(trained)
        return State(trained=jax.tree.map(jnp.asarray, trained), optimizer=start_of, scale=jnp.asarray(scale))

    def _restored(self) -> State:
        trained = warm_start.random(self.config, self._params, self.recipe.seed)
        width = len(self.config.taps) * self.target.config.hidden_size
        scale = np.ones((width,), np.float32) if self.objective.is_block else np.float32(1)
        opt = jax.eval_shape(optimizer.build(self.recipe, trained, self.objective.dtype).init, trained)
        shape = State(trained=trained, optimizer=opt, scale=scale)
        return self._manager.restore(shape)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=(1, 2))
def _step(objective: Objective, trained, state, scale, target_params, sample: Sample, rate):
    """One update; see `Trainer.step`. Returns tensors, the optimiser's state and metrics."""
    with jax.named_scope("features"):
        given = objective.features(target_params, sample)
    grad = jax.value_and_grad(objective.loss, has_aux=True)
    (loss, metrics), grads = grad(trained, scale, target_params, sample, given)
    with jax.named_scope("update"):
        optimiser = optimizer.build(objective.recipe, trained, objective.dtype)
        updates, state = optimiser.update(grads, state, trained)
        trained = optax.apply_updates(trained, jax.tree.map(lambda u: rate * u, updates))
    return trained, state, metrics | {"loss": loss}


@functools.partial(jax.jit, static_argnums=0)
def _hits(objective, trained, scale, target_params, sample):
    return objective.hits(trained, scale, target_params, sample, objective.features(target_params, sample))


@functools.partial(jax.jit, static_argnums=0)
def _rows(objective, trained, scale, target_params, sample):
    return objective.rows(trained, scale, target_params, sample, objective.features(target_params, sample))
