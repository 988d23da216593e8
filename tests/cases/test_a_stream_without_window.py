"""A stream that its peer gives no window holds nobody up but itself."""

from __future__ import annotations

from typing import Any

import pytest

import kvcs
from kvcs.moqt.data import SubgroupHeader, read_stream_header
from kvcs.moqt.events import RequestAccepted
from kvcs.moqt.names import Location
from kvcs.moqt.wire import Reader
from tests.builders import QUICK, put, same, toy_prefix, toy_publication
from tests.certificates import PemFiles
from tests.loopback.kv_fixtures import Wire, joined, serving

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

K, V = "k.raw.s0", "v.raw.s0"


async def test_the_other_component_and_later_layers_flow_meanwhile(files: PemFiles) -> None:
    toy, prefix, wire = toy_publication(), toy_prefix(), Wire()
    every = {Location(layer, block) for layer in range(4) for block in range(3)}
    later = {location for location in every if location.group > 0}
    async with serving(files) as server, joined(server, files, wire) as client:
        async with kvcs.Publisher(server).publish(prefix) as publication:
            async with kvcs.Subscriber(client, settings=QUICK).open(prefix) as cache:
                await wire.until(lambda: len(wire.of(RequestAccepted)) == 4)
                (connection,) = server.connections
                transport: Any = connection.transport
                stream_octets, send_all = transport.stream_octets, transport.send_all
                shut: list[int] = []

                def window(stream_id: int) -> int:
                    if stream_id in shut:
                        return 0
                    opened: int = stream_octets(stream_id)
                    return 1 if stream_id == connection.core._next_uni else opened

                def looking(stream_id: int, parts: Any, fin: bool) -> None:
                    """Shut the stream of layer 0 that opens first."""
                    if not shut and stream_id & 3 == 3:
                        header = read_stream_header(Reader(b"".join(parts)))
                        if isinstance(header, SubgroupHeader) and header.publisher_priority == 0:
                            if header.track_alias in aliases and header.group_id == 0:
                                shut.append(stream_id)
                    send_all(stream_id, parts, fin)

                replies = [event.reply for event in wire.of(RequestAccepted)]
                aliases = {reply.track_alias for reply in replies[-2:]}  # type: ignore[union-attr]
                transport.stream_octets, transport.send_all = window, looking
                await put(await publication.segment(), toy)
                await wire.until(lambda: len(shut) == 1)
                await wire.until(
                    lambda: (
                        any(every <= set(wire.got.get(name, ())) for name in (K, V))
                        and all(later <= set(wire.got.get(name, ())) for name in (K, V))
                    )
                )
                for layer in range(1, 4):
                    await cache.layer(layer)
                assert cache.progress.layers_ready == 3
                transport.stream_octets, transport.send_all = stream_octets, send_all
                connection.batch_received()
                assert all([same(layer, toy) async for layer in cache])


async def test_what_waits_for_the_window_stays_with_us(files: PemFiles) -> None:
    """A blocked stream has one octet below us, not the room that belongs to all."""
    toy, prefix, wire = toy_publication(), toy_prefix(), Wire()
    async with serving(files) as server, joined(server, files, wire) as client:
        async with kvcs.Publisher(server).publish(prefix) as publication:
            async with kvcs.Subscriber(client, settings=QUICK).open(prefix) as cache:
                await wire.until(lambda: len(wire.of(RequestAccepted)) == 4)
                (connection,) = server.connections
                transport: Any = connection.transport
                stream_octets = transport.stream_octets
                transport.stream_octets = lambda stream_id: 0
                handed: dict[int, int] = {}
                send_all = transport.send_all

                def counting(stream_id: int, parts: Any, fin: bool) -> None:
                    handed[stream_id] = handed.get(stream_id, 0) + sum(map(len, parts))
                    send_all(stream_id, parts, fin)

                transport.send_all = counting
                await put(await publication.segment(), toy)
                await wire.until(lambda: len(wire.got.get(V, ())) >= 4)
                data = [octets for stream_id, octets in handed.items() if stream_id & 3 == 3]
                assert len(data) >= 8 and max(data) < 68
                transport.stream_octets = stream_octets
                connection.batch_received()
                assert all([same(layer, toy) async for layer in cache])
