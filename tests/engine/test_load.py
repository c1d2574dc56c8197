"""From names to an engine: what is refused before any weight is read."""

import pytest

from specjax.engine import load
from specjax.engine.engine import Engine


def test_kernels_that_there_are_none_of_are_refused_before_the_weights_are_read(monkeypatch):
    def never(name):
        raise AssertionError(f"{name} was read")

    monkeypatch.setattr(load, "load_checkpoint", never)
    with pytest.raises(ValueError, match="kernels is 'pallas', and there are none for cpu"):
        Engine.load("smollm2-135m", kernels="pallas", quiet=True)
    with pytest.raises(AssertionError, match="was read"):
        Engine.load("smollm2-135m", quiet=True)
