"""Scenarios of our session with a relay, message by message, without any KV cache."""

import asyncio
from collections.abc import Callable
from typing import Any

import kvcs
from kvcs.errors import RequestError
from kvcs.moqt import events
from kvcs.moqt.events import Event, ObjectsReceived
from kvcs.moqt.filters import LocationFilter, RangeFilter
from kvcs.moqt.messages import FetchOk, RequestOk, SubscribeOk
from kvcs.moqt.names import FullTrackName, GroupOrder, Location
from kvcs.moqt.parameters import Parameters, ParameterType
from kvcs.moqt.properties import KeyValues, Property
from kvcs.testing.tracks import end_track, locations, objects, put, put_group, track
from tests.interop import peer
from tests.interop.alone import NAMESPACE
from tests.interop.relays import OURS, relay
from tests.interop.scenario import Stage

NAME = FullTrackName(NAMESPACE, b"k.raw.s0")
OBJECTS, SIZE, PRIORITY = 3, 3000, 7
CACHE_MS = 60_000
OTHER_DRAFT = "20"
"""A draft that the peer speaks and we do not."""


class Request:
    """One request of ours and all that came of it."""

    def __init__(self, connection: kvcs.Connection, request_id: int) -> None:
        self.connection = connection
        self.request_id = request_id
        self.events: list[Event] = []
        self._changed = asyncio.Event()
        connection.handle(request_id, self._take)

    async def until(self, done: Callable[[Event], bool]) -> None:
        """Wait for an event; the scenario's deadline bounds it."""
        while not any(done(event) for event in self.events):
            self._changed.clear()
            await self._changed.wait()

    def _take(self, event: Event) -> None:
        if isinstance(event, ObjectsReceived):
            self.events.extend(event.singles())
        else:
            self.events.append(event)
        self._changed.set()


async def exchange(stage: Stage, whose: str) -> dict[str, Any]:
    """SETUP, announce, discover, be refused, subscribe with a fill, ask, fetch, withdraw."""
    seen: dict[str, Any] = {}
    properties = KeyValues.of({Property.MAX_CACHE_DURATION: CACHE_MS})
    published = track(NAME, properties=properties)
    put_group(published, 0, OBJECTS, octets=SIZE, priority=PRIORITY)
    put(published, 1, 0, octets=SIZE, priority=PRIORITY)
    async with (
        relay(stage, whose) as url,
        kvcs.connect(url, ca=stage.pem.ca) as publisher,
        kvcs.connect(url, ca=stage.pem.ca) as subscriber,
    ):
        seen["filter ranges"] = subscriber.core.requester.peer_filter_ranges
        publisher.origin.add_track(published)
        await publisher.origin.add_namespace(NAMESPACE)

        watch = subscriber.namespaces.watch(NAMESPACE[:4])
        await watch.answered.wait()
        while not watch.namespaces:
            watch.changed.clear()
            await watch.changed.wait()
        seen["announced"] = [list(map(bytes.hex, found)) for found in watch.namespaces]

        seen["refused"] = await _refused(subscriber)
        seen["subscription"] = await _subscribe(subscriber, lambda: _publish_rest(published))
        if whose == OURS:  # the peer's relay says of every track that it is not served there
            seen["status"] = await _status(subscriber)
        seen["fetch"] = await _fetch(subscriber)

        publisher.origin.remove_namespace(NAMESPACE)
        while watch.namespaces:
            watch.changed.clear()
            await watch.changed.wait()
        seen["open"] = [publisher.is_open, subscriber.is_open]
    return seen


async def other_draft(stage: Stage) -> dict[str, Any]:
    """Each side meets a relay of the other that speaks another draft."""
    seen: dict[str, Any] = {"ours": None}
    url = await stage.peer_relay(options=("--draft", OTHER_DRAFT))
    try:
        async with kvcs.connect(url, ca=stage.pem.ca):
            pass
    except kvcs.ConnectionFailed as error:
        seen["ours"] = str(error)
    async with relay(stage, OURS) as url:
        spec = peer.interop_client(url, case="setup-only", draft=OTHER_DRAFT)
        finished = await (await stage.start(spec)).collect()
    seen["theirs"] = peer.parse_tap(finished.stdout)["setup-only"].message
    return seen


def _publish_rest(published: Any) -> None:
    put(published, 1, 1, octets=SIZE, priority=PRIORITY)
    published.finish_subgroup(1, 0)
    put_group(published, 2, OBJECTS, octets=SIZE, priority=PRIORITY)
    end_track(published, 3, priority=PRIORITY)


async def _refused(connection: kvcs.Connection) -> int:
    absent = FullTrackName(NAMESPACE, b"absent")
    request_id = connection.core.requester.subscribe(absent, Parameters())
    try:
        await connection.reply(request_id)
    except RequestError as error:
        return int(error.code)
    raise AssertionError("a track that does not exist was subscribed to")


async def _subscribe(connection: kvcs.Connection, go_on: Callable[[], None]) -> dict[str, Any]:
    """Join inside group 1 with a fill from the start; ``go_on`` publishes the rest."""
    parameters = Parameters.of(
        location_filter=LocationFilter.next_object(),
        fill_parameters=Parameters.of(location_filter=LocationFilter.absolute_start(0, 0)),
    )
    request = Request(connection, connection.core.requester.subscribe(NAME, parameters))
    reply = await connection.reply(request.request_id)
    assert isinstance(reply, SubscribeOk)
    largest = reply.parameters.get(ParameterType.LARGEST_OBJECT)
    await request.until(lambda event: isinstance(event, events.DataStreamEnded))
    go_on()
    await request.until(lambda event: isinstance(event, events.SubscriptionEnded))
    ended = next(e for e in request.events if isinstance(e, events.SubscriptionEnded))
    return {
        "largest": list(largest),
        "properties": reply.track_properties.get(Property.MAX_CACHE_DURATION),
        "objects": _payloads(request.events),
        "ended": ended.status,
    }


async def _fetch(connection: kvcs.Connection) -> dict[str, Any]:
    """FETCH every group without its first Object."""
    parameters = Parameters.of(
        group_order=GroupOrder.ASCENDING,
        location_filter=LocationFilter.group_end(0, 0, 2),
        objectid_filter=[RangeFilter(0, ((1, OBJECTS),))],
    )
    request = Request(connection, connection.core.requester.fetch(NAME, parameters))
    reply = await connection.reply(request.request_id)
    assert isinstance(reply, FetchOk)
    await request.until(lambda event: isinstance(event, events.DataStreamEnded))
    return {
        "end": list(reply.end_location),
        "order": [list(at) for at in locations(request.events)],
        "objects": _payloads(request.events),
    }


async def _status(connection: kvcs.Connection) -> list[int]:
    """TRACK_STATUS of the Track, whose Largest Object it tells."""
    reply = await connection.reply(connection.core.requester.track_status(NAME))
    assert isinstance(reply, RequestOk)
    return list(reply.parameters.get(ParameterType.LARGEST_OBJECT))


def _payloads(seen: list[Event]) -> list[list[object]]:
    """``[group, object, priority, payload]`` of each NORMAL Object, each once, in order."""
    found: dict[Location, list[object]] = {
        item.header.location: [
            *item.header.location,
            item.header.publisher_priority,
            item.payload.hex(),
        ]
        for item in objects(seen)
        if item.whole and item.header.status == 0
    }
    return [found[at] for at in sorted(found)]
