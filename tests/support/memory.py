"""Room for compiled programs in a test process."""

from pathlib import Path

import jax

# A process may hold 65,530 memory maps on Linux, unless it was told otherwise. XLA's CPU programs take many of them (an
# interpreted kernel hundreds), and crash where there are no more.
ENOUGH = 25_000
MAPS = Path("/proc/self/maps")


def forget_programs() -> None:
    """Let go of all compiled programs if they take up much of the process; what is needed again compiles again."""
    if MAPS.exists() and MAPS.read_bytes().count(b"\n") > ENOUGH:
        jax.clear_caches()
