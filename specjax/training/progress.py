"""What a training run leaves in its folder as it goes: checkpoints, and a line of metrics a step."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

KEPT = 2  # checkpoints


@dataclasses.dataclass
class State:
    """What a checkpoint holds.

    Attributes:
        trained: the tensors, float32, by canonical name.
        optimizer: the optimiser's state.
        scale: of the taps, for a block drafter (see `warm_start.tap_scale`).
        step: steps done.
        seconds: of training, over all sittings.
    """

    trained: dict[str, Any]
    optimizer: Any
    scale: Any
    step: int = 0
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class StepReport:
    """A line of the metrics: one step, and the held-out slice where it was looked at."""

    step: int
    tokens: int
    seconds: float
    progress: float
    rate: float
    loss: float
    loss_by_slot: list[float]
    agreement: list[float]
    tokens_per_s: float
    held_out: dict[str, Any] | None = None


class Checkpoints:
    """Numbered checkpoints in a folder, each complete or not there; the newest ones are kept."""

    def __init__(self, folder: Path):
        self.folder = folder.absolute()

    def steps(self) -> list[int]:
        """Steps that there are checkpoints of, ascending."""
        return sorted(int(p.name) for p in self.folder.glob("*") if p.name.isdigit()) if self.folder.is_dir() else []

    def save(self, state: State) -> None:
        """Write one, unless there is one of this step."""
        if state.step in self.steps():
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        with ocp.StandardCheckpointer() as writer:
            writer.save(self.folder / str(state.step), _tree(state))
        for old in self.steps()[:-KEPT]:
            shutil.rmtree(self.folder / str(old))

    def restore(self, shape: State) -> State:
        """The newest checkpoint, into the structure of `shape`."""
        wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), _tree(shape))
        with ocp.StandardCheckpointer() as reader:
            tree = reader.restore(self.folder / str(self.steps()[-1]), wanted)
        tree = jax.tree.map(jnp.asarray, tree)
        return State(
            trained=tree["trained"],
            optimizer=tree["optimizer"],
            scale=tree["scale"],
            step=int(tree["step"]),
            seconds=float(tree["seconds"]),
        )


def _tree(state: State) -> dict[str, Any]:
    return {
        "trained": state.trained,
        "optimizer": state.optimizer,
        "scale": state.scale,
        "step": np.asarray(state.step, np.int32),
        "seconds": np.asarray(state.seconds, np.float32),
    }


class Log:
    """`metrics.jsonl`: a line a step; what a stopped run wrote past its checkpoint is taken out."""

    def __init__(self, path: Path, step: int):
        self._path = path
        if path.exists():
            lines = [x for x in path.read_text().splitlines() if json.loads(x)["step"] <= step]
            path.write_text("".join(f"{x}\n" for x in lines))

    def add(self, line: StepReport) -> None:
        """Append a line."""
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(dataclasses.asdict(line)) + "\n")
