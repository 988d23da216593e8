"""The model keeps what QUIC promises, and so does aioquic on the same network: one set of tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from kvcs.errors import ConnectionFailed, UsageError
from kvcs.quic.aioquic_backend import QuicSettings
from kvcs.quic.backend import Listener, current_backend
from kvcs.quic.transport import Transport
from kvcs.testing.network import Conditions, Credentials, Network, leftovers, run
from kvcs.testing.network.network import Quic
from tests.simulation.world import credentials_in
from tests.unit.quic.pair import Recorder

ROUGH = Conditions(delay=0.02, jitter=0.01, loss=0.1, reorder=0.2, duplicate=0.1)
PLAIN = QuicSettings(alpn=("test",))


@pytest.fixture(scope="module")
def credentials(tmp_path_factory: pytest.TempPathFactory) -> Credentials:
    return credentials_in(str(tmp_path_factory.mktemp("certificates")))


@pytest.fixture(params=["model", "aioquic"])
def quic(request: pytest.FixtureRequest) -> Quic:
    kind: Quic = request.param
    return kind


class Peers:
    """A client and a server that are connected."""

    def __init__(self, network: Network, listener: Listener) -> None:
        self.network = network
        self.listener = listener
        self.clients: list[Recorder] = []
        self.servers: list[Recorder] = []

    @property
    def client(self) -> Recorder:
        return self.clients[0]

    @property
    def server(self) -> Recorder:
        return self.servers[0]


@asynccontextmanager
async def connected(
    quic: Quic,
    credentials: Credentials,
    *,
    conditions: Conditions | None = None,
    client: QuicSettings = PLAIN,
    server: QuicSettings = PLAIN,
) -> AsyncIterator[Peers]:
    """Connect two hosts; leaving closes both and finds nothing left behind."""
    network = Network(3, conditions=conditions, quic=quic)
    made: list[Recorder] = []

    def accept(transport: Transport) -> Recorder:
        made.append(Recorder(transport))
        return made[-1]

    with network.host("relay") as host:
        listener = await current_backend.get().listen(
            host.address,
            4433,
            receiver_factory=accept,
            cert=credentials.cert,
            key=credentials.key,
            settings=server,
        )
    peers = Peers(network, listener)
    peers.servers = made
    transport = await connect(peers, credentials, client)
    await asyncio.sleep(1.0)  # for the server, a lost last flight included
    yield peers
    transport.close(0, "bye")
    await listener.close(0, "bye")
    await asyncio.sleep(40.0)
    assert leftovers(network) == []


async def connect(
    peers: Peers, credentials: Credentials, settings: QuicSettings = PLAIN, port: int = 4433
) -> Transport:
    """One more client."""

    def receive(transport: Transport) -> Recorder:
        peers.clients.append(Recorder(transport))
        return peers.clients[-1]

    with peers.network.host("client"):
        return await current_backend.get().connect(
            "relay",
            port,
            receiver_factory=receive,
            ca=credentials.ca,
            verify=True,
            settings=settings,
        )


def pump(peers: Peers, stream_id: int, octets: bytes) -> Callable[[], None]:
    """Let the client send octets and a FIN as credit comes."""
    transport = peers.client.transport
    left = memoryview(octets)
    done = False

    def more() -> None:
        nonlocal left, done
        size = min(transport.octets(), transport.stream_octets(stream_id), len(left), 5000)
        while not done and (size > 0 or not left):
            transport.send(stream_id, left[:size], size == len(left))
            done = size == len(left)
            left = left[size:]
            size = min(transport.octets(), transport.stream_octets(stream_id), len(left), 5000)
        transport.flush()

    peers.client.on_batch = more
    return more


async def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Look each hundredth of a virtual second."""
    for _ in range(int(seconds * 100)):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came")


def played(main: Coroutine[Any, Any, None]) -> None:
    run(main, limit=1000)


@pytest.mark.parametrize("conditions", [Conditions(), ROUGH], ids=["good", "rough"])
def test_octets_arrive_in_order_whatever_the_path_does(
    quic: Quic, credentials: Credentials, conditions: Conditions
) -> None:
    octets = bytes(range(256)) * 400

    async def main() -> None:
        async with connected(quic, credentials, conditions=conditions) as peers:
            pump(peers, 2, octets)()
            await until(lambda: 2 in peers.server.finished)
            assert peers.server.data[2] == octets
            await until(lambda: peers.client.transport.unacknowledged() == 0)

    played(main())


def test_credit_follows_what_is_taken(quic: Quic, credentials: Credentials) -> None:
    octets = bytes(300_000)
    small = replace(PLAIN, receive_window=40_000, stream_receive_window=16_000)

    async def main() -> None:
        async with connected(quic, credentials, server=small) as peers:
            transport = peers.client.transport
            assert transport.stream_octets(2) == 16_000
            assert transport.octets() <= 40_000
            pump(peers, 2, octets)()
            await until(lambda: 2 in peers.server.finished)
            assert peers.server.data[2] == octets

    played(main())


def test_streams_are_granted_as_others_end(quic: Quic, credentials: Credentials) -> None:
    few = replace(PLAIN, uni_streams=3)

    async def main() -> None:
        async with connected(quic, credentials, server=few) as peers:
            transport = peers.client.transport
            assert transport.uni_streams() == 3
            for number in range(10):
                await until(lambda: transport.uni_streams() > 0)
                transport.send(2 + 4 * number, b"x", True)
                transport.flush()
            await until(lambda: len(peers.server.finished) == 10)

    played(main())


def test_resets_and_stops_end_streams(quic: Quic, credentials: Credentials) -> None:
    async def main() -> None:
        async with connected(quic, credentials) as peers:
            client, server = peers.client, peers.server
            client.transport.send(2, b"data", False)
            client.transport.send(0, b"question", False)
            client.transport.flush()
            await until(lambda: 0 in server.data)
            client.transport.reset(2, 7)
            server.transport.send(0, b"answer", False)
            server.transport.stop_sending(0, 9)
            for side in (client, server):
                side.transport.flush()
            await until(lambda: ("stream_reset", 2, 7) in server.calls)
            await until(lambda: ("stop_sending", 0, 9) in client.calls)
            await until(lambda: ("stream_reset", 0, 9) in server.calls)
            client.transport.send(0, b"more", False)  # quiet: it was stopped
            client.transport.reset(2, 8)
            client.transport.flush()
            await asyncio.sleep(1)
            assert client.data[0] == b"answer"
            assert server.data[0] == b"question"

    played(main())


def test_a_stream_out_of_order_or_of_the_peer_is_refused(
    quic: Quic, credentials: Credentials
) -> None:
    async def main() -> None:
        async with connected(quic, credentials) as peers:
            transport = peers.client.transport
            for stream_id in (6, 3, 1):
                with pytest.raises(UsageError):
                    transport.send(stream_id, b"x", False)
            transport.send(2, b"x", True)
            with pytest.raises(UsageError, match="FIN"):
                transport.send(2, b"y", False)
            transport.flush()

    played(main())


def test_datagrams_go_once_or_never(quic: Quic, credentials: Credentials) -> None:
    async def main() -> None:
        async with connected(quic, credentials, conditions=Conditions(loss=0.3)) as peers:
            for number in range(100):
                peers.client.transport.send_datagram(b"%d" % number)
                peers.client.transport.flush()
                await asyncio.sleep(0.01)
            await asyncio.sleep(5)
            got = [call[1] for call in peers.server.calls if call[0] == "datagram"]
            assert 40 < len(got) < 95
            assert len(set(got)) == len(got)

    played(main())


def test_a_client_that_moves_keeps_its_connection(quic: Quic, credentials: Credentials) -> None:
    async def main() -> None:
        async with connected(quic, credentials) as peers:
            for number in range(3):
                peers.network.host("client").move()
                peers.client.transport.send(2 + 4 * number, b"here", True)
                peers.client.transport.flush()
                await until(partial(peers.server.finished.__contains__, 2 + 4 * number))
                peers.server.transport.send(3 + 4 * number, b"there", True)
                peers.server.transport.flush()
                await until(partial(peers.client.finished.__contains__, 3 + 4 * number))

    played(main())


def test_a_short_blackout_is_outlived(quic: Quic, credentials: Credentials) -> None:
    async def main() -> None:
        async with connected(quic, credentials) as peers:
            peers.network.path("client", "relay").blackout(5.0)
            peers.client.transport.send(2, b"patience", True)
            peers.client.transport.flush()
            await until(lambda: 2 in peers.server.finished)

    played(main())


def test_a_severed_client_ends_by_silence_at_both_ends(
    quic: Quic, credentials: Credentials
) -> None:
    async def main() -> None:
        async with connected(quic, credentials) as peers:
            peers.network.host("client").sever()
            await asyncio.sleep(70)
            for side in (peers.client, peers.server):
                kind, code, reason, by_peer = side.calls[-1]
                assert (kind, code, by_peer) == ("closed", None, False)
                assert "idle timeout" in reason

    played(main())


def test_a_close_is_heard_though_it_is_lost(quic: Quic, credentials: Credentials) -> None:
    async def main() -> None:
        async with connected(quic, credentials, conditions=ROUGH) as peers:
            for _ in range(5):
                peers.server.transport.send_datagram(b"busy")
            peers.server.transport.flush()
            peers.client.transport.close(5, "enough")
            await until(lambda: peers.server.calls[-1][0] == "closed")
            await until(lambda: peers.client.calls[-1][0] == "closed")
            assert peers.client.calls[-1] == ("closed", 5, "enough", False)
            if peers.server.calls[-1][1] is not None:  # else it ended by silence
                assert peers.server.calls[-1] == ("closed", 5, "enough", True)

    played(main())


def test_failures_to_connect_are_told(quic: Quic, credentials: Credentials) -> None:
    async def main() -> None:
        async with connected(quic, credentials) as peers:
            with pytest.raises(ConnectionFailed, match="nothing listens there"):
                await connect(peers, credentials, port=1)
            peers.network.path("client", "relay").blackout(20.0)
            with pytest.raises(ConnectionFailed, match="no answer"):
                await connect(peers, credentials)
            await asyncio.sleep(20)
            await connect(peers, credentials)
            peers.clients[-1].transport.close(0, "")

    played(main())


def test_a_full_listener_refuses(quic: Quic, credentials: Credentials) -> None:
    async def main() -> None:
        full = replace(PLAIN, max_connections=1)
        async with connected(quic, credentials, server=full) as peers:
            with pytest.raises(ConnectionFailed, match="too many connections"):
                await connect(peers, credentials)
            with peers.network.host("relay"), pytest.raises(ConnectionFailed, match="in use"):
                await current_backend.get().listen(
                    peers.network.host("relay").address,
                    4433,
                    receiver_factory=Recorder,
                    cert=credentials.cert,
                    key=credentials.key,
                    settings=PLAIN,
                )

    played(main())


def test_an_unknown_host_is_named(quic: Quic, credentials: Credentials) -> None:
    async def main() -> None:
        Network(quic=quic)
        with pytest.raises(ConnectionFailed, match="cannot look up nowhere"):
            await current_backend.get().connect(
                "nowhere",
                4433,
                receiver_factory=Recorder,
                ca=credentials.ca,
                verify=True,
                settings=PLAIN,
            )

    played(main())
