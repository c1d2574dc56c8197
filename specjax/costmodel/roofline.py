"""Time of a whole round by the roofline: bytes over bandwidth against operations over peak, plus launches.

A bound from below where the vendor's figures are the truth, and the starting point where nothing was measured or
compiled. Every part (matrices, attention, head) takes the greater of its two times; parts follow one another.
"""

import dataclasses

from specjax.costmodel.facts import Device
from specjax.costmodel.shapes import BYTES, DrafterShape, ModelShape
from specjax.draft import DraftShape

LAYER_OPS = 8  # dependent kernels of a decoder layer: norm, qkv, rotation, attention, output, norm, gate and up, down
ROUND_OPS = 40  # sampling, accept walk, cache commit, state
LOGIT_PASSES = 3  # float32 logits are written, and read to sample
LOOKUP_PASSES = 8  # over a request's tokens, to find where its last ones stood before


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

    def read(self, size: float) -> float:
        """Seconds to read `size` bytes, spread over the devices."""
        return size / (self.device.bandwidth * self.count)

    def compute(self, operations: float) -> float:
        """Seconds of arithmetic in the set-up's dtype, spread over the devices."""
        return operations / (self.device.flops(self.dtype) * self.count)

    def matrices(self, parameters: float, rows: float) -> float:
        """Seconds to multiply `rows` rows with `parameters` parameters, read once."""
        return max(self.read(parameters * BYTES[self.dtype]), self.compute(2 * parameters * rows))

    def layers(self, layers: int, parameters: float, batch: float, rows: float, context: float) -> float:
        """Seconds of `layers` decoder layers for `rows` rows in all, each seeing `context` cached tokens.

        Args:
            layers: how many.
            parameters: of the matrices of one.
            batch: requests; the keys and values of each are read once.
            rows: of all requests.
            context: tokens in the cache of a request.
        """
        target, device = self.target, self.device
        cached = batch * context * target.kv_bytes(self.dtype, layers)
        scores = 4 * layers * target.heads * target.head_dim * rows * context
        seconds = self.matrices(layers * parameters, rows) + max(self.read(cached), self.compute(scores))
        seconds += layers * LAYER_OPS * device.op
        if self.count > 1:  # two all-reduces a layer, in a ring
            size = rows * target.hidden * BYTES[self.dtype]
            ring = 2 * (self.count - 1) / self.count * size / device.interconnect + 2 * device.op
            seconds += 2 * layers * ring
        return seconds

    def head(self, vocab: int, rows: float) -> float:
        """Seconds of logits over `vocab` tokens for `rows` rows."""
        logits = self.read(LOGIT_PASSES * 4 * rows * vocab)
        return self.matrices(self.target.hidden * vocab, rows) + logits


def verify(setup: Setup, batch: float, rows: float, context: float) -> float:
    """Seconds of one target pass over `rows` packed rows of `batch` requests; `rows == batch` is a plain step."""
    target = setup.target
    body = setup.layers(target.layers, target.layer_parameters, batch, rows, context)
    return body + setup.head(target.vocab, rows)


def draft(setup: Setup, drafter: DrafterShape, shape: DraftShape, batch: float, context: float) -> float:
    """Seconds to take in what was committed and to draft `shape` for `batch` requests, its launch included."""
    device, target = setup.device, setup.target
    if not drafter.learned:
        return device.launch + setup.read(LOOKUP_PASSES * 4 * batch * context) + ROUND_OPS * device.op
    own, vocab = drafter.layer_parameters(target), drafter.head_vocab(target)
    newest = batch * (shape.depth + 1)  # committed rows of a round, at most
    seconds = device.launch + setup.matrices(drafter.fuse_parameters(target), newest)
    if drafter.parallel:
        block = batch * (shape.depth + 1)
        seconds += setup.layers(drafter.layers, own, batch, newest + block, context)
        seconds += setup.head(vocab, batch * shape.depth)
        if drafter.markov:
            step = setup.matrices(drafter.markov * vocab, batch) + 2 * device.op
            seconds += shape.depth * step
        return seconds
    for level in range(shape.depth):
        width = batch * min(shape.branching, shape.branching**level)
        rows = newest if level == 0 else width
        seconds += setup.layers(drafter.layers, own, batch, rows, context) + setup.head(vocab, width)
    return seconds


def fixed(setup: Setup) -> float:
    """Seconds of a round beside its passes: the launch, sampling, the accept walk, the commit."""
    return setup.device.launch + ROUND_OPS * setup.device.op


def catch_up(setup: Setup, drafter: DrafterShape, batch: float) -> tuple[float, float]:
    """Seconds to bring a drafter that was off up to date: at least, and for each missed token of each request."""
    if not drafter.learned:
        return 0.0, 0.0
    parameters = drafter.layers * drafter.layer_parameters(setup.target) + drafter.fuse_parameters(setup.target)
    least = setup.device.launch + setup.matrices(parameters, batch)
    return least, setup.compute(2 * parameters)


def memory(setup: Setup, drafters: list[DrafterShape], batch: int, context: int) -> float:
    """Bytes that a load holds on all devices: weights, drafters, and the cache of every request."""
    target = setup.target
    weights = target.parameters + sum(d.parameters(target) for d in drafters)
    layers = target.layers + sum(d.layers for d in drafters)
    return weights * BYTES[setup.dtype] + batch * context * target.kv_bytes(setup.dtype, layers)
