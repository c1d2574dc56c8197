"""Devices that are not here, to trace programs for."""

import contextlib

import jax

H100 = "NVIDIA H100 80GB HBM3"
V6E = "TPU v6 lite"


@contextlib.contextmanager
def around(kind: str, platform: str = "gpu"):
    """Programs are traced for this device meanwhile."""
    chip = jax.sharding.AbstractDevice(device_kind=kind, num_cores=1, platform=platform)
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",), abstract_device=chip)):
        yield
