"""Receivers that record and can be awaited, and a server and client made of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from kvcs.quic.aioquic_backend import (
    AioquicListener,
    AioquicTransport,
    QuicSettings,
    connect_quic,
    listen_quic,
)
from kvcs.quic.transport import Transport
from tests.certificates import PemFiles

HOST = "127.0.0.1"


class Recorder:
    """Records calls; `until` waits for what they bring about."""

    def __init__(self, transport: Transport) -> None:
        self.transport = cast(AioquicTransport, transport)
        self.calls: list[tuple[Any, ...]] = []
        self.data: dict[int, bytearray] = {}
        self.finished: set[int] = set()
        self.octets = 0
        self.pump: Callable[[], None] = lambda: None
        self.on_data: Callable[[int, bytes], None] | None = None
        self._changed = asyncio.Event()

    async def until(self, condition: Callable[[], bool], seconds: float = 60.0) -> None:
        """Wait until `condition` holds; it is looked at after each batch and each call."""
        async with asyncio.timeout(seconds):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def until_closed(self, seconds: float = 60.0) -> tuple[Any, ...]:
        """Wait for `closed`; returns its arguments."""
        await self.until(lambda: bool(self.ends), seconds)
        return self.ends[0]

    @property
    def ends(self) -> list[tuple[Any, ...]]:
        """Arguments of the `closed` calls."""
        return [call[1:] for call in self.calls if call[0] == "closed"]

    def connected(self) -> None:
        self._record("connected")

    def stream_data(self, stream_id: int, data: bytes, fin: bool) -> None:
        self.octets += len(data)
        if self.on_data is not None:
            self.on_data(stream_id, data)
        else:
            self.data.setdefault(stream_id, bytearray()).extend(data)
        if fin:
            self.finished.add(stream_id)

    def stream_reset(self, stream_id: int, code: int) -> None:
        self._record("stream_reset", stream_id, code)

    def stop_sending(self, stream_id: int, code: int) -> None:
        self._record("stop_sending", stream_id, code)

    def datagram(self, data: bytes) -> None:
        self._record("datagram", data)

    def batch_received(self) -> None:
        self.pump()
        self._changed.set()

    def closed(self, code: int | None, reason: str, by_peer: bool) -> None:
        self._record("closed", code, reason, by_peer)

    def _record(self, *call: Any) -> None:
        self.calls.append(call)
        self._changed.set()


@dataclass
class Server:
    """A listener and the receivers of its connections, in order of arrival."""

    listener: AioquicListener
    files: PemFiles
    receivers: list[Recorder] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def port(self) -> int:
        """UDP port."""
        return self.listener.port

    async def receiver(self, index: int = 0) -> Recorder:
        """Wait for a connection."""
        async with asyncio.timeout(60.0):
            while len(self.receivers) <= index:
                self.arrived.clear()
                await self.arrived.wait()
        return self.receivers[index]


async def serve(
    files: PemFiles,
    settings: QuicSettings | None = None,
    host: str = HOST,
    port: int = 0,
    client_ca: Path | bytes | None = None,
) -> Server:
    """Listen, recording each connection."""
    server: Server

    def make(transport: Transport) -> Recorder:
        receiver = Recorder(transport)
        server.receivers.append(receiver)
        server.arrived.set()
        return receiver

    listener = await listen_quic(
        host,
        port,
        receiver_factory=make,
        cert=files.cert,
        key=files.key,
        client_ca=client_ca,
        settings=settings,
    )
    server = Server(listener, files)
    return server


async def connect(
    server: Server, settings: QuicSettings | None = None, host: str = HOST, **options: Any
) -> Recorder:
    """Connect to a server; returns the client's receiver."""
    made: list[Recorder] = []

    def make(transport: Transport) -> Recorder:
        made.append(Recorder(transport))
        return made[-1]

    arguments: dict[str, Any] = {"ca": server.files.ca, "port": server.port, **options}
    await connect_quic(host, receiver_factory=make, settings=settings, **arguments)
    return made[0]


async def end(server: Server, *clients: Recorder) -> None:
    """Close clients, then the server."""
    for client in clients:
        client.transport.close(0, "")
        await client.transport.wait_closed()
    await server.listener.close()


def feed(receiver: Recorder, stream_id: int, content: memoryview, piece: int = 65_536) -> None:
    """Send `content` and a FIN as credit allows, from each batch on."""
    sent = 0
    transport = receiver.transport

    def pump() -> None:
        nonlocal sent
        while sent < len(content):
            room = min(transport.octets(), transport.stream_octets(stream_id), piece)
            if room <= 0:
                break
            data = content[sent : sent + room]
            sent += len(data)
            transport.send(stream_id, data, sent == len(content))
        transport.flush()

    receiver.pump = pump
    pump()
