"""Roles of raw QUIC: the backend's transport alone, under the settings that kvcs uses."""

from __future__ import annotations

import asyncio
import mmap
import os
from typing import Any, Final

import numpy as np

from kvcs.bench.parent import Parent
from kvcs.bench.usage import Meter
from kvcs.bench.workload import Workload
from kvcs.quic.aioquic_backend import QuicSettings, connect_quic, listen_quic
from kvcs.quic.transport import Transport

ALPN: Final = ("kvcs-bench",)

CONTROL_STREAM: Final = 3
"""First unidirectional stream of a server. The transport takes it for a session's control stream,
whose octets the library sends: what is measured would be slow there."""

FIRST_STREAM: Final = 7
"""The next one, as kvcs has it for Objects; all others are four apart."""


def settings(options: dict[str, Any]) -> QuicSettings:
    """What kvcs would use, but for the protocol."""
    return QuicSettings(alpn=ALPN, datagram_size=options["datagram"])


class _End:
    """A receiver of the transport that does nothing; the roles say what they need."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport

    def connected(self) -> None:
        """The handshake is complete."""

    def stream_data(self, stream_id: int, data: bytes, fin: bool) -> None:
        """Octets of a stream."""

    def stream_reset(self, stream_id: int, code: int) -> None:
        """The peer reset a stream."""

    def stop_sending(self, stream_id: int, code: int) -> None:
        """The peer stopped a stream."""

    def datagram(self, data: bytes) -> None:
        """One datagram."""

    def batch_received(self) -> None:
        """A batch of input is through."""

    def closed(self, code: int | None, reason: str, by_peer: bool) -> None:
        """The connection is over."""


def used_memory(octets: int) -> memoryview:
    """Memory that every page of was touched."""
    memory = np.zeros(octets, np.uint8)
    memory[:: mmap.PAGESIZE] = 1
    return memory.data


class RawSender(_End):
    """Sends as many streams of as many octets as kvcs would, in the pieces that kvcs has.

    Args:
        transport: the connection.
        workload: what is sent.
        client: set once the handshake is complete.
        memory: what the octets are taken from; none takes one Object's again and again.
    """

    def __init__(
        self,
        transport: Transport,
        workload: Workload,
        client: asyncio.Future[RawSender],
        memory: memoryview | None = None,
    ) -> None:
        super().__init__(transport)
        self._workload = workload
        self._client = client
        self._memory = memory
        self._payload = memoryview(os.urandom(workload.data_octets))
        self._sent = self._limit = 0

    def connected(self) -> None:
        """The handshake is complete."""
        self._client.set_result(self)

    def go(self) -> None:
        """Start to send."""
        self._limit = self._workload.octets
        self.transport.send(CONTROL_STREAM, b"", False)
        self._pump()

    def batch_received(self) -> None:
        """There may be credit again."""
        self._pump()

    def _pump(self) -> None:
        transport, size = self.transport, self._workload.stream_octets
        while self._sent < self._limit and (room := transport.octets()) > 0:
            number, offset = divmod(self._sent, size)
            stream_id = FIRST_STREAM + 4 * number
            # A stream that the peer gives no credit to open has none for octets either.
            room = min(room, size - offset, transport.stream_octets(stream_id))
            room = min(room, self._workload.data_octets)
            if room <= 0:
                break
            payload, memory = self._payload[:room], self._memory
            if memory is not None:
                payload = memory[self._sent : self._sent + room]
            transport.send(stream_id, payload, offset + room == size)
            self._sent += room
        transport.flush()


class RawReceiver(_End):
    """Counts octets and ends of streams.

    Args:
        transport: the connection.
        workload: what is received.
        memory: what the octets are copied into; none drops them.
    """

    def __init__(
        self, transport: Transport, workload: Workload, memory: memoryview | None = None
    ) -> None:
        super().__init__(transport)
        self.octets = 0
        self.done = asyncio.Event()
        self._left = workload.streams
        self._memory = memory

    def stream_data(self, stream_id: int, data: bytes, fin: bool) -> None:
        """Octets of a stream."""
        if self._memory is not None:
            self._memory[self.octets : self.octets + len(data)] = data
        self.octets += len(data)
        self._left -= fin
        if not self._left:
            self.done.set()


async def sender(parent: Parent, options: dict[str, Any]) -> None:
    """Listen, and send to the one client when told."""
    workload = Workload(**options["workload"])
    # The client may be done with the handshake before the server is.
    client: asyncio.Future[RawSender] = asyncio.get_running_loop().create_future()
    memory = used_memory(workload.octets) if options["into"] else None

    def accept(transport: Transport) -> RawSender:
        return RawSender(transport, workload, client, memory)

    listener = await listen_quic(
        "127.0.0.1",
        0,
        receiver_factory=accept,
        cert=options["cert"],
        key=options["key"],
        settings=settings(options),
    )
    try:
        parent.ready(str(listener.port))
        await parent.word("go")
        peer = await client
        meter = Meter()
        peer.go()
        await parent.word("stop")
        meter.stop()
        parent.tell("sent", **meter.reading())
    finally:
        await listener.close()


async def receiver(parent: Parent, options: dict[str, Any]) -> None:
    """Connect, and count what comes."""
    workload = Workload(**options["workload"])
    made: list[RawReceiver] = []
    memory = used_memory(workload.octets) if options["into"] else None

    def receive(transport: Transport) -> RawReceiver:
        made.append(RawReceiver(transport, workload, memory))
        return made[-1]

    transport = await connect_quic(
        "127.0.0.1",
        int(options["url"].rpartition(":")[2]),
        receiver_factory=receive,
        ca=options["ca"],
        settings=settings(options),
    )
    try:
        parent.ready()
        await parent.word("go")
        meter = Meter()
        await made[0].done.wait()
        meter.stop()
        parent.tell("received", octets=made[0].octets, **meter.reading())
        await parent.word("check")
        parent.tell("checked")
    finally:
        transport.close(0, "")
        await transport.wait_closed()
