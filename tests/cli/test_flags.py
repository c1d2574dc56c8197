"""What the commands share: which outputs are refused before anything is loaded."""

import os
import tempfile

import pytest

from specjax.cli import flags


def test_outputs_that_would_be_lost_or_replace_something_are_refused(tmp_path):
    flags.check_outputs(None, str(tmp_path / "new.json"), None)
    (tmp_path / "old.json").write_text("{}")
    flags.check_outputs(str(tmp_path / "old.json"))
    os.mkfifo(tmp_path / "pipe")
    for path, message in (("pipe", "no regular file"), ("none/x.json", "does not exist"), (".", "is a folder")):
        with pytest.raises(ValueError, match=f"cannot write .*{path}: .*{message}"):
            flags.check_outputs(str(tmp_path / path) if path != "." else ".")
    same = str(tmp_path / "a.json")
    with pytest.raises(ValueError, match="a.json cannot hold two outputs"):
        flags.check_outputs(same, None, same)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old.json", "pipe"]


def test_a_folder_that_takes_no_files_is_found_before(tmp_path, monkeypatch):
    def full(**options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with pytest.raises(ValueError, match=r"cannot write .*a.json: its folder takes no files \(No space left"):
        flags.check_outputs(str(tmp_path / "a.json"))
