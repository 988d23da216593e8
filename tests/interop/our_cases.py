"""What the peer's interop client does, case by case, done by our client with a relay."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import kvcs
from kvcs.errors import RequestError
from kvcs.moqt import events
from kvcs.moqt.errors import PublishDoneCode
from kvcs.moqt.events import Event
from kvcs.moqt.filters import LocationFilter
from kvcs.moqt.messages import FetchOk, RequestOk, SubscribeOk
from kvcs.moqt.names import FullTrackName, TrackNamespace
from kvcs.moqt.parameters import Parameters, ParameterType
from kvcs.moqt.track.store import Track
from kvcs.testing.tracks import end_track, locations, objects, put_group, track
from tests.interop.relays import relay
from tests.interop.scenario import Stage
from tests.interop.smoke import Request
from tests.interop.steps import perform

GROUPS, OBJECTS, SIZE, PRIORITY = 3, 5, 700, 9
RENDEZVOUS_MS = 500
NEXT = Parameters.of(location_filter=LocationFilter.next_object())

Seen = dict[str, Any]


class Sessions:
    """Sessions of one case with a relay."""

    def __init__(self, stage: Stage, url: str, case: str) -> None:
        self._stage, self._url = stage, url
        self.namespace: TrackNamespace = (b"interop", case.encode())
        self.name = FullTrackName(self.namespace, b"track")

    @asynccontextmanager
    async def one(self) -> AsyncIterator[kvcs.Connection]:
        """One session."""
        async with kvcs.connect(self._url, ca=self._stage.pem.ca) as session:
            yield session

    @asynccontextmanager
    async def two(self) -> AsyncIterator[tuple[kvcs.Connection, kvcs.Connection]]:
        """A publisher's session and a subscriber's."""
        async with self.one() as publisher, self.one() as subscriber:
            yield publisher, subscriber

    def published(self) -> Track:
        """A Track of one group, that goes on."""
        made = track(self.name)
        put_group(made, 0, OBJECTS, octets=SIZE, priority=PRIORITY)
        return made


def finish(target: Track) -> None:
    """Publish the rest of a Track."""
    for group in range(1, GROUPS):
        put_group(target, group, OBJECTS, octets=SIZE, priority=PRIORITY)
    end_track(target, GROUPS, priority=PRIORITY)


async def code_of(session: kvcs.Connection, request_id: int) -> int | None:
    """The code with which a request is refused; None where it is accepted."""
    try:
        await session.reply(request_id)
    except RequestError as error:
        return int(error.code)
    return None


def is_resumed(event: Event) -> bool:
    """Whether a subscriber wants a subscription's Objects now."""
    if not isinstance(event, events.SubscriptionUpdated):
        return False
    return bool(event.parameters.get(ParameterType.FORWARD) == 1)


def is_end(event: Event) -> bool:
    return isinstance(event, events.SubscriptionEnded)


async def setup_only(sessions: Sessions) -> Seen:
    """SETUP both ways."""
    async with sessions.one() as session:
        return {"options": session.core.peer_options is not None}


async def announce_only(sessions: Sessions) -> Seen:
    """PUBLISH_NAMESPACE is accepted."""
    async with sessions.one() as session:
        requester = session.core.requester
        reply = await session.reply(requester.publish_namespace(sessions.namespace))
        return {"ok": isinstance(reply, RequestOk)}


async def publish_namespace_done(sessions: Sessions) -> Seen:
    """A withdrawn namespace is one that nobody finds."""
    async with sessions.two() as (publisher, subscriber):
        await publisher.origin.add_namespace(sessions.namespace)
        watch = subscriber.namespaces.watch(sessions.namespace)
        await until(watch, lambda: bool(watch.namespaces))
        publisher.origin.remove_namespace(sessions.namespace)
        await until(watch, lambda: not watch.namespaces)
        return {"open": publisher.is_open and subscriber.is_open}


async def subscribe_error(sessions: Sessions) -> Seen:
    """A Track that nobody publishes."""
    async with sessions.one() as session:
        asked = session.core.requester.subscribe(sessions.name, NEXT)
        return {"code": await code_of(session, asked)}


async def rendezvous_timeout(sessions: Sessions) -> Seen:
    """A Track that nobody publishes in time."""
    async with sessions.one() as session:
        waits = NEXT.replace(rendezvous_timeout=RENDEZVOUS_MS)
        asked = session.core.requester.subscribe(sessions.name, waits)
        return {"code": await code_of(session, asked)}


async def announce_subscribe(sessions: Sessions) -> Seen:
    """SUBSCRIBE to what is announced."""
    async with sessions.two() as (publisher, subscriber):
        publisher.origin.add_track(sessions.published())
        await publisher.origin.add_namespace(sessions.namespace)
        asked = subscriber.core.requester.subscribe(sessions.name, NEXT)
        return {"ok": isinstance(await subscriber.reply(asked), SubscribeOk)}


async def subscribe_before_announce(sessions: Sessions) -> Seen:
    """SUBSCRIBE waits for the announcement, or is refused at once."""
    async with sessions.two() as (publisher, subscriber):
        publisher.origin.add_track(sessions.published())
        asked = subscriber.core.requester.subscribe(
            sessions.name, NEXT.replace(rendezvous_timeout=10_000)
        )
        answer = asyncio.ensure_future(code_of(subscriber, asked))
        await publisher.origin.add_namespace(sessions.namespace)
        return {"code": await answer}


async def data_subgroup_basic(sessions: Sessions) -> Seen:
    """A Track far below the announced namespace, every Object of it."""
    async with sessions.two() as (publisher, subscriber):
        deep = tuple(b"field%d" % number for number in range(16))
        sessions.name = FullTrackName((*sessions.namespace, b"below", *deep), b"track")
        published = track(sessions.name)
        publisher.origin.add_track(published)
        await publisher.origin.add_namespace((*sessions.namespace, b"below"))
        request = await subscribed(subscriber, sessions.name, NEXT)
        put_group(published, 0, OBJECTS, octets=SIZE, priority=PRIORITY)
        finish(published)
        return await outcome(request)


async def subscribe_namespace_lifecycle(sessions: Sessions) -> Seen:
    """NAMESPACE and NAMESPACE_DONE of the exact namespace."""
    async with sessions.two() as (publisher, subscriber):
        requester = subscriber.core.requester
        request = Request(subscriber, requester.subscribe_namespace(sessions.namespace))
        await subscriber.reply(request.request_id)
        await publisher.origin.add_namespace(sessions.namespace)
        await request.until(lambda event: isinstance(event, events.NamespaceAnnounced))
        publisher.origin.remove_namespace(sessions.namespace)
        await request.until(lambda event: isinstance(event, events.NamespaceWithdrawn))
        named = (events.NamespaceAnnounced, events.NamespaceWithdrawn)
        told = [event for event in request.events if isinstance(event, named)]
        return {"told": [[type(event).__name__, len(event.suffix)] for event in told]}


async def namespace_discovery(sessions: Sessions) -> Seen:
    """A namespace and a Track of it are found by asking for either."""
    async with sessions.two() as (publisher, subscriber):
        published = sessions.published()
        publisher.origin.add_track(published)
        await publisher.origin.add_namespace(sessions.namespace)
        await publisher.origin.push_track(sessions.name)
        watch = subscriber.namespaces.watch(sessions.namespace)
        await until(watch, lambda: bool(watch.namespaces))
        offered = await anext(subscriber.tracks.watch(sessions.namespace))
        request = Request(subscriber, offered.request_id)
        offered.accept(request._take)
        finish(published)
        seen = await outcome(request)
        return {"track": offered.name == sessions.name, "ended": seen["ended"]}


async def publish_track_only(sessions: Sessions) -> Seen:
    """PUBLISH is accepted though nobody wants it, and ended."""
    async with sessions.one() as session:
        request_id = session.core.requester.publish(sessions.published())
        reply = await session.reply(request_id)
        session.core.responder.end_subscription(request_id, PublishDoneCode.TRACK_ENDED)
        await session.drain()
        return {"ok": isinstance(reply, RequestOk), "open": session.is_open}


async def publish_track_subscribe(sessions: Sessions) -> Seen:
    """A published Track serves a SUBSCRIBE, though its namespace was not announced."""
    async with sessions.two() as (publisher, subscriber):
        published = track(sessions.name)
        paused = Parameters.of(forward=0)
        publish = Request(publisher, publisher.core.requester.publish(published, paused))
        await publisher.reply(publish.request_id)
        request = await subscribed(subscriber, sessions.name, NEXT)
        await publish.until(is_resumed)
        put_group(published, 0, OBJECTS, octets=SIZE, priority=PRIORITY)
        finish(published)
        return await outcome(request)


async def fetch(sessions: Sessions) -> Seen:
    """One whole group of a Track that goes on."""
    async with sessions.two() as (publisher, subscriber):
        publisher.origin.add_track(sessions.published())
        await publisher.origin.add_namespace(sessions.namespace)
        live = await subscribed(subscriber, sessions.name, NEXT)
        group = Parameters.of(location_filter=LocationFilter.group_end(0, 0, 0))
        request = Request(subscriber, subscriber.core.requester.fetch(sessions.name, group))
        reply = await subscriber.reply(request.request_id)
        await request.until(lambda event: isinstance(event, events.DataStreamEnded))
        subscriber.cancel(live.request_id)
        return {"ok": isinstance(reply, FetchOk), "objects": payloads(request.events)}


async def join(sessions: Sessions) -> Seen:
    """The current group by a fill, and what follows live."""
    async with sessions.two() as (publisher, subscriber):
        published = sessions.published()
        publisher.origin.add_track(published)
        await publisher.origin.add_namespace(sessions.namespace)
        past = Parameters.of(location_filter=LocationFilter.relative_start(2))
        joining = NEXT.replace(fill_parameters=past)
        request = await subscribed(subscriber, sessions.name, joining)
        await request.until(lambda event: isinstance(event, events.DataStreamEnded))
        finish(published)
        return await outcome(request)


CASES: tuple[Callable[[Sessions], Awaitable[Seen]], ...] = (
    setup_only,
    announce_only,
    publish_namespace_done,
    subscribe_error,
    rendezvous_timeout,
    announce_subscribe,
    subscribe_before_announce,
    data_subgroup_basic,
    subscribe_namespace_lifecycle,
    namespace_discovery,
    publish_track_only,
    publish_track_subscribe,
    fetch,
    join,
)


async def everything(stage: Stage, whose: str) -> dict[str, Seen]:
    """Every case, with a namespace of its own, through one relay."""
    async with relay(stage, whose) as url:
        return await perform(
            stage,
            {case.__name__: partial(case, Sessions(stage, url, case.__name__)) for case in CASES},
        )


async def until(watch: Any, done: Callable[[], bool]) -> None:
    """Wait until a namespace watch has seen something; the scenario's deadline bounds it."""
    while not done():
        assert watch.error is None, watch.error
        watch.changed.clear()
        await watch.changed.wait()


async def subscribed(
    session: kvcs.Connection, name: FullTrackName, parameters: Parameters
) -> Request:
    """An accepted SUBSCRIBE."""
    request = Request(session, session.core.requester.subscribe(name, parameters))
    await session.reply(request.request_id)
    return request


async def outcome(request: Request) -> Seen:
    """What a subscription has brought in all."""
    await request.until(is_end)
    [end] = [event for event in request.events if isinstance(event, events.SubscriptionEnded)]
    return {"ended": end.status, "objects": payloads(request.events)}


def payloads(seen: list[Event]) -> list[list[int]]:
    """``[group, object, priority]`` of every NORMAL Object that came whole, each once, in order."""
    whole = set(locations(seen))
    found = {
        (item.header.group_id, item.header.object_id): item.header.publisher_priority
        for item in objects(seen)
        if item.header.location in whole and len(item.payload) == SIZE
    }
    return [[group, number, priority or 0] for (group, number), priority in sorted(found.items())]
