"""Following the manifest track of one publication (KVCS "Manifest Track")."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvcs.errors import (
    KvcsError,
    NotAuthentic,
    ObjectError,
    PublicationAborted,
    PublicationError,
    Redirected,
    RequestError,
)
from kvcs.kv import (
    MANIFEST,
    MANIFEST_COSE,
    Manifest,
    Prefix,
    PublicationNamespace,
    SegmentEntry,
    SignedVersion,
    check_lists,
    look_at_signed,
    max_signed_octets,
    parse_manifest,
)
from kvcs.moqt import events
from kvcs.moqt.errors import PublishDoneCode, RequestCode, StreamCode
from kvcs.moqt.filters import LocationFilter
from kvcs.moqt.messages import SubscribeOk
from kvcs.moqt.names import FullTrackName, TrackNamespace
from kvcs.moqt.objects import ObjectStatus
from kvcs.moqt.parameters import Parameters
from kvcs.moqt.track.stored import DEFAULT_PRIORITY
from kvcs.quic.chance import new_chance
from kvcs.quic.connection import Connection
from kvcs.quic.reconnect import retry_seconds
from kvcs.subscriber.authenticity import Authenticity
from kvcs.subscriber.coverage import Coverage, Holding
from kvcs.subscriber.lost_versions import LostVersions
from kvcs.subscriber.protection import default_priority
from kvcs.subscriber.requests import follow
from kvcs.subscriber.settings import SubscriberSettings
from kvcs.subscriber.versions import Arriving, Parsed

THREAD_OCTETS = 1 << 20
"""Manifests of more octets than this are parsed in a thread, off the event loop."""

MAX_TRIES = 8
"""Subscriptions that are made because a peer asks for a retry, or sends elsewhere."""

RENDEZVOUS_SECONDS = 5.0
"""How long a relay should wait for a publisher that was there a moment ago."""

MAX_VERSIONS_ARRIVING = 4
"""Versions that arrive side by side; the oldest is dropped for a newer one."""


class ManifestFollower:
    """Subscribes to a publication's manifest and keeps its newest version.

    First "manifest.cose" is asked for, and "manifest" only if the publisher says that it does not
    exist and nobody requires a signature (KVCS "Retrieval during Production").

    Args:
        connection: the session.
        namespace: the publication.
        prefix: the consumer's own; every version is held to it. None only reads what is there.
        settings: bounds.
        on_change: called after a new version, the end, or a failure.
        authenticity: whose signature counts, and whether one is needed.
        look: read a signed manifest without verifying it: to show it, never to use it.
        holding: what an index says of the publication.
    """

    def __init__(
        self,
        connection: Connection,
        namespace: TrackNamespace,
        prefix: Prefix | None,
        settings: SubscriberSettings,
        on_change: Callable[[], None],
        *,
        authenticity: Authenticity,
        look: bool = False,
        holding: Holding | None = None,
    ) -> None:
        self.connection = connection
        self.namespace = namespace
        self.manifest: Manifest | None = None
        """Newest version that was read."""
        self.error: KvcsError | None = None
        """Why the publication cannot be used, once that is known."""
        self.ended = False
        """Whether the publisher says that no more versions come."""
        self.accepted = False
        """Whether the peer has accepted the subscription."""
        self.sent_away: str | None = None
        """The peer wants it made elsewhere: the URI, or empty for anew on the same session."""
        self.adopted = False
        """Whether whoever uses it looks at `sent_away`; until then it asks anew by itself."""
        self.blocks = 0
        """Blocks of the prefix that the newest version covers; without a prefix, all of them."""
        self.versions = 0
        """Versions read."""
        self.signed: SignedVersion | None = None
        """The newest version as it was signed; None where it is not."""
        self.doubt: NotAuthentic | None = None
        """Why a signed version that is only looked at was not verified."""
        self.on_manifest: Callable[[Manifest], None] | None = None
        """Takes each version, in order, from now on; what it raises fails the publication."""
        self.is_final = False
        """Whether later versions can cover no more of the prefix."""
        self.coverage = None if prefix is None else Coverage(prefix, holding)
        """Holds versions to the prefix."""
        self._prefix = prefix
        self._settings = settings
        self._authenticity = authenticity
        self._look = look
        self._is_signed = True
        self._judge = authenticity.judge(namespace)
        self.notify = on_change
        """Called after a new version, the end, or a failure."""
        self._newest = -1
        self._default_priority = DEFAULT_PRIORITY
        self._arriving: dict[int, Arriving] = {}
        self._parsing: asyncio.Task[None] | None = None
        self._unread: Arriving | None = None
        """The newest version that waits until the one before it was read in its thread."""
        self._request_id: int | None = None
        self._name: bytes | None = None
        """The track, once it is known which of the two the publication has."""
        self._asked = MANIFEST
        self._rendezvous = 0.0
        self._restarts = 0
        self._chance = new_chance()
        self._lost = LostVersions(self, settings)
        self._starting: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin; `on_change` tells what comes of it."""
        self._starting = asyncio.get_running_loop().create_task(self._start())

    def use(self, name: bytes) -> None:
        """Take versions that come another way; stays what it was, and raises `NotAuthentic`, if
        they do not count here: who gives them must not choose whether they are verified."""
        signed = name == MANIFEST_COSE
        (self._authenticity.check_keys if signed else self._authenticity.check_unsigned)()
        if self.versions and signed is not self._is_signed:
            raise NotAuthentic("a publication has one manifest, signed or not", check="unsigned")
        self._asked, self._name, self._is_signed, self.error = name, name, signed, None

    def on_another_session(
        self, connection: Connection, rendezvous: float, on_change: Callable[[], None]
    ) -> ManifestFollower:
        """One that goes on where this one is, over another session; not started.

        Args:
            connection: the other session.
            rendezvous: seconds that a relay there should wait for the publisher.
            on_change: as for a new one.
        """
        other = ManifestFollower(
            connection,
            self.namespace,
            self._prefix,
            self._settings,
            on_change,
            authenticity=self._authenticity,
            look=self._look,
        )
        other.manifest, other.blocks, other.versions = self.manifest, self.blocks, self.versions
        other.coverage, other.is_final = self.coverage, self.is_final
        other.on_manifest = self.on_manifest
        other.ended, other._newest, other._name = self.ended, self._newest, self._name
        other._rendezvous = rendezvous
        other.signed, other._is_signed, other._judge = self.signed, self._is_signed, self._judge
        return other

    @property
    def ready(self) -> bool:
        """Whether a version has been read that covers blocks of the prefix."""
        return self.error is None and self.blocks > 0

    def stop(self) -> None:
        """Cancel the subscription and whatever is under way."""
        if self._starting is not None:
            self._starting.cancel()
        if self._parsing is not None:
            self._parsing.cancel()
        self._cancel()

    @property
    def full_track_name(self) -> FullTrackName:
        """The manifest track that was subscribed to last."""
        return FullTrackName(self.namespace, self._asked)

    @property
    def newest(self) -> int:
        """Group of the newest version that was read; -1 before the first."""
        return self._newest

    @property
    def wants_more(self) -> bool:
        """Whether it has not failed."""
        return self.error is None

    async def parsed(self) -> None:
        """Wait until every version that has arrived was read."""
        if self._parsing is not None:
            await asyncio.wait((self._parsing,))

    def take(self, event: events.Event) -> None:
        """One event of a request of the manifest track."""
        self._take(event)

    def _cancel(self) -> None:
        self._lost.stop()
        if self._request_id is not None:
            self.connection.cancel(self._request_id)
            self._request_id = None
        self._arriving.clear()

    async def _start(self) -> None:
        try:
            if self._name is not None:
                await self._subscribe(self._name, self._follow)
            else:
                self._name = await self._find()
            self.accepted = True
            self.notify()
        except KvcsError as exc:
            self._fail(exc)

    async def _find(self) -> bytes:
        """Subscribe to whichever of the two manifest tracks the publication has.

        Raises:
            KvcsError: neither can be had, or what there is does not count here.
        """
        usable = self._look or self._authenticity.keys is not None
        try:
            await self._subscribe(MANIFEST_COSE, self._follow if usable else _drop)
        except RequestError as exc:
            if exc.code != RequestCode.DOES_NOT_EXIST:
                raise
            self._authenticity.check_unsigned()
            self._is_signed = False
            await self._subscribe(MANIFEST, self._follow)
            return MANIFEST
        if not usable:
            self._authenticity.check_keys()
        return MANIFEST_COSE

    async def _subscribe(self, name: bytes, handler: Callable[[events.Event], None]) -> None:
        parameters = Parameters.of(
            subscriber_priority=self._settings.subscriber_priority,
            location_filter=LocationFilter.next_object(),
            fill_parameters=Parameters.of(location_filter=LocationFilter.relative_start(1)),
        )
        if self._rendezvous:
            parameters = parameters.replace(rendezvous_timeout=round(self._rendezvous * 1000))
        self._asked = name
        full_track_name = self.full_track_name
        tries = 0
        while True:
            connection = self.connection
            connection.check_open()
            request_id = connection.core.requester.subscribe(full_track_name, parameters)
            self._request_id = request_id
            connection.handle(request_id, handler)
            tries += 1
            try:
                await connection.reply(request_id)
                return
            except Redirected as exc:
                if tries >= MAX_TRIES:
                    raise
                self.connection = await follow(exc, connection, full_track_name)
            except RequestError as exc:
                if exc.retry_after_ms is None or tries >= MAX_TRIES:
                    raise
                await asyncio.sleep(retry_seconds(exc.retry_after_ms, self._chance))

    def _fail(self, error: KvcsError) -> None:
        if self.error is None:
            self.error = error
            if isinstance(error, NotAuthentic):
                self._authenticity.note(error)
            self._cancel()
            self.notify()

    def _follow(self, event: events.Event) -> None:
        """One event of the subscription."""
        self._take(event)
        self._lost.note(event)

    def _take(self, event: events.Event) -> None:
        if isinstance(event, events.ObjectsReceived):
            for single in event.singles():
                self._take(single)
            return
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
        elif isinstance(event, events.RequestAccepted):
            if isinstance(event.reply, SubscribeOk):
                self._default_priority = default_priority(event.reply)
        elif isinstance(event, events.SubscriptionEnded):
            if event.status == PublishDoneCode.TRACK_ENDED:
                self.ended = True
                self.notify()
            elif event.status == PublishDoneCode.GOING_AWAY:
                self._leave("")
            elif event.status == PublishDoneCode.UNAUTHORIZED:
                self._fail(RequestError(event.reason, RequestCode.UNAUTHORIZED))
            else:
                self._fail(PublicationAborted(event.reason))
        elif isinstance(event, events.TrackMalformed):
            self._fail(PublicationError(f"the manifest track is malformed: {event.reason}"))
        elif isinstance(event, events.SessionClosed):
            self._fail(self.connection.close_error())
        elif isinstance(event, events.RequestCancelled):
            if event.code == StreamCode.GOING_AWAY:
                self._leave("")
            else:
                self._fail(PublicationError("the peer ended the manifest subscription"))
        elif isinstance(event, events.GoawayReceived):
            self._leave(event.new_session_uri)

    def _leave(self, uri: str) -> None:
        """The peer wants the subscription made elsewhere, or anew."""
        if self.adopted:
            self.sent_away = uri
            self.notify()
            return
        self._restarts += 1
        if self._restarts > MAX_TRIES:
            self._fail(RequestError("the publisher went away", RequestCode.GOING_AWAY))
            return
        if self._starting is not None:
            self._starting.cancel()
        self._cancel()
        self._rendezvous = RENDEZVOUS_SECONDS
        self.start()

    def _begin(self, event: events.ObjectStarted) -> None:
        header = event.header
        if header.status is not ObjectStatus.NORMAL or header.object_id != 0:
            return
        if header.group_id <= self._newest:
            return  # an older version, or the same again
        limit = self._authenticity.protection.longest(self._limit)
        if header.payload_length > limit:
            self._fail(
                PublicationError(f"manifest of {header.payload_length} octets, limit {limit}")
            )
            return
        while len(self._arriving) >= MAX_VERSIONS_ARRIVING:
            oldest = min(self._arriving, key=lambda stream: self._arriving[stream].group_id)
            del self._arriving[oldest]
        self._arriving[event.stream_id] = Arriving(header)

    @property
    def _limit(self) -> int:
        """Longest version, opened."""
        octets = self._settings.manifest_limits.octets
        return max_signed_octets(octets) if self._is_signed else octets

    def _arrived(self, arriving: Arriving) -> None:
        if len(arriving.octets) <= THREAD_OCTETS:
            try:
                self._apply(self._parse(arriving))
            except ObjectError as exc:
                self._dropped(arriving, exc)
            except KvcsError as exc:
                self._fail(exc)
            return
        if self._unread is None or arriving.group_id > self._unread.group_id:
            self._unread = arriving
        if self._parsing is None:
            self._parsing = asyncio.get_running_loop().create_task(self._parse_in_thread())

    async def _parse_in_thread(self) -> None:
        """Read what waits, one at a time: a peer may send versions faster than they are read."""
        try:
            while (arriving := self._unread) is not None and self.error is None:
                self._unread = None
                try:
                    self._apply(await asyncio.to_thread(self._parse, arriving))
                except ObjectError as exc:
                    self._dropped(arriving, exc)
                except KvcsError as exc:
                    self._fail(exc)
        finally:
            self._parsing = None

    def _dropped(self, arriving: Arriving, error: ObjectError) -> None:
        """A version did not open; it is as if it had not come, unless our keys do not fit."""
        protection = self._authenticity.protection
        fatal = protection.dropped(arriving.header, error, first=self.versions == 0)
        if fatal is not None:
            self._fail(fatal)

    def _parse(self, arriving: Arriving) -> Parsed:
        """Open a version, verify it, read it and hold it to the prefix."""
        signed, payload = None, memoryview(arriving.octets)
        payload = self._authenticity.protection.open_manifest(
            self.full_track_name, arriving.header, self._default_priority, payload
        )
        if self._is_signed:
            signed = self._open_signed(payload, arriving.group_id)
            payload = memoryview(signed.payload)
        manifest = parse_manifest(payload, self._settings.manifest_limits)
        if signed is not None and signed.key is not None:
            check_lists(manifest)
        blocks, final = self._covered(manifest)
        return Parsed(arriving.group_id, manifest, blocks, signed, final)

    def _open_signed(self, octets: memoryview, version: int) -> SignedVersion:
        judge = self._judge
        if judge is None:
            return look_at_signed(octets, version, max_octets=self._limit)
        try:
            now = self._authenticity.clock()
            return judge.verify(octets, version, now, max_octets=self._limit)
        except NotAuthentic as exc:
            if not self._look:
                raise
            self.doubt = exc
            return look_at_signed(octets, version, max_octets=self._limit)

    def covering(self, manifest: Manifest) -> tuple[SegmentEntry, ...]:
        """Leading segments that hold blocks of the prefix."""
        assert self.coverage is not None  # whoever retrieves has a prefix
        return self.coverage.entries(manifest)

    def _covered(self, manifest: Manifest) -> tuple[int, bool]:
        """Blocks that a version covers of the prefix, and whether no later one covers more; its
        own blocks where there is no prefix."""
        if self._prefix is None or self.coverage is None:
            return manifest.blocks, False
        manifest.check_identity(self._prefix)
        if PublicationNamespace.parse(self.namespace).compat_id != self._prefix.compat_id:
            raise PublicationError(
                "manifest: compat has another Compatibility ID than the namespace"
            )
        entries = self.coverage.entries(manifest)
        if manifest.segments and not entries:
            raise PublicationError(
                f"manifest: segment 0 has {manifest.segments[0].blocks} blocks, the prefix has"
                f" {self._prefix.blocks}; nothing of it can be checked against our Block Keys:"
                " block_keys_sha256 covers whole segments"
            )
        return self.coverage.covered(entries), self.coverage.is_final(manifest, entries)

    def _apply(self, parsed: Parsed) -> None:
        if parsed.group_id <= self._newest or self.error is not None:
            return  # a newer version was quicker
        if parsed.signed is not None and parsed.signed.key is not None and self._judge is not None:
            self._judge.accept(parsed.signed, parsed.manifest)
        self._newest = parsed.group_id
        self.signed = parsed.signed
        self.manifest = parsed.manifest
        self.blocks = parsed.blocks
        self.is_final = parsed.is_final
        self.versions += 1
        if self.on_manifest is not None:
            self.on_manifest(parsed.manifest)
        self.notify()


def _drop(event: events.Event) -> None:
    """Events of a manifest that cannot be verified."""
