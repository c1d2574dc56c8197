"""Write the shipped tables: `python -m specjax.costmodel.build`.

Cells come from the roofline of the device's facts, for some TPUs corrected by passes that `python -m
specjax.cli.compiled` has compiled for them (`specjax/costmodel/samples`). Nothing is compiled here.
"""

import sys

from specjax.costmodel import compiled, menu, tables
from specjax.costmodel.facts import devices
from specjax.costmodel.roofline import Setup, memory
from specjax.costmodel.shapes import DRAFTERS, TARGETS
from specjax.costmodel.tables import Table

KINDS = ("ngram", "suffix", "eagle3", "mtp", "dflash", "dspark")  # others are priced when they are asked for
COMMAND = "python -m specjax.costmodel.build"
ROOM = 0.8  # share of the memory that weights and drafters may take


def setups() -> list[Setup]:
    """Every shipped device with every target, on the fewest devices (a power of two) that hold it."""
    found = []
    for device in devices().values():
        for target in TARGETS.values():
            setup = Setup(device, 1, target, "float32" if device.platform == "cpu" else "bfloat16")
            while memory(setup, [DRAFTERS[kind] for kind in KINDS], 1, 4096) > ROOM * device.memory * setup.count:
                setup = Setup(device, 2 * setup.count, target, setup.dtype)
            found.append(setup)
    return found


def table(setup: Setup) -> Table:
    """The shipped table of a set-up: from compiled passes where the package has any, else the roofline's."""
    path, shapes = compiled.file(setup.device.name, setup.target.name), menu.shapes(KINDS)
    if not path.exists():
        return tables.from_roofline(setup, shapes, made_by=COMMAND)
    samples = compiled.Samples.read(path)
    made_by = f"{COMMAND}; passes compiled by libtpu {samples.compiler}, jax {samples.jax}, {samples.date}"
    return compiled.table(setup, shapes, samples, made_by=made_by)


def write(setup: Setup) -> None:
    """Write the shipped table of a set-up."""
    table(setup).write(tables.shipped(setup.device.name, setup.target.name))


def main() -> int:
    for setup in setups():
        write(setup)
    return 0


if __name__ == "__main__":
    sys.exit(main())
