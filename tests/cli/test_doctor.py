"""`specjax doctor`: what is seen, what is missing, and the exit code."""

import json

import pytest

from specjax.cli import doctor, machine
from specjax.cli.main import main
from specjax.engine import compilation
from specjax.pallas_kernels import cpu


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """A machine that shows no accelerator outside /dev; JAX's own configuration stays as it is."""
    monkeypatch.setattr(compilation, "use_cache", lambda setting: tmp_path / "xla")
    monkeypatch.setattr(cpu, "compiler", lambda: "cc 1.0")
    monkeypatch.setattr(doctor.shutil, "which", lambda program: None)
    for variable in ("TPU_NAME", "TPU_WORKER_ID"):
        monkeypatch.delenv(variable, raising=False)


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ([], []),
        (["nvidiactl"], []),
        (["nvidia0", "nvidiactl"], ["NVIDIA GPU"]),
        (["kfd"], ["AMD GPU"]),
        (["accel0"], ["TPU"]),
    ],
)
def test_accelerators_by_device_file(files, found, bare, tmp_path):
    for name in files:
        (tmp_path / name).touch()
    assert doctor.accelerators(tmp_path) == found


def test_accelerators_by_program_and_environment(bare, tmp_path, monkeypatch):
    monkeypatch.setattr(
        doctor.shutil, "which", lambda program: f"/usr/bin/{program}" if program == "nvidia-smi" else None
    )
    monkeypatch.setenv("TPU_NAME", "pod")
    assert doctor.accelerators(tmp_path) == ["NVIDIA GPU", "TPU"]


def test_shouts_about_an_idle_accelerator(bare, tmp_path, monkeypatch):
    (tmp_path / "nvidia0").touch()
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    found = doctor.examine(tmp_path)
    assert found["idle_accelerators"] == ["NVIDIA GPU"]
    assert "!! This machine has: NVIDIA GPU" in doctor.render(found)
    assert "NVIDIA GPU: JAX_PLATFORMS=cpu keeps JAX on the CPU; unset it" in found["advice"]
    monkeypatch.delenv("JAX_PLATFORMS")
    assert "NVIDIA GPU: pip install 'specjax[cuda]'" in doctor.examine(tmp_path)["advice"]


def test_report(bare, capsys, monkeypatch):
    monkeypatch.setattr(doctor, "accelerators", lambda dev: [])
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["machine"]["platform"] == "cpu"
    assert found["kernels"] == {
        "decode_step": "reference",
        "project": "cpu then reference",
        "tree_attention": "cpu then reference",
    }
    assert {"jax", "jaxlib", "flax"} <= found["packages"].keys()
    assert found["compilation_cache"].endswith("xla")
    assert main(["doctor"]) == 0
    assert "JAX runs on" in capsys.readouterr().out


def test_a_cpu_without_a_compiler_gets_advice(bare, monkeypatch):
    assert not [line for line in doctor.examine()["advice"] if "compiler" in line]
    monkeypatch.setattr(cpu, "compiler", lambda: None)
    [line] = [line for line in doctor.examine()["advice"] if "compiler" in line]
    assert "no C compiler (cc, gcc or clang)" in line


def test_missing_demo_model(bare, monkeypatch):
    def missing():
        raise ValueError("run `make setup`")

    monkeypatch.setattr(doctor, "_demo_model", missing)
    found = doctor.examine()
    assert found["demo_model"] is None
    assert "run `make setup`" in found["advice"]


def test_exit_code_when_an_accelerator_is_idle(bare, capsys, monkeypatch):
    monkeypatch.setattr(doctor, "accelerators", lambda dev: ["TPU"])
    assert main(["doctor"]) == 1


def test_ceiling_is_finite_and_positive(monkeypatch):
    monkeypatch.setattr(machine, "READ_BYTES", 2**20)
    monkeypatch.setattr(machine, "PRODUCT", 64)
    found = machine.ceiling("bfloat16")
    assert 0 < found["read_gb_s"] < 1e6
    assert 0 < found["gflop_s"] < 1e9
