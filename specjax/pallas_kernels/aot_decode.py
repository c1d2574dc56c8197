"""The fused decode step for absent TPUs: what to compile, and its time by the compiler's schedule.

The kernel is a stream of equal weight tiles through a ring of banks. `simulate` plays it: a copy starts when the
schedule says that the kernel gets there, copies share one memory in the order in which they were started, and a
product waits for its tile. So it shows whether, and for how long, the stream stands still.
"""

import collections
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.draft import Rows, words
from specjax.pallas_kernels.aot import Chip, Job, shares
from specjax.pallas_kernels.decode_step import tpu
from specjax.pallas_kernels.decode_step.weights import Plan, Weights
from specjax.pallas_kernels.schedule import Loop, Schedule
from specjax.pallas_kernels.tree_attention.tpu_request import bounds_of

LATENCY = 1e-6  # seconds from the start of a copy to its first byte: our assumption, on the high side

LLAMA_8B = {"layers": 32, "hidden": 4096, "intermediate": 14336, "heads": 32, "groups": 8, "dim": 128, "eps": 1e-5}
MODELS = {
    "Llama-3.1-8B": LLAMA_8B | {"qk_norm": False},
    "Qwen3-8B": LLAMA_8B | {"layers": 36, "intermediate": 12288, "eps": 1e-6, "qk_norm": True},
    "Llama-3.2-3B": LLAMA_8B | {"layers": 28, "hidden": 3072, "intermediate": 8192, "heads": 24, "qk_norm": False},
}


def jobs(chip: Chip, short: bool) -> list[Job]:
    """The steps that fit the chip's memory; `short`: one of them."""
    large = chip.memory > 20e9
    found = [job("Llama-3.1-8B" if large else "Llama-3.2-3B")]
    if not short:
        found += [job("Qwen3-8B" if large else "Llama-3.2-3B", batch=2, page=64), job("Llama-3.1-8B", int8=True)]
    return found


def job(
    model: str, *, batch: int = 1, width: int = 8, context: int = 1024, page: int | None = None, int8: bool = False
) -> Job:
    """One verify step of a model in bfloat16 or int8, every request with `context` committed slots."""
    plan = Plan.of(dtype="bfloat16", int8=int8, **MODELS[model])
    name = f"decode_step {model}{' int8' * int8}, {batch}x{width} rows, {context}"
    return job_of(name, plan, batch, width, context, page)


def job_of(name: str, plan: Plan, batch: int, width: int, context: int, page: int | None = None) -> Job:
    """The same for a plan."""
    slots = 2 * context
    args = shapes(plan, batch, width, slots, page)
    cache, table, rows = args[4], args[6], args[8]
    step = tpu.step_of(plan, rows, cache, table)
    committed = np.full(batch, context, np.int32)
    pages = np.arange(batch * (slots // (page or slots)), dtype=np.int32)
    matrices = plan.layers * plan.tiles * plan.rows * plan.columns * plan.tile_dtype.itemsize
    cached = 2 * batch * context * plan.layers * plan.groups * plan.dim
    return Job(
        name=name,
        function=functools.partial(tpu.decode_step, plan),
        args=args,
        kernel="decode_step",
        scalars=(np.asarray(bounds_of(step.shape, jnp.asarray(committed))), committed, np.full(batch, width), pages),
        needed=matrices + 2 * cached,
        estimate=functools.partial(simulate, step, context),
        stages=functools.partial(stages, step, context),
        vmem=step.vmem_bytes,
        donated=(4, 5),
    )


def shapes(plan: Plan, batch: int, width: int, slots: int, page: int | None) -> tuple:
    """Arguments of a call: a tree of `width` rows for each request."""
    shape, ints, kind, count = jax.ShapeDtypeStruct, jnp.int32, jnp.dtype(plan.dtype), batch * width
    row = shape((count,), ints)
    fields = dict.fromkeys(("tokens", "request", "node", "positions", "slots"), row)
    rows = Rows(
        **fields,
        valid=shape((count,), jnp.bool_),
        ancestors=shape((count, words(width)), ints),
        starts=shape((batch + 1,), ints),
        width=width,
    )
    weights = Weights(
        tiles=shape((plan.layers * plan.tiles, plan.columns, plan.rows), plan.tile_dtype),
        scales=shape((plan.layers * plan.scales["all"], plan.rows), jnp.float32) if plan.int8 else None,
        norms=shape((plan.layers, 2, plan.hidden), kind),
        head_norms=shape((plan.layers, 2, plan.dim), kind) if plan.qk_norm else None,
        final_norm=shape((plan.hidden,), kind),
    )
    columns = slots // (page or slots)
    cache = shape((plan.layers, batch * columns, plan.groups, page or slots, plan.dim), kind)
    turn = shape((count, plan.dim // 2), jnp.float32)
    table = None if page is None else shape((batch, columns), ints)
    return weights, shape((count, plan.hidden), kind), turn, turn, cache, cache, table, shape((batch,), ints), rows


@dataclasses.dataclass
class _Memory:
    """One memory: copies in the order of their start."""

    bandwidth: float
    free: float = 0.0
    idle: float = 0.0

    def copy(self, start: float, size: float) -> float:
        """When a copy that starts now has arrived; time in which there was nothing to copy is idle."""
        self.idle += max(0.0, start - self.free)
        self.free = max(self.free, start) + size / self.bandwidth
        return self.free + LATENCY


@dataclasses.dataclass(frozen=True)
class _Costs:
    """Bundles of each part of a layer; `tiles` of one tile of a matrix, `around` of everything outside of loops."""

    loops: dict[str, list[Loop]]
    tiles: dict[str, float]
    around: int
    request: int
    block: int
    last: int
    piece: int

    @classmethod
    def of(cls, step: Any, found: Schedule) -> "_Costs":
        (layer,) = found.kernel.loops
        busy = [loop for loop in layer.loops if loop.has("MXU")]
        attending = layer if step.shape.batch == 1 else busy[1]
        blocks = busy[1:3] if step.shape.batch == 1 else [loop for loop in attending.loops if loop.has("MXU")]
        qkv, *_, out, gate_up, down = busy
        loops = dict(zip(step.plan.matrices.values(), (qkv, out, gate_up, down), strict=True))
        plain, last = blocks
        attention = [dataclasses.replace(attending, loops=[])] * (step.shape.batch > 1) + blocks
        return cls(
            loops={matrix.name: [loop] for matrix, loop in loops.items()}
            | {"attention": attention, "around": [dataclasses.replace(layer, loops=[])]},
            # A turn of gate_up's loop is a tile of gate and one of up.
            tiles={m.name: loop.bundles / (m.inputs * (2 if m.name == "gate_up" else 1)) for m, loop in loops.items()},
            around=layer.bundles,
            request=0 if step.shape.batch == 1 else attending.bundles,
            block=plain.bundles,
            last=last.bundles,
            piece=max(loop.bundles for loop in _inner(plain)),
        )


def _inner(loop: Loop) -> list[Loop]:
    return loop.loops + [x for inner in loop.loops for x in _inner(inner)]


@dataclasses.dataclass
class _Stage:
    """What a part of the layers adds up to: its time, the part of it in which bundles run, and bundles."""

    seconds: float = 0.0
    busy: float = 0.0
    bundles: float = 0.0


def simulate(step: Any, context: int, found: Schedule, chip: Chip) -> dict[str, float]:
    """The time of a step, the share of it in which memory stands still, and the share in which the kernel computes."""
    now, memory, parts = _play(step, context, _Costs.of(step, found), chip)
    return {"estimate_s": now, "idle": memory.idle / now, "busy": sum(part.busy for part in parts.values()) / now}


def stages(step: Any, context: int, found: Schedule, chip: Chip) -> list[dict[str, Any]]:
    """The step by stage, all layers together: bytes that it needs, bundles, unit use, time, and waiting in it.

    `units` are of the bundles of the stage's loops, each counted once. `around` is what stands outside of loops: norms,
    rotation, new keys and values; in the kernel half of it comes before attention and half behind it.
    """
    plan, costs = step.plan, _Costs.of(step, found)
    _, _, parts = _play(step, context, costs, chip)
    tile = plan.layers * plan.rows * plan.columns * plan.tile_dtype.itemsize
    needed = {name: matrix.count * tile for name, matrix in plan.matrices.items()}
    shape = step.shape
    needed["attention"] = 2 * shape.batch * context * plan.layers * shape.groups * shape.dim * step.dtype.itemsize
    return [
        {
            "stage": name,
            "bytes": needed.get(name, 0),
            "bundles": round(part.bundles),
            "estimate_us": round(part.seconds * 1e6, 1),
            "waiting_us": round((part.seconds - part.busy) * 1e6, 1),
            "roofline_us": round(needed.get(name, 0) / chip.bandwidth * 1e6, 1),
            "units": shares(found.filled(*costs.loops[name])),
        }
        for name, part in parts.items()
    ]


def _play(step: Any, context: int, costs: _Costs, chip: Chip) -> tuple[float, _Memory, dict[str, _Stage]]:
    plan, s = step.plan, step.shape
    memory, clock = _Memory(chip.bandwidth), chip.clock
    tile = plan.rows * plan.columns * plan.tile_dtype.itemsize
    slot = 2 * s.groups * s.dim * step.dtype.itemsize
    loaded = collections.deque(memory.copy(0.0, tile) for _ in range(step.banks))
    left = plan.layers * plan.tiles - step.banks
    now = 0.0
    parts = {name: _Stage() for name in ("around", "qkv", "attention", "out", "gate_up", "down")}

    def work(name: str, bundles: float) -> None:
        nonlocal now
        part = parts[name]
        now, part.seconds = now + bundles / clock, part.seconds + bundles / clock
        part.busy, part.bundles = part.busy + bundles / clock, part.bundles + bundles

    def wait(name: str, until: float) -> None:
        nonlocal now
        parts[name].seconds += max(0.0, until - now)
        now = max(now, until)

    def product(name: str) -> None:
        nonlocal left
        for _ in range(plan.matrices[name].count):
            wait(name, loaded.popleft())
            work(name, costs.tiles[name])
            if left:
                loaded.append(memory.copy(now, tile))
                left -= 1

    def attend() -> None:
        around = memory.copy(now, slot * step.window)
        work("attention", costs.request / 2)
        full, rest = divmod(context, s.block)
        blocks = [(s.block, costs.block)] * full + [(rest, costs.last)] * bool(rest)
        arriving = memory.copy(now, slot * blocks[0][0]) if blocks else now
        for (_, bundles), (following, _) in zip(blocks, [*blocks[1:], (0, 0)], strict=True):
            pieces = s.block // s.piece
            arrived, arriving = arriving, memory.copy(now, slot * following) if following else now
            work("attention", costs.piece * pieces)
            wait("attention", arrived)
            work("attention", bundles)
        wait("attention", around)
        work("attention", costs.request / 2)
        wait("attention", memory.copy(now, slot * step.window))

    for _ in range(plan.layers):
        work("around", costs.around / 2)
        product("qkv")
        for _ in range(s.batch):
            attend()
        product("out")
        work("around", costs.around / 2)
        product("gate_up")
        product("down")
    return now, memory, parts
