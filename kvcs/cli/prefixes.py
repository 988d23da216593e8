"""Prefixes that a command is told of: by a KV cache file, or by token ids and a descriptor."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from kvcs.cli.files import read_scope, read_text
from kvcs.cli.output import Output
from kvcs.errors import FileError, UsageError
from kvcs.kv import Descriptor, Prefix, Scope
from kvcs.kvfile import KvFile, load_kv_file

MAX_TOKEN_FILE_OCTETS = 1 << 27
"""Longest file of token ids that is read."""


def read_prefix(
    output: Output,
    scope_key_file: Path,
    like: Path | None,
    tokens: Path | None,
    descriptor: Path | None,
) -> Prefix:
    """The prefix that ``--like``, or ``--tokens`` and ``--descriptor``, name.

    Raises:
        UsageError: not exactly one of the two ways was used, or a file holds something else.
    """
    scope = read_scope(scope_key_file, output)
    if like is not None and tokens is None and descriptor is None:
        return prefix_of(load_kv_file(like, partial=True), scope)
    if like is None and tokens is not None and descriptor is not None:
        try:
            return Prefix(scope, read_descriptor(descriptor), _read_tokens(tokens))
        except FileError:
            raise
        except UsageError as exc:
            raise FileError(f"{tokens}: {exc}") from exc
    raise UsageError("name the prefix with --like FILE, or with --tokens FILE --descriptor FILE")


def prefix_of(file: KvFile, scope: Scope) -> Prefix:
    """The prefix of a KV cache file's whole blocks.

    Raises:
        FileError: it has fewer tokens than one block.
    """
    try:
        return Prefix(scope, file.descriptor, file.token_ids)
    except UsageError as exc:
        raise FileError(f"{file.path}: {exc}") from exc


def read_descriptor(path: Path) -> Descriptor:
    """Read a Compatibility Descriptor.

    Raises:
        FileError: it cannot be read, or is not one.
    """
    try:
        return Descriptor.parse(read_text(path, 1 << 20).encode())
    except FileError:
        raise
    except UsageError as exc:
        raise FileError(f"{path}: {exc}") from exc


def _read_tokens(path: Path) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    words = re.sub(r"[\[\],]", " ", read_text(path, MAX_TOKEN_FILE_OCTETS)).split()
    try:
        return np.array([int(word) for word in words], dtype=np.int64)
    except (ValueError, OverflowError):
        raise FileError(f"{path}: not a list of integers") from None
