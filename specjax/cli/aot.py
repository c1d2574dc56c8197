"""`specjax aot`: compile every kernel for accelerators that are not attached, and say what their compilers say."""

import contextlib
import dataclasses
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

from specjax.cli import flags

HELP = """Compile the kernels for accelerators that are not attached.

  specjax aot
  specjax aot --chips "tpu-v6e tpu-7x h100 mi300x" --json out/aot.json
  specjax aot --chips tpu-v6e --what rounds
  specjax aot --short

Needs the chips' compilers: pip install 'specjax[tpu,cuda,aot]', or `make aot`, which makes an environment of its own.
Exit code 1 if anything does not compile, or spills registers on a GPU. "declined" is a kernel that leaves a shape to
the next one. "ratio" is the estimate (scheduled bundles over the clock against copied bytes over the bandwidth,
whichever is longer) over the time in which the memory delivers the bytes that must be read."""

WHAT = ("kernels", "rounds")
COMPILERS = ("jax", "jaxlib", "libtpu", "jax-cuda13-plugin", "nvidia-cuda-nvcc", "triton")
COLUMNS = {
    "chip": "chip",
    "job": "job",
    "compile_s": "compile s",
    "processor_s": "processor s",
    "code_bytes": "code KB",
    "vmem_bytes": "VMEM KB",
    "temporary_bytes": "temp KB",
    "bundles": "bundles",
    "spills": "spills",
    "registers": "registers",
    "shared_bytes": "shared KB",
    "spill_bytes": "spilled B",
    "copied_bytes": "copied MB",
    "copy_us": "copy µs",
    "compiler_us": "compiler µs",
    "estimate_us": "estimate µs",
    "roofline_us": "roofline µs",
    "ratio": "ratio",
    "idle": "memory idle",
    "busy": "computing",
}
SCALE = {
    "code_bytes": 2**10,
    "vmem_bytes": 2**10,
    "temporary_bytes": 2**10,
    "shared_bytes": 2**10,
    "copied_bytes": 1e6,
}


@dataclasses.dataclass(kw_only=True)
class Aot(flags.CommonFlags):
    """Flags of `specjax aot`."""

    chips: Annotated[str | None, flags.text("CHIP ...")] = None
    """Chips to compile for, separated by spaces or commas; all by default."""
    short: bool = False
    """One kernel of each kind a chip, and no whole round."""
    what: Annotated[str, flags.text("kernels,rounds")] = "kernels,rounds"
    """Kernels, whole rounds (for TPUs and NVIDIA GPUs), or both."""
    json: Annotated[str | None, flags.text("FILE.json")] = None
    """Write the table here, with the versions of the compilers, again with each row that is done."""

    def run(self) -> int:
        """Compile, print, write; 1 if something does not compile."""
        from specjax.cli.profile_absent import compiler_missing
        from specjax.pallas_kernels import aot, aot_gpu

        known = (*aot.CHIPS, *aot_gpu.CHIPS)
        names = list(known) if self.chips is None else self.chips.replace(",", " ").split()
        if not names:
            raise ValueError(f"--chips names none; known: {', '.join(known)}")
        if unknown := [name for name in names if name not in known]:
            raise ValueError(f"unknown chips {', '.join(unknown)}; known: {', '.join(known)}")
        what = self.what.replace(",", " ").split()
        if not what or (unknown := [name for name in what if name not in WHAT]):
            raise ValueError(f"--what is {' or '.join(WHAT)}, or both with a comma between; got {self.what!r}")
        if self.short and "kernels" not in what:
            raise ValueError("--short compiles kernels alone, and --what leaves them out")
        flags.check_outputs(self.json)
        if missing := [name for name in names if compiler_missing(name)]:
            raise ValueError(
                f"the compilers for {', '.join(missing)} are not installed here: `make aot` makes an environment that "
                "has them (or pip install 'specjax[tpu,cuda,aot]')"
            )
        rows = []
        for name in names:
            parts = [in_a_process(name, *["--short"] * self.short)] if "kernels" in what else []
            if "rounds" in what and not self.short:
                parts += [in_a_process(name, "--round", str(number)) for number in range(rounds(name))]
            for row in itertools.chain(*parts):
                rows.append(row)
                flags.note(f"{row['chip']}: {row['job']}: {row.get('error') or row.get('declined') or 'compiled'}")
                self._write(rows)
        show(rows)
        self._write(rows)
        return 1 if any("error" in row for row in rows) else 0

    def _write(self, rows: list[dict[str, Any]]) -> None:
        from specjax.costmodel.tables import replacing

        if self.json is not None:
            text = json.dumps({"versions": versions(), "rows": rows}, indent=1) + "\n"
            with replacing(Path(self.json)) as part:
                part.write_text(text, encoding="utf-8")


def rounds(name: str) -> int:
    """How many whole rounds are compiled for a chip; none where XLA has no way to."""
    from specjax.engine.aot import cases
    from specjax.pallas_kernels import aot, aot_gpu

    chip = aot.CHIPS.get(name) or aot_gpu.CHIPS[name]
    return 0 if chip.platform == "rocm" else len(cases(chip))


def versions() -> dict[str, str]:
    """Of JAX, and of the compilers that are installed."""
    found = {}
    for name in COMPILERS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def in_a_process(chip: str, *options: str, module: str = "specjax.cli.aot") -> Iterator[dict[str, Any]]:
    """Rows of a chip, from a process of their own.

    A compiler takes its flags once, and of a kernel of Mosaic's that a process has compiled before it reports nothing.
    """
    command = [sys.executable, "-m", module, chip, *options]
    # The compilers write warnings about the missing chip to stderr; ours are rows.
    with tempfile.TemporaryFile("w+") as said:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True) as process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    if line.startswith("{"):
                        yield json.loads(line)
            except BaseException:  # whoever asked is gone: so is the work, and its files
                process.terminate()
                raise
        if process.returncode:
            said.seek(0)
            yield {"chip": chip, "job": "the compiler's process", "error": said.read().strip()[-2000:]}


def worker(name: str, short: bool) -> None:
    """Print a line of JSON for everything that is compiled for a chip."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    from specjax.pallas_kernels import aot, aot_attention, aot_attention_gpu, aot_decode, aot_decode_gpu, aot_gpu

    if name in aot_gpu.CHIPS:
        aot_gpu.prepare()
        gpu = aot_gpu.CHIPS[name]
        for job in [*aot_attention_gpu.jobs(gpu, short), *aot_decode_gpu.jobs(gpu.platform, short)]:
            print(json.dumps(attempt(name, job, lambda job=job: aot_gpu.run(job, gpu))), flush=True)
        return
    chip = aot.CHIPS[name]
    with aot.dumping(kernels=chip.platform == "tpu") as folder:
        for job in [*aot_attention.jobs(short), *aot_decode.jobs(chip, short)]:
            print(json.dumps(attempt(name, job, lambda job=job: aot.run(job, chip, folder))), flush=True)


def whole_round(name: str, number: int) -> None:
    """The same for one whole round, which is too large to have its schedule written."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    from specjax.pallas_kernels import aot, aot_gpu

    if name in aot_gpu.CHIPS:
        aot_gpu.prepare()
    from specjax.engine import aot as engine_aot

    chip: Any = aot.CHIPS.get(name) or aot_gpu.CHIPS[name]
    job = engine_aot.job(engine_aot.cases(chip)[number])
    with aot.dumping(kernels=False):
        row = attempt(name, job, lambda: aot.run(job, chip, None) if name in aot.CHIPS else aot_gpu.run(job, chip))
    print(json.dumps(row), flush=True)


def attempt(chip: str, job: Any, compiled: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The row of a job, or what its compiler refuses."""
    try:
        return compiled()
    except Exception as error:
        return {"chip": chip, "job": job.name, "error": f"{type(error).__name__}: {str(error)[:2000]}"}


def show(rows: list[dict[str, Any]]) -> None:
    """The table, on stdout."""
    from rich.console import Console
    from rich.table import Table

    table = Table(show_edge=False)
    used = [key for key in COLUMNS if any(row.get(key) is not None for row in rows)]
    for key in used:
        least = 40 if key == "job" else None  # names are read, whatever figures stand beside them
        left = key in ("chip", "job")
        table.add_column(COLUMNS[key], justify="left" if left else "right", no_wrap=key == "chip", min_width=least)
    for row in rows:
        table.add_row(*[_cell(row, key) for key in used])
    Console(width=None if sys.stdout.isatty() else 200).print(table)
    for row in rows:
        if "error" in row:
            print(f"\n{row['chip']}: {row['job']}:\n{row['error']}")


def _cell(row: dict[str, Any], key: str) -> str:
    value = row.get(key)
    if value is None:
        if key == "compile_s":
            return "failed" if "error" in row else "declined" if "declined" in row else ""
        return ""
    return f"{value / SCALE[key]:.0f}" if key in SCALE else str(value)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # temporary folders are left as on any other way out
    if "--round" in sys.argv[2:]:
        whole_round(sys.argv[1], int(sys.argv[3]))
    else:
        worker(sys.argv[1], "--short" in sys.argv[2:])
