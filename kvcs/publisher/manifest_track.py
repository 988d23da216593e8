"""The manifest track of one publication: its versions, signed or not (KVCS "Manifest Track")."""

from __future__ import annotations

from collections.abc import Callable

from kvcs.kv import (
    MANIFEST,
    MANIFEST_COSE,
    ManifestCadence,
    ManifestWriter,
    PublicationNamespace,
    sign_manifest,
)
from kvcs.moqt.objects import ObjectHeader, ObjectStatus
from kvcs.moqt.store import Track
from kvcs.trust import SigningKey

MANIFEST_PRIORITY = 0
"""Publisher Priority of the manifest track (KVCS "Objects")."""


class ManifestTrack:
    """Makes versions of a publication's manifest and puts them on its one manifest track.

    Args:
        new_track: makes a Track of the publication by its name.
        namespace: the publication.
        writer: the manifest as it grows.
        cadence: when a version is due.
        sign: the producer's key; without one the track is "manifest".
    """

    def __init__(
        self,
        new_track: Callable[[bytes], Track],
        namespace: PublicationNamespace,
        writer: ManifestWriter,
        cadence: ManifestCadence,
        sign: SigningKey | None,
    ) -> None:
        self.track = new_track(MANIFEST if sign is None else MANIFEST_COSE)
        """The Track; a publication has exactly one for its manifest."""
        self.versions = 0
        """Versions so far."""
        self._namespace = namespace
        self._writer = writer
        self._cadence = cadence
        self._sign = sign
        self._octets = 0
        self._published_at = 0.0

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
            next_octets=self._writer.octets,
            total_octets=self._octets,
            seconds_since_last=now - self._published_at,
        )

    def publish(self, now: float) -> None:
        """One more version: Object 0 of the next Group."""
        group_id = self.versions
        if self._sign is None:
            parts = tuple(memoryview(part) for part in self._writer.parts())
        else:
            payload = self._writer.to_json_bytes()
            parts = (memoryview(sign_manifest(payload, self._sign, self._namespace, group_id)),)
        octets = sum(map(len, parts))
        header = ObjectHeader(group_id, 0, 0, MANIFEST_PRIORITY, ObjectStatus.NORMAL, b"", octets)
        self.track.publish(header, parts, now, end_of_group=True)
        self.track.finish_subgroup(group_id, 0)
        self.versions += 1
        self._octets += octets
        self._published_at = now
