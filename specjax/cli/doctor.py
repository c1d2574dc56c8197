"""`specjax doctor`: what JAX really runs on, what the machine has, and what is missing."""

import dataclasses
import importlib.util
import json
import os
import shutil
from importlib import metadata
from pathlib import Path
from typing import Any

from specjax import __version__
from specjax.cli import flags

HELP = """Say what JAX runs on, what the machine has, and what is missing.

  specjax doctor
  specjax doctor --json

Exit code 1 if the machine has an accelerator that JAX does not use."""

# How an accelerator shows itself without JAX: device files, environment, and what to install for it.
SIGNS = {
    "NVIDIA GPU": (("nvidia[0-9]*",), ("nvidia-smi",), (), "pip install 'specjax[cuda]'"),
    "AMD GPU": (("kfd",), ("rocm-smi",), (), "install JAX's ROCm plugin for your ROCm version"),
    "TPU": (("accel*",), (), ("TPU_NAME", "TPU_WORKER_ID"), "pip install 'specjax[tpu]'"),
}
PACKAGES = ("jax", "jaxlib", "flax", "libtpu", "jax-cuda13-plugin", "jax-cuda12-plugin", "numpy", "transformers")


@dataclasses.dataclass(kw_only=True)
class Doctor(flags.CommonFlags):
    """Flags of `specjax doctor`."""

    json: bool = False
    """Print the report as JSON."""

    def run(self) -> int:
        """Print the report; 1 if an accelerator lies idle."""
        found = examine()
        print(json.dumps(found, indent=2) if self.json else render(found))
        return 1 if found["idle_accelerators"] else 0


def examine(dev: Path = Path("/dev")) -> dict[str, Any]:
    """Everything that the report says, as plain data; `dev` is where device files are."""
    import jax

    from specjax.cli.machine import facts
    from specjax.engine.compilation import use_cache
    from specjax.pallas_kernels import cpu

    machine, platform = facts(), jax.default_backend()
    idle = [name for name in accelerators(dev) if platform == "cpu"]
    advice = [_advice(name) for name in idle]
    try:
        demo = str(_demo_model())
    except ValueError as error:
        demo = None
        advice.append(str(error))
    if platform == "cpu" and cpu.compiler() is None:
        advice.append("no C compiler (cc, gcc or clang): decoding on this CPU takes XLA's slower products; install one")
    return {
        "specjax": __version__,
        "machine": machine,
        "devices": [f"{d.platform}:{d.id} {d.device_kind}" for d in jax.devices()],
        "device_memory": [_memory(d) for d in jax.local_devices()],
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "kernels": kernels(platform),
        "compilation_cache": str(use_cache("auto")),
        "demo_model": demo,
        "idle_accelerators": idle,
        "advice": advice,
    }


def accelerators(dev: Path) -> list[str]:
    """Kinds of accelerators that the machine shows, whatever JAX sees."""
    found = []
    for name, (files, programs, variables, _) in SIGNS.items():
        shown = any(next(dev.glob(pattern), None) for pattern in files)
        shown = shown or any(shutil.which(program) for program in programs)
        if shown or any(os.environ.get(variable) for variable in variables):
            found.append(name)
    # Newer TPUs are /dev/vfio groups, which other devices may be too: libtpu beside them tells.
    if "TPU" not in found and next(dev.glob("vfio/[0-9]*"), None) and importlib.util.find_spec("libtpu"):
        found.append("TPU")
    return found


def kernels(platform: str) -> dict[str, str]:
    """The backend that each op of `pallas_kernels` runs on this platform; `reference` is plain JAX."""
    import specjax.pallas_kernels
    from specjax.pallas_kernels import dispatch

    ops = {}
    for root in specjax.pallas_kernels.__path__:
        for folder in sorted(Path(root).iterdir()):
            if (folder / "reference.py").exists():
                ops[folder.name] = " then ".join([*dispatch.backends(folder.name, "auto", platform), "reference"])
    return ops


def render(found: dict[str, Any]) -> str:
    """The report for people."""
    machine = found["machine"]
    rows = [
        ("specjax", found["specjax"]),
        ("JAX runs on", ", ".join(found["devices"])),
        ("processor", f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gb']} GB"),
        ("device memory", ", ".join(m for m in found["device_memory"] if m) or "the machine's own"),
        ("packages", ", ".join(f"{name} {version}" for name, version in found["packages"].items())),
        ("python", machine["python"]),
        ("kernels", ", ".join(f"{op}: {backend}" for op, backend in found["kernels"].items()) or "none"),
        ("compilation cache", found["compilation_cache"]),
        ("demo model", found["demo_model"] or "not found"),
    ]
    lines = [f"{name:<18} {value}" for name, value in rows]
    if found["idle_accelerators"]:
        lines += [
            "",
            f"!! This machine has: {', '.join(found['idle_accelerators'])}. JAX runs on the CPU all the same. !!",
        ]
    lines += [f"-> {advice}" for advice in found["advice"]]
    return "\n".join(lines)


def _advice(name: str) -> str:
    forced = os.environ.get("JAX_PLATFORMS", "")
    if forced.split(",")[0] == "cpu":
        return f"{name}: JAX_PLATFORMS={forced} keeps JAX on the CPU; unset it"
    return f"{name}: {SIGNS[name][3]}"


def _demo_model() -> Path:
    from specjax.weights.names import PACKAGED, resolve

    return resolve(PACKAGED).path


def _memory(device: Any) -> str | None:
    stats = device.memory_stats() or {}
    return f"{stats['bytes_limit'] / 2**30:.1f} GB" if "bytes_limit" in stats else None


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
