"""A fused step against the ordinary one: what the tests of its kernels share."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from specjax.cache import KVCache
from specjax.pallas_kernels.tree_attention import cases
from specjax.targets import decoder, fused, rope

TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}  # of the largest value of what is compared


def make(config, case, dtype):
    """A decoder with norms that are not all ones, and the arguments of a pass over a case's rows and cache."""
    target, params = decoder.build(config, jnp.dtype(dtype))
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: x * 3 if x.ndim > 1 else (x + 0.1 * rng.normal(size=x.shape)).astype(x.dtype), params
    )
    sizes = {"heads": config.num_heads, "groups": config.num_kv_heads, "dim": config.head_dim, "dtype": dtype}
    inputs = cases.build(dataclasses.replace(case, **sizes))
    *_, k, v, table, committed, rows = inputs.args
    rows = dataclasses.replace(rows, tokens=rng.integers(0, config.vocab_size, rows.tokens.shape).astype(np.int32))
    # Layers hold different values: the second one's are the first one's negated, and so on.
    layers = [(k * (-1) ** i, v * (-1) ** i) for i in range(config.num_layers)]
    cache = KVCache(k=tuple(k for k, _ in layers), v=tuple(v for _, v in layers), table=table)
    return target, params, rows, cache, committed, inputs.live


def check(runs, config, case, dtype="float32", taps=(0, 1)):
    """Rows, taps, cache and greedy ids of fused steps against the ordinary one's, for the live rows of a case."""
    target, params, rows, cache, committed, live = make(config, case, dtype)
    want = jax.jit(target.forward, static_argnums=4)(params, rows, cache, committed, taps)
    one, cut = fused.fuse(target, params)
    cos, sin = rope.cos_sin(target.config.rope, target.config.head_dim, rows.positions, 1024)
    stacked = np.stack(cache.k), np.stack(cache.v)
    args = cut["fused"], one.embed(cut, rows.tokens), cos, sin, *stacked, cache.table, committed, rows
    for run in runs:
        hidden, tapped, k, v = jax.jit(functools.partial(run, one.plan, taps=taps))(*args)
        close(hidden[live], want.hidden[live], dtype)
        if taps:
            close(tapped[live], want.taps[live], dtype)
        greedy(one.logits(cut, hidden)[live], target.logits(params, want.hidden)[live], dtype)
        for got, expected, before in zip((k, v), (want.cache.k, want.cache.v), stacked, strict=True):
            kept(got, np.stack(expected), before, rows, cache.table, live, dtype)


def close(got, want, dtype):
    got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
    assert np.abs(got - want).max() <= TOLERANCE[dtype] * max(1, np.abs(want).max())


def greedy(got, want, dtype):
    """The same greedy ids, but where the ordinary step's own logits of the two are closer than its rounding.

    A random model has such ties: its bfloat16 pass misses that of float32 by as much as the tolerance.
    """
    ids, want = np.argmax(got, axis=-1), np.asarray(want)
    chosen = np.take_along_axis(want, ids[:, None], axis=-1)[:, 0]
    assert (want.max(-1) - chosen).max() <= TOLERANCE[dtype] * max(1, np.abs(want).max())


def kept(got, want, before, rows, table, live, dtype):
    """Live rows are stored as the ordinary step does; every other slot is as it was, to the bit."""
    written = np.zeros(got.shape[1:4:2], bool)
    for request, slot in zip(np.asarray(rows.request)[live], np.asarray(rows.slots)[live], strict=True):
        page = request if table is None else table[request, slot // got.shape[3]]
        written[page, slot % got.shape[3]] = True
    stored = np.asarray(got).transpose(1, 3, 0, 2, 4)
    close(stored[written], np.asarray(want).transpose(1, 3, 0, 2, 4)[written], dtype)
    # In float32, which holds every bfloat16: numpy knows no NaN of that type.
    others = (x[~written].astype(np.float32) for x in (stored, before.transpose(1, 3, 0, 2, 4)))
    np.testing.assert_array_equal(*others)
