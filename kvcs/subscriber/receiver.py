"""Takes the events of one data track's requests into the ledger (KVCS "Object Payload")."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from kvcs.errors import (
    KvcsError,
    ObjectError,
    PublicationAborted,
    PublicationError,
    RequestError,
)
from kvcs.kv import DataTrack, Ledger, Slot
from kvcs.kv.rows import Lane
from kvcs.kv.slots import Outcome
from kvcs.kv.unsealing import QUIET_CHECKS, SealedLane, SealedSlot
from kvcs.moqt import events
from kvcs.moqt.data import FetchHeader, SubgroupHeader
from kvcs.moqt.errors import PublishDoneCode, StreamCode
from kvcs.moqt.incoming.expected import as_items
from kvcs.moqt.intervals import EVERYTHING, FIRST, Span, following
from kvcs.moqt.messages import SubscribeOk
from kvcs.moqt.names import MAX_VI64, Location
from kvcs.moqt.objects import (
    Item,
    ObjectChunk,
    ObjectEnded,
    ObjectHeader,
    ObjectStarted,
    ObjectStatus,
    RangeKind,
    RangeMarked,
)
from kvcs.moqt.parameters import ParameterType
from kvcs.moqt.track.stored import DEFAULT_PRIORITY
from kvcs.observe import get_logger
from kvcs.quic.connection import Connection
from kvcs.quic.replies import refusal
from kvcs.recovery import FetchEnd
from kvcs.subscriber.protection import default_priority, immutable_properties

_log = get_logger("kvcs.subscriber")


class Taker(Protocol):
    """What a receiver tells the cache."""

    def verified(self) -> None:
        """Objects were verified; a layer may be whole now."""

    def lost(self, track: DataTrack, span: Span, reason: str, *, late: bool = False) -> None:
        """What is missing of the span does not come of itself: it is owed again.

        Args:
            track: the data track.
            span: where.
            reason: why, for people.
            late: whether the peer has it, and gave it up only because we took it too slowly.
        """

    def dropped(self, track: DataTrack, reason: str) -> None:
        """The peer serves the subscription no longer, though the track goes on."""

    def sent_away(self, uri: str) -> None:
        """The peer wants a request made elsewhere, or anew where ``uri`` is empty (§9.2)."""

    def refused(self, track: DataTrack, error: RequestError) -> bool:
        """The peer refused the subscription; whether another one will be made."""

    def track_changed(self, track: DataTrack) -> None:
        """`TrackReceiver.filled` or `TrackReceiver.over` was set: look what lacks."""

    def failed(self, error: KvcsError) -> None:
        """The publication cannot be used any more."""


@dataclass(slots=True)
class _Stream:
    """One open stream of the track."""

    request_id: int
    header: SubgroupHeader | FetchHeader
    slot: Slot | SealedSlot | None = None
    """Takes the Object that is on its way."""

    passed: Location | None = None
    """Last Object that began, or end of the last range that was marked."""

    @property
    def behind(self) -> Location:
        """The first Location that did not come."""
        if self.slot is not None:
            return self.slot.location
        return FIRST if self.passed is None else following(self.passed) or self.passed

    def drop(self) -> None:
        """Give up the Object that is on its way."""
        if self.slot is not None:
            self.slot.abandon()
            self.slot = None


class TrackReceiver:
    """Receives one data track, by subscription, fill or fetch.

    Args:
        connection: the session.
        ledger: where Objects go.
        track: the data track.
        taker: the cache.
    """

    def __init__(
        self, connection: Connection, ledger: Ledger, track: DataTrack, taker: Taker
    ) -> None:
        self.track = track
        self.filled = False
        """Whether all that was published before the subscription has come, or there was nothing:
        only live Objects are to come."""
        self.over = False
        """Whether nothing more comes of itself, live Objects included."""
        self.octets = 0
        """Payload octets so far."""
        self.taken = 0
        """Objects so far that were not copies of what was there."""
        self._connection = connection
        self._ledger = ledger
        self._lane: Lane | None = None
        self._sealed: SealedLane | None = None
        self._taker = taker
        self._largest: Location | None = None
        self._default_priority = DEFAULT_PRIORITY
        self._streams: dict[int, _Stream] = {}
        self._too_slow = False
        """Whether the peer has ended the subscription because we do not keep up."""
        self._silent: set[Location] = set()
        """Objects of the selection that did not open."""

    @property
    def open_streams(self) -> int:
        """Streams that may still bring something."""
        return len(self._streams)

    def take(self, event: events.Event, on_fetch_end: FetchEnd | None = None) -> None:
        """One event of a request of this track.

        Args:
            event: what happened.
            on_fetch_end: for a FETCH: told once how it ended.
        """
        try:
            self._take(event, on_fetch_end)
        except PublicationError as exc:
            self._taker.failed(exc)

    def take_items(self, stream_id: int, items: list[Item]) -> None:
        """What came on one of the track's streams; see `kvcs.moqt.incoming.expected.ObjectSink`."""
        stream = self._streams.get(stream_id)
        if stream is None:
            return  # it was dropped
        try:
            self._take_items(stream, items)
        except PublicationError as exc:
            self._taker.failed(exc)

    def take_payload(self, stream_id: int, data: bytes) -> None:
        """Octets of the Object that is on its way on one of the track's streams."""
        stream = self._streams.get(stream_id)
        if stream is not None:
            self.octets += len(data)
            if stream.slot is not None:
                stream.slot.write(data)

    def take_run(
        self,
        stream_id: int,
        like: ObjectHeader,
        first: Location,
        data: bytes | memoryview,
        stop: int,
        lead: int,
        count: int,
    ) -> None:
        """The end of one Object and the next ones like it on one of the track's streams."""
        stream = self._streams.get(stream_id)
        if stream is None:
            return
        slot, octets, begun = stream.slot, memoryview(data), 0
        try:
            if type(slot) is Slot:
                begun = self._ledger.go_on(slot, first, octets, stop, lead, count)
            elif type(slot) is SealedSlot and (unsealer := self._ledger.unsealer) is not None:
                begun = unsealer.go_on(slot, first, octets, stop, lead, count)
            if begun and slot is not None:
                # No layer became whole: the last Object that began belongs to it.
                stream.passed, length = slot.location, slot.payload_length
                at = stop + begun * (lead + length) - length + slot.received
                self.octets += at - begun * lead
                self.taken += begun
                if at == len(octets):
                    self._taker.verified()
                    return
                first, count = Location(first.group, first.object + begun), count - begun
                octets, stop = octets[at:], length - slot.received
            if type(slot) is SealedSlot:
                self._follow_sealed(stream, slot, first, octets, stop, lead, count)
                return
            self._take_items(stream, as_items(like, first, octets, stop, lead, count))
        except PublicationError as exc:
            self._taker.failed(exc)

    def drop(self) -> None:
        """Give up what is on its way: nothing more comes over this session."""
        for stream in self._streams.values():
            stream.drop()
        self._streams.clear()

    def nothing_lacks(self) -> None:
        """All that is wanted of the track is there already: it is not asked for."""
        self.filled = self.over = True

    def start_again(self) -> None:
        """Another subscription of the track is about to be made."""
        self.filled = self._too_slow = False
        self._largest = None

    def end(self) -> None:
        """Nothing more comes of itself: the one request of the track is over."""
        self.over = True
        self._taker.track_changed(self.track)

    def _take(self, event: events.Event, on_fetch_end: FetchEnd | None) -> None:
        if isinstance(event, events.ObjectsReceived):
            self._take_items(self._streams[event.stream_id], event.items)
        elif isinstance(event, events.DataStreamOpened):
            self._streams[event.stream_id] = _Stream(event.request_id, event.header)
        elif isinstance(event, events.DataStreamEnded):
            self._stream_ended(event, on_fetch_end)
        elif isinstance(event, events.SubscriptionEnded):
            self._subscription_ended(event)
        elif isinstance(event, events.RequestAccepted):
            if isinstance(event.reply, SubscribeOk):
                self._subscribed(event.reply)
        elif isinstance(event, events.TrackMalformed):
            self._taker.failed(PublicationError(f"{self.track} is malformed: {event.reason}"))
        elif isinstance(event, events.SessionClosed):
            closed = self._connection.close_error()
            self._taker.failed(closed)
            if on_fetch_end is not None:
                on_fetch_end(str(closed))
        elif isinstance(event, events.RequestRefused):
            if on_fetch_end is None and self._taker.refused(self.track, refusal(event.error)):
                return
            error = event.error
            why = f"{self.track} was refused with {error.error_code:#x}: {error.reason}"
            self._request_ended(event.request_id, why, on_fetch_end, refused=True)
        elif isinstance(event, events.RequestCancelled):
            why = f"the peer ended the request of {self.track}"
            self._request_ended(event.request_id, why, on_fetch_end)
        elif isinstance(event, events.GoawayReceived):
            self._taker.sent_away(event.new_session_uri)

    def _take_items(self, stream: _Stream, items: list[Item]) -> None:
        for item in items:
            if isinstance(item, ObjectChunk):
                data = item.data
                self.octets += len(data)
                if stream.slot is not None:
                    stream.slot.write(data)
            elif isinstance(item, ObjectEnded):
                self._end(stream)
            elif isinstance(item, ObjectStarted):
                self._begin(stream, item.header)
            else:
                self._range_marked(stream, item)

    def _follow_sealed(
        self,
        stream: _Stream,
        slot: SealedSlot,
        first: Location,
        data: memoryview,
        stop: int,
        lead: int,
        count: int,
    ) -> None:
        """End one sealed Object and take the next, whose Properties and priority are the same."""
        self.octets += stop
        slot.write(data[:stop])
        self._end(stream)
        for number in range(first.object, first.object + count):
            start = stop + lead
            stop = start + slot.payload_length
            octets, location = data[start:stop], Location(first.group, number)
            stream.passed = location
            try:
                stream.slot = slot.begin_next(location)
            except ObjectError as exc:
                self._rejected(exc, location)
            self.octets += len(octets)
            if stream.slot is not None:
                stream.slot.write(octets)
            if stop <= len(data):
                self._end(stream)

    def _subscribed(self, reply: SubscribeOk) -> None:
        self._default_priority = default_priority(reply)
        self._largest = reply.parameters.get(ParameterType.LARGEST_OBJECT)
        if self._largest is None:
            self.filled = True  # nothing was published yet: no fill comes
            self._taker.track_changed(self.track)

    def _begin(self, stream: _Stream, header: ObjectHeader) -> None:
        stream.passed = header.location
        if header.status is ObjectStatus.END_OF_TRACK:
            self.end()
            return
        if header.status is ObjectStatus.END_OF_GROUP:
            self._ledger.end_of_group(self.track, header.location)
            return
        unsealer = self._ledger.unsealer
        try:
            if unsealer is None:
                lane = self._lane
                if lane is None:
                    lane = self._lane = self._ledger.lane(self.track)
                stream.slot = self._ledger.begin_on(lane, header.location, header.payload_length)
                return
            sealed = self._sealed
            if sealed is None:
                sealed = self._sealed = unsealer.lane(self.track)
            priority = header.publisher_priority
            stream.slot = unsealer.begin_on(
                sealed,
                header.location,
                header.payload_length,
                priority=self._default_priority if priority is None else priority,
                immutable=immutable_properties(header),
            )
        except ObjectError as exc:
            self._rejected(exc, header.location)

    def _end(self, stream: _Stream) -> None:
        slot, stream.slot = stream.slot, None
        if slot is None:
            return
        try:
            outcome = slot.finish()
        except ObjectError as exc:
            self._rejected(exc, slot.location)
        else:
            self.taken += outcome is not Outcome.DUPLICATE
            self._taker.verified()

    def _rejected(self, error: ObjectError, location: Location) -> None:
        _log.warning("object_rejected", track=str(self.track), check=error.check, why=str(error))
        if error.check in QUIET_CHECKS:
            # Asked for at once, it would show a relay which forgeries fail. It is missed like a
            # lost one: when the track ends or falls silent.
            self._silent.add(location)
            return
        reason = f"an object failed its {error.check} check"
        self._taker.lost(self.track, Span(location, location), reason)

    def _range_marked(self, stream: _Stream, marked: RangeMarked) -> None:
        span = Span(stream.behind, marked.location)
        stream.passed = marked.location
        if marked.kind is not RangeKind.NON_EXISTENT:
            self._taker.lost(self.track, span, f"a range was marked {marked.kind.name}")

    def _stream_ended(self, event: events.DataStreamEnded, on_fetch_end: FetchEnd | None) -> None:
        stream = self._streams.pop(event.stream_id)
        behind = stream.behind
        stream.drop()
        code = event.reset_code
        failure = None if code is None else f"a stream was reset with code {code:#x}"
        if on_fetch_end is not None:
            on_fetch_end(failure)
        elif isinstance(stream.header, FetchHeader):
            self._fill_ended(behind, failure)
        else:
            self._subgroup_ended(stream.header, failure, code == StreamCode.TOO_FAR_BEHIND)

    def _fill_ended(self, behind: Location, failure: str | None) -> None:
        # A fill holds all that was published before the subscription; what it left out is lost.
        self.filled = True
        if self._largest is not None:
            span = Span(FIRST if failure is None else behind, self._largest)
            self._lost(span, failure or "a fill left objects out")
        self._taker.track_changed(self.track)

    def _subgroup_ended(self, header: SubgroupHeader, failure: str | None, late: bool) -> None:
        if failure is not None or (header.end_of_group and self._is_live(header.group_id)):
            reason = failure or "a stream left objects out"
            self._lost(Span.of_group(header.group_id), reason, late=late)

    def _lost(self, span: Span, reason: str, *, late: bool = False) -> None:
        """What is missing of a span is lost, but for what came and did not open."""
        for part in _without(span, self._silent) if self._silent else (span,):
            self._taker.lost(self.track, part, reason, late=late)

    def _is_live(self, group_id: int) -> bool:
        """Whether no fill brings Objects of a Group any more."""
        return self.filled or self._largest is None or group_id > self._largest.group

    def _request_ended(
        self,
        request_id: int,
        reason: str,
        on_fetch_end: FetchEnd | None,
        *,
        refused: bool = False,
    ) -> None:
        for stream_id, stream in list(self._streams.items()):
            if stream.request_id == request_id:
                stream.drop()
                del self._streams[stream_id]
        if on_fetch_end is not None:
            on_fetch_end(reason)
        elif refused:
            self.give_up(reason)
        else:
            self._taker.dropped(self.track, reason)

    def give_up(self, reason: str) -> None:
        """Nothing more comes of itself, and what is missing has to be fetched."""
        self._taker.lost(self.track, EVERYTHING, reason, late=self._too_slow)
        self.end()

    def _subscription_ended(self, event: events.SubscriptionEnded) -> None:
        if event.status == PublishDoneCode.INTERNAL_ERROR:
            self._taker.failed(PublicationAborted(event.reason))
        elif event.status == PublishDoneCode.TRACK_ENDED:
            self.end()
        elif event.status == PublishDoneCode.GOING_AWAY:
            # A relay that has lost its publisher, which may come back, says so too.
            self._taker.sent_away("")
        else:
            self._too_slow = event.status == PublishDoneCode.TOO_FAR_BEHIND
            reason = f"the subscription ended with status {event.status:#x}"
            if event.reason:
                reason += f": {event.reason}"
            self._taker.dropped(self.track, reason)


def _without(span: Span, holes: Iterable[Location]) -> Iterator[Span]:
    """The parts of a span between Locations that are in it."""
    start: Location | None = span.first
    for hole in sorted(each for each in holes if span.first <= each <= span.last):
        if start is not None and start < hole:
            # Between two Groups nothing lies but the end of the first one.
            last = Location(hole.group, hole.object - 1) if hole.object else None
            last = Location(hole.group - 1, MAX_VI64) if last is None else last
            yield Span(start, last)
        start = following(hole)
    if start is not None and start <= span.last:
        yield Span(start, span.last)
