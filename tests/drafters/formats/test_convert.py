"""Conversion of drafters: every packaging becomes one that can be written, with equal values, or nothing is written."""

import ml_dtypes
import numpy as np
import pytest
from support.checkpoints import TARGET, samples

from specjax.drafters.config import expected_tensors
from specjax.drafters.formats.convert import convert_drafter, drafter_format
from specjax.drafters.formats.files import DrafterError
from specjax.drafters.formats.read import load_drafter
from specjax.drafters.formats.write import DEFAULTS

SAMPLES = samples()
IDS = [f"{i}-{s.format}" for i, s in enumerate(SAMPLES)]


def sample(format: str):
    return next(s for s in samples() if s.format == format).copy()


@pytest.mark.parametrize("dtype", [None, ml_dtypes.bfloat16])
@pytest.mark.parametrize("s", SAMPLES, ids=IDS)
def test_every_packaging_is_converted(s, dtype, tmp_path):
    """The head is the same, and so are its values, in the dtype asked for; whole numbers stay whole."""
    folder, notes = s.write(tmp_path / "in"), []
    read = load_drafter(folder, TARGET)
    if s.format == "mtp-mimo":
        with pytest.raises(ValueError, match="no words for .*hidden_first True"):
            convert_drafter(folder, tmp_path / "out", TARGET)
        assert [path.name for path in tmp_path.iterdir()] == ["in"]
        return
    assert convert_drafter(folder, tmp_path / "out", TARGET, None, dtype, notes.append) == tmp_path / "out"
    again = load_drafter(tmp_path / "out", TARGET)
    assert again.config == read.config and notes == list(read.notes)
    # DeepSpec's packaging has no words for the rotation or the slots of the other packagings of DSpark.
    assert again.format == (s.format if "dspark" in s.format else DEFAULTS[read.config.family])
    assert set(again.tensors) == set(expected_tensors(read.config))
    for name, values in read.tensors.items():
        kept = dtype is None or np.issubdtype(values.dtype, np.integer)
        want = values if kept else values.astype(dtype)
        assert again.tensors[name].dtype == want.dtype
        np.testing.assert_array_equal(again.tensors[name], want, err_msg=name)


def test_a_format_can_be_chosen(tmp_path):
    folder = sample("dflash-zlab").write(tmp_path / "in")
    convert_drafter(folder, tmp_path / "out", TARGET, "speculators-dflash")
    assert load_drafter(tmp_path / "out", TARGET).format == "speculators-dflash"
    for format, why in (("hf", "cannot be written; it can be"), ("dspark-liquid", "it has no words for")):
        with pytest.raises(ValueError, match=why):
            convert_drafter(folder, tmp_path / format, TARGET, format)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_a_folder_in_use_is_refused_before_anything_is_read(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "x").touch()
    with pytest.raises(ValueError, match="already holds something"):
        convert_drafter(tmp_path / "none", tmp_path / "out", TARGET)


def test_what_a_path_holds(tmp_path):
    assert [drafter_format(s.write(tmp_path / str(i))) for i, s in enumerate(SAMPLES)] == [s.format for s in SAMPLES]
    plain = sample("mtp-qwen")
    plain.tensors = {name: x for name, x in plain.tensors.items() if not name.startswith("mtp.")}
    assert drafter_format(plain.write(tmp_path / "plain")) is None
    # A module of a family that nobody knows is its model's business, an unknown drafter is refused.
    plain.tensors["mtp.other.weight"] = np.zeros((2, 2), np.float32)
    assert drafter_format(plain.write(tmp_path / "model")) is None
    medusa = sample("eagle3-specforge")
    medusa.config["architectures"] = ["MedusaModel"]
    with pytest.raises(DrafterError, match="Medusa heads"):
        drafter_format(medusa.write(tmp_path / "medusa"))
