"""Write the shipped tables: `python -m specjax.costmodel.build`. Cells come from the roofline of the device's facts."""

import sys

from specjax.costmodel import menu, tables
from specjax.costmodel.facts import devices
from specjax.costmodel.roofline import Setup, memory
from specjax.costmodel.shapes import DRAFTERS, TARGETS

KINDS = ("ngram", "suffix", "eagle3", "mtp", "dflash", "dspark")  # others are priced when they are asked for
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


def main() -> int:
    for setup in setups():
        table = tables.from_roofline(setup, menu.shapes(KINDS), made_by="python -m specjax.costmodel.build")
        table.write(tables.shipped(setup.device.name, setup.target.name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
