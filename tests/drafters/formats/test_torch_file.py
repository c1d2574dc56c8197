"""`pytorch_model.bin`: tensors come through, and nothing in the file is ever run.

The good file is one that torch wrote (`tests/parity`); bad ones are made here.
"""

import io
import pickle
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
from support import toy
from support.checkpoints import TARGET, samples

from specjax.drafters.formats.files import DrafterError
from specjax.drafters.formats.read import is_drafter, load_drafter
from specjax.drafters.formats.torch_file import TorchFile, TorchFileError

WRITTEN = Path(__file__).parents[2] / "parity" / "goldens" / "drafters" / "eagle3-specforge"
MADE_FOR = toy.tiny_config(num_layers=8, windows=(), vocab_size=48, hidden_size=16)


def copied(folder: Path, *names: str) -> Path:
    folder.mkdir()
    for name in names:
        shutil.copy(WRITTEN / name, folder)
    return folder


def repacked(path: Path, changes: dict[str, bytes | None]) -> Path:
    """The file with members replaced; None leaves one out."""
    content = zipped(WRITTEN / "pytorch_model.bin") | {f"pytorch_model/{name}": x for name, x in changes.items()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, value in content.items():
            if value is not None:
                archive.writestr(name, value)
    return path


def zipped(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_equals_the_safetensors_beside_it(tmp_path):
    """A view with other strides, a parameter, whole numbers and booleans included; the format is found as ever."""
    bin_only = copied(tmp_path / "bin", "config.json", "pytorch_model.bin")
    assert is_drafter(bin_only)
    got, want = load_drafter(bin_only, MADE_FOR), load_drafter(WRITTEN, MADE_FOR)
    assert (got.config, got.format, set(got.tensors)) == (want.config, want.format, set(want.tensors))
    for name, values in want.tensors.items():
        assert got.tensors[name].dtype == values.dtype
        np.testing.assert_array_equal(got.tensors[name], values, err_msg=name)


def test_safetensors_are_preferred(tmp_path):
    folder = copied(tmp_path / "both", "config.json", "model.safetensors")
    (folder / "pytorch_model.bin").write_bytes(b"never opened")
    assert load_drafter(folder, MADE_FOR).config == load_drafter(WRITTEN, MADE_FOR).config


class Hostile:
    """A pickle that calls a function of the standard library."""

    def __init__(self, call, *arguments):
        self.call, self.arguments = call, arguments

    def __reduce__(self):
        return self.call, self.arguments


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: {"fc.weight": x}])
def test_nothing_is_run(wrap, tmp_path):
    made = tmp_path / "made"
    for call, arguments in ((Path.touch, (made,)), (eval, (f"open({str(made)!r}, 'w')",)), (io.open, (str(made), "w"))):
        file = repacked(tmp_path / "x.bin", {"data.pkl": pickle.dumps(wrap(Hostile(call, *arguments)), 2)})
        with pytest.raises(TorchFileError, match=r"which is no tensor; nothing of it was run"):
            TorchFile(file)
    assert not made.exists()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"data.pkl": pickle.dumps([1, 2])}, "something other than tensors by name"),
        ({"data.pkl": b"\x80\x02}."[:-1]}, "cannot be read"),
        ({"data/0": b"123"}, "does not fit the bytes"),
        ({"data/0": None}, "does not fit the bytes"),
        ({"byteorder": b"big"}, "big-endian"),
    ],
)
def test_damaged_files(changes, why, tmp_path):
    with pytest.raises(TorchFileError, match=why):
        TorchFile(repacked(tmp_path / "x.bin", changes))


def test_a_view_past_the_end_is_refused(tmp_path):
    """The reader hands strides to numpy, so they must stay inside what is there."""
    described = zipped(WRITTEN / "pytorch_model.bin")
    wide = described["pytorch_model/data.pkl"].replace(
        b"K\x10K0\x86", b"K\x10K1\x86"
    )  # fc's shape (16, 48), one column more
    assert wide != described["pytorch_model/data.pkl"]
    with pytest.raises(TorchFileError, match=r"tensor fc\.weight does not fit"):
        TorchFile(repacked(tmp_path / "x.bin", {"data.pkl": wide}))


def test_old_files_are_refused_with_advice(tmp_path):
    s = next(s for s in samples() if s.format == "eagle3-safeailab").copy()
    s.tensors = {}
    folder = s.write(tmp_path / "x")
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch run'\ntR.")
    with pytest.raises(DrafterError, match="before PyTorch 1.6") as caught:
        load_drafter(folder, TARGET)
    assert "weights_only=True" in str(caught.value) and not (folder / "run").exists()
