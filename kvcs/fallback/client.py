"""`HttpSource`: publications from an HTTP server, as `kvcs serve-http` is one."""

from __future__ import annotations

import asyncio
import base64
import inspect
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import Any, Final
from urllib.parse import urlsplit

from kvcs.errors import FileError, UsageError
from kvcs.fallback.folder import INDEX, MAX_INDEX_OCTETS, SavedPublication
from kvcs.fallback.library import aiohttp, client_context, is_local
from kvcs.fallback.source import SourceFailed, StoredBlock, StoredManifest
from kvcs.kv import DataTrack
from kvcs.kv.strict_json import load
from kvcs.kv.tracks import PUBLICATION_ID_OCTETS, PublicationNamespace
from kvcs.quic.tokens import TokenSource, token_octets

MAX_LISTED: Final = 64
"""Publications that are taken from one list."""

MAX_LIST_OCTETS: Final = 64 * 1024
"""Longest such list."""

MAX_INDICES: Final = 16
"""Descriptions of publications that are remembered."""

MAX_RUN_OCTETS: Final = 64 * 2**20
"""Octets that one request asks for."""

CONCURRENCY: Final = 8
"""Requests at a time."""

TIMEOUT_SECONDS: Final = 10.0
"""Longest silence of a server."""

PIECE: Final = 256 * 1024
"""Octets that are read at a time."""


class HttpSource:
    """Gets publications over HTTP; a `BlockSource`.

    Redirects are refused: a token is for the server that was named. Sizes are checked before
    anything is read, and what comes is checked like Objects of a session.

    Args:
        url: ``https://host[:port][/path]``; ``http://`` for this machine alone.
        ca: PEM file of the CA to believe, instead of the system's.
        token: as for `kvcs.connect`: base64url, octets, or what gives them.
        concurrency: requests at a time.
        timeout: longest silence of the server, seconds.

    Raises:
        UsageError: the URL is none of these, or a bound is not above 0.
    """

    def __init__(
        self,
        url: str,
        *,
        ca: str | Path | None = None,
        token: TokenSource | None = None,
        concurrency: int = CONCURRENCY,
        timeout: float = TIMEOUT_SECONDS,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"{url!r} is no https:// URL")
        if parts.query or parts.fragment or parts.username or parts.password:
            raise UsageError("the URL of a fallback has neither user, query nor fragment")
        if parts.scheme == "http" and not is_local(parts.hostname):
            raise UsageError(f"{url!r}: say https://; without TLS only this machine is asked")
        if concurrency < 1 or not timeout > 0:
            raise UsageError("concurrency and timeout must be above 0")
        self.url = url.rstrip("/")
        self._secure = parts.scheme == "https"
        self._ca = ca
        self._token = token
        self._concurrency = concurrency
        self._timeout = timeout
        self._users = 0
        self._session: Any = None
        self._indices: OrderedDict[PublicationNamespace, SavedPublication] = OrderedDict()

    async def __aenter__(self) -> HttpSource:
        """Get ready.

        Raises:
            UsageError: aiohttp is not installed.
            FileError: the CA file cannot be used.
        """
        if self._session is None:
            library = aiohttp()
            tls = client_context(self._ca) if self._secure else False
            self._session = library.ClientSession(
                connector=library.TCPConnector(limit=self._concurrency, ssl=tls),
                timeout=library.ClientTimeout(
                    total=None, sock_connect=self._timeout, sock_read=self._timeout
                ),
                cookie_jar=library.DummyCookieJar(),
                auto_decompress=False,
                trust_env=False,
            )
        self._users += 1
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """The last user closes the connections."""
        self._users -= 1
        if self._users == 0:
            session, self._session = self._session, None
            self._indices.clear()
            await session.close()

    async def publications(
        self, scope_id: bytes, compat_id: bytes, anchor_key: bytes
    ) -> list[PublicationNamespace]:
        """Publications of one token prefix; see `BlockSource`."""
        where = f"{scope_id.hex()}/{compat_id.hex()}/{anchor_key.hex()}/"
        octets = await self._small(where, MAX_LIST_OCTETS)
        try:
            listed = load(octets, max_octets=MAX_LIST_OCTETS)
            if not isinstance(listed, list):
                raise UsageError("not a list")
            found = [bytes.fromhex(str(text)) for text in listed[:MAX_LISTED]]
        except ValueError as exc:
            raise SourceFailed(f"{self.url}: its list of publications is malformed") from exc
        if any(len(each) != PUBLICATION_ID_OCTETS for each in found):
            raise SourceFailed(f"{self.url}: its list of publications is malformed")
        return [PublicationNamespace(scope_id, compat_id, anchor_key, each) for each in found]

    async def manifest(self, namespace: PublicationNamespace, max_octets: int) -> StoredManifest:
        """The newest manifest of a publication; see `BlockSource`."""
        self._indices.pop(namespace, None)
        index = await self._index(namespace)
        payload = await self._small(f"{_path(namespace)}/{index.manifest.decode()}", max_octets)
        return StoredManifest(index.manifest, index.version, payload, index.properties)

    async def payloads(
        self,
        namespace: PublicationNamespace,
        track: DataTrack,
        layer: int,
        blocks: Sequence[int],
        block_keys: Sequence[bytes],
        max_octets: int,
    ) -> AsyncIterator[StoredBlock]:
        """Blocks of one layer of one data track; see `BlockSource`.

        Adjacent ones are one request with a Range.
        """
        index = await self._index(namespace)
        saved = index.tracks.get(track)
        if saved is None or layer >= index.layers:
            return
        there = [block for block in blocks if block < index.segments[track.segment]]
        sizes = {block: saved.size(layer, block) for block in there}
        for block, size in sizes.items():
            if size > max_octets:
                raise SourceFailed(f"{track} {layer}/{block}: {size} octets, limit {max_octets}")
        for run in _runs(there, sizes):
            first = saved.offset(layer, run[0])
            octets = sum(sizes[block] for block in run)
            where = f"{_path(namespace)}/{track}/{layer}"
            ranges = {"Range": f"bytes={first}-{first + octets - 1}"}
            async with await self._get(where, ranges) as response:
                self._check(response, where, octets, 206)
                for block in run:
                    try:
                        payload = await response.content.readexactly(sizes[block])
                    except asyncio.IncompleteReadError as exc:
                        raise SourceFailed(f"{self.url}: an answer was cut short") from exc
                    except Exception as exc:
                        raise self._failed(exc) from exc
                    yield StoredBlock(block, payload, saved.properties)

    # Inner workings

    async def _index(self, namespace: PublicationNamespace) -> SavedPublication:
        found = self._indices.get(namespace)
        if found is None:
            octets = await self._small(f"{_path(namespace)}/{INDEX}", MAX_INDEX_OCTETS)
            try:
                found = await asyncio.to_thread(SavedPublication.from_json, octets)
            except FileError as exc:
                raise SourceFailed(f"{self.url}: {exc}") from exc
            while len(self._indices) >= MAX_INDICES:
                self._indices.popitem(last=False)
            self._indices[namespace] = found
        return found

    async def _small(self, where: str, limit: int) -> bytes:
        """A whole answer of at most ``limit`` octets."""
        async with await self._get(where, {}) as response:
            self._check(response, where, limit, 200)
            taken = bytearray()
            try:
                while piece := await response.content.read(PIECE):
                    taken += piece
                    if len(taken) > limit:
                        raise SourceFailed(f"{self.url}: an answer is longer than {limit} octets")
            except SourceFailed:
                raise
            except Exception as exc:
                raise self._failed(exc) from exc
        return bytes(taken)

    async def _get(self, where: str, headers: dict[str, str]) -> Any:
        if self._session is None:
            raise UsageError("enter the HttpSource first: async with source")
        headers |= {"Accept-Encoding": "identity"}
        token = await self._token_octets()
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        try:
            return await self._session.get(
                f"{self.url}/kvcs-1/{where}", headers=headers, allow_redirects=False
            )
        except Exception as exc:
            raise self._failed(exc) from exc

    async def _token_octets(self) -> str | None:
        given = self._token() if callable(self._token) else self._token
        if inspect.isawaitable(given):
            given = await given
        if given is None:
            return None
        [octets] = token_octets(given)
        return base64.urlsafe_b64encode(octets).rstrip(b"=").decode()

    def _check(self, response: Any, where: str, limit: int, status: int) -> None:
        """Look at an answer before anything of it is read."""
        if response.status != status:
            raise SourceFailed(f"{self.url} answered {response.status}", response.status)
        length = response.content_length
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise SourceFailed(f"{self.url}: an answer is encoded")
        if status == 206 and length != limit:
            raise SourceFailed(f"{self.url}: {length} octets came for a range of {limit}")
        if length is not None and length > limit:
            raise SourceFailed(f"{self.url}: an answer of {length} octets, limit {limit}")

    def _failed(self, error: Exception) -> Exception:
        """What the library raised, as ours; what is no failure of the way stays what it is."""
        library = aiohttp()
        if isinstance(error, library.ClientError | OSError | TimeoutError | ValueError):
            return SourceFailed(f"{self.url} cannot be read: {error or type(error).__name__}")
        return error


def _path(namespace: PublicationNamespace) -> str:
    return "/".join(field.hex() for field in namespace)


def _runs(blocks: Sequence[int], sizes: dict[int, int]) -> list[list[int]]:
    """Adjacent blocks together, as many as one request may ask for."""
    runs: list[list[int]] = []
    for _, pairs in groupby(enumerate(blocks), lambda pair: pair[1] - pair[0]):
        octets = MAX_RUN_OCTETS + 1
        for _, block in pairs:
            if octets + sizes[block] > MAX_RUN_OCTETS:
                runs.append([])
                octets = 0
            runs[-1].append(block)
            octets += sizes[block]
    return runs
