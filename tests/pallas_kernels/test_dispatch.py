"""Which backend runs: by platform and mode, with fall-through where one declines."""

import subprocess
import sys

import jax
import pytest

from specjax.config import ConfigError, make
from specjax.pallas_kernels import dispatch
from specjax.pallas_kernels.tree_attention import reference


@pytest.mark.parametrize(
    ("kernels", "platform", "expected"),
    [
        ("auto", "cpu", ("cpu",)),
        ("reference", "cpu", ()),
        ("reference", "tpu", ()),
        ("auto", "tpu", ("tpu",)),
        ("interpret", "cpu", ("tpu",)),
    ],
)
def test_backends_follow_platform_and_mode(kernels, platform, expected, monkeypatch):
    monkeypatch.setattr(dispatch.importlib.util, "find_spec", lambda name: name)
    assert dispatch.backends("tree_attention", kernels, platform) == expected


def test_pallas_refuses_a_platform_without_kernels():
    with pytest.raises(ValueError, match="kernels is 'pallas', and there are none for cpu"):
        dispatch.backends("tree_attention", "pallas", "cpu")
    with pytest.raises(ValueError, match="must be one of auto, reference, pallas, interpret"):
        dispatch.use("fast")
    with pytest.raises(ConfigError, match="kernels"):
        make({"kernels": "fast"})


class Declines:
    @staticmethod
    def attend(*args, interpret):
        raise NotImplementedError(f"no {args}")


def test_a_backend_that_declines_is_followed_by_the_next_and_said_once(monkeypatch, caplog):
    monkeypatch.setattr(dispatch, "backends", lambda *_: ("tpu",))
    modules = {"tpu": Declines, "reference": reference}
    monkeypatch.setattr(dispatch.importlib, "import_module", lambda name: modules[name.rsplit(".", 1)[1]])
    monkeypatch.setattr(reference, "attend", lambda *args: ("reference", *args))
    for _ in range(2):
        assert dispatch.call("tree_attention", "attend", 1) == ("reference", 1)
    assert [r.getMessage() for r in caplog.records] == [
        "tree_attention: the tpu kernel declines (no (1,)); trying the next"
    ]


def test_the_mode_is_part_of_the_key_of_trace_caches():
    """A program traced for one mode is not reused for another."""
    seen = []
    function = jax.jit(lambda x: (seen.append(dispatch._kernels.value), x)[1])
    for kernels in ("auto", "reference", "reference"):
        with dispatch.use(kernels):
            function(1.0)
    dispatch.traced_with("interpret", function)(1.0)
    assert seen == ["auto", "reference", "interpret"]


def test_the_platform_is_the_abstract_device_if_there_is_one():
    assert dispatch.platform() == "cpu"
    chip = jax.sharding.AbstractDevice(device_kind="TPU v6 lite", num_cores=1, platform="tpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",), abstract_device=chip)):
        assert dispatch.platform() == "tpu"


def test_import_looks_at_no_device():
    code = (
        "import jax, specjax.targets.decoder, specjax.pallas_kernels.dispatch\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge.backends_are_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
