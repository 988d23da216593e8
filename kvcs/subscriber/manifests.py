"""Following the manifest track of one publication (KVCS "Manifest Track")."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvcs.errors import KvcsError, PublicationAborted, PublicationError, RequestError
from kvcs.kv import (
    MANIFEST,
    MANIFEST_COSE,
    Manifest,
    Prefix,
    PublicationNamespace,
    parse_manifest,
)
from kvcs.moqt import events
from kvcs.moqt.errors import PublishDoneCode, RequestCode
from kvcs.moqt.filters import LocationFilter
from kvcs.moqt.names import FullTrackName, TrackNamespace
from kvcs.moqt.objects import ObjectStatus
from kvcs.moqt.parameters import Parameters
from kvcs.quic.connection import Connection
from kvcs.subscriber.settings import SubscriberSettings

THREAD_OCTETS = 1 << 20
"""Manifests of more octets than this are parsed in a thread, off the event loop."""

MAX_VERSIONS_ARRIVING = 4
"""Versions that arrive side by side; the oldest is dropped for a newer one."""


class _Arriving:
    """One version on its way in; its length was only announced, so it grows with what comes."""

    __slots__ = ("group_id", "octets")

    def __init__(self, group_id: int) -> None:
        self.group_id = group_id
        self.octets = bytearray()

    def write(self, data: memoryview) -> None:
        self.octets += data


class ManifestFollower:
    """Subscribes to a publication's manifest and keeps its newest version.

    First "manifest.cose" is asked for, and "manifest" only if the publisher says that it does not
    exist (KVCS "Retrieval during Production").

    Args:
        connection: the session.
        namespace: the publication.
        prefix: the consumer's own; every version is held to it. None only reads what is there.
        settings: bounds.
        on_change: called after a new version, the end, or a failure.
    """

    def __init__(
        self,
        connection: Connection,
        namespace: TrackNamespace,
        prefix: Prefix | None,
        settings: SubscriberSettings,
        on_change: Callable[[], None],
    ) -> None:
        self.connection = connection
        self.namespace = namespace
        self.manifest: Manifest | None = None
        """Newest version that was read."""
        self.error: KvcsError | None = None
        """Why the publication cannot be used, once that is known."""
        self.ended = False
        """Whether the publisher says that no more versions come."""
        self.blocks = 0
        """Blocks of the prefix that the newest version covers; without a prefix, all of them."""
        self.versions = 0
        """Versions read."""
        self.on_manifest: Callable[[Manifest], None] | None = None
        """Takes each version, in order, from now on; what it raises fails the publication."""
        self._prefix = prefix
        self._settings = settings
        self.notify = on_change
        """Called after a new version, the end, or a failure."""
        self._newest = -1
        self._arriving: dict[int, _Arriving] = {}
        self._parsing: set[asyncio.Task[None]] = set()
        self._request_id: int | None = None
        self._starting: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin; `on_change` tells what comes of it."""
        self._starting = asyncio.get_running_loop().create_task(self._start())

    @property
    def ready(self) -> bool:
        """Whether a version has been read that covers blocks of the prefix."""
        return self.error is None and self.blocks > 0

    def stop(self) -> None:
        """Cancel the subscription and whatever is under way."""
        if self._starting is not None:
            self._starting.cancel()
        for task in self._parsing:
            task.cancel()
        self._cancel()

    def _cancel(self) -> None:
        if self._request_id is not None:
            self.connection.cancel(self._request_id)
            self._request_id = None
        self._arriving.clear()

    async def _start(self) -> None:
        try:
            try:
                await self._subscribe(MANIFEST_COSE, lambda _: None)
            except RequestError as exc:
                if exc.code != RequestCode.DOES_NOT_EXIST:
                    raise
                await self._subscribe(MANIFEST, self._take)
            else:
                raise PublicationError(
                    "the publication is signed (manifest.cose), and this consumer has no producer"
                    " keys to verify it with"
                )
        except KvcsError as exc:
            self._fail(exc)

    async def _subscribe(self, name: bytes, handler: Callable[[events.Event], None]) -> None:
        connection = self.connection
        parameters = Parameters.of(
            subscriber_priority=self._settings.subscriber_priority,
            location_filter=LocationFilter.next_object(),
            fill_parameters=Parameters.of(location_filter=LocationFilter.relative_start(1)),
        )
        connection.check_open()
        request_id = connection.core.requester.subscribe(
            FullTrackName(self.namespace, name), parameters
        )
        self._request_id = request_id
        connection.handle(request_id, handler)
        await connection.reply(request_id)

    def _fail(self, error: KvcsError) -> None:
        if self.error is None:
            self.error = error
            self._cancel()
            self.notify()

    def _take(self, event: events.Event) -> None:
        if isinstance(event, events.ObjectStarted):
            self._begin(event)
        elif isinstance(event, events.ObjectChunk):
            arriving = self._arriving.get(event.stream_id)
            if arriving is not None:
                arriving.write(event.data)
        elif isinstance(event, events.ObjectEnded):
            arriving = self._arriving.pop(event.stream_id, None)
            if arriving is not None:
                self._arrived(arriving)
        elif isinstance(event, events.DataStreamEnded):
            self._arriving.pop(event.stream_id, None)
        elif isinstance(event, events.SubscriptionEnded):
            if event.status == PublishDoneCode.TRACK_ENDED:
                self.ended = True
                self.notify()
            else:
                self._fail(PublicationAborted(event.reason))
        elif isinstance(event, events.TrackMalformed):
            self._fail(PublicationError(f"the manifest track is malformed: {event.reason}"))
        elif isinstance(event, events.SessionClosed):
            self._fail(self.connection.close_error())
        elif isinstance(event, events.RequestCancelled):
            self._fail(PublicationError("the peer ended the manifest subscription"))

    def _begin(self, event: events.ObjectStarted) -> None:
        header = event.header
        if header.status is not ObjectStatus.NORMAL or header.object_id != 0:
            return
        if header.group_id <= self._newest:
            return  # an older version, or the same again
        if header.payload_length > self._settings.manifest_limits.octets:
            self._fail(
                PublicationError(
                    f"manifest of {header.payload_length} octets, limit"
                    f" {self._settings.manifest_limits.octets}"
                )
            )
            return
        while len(self._arriving) >= MAX_VERSIONS_ARRIVING:
            oldest = min(self._arriving, key=lambda stream: self._arriving[stream].group_id)
            del self._arriving[oldest]
        self._arriving[event.stream_id] = _Arriving(header.group_id)

    def _arrived(self, arriving: _Arriving) -> None:
        if len(arriving.octets) <= THREAD_OCTETS:
            try:
                self._apply(arriving.group_id, *self._parse(arriving.octets))
            except KvcsError as exc:
                self._fail(exc)
            return
        task = asyncio.get_running_loop().create_task(self._parse_in_thread(arriving))
        self._parsing.add(task)
        task.add_done_callback(self._parsing.discard)

    async def _parse_in_thread(self, arriving: _Arriving) -> None:
        try:
            parsed = await asyncio.to_thread(self._parse, arriving.octets)
            self._apply(arriving.group_id, *parsed)
        except KvcsError as exc:
            self._fail(exc)

    def _parse(self, octets: bytearray) -> tuple[Manifest, int]:
        """Read a version and hold it to the prefix; returns it and the blocks that it covers."""
        manifest = parse_manifest(octets, self._settings.manifest_limits)
        if self._prefix is None:
            return manifest, manifest.blocks
        manifest.check_identity(self._prefix)
        if PublicationNamespace.parse(self.namespace).compat_id != self._prefix.compat_id:
            raise PublicationError(
                "manifest: compat has another Compatibility ID than the namespace"
            )
        entries = manifest.covering(self._prefix)
        if manifest.segments and not entries:
            raise PublicationError(
                f"manifest: segment 0 has {manifest.segments[0].blocks} blocks, the prefix has"
                f" {self._prefix.blocks}; nothing of it can be checked against our Block Keys"
            )
        return manifest, sum(entry.blocks for entry in entries)

    def _apply(self, group_id: int, manifest: Manifest, blocks: int) -> None:
        if group_id <= self._newest or self.error is not None:
            return  # a newer version was quicker
        self._newest = group_id
        self.manifest = manifest
        self.blocks = blocks
        self.versions += 1
        if self.on_manifest is not None:
            self.on_manifest(manifest)
        self.notify()
