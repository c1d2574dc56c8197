"""Compiling for GPUs that are not attached, and the registers, shared memory and spills that their compilers report.

NVIDIA: XLA compiles for a description of the chip; `ptxas`, from NVIDIA's wheel, makes the machine code and counts.
AMD: XLA has no such route, but JAX lowers a Triton kernel for ROCm without one, and the code generator in the `triton`
wheel takes what it lowered to machine code. Nothing is run.
"""

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, SingleDeviceSharding, use_abstract_mesh

from specjax.pallas_kernels import traffic
from specjax.pallas_kernels.aot import Job, clocks, since


@dataclasses.dataclass(frozen=True)
class Chip:
    """A GPU.

    Attributes:
        name: what it is called here.
        platform: JAX's platform.
        kind: what JAX calls the device.
        bandwidth: bytes a second of its memory.
        backends: kernels that are compiled for it.
        cores: multiprocessors or compute units.
        memory: bytes of it.
        description: XLA's description of it; empty where XLA cannot compile from one.
    """

    name: str
    platform: str
    kind: str
    bandwidth: float
    backends: tuple[str, ...]
    cores: int
    memory: float
    description: str = ""


def _nvidia(name, kind, capability, backends, *, cores, bandwidth, memory, shared, l2, clock, units=128) -> Chip:
    """Shared memory a block may have is 1 KiB less than a multiprocessor's `shared`."""
    major, minor = capability
    return Chip(
        name,
        "cuda",
        kind,
        bandwidth,
        backends,
        cores,
        memory,
        f"""gpu_device_info {{
  threads_per_block_limit: 1024  threads_per_warp: 32  threads_per_core_limit: 2048
  shared_memory_per_block: 49152  shared_memory_per_core: {shared}  shared_memory_per_block_optin: {shared - 1024}
  core_count: {cores}  fpus_per_core: {units}  clock_rate_ghz: {clock}
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth:.0f}  l2_cache_size: {l2}  device_memory_size: {memory:.0f}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 }}
device_description_str: "{kind}"
""",
    )


BOTH = ("mosaic_gpu", "triton")
COUNTED = ("decode_qkv", "decode_out", "decode_gate_up")  # kernels whose loads and stores no value decides
KIB = 2**10
# Figures: the makers' data sheets and architecture papers.
CHIPS = {
    chip.name: chip
    for chip in (
        _nvidia(
            "a100", "NVIDIA A100-SXM4-80GB", (8, 0), ("triton",),
            cores=108, bandwidth=2.039e12, memory=80e9, shared=164 * KIB, l2=40 * KIB**2, clock=1.41, units=64,
        ),
        _nvidia(
            "h100", "NVIDIA H100 80GB HBM3", (9, 0), BOTH,
            cores=132, bandwidth=3.35e12, memory=80e9, shared=228 * KIB, l2=50 * KIB**2, clock=1.98,
        ),
        _nvidia(
            "b200", "NVIDIA B200", (10, 0), BOTH,
            cores=148, bandwidth=8e12, memory=180e9, shared=228 * KIB, l2=126 * KIB**2, clock=1.965,
        ),
        Chip("mi300x", "rocm", "gfx942", 5.3e12, ("triton",), 304, 192e9),
        Chip("mi355x", "rocm", "gfx950", 8e12, ("triton",), 256, 288e9),
    )
}  # fmt: skip


def run(job: Job, chip: Chip) -> dict[str, Any]:
    """Compile a job; one line of the table, with an `error` where a kernel's registers were spilled to memory.

    Of a whole program, registers and shared memory are those of the kernel that has most. A kernel may decline a shape
    that the next one takes: `declined` says why.
    """
    row: dict[str, Any] = {"chip": chip.name, "job": job.name}
    started = clocks()
    with traced_for(chip):
        try:
            row |= _compile_nvidia(job, chip) if chip.platform == "cuda" else _compile_amd(job, chip)
        except NotImplementedError as declined:
            return row | {"declined": str(declined)}
    row |= {
        **since(started),
        "roofline_us": round(job.needed / chip.bandwidth * 1e6, 1),
    }
    if job.kernel in COUNTED:
        row["copied_bytes"] = traffic.count(job.function, *job.args, scalars=()).total
    if row["spill_bytes"] and job.kernel is not None:  # what XLA's own kernels spill is no fault of ours
        row["error"] = f"{row['spill_bytes']} bytes of registers spilled to memory"
    return row


def traced_for(chip: Chip) -> contextlib.AbstractContextManager:
    """Programs that are traced inside are for a chip: dispatch and kernels see it as their device."""
    abstract = AbstractDevice(device_kind=chip.kind, num_cores=chip.cores, platform="gpu")
    return use_abstract_mesh(AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=abstract))


def prepare() -> None:
    """Set what makes NVIDIA's plugin load without a driver, and its compilers talk; before JAX looks for plugins."""
    for name in ("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "MOSAIC_GPU_DUMP_PTXAS", "MOSAIC_GPU_DUMP_RESOURCES"):
        os.environ[name] = "1"


@functools.cache
def _device(chip: Chip) -> Any:
    from jax.experimental import topologies

    shape = "1x1x1"
    return topologies.get_topology_desc(
        platform="cuda", topology_name=shape, target_config=chip.description, topology=shape
    ).devices[0]


def _compile_nvidia(job: Job, chip: Chip) -> dict[str, Any]:
    on_chip = SingleDeviceSharding(_device(chip))
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on_chip), job.args)
    with tempfile.TemporaryDirectory(prefix="specjax-aot-") as name:
        folder = Path(name)
        options = {
            "xla_dump_to": str(folder / "hlo"),
            "xla_gpu_cuda_data_dir": str(_talkative_ptxas(folder)),
            "xla_gpu_libnvjitlink_mode": "LIB_NV_JIT_LINK_MODE_DISABLED",  # which makes the same code, but says nothing
        }
        traced = jax.jit(job.function, donate_argnums=job.donated).trace(*args)
        with _captured(folder / "mosaic"):
            compiled: Any = traced.lower(lowering_platforms=("cuda",)).compile(compiler_options=options)
        kernels = read_ptxas((folder / "ptxas").read_text() + (folder / "mosaic").read_text(errors="replace"))
        launches = "".join(path.read_text() for path in (folder / "hlo").glob("*.thunk_sequence.txt"))
        mosaic = re.search(r"smem_scratch_bytes=(\d+)", (folder / "mosaic").read_text(errors="replace"))
    made: list[dict[str, Any]] = []
    if job.kernel is None:
        made = kernels_of(kernels, launches, int(mosaic[1]) if mosaic else 0)
        registers, shared = (max((row[key] for row in made), default=None) for key in ("registers", "shared_bytes"))
    else:
        registers, _ = kernels["anonymous_mosaic_gpu_kernel" if mosaic else job.kernel]
        size = mosaic or re.search(rf" {job.kernel} .*shared_memory: (\d+) bytes", launches)
        shared = int(size[1]) if size else None
    memory = compiled.memory_analysis()
    return {
        "registers": registers,
        "shared_bytes": shared,
        "spill_bytes": sum(spilled for _, spilled in kernels.values()),
        "kernels": len(kernels),
        **({"each_kernel": made} if made else {}),
        "argument_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
    }


def read_ptxas(text: str) -> dict[str, tuple[int, int]]:
    """Registers of a thread and bytes spilled, of each kernel in what `ptxas -v` says."""
    found = {}
    pattern = (
        r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers"
    )
    for name, stores, loads, registers in re.findall(pattern, text, re.DOTALL):
        found[name] = int(registers), int(stores) + int(loads)
    return found


def kernels_of(kernels: dict[str, tuple[int, int]], launches: str, mosaic: int = 0) -> list[dict[str, Any]]:
    """A row for each kernel of a program, the one with most registers first.

    Args:
        kernels: what `read_ptxas` has found.
        launches: XLA's list of what the program runs, which says how much shared memory a kernel is launched with.
        mosaic: bytes that a kernel of Mosaic's has, which that list does not say.
    """
    shared = {name: int(size) for name, size in re.findall(r"(\w+) grid: .*shared_memory: (\d+) bytes", launches)}
    rows = []
    for name, (registers, spilled) in kernels.items():
        size = mosaic if name == "anonymous_mosaic_gpu_kernel" else shared.get(name, 0)
        rows.append({"kernel": name, "registers": registers, "shared_bytes": size, "spill_bytes": spilled})
    return sorted(rows, key=lambda row: -row["registers"])


def _talkative_ptxas(folder: Path) -> Path:
    """A folder as XLA looks for CUDA's, whose `ptxas` writes what it says to `folder / "ptxas"` too."""
    home = importlib.util.find_spec("nvidia")
    places = list(home.submodule_search_locations or ()) if home else []
    found = [path for place in places for path in Path(place).glob("cu*/bin/ptxas")]
    if not found:
        raise ModuleNotFoundError("no ptxas of NVIDIA's wheels here: pip install 'specjax[cuda]'")
    script = folder / "cuda" / "bin" / "ptxas"
    script.parent.mkdir(parents=True)
    script.write_text(f'#!/bin/bash\nexec "{found[0]}" -v "$@" 2> >(tee -a "{folder}/ptxas" >&2)\n')
    script.chmod(0o755)
    (folder / "ptxas").touch()
    return script.parent.parent


@contextlib.contextmanager
def _captured(path: Path) -> Iterator[None]:
    """Stdout and stderr of the compilers, which write to the descriptors, into a file."""
    sys.stdout.flush()
    saved = [os.dup(number) for number in (1, 2)]
    with path.open("wb") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    try:
        yield
    finally:
        for number, descriptor in zip((1, 2), saved, strict=True):
            os.dup2(descriptor, number)
            os.close(descriptor)


def _compile_amd(job: Job, chip: Chip) -> dict[str, Any]:
    triton = importlib.import_module("triton")
    target = importlib.import_module("triton.backends.compiler").GPUTarget("hip", chip.kind, 64)
    ((name, ir, options),) = triton_kernels(job.function, job.args)
    with tempfile.TemporaryDirectory(prefix="specjax-aot-") as folder:
        path = Path(folder) / f"{name}.ttir"
        path.write_text(ir)
        kernel = triton.compile(str(path), target=target, options=options)
    return {"shared_bytes": kernel.metadata.shared} | read_amdgcn(kernel.asm["amdgcn"])


def triton_kernels(function: Callable, args: tuple) -> list[tuple[str, str, dict[str, int]]]:
    """Name, Triton IR and options of each kernel of a function, as JAX lowers them for ROCm."""
    from jaxlib.mlir import ir
    from jaxlib.triton import dialect

    lowered = jax.jit(function).trace(*args).lower(lowering_platforms=("rocm",))
    found = []

    def visit(op):
        if op.name == "stablehlo.custom_call" and "triton" in str(op.attributes["call_target_name"]):
            config = ir.DictAttr(op.attributes["mhlo.backend_config"])
            options = {key: ir.IntegerAttr(config[key]).value for key in ("num_warps", "num_stages")}
            with ir.Context() as context:
                dialect.register_dialect(context)
                text = str(ir.Module.parse(ir.StringAttr(config["ir"]).value_bytes))
            found.append((ir.StringAttr(config["name"]).value, text, options))
        return ir.WalkResult.ADVANCE

    module: Any = lowered.compiler_ir("stablehlo")
    module.operation.walk(visit)
    return found


def read_amdgcn(assembly: str) -> dict[str, int]:
    """Vector registers of a lane and bytes of memory that it spills to, from the metadata of AMD's assembly."""

    def value(key):
        found = re.search(rf"\.{key}:\s*(\d+)", assembly)
        assert found is not None
        return int(found[1])

    # Scalar registers that do not fit move to vector registers; only vector ones go to memory.
    spilled = 4 * value("vgpr_spill_count")
    return {"registers": value("vgpr_count"), "spill_bytes": max(spilled, value("private_segment_fixed_size"))}
