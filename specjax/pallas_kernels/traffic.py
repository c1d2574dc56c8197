"""Bytes that a Pallas kernel moves, counted from the traced kernel.

The scalar half of a kernel (loop bounds, page numbers, semaphore turns) decides which copies it starts. `count` runs
that half alone, with numpy, for given scalar operands, and adds up the sizes of the copies; vectors are skipped. It
sees what is in the kernel, not what its `CostEstimate` claims. Of a Triton kernel the loads and stores are added up,
whole blocks of them, whatever their masks leave out; several programs may find the same bytes in a cache.
"""

import collections
import dataclasses
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.pallas import triton as pltriton

UNKNOWN = object()  # a vector, or a scalar that depends on one


@dataclasses.dataclass
class Traffic:
    """Copies of a kernel.

    Attributes:
        read: bytes copied out of each operand, by its name in the kernel.
        written: bytes copied into each.
        copies: copies started.
    """

    read: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    written: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    copies: int = 0

    @property
    def total(self) -> int:
        return sum(self.read.values()) + sum(self.written.values())


def count(function: Callable, *args: Any, scalars: Sequence[np.ndarray]) -> Traffic:
    """The traffic of the one `pallas_call` that `function(*args)` traces to.

    Args:
        function: what calls the kernel.
        *args: arrays or shapes.
        scalars: values of the kernel's scalar operands, the ones in SMEM, in order.

    Raises:
        ValueError: not exactly one kernel, or a copy that depends on more than the scalars.
    """
    calls = list(kernels(function, *args))
    if len(calls) != 1:
        raise ValueError(f"expected one pallas_call, found {len(calls)}")
    return _Kernel(calls[0], scalars).run()


def kernels(function: Callable, *args: Any) -> Iterator[Any]:
    """The `pallas_call`s that `function(*args)` traces to."""
    yield from _find(jax.make_jaxpr(function)(*args).jaxpr)


def _find(jaxpr: Any):
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "pallas_call":
            yield eqn
            continue
        for inner in _inner(eqn):
            yield from _find(inner)


def _inner(eqn: Any):
    for value in eqn.params.values():
        for x in value if isinstance(value, tuple | list) else (value,):
            x = getattr(x, "jaxpr", x)
            if hasattr(x, "eqns"):
                yield x


def _space(var: Any) -> str:
    return str(getattr(var.aval, "memory_space", ""))


def _in_hbm(aval: Any) -> bool:
    return str(aval.memory_space) in ("any", "hbm")


_NUMPY = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "max": max,
    "min": min,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "eq": operator.eq,
    "ne": operator.ne,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "div": lambda a, b: int(a / b) if b else 0,
    "rem": lambda a, b: int(math.fmod(a, b)) if b else 0,
    "neg": operator.neg,
    "sign": lambda a: (a > 0) - (a < 0),
    "not": lambda a: not a,
}
_BLOCKS = ("masked_load", "masked_swap")  # what a Triton kernel loads and stores
_SAME = ("convert_element_type", "multiple_of", "squeeze", "reshape", "broadcast_in_dim", "copy")


class _Kernel:
    def __init__(self, eqn: Any, scalars: Sequence[np.ndarray]):
        self.jaxpr, self.mapping = eqn.params["jaxpr"], eqn.params["grid_mapping"]
        self.triton = isinstance(eqn.params["compiler_params"], pltriton.CompilerParams)
        self.traffic, self.names, self.effects = Traffic(), {}, {}
        self.scalars = [np.array(x) for x in scalars]
        self.point: tuple[int, ...] = ()

    def run(self) -> Traffic:
        refs: dict[Any, Any] = {}
        names = self.jaxpr.debug_info.arg_names or ()
        given = iter(self.scalars)
        for i, var in enumerate(self.jaxpr.invars):
            self.names[var] = names[i] if i < len(names) else str(i)
            refs[var] = self.scratch(var)
            if refs[var][0] is not None:
                refs[var] = next(given, refs[var][0]), var
        for point in itertools.product(*(range(n) for n in self.mapping.grid)):
            self.point = point
            self.evaluate(self.jaxpr, dict(refs), ())
        if not self.triton:
            self.blocks()
        return self.traffic

    @staticmethod
    def scratch(var: Any) -> tuple:
        """A reference: its integers if they are in SMEM, and the variable that it was first known by."""
        scalar = _space(var) == "smem" and np.issubdtype(var.aval.dtype, np.integer)
        return np.zeros(var.aval.shape, np.int64) if scalar else None, var

    def blocks(self) -> None:
        """What the grid itself streams: a block is copied where its index differs from the step before."""
        outputs = len(self.mapping.block_mappings) - self.mapping.num_outputs
        for i, block in enumerate(self.mapping.block_mappings):
            aval = block.transformed_block_aval
            if _in_hbm(aval) or str(aval.memory_space) == "smem":
                continue
            seen = None
            for point in itertools.product(*(range(n) for n in self.mapping.grid)):
                self.point = point
                jaxpr = block.index_map_jaxpr.jaxpr
                env = dict(zip(jaxpr.invars, [*self.point, *[(x, None) for x in self.scalars]], strict=False))
                index = tuple(self.evaluate(jaxpr, env, None))
                if index != seen:
                    side = self.traffic.written if i >= outputs else self.traffic.read
                    side[block.origin] += math.prod(aval.shape) * aval.dtype.itemsize
                    self.traffic.copies += 1
                seen = index

    def evaluate(self, jaxpr: Any, env: dict, consts: Any) -> list:
        """Run the scalar half of a jaxpr; values of its outputs."""
        if consts:
            env.update(zip(jaxpr.constvars, consts, strict=True))

        def value(var):
            return (
                np.asarray(var.val).item() if hasattr(var, "val") and np.ndim(var.val) == 0 else env.get(var, UNKNOWN)
            )

        for eqn in jaxpr.eqns:
            got = self.step(eqn, [value(var) for var in eqn.invars])
            env.update(zip(eqn.outvars, got, strict=True))
        return [value(var) for var in jaxpr.outvars]

    def step(self, eqn: Any, args: list) -> list:
        """Values of one equation's outputs."""
        name, params = eqn.primitive.name, eqn.params
        unknown = [UNKNOWN] * len(eqn.outvars)
        if name == "dma_start":
            self.copy(eqn, args)
            return unknown
        if name in _BLOCKS:
            ref, (block,) = args[0][1], (var.aval for var in eqn.outvars)
            side = self.traffic.read if name == "masked_load" else self.traffic.written
            side[self.names.get(ref, str(ref))] += math.prod(block.shape) * block.dtype.itemsize
            return unknown
        if name in ("get", "swap"):
            return [self.access(eqn, args)]
        if name == "program_id":
            return [self.point[params["axis"]]]
        if name in ("while", "scan", "cond"):
            if not any(self.matters(inner) for inner in _inner(eqn)):
                return unknown
            return getattr(self, f"run_{name}")(params, args)
        inner = next(_inner(eqn), None)
        if inner is not None and name == "run_scoped":
            env = dict(zip(inner.constvars, args, strict=True)) | {var: self.scratch(var) for var in inner.invars}
            return self.evaluate(inner, env, ())
        if inner is not None:
            return self.evaluate(inner, dict(zip(inner.invars, args, strict=True)), ())
        if any(x is UNKNOWN for x in args) or any(var.aval.shape for var in eqn.outvars):
            return unknown
        if name in _SAME:
            return [args[0]]
        if name == "select_n":
            return [args[1 + int(args[0])]]
        if name in _NUMPY:
            return [_NUMPY[name](*args)]
        if eqn.outvars and not any(isinstance(x, tuple) for x in args):
            out = eqn.primitive.bind(*map(np.asarray, args), **params)
            return [np.asarray(x).item() for x in (out if eqn.primitive.multiple_results else [out])]
        return unknown

    def access(self, eqn: Any, args: list) -> Any:
        """Read, or exchange, one element of an SMEM reference."""
        array = args[0][0] if isinstance(args[0], tuple) else None
        if array is None:
            return UNKNOWN
        rest = args[2:] if eqn.primitive.name == "swap" else args[1:]
        transforms = jax.tree.unflatten(eqn.params["tree"], rest)
        index = tuple(i for transform in transforms for i in transform.indices)
        if any(i is UNKNOWN for i in index):
            raise ValueError("an SMEM reference is indexed by what the scalars do not decide")
        old = array[index].item()
        if eqn.primitive.name == "swap":
            if args[1] is UNKNOWN:
                raise ValueError("an SMEM reference is set to what the scalars do not decide")
            array[index] = args[1]
        return old

    def copy(self, eqn: Any, args: list) -> None:
        """Add a started copy."""
        flat = [x[1] if isinstance(x, tuple) else x for x in args]
        source, target, *_ = jax.tree.unflatten(eqn.params["tree"], flat)
        aval = {id(x[1]): var.aval for x, var in zip(args, eqn.invars, strict=True) if isinstance(x, tuple)}
        for side, end in ((self.traffic.read, source), (self.traffic.written, target)):
            ref = getattr(end, "ref", end)
            if _in_hbm(aval[id(ref)]):
                size = aval[id(ref)].shape
                for transform in getattr(end, "transforms", ()):
                    size = transform.get_indexer_shape()
                side[self.names.get(ref, str(ref))] += math.prod(size) * aval[id(ref)].dtype.itemsize
        self.traffic.copies += 1

    def matters(self, jaxpr: Any) -> bool:
        """Whether a jaxpr copies, or sets an SMEM reference."""
        if jaxpr not in self.effects:
            self.effects[jaxpr] = any(
                eqn.primitive.name in ("dma_start", *_BLOCKS)
                or (eqn.primitive.name == "swap" and _space(eqn.invars[0]) == "smem")
                or any(self.matters(inner) for inner in _inner(eqn))
                for eqn in jaxpr.eqns
            )
        return self.effects[jaxpr]

    def run_cond(self, params: dict, args: list) -> list:
        index, *rest = args
        if index is UNKNOWN:
            raise ValueError("a copy depends on more than the scalar operands")
        branch = params["branches"][min(int(index), len(params["branches"]) - 1)]
        return self.evaluate(branch.jaxpr, dict(zip(branch.jaxpr.invars, rest, strict=True)), ())

    def run_while(self, params: dict, args: list) -> list:
        cond, body = params["cond_jaxpr"].jaxpr, params["body_jaxpr"].jaxpr
        split = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        cond_consts, body_consts, carry = args[: split[0]], args[split[0] : split[1]], args[split[1] :]
        while True:
            (more,) = self.evaluate(cond, dict(zip(cond.invars, [*cond_consts, *carry], strict=True)), ())
            if more is UNKNOWN:
                raise ValueError("the trips of a loop with copies depend on more than the scalar operands")
            if not more:
                return carry
            carry = self.evaluate(body, dict(zip(body.invars, [*body_consts, *carry], strict=True)), ())

    def run_scan(self, params: dict, args: list) -> list:
        """A loop of known length; constants come first, nothing is scanned over."""
        body = params["jaxpr"].jaxpr
        split = len(args) - len(body.outvars)
        consts, carry = args[:split], args[split:]
        for _ in range(params["length"]):
            carry = self.evaluate(body, dict(zip(body.invars, [*consts, *carry], strict=True)), ())
        return carry
