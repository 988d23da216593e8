"""The manifest track of one publication: its versions, signed, sealed, both or neither (KVCS
"Manifest Track")."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvcs.kv import (
    MANIFEST,
    MANIFEST_COSE,
    ManifestCadence,
    ManifestWriter,
    PublicationNamespace,
    sign_manifest,
)
from kvcs.kv.protection import Sealer
from kvcs.moqt.names import Location
from kvcs.moqt.objects import ObjectHeader, ObjectStatus
from kvcs.moqt.track.store import Track
from kvcs.trust import SigningKey

Parts = tuple[memoryview, ...]

MANIFEST_PRIORITY = 0
"""Publisher Priority of the manifest track (KVCS "Objects")."""

THREAD_OCTETS = 1 << 20
"""Versions of more octets than this are signed and sealed in a thread, off the event loop."""

Done = Callable[[], None]
"""Called when a version is published."""


class ManifestTrack:
    """Makes versions of a publication's manifest and puts them on its one manifest track.

    Args:
        new_track: makes a Track of the publication by its name.
        namespace: the publication.
        writer: the manifest as it grows.
        cadence: when a version is due.
        sign: the producer's key; without one the track is "manifest".
        sealer: makes what seals the Objects of a track; without one they are not protected.
    """

    def __init__(
        self,
        new_track: Callable[[bytes], Track],
        namespace: PublicationNamespace,
        writer: ManifestWriter,
        cadence: ManifestCadence,
        sign: SigningKey | None,
        sealer: Callable[[bytes], Sealer] | None = None,
    ) -> None:
        self.track = new_track(MANIFEST if sign is None else MANIFEST_COSE)
        """The Track; a publication has exactly one for its manifest."""
        self.versions = 0
        """Versions so far."""
        self._namespace = namespace
        self._writer = writer
        self._cadence = cadence
        self._sign = sign
        self._sealer = None if sealer is None else sealer(self.track.name.name)
        self._octets = 0
        self._published_at = 0.0
        self._making: asyncio.Task[None] | None = None
        self._next: tuple[bytes, float] | None = None
        """JSON of the newest version that waits to be signed or sealed, and when it was made."""
        self._waiting: list[Done] = []

    def due(self, *, completed: int, listed: int, now: float) -> bool:
        """Whether a layer that completed makes a version due.

        Args:
            completed: layers of its segment that are complete.
            listed: how many of them the last version listed.
            now: the loop's clock, seconds.
        """
        return self._cadence.due(
            layers_completed=completed,
            layers_listed=listed,
            # With the padding: when versions come would tell what is real, too.
            next_octets=self._writer.octets + self._writer.padding_octets,
            total_octets=self._octets,
            seconds_since_last=now - self._published_at,
        )

    def publish(self, now: float, done: Done = lambda: None) -> None:
        """One more version: Object 0 of the next Group.

        A large one is signed and sealed in a thread and published a little later. Versions that
        come meanwhile are merged: each says all that the former ones do.

        Args:
            now: the loop's clock, seconds.
            done: called once it, or a later one, is published; never where `stop` comes before.
        """
        if self._sign is None and self._sealer is None:
            self._put(tuple(memoryview(part) for part in self._writer.parts()), now)
            done()
            return
        # White space for the lists that padding has not: the size would tell what is real.
        payload = self._writer.to_json_bytes() + b" " * self._writer.padding_octets
        if self._making is None and len(payload) <= THREAD_OCTETS:
            self._put(self._made(payload), now)
            done()
            return
        self._next = (payload, now)
        self._waiting.append(done)
        if self._making is None:
            self._making = asyncio.get_running_loop().create_task(self._make_all())

    async def settled(self) -> None:
        """Wait until every version that was made is published."""
        making = self._making
        if making is not None:
            # Not awaited itself: neither end would then know whom a cancellation was meant for.
            await asyncio.wait((making,))
            if not making.cancelled():
                making.result()

    def stop(self) -> None:
        """Publish nothing more."""
        self._next = None
        self._waiting.clear()
        if self._making is not None:
            self._making.cancel()
            self._making = None

    # Inner workings

    async def _make_all(self) -> None:
        while self._next is not None:
            (payload, now), self._next = self._next, None
            waiting, self._waiting = self._waiting, []
            self._put(await asyncio.to_thread(self._made, payload), now)
            for done in waiting:
                done()
        self._making = None

    def _made(self, payload: bytes) -> Parts:
        """The next version, signed first and sealed then."""
        if self._sign is not None:
            payload = sign_manifest(payload, self._sign, self._namespace, self.versions)
        if self._sealer is None:
            return (memoryview(payload),)
        return (self._sealer.seal(Location(self.versions, 0), MANIFEST_PRIORITY, [payload]),)

    def _put(self, parts: Parts, now: float) -> None:
        group_id, octets = self.versions, sum(map(len, parts))
        properties = b"" if self._sealer is None else self._sealer.properties
        header = ObjectHeader(
            group_id, 0, 0, MANIFEST_PRIORITY, ObjectStatus.NORMAL, properties, octets
        )
        self.track.publish(header, parts, now, end_of_group=True)
        self.track.finish_subgroup(group_id, 0)
        self.versions += 1
        self._octets += octets
        self._published_at = now
