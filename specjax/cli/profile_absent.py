"""The profile of a round on a device that is not here: its roofline, and what the device's compiler says."""

import contextlib
import importlib.util
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specjax.cli import aot, flags, plan, profile_report

if TYPE_CHECKING:
    from specjax.cli.profile import Profile
    from specjax.costmodel.facts import Device
    from specjax.costmodel.shapes import ModelShape
    from specjax.draft import DraftShape
    from specjax.engine.aot_phases import Part
    from specjax.targets.config import DecoderConfig

# The module that a platform's compiler comes in, and the extra that installs it.
COMPILERS = {"tpu": ("libtpu", "tpu"), "cuda": ("jax_plugins.xla_cuda13", "cuda"), "rocm": ("triton", "aot")}
WEIGHTLESS = ("none", "ngram", "suffix")  # drafters whose draft can be compiled without weights
PASS = "verify pass less attention"
FUSED_GPU = 5  # kernels of a layer


def figures(command: "Profile") -> dict[str, Any]:
    """What is known of the round that the flags describe, as `profile_report` shows it.

    Raises:
        ValueError: a device, target or drafter that is not known, or a load that does not fit.
    """
    from specjax.costmodel.facts import find
    from specjax.costmodel.plan import check_memory
    from specjax.costmodel.roofline import Setup
    from specjax.costmodel.shapes import BYTES
    from specjax.costmodel.shapes import drafter as drafter_shape

    device, target = find(command.device), command.target or "smollm2-135m"
    sizes = plan.target_shape(target)
    shape = chain(command.drafter, command.drafts)
    batch, context = command.batch or 1, command.context or 1024
    usual = "float32" if device.platform == "cpu" else "bfloat16"
    dtype = command.dtype if command.dtype not in (None, "auto") else usual
    assert dtype in BYTES
    kinds = [] if shape.kind == "none" else [drafter_shape(shape.kind)]
    check_memory(Setup(device, 1, sizes, dtype), kinds, batch, context)
    fused = command.op == "decode_step" or command.decode_step == "fused"
    expected = work(device, sizes, dtype, shape, batch, batch * shape.rows, context, fused)
    rows, notes = [], []
    if command.roofline:
        notes.append("the roofline alone, as asked for: nothing was compiled")
    elif missing := compiler_missing(device.name):
        notes.append(missing)
    else:
        given = {
            "target": target, "drafter": shape.kind, "drafts": shape.depth, "batch": batch,
            "context": context, "dtype": dtype, "fused": fused, "op": command.op,
        }  # fmt: skip
        told = aot.in_a_process(device.name, json.dumps(given), module="specjax.cli.profile_absent")
        rows = list(_told(device.name, told))
        notes += _remarks(device.name, shape.kind, command.op, fused)
    only = {"tree_attention": ("attention",), "decode_step": ("layers",)}.get(command.op, ())
    return {
        "op": command.op,
        "device": device.name,
        "attached": False,
        **settings(target, dtype, shape, batch, context),
        "peak_flops": device.flops(dtype),
        "bandwidth": device.bandwidth,
        "phases": profile_report.compiled(expected, rows, only),
        "programs": [row for row in rows if "program" in row],
        "notes": notes,
    }


def _told(device: str, rows: Iterable[dict[str, Any]]) -> Iterable[dict[str, Any]]:
    """The rows of what was compiled, a line for the reader as each comes."""
    done, total = 0, 0
    for row in rows:
        if "total" in row:
            total = row["total"]
            flags.note(f"{device}: {total} parts to compile")
            continue
        done += 1
        name = row.get("stage") or row.get("phase") or row.get("program") or row["job"]
        how = "failed" if "error" in row else "declined" if "declined" in row else f"{row.get('compile_s', 0):.1f} s"
        flags.note(f"{device}: {done} of {total}: {name}: {how}")
        yield row


def _remarks(device: str, kind: str, op: str, fused: bool) -> list[str]:
    """What a reader has to know of the figures."""
    found, platform = [], _platforms()[device]
    if device == "tpu-7x":
        found.append("the roofline is of the chip; compiled is for one of its two cores, which has half its bandwidth")
    if platform == "rocm" and op == "spec_step":
        found.append(
            "the Pallas kernels are compiled, the other phases the roofline alone: XLA compiles for no AMD GPU that is "
            "not here"
        )
    if platform == "tpu" and op == "spec_step":
        found.append(
            "compiler: its cost analysis, of all layers; what accept and commit do for requests that sample, have "
            "penalties or want log-probabilities is counted, asked for or not"
        )
        of = "every loop once, those of stages as often as they run" if fused else "of one layer, every loop once"
        found.append(f"bundles and units: {of}")
    if platform == "cuda" and op == "spec_step":
        found.append("XLA's products have its default tiles: it tunes them on the device alone")
    if kind not in WEIGHTLESS and op == "spec_step":
        found.append(f"draft: the roofline alone, since {kind} drafts with weights that are not here")
    return found


def chain(kind: str, drafts: int | None) -> "DraftShape":
    """The chain that a drafter of a kind makes, by default of the greatest depth up to 7 that is usual for it."""
    from specjax.costmodel import menu
    from specjax.draft import PLAIN, DraftShape

    if kind == PLAIN.kind:
        return PLAIN
    usual = [shape.depth for shape in menu.shapes([kind]) if shape.is_chain and shape.depth <= 7]
    return DraftShape.chain(kind, drafts or max(usual))


def described(name: str) -> tuple["ModelShape", "DecoderConfig"]:
    """A target's sizes and its architecture, by a known name or from a folder's `config.json`; ValueError otherwise."""
    from specjax.costmodel.shapes import target
    from specjax.engine.aot import model_of
    from specjax.targets.config import DecoderConfig

    sizes = plan.target_shape(name)
    if target(name) is not None:
        return sizes, model_of(sizes)
    file = Path(name).expanduser() / "config.json"
    return sizes, DecoderConfig.from_hf(json.loads(file.read_text(encoding="utf-8")))


def compiler_missing(name: str) -> str | None:
    """Why nothing can be compiled for a device here, and what to do; None if it can."""
    chips = _platforms()
    if name not in chips:
        return f"the roofline alone: no compiler is described for {name}; there is for {', '.join(chips)}"
    module, extra = COMPILERS[chips[name]]
    try:
        there = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        there = False
    if there:
        return None
    return (
        f'the roofline alone: the compiler for {name} is not installed here. `make profile ARGS="--device {name} ..."` '
        f"makes an environment with it (or pip install 'specjax[{extra}]')"
    )


def _platforms() -> dict[str, str]:
    """JAX's platforms of the chips that can be compiled for."""
    from specjax.pallas_kernels import aot as tpu
    from specjax.pallas_kernels import aot_gpu

    return {chip.name: chip.platform for chip in (*tpu.CHIPS.values(), *aot_gpu.CHIPS.values())}


def work(
    device: "Device",
    sizes: "ModelShape",
    dtype: str,
    shape: "DraftShape",
    batch: int,
    rows: int,
    context: int,
    fused: bool,
) -> dict[str, Any]:
    """The cost model's phases of a round."""
    from specjax.costmodel.roofline import Setup, round_phases
    from specjax.costmodel.shapes import DRAFTERS

    drafter = DRAFTERS.get(shape.kind)
    setup = Setup(device, 1, sizes, dtype)
    launched = (FUSED_GPU * sizes.layers if device.platform == "gpu" else 1) * fused
    return dict(round_phases(setup, drafter, shape, batch, rows, context, launched))


def settings(target: str, dtype: str, shape: "DraftShape", batch: int, context: int) -> dict[str, Any]:
    """What a profile is of."""
    drafter = {"drafter": shape.kind, "drafts": shape.depth, "rows": shape.rows}
    return {"target": target, "dtype": dtype, "batch": batch, "context": context, **drafter}


def worker(name: str, given: dict[str, Any]) -> None:
    """Print a line of JSON with the number of parts, and one for every part that is compiled for a chip."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    from specjax.pallas_kernels import aot as tpu
    from specjax.pallas_kernels import aot_gpu

    if name in aot_gpu.CHIPS:
        aot_gpu.prepare()
    from specjax.engine import aot as engine_aot
    from specjax.engine import aot_phases

    chip: Any = tpu.CHIPS.get(name) or aot_gpu.CHIPS[name]
    op, committed, target = given.pop("op"), given.pop("context"), given.pop("target")
    learned = given["drafter"] not in WEIGHTLESS
    given |= {"drafter": "ngram"} if learned else {}
    room = committed + given["drafts"] + 1
    case = engine_aot.Case(name=target, model=described(target)[1], context=room, **given)
    parts = [x for x in aot_phases.parts(case, chip, committed, op) if not (learned and x.phase == "draft")]
    passes = aot_phases.cut_passes(case) if op == "spec_step" and chip.platform == "tpu" and not case.fused else {}
    print(json.dumps({"total": len(parts) + bool(passes)}), flush=True)
    on_tpu = chip.platform == "tpu"
    with tpu.dumping(kernels=True) if on_tpu else contextlib.nullcontext() as folder:
        for part in parts:

            def compiled(part=part):
                return on_a_tpu(part, chip, folder) if on_tpu else aot_gpu.run(part.job, chip)

            about = {"phase": part.phase} | ({"stage": part.stage} if part.stage else {})
            print(json.dumps(about | of_all(part, aot.attempt(name, part.job, compiled))), flush=True)
        if passes:
            jobs = {layers: job for layers, (job, _) in passes.items()}
            attention = {layers: stated / chip.bandwidth / chip.cores for layers, (_, stated) in passes.items()}

            def whole():
                started = tpu.clocks()
                seconds = on_line(jobs, attention, case.model.num_layers, chip)
                return {"compiler_us": seconds * 1e6, **tpu.since(started)}

            print(json.dumps({"program": PASS} | aot.attempt(name, jobs[min(jobs)], whole)), flush=True)


def on_a_tpu(part: "Part", chip: Any, folder: Path) -> dict[str, Any]:
    """The row of a part: kernels of the job, and, where it has longer ones, the compiler's time of all layers."""
    from specjax.pallas_kernels import aot as tpu

    started = tpu.clocks()
    row = tpu.run(part.job, chip, folder)
    if part.longer:
        row.pop("compiler_us", None)
        with contextlib.suppress(ValueError):  # it compiles, and its compiler says no time
            seconds = on_line(part.longer, dict.fromkeys(part.longer, 0.0), part.times, chip)
            row["compiler_us"] = seconds / part.times * 1e6
        tpu.clear(folder)
    return row | tpu.since(started)


def on_line(jobs: Any, less: dict[int, float], layers: int, chip: Any) -> float:
    """Seconds of all layers by the compiler's estimates of the jobs of a few, each without `less`.

    Raises:
        ValueError: the compiler gives no estimate.
    """
    from specjax.costmodel.compiled import on_line
    from specjax.pallas_kernels import aot as tpu

    return on_line({n: tpu.estimate(job, chip) - less[n] for n, job in jobs.items()}, layers)


def of_all(part: "Part", row: dict[str, Any]) -> dict[str, Any]:
    """A part's row with its times of all layers; a stage has the bytes that it needs and their time too."""
    row = dict(row)
    floor = row.pop("roofline_us", None)  # of the job; a phase has the cost model's
    if part.stage and floor is not None:
        row |= {"roofline_us": floor * part.times, "bytes": part.job.needed * part.times}
    for key in ("compiler_us", "estimate_us"):
        if row.get(key) is not None:
            row[key] *= part.times
    return row


if __name__ == "__main__":
    worker(sys.argv[1], json.loads(sys.argv[2]))
