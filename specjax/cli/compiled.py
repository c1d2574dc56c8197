"""`python -m specjax.cli.compiled`: compile passes for TPUs that are not here, for the shipped latency tables."""

import dataclasses
import datetime
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from specjax.cli import aot, flags

if TYPE_CHECKING:
    from specjax.costmodel.compiled import Samples
    from specjax.costmodel.roofline import Setup

HELP = """Compile passes for TPUs that are not here, and write the shipped latency tables from what their compiler says.

  python -m specjax.cli.compiled tpu-v6e --targets llama-3.1-8b smollm2-135m
  python -m specjax.cli.compiled tpu-v6e --targets smollm2-135m --check      one pass of the whole model beside

The target's pass over some rows (requests x rows of each) is compiled with two and with four layers, from which the
whole model follows. What is compiled is kept in specjax/costmodel/samples/CHIP/TARGET.json as it comes, and goes on
from there: only points that are missing, or that another JAX or libtpu has compiled, are compiled. The table is written
behind the last point of a target. Needs the TPU compiler (pip install 'specjax[tpu]', or the environment of `make
aot`); no TPU is used. For the tables of other devices, or after a change of the roofline: python -m
specjax.costmodel.build, which compiles nothing."""


@dataclasses.dataclass(kw_only=True)
class Compiled(flags.CommonFlags):
    """Flags of `python -m specjax.cli.compiled`."""

    chips: Annotated[tyro.conf.Positional[tuple[str, ...]], flags.text("CHIP")]
    """tpu-v5e, tpu-v5p, tpu-v6e."""
    targets: Annotated[tuple[str, ...], flags.text("NAME")] = ()
    """Known targets; all that fit one chip by default."""
    check: bool = False
    """Also compile one plain pass with all layers, and say how far the line through two and four is from it."""

    def run(self) -> int:
        """Compile, write; 1 if something does not compile."""
        from specjax.costmodel import build, compiled

        pairs = {(setup.device.name, setup.target.name): setup for setup in build.setups()}
        names = list(dict.fromkeys(target for _, target in pairs))
        for given, known in ((self.chips, sorted({chip for chip, _ in pairs})), (self.targets, names)):
            if unknown := [name for name in given if name not in known]:
                raise ValueError(f"unknown {', '.join(unknown)}; known: {', '.join(known)}")
        wanted = [pairs[chip, target] for chip in self.chips for target in self.targets or names]
        for setup in wanted:
            if (reason := compiled.compilable(setup)) is not None:
                if self.targets:
                    raise ValueError(f"nothing to compile: {reason}")
                flags.note(f"left out: {reason}")
        done = [self._one(setup) for setup in wanted if compiled.compilable(setup) is None]
        return 0 if all(done) else 1

    def _one(self, setup: "Setup") -> bool:
        """Compile what is missing of a set-up, and write its table; whether all of it compiled."""
        from specjax.costmodel import build, compiled

        path, name = compiled.file(setup.device.name, setup.target.name), f"{setup.device.name}, {setup.target.name}"
        samples, good = resumed(setup, path), True
        layers = setup.target.layers
        todo = missing(samples, layers if self.check else None)
        for index, row in enumerate(rows(setup, todo)):
            if "error" in row:
                flags.note(f"{name}: {row['error']}")
                good = False
                continue
            samples = kept(samples, row)
            samples.write(path)
            flags.note(
                f"{name}: {index + 1} of {len(todo)}: {row['requests']} x {row['rows']} rows, {row['layers']} layers: "
                f"{row['us']:.1f} µs ({row['compile_s']:.0f} s)"
            )
        if self.check and samples.has(compiled.CHECK, layers):
            whole, line = samples.seconds[*compiled.CHECK, layers], samples.whole(compiled.CHECK, layers)
            flags.note(f"{name}: all {layers} layers: {whole * 1e6:.1f} µs; the line says {line / whole - 1:+.2%}")
        if samples.points()[0]:
            build.write(setup)
            flags.note(f"{name}: table written")
        return good


def resumed(setup: "Setup", path: Path) -> "Samples":
    """What a file already has of a set-up, by the compiler that is here; else empty samples."""
    from specjax.costmodel.compiled import Samples

    jax, compiler = versions()
    fresh = Samples(setup.device.name, setup.target.name, setup.dtype, jax, compiler, today())
    if not path.exists():
        return fresh
    found = Samples.read(path)
    return fresh if (found.jax, found.compiler) != (jax, compiler) else found


def missing(samples: "Samples", whole: int | None) -> list[tuple[int, int, int]]:
    """Requests, rows and layers that are still to be compiled; `whole`: layers of the model, to check with."""
    from specjax.costmodel import compiled

    wanted = [(b, r, n) for b in compiled.REQUESTS for r in compiled.ROWS for n in compiled.LAYERS]
    wanted += [] if whole is None else [(*compiled.CHECK, whole)]
    return [each for each in wanted if each not in samples.seconds]


def kept(samples: "Samples", row: dict[str, Any]) -> "Samples":
    """The samples with one more."""
    seconds = {**samples.seconds, (row["requests"], row["rows"], row["layers"]): row["us"] / 1e6}
    return dataclasses.replace(samples, seconds=seconds, date=today())


def rows(setup: "Setup", todo: list[tuple[int, int, int]]) -> Iterator[dict[str, Any]]:
    """Compile in a process of its own; a row for each that is done."""
    if not todo:
        return iter(())
    given = json.dumps({"target": setup.target.name, "dtype": setup.dtype, "todo": todo})
    return aot.in_a_process(setup.device.name, given, module="specjax.cli.compiled")


def versions() -> tuple[str, str]:
    """Of JAX and of the TPU compiler.

    Raises:
        ValueError: there is no TPU compiler.
    """
    from importlib import metadata

    try:
        return metadata.version("jax"), metadata.version("libtpu")
    except metadata.PackageNotFoundError as error:
        raise ValueError(f"{error.name} is not installed: pip install 'specjax[tpu]', or use `make aot`'s") from None


def today() -> str:
    return datetime.date.today().isoformat()


def worker(name: str, given: dict[str, Any]) -> None:
    """Print a line of JSON for every pass that is compiled for a chip."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    from specjax.costmodel.compiled import CONTEXT
    from specjax.costmodel.shapes import TARGETS
    from specjax.engine import aot as engine_aot
    from specjax.pallas_kernels import aot as tpu

    chip, model = tpu.CHIPS[name], engine_aot.model_of(TARGETS[given["target"]])
    with tpu.dumping(kernels=False):
        for batch, each, layers in given["todo"]:
            case = engine_aot.Case(
                name=given["target"],
                model=engine_aot.cut(model, layers),
                drafter="ngram" if each > 1 else "none",
                drafts=each - 1,
                batch=batch,
                context=CONTEXT,
                dtype=given["dtype"],
            )
            job, attention = engine_aot.pass_job(case)
            about = {"requests": batch, "rows": each, "layers": layers}

            def compiled(job=job, attention=attention):
                started = time.perf_counter()
                seconds = tpu.estimate(job, chip) - attention / (chip.bandwidth * chip.cores)
                return {"us": seconds * 1e6, "compile_s": time.perf_counter() - started}

            print(json.dumps(about | aot.attempt(name, job, compiled)), flush=True)


def main(argv: list[str]) -> int:
    command = tyro.cli(Compiled, prog="python -m specjax.cli.compiled", description=HELP, args=argv)
    try:
        return command.run()
    except ValueError as error:
        if command.debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[2].startswith("{"):
        worker(sys.argv[1], json.loads(sys.argv[2]))
    else:
        sys.exit(main(sys.argv[1:]))
