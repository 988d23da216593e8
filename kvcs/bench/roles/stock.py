"""Roles of the library as it comes: its asyncio protocol, its settings, one stream.

The library's own `connect` would bind its socket to every interface of the machine, so both
sockets are made here, on the loopback address; all else is the library's.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any, Final

from aioquic.asyncio.protocol import QuicConnectionProtocol
from aioquic.asyncio.server import QuicServer
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from aioquic.quic.events import HandshakeCompleted, QuicEvent, StreamDataReceived

from kvcs.bench.parent import Parent
from kvcs.bench.usage import Meter
from kvcs.bench.workload import Workload

ALPN: Final = ["kvcs-bench"]
LOOPBACK: Final = "127.0.0.1"


class StockReceiver(QuicConnectionProtocol):
    """Counts octets."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.octets = 0
        self.done = asyncio.Event()

    def quic_event_received(self, event: QuicEvent) -> None:
        """Count what comes."""
        if isinstance(event, StreamDataReceived):
            self.octets += len(event.data)
            if event.end_stream:
                self.done.set()


class StockSender(QuicConnectionProtocol):
    """Sends everything at once on one stream."""

    ready: asyncio.Future[StockSender]

    def quic_event_received(self, event: QuicEvent) -> None:
        """Note when the client is there."""
        if isinstance(event, HandshakeCompleted):
            self.ready.set_result(self)

    def go(self, payload: bytes) -> None:
        """Start to send; the library holds what is not acknowledged, and all that waits."""
        stream_id = self._quic.get_next_available_stream_id(is_unidirectional=True)
        self._quic.send_stream_data(stream_id, payload, end_stream=True)
        self.transmit()


def _configuration(options: dict[str, Any], *, is_client: bool) -> QuicConfiguration:
    """The library's defaults, but for the size of datagrams where one is chosen."""
    configuration = QuicConfiguration(
        is_client=is_client, alpn_protocols=ALPN, server_name=LOOPBACK if is_client else None
    )
    if options["datagram"] is not None:
        configuration.max_datagram_size = options["datagram"]
    return configuration


async def sender(parent: Parent, options: dict[str, Any]) -> None:
    """Listen, and send to the one client when told."""
    workload = Workload(**options["workload"])
    configuration = _configuration(options, is_client=False)
    configuration.load_cert_chain(options["cert"], options["key"])
    loop = asyncio.get_running_loop()
    StockSender.ready = loop.create_future()
    transport, server = await loop.create_datagram_endpoint(
        lambda: QuicServer(configuration=configuration, create_protocol=StockSender),
        local_addr=(LOOPBACK, 0),
    )
    payload = os.urandom(workload.data_octets) * workload.objects
    try:
        parent.ready(str(transport.get_extra_info("sockname")[1]))
        await parent.word("go")
        client = await StockSender.ready
        meter = Meter()
        client.go(payload)
        await parent.word("stop")
        meter.stop()
        parent.tell("sent", **meter.reading())
    finally:
        server.close()


async def receiver(parent: Parent, options: dict[str, Any]) -> None:
    """Connect, and count what comes."""
    configuration = _configuration(options, is_client=True)
    configuration.load_verify_locations(options["ca"])
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.create_datagram_endpoint(
        lambda: StockReceiver(QuicConnection(configuration=configuration)),
        local_addr=(LOOPBACK, 0),
    )
    try:
        protocol.connect((LOOPBACK, int(options["url"].rpartition(":")[2])))
        await protocol.wait_connected()
        parent.ready()
        await parent.word("go")
        meter = Meter()
        await protocol.done.wait()
        meter.stop()
        parent.tell("received", octets=protocol.octets, **meter.reading())
        await parent.word("check")
        parent.tell("checked")
    finally:
        protocol.close()
        await protocol.wait_closed()
        transport.close()
