"""The subscriber's side of data streams (MOQT §11): which request each belongs to, and its Objects.

A stream may come before the reply that binds its Track Alias. Such early streams are held, within
named limits of count, octets and time, and given out once the alias is known.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

from kvcs.moqt.data import (
    CONTROL_STREAM,
    FetchHeader,
    FetchParser,
    ObjectDatagram,
    ObjectEnded,
    ObjectHeader,
    ObjectStarted,
    PaddingHeader,
    RangeMarked,
    SubgroupHeader,
    SubgroupParser,
    read_stream_header,
)
from kvcs.moqt.errors import DuplicateTrackAlias, MalformedTrack, ProtocolViolation, StreamCode
from kvcs.moqt.events import (
    DatagramReceived,
    DataStreamEnded,
    DataStreamOpened,
    Event,
)
from kvcs.moqt.events import ObjectChunk as ObjectChunkEvent
from kvcs.moqt.events import ObjectEnded as ObjectEndedEvent
from kvcs.moqt.events import ObjectStarted as ObjectStartedEvent
from kvcs.moqt.events import RangeMarked as RangeMarkedEvent
from kvcs.moqt.names import FullTrackName, GroupOrder, Location
from kvcs.moqt.properties import KeyValues, check_object_properties
from kvcs.moqt.rules import TrackRules
from kvcs.moqt.wire import NeedMore, Reader


@dataclass(frozen=True, slots=True)
class EarlyLimits:
    """What is held of streams whose Track Alias is not bound yet."""

    streams: int = 512
    octets: int = 64 * 2**20
    seconds: float = 2.0


@dataclass(slots=True, eq=False)
class Expected:
    """A subscription or fetch that data streams may belong to."""

    request_id: int
    full_track_name: FullTrackName
    group_order: GroupOrder
    """Group Order of the request; a fill of it may have its own."""

    rules: TrackRules
    filtered: bool = False
    """Whether range filters leave Objects out: then FIN does not tell which one is the last."""

    open_streams: set[int] = field(default_factory=set)
    streams_seen: int = 0


@dataclass(slots=True, eq=False)
class _Stream:
    """One unidirectional stream of the peer."""

    stream_id: int
    head: bytes = b""
    """Octets of a header that is not whole yet."""

    header: SubgroupHeader | FetchHeader | None = None
    parser: SubgroupParser | FetchParser | None = None
    expected: Expected | None = None
    early: bytearray = field(default_factory=bytearray)
    """What came before its Track Alias was bound; one buffer, however it was cut."""

    early_since: float = 0.0
    fin: bool = False
    discarded: bool = False
    last: Location | None = None
    """Location of the last Object or marker."""

    subgroup_id: int | None = None


class ReceiverHost(Protocol):
    """What the session offers to the receiving side."""

    def emit(self, event: Event) -> None:
        """Report an event."""

    def stop_stream(self, stream_id: int, code: int) -> None:
        """STOP_SENDING a stream."""

    def track_malformed(self, expected: Expected, reason: str) -> None:
        """Cancel all that was asked of a malformed Track, and report it."""

    def stream_ended(self, expected: Expected) -> None:
        """One of a request's streams ended."""


class DataStreams:
    """Unidirectional streams of the peer, but for its control stream."""

    def __init__(self, host: ReceiverHost, limits: EarlyLimits) -> None:
        self._host = host
        self.heard_at = 0.0
        """When octets of a data stream came last, in the caller's clock."""
        self._limits = limits
        self._streams: dict[int, _Stream] = {}
        self._aliases: dict[int, list[Expected]] = {}
        self._fetches: dict[int, tuple[Expected, GroupOrder]] = {}
        self._early: deque[_Stream] = deque()
        self._early_octets = 0
        self._rules: dict[FullTrackName, tuple[TrackRules, int]] = {}

    # Who expects what

    def expect(
        self, request_id: int, name: FullTrackName, group_order: GroupOrder, *, filtered: bool
    ) -> Expected:
        """A SUBSCRIBE or FETCH was sent."""
        rules, users = self._rules.get(name, (TrackRules(), 0))
        self._rules[name] = (rules, users + 1)
        return Expected(request_id, name, group_order, rules, filtered)

    def expect_stream(self, request_id: int, expected: Expected, group_order: GroupOrder) -> None:
        """One fetch or fill stream with this Request ID will come, in ``group_order``."""
        self._fetches[request_id] = (expected, group_order)

    def bind(self, track_alias: int, expected: Expected) -> None:
        """SUBSCRIBE_OK named the alias of a subscription; early streams of it are given out.

        Raises:
            DuplicateTrackAlias: the alias denotes another Track.
        """
        bound = self._aliases.setdefault(track_alias, [])
        if bound and bound[-1].full_track_name != expected.full_track_name:
            raise DuplicateTrackAlias(
                f"alias {track_alias} denotes {bound[-1].full_track_name} and"
                f" {expected.full_track_name}"
            )
        bound.append(expected)
        for stream in [stream for stream in self._early if self._is_for(stream, track_alias)]:
            if expected not in self._aliases.get(track_alias, ()):
                return  # an Object ended the subscription; the rest stays early and times out
            self._early.remove(stream)
            octets, stream.early = stream.early, bytearray()
            self._early_octets -= len(octets)
            self._assign(stream, expected)
            self._parse(stream, memoryview(octets))
            if stream.fin and stream.stream_id in self._streams:
                self._finish(stream)

    @staticmethod
    def _is_for(stream: _Stream, track_alias: int) -> bool:
        header = stream.header
        return isinstance(header, SubgroupHeader) and header.track_alias == track_alias

    def forget(self, expected: Expected, code: int) -> None:
        """A request is over: its open streams are stopped, later ones are discarded."""
        for stream_id in list(expected.open_streams):
            self._drop(self._streams[stream_id], code)
        expected.open_streams.clear()
        for alias, bound in list(self._aliases.items()):
            if expected in bound:
                bound.remove(expected)
                if not bound:
                    del self._aliases[alias]
        for request_id, (owner, _) in list(self._fetches.items()):
            if owner is expected:
                del self._fetches[request_id]
        rules, users = self._rules.pop(expected.full_track_name)
        if users > 1:
            self._rules[expected.full_track_name] = (rules, users - 1)

    # What comes

    def receive(self, stream_id: int, data: bytes, fin: bool, now: float) -> bool:
        """Take octets of a unidirectional stream.

        Returns:
            False when the stream turns out to be a control stream; nothing is consumed, and
            `pop_head` gives what had come before.
        """
        self.heard_at = now
        stream = self._streams.get(stream_id)
        if stream is None:
            stream = self._streams[stream_id] = _Stream(stream_id)
        stream.fin = fin
        if stream.header is not None or stream.discarded:
            self._continue(stream, memoryview(data))
            return True
        octets = stream.head + data if stream.head else data
        reader = Reader(octets)
        try:
            header = read_stream_header(reader)
        except NeedMore:
            if fin and octets:
                raise ProtocolViolation("a data stream ended inside its header") from None
            stream.head = octets  # a few octets: `read_stream_header` bounds what it waits for
            if fin:
                del self._streams[stream_id]
            return True
        if header is CONTROL_STREAM:
            return False
        stream.head = b""
        if isinstance(header, PaddingHeader):
            stream.discarded = True
        else:
            stream.header = header
            self._route(stream, header, now)
        self._continue(stream, memoryview(octets)[reader.pos :])
        return True

    def pop_head(self, stream_id: int) -> bytes:
        """Forget a stream that is a control stream; returns octets that came earlier."""
        return self._streams.pop(stream_id).head

    def reset(self, stream_id: int, code: int) -> None:
        """The peer reset a stream; a partial Object is dropped."""
        stream = self._streams.pop(stream_id, None)
        if stream is None or stream.discarded:
            return
        if stream in self._early:
            self._early.remove(stream)
            self._early_octets -= len(stream.early)
        self._ended(stream, code)

    def receive_datagram(self, datagram: ObjectDatagram) -> None:
        """Take an Object that came as a datagram; one for an unknown alias is dropped."""
        bound = self._aliases.get(datagram.track_alias)
        if bound and self._check(bound[-1], datagram.header):
            self._host.emit(DatagramReceived(bound[-1].request_id, datagram))

    def clear(self) -> None:
        """The session is over."""
        self._streams.clear()
        self._early.clear()
        self._early_octets = 0

    def next_timer(self) -> float | None:
        """When the oldest early stream is given up."""
        return self._early[0].early_since + self._limits.seconds if self._early else None

    def receive_timer(self, now: float) -> None:
        """Give up early streams whose alias was not bound in time."""
        while self._early and now >= self._early[0].early_since + self._limits.seconds:
            self._give_up_early()

    # Inner workings

    def _give_up_early(self) -> None:
        stream = self._early.popleft()
        self._early_octets -= len(stream.early)
        stream.early = bytearray()
        self._drop(stream, StreamCode.CANCELLED)

    def _route(self, stream: _Stream, header: SubgroupHeader | FetchHeader, now: float) -> None:
        if isinstance(header, FetchHeader):
            if header.request_id in self._fetches:
                self._assign(stream, self._fetches[header.request_id][0])
            else:
                # Its request may just be gone, or this is a second stream of it: no reason to
                # close the session (§11.4).
                self._drop(stream, StreamCode.CANCELLED)
            return
        bound = self._aliases.get(header.track_alias)
        if bound:
            self._assign(stream, bound[-1])
            return
        stream.early_since = now
        self._early.append(stream)
        while len(self._early) > self._limits.streams:
            self._give_up_early()

    def _assign(self, stream: _Stream, expected: Expected) -> None:
        header = stream.header
        assert header is not None
        stream.expected = expected
        if isinstance(header, FetchHeader):
            _, group_order = self._fetches.pop(header.request_id)
            stream.parser = FetchParser(group_order)
        else:
            stream.parser = SubgroupParser(header)
            stream.subgroup_id = header.subgroup_id
        expected.open_streams.add(stream.stream_id)
        expected.streams_seen += 1
        self._host.emit(DataStreamOpened(expected.request_id, stream.stream_id, header))

    def _continue(self, stream: _Stream, data: memoryview) -> None:
        if stream.discarded:
            if stream.fin:
                self._streams.pop(stream.stream_id, None)
        elif stream.expected is None:
            stream.early += data
            self._early_octets += len(data)
            while self._early and self._early_octets > self._limits.octets:
                self._give_up_early()
        else:
            self._parse(stream, data)
            if stream.fin and stream.stream_id in self._streams:
                self._finish(stream)

    def _check(self, expected: Expected, header: ObjectHeader) -> bool:
        """Hold an Object to the rules of §12.1; False when it ended the request."""
        try:
            if header.properties:
                check_object_properties(KeyValues.decode(header.properties), header.location)
            expected.rules.check_object(header)
        except MalformedTrack as exc:
            self._host.track_malformed(expected, exc.reason)
            return False
        return True

    def _parse(self, stream: _Stream, data: memoryview) -> None:
        parser, expected = stream.parser, stream.expected
        if stream.discarded or parser is None or expected is None or not len(data):
            return
        emit = self._host.emit
        request_id, stream_id = expected.request_id, stream.stream_id
        for item in parser.feed(data):
            if isinstance(item, ObjectStarted):
                header = item.header
                if header.location == stream.last:
                    # Only a fetch stream can say so: Object ID Delta 0 in one Group (§11.4.1).
                    reason = f"{header.location} twice on one stream"
                    self._host.track_malformed(expected, reason)
                    return
                if not self._check(expected, header):
                    return
                stream.last = header.location
                stream.subgroup_id = header.subgroup_id
                emit(ObjectStartedEvent(request_id, stream_id, header))
            elif isinstance(item, ObjectEnded):
                emit(ObjectEndedEvent(request_id, stream_id))
            elif isinstance(item, RangeMarked):
                stream.last = item.location
                emit(RangeMarkedEvent(request_id, stream_id, item.kind, item.location))
            else:
                emit(ObjectChunkEvent(request_id, stream_id, item.data))

    def _finish(self, stream: _Stream) -> None:
        parser, expected, header = stream.parser, stream.expected, stream.header
        assert parser is not None and expected is not None
        parser.finish()
        del self._streams[stream.stream_id]
        expected.open_streams.discard(stream.stream_id)
        if isinstance(header, SubgroupHeader) and stream.last and not expected.filtered:
            assert stream.subgroup_id is not None
            try:
                expected.rules.finish_subgroup(
                    header.group_id, stream.subgroup_id, stream.last.object, header.end_of_group
                )
            except MalformedTrack as exc:
                self._host.track_malformed(expected, exc.reason)
                return
        self._ended(stream, None)

    def _ended(self, stream: _Stream, code: int | None) -> None:
        expected = stream.expected
        if expected is None:
            return
        expected.open_streams.discard(stream.stream_id)
        self._host.emit(DataStreamEnded(expected.request_id, stream.stream_id, code))
        self._host.stream_ended(expected)

    def _drop(self, stream: _Stream, code: int) -> None:
        """Stop a stream and read over what still comes of it."""
        stream.discarded = True
        if stream.fin:
            self._streams.pop(stream.stream_id, None)
        else:
            self._host.stop_stream(stream.stream_id, code)
