"""Two session cores and a Track on each side, driven by numbers: any list of them is a run."""

from __future__ import annotations

from collections.abc import Callable

from kvcs.errors import RequestError, UsageError
from kvcs.moqt.events import (
    DataStreamOpened,
    Event,
    FetchReceived,
    PublishNamespaceReceived,
    PublishReceived,
    RequestUpdateReceived,
    SubscribeNamespaceReceived,
    SubscribeReceived,
    SubscribeTracksReceived,
    TrackStatusReceived,
)
from kvcs.moqt.filters import LocationFilter, RangeFilter
from kvcs.moqt.names import FullTrackName, GroupOrder
from kvcs.moqt.objects import ObjectStatus
from kvcs.moqt.parameters import Parameters
from kvcs.moqt.track.store import Track
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
SCOPES = [(b"scope",), (), (b"other",)]


class Side:
    """One end, what it publishes, and the requests of its peer that have no answer yet."""

    def __init__(self, end: End, name: bytes) -> None:
        self.end = end
        self._label = name
        self.sources: list[Track] = []
        self._begin_track()
        self.pending: list[Event] = []
        self.watched: list[int] = []
        self.interests: list[int] = []
        """SUBSCRIBE_TRACKS of the peer that were accepted."""
        self.taken: list[int] = []
        """PUBLISHes of the peer that were accepted."""
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
                SubscribeTracksReceived,
                PublishReceived,
                RequestUpdateReceived,
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
        if isinstance(event, RequestUpdateReceived):
            if number % 5 == 0:
                responder.refuse_update(request_id, event.update_id, RequestError("no", 0x1))
            else:
                responder.accept_update(request_id, event.update_id)
        elif number % 5 == 0:
            responder.refuse(request_id, RequestError("no", 0x1))
        elif isinstance(event, PublishReceived):
            responder.accept_publish(request_id)
            side.taken.append(request_id)
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
            elif isinstance(event, SubscribeTracksReceived):
                side.interests.append(request_id)

    def _name(self, side: Side, other: Side, number: int) -> None:
        if side.watched:
            request_id = side.watched[number % len(side.watched)]
            suffix = (bytes([number % 3]),)
            responder = side.end.core.responder
            (responder.namespace if number % 2 else responder.namespace_done)(request_id, suffix)

    def _push(self, side: Side, other: Side, number: int) -> None:
        side.end.core.requester.publish(side.source, Parameters.of(forward=number % 2))

    def _tracks(self, side: Side, other: Side, number: int) -> None:
        asked = Parameters.of(forward=number % 2)
        if number % 5 == 0:
            asked = asked.replace(objectid_filter=[RangeFilter(0, ((0, number % 3),))])
        side.end.core.requester.subscribe_tracks(SCOPES[number % len(SCOPES)], asked)

    def _offer(self, side: Side, other: Side, number: int) -> None:
        if side.interests:
            request_id = side.interests[number % len(side.interests)]
            if number % 4:
                side.end.core.responder.publish_tracks(request_id, side.source)
            else:
                side.end.core.responder.publish_skipped(request_id, side.name)

    def _steer(self, side: Side, other: Side, number: int) -> None:
        if not side.taken:
            return
        request_id = side.taken[number % len(side.taken)]
        requester = side.end.core.requester
        if number % 7 == 0:
            requester.cancel(request_id)
        else:
            requester.update(request_id, parameters(number, subscription=True))

    def _move(self, side: Side, other: Side, number: int) -> None:
        if own := side.own():
            prefix = (PREFIXES + SCOPES)[number % (len(PREFIXES) + len(SCOPES))]
            moved = Parameters.of(track_namespace_prefix=prefix)
            side.end.core.requester.update(own[number % len(own)], moved)

    def _notify(self, side: Side, other: Side, number: int) -> None:
        for request in side.end.core.requests.all():
            side.end.core.responder.notify_state(request.request_id, forward=bool(number % 2))

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
            for event in side.pending:
                if isinstance(event, PublishReceived):
                    # Its publisher may be done with it, and owes nothing more.
                    error = RequestError("no", 0x1)
                    side.end.core.responder.refuse(event.request_id, error)
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
    "push": World._push,
    "tracks": World._tracks,
    "offer": World._offer,
    "steer": World._steer,
    "move": World._move,
    "notify": World._notify,
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
