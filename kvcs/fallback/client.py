"""`HttpSource`: publications from an HTTP server, as `kvcs serve-http` is one."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Final

from kvcs.errors import FileError, UsageError
from kvcs.fallback.folder import INDEX, MAX_INDEX_OCTETS, SavedPublication
from kvcs.fallback.source import SourceFailed, StoredBlock, StoredManifest
from kvcs.fallback.web import CONCURRENCY, TIMEOUT_SECONDS, HttpClient
from kvcs.kv import DataTrack
from kvcs.kv.strict_json import load
from kvcs.kv.tracks import PUBLICATION_ID_OCTETS, PublicationNamespace
from kvcs.quic.tokens import TokenSource

MAX_LISTED: Final = 64
"""Publications that are taken from one list."""

MAX_LIST_OCTETS: Final = 64 * 1024
"""Longest such list."""

MAX_INDICES: Final = 16
"""Descriptions of publications that are remembered."""

MAX_RUN_OCTETS: Final = 64 * 2**20
"""Octets that one request asks for."""


class HttpSource(HttpClient):
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
        super().__init__(url, ca=ca, token=token, concurrency=concurrency, timeout=timeout)
        self._indices: OrderedDict[PublicationNamespace, SavedPublication] = OrderedDict()

    async def __aexit__(self, *_: object) -> None:
        """The last user closes the connections."""
        if self._users == 1:
            self._indices.clear()
        await super().__aexit__()

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
            async with await self.get(self._place(where), ranges) as response:
                self.check(response, octets, 206)
                for block in run:
                    try:
                        payload = await response.content.readexactly(sizes[block])
                    except asyncio.IncompleteReadError as exc:
                        raise SourceFailed(f"{self.url}: an answer was cut short") from exc
                    except Exception as exc:
                        raise self.failed(exc) from exc
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
        return await self.small(self._place(where), limit)

    def _place(self, where: str) -> str:
        return f"{self.url}/kvcs-1/{where}"


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
