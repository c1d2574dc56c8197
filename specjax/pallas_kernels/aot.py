"""Compiling for accelerators that are not attached, and what their compiler then says.

A chip is described by a topology; its compiler comes with the vendor's wheel (libtpu for TPUs). Nothing is run: what
this shows is that a program lowers, fits and is scheduled, and how long its bundles and its copies would take.
"""

import contextlib
import dataclasses
import functools
import math
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, SingleDeviceSharding, use_abstract_mesh

from specjax.pallas_kernels import schedule, traffic
from specjax.pallas_kernels.schedule import Schedule


@dataclasses.dataclass(frozen=True)
class Chip:
    """One core of an accelerator, as JAX sees a device.

    Attributes:
        name: what it is called here.
        platform: JAX's platform.
        topology: the smallest description that its compiler takes.
        clock: bundles a second: the rate that the compiler's own cost model gives to 1024 lanes.
        bandwidth: bytes a second of its memory (`pltpu.get_tpu_info`).
        memory: bytes of it.
        cores: of a device; a kernel without a parallel grid runs on one of them, XLA's own code on all.
    """

    name: str
    platform: str
    topology: str
    clock: float
    bandwidth: float
    memory: float
    cores: int = 1


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("tpu-v5e", "tpu", "v5e:2x2", 1.5e9, 0.82e12, 17.2e9),
        Chip("tpu-v5p", "tpu", "v5p:2x2x1", 1.5e9, 1.23e12, 51.5e9, cores=2),
        Chip("tpu-v6e", "tpu", "v6e:2x2", 1.75e9, 1.64e12, 34.4e9),
        Chip("tpu-7x", "tpu", "tpu7x:2x2x1", 1.9e9, 3.7e12, 103e9),
    )
}


@dataclasses.dataclass(frozen=True)
class Job:
    """Something to compile.

    Attributes:
        name: its line in the table.
        function: what is compiled.
        args: arrays as `jax.ShapeDtypeStruct`, in a tree; static values are bound in `function`.
        kernel: name of the Pallas kernel whose schedule is read, or None for whole programs.
        scalars: values of the kernel's scalar operands, to count copies with.
        needed: bytes that any implementation must move.
        estimate: from `(schedule, chip)`, `estimate_s`, the time by bundles and copies, and what else it shows; None
            where it is not worked out.
        stages: from `(schedule, chip)`, what the kernel does in turn, a dictionary each; None where it is not known.
        vmem: bytes of VMEM that the kernel lays claim to.
        donated: arguments whose buffers are reused.
    """

    name: str
    function: Callable
    args: tuple
    kernel: str | None = None
    scalars: tuple[np.ndarray, ...] = ()
    needed: int = 0
    estimate: Callable[[Schedule, Chip], dict[str, float]] | None = None
    stages: Callable[[Schedule, Chip], list[dict[str, Any]]] | None = None
    vmem: int = 0
    donated: tuple[int, ...] = ()


# The passes of libtpu whose state is read. It writes every pass otherwise: of a sort over a vocabulary, gigabytes.
WRITTEN = "final_bundles|final_hlo-static-per-bundle-utilization"


@contextlib.contextmanager
def dumping(kernels: bool) -> Generator[Path | None]:
    """A folder that libtpu writes schedules to; must be entered before libtpu is loaded."""
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"  # no machine with a TPU, so no metadata server to ask
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # nobody holds a chip
    if not kernels:
        yield None
        return
    folder = Path(tempfile.mkdtemp(prefix="specjax-aot-"))
    flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex={WRITTEN}"
    os.environ["LIBTPU_INIT_ARGS"] = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {flags}".strip()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@functools.cache
def device(chip: Chip) -> Any:
    """A device of the chip's topology, to compile for."""
    from jax.experimental import topologies

    return topologies.get_topology_desc(platform=chip.platform, topology_name=chip.topology).devices[0]


def compile_for(chip: Chip, function: Callable, args: tuple, donated: tuple[int, ...] = ()) -> Any:
    """Compile `function(*args)` for a chip."""
    target = device(chip)
    on_chip = SingleDeviceSharding(target)
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on_chip), args)
    abstract = AbstractDevice(device_kind=target.device_kind, num_cores=1, platform=chip.platform)
    with use_abstract_mesh(AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=abstract)):
        traced = jax.jit(function, donate_argnums=donated).trace(*args)
        return traced.lower(lowering_platforms=(chip.platform,)).compile()


# How often XLA's cost analysis counts a byte that is copied between memory and VMEM beside the operations, by how the
# copy is made. Found by comparing programs of libtpu 0.0.50 that differ in such copies (docs/costmodel.md).
COUNTED = {"copy": 4, "slice": 3}
_AHEAD = re.compile(r" = (\(.*?\)) (copy|slice)-start\(")
_IN_VMEM = re.compile(r"\b(pred|[a-z]+(\d+)[a-z0-9]*)\[([\d,]*)\]\{[^}]*S\(1\)\}")


def estimate(job: Job, chip: Chip) -> float:
    """Seconds that the compiler estimates for a whole program.

    Its cost analysis adds up, over the operations, the longer of their bytes over the bandwidth and their operations
    over the peak (a Pallas kernel by its own `CostEstimate`). Two things in that sum are no time, and are taken out. A
    call whose cost it does not know counts as -1 s (`HloCostAnalysis::HandleCustomCall` in XLA), so whole seconds go.
    And a copy of weights to VMEM ahead of their use is counted beside the use, several times: `COUNTED`.

    Raises:
        ValueError: the compiler gives no estimate.
    """
    return estimated(job.name, compile_for(chip, job.function, job.args, job.donated), chip)


def estimated(name: str, compiled: Any, chip: Chip) -> float:
    """`estimate` of a program that is compiled."""
    said = compiled.cost_analysis().get("optimal_seconds", 0.0)
    ahead = copied_ahead(compiled.as_text()) / (chip.bandwidth * chip.cores)
    seconds = said - math.floor(said) - ahead
    if seconds <= 0:
        raise ValueError(f"the compiler of {chip.name} gives no estimate of {name}: {said} s, {ahead} s of copies")
    return seconds


def copied_ahead(program: str) -> int:
    """Bytes that the cost analysis of a compiled program (its HLO text) counts for copies between memory and VMEM."""
    entry = program[program.index("\nENTRY ") :]
    found = 0.0
    for shapes, how in _AHEAD.findall(entry):
        for kind, bits, sizes in _IN_VMEM.findall(shapes):
            width = 1 if kind == "pred" else int(bits) / 8
            found += COUNTED[how] * math.prod(int(n) for n in sizes.split(",") if n) * width
    return int(found)


def run(job: Job, chip: Chip, folder: Path | None) -> dict[str, Any]:
    """Compile a job; one line of the table.

    Raises:
        Exception: whatever the compiler refuses.
    """
    started = clocks()
    compiled = compile_for(chip, job.function, job.args, job.donated)
    memory = compiled.memory_analysis()
    row: dict[str, Any] = {
        "chip": chip.name,
        "job": job.name,
        **since(started),
        "code_bytes": memory.generated_code_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "vmem_bytes": job.vmem or None,
    }
    if job.kernel is None:
        with contextlib.suppress(ValueError):
            row["compiler_us"] = _us(estimated(job.name, compiled, chip))
        row["roofline_us"] = _us(job.needed / chip.bandwidth / chip.cores)
        if folder is not None:
            found = schedule.read_program(folder)
            row |= {"bundles": found.kernel.total(), "spills": found.kernel.total("SPILL")}
            row["units"] = shares(found.filled(found.kernel))
            clear(folder)
        return row
    if job.scalars:
        moved = traffic.count(job.function, *job.args, scalars=job.scalars)
        row |= {"copied_bytes": moved.total, "copies": moved.copies, "copy_us": _us(moved.total / chip.bandwidth)}
    if folder is not None:
        found = schedule.read(folder, job.kernel)
        row |= {"bundles": found.kernel.total(), "spills": found.kernel.total("SPILL")}
        if job.estimate is not None:
            shown, floor = job.estimate(found, chip), job.needed / chip.bandwidth
            seconds = shown.pop("estimate_s")
            row |= {"estimate_us": _us(seconds), "roofline_us": _us(floor), "ratio": round(seconds / floor, 3)}
            row |= {name: round(share, 3) for name, share in shown.items()}
        row["units"] = shares(found.filled(found.kernel))
        if job.stages is not None:
            row["stages"] = job.stages(found, chip)
        clear(folder)
    return row


def clocks() -> tuple[float, float]:
    """Now: wall-clock, and processor time of this process and the compilers that it has waited for."""
    times = os.times()
    return time.perf_counter(), times.user + times.system + times.children_user + times.children_system


def since(started: tuple[float, float]) -> dict[str, float]:
    """What compiling has taken since `clocks`, as a row has it."""
    wall, processor = (now - then for now, then in zip(clocks(), started, strict=True))
    return {"compile_s": round(wall, 1), "processor_s": round(processor, 1)}


def clear(folder: Path) -> None:
    """Forget the schedules of earlier programs."""
    for path in folder.iterdir():
        path.unlink()


def shares(units: dict[str, float]) -> dict[str, float]:
    """Unit use, as it is written."""
    return {unit: round(share, 3) for unit, share in units.items()}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 1)
