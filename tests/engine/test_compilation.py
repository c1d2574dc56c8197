"""After warm-up nothing compiles, and a second start compiles nothing at all (case C26)."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support import toy

from specjax import config
from specjax.drafters.drafter_set import DrafterSet
from specjax.drafters.ngram import NGram
from specjax.engine.compilation import count_compilations, use_cache
from specjax.engine.pricing import find_table
from specjax.engine.programs import verify_widths
from specjax.sampling import SamplingParams

VOCAB, BATCH, CONTEXT = 16, 8, 128
TABLE = np.random.default_rng(3).normal(0, 2, (VOCAB, VOCAB))


def requests(seed: int, count: int) -> list[tuple[list[list[int]], list[SamplingParams]]]:
    """`count` requests in groups of 1 to 8: prompts of 1 to 100 tokens, every kind of parameter."""
    rng = np.random.default_rng(seed)
    groups = []
    while count:
        size = min(int(rng.integers(1, BATCH + 1)), count)
        count -= size
        prompts = [rng.integers(0, VOCAB, rng.integers(1, 101)).tolist() for _ in range(size)]
        params = [
            SamplingParams(
                max_tokens=int(rng.integers(1, 12)),
                temperature=float(rng.choice([0, 0.7])),
                top_k=int(rng.choice([0, 3])),
                top_p=float(rng.choice([1, 0.9])),
                logprobs=[None, 0, 5][rng.integers(3)],
                frequency_penalty=float(rng.choice([0, 0.5])),
                repetition_penalty=float(rng.choice([1, 1.2])),
                stop_token_ids=[(), (4,), (1, 2)][rng.integers(3)],
                seed=int(rng.integers(2**62)),
            )
            for _ in range(size)
        ]
        groups.append((prompts, params))
    return groups


@pytest.mark.slow
@pytest.mark.parametrize(("drafts", "count"), [(0, 66), (2, 67), (4, 67)])
def test_nothing_compiles_after_warm_up(drafts, count):
    target = toy.LookupTarget(toy.tiny_config(vocab_size=VOCAB)), toy.lookup(VOCAB, by_token=TABLE)
    drafter = NGram(num_speculative_tokens=drafts, prompt_lookup_min=1) if drafts else None
    with count_compilations() as starting:
        engine = toy.engine(drafter, target=target, batch=BATCH, context=CONTEXT, prefill_chunk=64, warmup=True)
    widths = verify_widths(BATCH, drafts + 1)
    print(f"K={drafts}: {engine.programs.count} programs, {starting.events} compilations at the start")
    # Initial state, insert, release; draft, if any; two prefill sizes; the menu of verify sizes.
    assert engine.programs.count == engine.describe()["programs"] == 3 + (drafts > 0) + 2 + len(widths)
    assert len(widths) <= 4 + (4 if drafts else 0)
    assert starting.events >= engine.programs.count
    used = set()
    verify = engine.programs.verify
    engine.programs.verify = lambda width, *rest: used.add(width) or verify(width, *rest)
    with count_compilations() as running:
        for prompts, params in requests(drafts, count):
            results = engine.generate(prompts, params)
            assert all(1 <= len(r.token_ids) <= p.max_tokens for r, p in zip(results, params, strict=True))
        assert len(list(engine.stream([1, 2, 1, 2, 1], SamplingParams(max_tokens=4)))) >= 2
    assert running.events == 0
    assert len(used) > 2  # the batches were of several sizes


def test_nothing_compiles_after_warm_up_where_rounds_stay_on_the_device():
    target = toy.LookupTarget(toy.tiny_config(vocab_size=VOCAB)), toy.lookup(VOCAB, by_token=TABLE)
    drafter = NGram(num_speculative_tokens=2, prompt_lookup_min=1)
    with count_compilations() as starting:
        engine = toy.engine(drafter, target=target, batch=2, context=CONTEXT, warmup=True, device_rounds=4)
    assert starting.events >= engine.programs.count == 4 + 1 + 1
    with count_compilations() as running:
        results = engine.generate([[1, 2, 1], [3], [4, 4]], SamplingParams(max_tokens=11))
    assert [len(r.token_ids) for r in results] == [11, 11, 11]
    assert running.events == 0


def test_nothing_compiles_after_warm_up_where_a_planner_chooses():
    lookup = NGram(num_speculative_tokens=3, prompt_lookup_min=1)
    drafters = DrafterSet((lookup,), (lookup.shape,), 32)
    target = toy.LookupTarget(toy.tiny_config(vocab_size=VOCAB)), toy.lookup(VOCAB, by_token=TABLE)
    run = config.make({"target": "toy", "drafter": {"kind": "auto"}, "batch": 2, "context": CONTEXT})
    table = find_table(run, target[0].config, "float32", drafters, lambda line: None)
    table = dataclasses.replace(table, fixed=1.0)  # rows and drafts are nothing beside it, so drafting always pays
    with count_compilations() as starting:
        engine = toy.engine(drafters, ((),), target, table=table, batch=2, context=CONTEXT, warmup=True)
    assert starting.events >= engine.programs.count == 4 + 1 + len(engine.programs.widths)
    with count_compilations() as running:
        results = engine.generate([[1, 2, 1, 2], [3], [4, 4]], SamplingParams(max_tokens=40))
    assert sum(r.spec.drafted for r in results) > 0
    assert running.events == 0


def test_without_warm_up_programs_compile_as_they_are_needed():
    target = toy.LookupTarget(toy.tiny_config(vocab_size=4)), toy.lookup(4)
    with count_compilations() as starting:
        engine = toy.engine(target=target, batch=1, context=32, warmup=False)
    with count_compilations() as first:
        once = engine.generate([1], SamplingParams(max_tokens=3))
    with count_compilations() as second:
        again = engine.generate([1], SamplingParams(max_tokens=3))
    # Events, not compilations: an earlier run of the suite may have left these programs in its cache.
    assert (starting.events, second.events) == (1, 0)
    assert 1 <= first.events < engine.programs.count
    assert once.token_ids == again.token_ids


START = """
import json, sys
from support import toy
from specjax.drafters.ngram import NGram
from specjax.engine.compilation import count_compilations, use_cache
from specjax.sampling import SamplingParams
folder = use_cache(sys.argv[1])
with count_compilations() as count:
    engine = toy.engine(NGram(num_speculative_tokens=2, prompt_lookup_min=1), batch=2, warmup=True)
    results = engine.generate([[1, 2, 1, 2, 1]] * 3, SamplingParams(max_tokens=8, temperature=0.7, seed=1, logprobs=1))
print(json.dumps({"events": count.events, "hits": count.cache_hits, "programs": engine.programs.count,
                  "tokens": [r.token_ids for r in results]}))
"""


@pytest.mark.slow
def test_a_second_start_compiles_nothing(tmp_path):
    """Two processes on the tiny target; small and quickly compiled programs are cached too."""
    folder = Path(__file__).parents[1]
    environment = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{folder.parent}"}

    def start() -> dict:
        command = [sys.executable, "-c", START, str(tmp_path / "cache")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    first, second = start(), start()
    assert first["events"] - first["hits"] >= first["programs"]
    assert second["events"] >= first["programs"]
    assert second["events"] - second["hits"] == 0
    assert second["tokens"] == first["tokens"]


def test_which_folder_is_used(tmp_path, monkeypatch):
    """None leaves JAX alone; `auto` yields to a folder set through JAX; thresholds are taken away."""
    import jax

    names = (
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    )
    before = {name: getattr(jax.config, name) for name in names}
    try:
        assert use_cache(None) is None
        assert {name: getattr(jax.config, name) for name in names} == before
        jax.config.update("jax_compilation_cache_dir", str(tmp_path / "theirs"))
        assert use_cache("auto") == tmp_path / "theirs"
        assert use_cache(str(tmp_path / "ours")) == tmp_path / "ours"
        assert (tmp_path / "ours").is_dir()
        assert [getattr(jax.config, name) for name in names] == [str(tmp_path / "ours"), 0.0, 0]
        jax.config.update("jax_compilation_cache_dir", None)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
        assert use_cache("auto") == tmp_path / "home" / "specjax" / "xla"
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
