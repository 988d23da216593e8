"""Small files that commands write and read: keys, certificates, tokens."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import IO, TYPE_CHECKING

from kvcs.cli.output import Output
from kvcs.errors import FileError, UsageError
from kvcs.filekinds import file_kind, told
from kvcs.targets import check_replaced

if TYPE_CHECKING:
    from kvcs.kv import Scope

MAX_KEY_FILE_OCTETS = 4096
"""Longest scope key file that is read; the key has 64 characters."""


def write_file(path: Path, data: bytes, *, private: bool, replace: bool = False) -> None:
    """Write a small file.

    Args:
        path: the file.
        data: all of it.
        private: only the owner may read it (mode 0600), from its first octet on.
        replace: take the place of a file that is there; otherwise that is an error.

    Raises:
        FileError: the file is there already, or cannot be written; then it stays as it was.
    """
    target = path.with_name(f".{path.name}.{os.getpid()}.part") if replace else path
    made = False
    if replace:
        check_replaced(path)
    try:
        # O_EXCL also refuses to write through a symbolic link.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with os.fdopen(os.open(target, flags, 0o600 if private else 0o644), "wb") as file:
            made = True
            file.write(data)
        if replace:
            target.replace(path)
    except OSError as exc:
        if made:
            target.unlink(missing_ok=True)
        if isinstance(exc, FileExistsError):
            raise FileError(f"{path} is there already; it is not overwritten") from exc
        raise FileError(f"{path}: {exc.strerror or exc}") from exc


def check_target(path: Path) -> None:
    """Check that a file can be written, before its content is fetched from far away.

    Raises:
        FileError: it is a folder or a device, or its folder is missing or cannot be written to.
    """
    # Those of `os.path` take for missing what cannot be looked at; those of `Path` may raise.
    if not path.name or os.path.isdir(path):
        raise FileError(f"{path}: a folder, where a file is to be written")
    if not os.path.isdir(path.parent):
        raise FileError(f"{path}: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise FileError(f"{path}: the folder {path.parent} cannot be written to")
    check_replaced(path)


def check_apart(path: Path, inputs: Iterable[Path | None], option: str = "--out") -> None:
    """Check that what is written takes the place of nothing that the command reads.

    Args:
        path: what is written.
        inputs: what is read; None where an option was not given.
        option: what named ``path``.

    Raises:
        UsageError: it is one of them, under this name or another.
    """
    for each in inputs:
        if each is None:
            continue
        try:
            is_same = os.path.samefile(path, each)
        except OSError:  # one of them is not there, or cannot be looked at
            continue
        if is_same:
            raise UsageError(f"{path}: this command reads it too; give {option} another file")


def note_open_secret(path: Path, file: IO[bytes], output: Output) -> None:
    """Say so where others than its owner can read the file of a secret."""
    if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077:
        output.note(f"{path} can be read by others; chmod 600 keeps it to you")


def read_text(path: Path, limit: int, *, is_secret: bool = False) -> str:
    """Read a small text file.

    Args:
        path: the file.
        limit: most octets that it may have.
        is_secret: say so where others than its owner can read it.

    Raises:
        FileError: it cannot be read, is not ASCII or UTF-8, or longer than ``limit`` octets.
    """
    try:
        with path.open("rb") as file:
            if is_secret:
                note_open_secret(path, file, Output())
            data = file.read(limit + 1)
        if len(data) > limit:
            raise FileError(f"{path}: longer than {limit} octets")
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise FileError(f"{path}: not a text file") from None
    except OSError as exc:
        raise FileError(f"{path}: {exc.strerror or exc}") from exc


def read_scope(path: Path, output: Output) -> Scope:
    """Read the scope key that `kvcs keygen` wrote.

    Args:
        path: a file of 64 hex characters.
        output: is told when others can read the file too.

    Raises:
        FileError: the file cannot be read or is no scope key; its content is not repeated.
    """
    # Here, since it brings numpy, which a relay and the makers of keys do without.
    from kvcs.kv import Scope

    try:
        with path.open("rb") as file:
            data = file.read(MAX_KEY_FILE_OCTETS + 1)
            if len(data) > MAX_KEY_FILE_OCTETS:
                raise FileError(
                    f"{path}: too long for a scope key of 64 hex characters{told(file_kind(data))}"
                )
            scope = Scope.from_hex(data.decode("ascii", "replace"))
            # Of no other file: whoever names two of them the wrong way round is not to hide a CA.
            note_open_secret(path, file, output)
        return scope
    except FileError:
        raise
    except UsageError as exc:
        raise FileError(f"{path}: {exc}{told(file_kind(data))}") from exc
    except OSError as exc:
        raise FileError(f"{path}: {exc.strerror or exc}") from exc
