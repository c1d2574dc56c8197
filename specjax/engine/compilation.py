"""Compilation: where compiled programs are kept between starts, and how many compilations happen."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import jax

COMPILED = "/jax/core/compile/backend_compile_duration"
FROM_CACHE = "/jax/compilation_cache/cache_hits"


class CompileCount:
    """Backend compilations seen while `count_compilations` is open, and how many of them came from the cache."""

    def __init__(self):
        self.events = 0
        self.cache_hits = 0

    @property
    def compiled(self) -> int:
        """Programs that were really compiled."""
        return self.events - self.cache_hits


@contextlib.contextmanager
def count_compilations() -> Iterator[CompileCount]:
    """Count compilations through JAX's monitoring events."""
    count = CompileCount()

    def on_duration(event: str, duration: float, **kwargs) -> None:
        del duration, kwargs
        count.events += event == COMPILED

    def on_event(event: str, **kwargs) -> None:
        del kwargs
        count.cache_hits += event == FROM_CACHE

    jax.monitoring.register_event_duration_secs_listener(on_duration)
    jax.monitoring.register_event_listener(on_event)
    try:
        yield count
    finally:
        jax.monitoring.unregister_event_duration_listener(on_duration)
        jax.monitoring.unregister_event_listener(on_event)


def use_cache(setting: str | None) -> Path | None:
    """Keep compiled programs in a folder between starts.

    Args:
        setting: a folder; `auto` for the user's cache folder; None to leave JAX's configuration alone.

    Returns:
        The folder in use. A folder that the user set through JAX itself (`JAX_COMPILATION_CACHE_DIR`) wins over `auto`.
    """
    if setting is None:
        return None
    configured = jax.config.jax_compilation_cache_dir
    if setting == "auto":
        if configured:
            return Path(configured)
        base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        folder = Path(base) / "specjax" / "xla"
    else:
        folder = Path(setting).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # Small programs count too: a warm start should compile nothing at all.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    return folder
