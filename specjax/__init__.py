"""specjax: speculative decoding in JAX and Pallas, for TPUs and GPUs.

The public names are imported lazily, so that `import specjax` touches no device and costs nothing::

    from specjax import Engine, SamplingParams
    engine = Engine.load("smollm2-135m", drafter="ngram")
    print(engine.generate("Write a haiku about trees.").text)
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specjax.config import RunConfig as RunConfig
    from specjax.engine.engine import Engine as Engine
    from specjax.engine.request import Result as Result
    from specjax.sampling import SamplingParams as SamplingParams

__version__ = "0.1.0"

_PUBLIC = {
    "Engine": "specjax.engine.engine",
    "Result": "specjax.engine.request",
    "RunConfig": "specjax.config",
    "SamplingParams": "specjax.sampling",
}

__all__ = [*_PUBLIC, "__version__"]


def __getattr__(name: str):
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'specjax' has no attribute {name!r}")
