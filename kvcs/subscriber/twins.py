"""Other publications of the same prefix whose Objects are the very same octets.

KVCS "Verification and Recovery": Objects of different publications are combined within a segment
only where both manifests say "deterministic": true.
"""

from __future__ import annotations

import asyncio
from typing import cast

from kvcs.errors import KvcsError
from kvcs.fallback.source import BlockSource
from kvcs.kv import Manifest, Prefix
from kvcs.kv.tracks import PublicationNamespace
from kvcs.moqt.names import TrackNamespace
from kvcs.observe import get_logger
from kvcs.quic.connection import Connection
from kvcs.subscriber.authenticity import Authenticity
from kvcs.subscriber.discovery import publications
from kvcs.subscriber.manifests import ManifestFollower
from kvcs.subscriber.settings import SubscriberSettings

_log = get_logger("kvcs.subscriber")

_Other = tuple[PublicationNamespace, Manifest]
"""Another publication, and its manifest as it was read."""

MAX_TWINS = 4
"""Publications beside the one that is retrieved whose manifests are read at one place."""


def are_twins(ours: Manifest, theirs: Manifest) -> bool:
    """Whether Objects of one publication may stand for those of the other."""
    if not (ours.deterministic and theirs.deterministic):
        return False
    if len(theirs.segments) < len(ours.segments):
        return False
    return all(
        (mine.first_block, mine.blocks, mine.block_keys_sha256)
        == (other.first_block, other.blocks, other.block_keys_sha256)
        and set(mine.tracks) <= set(other.tracks)
        for mine, other in zip(ours.segments, theirs.segments, strict=False)
    )


class Twins:
    """Looks for them, once at each place; which of those that are there count, the newest manifest
    of the publication that is retrieved says each time.

    Args:
        prefix: the consumer's prefix.
        settings: waits and bounds.
        authenticity: whose manifests count.
    """

    def __init__(
        self, prefix: Prefix, settings: SubscriberSettings, authenticity: Authenticity
    ) -> None:
        self._prefix = prefix
        self._settings = settings
        self._authenticity = authenticity
        self._known: dict[object, list[_Other]] = {}

    async def over(
        self, session: Connection, ours: TrackNamespace, manifest: Manifest
    ) -> list[TrackNamespace]:
        """Those that a session leads to."""
        if not manifest.deterministic:
            return []
        if session not in self._known:
            self._known[session] = await self._over(session, ours)
        return [each.fields for each in self._twins_at(session, manifest)]

    def _twins_at(self, place: object, manifest: Manifest) -> list[PublicationNamespace]:
        """Those at a place that are twins now: the same first segment may go on otherwise."""
        known = self._known[place]
        return [namespace for namespace, theirs in known if are_twins(manifest, theirs)]

    async def _over(self, session: Connection, ours: TrackNamespace) -> list[_Other]:
        watch = session.namespaces.watch(ours[:-1])
        try:
            async with asyncio.timeout(self._settings.quiet):
                await watch.answered.wait()
            await asyncio.sleep(self._settings.listen)
            found = [info.namespace for info in publications(watch, session.peer)]
        except TimeoutError:
            return []
        finally:
            session.namespaces.release(watch)
        others = [each for each in found if each.fields != ours][:MAX_TWINS]
        read = [(each, await self._read(session, each)) for each in others]
        return [(each, theirs) for each, theirs in read if theirs is not None]

    async def _read(self, session: Connection, namespace: PublicationNamespace) -> Manifest | None:
        changed = asyncio.Event()
        follower = self._follower(session, namespace, changed)
        follower.start()
        try:
            async with asyncio.timeout(self._settings.quiet):
                while not follower.ready and follower.error is None:
                    await changed.wait()
                    changed.clear()
        except TimeoutError:
            return None
        finally:
            follower.stop()
        return _read_by(follower)

    async def at(
        self, source: BlockSource, ours: PublicationNamespace, manifest: Manifest
    ) -> list[PublicationNamespace]:
        """Those that a source has; it was entered."""
        if not manifest.deterministic:
            return []
        if source not in self._known:
            listed = await source.publications(*ours[:3])
            others = [each for each in listed if each != ours][:MAX_TWINS]
            read = [(each, await self._read_at(source, each)) for each in others]
            self._known[source] = [(each, theirs) for each, theirs in read if theirs is not None]
        return self._twins_at(source, manifest)

    async def _read_at(
        self, source: BlockSource, namespace: PublicationNamespace
    ) -> Manifest | None:
        # Here, because a retrieval that needs none of this imports none of it.
        from kvcs.subscriber.last_means import read_stored
        from kvcs.subscriber.without import NoSession

        nowhere = cast(Connection, NoSession("no session leads to the publication"))
        follower = self._follower(nowhere, namespace, asyncio.Event())
        try:
            longest = self._settings.manifest_limits.octets
            await read_stored(follower, await source.manifest(namespace, longest))
        except KvcsError as exc:
            _log.info("manifest_not_read", why=str(exc))
            return None
        return _read_by(follower)

    def _follower(
        self, session: Connection, namespace: PublicationNamespace, changed: asyncio.Event
    ) -> ManifestFollower:
        return ManifestFollower(
            session,
            namespace.fields,
            self._prefix,
            self._settings,
            changed.set,
            authenticity=self._authenticity,
        )


def _read_by(follower: ManifestFollower) -> Manifest | None:
    """What was read, if it can ever be a twin's."""
    manifest = follower.manifest if follower.error is None else None
    return manifest if manifest is not None and manifest.deterministic else None
