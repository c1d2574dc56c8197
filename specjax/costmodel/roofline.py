"""Time of a whole round by the roofline: bytes over bandwidth against operations over peak, plus launches.

A bound from below where the vendor's figures are the truth, and the starting point where nothing was measured or
compiled. Every part (matrices, attention, head) takes the greater of its two times; parts follow one another.
"""

import dataclasses
from collections.abc import Iterable, Mapping

from specjax.costmodel.facts import Device
from specjax.costmodel.shapes import BYTES, DrafterShape, ModelShape
from specjax.draft import DraftShape

# Dependent kernels of a decoder layer: norm, product and rotation; attention; product; norm, gate and up, down.
LAYER_OPS = {"qkv": 3, "attention": 1, "output": 1, "mlp": 3}
ACCEPT_OPS, COMMIT_OPS = 25, 15  # sampling and the accept walk; the cache's rows, tokens and state (assumed)
LOOKUP_OPS = 40  # of a drafter without weights (assumed)
LOGIT_READS = 2  # float32 logits are written once, and read to sample
LOOKUP_PASSES = 8  # over a request's tokens, to find where its last ones stood before


@dataclasses.dataclass(frozen=True)
class Work:
    """What something moves and computes, on all devices, and the least time that it takes.

    Attributes:
        bytes: read from memory or written to it.
        flops: operations; a multiplication and an addition are two.
        seconds: the roofline's, with the least time of each dependent kernel.
    """

    bytes: float = 0.0
    flops: float = 0.0
    seconds: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(self.bytes + other.bytes, self.flops + other.flops, self.seconds + other.seconds)


def total(parts: Iterable[Work]) -> Work:
    """Parts that follow one another."""
    return sum(parts, Work())


@dataclasses.dataclass(frozen=True)
class Setup:
    """What is priced: a target on `count` devices of a kind, matrices split evenly over them.

    Attributes:
        device: one of them.
        count: how many.
        target: the model.
        dtype: of weights, activations and cache.
    """

    device: Device
    count: int
    target: ModelShape
    dtype: str

    def work(self, size: float = 0.0, flops: float = 0.0) -> Work:
        """`size` bytes and `flops` operations beside each other, spread over the devices."""
        reading = size / (self.device.bandwidth * self.count)
        computing = flops / (self.device.flops(self.dtype) * self.count)
        return Work(size, flops, max(reading, computing))

    def kernels(self, count: float) -> Work:
        """The least time of `count` dependent kernels."""
        return Work(seconds=count * self.device.op)

    def launch(self) -> Work:
        """A program's dispatch, and the reading of its result."""
        return Work(seconds=self.device.launch)

    def matrices(self, parameters: float, rows: float) -> Work:
        """`rows` rows times `parameters` parameters, read once."""
        return self.work(parameters * BYTES[self.dtype], 2 * parameters * rows)

    def layers(
        self,
        layers: int,
        batch: float,
        rows: float,
        context: float,
        joined: int = 1,
        ops: Mapping[str, int] = LAYER_OPS,
    ) -> dict[str, Work]:
        """Decoder layers for `rows` rows in all, each seeing `context` cached tokens, by phase.

        Args:
            layers: how many.
            batch: requests; the keys and values of each are read once.
            rows: of all requests.
            context: tokens in the cache of a request.
            joined: model widths that queries, keys and values are made from.
            ops: dependent kernels of each phase in a layer.
        """
        target = self.target
        cached = batch * context * target.kv_bytes(self.dtype, layers)
        scores = 4 * layers * target.heads * target.head_dim * rows * context
        found = {
            "qkv": self.matrices(layers * joined * target.qkv_parameters, rows),
            "attention": self.work(cached, scores),
            "output": self.matrices(layers * target.output_parameters, rows),
            "mlp": self.matrices(layers * target.mlp_parameters, rows),
        }
        found = {name: work + self.kernels(layers * ops.get(name, 0)) for name, work in found.items()}
        if self.count > 1:  # two all-reduces a layer, in a ring: the rows are summed behind output and MLP
            size = rows * target.hidden * BYTES[self.dtype]
            ring = 2 * (self.count - 1) / self.count * size / self.device.interconnect + 2 * self.device.op
            for name in ("output", "mlp"):
                found[name] += Work(seconds=layers * ring)
        return found

    def head(self, vocab: int, rows: float) -> Work:
        """Logits over `vocab` tokens for `rows` rows, written."""
        return self.matrices(self.target.hidden * vocab, rows) + self.work(4 * rows * vocab)

    def sampling(self, vocab: int, rows: float) -> Work:
        """Reading the logits."""
        return self.work(LOGIT_READS * 4 * rows * vocab)


def verify_phases(setup: Setup, batch: float, rows: float, context: float) -> dict[str, Work]:
    """One target pass over `rows` packed rows of `batch` requests, by phase."""
    target = setup.target
    return setup.layers(target.layers, batch, rows, context) | {"head": setup.head(target.vocab, rows)}


def verify(setup: Setup, batch: float, rows: float, context: float) -> float:
    """Seconds of one target pass, its logits read; `rows == batch` is a plain step."""
    sampling = setup.sampling(setup.target.vocab, rows)
    return total([*verify_phases(setup, batch, rows, context).values(), sampling]).seconds


def draft_work(setup: Setup, drafter: DrafterShape, shape: DraftShape, batch: float, context: float) -> Work:
    """To take in what was committed and to draft `shape` for `batch` requests, its launch included."""
    target = setup.target
    if not drafter.learned:
        return setup.launch() + setup.work(LOOKUP_PASSES * 4 * batch * context) + setup.kernels(LOOKUP_OPS)
    vocab, joined = drafter.head_vocab(target), drafter.joined
    newest = batch * (shape.depth + 1)  # committed rows of a round, at most
    parts = [setup.launch(), setup.matrices(drafter.fuse_parameters(target), newest)]

    def step(rows: float, heads: float) -> None:
        parts.extend(setup.layers(drafter.layers, batch, rows, context, joined).values())
        parts.extend((setup.head(vocab, heads), setup.sampling(vocab, heads)))

    if drafter.parallel:
        step(newest + batch * (shape.depth + 1), batch * shape.depth)
        if drafter.markov:
            step_of_chain = setup.matrices(drafter.markov * vocab, batch) + setup.kernels(2)
            parts.extend([step_of_chain] * shape.depth)
        return total(parts)
    for level in range(shape.depth):
        width = batch * min(shape.branching, shape.branching**level)
        step(newest if level == 0 else width, width)
    return total(parts)


def draft(setup: Setup, drafter: DrafterShape, shape: DraftShape, batch: float, context: float) -> float:
    """Seconds of `draft_work`."""
    return draft_work(setup, drafter, shape, batch, context).seconds


def fixed(setup: Setup) -> float:
    """Seconds of a round beside its passes: the launch, sampling, the accept walk, the commit."""
    return (setup.launch() + setup.kernels(ACCEPT_OPS + COMMIT_OPS)).seconds


def round_phases(
    setup: Setup,
    drafter: DrafterShape | None,
    shape: DraftShape,
    batch: float,
    rows: float,
    context: float,
    fused: int = 0,
) -> dict[str, Work]:
    """A round by phase, in order; the times add up to `draft` + `verify` + `fixed`.

    Args:
        setup: what is priced.
        drafter: None for plain decoding.
        shape: what it drafts.
        batch: requests.
        rows: of all requests in the pass.
        context: tokens in the cache of a request.
        fused: kernels that a fused step makes of all layers, which are then one phase, `layers`; this is not what
            `verify` prices. 0: no fused step.
    """
    verifying = verify_phases(setup, batch, rows, context)
    if fused:
        inside = setup.layers(setup.target.layers, batch, rows, context, ops={})
        verifying = {"layers": total(inside.values()) + setup.kernels(fused), "head": verifying["head"]}
    drafting = {} if drafter is None else {"draft": draft_work(setup, drafter, shape, batch, context)}
    return (
        drafting
        | verifying
        | {
            "accept": setup.sampling(setup.target.vocab, rows) + setup.kernels(ACCEPT_OPS),
            "commit": setup.kernels(COMMIT_OPS),
            "launch": setup.launch(),
        }
    )


def catch_up(setup: Setup, drafter: DrafterShape, batch: float) -> tuple[float, float]:
    """Seconds to bring a drafter that was off up to date: at least, and for each missed token of each request."""
    if not drafter.learned:
        return 0.0, 0.0
    parameters = drafter.layers * drafter.layer_parameters(setup.target) + drafter.fuse_parameters(setup.target)
    least = setup.launch() + setup.matrices(parameters, batch)
    return least.seconds, setup.work(flops=2 * parameters).seconds


def memory(setup: Setup, drafters: list[DrafterShape], batch: int, context: int) -> float:
    """Bytes that a load holds on all devices: weights, drafters, and the cache of every request."""
    target = setup.target
    weights = target.parameters + sum(d.parameters(target) for d in drafters)
    layers = target.layers + sum(d.layers for d in drafters)
    return weights * BYTES[setup.dtype] + batch * context * target.kv_bytes(setup.dtype, layers)
