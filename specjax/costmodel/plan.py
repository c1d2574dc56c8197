"""A plan on paper: what each shape of a menu is expected to do for a load, before anything has run."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from specjax.costmodel import roofline
from specjax.costmodel.acceptance import Acceptance
from specjax.costmodel.priors import PRIORS, Prior
from specjax.costmodel.roofline import Setup
from specjax.costmodel.shapes import BYTES, DrafterShape
from specjax.costmodel.tables import Table
from specjax.draft import PLAIN, DraftShape

USABLE = 0.92  # share of a device's memory for weights and cache; the rest holds activations and the runtime
MOST = 65536  # requests and devices are not counted beyond this
BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)


class TooLargeError(ValueError):
    """A load that the devices' memory does not hold; the message says what would fit."""


@dataclasses.dataclass(frozen=True)
class Outlook:
    """What is expected of one shape.

    Attributes:
        shape: whole: every request verifies `shape.rows` rows.
        rate: tokens per second of all requests.
        tokens: of one request in one round.
        seconds: of a round.
        source: of the cells that priced it.
    """

    shape: DraftShape
    rate: float
    tokens: float
    seconds: float
    source: str


@dataclasses.dataclass(frozen=True)
class Plan:
    """The menu for one load, best first.

    Attributes:
        batch: requests.
        context: tokens in the cache of each.
        outlooks: of every shape, plain decoding among them.
    """

    batch: int
    context: int
    outlooks: tuple[Outlook, ...]

    @property
    def choice(self) -> Outlook:
        return self.outlooks[0]

    @property
    def plain(self) -> Outlook:
        return next(o for o in self.outlooks if o.shape == PLAIN)

    def to_json(self) -> dict:
        """As `specjax plan --json` prints it; `rows` are those of one request, the root included."""
        shape = self.choice.shape
        return {
            "batch": self.batch,
            "shape": {
                "drafter": shape.kind,
                "depth": shape.depth,
                "branching": shape.branching,
                "rows": shape.rows,
            },
            "predicted_rate": self.choice.rate,
            "plain_rate": self.plain.rate,
            "table_source": self.choice.source,
        }


def plan(
    table: Table,
    shapes: Sequence[DraftShape],
    batch: int,
    context: int,
    temperature: float = 0.0,
    priors: Mapping[str, Prior] = PRIORS,
) -> Plan:
    """Expected rates of a menu when all requests are alike and do as the priors say.

    Args:
        table: prices.
        shapes: the menu; plain decoding is added if it is missing.
        batch: requests that decode together.
        context: tokens in the cache of each.
        temperature: of their sampling.
        priors: acceptance by kind.
    """
    drafted = [shape for shape in shapes if shape.depth]
    acceptance = Acceptance(drafted, 1, priors)
    acceptance.start(0, temperature)
    row = np.zeros(1, int)
    levels, live = np.cumprod(acceptance.rates(row)[..., 0], axis=0).T, acceptance.live(row)[:, 0]
    found = []
    for shape in dict.fromkeys((PLAIN, *drafted)):
        bare = float(table.round_time(shape, batch, batch, context))
        tokens, seconds = 1.0, bare
        if shape.depth:
            curve = acceptance.curve[shape]
            tokens += float(live[curve] * levels[curve, : shape.depth].sum())
            full = float(table.round_time(shape, batch, batch * shape.rows, context))
            seconds = float(live[curve] * full + (1 - live[curve]) * bare)
        source = table.source(shape, batch, batch * shape.rows, context)
        found.append(Outlook(shape, batch * tokens / seconds, tokens, seconds, source))
    return Plan(batch, context, tuple(sorted(found, key=lambda o: -o.rate)))


def crossings(plans: Sequence[Plan]) -> dict[DraftShape, int | None]:
    """By shape, the first batch of `plans` (ascending) from which on it is slower than plain decoding, or None."""
    found: dict[DraftShape, int | None] = {}
    for shape in (o.shape for o in plans[0].outlooks if o.shape.depth):
        found[shape] = None
        for made in reversed(plans):
            if next(o.rate for o in made.outlooks if o.shape == shape) >= made.plain.rate:
                break
            found[shape] = made.batch
    return found


def fits(setup: Setup, drafters: Sequence[DrafterShape], batch: int, context: int) -> bool:
    """Whether the memory of the devices holds weights, drafters and caches."""
    return roofline.memory(setup, list(drafters), batch, context) <= USABLE * setup.device.memory * setup.count


def check_memory(setup: Setup, drafters: Sequence[DrafterShape], batch: int, context: int) -> None:
    """Refuse a load that does not fit.

    Raises:
        TooLargeError: it does not; the message says what would.
    """
    if fits(setup, drafters, batch, context):
        return
    device, target = setup.device, setup.target
    need, have = roofline.memory(setup, list(drafters), batch, context), USABLE * device.memory * setup.count
    weights = roofline.memory(setup, list(drafters), 0, 0)
    options = []
    if weights < have:
        if most := _most(lambda n: fits(setup, drafters, n, context)):
            options.append(f"{most} request{'s' * (most > 1)} of {context} tokens")
        if most := _most(lambda n: fits(setup, drafters, batch, n)):
            options.append(f"{batch} request{'s' * (batch > 1)} of {most} tokens")
    count = next(
        (
            n
            for n in range(setup.count + 1, MOST)
            if fits(dataclasses.replace(setup, count=n), drafters, batch, context)
        ),
        None,
    )
    if count is not None:
        options.append(f"{count} devices")
    if any(d.learned for d in drafters) and fits(setup, [], batch, context):
        options.append("this load without learned drafters")
    smaller = [d for d in ("bfloat16", "int8") if BYTES[d] < BYTES[setup.dtype]]
    options += [f"dtype {d}" for d in smaller if fits(dataclasses.replace(setup, dtype=d), drafters, batch, context)][
        :1
    ]
    raise TooLargeError(
        f"{target.name} in {setup.dtype} with {batch} request{'s' * (batch > 1)} of {context} tokens needs "
        f"{need / 1e9:.1f} GB, and {setup.count} x {device.name} has {have / 1e9:.1f} GB for it "
        f"(weights {weights / 1e9:.1f} GB, caches {(need - weights) / 1e9:.1f} GB)\n"
        f"  what would fit: {'; '.join(options) or 'nothing of this kind'}"
    )


def _most(holds) -> int:
    """The greatest number up to 2^20 that still fits; 0 for none."""
    low, high = 0, 2**20
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low
