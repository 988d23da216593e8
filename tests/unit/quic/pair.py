"""Two transports over a network in memory, on a clock that only moves when told."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from functools import cache, partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kvcs.quic.aioquic_backend import AioquicTransport, QuicSettings
from kvcs.quic.aioquic_backend.certificates import client_configuration, server_configuration
from kvcs.quic.aioquic_backend.ending import Ending
from kvcs.quic.aioquic_backend.ports import Datagrams, Driven
from kvcs.quic.aioquic_backend.private.connection import Connection
from kvcs.quic.aioquic_backend.segments import one_by_one
from kvcs.quic.transport import Transport
from tests.certificates import Certified, make_ca, make_certificate, write_pem

DELAY = 0.005
"""Seconds that a datagram takes one way."""

CLIENT, SERVER = ("client", 1), ("server", 2)

PLAIN = QuicSettings(datagram_size=1200)


@cache
def identity() -> tuple[Certified, Certified]:
    """An authority and a server's certificate, made once per run."""
    ca = make_ca()
    return ca, make_certificate(ca)


SMALLER = (8952, 1452)
"""Sizes that are tried below the one a test asks for."""


class Call:
    """A call arranged on the clock."""

    def __init__(self, callback: Callable[[], object]) -> None:
        self.callback: Callable[[], object] | None = callback

    def cancel(self) -> None:
        """Forget it."""
        self.callback = None


class VirtualClock:
    """Time that moves from call to call; calls come a microsecond late, as in a real loop."""

    def __init__(self) -> None:
        self._now = 1000.0
        self._calls: list[tuple[float, int, Call]] = []
        self._order = itertools.count()
        self.ran = 0

    def time(self) -> float:
        """Now."""
        return self._now

    def call_at(self, when: float, callback: Callable[[], object]) -> Call:
        """Arrange a call."""
        call = Call(callback)
        heapq.heappush(self._calls, (when, next(self._order), call))
        return call

    def run_until(self, done: Callable[[], bool], limit: float = 60.0) -> None:
        """Move time until `done`; fails after `limit` seconds of it, or when nothing is left."""
        end = self._now + limit
        while not done():
            assert self._calls, "nothing is left to happen"
            when, _, call = heapq.heappop(self._calls)
            if call.callback is None:
                continue
            assert when <= end, f"not done within {limit} s"
            self._now = max(self._now, when) + 1e-6
            self.ran += 1
            call.callback()

    def run_for(self, seconds: float) -> None:
        """Move time by so much."""
        reached: list[bool] = []
        self.call_at(self._now + seconds, lambda: reached.append(True))
        self.run_until(lambda: bool(reached), seconds + 1.0)


def hand_over(
    transport: AioquicTransport, datagrams: list[bytes], address: Any, now: float
) -> None:
    """Give a transport datagrams as a socket does, which reads many at a time."""
    while datagrams:
        datagrams = datagrams[transport.datagrams_received(datagrams, address, now) :]


class Recorder:
    """A receiver that records; `on_batch` runs where a session would pump."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.calls: list[tuple[Any, ...]] = []
        self.data: dict[int, bytearray] = {}
        self.finished: set[int] = set()
        self.on_batch: Callable[[], None] = lambda: None
        self.on_data: Callable[[int, bytes], None] = lambda stream_id, data: None

    def connected(self) -> None:
        self.calls.append(("connected",))

    def stream_data(self, stream_id: int, data: bytes, fin: bool) -> None:
        self.data.setdefault(stream_id, bytearray()).extend(data)
        if fin:
            self.finished.add(stream_id)
        self.on_data(stream_id, data)

    def stream_reset(self, stream_id: int, code: int) -> None:
        self.calls.append(("stream_reset", stream_id, code))

    def stop_sending(self, stream_id: int, code: int) -> None:
        self.calls.append(("stop_sending", stream_id, code))

    def datagram(self, data: bytes) -> None:
        self.calls.append(("datagram", data))

    def batch_received(self) -> None:
        self.on_batch()

    def closed(self, code: int | None, reason: str, by_peer: bool) -> None:
        self.calls.append(("closed", code, reason, by_peer))

    @property
    def octets(self) -> int:
        """Octets received on all streams."""
        return sum(map(len, self.data.values()))


class Side:
    """One end: its transport, its receiver, its end of the wire, its process and its kernel."""

    blocked = False
    socket_buffers = (4096, 4096)

    def __init__(self, address: tuple[str, int], clock: VirtualClock) -> None:
        self.address = address
        self.clock = clock
        self.peer: Side
        self.quic: Connection
        self.transport: AioquicTransport
        self.receiver: Recorder
        self.sent: list[bytes] = []
        self.drop: Callable[[bytes], bool] = lambda data: False
        self.delay = DELAY
        """Seconds that what it sends takes."""
        self.stopped = False
        """Whether its process reads nothing; set it by `stop` and `go_on`."""
        self.buffer = 4 * 1024 * 1024
        """Octets that its kernel keeps while nothing is read; the rest is lost."""
        self.overflown = 0
        self._kept: deque[tuple[bytes, Any]] = deque()
        self._kept_octets = 0
        self._overdue: list[tuple[Call, Callable[[], object]]] = []
        self.ending: Ending | None = None
        self.connection_ids: list[bytes] = []
        self._batch_arranged = False

    def make_receiver(self, transport: Transport) -> Recorder:
        self.receiver = Recorder(transport)
        return self.receiver

    # Wire

    def send(self, datagrams: Datagrams) -> None:
        for octets, _ in one_by_one(datagrams):
            data = bytes(octets)  # as a socket does, which reads bytes whatever was written
            self.sent.append(data)
            if not self.drop(data):
                arrive = partial(self.peer._arrive, data, self.address)
                self.clock.call_at(self.clock.time() + self.delay, arrive)

    def _arrive(self, data: bytes, address: Any) -> None:
        if self._kept_octets + len(data) > self.buffer:
            self.overflown += 1
            return
        self._kept.append((data, address))
        self._kept_octets += len(data)
        self._read_soon()

    def _read_soon(self) -> None:
        if not self._batch_arranged and not self.stopped:
            self._batch_arranged = True
            self.clock.call_at(self.clock.time() + self.reads_every, self._read)

    reads_every = 0.0
    """Seconds from an arrival to the wake-up that reads it, and what came with it."""

    def _read(self) -> None:
        self._batch_arranged = False
        if self.stopped:
            return
        read = [self._kept.popleft() for _ in range(min(len(self._kept), 64))]
        self._kept_octets -= sum(len(data) for data, _ in read)
        for address, group in groupby(read, itemgetter(1)):
            hand_over(self.transport, [data for data, _ in group], address, self.clock.time())
        self.transport.batch_ended(self.clock.time())
        if self._kept:
            self._read_soon()

    def stop(self) -> None:
        """Its process stops: nothing is read, and no timer of its runs."""
        self.stopped = True

    def go_on(self) -> None:
        """It goes on: timers that are overdue come first, then what the kernel kept."""
        self.stopped = False
        overdue, self._overdue = self._overdue, []
        for call, callback in overdue:
            if call.callback is not None:
                callback()
        if self._kept:
            self._read_soon()

    # Clock

    def time(self) -> float:
        """Now."""
        return self.clock.time()

    def call_at(self, when: float, callback: Callable[[], object]) -> Call:
        """Arrange a call, which waits where the process is stopped then."""

        def fire() -> None:
            if self.stopped:
                self._overdue.append((call, callback))
            else:
                callback()

        call = self.clock.call_at(when, fire)
        return call

    # Owner

    def connection_id_issued(self, connection: Driven, connection_id: bytes) -> None:
        self.connection_ids.append(connection_id)

    def connection_id_retired(self, connection: Driven, connection_id: bytes) -> None:
        self.connection_ids.remove(connection_id)

    def handshake_completed(self, connection: Driven) -> None:
        assert connection is self.transport

    def finished(self, connection: Driven, ending: Ending) -> None:
        assert self.ending is None, "the end was reported twice"
        self.ending = ending


class Pair:
    """A client and a server, connected unless `connect` is False."""

    def __init__(
        self,
        *,
        client: QuicSettings = PLAIN,
        server: QuicSettings = PLAIN,
        datagram_size: int = 1200,
        connect: bool = True,
        reset_token: Callable[[bytes], bytes] | None = None,
        takes: int | None = None,
    ) -> None:
        self.clock = VirtualClock()
        self.client, self.server = Side(CLIENT, self.clock), Side(SERVER, self.clock)
        self.client.peer, self.server.peer = self.server, self.client
        ca, certificate = identity()
        with TemporaryDirectory() as directory:
            files = write_pem(Path(directory), ca, certificate)
            server_config = server_configuration(server, cert=files.cert, key=files.key)
        self.client.quic = Connection(
            configuration=client_configuration(
                client, server_name="localhost", ca=ca.certificate_pem, verify=True
            ),
            settings=client,
            takes=takes,
        )
        self.server.quic = Connection(
            configuration=server_config,
            settings=server,
            original_destination_connection_id=self.client.quic.original_destination_connection_id,
            reset_token=reset_token,
            takes=takes,
        )
        for side, settings in ((self.client, client), (self.server, server)):
            side.connection_ids.append(side.quic.host_cid)
            side.transport = AioquicTransport(
                side.quic,
                wire=side,
                clock=side,
                owner=side,
                receiver_factory=side.make_receiver,
                settings=settings,
                peer=side.peer.address[0],
                datagram_sizes=lambda address: (
                    datagram_size,
                    *(s for s in SMALLER if s < datagram_size),
                ),
            )
        if connect:
            self.connect()

    def connect(self) -> None:
        """Shake hands."""
        self.client.transport.connect(SERVER)
        self.clock.run_until(
            lambda: (
                self.client.quic.handshake_confirmed
                and hasattr(self.client, "receiver")
                and hasattr(self.server, "receiver")
            )
        )
        self.clock.run_for(0.1)
