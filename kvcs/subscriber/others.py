"""Other publications of the same prefix, and what of them may stand for ours.

KVCS "Verification and Recovery": Objects of different publications are combined within a segment
only where both manifests say "deterministic": true. Whole segments may be another's in any case.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast
from weakref import WeakKeyDictionary

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


@dataclass(frozen=True, slots=True)
class Other:
    """Another publication of the prefix, as its manifest was read."""

    namespace: PublicationNamespace
    """Its name."""

    manifest: Manifest
    """The newest version, held to the prefix."""

    is_signed: bool
    """Whether a signature that counts here was verified."""


MAX_TWINS = 4
"""Publications beside the one that is retrieved whose manifests are read at one place, and at a
time."""


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


class Others:
    """Looks for other publications of the prefix at the places where ours lacks something.

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
        self.protection = authenticity.protection
        """Opens what is sealed."""
        self._known: WeakKeyDictionary[object, tuple[float, list[Other]]] = WeakKeyDictionary()
        """For each place what is there, and when it was looked."""
        self._looks = 0

    @property
    def looking(self) -> bool:
        """Whether a session is being asked which there are."""
        return self._looks > 0

    def known(self) -> list[Other]:
        """Those that the last look at each place has found."""
        return [other for _, others in self._known.values() for other in others]

    def let_down(self, namespace: TrackNamespace) -> None:
        """A publication did not bring what it should."""
        self._authenticity.let_down(namespace)

    async def over(self, session: Connection, ours: TrackNamespace) -> list[Other]:
        """Those that a session leads to; looked for anew once some time has passed."""
        known = self._lately(session)
        if known is not None:
            return known
        self._looks += 1
        try:
            return self._note(session, await self._over(session, ours))
        finally:
            self._looks -= 1

    async def at(self, source: BlockSource, ours: PublicationNamespace) -> list[Other]:
        """Those that a source has; it was entered.

        Raises:
            SourceFailed: it cannot be asked.
        """
        known = self._lately(source)
        if known is not None:
            return known
        listed = await source.publications(*ours[:3])
        others = [each for each in listed if each != ours][:MAX_TWINS]
        read = await asyncio.gather(*(self._read_at(source, each) for each in others))
        return self._note(source, [each for each in read if each is not None])

    def _lately(self, place: object) -> list[Other] | None:
        looked_at, known = self._known.get(place, (0.0, None))
        now = asyncio.get_running_loop().time()
        return known if now < looked_at + self._settings.quiet else None

    def _note(self, place: object, others: list[Other]) -> list[Other]:
        self._known[place] = (asyncio.get_running_loop().time(), others)
        return others

    async def _over(self, session: Connection, ours: TrackNamespace) -> list[Other]:
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
        # The newest ones: those before them are more often left over from producers that died.
        others = [each for each in found if each.fields != ours][-MAX_TWINS:]
        read = await asyncio.gather(*(self._read(session, each) for each in others))
        return [each for each in read if each is not None]

    async def _read(self, session: Connection, namespace: PublicationNamespace) -> Other | None:
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

    async def _read_at(self, source: BlockSource, namespace: PublicationNamespace) -> Other | None:
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


def _read_by(follower: ManifestFollower) -> Other | None:
    """What was read, if it may be used at all."""
    manifest = follower.manifest if follower.error is None else None
    if manifest is None:
        return None
    namespace = PublicationNamespace.parse(follower.namespace)
    return Other(namespace, manifest, follower.signed is not None)


def twins(manifest: Manifest, others: Iterable[Other]) -> list[PublicationNamespace]:
    """Those of them whose Objects are the very same octets; which these are, the newest manifest of
    the publication that is retrieved says each time: an equal first segment may go on otherwise."""
    return [other.namespace for other in others if are_twins(manifest, other.manifest)]


def same_segment(ours: Manifest, theirs: Manifest, number: int) -> bool:
    """Whether another publication has a whole segment of just the same tokens."""
    return same_tokens(ours, theirs, number) and theirs.segments[number].complete


def same_tokens(ours: Manifest, theirs: Manifest, number: int) -> bool:
    """Whether a segment of another publication has, or will have, just the same tokens."""
    if number >= min(len(ours.segments), len(theirs.segments)):
        return False
    mine, other = ours.segments[number], theirs.segments[number]
    return (mine.first_block, mine.blocks, mine.block_keys_sha256) == (
        other.first_block,
        other.blocks,
        other.block_keys_sha256,
    )
