"""Choosing the tokens of a pass from its logits: the last step of `verify`, for SmolLM2's vocabulary.

    python benchmarks/choose_tokens.py [--keep] [--repeats 15]

Random logits of 1 to 96 rows of 16 requests, greedily and at temperature 0.8; milliseconds, the median of the repeats.
With --keep the C library keeps the memory that XLA's programs give back, as in the `specjax` command.
"""

import argparse
import dataclasses
import statistics
import time

BATCH, VOCAB, TOKENS = 16, 49152, 512


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--repeats", type=int, default=15)
    given = parser.parse_args()
    if given.keep:  # before JAX has threads
        from specjax.cli import host_memory

        print("memory is kept" if host_memory.keep() else "memory cannot be kept here")

    import jax
    import jax.numpy as jnp

    from specjax.sampling.distribution import Seen, choose
    from specjax.sampling.state import neutral

    program = jax.jit(choose)
    for rows in (1, 6, 16, 32, 96):
        logits = 3 * jax.random.normal(jax.random.key(rows), (rows, VOCAB))
        request = jnp.arange(rows, dtype=jnp.int32) % BATCH
        lengths = jnp.full((BATCH,), 200, jnp.int32)
        seen = Seen(
            tokens=jnp.zeros((BATCH, TOKENS), jnp.int32),
            lengths=lengths,
            prompt_lengths=lengths // 2,
            eos=jnp.full((BATCH, 4), -1, jnp.int32),
        )
        shown = []
        for temperature in (0.0, 0.8):
            state = dataclasses.replace(neutral(BATCH), temperature=jnp.full((BATCH,), temperature, jnp.float32))
            taken = []
            for _ in range(given.repeats + 2):
                started = time.perf_counter()
                jax.block_until_ready(program(logits, request, state, lengths[request], seen))
                taken.append(time.perf_counter() - started)
            shown.append(f"temperature {temperature}: {1e3 * statistics.median(taken[2:]):6.2f}")
        print(f"{rows:3d} rows   " + "   ".join(shown), flush=True)


if __name__ == "__main__":
    main()
