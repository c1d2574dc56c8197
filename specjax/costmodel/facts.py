"""What is known of a device without running on it: peak arithmetic, memory, links, each figure with its source.

The figures are the vendors' own, dense (no sparsity), of one device: `devices.json`. What no vendor publishes, the
time that a launch costs, is assumed here, by platform; `specjax calibrate` measures it.
"""

import dataclasses
import functools
import json
from collections.abc import Mapping
from importlib import resources

# Seconds. A launch: the host dispatches a program and later reads its result. An op: the least time of one of the
# dependent kernels of a layer, whatever its size. Assumptions, of the order of what profiles of small models show.
LAUNCH = {"tpu": 60e-6, "gpu": 40e-6, "cpu": 150e-6}
OP = {"tpu": 1e-6, "gpu": 2e-6, "cpu": 5e-6}

# Where a device has no figure for a type, it computes in the next wider one that it has.
_WIDER = {"float8": "bfloat16", "int8": "bfloat16", "float32": "bfloat16"}
_F32_PASSES = 6  # bf16 passes of one f32 product at full precision on a TPU, which has no f32 units


@dataclasses.dataclass(frozen=True)
class Device:
    """One accelerator (or a CPU).

    Attributes:
        name: its key in `devices.json`.
        platform: `tpu`, `gpu` or `cpu`.
        peak: floating-point operations a second, by dtype, dense.
        memory: bytes.
        bandwidth: bytes a second from that memory.
        interconnect: bytes a second to the other devices, all links, one way.
        source: where each figure comes from.
    """

    name: str
    platform: str
    peak: Mapping[str, float]
    memory: float
    bandwidth: float
    interconnect: float
    source: Mapping[str, str]

    @property
    def launch(self) -> float:
        """Seconds to dispatch a program and read what it returns (assumed)."""
        return LAUNCH[self.platform]

    @property
    def op(self) -> float:
        """Seconds of the smallest dependent kernel (assumed)."""
        return OP[self.platform]

    def flops(self, dtype: str) -> float:
        """Operations a second in `dtype`, or in the type that the device computes it in.

        Raises:
            ValueError: a dtype of no known speed.
        """
        if dtype in self.peak:
            return self.peak[dtype]
        if dtype not in _WIDER:
            raise ValueError(f"no peak of {self.name} is known for {dtype}; known are {', '.join(self.peak)}")
        return self.flops(_WIDER[dtype]) / (_F32_PASSES if dtype == "float32" else 1)


@functools.cache
def devices() -> Mapping[str, Device]:
    """All devices with known facts, by name."""
    text = resources.files("specjax.costmodel").joinpath("devices.json").read_text(encoding="utf-8")
    return {
        name: Device(
            name=name,
            platform=entry["platform"],
            peak={dtype: tera * 1e12 for dtype, tera in entry["peak_tflops"].items()},
            memory=entry["memory_gb"] * 1e9,
            bandwidth=entry["bandwidth_gb_s"] * 1e9,
            interconnect=entry["interconnect_gb_s"] * 1e9,
            source=entry["source"],
        )
        for name, entry in json.loads(text).items()
    }


def find(name: str) -> Device:
    """A device by its name here, by a common short name, or by the kind that JAX reports (`TPU v6 lite`).

    Raises:
        ValueError: nothing is known of such a device; the known ones are listed.
    """
    wanted = name.lower()
    if wanted in devices():
        return devices()[wanted]
    text = resources.files("specjax.costmodel").joinpath("devices.json").read_text(encoding="utf-8")
    patterns = [(word, known) for known, entry in json.loads(text).items() for word in entry["match"]]
    # The longest match wins: "TPU v5 lite" is no "TPU v5", an "L40" no "L4".
    found = [(len(word), known) for word, known in patterns if _mentions(wanted, word)]
    if not found:
        raise ValueError(f"nothing is known of a device {name!r}; known are {', '.join(devices())}")
    return devices()[max(found)[1]]


def _mentions(text: str, word: str) -> bool:
    """Whether `word` stands in `text`, neither its end nor its start inside another number or name."""
    start = text.find(word)
    end = start + len(word)
    return start >= 0 and not text[end : end + 1].isalnum() and not text[max(start - 1, 0) : start].isalnum()
