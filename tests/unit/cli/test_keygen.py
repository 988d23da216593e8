"""`kvcs keygen`: a secret that is new, private and never overwritten."""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvcs.cli.files import read_scope
from kvcs.cli.output import Output
from kvcs.errors import FileError
from kvcs.kv import KVCS_SCHEME, Scope

Run = Callable[..., Any]


def test_it_writes_a_key_for_its_owner_alone(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "scope.key"
    ran = run("keygen", "--out", path, "--json")
    assert (ran.code, ran.err) == (0, "")
    text = path.read_text(encoding="ascii")
    assert len(text) == 65
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    scope = Scope.from_hex(text)
    assert ran.json() == {"file": str(path), "scope_id": KVCS_SCHEME.scope_id(scope).hex()}
    assert text.strip() not in ran.out, "the key itself is never shown"


def test_two_keys_differ(run: Run, tmp_path: Path) -> None:
    for name in ("a", "b"):
        assert run("keygen", "--out", tmp_path / name).code == 0
    assert (tmp_path / "a").read_bytes() != (tmp_path / "b").read_bytes()


def test_a_key_that_is_there_stays(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "scope.key"
    path.write_text("mine", encoding="ascii")
    ran = run("keygen", "--out", path)
    assert (ran.code, ran.out) == (2, "")
    assert ran.line() == f"kvcs: {path} is there already; it is not overwritten"
    assert path.read_text(encoding="ascii") == "mine"


def test_a_link_is_not_followed(run: Run, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    assert run("keygen", "--out", link).code == 2
    assert not (tmp_path / "elsewhere").exists()


def test_a_folder_that_is_not_there(run: Run, tmp_path: Path) -> None:
    ran = run("keygen", "--out", tmp_path / "none" / "scope.key")
    assert ran.code == 2
    assert ran.line().endswith("scope.key: No such file or directory")


def test_what_it_wrote_is_read_back(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "scope.key"
    run("keygen", "--out", path)
    assert len(read_scope(path, Output()).key) == 32
    assert capsys.readouterr().err == ""


def test_a_key_that_others_can_read_is_told(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "scope.key"
    run("keygen", "--out", path)
    path.chmod(0o640)
    read_scope(path, Output())
    assert "can be read by others" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"xyz", b"0" * 63, b"g" * 64, b"\xff" * 64, b"0" * 9999])
def test_what_is_no_key_is_not_repeated(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "scope.key"
    path.touch(mode=0o600)
    path.write_bytes(content)
    with pytest.raises(FileError, match="64 hex characters") as caught:
        read_scope(path, Output())
    assert str(path) in str(caught.value)
    if len(content) > 3:
        assert content.decode("latin-1")[:40] not in str(caught.value)


def test_a_missing_key_file(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="No such file"):
        read_scope(tmp_path / "none", Output())
