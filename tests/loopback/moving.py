"""A publication on several servers, and a consumer whose sessions follow one another."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import kvcs
from kvcs.moqt import events
from kvcs.moqt.names import Location
from kvcs.moqt.sending.delivery import RangeSender
from kvcs.moqt.track.ranges import UnknownRun
from kvcs.moqt.uri import MoqtUri, parse_uri
from kvcs.quic.connection import Connection, PeerRequest
from kvcs.quic.endpoint import open_connection
from kvcs.quic.link import Link
from kvcs.quic.origin import Origin
from tests.certificates import PemFiles
from tests.loopback.kv_fixtures import HOST, SESSION, Wire
from tests.loopback.raw_publication import RawPublication
from tests.ports import free_port

SOON = kvcs.Reconnect(
    initial=20.0, deadline=20.0, first_pause=0.01, max_pause=0.05, linger=0.05, leave=5.0
)
"""Comes back soon, and gives up long after a busy machine would have let it."""

GOAWAY = 40.0
"""Seconds that a relay which stops gives its peers: none that obeys needs them."""

SAFETY = 20.0
"""Seconds in which everything is over, whatever else the machine does."""


class Held(RawPublication):
    """A raw publication that can keep its peers waiting."""

    hold_unknown = False
    """Whether a fill or fetch stops for good where something is unknown."""

    hold_answers = False
    """Whether requests get no answer until `let_go`."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self.held: list[tuple[Connection, PeerRequest]] = []

    def _unknown(self, sender: RangeSender, run: UnknownRun) -> bool:
        return self.hold_unknown or super()._unknown(sender, run)

    def answer(self, connection: Connection, request: PeerRequest) -> bool:
        """Answer one request of a peer, now or later."""
        if self.hold_answers:
            self.held.append((connection, request))
            self.asked.set()
            return True
        if self.hold_unknown and isinstance(request, events.FetchReceived):
            track = next(
                each for each in self.stored.values() if each.name == request.full_track_name
            )
            responder = connection.core.responder
            responder.accept_fetch(request.request_id, track, connection.now, self._unknown)
            return True
        return super().answer(connection, request)

    def let_go(self) -> None:
        """Answer what waits, and all that comes."""
        self.hold_answers = False
        held, self.held = self.held, []
        for connection, request in held:
            if connection.is_open:
                self.answer(connection, request)

    def asks_held(self, kind: type[PeerRequest]) -> list[PeerRequest]:
        """Requests of one kind that wait."""
        return [request for _, request in self.held if isinstance(request, kind)]

    async def until_asked(self, condition: Callable[[], bool]) -> None:
        """Wait until requests of peers make a condition true."""
        async with asyncio.timeout(SAFETY):
            while not condition():
                self.asked.clear()
                await self.asked.wait()


class Wires:
    """What one consumer got over all its sessions."""

    def __init__(self) -> None:
        self.all: list[Wire] = []
        self._more = asyncio.Event()

    def observe(self, connection: Connection, event: events.Event) -> None:
        """Something happened on one of the sessions."""
        self._more.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds."""
        async with asyncio.timeout(SAFETY):
            while not condition():
                self._more.clear()
                await self._more.wait()

    def objects(self, name: str) -> Counter[Location]:
        """How often each Object of a track began to arrive, over all sessions."""
        total: Counter[Location] = Counter()
        for wire in self.all:
            total.update(wire.objects(name))
        return total

    @property
    def newest(self) -> Wire:
        """That of the newest session."""
        return self.all[-1]


@asynccontextmanager
async def linked(
    url: str,
    files: PemFiles,
    wires: Wires | None = None,
    policy: kvcs.Reconnect = SOON,
    prepare: Callable[[Connection], None] = lambda _: None,
) -> AsyncIterator[Connection]:
    """What `kvcs.connect` does, with eyes on every session."""

    async def open_session(uri: MoqtUri, *, link: Link, origin: Origin | None) -> Connection:
        wire = Wire()

        def observe(connection: Connection, event: events.Event) -> None:
            wire.observe(connection, event)
            if wires is not None:
                wires.observe(connection, event)

        connection = await open_connection(
            uri, ca=files.ca, observer=observe, link=link, origin=origin
        )
        wire.attach(connection)
        prepare(connection)
        if wires is not None:
            wires.all.append(wire)
        return connection

    link = Link(open_session, parse_uri(url), policy)
    try:
        yield await link.start()
    finally:
        await link.close()


async def until(connection: Connection, condition: Callable[[], bool]) -> None:
    """Wait until something holds of a linked connection, looking at each change."""
    assert connection.link is not None
    changed = asyncio.Event()
    connection.link.on_change(changed.set)
    try:
        async with asyncio.timeout(SAFETY):
            while not condition():
                changed.clear()
                await changed.wait()
    finally:
        connection.link.off_change(changed.set)


async def over(connection: Connection) -> None:
    """Wait until one session is over."""
    closed = asyncio.Event()
    connection.on_closed(closed.set)
    try:
        async with asyncio.timeout(SAFETY):
            await closed.wait()
    finally:
        connection.off_closed(closed.set)


def relay_settings(files: PemFiles, port: int = 0, **options: Any) -> kvcs.RelaySettings:
    """Settings of a relay of a test."""
    return kvcs.RelaySettings(
        cert=files.cert,
        key=files.key,
        host=HOST,
        port=port,
        allow_anyone=True,
        session=SESSION,
        **options,
    )


class Restartable:
    """A relay that can be stopped and started again, empty, on the same port."""

    def __init__(self, files: PemFiles) -> None:
        self._files = files
        self._port = free_port()  # nobody is given it while the relay is stopped
        self.relay: kvcs.Relay | None = None

    async def start(self) -> None:
        """Listen, always on the same port."""
        relay = kvcs.Relay(relay_settings(self._files, self._port, goaway_timeout=GOAWAY))
        await relay.__aenter__()
        self.relay = relay

    async def kill(self) -> None:
        """Close everything without a word of goodbye."""
        assert self.relay is not None
        await self.relay.close(at_once=True)
        self.relay = None

    async def stop(self) -> None:
        """Stop in good order."""
        assert self.relay is not None
        await self.relay.close()
        self.relay = None

    @property
    def url(self) -> str:
        """Where it listens, or will again."""
        return f"moqt://{HOST}:{self._port}"

    @property
    def running(self) -> kvcs.Relay:
        """The relay that runs."""
        assert self.relay is not None
        return self.relay


@asynccontextmanager
async def restartable(files: PemFiles) -> AsyncIterator[Restartable]:
    """A relay, running."""
    relay = Restartable(files)
    await relay.start()
    try:
        yield relay
    finally:
        if relay.relay is not None:
            await relay.kill()
