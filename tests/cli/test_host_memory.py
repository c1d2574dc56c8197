import os
import subprocess
import sys

import pytest

from specjax.cli import host_memory

FAULTS = """
import resource, sys
from specjax.cli import host_memory
kept = sys.argv[1] == "keep" and host_memory.keep()
import jax, jax.numpy as jnp
x = jnp.ones((96, 49152))
work = jax.jit(lambda x: sum(y.sum(axis=-1) for y in jax.lax.optimization_barrier((jnp.exp(x), jnp.sin(x)))))
for _ in range(24):
    work(x).block_until_ready()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(8):
    work(x).block_until_ready()
print(kept, (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 8)
"""


def run(*args, **env):
    clean = {name: x for name, x in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    done = subprocess.run([sys.executable, "-c", FAULTS, *args], env=clean | env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kept, faults = done.stdout.split()
    return kept == "True", float(faults)


@pytest.mark.skipif(host_memory.platform.libc_ver()[0] != "glibc", reason="glibc's malloc alone is told")
def test_a_program_that_runs_again_finds_its_memory_again():
    kept, few = run("keep")
    assert kept
    _, many = run("leave")
    assert few < many / 4


def test_what_the_user_set_is_left_alone():
    assert run("keep", MALLOC_ARENA_MAX="2")[0] is False
