"""The subscriber's side of data streams (MOQT §11): which request each belongs to, and its Objects.

A stream may come before the reply that binds its Track Alias. Such early streams are held, within
named limits of count, octets and time, and given out once the alias is known.
"""

from __future__ import annotations

from kvcs.errors import SessionError
from kvcs.moqt.data import (
    CONTROL_STREAM,
    FetchHeader,
    FetchParser,
    ObjectDatagram,
    ObjectHeader,
    ObjectStarted,
    ObjectStatus,
    PaddingHeader,
    RangeMarked,
    SubgroupHeader,
    SubgroupParser,
    read_stream_header,
)
from kvcs.moqt.errors import (
    DuplicateTrackAlias,
    MalformedTrack,
    ProtocolViolation,
    SessionCode,
    StreamCode,
)
from kvcs.moqt.events import (
    DatagramReceived,
    DataStreamEnded,
    DataStreamOpened,
    ObjectsReceived,
)
from kvcs.moqt.incoming.arriving import DataStream
from kvcs.moqt.incoming.expected import Expected, ReceiverHost, choose
from kvcs.moqt.incoming.rules import TrackRules
from kvcs.moqt.limits import EarlyLimits, Limit, LimitCounters, SharedBudgets
from kvcs.moqt.names import FullTrackName, GroupOrder
from kvcs.moqt.properties import KeyValues, check_object_properties
from kvcs.moqt.states import DataStreamInput, DataStreamState, next_state
from kvcs.moqt.wire import NeedMore, Reader

__all__ = ["DataStreams", "Expected", "ReceiverHost"]

MAX_UNENDED_STREAMS = 4096
"""Data streams that were stopped, or are padding, while the peer keeps them open."""

UNENDED_SECONDS = 10.0
"""How long they may be more: many may be stopped at once, and each takes a round trip."""


_HEADER = DataStreamState.HEADER
_DISCARDED = DataStreamState.DISCARDED


class DataStreams:
    """Unidirectional streams of the peer, but for its control stream."""

    def __init__(
        self,
        host: ReceiverHost,
        limits: EarlyLimits,
        counters: LimitCounters | None = None,
        shared: SharedBudgets | None = None,
    ) -> None:
        self._host = host
        self._counters = LimitCounters() if counters is None else counters
        self._shared = SharedBudgets() if shared is None else shared
        self.heard_at = 0.0
        """When octets of a data stream came last, in the caller's clock."""
        self._limits = limits
        self._streams: dict[int, DataStream] = {}
        self._aliases: dict[int, list[Expected]] = {}
        self._fetches: dict[int, tuple[Expected, GroupOrder]] = {}
        self._early: dict[DataStream, None] = {}
        """Streams of no known request, the oldest first."""
        self._early_octets = 0
        self._unended: dict[DataStream, None] = {}
        """Streams that are read over until the peer ends them, the oldest first."""
        self._rules: dict[FullTrackName, tuple[TrackRules, int]] = {}

    # Who expects what

    def expect(
        self, request_id: int, name: FullTrackName, group_order: GroupOrder, *, filtered: bool
    ) -> Expected:
        """A SUBSCRIBE or FETCH was sent."""
        rules, users = self._rules.get(name) or (TrackRules(self._shared.rules), 0)
        self._rules[name] = (rules, users + 1)
        return Expected(request_id, name, group_order, rules, filtered)

    def expect_stream(self, request_id: int, expected: Expected, group_order: GroupOrder) -> None:
        """One fetch or fill stream with this Request ID will come, in ``group_order``."""
        self._fetches[request_id] = (expected, group_order)

    def bind(self, track_alias: int, expected: Expected) -> None:
        """A subscription is established, its alias is known; early streams of it are given out.

        Raises:
            DuplicateTrackAlias: the alias denotes another Track.
        """
        self.check_alias(track_alias, expected.full_track_name)
        self._aliases.setdefault(track_alias, []).append(expected)
        for stream in self._early_of(track_alias):
            if expected not in self._aliases.get(track_alias, ()):
                return  # an Object ended the subscription; the rest stays early and times out
            octets, stream.early = stream.early, bytearray()
            self._leave_early(stream, len(octets))
            self._assign(stream, expected)
            self._parse(stream, memoryview(octets))
            if stream.fin and stream.stream_id in self._streams:
                self._finish(stream)

    def check_alias(self, track_alias: int, name: FullTrackName) -> None:
        """Hold an alias that the peer names against those of established subscriptions (§3.1.3).

        Raises:
            DuplicateTrackAlias: it denotes another Track.
        """
        bound = self._aliases.get(track_alias)
        if bound and bound[-1].full_track_name != name:
            raise DuplicateTrackAlias(
                f"alias {track_alias} denotes {bound[-1].full_track_name} and {name}"
            )

    def refuse(self, track_alias: int, code: int) -> None:
        """Stop early streams of a subscription that was not accepted."""
        for stream in self._early_of(track_alias):
            self._drop(stream, code)

    def _early_of(self, track_alias: int) -> list[DataStream]:
        return [one for one in self._early if getattr(one.header, "track_alias", -1) == track_alias]

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
            return
        if rules.forgotten:
            self._counters.reached(Limit.RULES_TOTAL)
        rules.release()

    # What comes

    def receive(self, stream_id: int, data: bytes, fin: bool, now: float) -> bool:
        """Take octets of a unidirectional stream.

        Returns:
            False when the stream turns out to be a control stream; nothing is consumed, and
            `pop_head` gives what had come before.
        """
        self.heard_at = now
        stream = self._streams.get(stream_id)
        if stream is not None and not fin and (expected := stream.expected) is not None:
            sink = expected.sink
            if sink is not None and not self._host.has_events():
                taken = stream.pass_on(sink, data)
                if taken:
                    if taken < len(data):
                        self._parse(stream, memoryview(data)[taken:])
                    return True
        if stream is None:
            stream = self._streams[stream_id] = DataStream(stream_id)
        stream.fin = fin
        if stream.state is not _HEADER:
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
                self._leave_early(stream, 0)
                self._end(stream, DataStreamInput.FIN)
            else:
                self._enter_early(stream, now)
            return True
        if header is CONTROL_STREAM:
            return False
        stream.head = b""
        if isinstance(header, PaddingHeader):
            self._leave_early(stream, 0)
            self._read_over(stream, DataStreamInput.PADDING)
        else:
            stream.header = header
            self._route(stream, header, now)
        self._continue(stream, memoryview(octets)[reader.pos :])
        return True

    def stop(self, stream_id: int, code: int) -> None:
        """Stop one stream of a request that goes on (§11.4.3); quiet where it is whole.

        What comes from the next input on is read over until the peer ends the stream, which is
        reported as ever; and it counts as any stream that was stopped and stays open.
        """
        stream = self._streams.get(stream_id)
        if stream is None or stream.state is _DISCARDED or stream.stopped or stream.fin:
            return
        stream.stopped = True
        stream.since = self.heard_at
        self._unended[stream] = None
        self._host.stop_stream(stream_id, code)

    def pop_head(self, stream_id: int) -> bytes:
        """Forget a stream that is a control stream; returns octets that came earlier."""
        stream = self._streams.pop(stream_id)
        self._leave_early(stream, 0)
        return stream.head

    def reset(self, stream_id: int, code: int) -> None:
        """The peer reset a stream; a partial Object is dropped."""
        stream = self._streams.get(stream_id)
        if stream is None:
            return
        was_read_over = stream.state is _DISCARDED
        self._end(stream, DataStreamInput.RESET)
        if not was_read_over:
            self._leave_early(stream, len(stream.early))
            self._ended(stream, code)

    def receive_datagram(self, datagram: ObjectDatagram) -> None:
        """Take an Object that came as a datagram; one for an unknown alias is dropped."""
        bound = self._aliases.get(datagram.track_alias)
        if not bound:
            return
        place = datagram.location
        expected = bound[0]
        if len(bound) > 1:
            expected = choose(bound, place, place.group, place.object)
        end = datagram.end_of_group and not expected.filtered
        if self._check(expected, datagram.header, end_of_group=end):
            self._host.emit(DatagramReceived(expected.request_id, datagram))

    def state(self, stream_id: int) -> DataStreamState:
        """Where a unidirectional stream of the peer stands; ENDED for one that is not known."""
        stream = self._streams.get(stream_id)
        return DataStreamState.ENDED if stream is None else stream.state

    def clear(self) -> None:
        """The session is over."""
        self._streams.clear()
        self._early.clear()
        self._unended.clear()
        self._shared.early_octets.used -= self._early_octets
        self._early_octets = 0
        for rules, _ in self._rules.values():
            rules.release()

    def next_timer(self) -> float | None:
        """When the oldest early stream is given up, or too many streams were kept open."""
        due = None
        if self._early:
            due = next(iter(self._early)).since + self._limits.seconds
        if len(self._unended) > MAX_UNENDED_STREAMS:
            unended = next(iter(self._unended)).since + UNENDED_SECONDS
            due = unended if due is None else min(due, unended)
        return due

    def receive_timer(self, now: float) -> None:
        """Give up early streams whose alias was not bound in time.

        Raises:
            SessionError: too many streams that were stopped stay open.
        """
        while self._early:
            oldest = next(iter(self._early))
            if now < oldest.since + self._limits.seconds:
                break
            self._give_up_early(Limit.EARLY_SECONDS)
        if len(self._unended) > MAX_UNENDED_STREAMS:
            if now >= next(iter(self._unended)).since + UNENDED_SECONDS:
                self._counters.reached(Limit.UNENDED_STREAMS)
                raise SessionError(
                    "streams that were stopped stay open", SessionCode.DATA_STREAM_TIMEOUT
                )

    # Inner workings

    def _enter_early(self, stream: DataStream, now: float) -> None:
        if stream in self._early:
            return
        stream.since = now
        self._early[stream] = None
        while len(self._early) > self._limits.streams:
            self._give_up_early(Limit.EARLY_STREAMS)

    def _leave_early(self, stream: DataStream, octets: int) -> None:
        """A stream is not early any more; ``octets`` were held of it."""
        if stream in self._early:
            del self._early[stream]
            self._early_octets -= octets
            self._shared.early_octets.used -= octets

    def _give_up_early(self, limit: Limit) -> None:
        self._counters.reached(limit)
        self._drop(next(iter(self._early)), StreamCode.CANCELLED)

    def _route(self, stream: DataStream, header: SubgroupHeader | FetchHeader, now: float) -> None:
        if isinstance(header, FetchHeader):
            if header.request_id in self._fetches:
                self._assign(stream, self._fetches[header.request_id][0])
            else:
                # Its request may just be gone, or this is a second stream of it: no reason to
                # close the session (§11.4).
                self._drop(stream, StreamCode.CANCELLED, DataStreamInput.REFUSED)
            return
        bound = self._aliases.get(header.track_alias)
        if not bound:
            stream.state = next_state(stream.state, DataStreamInput.UNROUTED)
            self._enter_early(stream, now)
            return
        expected = bound[0]
        if len(bound) > 1:
            place = (header.group_id, header.subgroup_id or 0)
            expected = choose(bound, place, header.group_id)
        self._assign(stream, expected)

    def _assign(self, stream: DataStream, expected: Expected) -> None:
        header = stream.header
        assert header is not None
        self._leave_early(stream, 0)
        early = stream.state is DataStreamState.EARLY
        what = DataStreamInput.BOUND if early else DataStreamInput.ROUTED
        stream.state = next_state(stream.state, what)
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

    def _continue(self, stream: DataStream, data: memoryview) -> None:
        if stream.stopped and stream.state is DataStreamState.OPEN:
            if stream.fin:
                self._end(stream, DataStreamInput.FIN)
                self._ended(stream, None)
        elif stream.state is _DISCARDED:
            if stream.fin:
                self._end(stream, DataStreamInput.FIN)
        elif stream.state is DataStreamState.ENDED:
            pass  # refused, and whole already
        elif stream.expected is None:
            stream.early += data
            self._early_octets += len(data)
            shared = self._shared.early_octets
            shared.used += len(data)
            while self._early and self._early_octets > self._limits.octets:
                self._give_up_early(Limit.EARLY_OCTETS)
            while self._early_octets and shared.overdrawn:
                self._give_up_early(Limit.EARLY_TOTAL)
        else:
            self._parse(stream, data)
            if stream.fin and stream.stream_id in self._streams:
                self._finish(stream)

    def _check(
        self, expected: Expected, header: ObjectHeader, *, end_of_group: bool = False
    ) -> bool:
        """Hold an Object to the rules of §12.1; False when it ended the request."""
        try:
            self._hold_to_rules(expected, header)
            if end_of_group:
                expected.rules.finish_group(header.group_id, header.object_id)
        except MalformedTrack as exc:
            self._host.track_malformed(expected, exc.reason)
            return False
        return True

    def _hold_to_rules(self, expected: Expected, header: ObjectHeader) -> None:
        gaps: tuple[int | None, int | None] = (None, None)
        if header.properties != expected.harmless and header.properties:
            properties = KeyValues.decode(header.properties)
            gaps = check_object_properties(properties, header.location)
            if gaps == (None, None):
                expected.harmless = header.properties
        expected.rules.check_object(header, *gaps)

    def _parse(self, stream: DataStream, data: memoryview) -> None:
        parser, expected = stream.parser, stream.expected
        if parser is None or expected is None or not len(data):
            return
        state = stream.state
        sink = expected.sink
        if sink is not None and self._host.has_events():
            sink = None  # what waits comes first
        items = parser.feed(data)
        malformed: MalformedTrack | None = None
        for index, item in enumerate(items):
            if isinstance(item, ObjectStarted):
                try:
                    self._begin(stream, expected, item.header)
                except MalformedTrack as exc:
                    malformed = exc
                    del items[index:]
                    break
            elif isinstance(item, RangeMarked):
                stream.last = item.location
        if items:
            if sink is None:
                self._host.emit(ObjectsReceived(expected.request_id, stream.stream_id, items))
            else:
                sink.take_items(stream.stream_id, items)
        if malformed is not None and stream.state is state:  # a sink may have cancelled the request
            self._host.track_malformed(expected, malformed.reason)

    def _begin(self, stream: DataStream, expected: Expected, header: ObjectHeader) -> None:
        """Take note of an Object that starts.

        Raises:
            MalformedTrack: it breaks a rule.
        """
        location = header.location
        if location == stream.last:
            # Only a fetch stream can say so: Object ID Delta 0 in one Group (§11.4.1).
            raise MalformedTrack(f"{location} twice on one stream")
        self._hold_to_rules(expected, header)
        stream.last = location
        stream.subgroup_id = header.subgroup_id
        # Properties that told of no gap tell of none again; one ID further they may be wrong else.
        harmless = header.properties == expected.harmless or not header.properties
        stream.like = header if harmless and header.status is ObjectStatus.NORMAL else None

    def _finish(self, stream: DataStream) -> None:
        parser, expected, header = stream.parser, stream.expected, stream.header
        assert parser is not None and expected is not None
        parser.finish()  # raises for FIN_INSIDE
        self._end(stream, DataStreamInput.FIN)
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

    def _ended(self, stream: DataStream, code: int | None) -> None:
        expected = stream.expected
        if expected is None:
            return
        expected.open_streams.discard(stream.stream_id)
        self._host.emit(DataStreamEnded(expected.request_id, stream.stream_id, code))
        self._host.stream_ended(expected)

    def _end(self, stream: DataStream, what: DataStreamInput) -> None:
        """The peer has ended a stream: it is forgotten."""
        stream.state = next_state(stream.state, what)
        self._streams.pop(stream.stream_id, None)
        self._unended.pop(stream, None)

    def _drop(
        self, stream: DataStream, code: int, what: DataStreamInput = DataStreamInput.GIVEN_UP
    ) -> None:
        """Stop a stream and read over what still comes of it."""
        self._leave_early(stream, len(stream.early))
        stream.early = bytearray()
        self._read_over(stream, what)
        if stream.fin:
            self._end(stream, DataStreamInput.FIN)
        elif not stream.stopped:
            self._host.stop_stream(stream.stream_id, code)

    def _read_over(self, stream: DataStream, what: DataStreamInput) -> None:
        """Discard what comes of a stream until it ends."""
        stream.state = next_state(stream.state, what)
        stream.parser = None
        stream.since = self.heard_at
        self._unended[stream] = None
