"""One plain decoding step of SmolLM2-135M's shape: specjax's target pass against a step written out by hand.

    python benchmarks/plain_step.py [float32|bfloat16] [--rows 1,2,6] [--repeats 40]

Random weights, one request, both in one process and in turns, so that a drifting clock hits both; milliseconds, median
and minimum. "Floor" is the time to read all weights once at the bandwidth measured in the same run.
"""

import argparse
import functools
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from specjax.draft import chain, pack
from specjax.targets import decoder
from specjax.targets.config import DecoderConfig, RopeConfig

LAYERS, WIDTH, INNER, HEADS, GROUPS, DIM, VOCAB, SLOTS = 30, 576, 1536, 9, 3, 64, 49152, 512


def specjax_step(dtype, rows):
    """The step that the engine compiles, without draft and accept: `(step, state)`."""
    config = DecoderConfig(
        family="llama",
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_layers=LAYERS,
        num_heads=HEADS,
        num_kv_heads=GROUPS,
        head_dim=DIM,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=100000.0),
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        windows=(None,) * LAYERS,
    )
    target, params = decoder.build(config, dtype)

    @functools.partial(jax.jit, donate_argnums=1)
    def step(params, cache, tokens, committed):
        draft = chain(tokens[None], jnp.full((1,), rows))
        packed = pack(draft, committed, rows, rows, jnp.ones((1,), bool))
        out = target.forward(params, packed, cache, committed)
        return jnp.argmax(target.logits(params, out.hidden), -1), out.cache

    cache = target.init_cache(1, SLOTS, dtype)
    return lambda cache, tokens, at: step(params, cache, tokens, np.array([at], np.int32)), cache


def written_out(dtype, rows):
    """A step without abstractions: fused matrices `[in, out]`, unrolled layers, attention over all slots."""
    key = jax.random.key(0)

    def weight(i, o):
        return 0.02 * jax.random.normal(key, (i, o), dtype)

    layers = [
        {
            "qkv": weight(WIDTH, (HEADS + 2 * GROUPS) * DIM),
            "o": weight(HEADS * DIM, WIDTH),
            "up": weight(WIDTH, 2 * INNER),
            "down": weight(INNER, WIDTH),
            "n1": jnp.ones((WIDTH,), dtype),
            "n2": jnp.ones((WIDTH,), dtype),
        }
        for _ in range(LAYERS)
    ]
    params = {
        "layers": layers,
        "embed": 0.02 * jax.random.normal(key, (VOCAB, WIDTH), dtype),
        "head": weight(WIDTH, VOCAB),
    }
    freqs = 1.0 / 100000.0 ** (np.arange(0, DIM, 2) / DIM)

    def norm(x, w):
        y = x.astype(jnp.float32)
        return (y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-5)).astype(dtype) * w

    def rotate(x, cos, sin):
        a, b = x[..., : DIM // 2], x[..., DIM // 2 :]
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(dtype)

    @functools.partial(jax.jit, donate_argnums=1)
    def step(params, cache, tokens, at):
        x = params["embed"][tokens]
        angle = (at + jnp.arange(rows))[:, None] * freqs
        cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
        seen = jnp.arange(SLOTS) <= (at + jnp.arange(rows))[:, None]
        out = []
        for layer, (k_cache, v_cache) in zip(params["layers"], cache, strict=True):
            q, k, v = jnp.split(
                (norm(x, layer["n1"]) @ layer["qkv"]).reshape(rows, -1, DIM), (HEADS, HEADS + GROUPS), 1
            )
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
            k_cache = jax.lax.dynamic_update_slice(k_cache, k.swapaxes(0, 1), (0, at, 0))
            v_cache = jax.lax.dynamic_update_slice(v_cache, v.swapaxes(0, 1), (0, at, 0))
            out.append((k_cache, v_cache))
            q = q.reshape(rows, GROUPS, HEADS // GROUPS, DIM)
            s = jnp.einsum("ngrf,gsf->gnrs", q, k_cache, preferred_element_type=jnp.float32) * DIM**-0.5
            p = jax.nn.softmax(jnp.where(seen[None, :, None], s, -1e30), -1).astype(dtype)
            x = x + jnp.einsum("gnrs,gsf->ngrf", p, v_cache).reshape(rows, -1) @ layer["o"]
            gate, up = jnp.split(norm(x, layer["n2"]) @ layer["up"], 2, -1)
            x = x + (jax.nn.silu(gate) * up) @ layer["down"]
        return jnp.argmax(x @ params["head"], -1), tuple(out)

    empty = tuple(
        (jnp.zeros((GROUPS, SLOTS, DIM), dtype), jnp.zeros((GROUPS, SLOTS, DIM), dtype)) for _ in range(LAYERS)
    )
    return lambda cache, tokens, at: step(params, cache, tokens, np.int32(at)), empty


def bandwidth() -> float:
    """Bytes a second of a plain sum over 256 MiB."""
    x = jnp.ones((1 << 26,), jnp.float32)
    total = jax.jit(jnp.sum)
    total(x).block_until_ready()
    times = []
    for _ in range(8):
        start = time.perf_counter()
        total(x).block_until_ready()
        times.append(time.perf_counter() - start)
    return x.nbytes / min(times)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dtype", nargs="?", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--rows", default="1,2,6")
    parser.add_argument("--repeats", type=int, default=40)
    options = parser.parse_args()
    dtype = jnp.dtype(options.dtype)
    weights = dtype.itemsize * (LAYERS * (WIDTH * DIM * (2 * HEADS + 2 * GROUPS) + 3 * WIDTH * INNER) + VOCAB * WIDTH)
    speed = bandwidth()
    print(f"{weights / 1e6:.0f} MB of weights, {speed / 1e9:.1f} GB/s: floor {1e3 * weights / speed:.1f} ms")
    for rows in map(int, options.rows.split(",")):
        sides = {"specjax": specjax_step(dtype, rows), "written out": written_out(dtype, rows)}
        caches = {name: cache for name, (_, cache) in sides.items()}
        times: dict[str, list[float]] = {name: [] for name in sides}
        tokens = np.zeros((rows,), np.int32)
        for repeat in range(options.repeats + 2):
            for name, (step, _) in sides.items():
                start = time.perf_counter()
                out, caches[name] = step(caches[name], tokens, 100 + repeat)
                np.asarray(out)
                if repeat > 1:
                    times[name].append(1e3 * (time.perf_counter() - start))
        line = "  ".join(f"{name} {statistics.median(t):6.1f} (min {min(t):6.1f})" for name, t in times.items())
        print(f"{rows:3d} rows: {line}", flush=True)


if __name__ == "__main__":
    main()
