"""A source of blocks that may be the caller's own: whatever it raises, it only brings nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Sequence
from types import TracebackType
from typing import TypeVar

from kvcs.errors import KvcsError
from kvcs.fallback.source import BlockSource, SourceFailed, StoredBlock, StoredManifest
from kvcs.kv import DataTrack
from kvcs.kv.tracks import PublicationNamespace
from kvcs.observe import get_logger
from kvcs.observe.logs import described

_log = get_logger("kvcs.fallback")

T = TypeVar("T")


class GuardedSource:
    """A `BlockSource` that raises nothing but `KvcsError`.

    Args:
        source: the one that is asked.
    """

    def __init__(self, source: BlockSource) -> None:
        self._source = source

    async def __aenter__(self) -> GuardedSource:
        """Get ready.

        Raises:
            SourceFailed: it cannot.
        """
        await _guarded(self._source.__aenter__())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leave it; what it raises then changes nothing of what it has brought."""
        try:
            await _guarded(self._source.__aexit__(kind, error, traceback))
        except KvcsError as exc:
            _log.warning("source_not_left", reason=str(exc))

    async def publications(
        self, scope_id: bytes, compat_id: bytes, anchor_key: bytes
    ) -> list[PublicationNamespace]:
        """As `BlockSource.publications`."""
        return await _guarded(self._source.publications(scope_id, compat_id, anchor_key))

    async def manifest(self, namespace: PublicationNamespace, max_octets: int) -> StoredManifest:
        """As `BlockSource.manifest`."""
        return await _guarded(self._source.manifest(namespace, max_octets))

    async def payloads(
        self,
        namespace: PublicationNamespace,
        track: DataTrack,
        layer: int,
        blocks: Sequence[int],
        block_keys: Sequence[bytes],
        max_octets: int,
    ) -> AsyncIterator[StoredBlock]:
        """As `BlockSource.payloads`."""
        try:
            async for stored in self._source.payloads(
                namespace, track, layer, blocks, block_keys, max_octets
            ):
                yield stored
        except KvcsError:
            raise
        except Exception as exc:
            raise _failed(exc) from exc


async def _guarded(wait: Awaitable[T]) -> T:
    try:
        return await wait
    except KvcsError:
        raise
    except Exception as exc:
        raise _failed(exc) from exc


def _failed(exc: Exception) -> SourceFailed:
    _log.warning("source_failed", reason=described(exc))
    return SourceFailed(f"the source failed: {type(exc).__name__}")
