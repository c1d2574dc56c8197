"""Device facts: every figure has a source, and the names that JAX reports are found."""

import pytest

from specjax.costmodel.facts import devices, find

FIGURES = {"peak_tflops", "memory_gb", "bandwidth_gb_s", "interconnect_gb_s"}


@pytest.mark.parametrize("name", devices())
def test_every_figure_has_a_source(name):
    device = devices()[name]
    assert device.source.keys() == FIGURES
    assert all(len(text) > 5 for text in device.source.values() if text != "assumed")
    assert min(device.memory, device.bandwidth, device.interconnect, *device.peak.values()) > 0
    assert {"bfloat16", "float32"} & device.peak.keys()


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("TPU v5 lite", "tpu-v5e"),
        ("TPU v5p", "tpu-v5p"),
        ("TPU v5", "tpu-v5p"),
        ("TPU v6 lite", "tpu-v6e"),
        ("TPU7x", "tpu-7x"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA B300 SXM6 AC", "b300"),
        ("AMD Instinct MI300X", "mi300x"),
        ("AMD Instinct MI355X", "mi355x"),
        ("cpu", "cpu"),
        ("v6e", "tpu-v6e"),
    ],
)
def test_names_that_jax_reports(kind, name):
    assert find(kind).name == name


@pytest.mark.parametrize("kind", ["NVIDIA L40S", "TPU v4", "abacus"])
def test_unknown_devices_are_refused_with_the_known_ones(kind):
    with pytest.raises(ValueError, match=r"nothing is known of a device .*tpu-v6e.*mi355x"):
        find(kind)


def test_dtypes_fall_back_to_what_the_device_has():
    assert find("a100").flops("float8") == find("a100").flops("bfloat16") == 312e12
    assert find("tpu-v6e").flops("float32") == pytest.approx(918e12 / 6)
    with pytest.raises(ValueError, match="float4"):
        find("h100").flops("float4")
