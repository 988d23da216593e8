"""Files of the command: where a result may go, and what is read of keys and tokens."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvcs.cli.files import check_target
from kvcs.errors import FileError
from kvcs.kv import Descriptor
from kvcs.kvfile import save_kv_file


def test_a_target_is_checked_before_anything_is_fetched(tmp_path: Path) -> None:
    check_target(tmp_path / "new.safetensors")
    there = tmp_path / "there.safetensors"
    there.touch()
    check_target(there)
    assert there.read_bytes() == b"", "it is looked at only"
    for path, says in (
        (tmp_path, "a folder"),
        (Path(""), "a folder"),
        (tmp_path / "none" / "x", "there is no folder"),
        (there / "x", "there is no folder"),
    ):
        with pytest.raises(FileError, match=says):
            check_target(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_to_is_told(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    with pytest.raises(FileError, match="cannot be written to"):
        check_target(tmp_path / "x")


def test_a_cache_file_needs_a_name() -> None:
    descriptor = Descriptor(
        model="tiny",
        weights="r1",
        layers=1,
        kv_heads=1,
        head_dim=1,
        dtype="uint8",
        block_tokens=1,
    )
    with pytest.raises(FileError, match="not the name of a file"):
        save_kv_file("", descriptor, [1], [])
