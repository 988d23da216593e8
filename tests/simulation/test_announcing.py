"""Announcing a namespace while sessions come and go, at exact times."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

import kvcs
from kvcs.moqt import events
from kvcs.moqt.errors import RequestCode
from kvcs.quic.connection import Connection, PeerRequest
from kvcs.quic.endpoint import Server
from kvcs.testing.network import Conditions, Network, leftovers, run

NAMESPACE = (b"news", b"today")
POLICY = kvcs.Reconnect(leave=2.0, linger=0.0)
HOUR_MS = 3_600_000


class Peer:
    """A server that keeps the first announcement, and takes all later ones."""

    def __init__(self, first: Callable[[Connection, int], object]) -> None:
        self.first = first
        self.asked: list[tuple[Connection, int]] = []
        """PUBLISH_NAMESPACEs, each with its session."""
        self.sessions: list[Connection] = []
        self.second = asyncio.Event()
        """Set when there is a second session."""

    def observe(self, connection: Connection, event: events.Event) -> None:
        """An `Observer`."""
        if isinstance(event, events.SessionEstablished):
            self.sessions.append(connection)
            connection.answer_with(self.answer)
            if len(self.sessions) == 2:
                self.second.set()

    def answer(self, connection: Connection, request: PeerRequest) -> bool:
        """An `Answerer`."""
        self.asked.append((connection, request.request_id))
        if len(self.asked) == 1:
            self.first(connection, request.request_id)
        else:
            connection.core.responder.accept(request.request_id)
        return True


def played(peer: Callable[[], Peer], test: Callable[[Peer, Connection], Awaitable[None]]) -> None:
    """Run a test with a session to a server."""

    async def main() -> None:
        network, made = Network(3, conditions=Conditions(delay=0.01)), peer()
        with network.host("server"):
            server = Server(observer=made.observe)
            await server.start("server", 4433, cert="unused", key="unused")
        with network.host("client"):
            async with kvcs.connect("moqt://server:4433", reconnect=POLICY) as session:
                async with asyncio.timeout(60.0):
                    await test(made, session)
        await server.close()
        await asyncio.sleep(40)
        assert leftovers(network) == []

    run(main())


def test_a_retry_interval_does_not_outlive_its_session() -> None:
    def refuse(connection: Connection, request_id: int) -> None:
        error = kvcs.RequestError("not now", RequestCode.EXCESSIVE_LOAD, HOUR_MS)
        connection.core.responder.refuse(request_id, error)

    async def test(peer: Peer, session: Connection) -> None:
        announcing = asyncio.create_task(session.origin.add_namespace(NAMESPACE))
        while not peer.asked:
            await session.progressed()
        await peer.sessions[0].drain()
        await peer.sessions[0].close()
        await announcing
        assert [connection for connection, _ in peer.asked] == peer.sessions
        assert len(peer.sessions) == 2

    played(lambda: Peer(refuse), test)


@pytest.mark.parametrize("accepted", [True, False])
def test_an_answer_that_comes_when_the_next_session_is_there(accepted: bool) -> None:
    """The namespace is announced on that one, too: the old one is about to go."""

    def send_away(connection: Connection, request_id: int) -> None:
        connection.goaway()

    async def test(peer: Peer, session: Connection) -> None:
        announcing = asyncio.create_task(session.origin.add_namespace(NAMESPACE))
        await peer.second.wait()
        old, request_id = peer.asked[0]
        if accepted:
            old.core.responder.accept(request_id)
        else:
            error = kvcs.RequestError("going away", RequestCode.GOING_AWAY)
            old.core.responder.refuse(request_id, error)
        await announcing
        async with asyncio.timeout(10.0):
            while peer.asked[-1][0] is old:
                await peer.sessions[1].progressed()
        assert peer.asked[-1][0] is peer.sessions[1]

    played(lambda: Peer(send_away), test)
