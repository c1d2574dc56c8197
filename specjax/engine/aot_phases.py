"""A round for an absent chip in parts that are compiled each by itself: its phases and its Pallas kernels.

A phase of the layers is compiled with one layer, to see its kernels; on TPUs also with two and with four, whose
compiler's times lie on the line to all layers. A whole round compiles too, but takes minutes, and says less.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from specjax.cache import whole_blocks
from specjax.costmodel.compiled import LAYERS
from specjax.engine import profile, step
from specjax.engine.aot import Case, cut, pass_job
from specjax.pallas_kernels import aot_attention, aot_attention_gpu, aot_decode, aot_decode_gpu, aot_gpu
from specjax.pallas_kernels.aot import Chip, Job
from specjax.targets import fused

OF_LAYERS = ("qkv", "output", "mlp")


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a round.

    Attributes:
        phase: of the round; `layers` are all phases of a fused step's layers.
        job: what is compiled, of one layer where layers do it.
        times: how often a round runs it.
        stage: the kernel of a phase that has several; None: all of the phase.
        longer: the same phase of two and of four layers, where a time follows from them.
    """

    phase: str
    job: Job
    times: int = 1
    stage: str | None = None
    longer: Mapping[int, Job] = dataclasses.field(default_factory=dict)


def parts(case: Case, chip: Chip | aot_gpu.Chip, committed: int, op: str = "spec_step") -> list[Part]:
    """What is compiled of a round, or of one op of it, on a chip.

    Args:
        case: the round.
        chip: on an AMD GPU the kernels alone, since XLA compiles for none that is not there.
        committed: slots of each request.
        op: `spec_step`, or the op whose kernels alone are wanted.

    Raises:
        ValueError: the decoder has what a fused step has not.
    """
    found = kernels(case, chip, committed)
    if op == "spec_step" and chip.platform != "rocm":
        found += phases(case, isinstance(chip, Chip))
    return found


def phases(case: Case, timed: bool = False) -> list[Part]:
    """The phases that XLA compiles, `timed` with their `longer` jobs; attention and a fused step's layers are not."""
    params, state, stage, _ = dataclasses.replace(case, fused=False).abstract(cut(case.model, 1))
    found = []
    if stage.drafter is not None:
        draft = functools.partial(step.redraft, stage)
        found.append(Part("draft", Job(name="draft", function=draft, args=(params, state), donated=(1,))))
    lengths = (1, *LAYERS) if timed and not case.fused else (1,)
    table = {n: _jobs(dataclasses.replace(case, fused=False), n) for n in lengths}
    for name in () if case.fused else OF_LAYERS:
        longer = {n: table[n][name] for n in lengths[1:]}
        found.append(Part(name, table[1][name], case.model.num_layers, longer=longer))
    return found + [Part(name, table[1][name]) for name in ("head", "accept", "commit")]


def _jobs(case: Case, layers: int) -> dict[str, Job]:
    params, state, stage, width = case.abstract(cut(case.model, layers))
    table = profile.programs(stage, width, jnp.dtype(case.dtype))
    made = jax.eval_shape(table["accept"][0], params, state, *table["accept"][1])[1]
    found = {}
    for name in (*OF_LAYERS, "head", "accept", "commit"):
        function, shapes = table[name]
        args = (*shapes[:3], *made) if name == "commit" else shapes
        found[name] = Job(name=name, function=function, args=(params, state, *args), donated=(1,))
    return found


def kernels(case: Case, chip: Chip | aot_gpu.Chip, committed: int) -> list[Part]:
    """The Pallas kernels of a round: attention, or those of a fused step.

    Raises:
        ValueError: as `parts`.
    """
    c, rows = case.model, case.drafts + 1
    sizes: dict[str, Any] = {"heads": c.num_heads, "groups": c.num_kv_heads, "dim": c.head_dim, "dtype": case.dtype}
    sizes |= {"batch": case.batch, "width": rows, "context": whole_blocks(committed), "window": c.windows[0]}
    if not case.fused:
        if isinstance(chip, Chip):
            return [Part("attention", aot_attention.job("attention", **sizes), c.num_layers)]
        return [Part("attention", aot_attention_gpu.job("attention", "op", **sizes), c.num_layers)]
    plan = fused.plan_of(c, case.dtype)
    if isinstance(chip, Chip):
        job = aot_decode.job_of(f"decode_step {case.name}", plan, case.batch, rows, committed)
        return [Part("layers", job)]
    made = aot_decode_gpu.blocks(plan, case.batch, rows, committed, chip.platform)
    attention = aot_attention_gpu.job("attention", "triton", **sizes, page=sizes["context"])
    order = {"qkv": made["qkv"], "attention": attention} | made
    found = [Part("layers", job, c.num_layers, stage=name) for name, job in order.items()]
    if chip.platform == "rocm":
        return found
    return [Part("layers", aot_decode_gpu.whole(plan, case.batch, rows, committed)), *found]


def cut_passes(case: Case) -> dict[int, tuple[Job, int]]:
    """The target's pass on a TPU of two and of four layers, each as `pass_job` has it."""
    return {n: pass_job(dataclasses.replace(case, model=cut(case.model, n))) for n in LAYERS}
