"""Which GPU a program is traced for."""

from jax.experimental.pallas import triton as pltriton


def capability() -> int | None:
    """NVIDIA compute capability times ten (90: Hopper, 100: Blackwell) of the device around the trace; else None."""
    try:
        found = pltriton.get_gpu_info().compute_capability
    except ValueError:  # no GPU, or one that this JAX does not know
        return None
    return found or None
