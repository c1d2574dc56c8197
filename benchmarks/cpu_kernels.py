"""The CPU's kernels beside XLA's programs, for SmolLM2-135M's shapes: all products of a pass, attention of its layers.

    python benchmarks/cpu_kernels.py [float32|bfloat16] [--repeats 9]

Random numbers; both ways in one process and in turns, so that a drifting clock hits both; milliseconds, the least of
the repeats.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np

from specjax.pallas_kernels import dispatch
from specjax.pallas_kernels.project.op import project
from specjax.pallas_kernels.tree_attention.op import attend

LAYERS, WIDTH, INNER, HEADS, GROUPS, DIM, VOCAB, SLOTS = 30, 576, 1536, 9, 3, 64, 49152, 1024
WAYS = {"kernel": "auto", "XLA": "reference"}


def products(layers, head, x):
    """Every product of a pass, one after the other."""
    for q, k, v, out, gate, up, down in layers:
        mixed = project(q, x) + jnp.tile(project(k, x) + project(v, x), (1, HEADS // GROUPS))
        x = x + project(out, mixed)
        x = x + project(down, jax.nn.silu(project(gate, x)) * project(up, x))
    return project(head, x)


def attention(q, *rest):
    """As many attentions as there are layers, each on what the one before gave."""
    return jax.lax.fori_loop(0, LAYERS, lambda _, q: q + 1e-3 * attend(q, *rest, scale=DIM**-0.5), q)


def compare(name, function, arguments, repeats):
    """Print the least time of each way."""
    programs = {way: jax.jit(dispatch.traced_with(kernels, function)) for way, kernels in WAYS.items()}
    least = dict.fromkeys(WAYS, float("inf"))
    for program in programs.values():
        jax.block_until_ready(program(*arguments))
    for _ in range(repeats):
        for way, program in programs.items():
            started = time.perf_counter()
            jax.block_until_ready(program(*arguments))
            least[way] = min(least[way], time.perf_counter() - started)
    print(f"{name:<44}" + "  ".join(f"{way} {1e3 * seconds:6.1f}" for way, seconds in least.items()), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dtype", nargs="?", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--repeats", type=int, default=9)
    given = parser.parse_args()
    rng = np.random.default_rng(0)

    def random(*shape):
        return jnp.asarray(0.02 * rng.standard_normal(shape, np.float32), given.dtype)

    narrow = GROUPS * DIM
    shapes = (
        (WIDTH, WIDTH),
        (narrow, WIDTH),
        (narrow, WIDTH),
        (WIDTH, WIDTH),
        (INNER, WIDTH),
        (INNER, WIDTH),
        (WIDTH, INNER),
    )
    layers, head = [[random(*shape) for shape in shapes] for _ in range(LAYERS)], random(VOCAB, WIDTH)
    for rows in (1, 4, 6, 8, 16, 32):
        compare(f"products, {rows} rows", products, (layers, head, random(rows, WIDTH)), given.repeats)
    for batch, rows, slots in ((1, 1, 700), (1, 6, 700), (1, 16, 700), (16, 1, 200), (16, 4, 200)):
        q, k, v = random(batch, rows, HEADS, DIM), *(random(batch, rows, GROUPS, DIM) for _ in range(2))
        pages = [random(batch, GROUPS, SLOTS, DIM) for _ in range(2)]
        committed = jnp.full((batch,), slots, jnp.int32)
        seen = jnp.broadcast_to(jnp.tril(jnp.ones((rows, rows), bool)), (batch, rows, rows))
        position = committed[:, None] + jnp.arange(rows, dtype=jnp.int32)
        arguments = (q, k, v, seen, *pages, None, committed, position)
        compare(f"attention, {batch} x {rows} rows over {slots} slots", attention, arguments, given.repeats)


if __name__ == "__main__":
    main()
