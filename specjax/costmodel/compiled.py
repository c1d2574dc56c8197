"""What a TPU's compiler says of a target's pass at a few points, and the latency table that follows from it.

The pass is compiled with two numbers of layers: their difference is what a layer takes, the rest what a pass does once,
so the whole model is a straight line away (`Samples.whole`). What the compiled pass takes beyond the roofline of the
same matrices and logits is then added to the roofline's cells, linearly between the points in requests and in rows
(`table`). Nothing here compiles; `specjax.cli.compiled` does.

The compiler's estimate (`pallas_kernels.aot.estimate`, less what the attention kernels state) is the longer of bytes
over bandwidth and operations over peak, of each operation that it has made of the pass. So it knows what is fused,
padded, copied and written on the way, which the roofline of the bare matrices does not; and like that it is a bound
from below, not a measurement.
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from specjax.costmodel import roofline, tables
from specjax.costmodel.isotonic import monotone
from specjax.costmodel.roofline import Setup, total
from specjax.costmodel.tables import Table
from specjax.draft import DraftShape

FORMAT = 1
LAYERS = (2, 4)
REQUESTS = (1, 8, 64)
ROWS = (1, 8)  # of each request
CONTEXT = 128  # tokens of a request, which a cache rounds up to
SLOTS = 512
CHECK = (1, 1)  # the point that is compiled with all layers

Point = tuple[int, int]  # requests, rows of each


def on_line(values: Mapping[int, float], layers: int) -> float:
    """The value at `layers` of the line through those at `LAYERS`."""
    few, more = (values[n] for n in LAYERS)
    return few + (more - few) / (LAYERS[1] - LAYERS[0]) * (layers - LAYERS[0])


@dataclasses.dataclass(frozen=True)
class Samples:
    """Times of compiled passes by their compiler's estimate; nothing here was measured.

    Attributes:
        device: as `facts` names it; one of them.
        target: name of the model.
        dtype: of weights and cache.
        jax: version.
        compiler: version of libtpu.
        date: of the newest sample.
        seconds: by requests, rows of each, and layers.
    """

    device: str
    target: str
    dtype: str
    jax: str
    compiler: str
    date: str
    seconds: Mapping[tuple[int, int, int], float] = dataclasses.field(default_factory=dict)

    def has(self, point: Point, layers: int) -> bool:
        return (*point, layers) in self.seconds

    def whole(self, point: Point, layers: int) -> float:
        """Seconds of a pass of the whole model, on the line through the two that were compiled.

        Raises:
            KeyError: the point was not compiled with both.
        """
        return on_line({n: self.seconds[*point, n] for n in LAYERS}, layers)

    def points(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Requests, and rows of each, of the largest full grid of points that were compiled with both."""
        done = {(b, r) for b, r, _ in self.seconds if all(self.has((b, r), layers) for layers in LAYERS)}
        rows = tuple(r for r in ROWS if (REQUESTS[0], r) in done)
        return tuple(b for b in REQUESTS if rows and all((b, r) in done for r in rows)), rows

    # ---------------------------------------------------------------- files

    def write(self, path: Path) -> None:
        """Write the file; it appears whole or not at all."""
        about = {k: v for k, v in dataclasses.asdict(self).items() if k != "seconds"}
        rows = [
            json.dumps({"requests": b, "rows": r, "layers": n, "us": round(s * 1e6, 2)})
            for (b, r, n), s in sorted(self.seconds.items())
        ]
        lines = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in ({"format": FORMAT} | about).items()]
        text = "{\n" + ",\n".join([*lines, '"compiled": [\n' + ",\n".join(rows) + "\n]"]) + "\n}\n"
        path.parent.mkdir(parents=True, exist_ok=True)
        with tables.replacing(path) as part:
            part.write_text(text, encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> "Samples":
        """Read a file of samples.

        Raises:
            ValueError: it cannot be read; the message names it.
        """
        try:
            given = json.loads(path.read_text(encoding="utf-8"))
            if (found := given.pop("format")) != FORMAT:
                raise ValueError(f"format {found!r}, this reads {FORMAT}")
            rows = given.pop("compiled")
            seconds = {(row["requests"], row["rows"], row["layers"]): row["us"] / 1e6 for row in rows}
            return cls(**given, seconds=seconds)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} holds no times of compiled passes: {error}") from None


def file(device: str, target: str) -> Path:
    """Where the package keeps the samples of a device and a target."""
    return Path(str(resources.files("specjax.costmodel").joinpath("samples", device, f"{target}.json")))


def compilable(setup: Setup) -> str | None:
    """Why no pass is compiled for a set-up; None if it is."""
    if setup.device.platform != "tpu":
        return f"{setup.device.name} is no TPU"
    if setup.count != 1:
        return f"{setup.target.name} is split over {setup.count} x {setup.device.name}, and passes are compiled for one"
    if setup.device.name == "tpu-7x":
        return "a tpu-7x is two devices to JAX, and counted as one here"
    return None


def beyond(setup: Setup, samples: Samples, point: Point) -> float:
    """Seconds that a compiled pass takes beyond the roofline of its matrices and logits; may be negative.

    The compiled time counts no less than what its bytes take at the data sheet's bandwidth.
    """
    batch, rows = point[0], point[0] * point[1]
    least = _matrices(setup, batch, rows)
    moving = least.bytes / setup.device.bandwidth
    return max(samples.whole(point, setup.target.layers), moving) - least.seconds


def _matrices(setup: Setup, batch: int, rows: int) -> roofline.Work:
    """What the compiler prices: a pass without attention, and without the least time of dependent kernels."""
    parts = setup.layers(setup.target.layers, batch, rows, 0, ops={})
    del parts["attention"]
    return total([*parts.values(), setup.head(setup.target.vocab, rows)])


def table(setup: Setup, shapes: Iterable[DraftShape], samples: Samples, **about: Any) -> Table:
    """The roofline's table with its verify passes corrected by what was compiled.

    A cell is the roofline of its point and what the compiled pass takes beyond it, linear in requests and rows between
    the points that were compiled, which have a cache of `SLOTS` a request. Outside of them the correction of the
    nearest one holds, and the cell remains `roofline`; inside it is `compiler`, unless most of it is attention, the
    reading of the logits and the assumed time of dependent kernels, none of which the compiler prices. No cell is
    below bytes over bandwidth.

    Raises:
        ValueError: the samples are of another set-up, or no point is complete.
    """
    if (samples.device, samples.target, samples.dtype) != (setup.device.name, setup.target.name, setup.dtype):
        raise ValueError(
            f"samples of {samples.target}, {samples.dtype}, on {samples.device} are not of {setup.target.name}, "
            f"{setup.dtype}, on {setup.device.name}"
        )
    made = tables.from_roofline(setup, shapes, **about)
    requests, rows = samples.points()
    if not requests:
        raise ValueError(f"no pass of {setup.target.name} on {setup.device.name} was compiled with {LAYERS} layers")
    extra = np.array([[beyond(setup, samples, (b, r)) for r in rows] for b in requests])
    axes = tables.BATCH, tables.ROWS, tables.CONTEXT
    seconds, sources = made.verify.seconds.copy(), made.verify.sources.copy()
    for (i, b), (j, r) in ((x, y) for x in enumerate(axes[0]) for y in enumerate(axes[1])):
        added = _between(requests, rows, extra, b, r)
        priced = _matrices(setup, b, b * r).seconds + added
        for k, c in enumerate(axes[2]):
            floor = _bytes(setup, b, b * r, c) / setup.device.bandwidth
            seconds[i, j, k] = max(seconds[i, j, k] + added, floor)
            inside = requests[0] <= b <= requests[-1] and rows[0] <= r <= rows[-1] and c <= SLOTS
            sources[i, j, k] = "c" if inside and priced >= seconds[i, j, k] / 2 else "r"
    return dataclasses.replace(made, verify=tables.Grid(axes, monotone(seconds), sources))


def _bytes(setup: Setup, batch: int, rows: int, context: int) -> float:
    parts = roofline.verify_phases(setup, batch, rows, context).values()
    return total([*parts, setup.sampling(setup.target.vocab, rows)]).bytes


def _between(requests: tuple[int, ...], rows: tuple[int, ...], values: np.ndarray, batch: float, each: float) -> float:
    """`values` at a point, linear along both axes, and at the edge where it is outside."""
    along = [np.interp(each, rows, line) for line in values]
    return float(np.interp(batch, requests, along))
