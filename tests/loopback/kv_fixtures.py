"""Real sessions for tests of publisher and subscriber, and eyes on what goes over them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import kvcs
from kvcs.moqt import events
from kvcs.moqt.data import FetchHeader, SubgroupHeader
from kvcs.moqt.messages import SubscribeOk
from kvcs.moqt.names import FullTrackName, Location, TrackNamespace
from kvcs.moqt.objects import ObjectHeader, ObjectStatus
from kvcs.moqt.parameters import Parameters
from kvcs.quic.connection import Answerer, Connection
from kvcs.quic.endpoint import Observer, Server, open_connection
from tests.certificates import PemFiles

HOST = "127.0.0.1"
SESSION = kvcs.SessionSettings(done_delay=0.02)
"""PUBLISH_DONE follows soon, so that tests do not wait for it."""

E = TypeVar("E")


@asynccontextmanager
async def serving(
    files: PemFiles,
    *,
    session: kvcs.SessionSettings = SESSION,
    observer: Observer | None = None,
    offer: bool = True,
) -> AsyncIterator[Server]:
    """A server on a free port of this machine."""
    server = Server(session, observer=observer, offer=offer)
    await server.start(HOST, 0, cert=files.cert, key=files.key)
    try:
        yield server
    finally:
        await server.close()


@asynccontextmanager
async def joined(
    server: Server, files: PemFiles, wire: Wire | None = None, **options: Any
) -> AsyncIterator[Connection]:
    """A client's session with ``server``; ``wire`` sees what comes over it."""
    observer = None if wire is None else wire.observe
    connection = await open_connection(server.url, ca=files.ca, observer=observer, **options)
    if wire is not None:
        wire.attach(connection)
    try:
        yield connection
    finally:
        await connection.close()


class Wire:
    """What one client asked for and got, request by request."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, FullTrackName, Parameters]] = []
        """Requests in order: "subscribe" or "fetch", track, parameters."""
        self.events: list[events.Event] = []
        self.got: dict[str, Counter[Location]] = {}
        """Objects with a payload that began to arrive, by Track Name."""
        self._names: dict[int, FullTrackName] = {}
        self._more = asyncio.Event()

    def attach(self, connection: Connection) -> None:
        """Note the requests that the client makes from now on."""
        requester = connection.core.requester
        for kind in ("subscribe", "fetch"):
            setattr(requester, kind, self._noting(kind, getattr(requester, kind)))

    def _noting(
        self, kind: str, command: Callable[[FullTrackName, Parameters], int]
    ) -> Callable[[FullTrackName, Parameters], int]:
        def noting(name: FullTrackName, parameters: Parameters) -> int:
            request_id = command(name, parameters)
            self.asked.append((kind, name, parameters))
            self._names[request_id] = name
            self._more.set()
            return request_id

        return noting

    def observe(self, connection: Connection, event: events.Event) -> None:
        """One event of the client's session."""
        if isinstance(event, events.ObjectsReceived):
            for single in event.singles():
                self.observe(connection, single)
            return
        if isinstance(event, events.ObjectStarted) and event.header.payload_length:
            name = self._names[event.request_id].name.decode()
            self.got.setdefault(name, Counter())[event.header.location] += 1
        if not isinstance(event, events.ObjectChunk):
            self.events.append(event)
        self._more.set()

    def look(self) -> None:
        """Let `until` look at its condition, which something else may have made true."""
        self._more.set()

    def clear(self) -> None:
        """Forget everything so far."""
        for table in (self.asked, self.events, self.got, self._names):
            table.clear()

    async def until(self, condition: Callable[[], bool], seconds: float = 60.0) -> None:
        """Wait until ``condition`` holds."""
        async with asyncio.timeout(seconds):
            while not condition():
                self._more.clear()
                await self._more.wait()

    def of(self, kind: type[E]) -> list[E]:
        """Events of one kind so far."""
        return [event for event in self.events if isinstance(event, kind)]

    def tracks(self, kind: str) -> list[str]:
        """Names of the tracks that were asked for in one way, in order."""
        return [name.name.decode() for how, name, _ in self.asked if how == kind]

    def objects(self, name: str) -> dict[Location, int]:
        """How often each Object of a track came."""
        return dict(self.got.get(name, {}))


@dataclass
class Read:
    """One Object as a raw subscriber got it."""

    header: ObjectHeader
    stream_id: int
    payload: bytearray = field(default_factory=bytearray)
    whole: bool = False

    @property
    def is_status(self) -> bool:
        """Whether it carries a status and no payload."""
        return self.header.status is not ObjectStatus.NORMAL


class Tape:
    """The events of one raw request, put together; `until` waits for what they bring."""

    def __init__(self) -> None:
        self.events: list[events.Event] = []
        self.objects: list[Read] = []
        self.streams: dict[int, SubgroupHeader | FetchHeader] = {}
        self.ends: dict[int, int | None] = {}
        """Reset code of each stream that has ended; None for FIN."""
        self._open: dict[int, Read] = {}
        self._more = asyncio.Event()

    def __call__(self, event: events.Event) -> None:
        """Take one event."""
        if isinstance(event, events.ObjectsReceived):
            for single in event.singles():
                self(single)
            return
        if isinstance(event, events.DataStreamOpened):
            self.streams[event.stream_id] = event.header
        elif isinstance(event, events.ObjectStarted):
            self._open[event.stream_id] = read = Read(event.header, event.stream_id)
            self.objects.append(read)
        elif isinstance(event, events.ObjectChunk):
            self._open[event.stream_id].payload += event.data
        elif isinstance(event, events.ObjectEnded):
            self._open[event.stream_id].whole = True
        elif isinstance(event, events.DataStreamEnded):
            self.ends[event.stream_id] = event.reset_code
        if not isinstance(event, events.ObjectChunk):
            self.events.append(event)
        self._more.set()

    def of(self, kind: type[E]) -> list[E]:
        """Events of one kind so far."""
        return [event for event in self.events if isinstance(event, kind)]

    async def until(self, condition: Callable[[], bool], seconds: float = 60.0) -> None:
        """Wait until ``condition`` holds."""
        async with asyncio.timeout(seconds):
            while not condition():
                self._more.clear()
                await self._more.wait()

    async def until_done(self) -> events.SubscriptionEnded:
        """Wait for PUBLISH_DONE."""
        await self.until(lambda: bool(self.of(events.SubscriptionEnded)))
        return self.of(events.SubscriptionEnded)[0]


async def subscribe(
    connection: Connection, namespace: TrackNamespace, name: bytes, parameters: Parameters
) -> tuple[Tape, SubscribeOk]:
    """Subscribe to a track without the Subscriber's help."""
    tape = Tape()
    request_id = connection.core.requester.subscribe(FullTrackName(namespace, name), parameters)
    connection.handle(request_id, tape)
    reply = await connection.reply(request_id)
    assert isinstance(reply, SubscribeOk)
    return tape, reply


def accepting(answer: Answerer) -> Observer:
    """An observer for `serving`: every session it accepts asks ``answer`` first."""

    def observe(connection: Connection, event: events.Event) -> None:
        if isinstance(event, events.SessionEstablished):
            connection.answer_with(answer)

    return observe


def with_session(**changes: Any) -> kvcs.SessionSettings:
    """Settings of a quick session, changed."""
    return replace(SESSION, **changes)
