"""Two session cores and a Track on each side, driven by numbers: any list of them is a run."""

from __future__ import annotations

from collections.abc import Callable

from kvcs.errors import RequestError, UsageError
from kvcs.moqt.events import (
    DataStreamOpened,
    Event,
    FetchReceived,
    PublishNamespaceReceived,
    SubscribeNamespaceReceived,
    SubscribeReceived,
    TrackStatusReceived,
)
from kvcs.moqt.filters import LocationFilter, RangeFilter
from kvcs.moqt.names import FullTrackName, GroupOrder
from kvcs.moqt.objects import ObjectStatus
from kvcs.moqt.parameters import Parameters
from kvcs.moqt.store import Track
from kvcs.testing.pair import End, SessionPair
from kvcs.testing.residue import residue
from kvcs.testing.tracks import put, track

FILTERS = [
    LocationFilter.none(),
    LocationFilter.next_object(),
    LocationFilter.relative_start(1),
    LocationFilter.absolute_start(0, 0),
    LocationFilter.absolute_range(0, 1, 2, 1),
    LocationFilter.group_end(0, 0, 1),
]
PREFIXES = [(b"a",), (b"a", b"b"), (b"c",), ()]


class Side:
    """One end, what it publishes, and the requests of its peer that have no answer yet."""

    def __init__(self, end: End, name: bytes) -> None:
        self.end = end
        self._label = name
        self.sources: list[Track] = []
        self._begin_track()
        self.pending: list[Event] = []
        self.watched: list[int] = []
        end.on_event = self._note

    def _begin_track(self) -> None:
        """A name is never used again: Objects of one Track never change."""
        self.name = FullTrackName((b"scope",), self._label + b"%d" % len(self.sources))
        self.source = track(self.name)
        self.sources.append(self.source)
        self.place = (0, 0)

    def _note(self, event: Event) -> None:
        if isinstance(
            event,
            (
                SubscribeReceived,
                FetchReceived,
                TrackStatusReceived,
                PublishNamespaceReceived,
                SubscribeNamespaceReceived,
            ),
        ):
            self.pending.append(event)

    def find(self, name: FullTrackName) -> Track:
        """The Track of a name."""
        return next(source for source in self.sources if source.name == name)

    def publish(self, number: int) -> None:
        """The next Object, or the end of its Group."""
        if self.source.ended is not None:
            self._begin_track()
        group, object_id = self.place
        if number % 4 == 3 and object_id:
            put(self.source, group, object_id, status=ObjectStatus.END_OF_GROUP)
            self.source.finish_subgroup(group, 0)
            self.place = (group + 1, 0)
        else:
            put(self.source, group, object_id, octets=number % 300)
            self.place = (group, object_id + 1)

    def own(self) -> list[int]:
        """Request IDs of its own live requests."""
        return [one.request_id for one in self.end.core.requests.all() if one.ours]


def parameters(number: int, *, subscription: bool) -> Parameters:
    """Parameters of a request or update, chosen by a number."""
    chosen = Parameters.of(subscriber_priority=number % 4)
    number //= 4
    if subscription:
        if number % 3 == 0:
            chosen = chosen.replace(location_filter=FILTERS[number % len(FILTERS)])
        if number % 2:
            fill = Parameters.of(location_filter=FILTERS[number // 2 % len(FILTERS)])
            if number % 5 == 0:
                fill = fill.replace(group_order=GroupOrder.DESCENDING)
            chosen = chosen.replace(fill_parameters=fill)
        if number % 7 == 0:
            chosen = chosen.replace(forward=number // 7 % 2)
        if number % 11 == 0:
            chosen = chosen.replace(objectid_filter=[RangeFilter(0, ((0, number % 3),))])
    return chosen


class World:
    """A run: each step is a name, a number that chooses details, and a side."""

    def __init__(self, piece: int = 1 << 30) -> None:
        self.pair = SessionPair(piece=piece)
        self.sides = (Side(self.pair.client, b"client"), Side(self.pair.server, b"server"))

    def do(self, step: str, number: int, first: bool) -> None:
        """One step; one that is not allowed now changes nothing."""
        side, other = self.sides if first else self.sides[::-1]
        try:
            STEPS[step](self, side, other, number)
        except UsageError:
            pass
        if number % 3:
            self.pair.run()

    # Steps

    def _subscribe(self, side: Side, other: Side, number: int) -> None:
        side.end.core.requester.subscribe(other.name, parameters(number, subscription=True))

    def _fetch(self, side: Side, other: Side, number: int) -> None:
        chosen = Parameters.of(
            location_filter=FILTERS[number % len(FILTERS)],
            group_order=GroupOrder(1 + number // 8 % 2),
        )
        side.end.core.requester.fetch(other.name, chosen)

    def _ask(self, side: Side, other: Side, number: int) -> None:
        requester = side.end.core.requester
        if number % 3 == 0:
            requester.track_status(other.name)
        elif number % 3 == 1:
            requester.publish_namespace(PREFIXES[number % 3])
        else:
            requester.subscribe_namespace(PREFIXES[number % len(PREFIXES)])

    def _answer(self, side: Side, other: Side, number: int) -> None:
        if not side.pending:
            return
        event = side.pending.pop(number % len(side.pending))
        responder, now = side.end.core.responder, self.pair.now
        request_id: int = event.request_id  # type: ignore[union-attr]
        if number % 5 == 0:
            responder.refuse(request_id, RequestError("no", 0x1))
        elif isinstance(event, SubscribeReceived):
            responder.accept_subscribe(request_id, side.find(event.full_track_name), now)
        elif isinstance(event, FetchReceived):
            responder.accept_fetch(request_id, side.find(event.full_track_name), now)
        elif isinstance(event, TrackStatusReceived):
            responder.answer_track_status(request_id, side.source)
        else:
            responder.accept(request_id)
            if isinstance(event, SubscribeNamespaceReceived):
                side.watched.append(request_id)

    def _name(self, side: Side, other: Side, number: int) -> None:
        if side.watched:
            request_id = side.watched[number % len(side.watched)]
            suffix = (bytes([number % 3]),)
            responder = side.end.core.responder
            (responder.namespace if number % 2 else responder.namespace_done)(request_id, suffix)

    def _update(self, side: Side, other: Side, number: int) -> None:
        if own := side.own():
            chosen = parameters(number, subscription=number % 2 == 0)
            side.end.core.requester.update(own[number % len(own)], chosen)

    def _cancel(self, side: Side, other: Side, number: int) -> None:
        if own := side.own():
            side.end.core.requester.cancel(own[number % len(own)])

    def _end(self, side: Side, other: Side, number: int) -> None:
        if theirs := other.own():
            request_id = theirs[number % len(theirs)]
            responder = side.end.core.responder
            if number % 2:
                responder.end_subscription(request_id, 0x4)
            else:
                responder.revoke(request_id)

    def _publish(self, side: Side, other: Side, number: int) -> None:
        side.publish(number)

    def _end_track(self, side: Side, other: Side, number: int) -> None:
        side.source.end()

    def _stop(self, side: Side, other: Side, number: int) -> None:
        if opened := side.end.of(DataStreamOpened):
            stream_id = opened[number % len(opened)].stream_id
            if stream_id not in other.end.ended:
                side.end.core.requester.stop_stream(stream_id)

    def _credit(self, side: Side, other: Side, number: int) -> None:
        credit = side.end.credit
        credit.object_octets = (0, 1, 40, 1 << 40)[number % 4]
        credit.unidirectional = (0, 1, 1 << 30)[number // 4 % 3]
        credit.bidirectional = (0, 1 << 30)[number // 12 % 2]
        credit.per_stream_octets = (0, 7, 1 << 40)[number // 24 % 3]

    def _wait(self, side: Side, other: Side, number: int) -> None:
        self.pair.advance(number % 40 / 10)

    def _run_a_little(self, side: Side, other: Side, number: int) -> None:
        for _ in range(number % 6):
            self.pair.step()

    # The end

    def close_down(self) -> None:
        """Both sides give up everything; all that is under way is delivered."""
        for side in self.sides:
            for request_id in side.own():
                side.end.core.requester.cancel(request_id)
            side.end.credit.object_octets = side.end.credit.per_stream_octets = 1 << 40
            side.end.credit.unidirectional = side.end.credit.bidirectional = 1 << 30
        self.pair.run()
        self.pair.advance(20.0)

    def left_over(self) -> dict[str, int]:
        """What is left of it in either core and in the Tracks."""
        client, server = self.sides
        return {
            **residue(client.end.core, *client.sources),
            **residue(server.end.core, *server.sources),
        }


STEPS: dict[str, Callable[[World, Side, Side, int], None]] = {
    "subscribe": World._subscribe,
    "fetch": World._fetch,
    "ask": World._ask,
    "answer": World._answer,
    "name": World._name,
    "update": World._update,
    "cancel": World._cancel,
    "end": World._end,
    "publish": World._publish,
    "end track": World._end_track,
    "stop": World._stop,
    "credit": World._credit,
    "wait": World._wait,
    "run": World._run_a_little,
}
