"""What a retrieval needs of a place that is not a MOQT session."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from kvcs.errors import KvcsError
from kvcs.kv import DataTrack
from kvcs.kv.tracks import PublicationNamespace


class SourceFailed(KvcsError):
    """A source of blocks does not have what was asked for, or cannot be asked.

    Attributes:
        status: HTTP status, where there was an answer.
    """

    def __init__(self, reason: str, status: int | None = None) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True, slots=True)
class StoredManifest:
    """The newest manifest of a publication, as its Object carried it."""

    name: bytes
    """Track Name, "manifest" or "manifest.cose"."""

    version: int
    """Group ID of the version."""

    payload: bytes
    """Payload of the Object, sealed where the publication is."""

    properties: bytes
    """Object properties as they stand on the wire; empty where there are none."""


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """One block of one layer, as its Object carried it."""

    block: int
    """Index within the segment."""

    payload: bytes | memoryview
    """The very octets of the Object's payload, 68-octet header first; sealed where it is."""

    properties: bytes
    """Object properties as they stand on the wire; empty where there are none."""


class BlockSource(Protocol):
    """A place to get publications from when no MOQT path works.

    It is entered before it is used and left afterwards, by several users at a time if need be.
    Nothing that it gives is believed: every manifest and every block passes the same checks as
    Objects of a session.
    """

    async def __aenter__(self) -> BlockSource:
        """Get ready."""

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """The last of its users gives back what it holds."""

    async def publications(
        self, scope_id: bytes, compat_id: bytes, anchor_key: bytes
    ) -> list[PublicationNamespace]:
        """Publications of one token prefix.

        Raises:
            SourceFailed: they cannot be had.
        """

    async def manifest(self, namespace: PublicationNamespace, max_octets: int) -> StoredManifest:
        """The newest manifest of a publication.

        Args:
            namespace: the publication.
            max_octets: longest payload to be read.

        Raises:
            SourceFailed: it cannot be had, or is longer.
        """

    def payloads(
        self,
        namespace: PublicationNamespace,
        track: DataTrack,
        layer: int,
        blocks: Sequence[int],
        block_keys: Sequence[bytes],
        max_octets: int,
    ) -> AsyncIterator[StoredBlock]:
        """Blocks of one layer of one data track; those that are not there are left out.

        Args:
            namespace: the publication.
            track: the data track.
            layer: the layer.
            blocks: indices within the segment, ascending.
            block_keys: Block Key of each.
            max_octets: longest payload to be read.

        Raises:
            SourceFailed: they cannot be had, or one is longer.
        """
