"""Indices that a file, a folder or an HTTP server holds (KVCS "Discovering Publications").

The KVSP Index Service has a text of its own, which is not available to us. So this is our form of
what it answers with: which publications there are, by holder URI, and the Block Keys of each. What
of that is a prefix's is found out here, and the manifests confirm it.
"""

from __future__ import annotations

import asyncio
import json
import os
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from kvcs.errors import FileError, UsageError
from kvcs.fallback.source import SourceFailed
from kvcs.fallback.web import HttpClient
from kvcs.kv import Prefix
from kvcs.kv.strict_json import kind, load
from kvcs.kv.tracks import BLOCK_KEY_OCTETS, PublicationNamespace, parse_holder_uri
from kvcs.observe import get_logger
from kvcs.quic.tokens import TokenSource
from kvcs.subscriber.coverage import MAX_FURTHER_KEYS, Holding

_log = get_logger("kvcs.subscriber")

INDEX_VERSION: Final = 1
"""Value of the member ``kvcs-index``."""

MAX_INDEX_OCTETS: Final = 64 * 2**20
"""Longest document that is read."""

MAX_ENTRIES: Final = 4096
"""Publications that one index may name."""

MAX_INDEX_VALUES: Final = 2**21
"""Most values of a document; twice as many as Block Keys fit into the longest one."""

MAX_INDEX_FILES: Final = 1024
"""Files of a folder that are read, the newest first."""

MAX_FOLDER_OCTETS: Final = 256 * 2**20
"""Octets of these together."""

MAX_ANSWER_SECONDS: Final = 60.0
"""A server's whole answer takes no longer, though it is never silent for long."""

SUFFIX: Final = ".json"
"""How the files of a folder end."""


def index_json(entries: Iterable[tuple[str, Prefix]]) -> bytes:
    """The document of some publications, as `FileIndex` and `HttpIndex` read it.

    It has Block Keys, which are keyed: whoever reads it learns which prefixes begin alike.

    Args:
        entries: holder URI of each, and the prefix that it was published for.

    Raises:
        UsageError: a URI is no holder URI, or names another scope or descriptor.
    """
    listed = []
    for uri, prefix in entries:
        _, namespace = parse_holder_uri(uri)
        if not _is_of(namespace, prefix):
            raise UsageError(f"{uri[:200]!r} is not of the prefix's scope and descriptor")
        listed.append({"uri": uri, "block_keys": [key.hex() for key in prefix.block_keys]})
    document = {"kvcs-index": INDEX_VERSION, "publications": listed}
    return json.dumps(document, separators=(",", ":")).encode()


def look_up(document: bytes, prefix: Prefix) -> list[Holding | str]:
    """What a document names of a prefix, those with most blocks of it first.

    Raises:
        UsageError: it is malformed; the message names the member.
    """
    given = load(document, max_octets=MAX_INDEX_OCTETS, max_values=MAX_INDEX_VALUES)
    if not isinstance(given, dict) or given.get("kvcs-index") != INDEX_VERSION:
        raise UsageError(f'not an index: no member "kvcs-index" of value {INDEX_VERSION}')
    entries = given.get("publications")
    if not isinstance(entries, list):
        raise UsageError(f"publications: expected an array, got {kind(entries)}")
    if len(entries) > MAX_ENTRIES:
        raise UsageError(f"{len(entries)} publications, limit {MAX_ENTRIES}")
    found: list[Holding | str] = []
    ours = [key.hex() for key in prefix.block_keys]
    for number, entry in enumerate(entries):
        where = f"publications[{number}]"
        if not isinstance(entry, dict) or not isinstance(uri := entry.get("uri"), str):
            raise UsageError(f'{where}: expected an object with the member "uri"')
        try:
            named = parse_holder_uri(uri)[1]
        except UsageError as exc:
            raise UsageError(f"{where}: {exc}") from exc
        if not _is_of(named, prefix):
            continue
        if "block_keys" not in entry:
            found.append(uri)
            continue
        keys = _keys(entry["block_keys"], where)
        shared = _shared(ours, keys)
        if shared:
            further = tuple(bytes.fromhex(key) for key in keys[shared:])
            found.append(Holding(uri, shared, further))
    return _best_first(found)


def _shared(ours: Sequence[str], theirs: Sequence[str]) -> int:
    """How many Block Keys two prefixes share."""
    shared = 0
    for one, other in zip(ours, theirs, strict=False):
        if one != other:
            break
        shared += 1
    return shared


def _is_of(named: PublicationNamespace, prefix: Prefix) -> bool:
    return named[:2] == (prefix.scope_id, prefix.compat_id)


def _keys(given: Any, where: str) -> list[str]:
    if not isinstance(given, list) or len(given) > MAX_FURTHER_KEYS:
        raise UsageError(f"{where}.block_keys: expected an array of at most {MAX_FURTHER_KEYS}")
    for key in given:
        digits = isinstance(key, str) and len(key) == 2 * BLOCK_KEY_OCTETS
        if not digits or set(key) - set("0123456789abcdef"):
            raise UsageError(
                f"{where}.block_keys: expected {2 * BLOCK_KEY_OCTETS} lower-case hex digits each"
            )
    return given


class FileIndex:
    """An index in a file, or in the ``.json`` files of a folder; read anew for every look-up.

    Several producers may write into one folder: a file of it that is no index is left out, with a
    line in the log, where others name something of the prefix.

    Args:
        path: the file or folder; `index_json` and `kvcs publish --index-out` make such files.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    async def find(self, prefix: Prefix) -> Sequence[Holding | str]:
        """Publications that hold blocks of a prefix, the best first; see `Index`.

        Raises:
            FileError: a file cannot be read, or is malformed, and no other one names anything; the
                message says where.
        """
        return await asyncio.to_thread(self._find, prefix)

    def _find(self, prefix: Prefix) -> list[Holding | str]:
        try:
            if not self.path.is_dir():
                return look_up(_read(self.path), prefix)
            return self._in_folder(prefix)
        except OSError as exc:
            raise FileError(f"{self.path}: {exc.strerror or exc}") from exc
        except UsageError as exc:
            raise FileError(f"{self.path}: {exc}") from exc

    def _in_folder(self, prefix: Prefix) -> list[Holding | str]:
        found: list[Holding | str] = []
        wrong: FileError | None = None
        left = MAX_FOLDER_OCTETS
        for path in self._files():
            try:
                document = _read(path)
                left -= len(document)
                if left < 0:
                    raise UsageError(
                        f"the folder's files have more than {MAX_FOLDER_OCTETS} octets"
                    )
                found += look_up(document, prefix)
            except FileNotFoundError:
                continue  # its publication has just ended
            except (OSError, UsageError) as exc:
                _log.warning("index_file_not_used", file=path.name, why=str(exc))
                wrong = wrong or FileError(f"{path}: {exc}")
                if left < 0:
                    break
        if wrong is not None and not found:
            raise wrong  # what it has is unknown, not absent
        return _best_first(found)

    def _files(self) -> list[Path]:
        dated = []
        for path in self.path.glob(f"*{SUFFIX}"):
            try:
                found = path.stat()
            except OSError:
                continue  # its publication has just ended
            if stat.S_ISREG(found.st_mode):  # a pipe would be waited for without end
                dated.append((found.st_mtime_ns, path))
        return [path for _, path in sorted(dated, reverse=True)[:MAX_INDEX_FILES]]


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(MAX_INDEX_OCTETS + 1)


class HttpIndex(HttpClient):
    """An index that an HTTP server gives, asked anew for every look-up; no redirect is followed.

    The server learns no more than the URL: what of its answer is a prefix's is found out here.

    Args:
        url: ``https://host[:port]/path``, ``http://`` for this machine alone. ``{scope}``,
            ``{compat}`` and ``{anchor}`` in it stand for Scope ID, Compatibility ID and Anchor Key
            of the prefix in hexadecimal.
        ca: PEM file of the CA to believe, instead of the system's.
        token: as for `kvcs.connect`; sent as ``Authorization: Bearer``.

    Raises:
        UsageError: the URL is none of these.
    """

    def __init__(
        self, url: str, *, ca: str | Path | None = None, token: TokenSource | None = None
    ) -> None:
        super().__init__(url, ca=ca, token=token)

    async def find(self, prefix: Prefix) -> Sequence[Holding | str]:
        """Publications that hold blocks of a prefix, the best first; see `Index`.

        Raises:
            SourceFailed: there is no answer, or none of that form.
            UsageError: what it says is malformed.
        """
        url = self.url
        for name, octets in (
            ("scope", prefix.scope_id),
            ("compat", prefix.compat_id),
            ("anchor", prefix.block_keys[-1]),
        ):
            url = url.replace(f"{{{name}}}", octets.hex())
        try:
            async with asyncio.timeout(MAX_ANSWER_SECONDS), self:
                document = await self.small(url, MAX_INDEX_OCTETS)
        except TimeoutError as exc:
            raise SourceFailed(f"{self.url}: no answer in {MAX_ANSWER_SECONDS:g} s") from exc
        return await asyncio.to_thread(look_up, document, prefix)


def _best_first(found: Iterable[Holding | str]) -> list[Holding | str]:
    """Those with most blocks of the prefix first, and those of which that is not said last."""
    return sorted(found, key=lambda each: -each.blocks if isinstance(each, Holding) else 0)


def index_at(
    text: str, *, ca: str | Path | None = None, token: TokenSource | None = None
) -> FileIndex | HttpIndex:
    """The index that a user names: an ``http(s)://`` URL, else a file or folder.

    Raises:
        UsageError: it is a URL that cannot be used.
        FileError: there is no such file or folder.
    """
    if text.startswith(("http://", "https://")):
        return HttpIndex(text, ca=ca, token=token)
    if not os.path.exists(text):
        raise FileError(f"{text}: there is no such file or folder; a URL begins with https://")
    return FileIndex(text)
