"""Files of the command: where a result may go, and what is read of keys and tokens."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvcs.cli.files import check_target
from kvcs.errors import FileError
from kvcs.keyfiles import save_protection_ring
from kvcs.kv import Descriptor, ProtectionRing
from kvcs.kvfile import save_kv_file
from tests.command import Run

LONG = "x" * 300
"""A name that no file system has room for, so that looking for it fails."""


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
        (tmp_path / LONG / "x", "there is no folder"),
        (tmp_path / LONG, "File name too long"),
    ):
        with pytest.raises(FileError, match=says):
            check_target(path)


def test_a_file_where_a_folder_is_wanted_is_told(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ran = run("certs", "--out", tmp_path / "file")
    assert ran.code == 2
    assert ran.line() == f"kvcs: {tmp_path / 'file'}: not a folder"


def test_what_is_no_file_is_not_replaced(run: Run, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "link").symlink_to(pipe)
    for path in (pipe, tmp_path / "link", Path(os.devnull)):
        with pytest.raises(FileError, match="not a regular file; it is not replaced"):
            check_target(path)
    descriptor = Descriptor(
        model="tiny", weights="r1", layers=1, kv_heads=1, head_dim=1, dtype="uint8", block_tokens=1
    )
    with pytest.raises(FileError, match="it is not replaced"):
        save_kv_file(pipe, descriptor, [1], [])
    with pytest.raises(FileError, match="it is not replaced"):
        save_protection_ring(pipe, _ring(), replace=True)
    issuer = ("--issuer", "us", "--every-scope", "--out", tmp_path / "issuer.key")
    assert run("keygen", *issuer).code == 0
    token = ("--issuer-key-file", tmp_path / "issuer.key", "--scope-id", "00" * 16)
    ran = run("token", "make", *token, "--audience", "x", "--out", pipe)
    assert ran.code == 2 and "it is not replaced" in ran.line()
    assert pipe.is_fifo() and (tmp_path / "link").is_symlink()


def _ring() -> ProtectionRing:
    ring = ProtectionRing(scope_id=None)
    ring.rotate()
    return ring


@pytest.mark.parametrize(
    "words",
    [
        lambda folder: ("keygen", "--out", folder / LONG),
        lambda folder: ("keygen", "--signing", "--every-scope", "--out", folder / LONG),
        lambda folder: (
            *("keygen", "--signing", "--every-scope", "--out", folder / "key"),
            *("--public", folder / LONG),
        ),
        lambda folder: ("certs", "--out", folder / LONG),
        lambda folder: ("certs", "--out", folder, "--client", LONG),
        lambda folder: ("keys", folder / LONG),
        lambda folder: ("inspect", folder / LONG),
        lambda folder: ("doctor", "relay", "--cert", folder / LONG),
        lambda folder: ("bench", "--out", folder / LONG / "x"),
        lambda folder: ("--config", folder / LONG, "doctor"),
    ],
)
def test_a_name_that_cannot_be_looked_at_is_no_fault(
    run: Run, tmp_path: Path, words: Callable[[Path], tuple[object, ...]]
) -> None:
    ran = run(*words(tmp_path))
    assert ran.code == 2, ran.err
    said = ran.err if ran.err else ran.out
    assert LONG in said and "internal error" not in said


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
