"""Subscriptions for tests: one accepted by a scripted peer, one between two cores."""

from __future__ import annotations

from kvcs.moqt import messages as m
from kvcs.moqt.events import (
    DataStreamEnded,
    Event,
    RequestAccepted,
    SubscribeReceived,
)
from kvcs.moqt.names import FullTrackName
from kvcs.moqt.objects import ObjectHeader, ObjectStatus
from kvcs.moqt.parameters import Parameters
from kvcs.moqt.properties import KeyValues
from kvcs.moqt.settings import Role
from kvcs.moqt.streams import SubgroupHeader
from kvcs.moqt.track.store import Track
from kvcs.testing.bench import Bench
from kvcs.testing.pair import SessionPair
from kvcs.testing.tracks import (
    NAME,
    subgroup_stream,
    track,
)

NONE, BARE = Parameters(), KeyValues()
OK = m.SubscribeOk(9, NONE, BARE)
OTHER = FullTrackName(NAME.namespace, b"v.raw.s0")
END_OF_GROUP = ObjectStatus.END_OF_GROUP


def subscriber(reply: m.SubscribeOk | None = OK, parameters: Parameters = NONE) -> Bench:
    """A core with a subscription on stream 0, accepted where ``reply`` says so."""
    bench = Bench(Role.CLIENT)
    bench.core.requester.subscribe(NAME, parameters)
    bench.drain()
    if reply is not None:
        bench.say(0, reply)
        bench.take(RequestAccepted)
    return bench


def stream_of(group: int, *items: ObjectHeader | int, **bits: bool) -> bytes:
    return subgroup_stream(SubgroupHeader(9, group, 0, 0, **bits), *items)


def status(group: int, object_id: int, what: ObjectStatus = END_OF_GROUP) -> ObjectHeader:
    return ObjectHeader(group, object_id, 0, 0, what)


def serve(pair: SessionPair, source: Track) -> None:
    """The server accepts every SUBSCRIBE to a Track."""

    def answer(event: Event) -> None:
        if isinstance(event, SubscribeReceived):
            pair.server.core.responder.accept_subscribe(event.request_id, source, pair.now)

    pair.server.on_event = answer


def served(parameters: Parameters = NONE) -> tuple[SessionPair, Track, int]:
    """A subscription to an empty Track, accepted."""
    pair, source = SessionPair(), track()
    serve(pair, source)
    request_id = pair.client.core.requester.subscribe(NAME, parameters)
    pair.run()
    return pair, source, request_id


def update(pair: SessionPair, request_id: int, **parameters: object) -> None:
    pair.client.core.requester.update(request_id, Parameters.of(**parameters))
    pair.run()


def ends(pair: SessionPair) -> list[int | None]:
    return [event.reset_code for event in pair.client.of(DataStreamEnded)]
