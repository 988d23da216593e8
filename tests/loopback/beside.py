"""Several publications of one prefix behind one server, each with faults of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager

import kvcs
from kvcs.kv import DataTrack
from kvcs.moqt import events
from kvcs.moqt.names import FullTrackName
from kvcs.quic.connection import Connection, PeerRequest
from tests.builders import Toy
from tests.certificates import PemFiles
from tests.loopback.kv_fixtures import accepting, joined, serving
from tests.loopback.raw_publication import RawPublication
from tests.loopback.retrieving import ALL

Gone = Iterable[tuple[DataTrack, int, int]]
"""Objects that are nowhere: track, layer, block."""


def raw_of(
    toy: Toy, number: int, gone: Gone = (), *, deterministic: bool = False, complete: bool = True
) -> RawPublication:
    """A publication without some Objects."""
    raw = RawPublication(toy, publication_id=bytes([number] * 16))
    octets = toy.writer(complete=complete).to_json_bytes()
    if deterministic:
        octets = octets.replace(b'"deterministic":false', b'"deterministic":true')
    raw.manifest(octets)
    left_out = set(gone)
    for layer in ALL:
        blocks = {(track, block): None for track, at, block in left_out if at == layer}
        raw.layer(layer, blocks, blocks)
    raw.end()
    return raw


class Side:
    """Several publications behind one server."""

    def __init__(self, *raws: RawPublication) -> None:
        self.raws = raws
        self.toy = raws[0].toy
        self.asked: list[tuple[str, FullTrackName]] = []
        """SUBSCRIBEs and FETCHes."""

    def answer(self, connection: Connection, request: PeerRequest) -> bool:
        """Answer one request of a peer."""
        responder = connection.core.responder
        if isinstance(request, events.SubscribeNamespaceReceived):
            prefix = request.track_namespace_prefix
            responder.accept(request.request_id)
            for raw in self.raws:
                assert raw.namespace[: len(prefix)] == prefix
                responder.namespace(request.request_id, raw.namespace[len(prefix) :])
            return True
        if isinstance(request, events.SubscribeReceived | events.FetchReceived):
            kind = "fetch" if isinstance(request, events.FetchReceived) else "subscribe"
            self.asked.append((kind, request.full_track_name))
            for raw in self.raws:
                if raw.namespace == request.full_track_name.namespace:
                    return raw.answer(connection, request)
        return False

    def data_of(self, raw: RawPublication) -> list[str]:
        """Data tracks of one publication that were asked for."""
        return [
            name.name.decode()
            for _, name in self.asked
            if name.namespace == raw.namespace and not name.name.startswith(b"manifest")
        ]


def named(raw: RawPublication) -> kvcs.PublicationNamespace:
    return kvcs.PublicationNamespace.parse(raw.namespace)


@asynccontextmanager
async def session_with(side: Side, files: PemFiles) -> AsyncIterator[Connection]:
    """A session with a server of the publications."""
    async with serving(files, observer=accepting(side.answer)) as server:
        async with joined(server, files) as client:
            yield client


def whose(layer: kvcs.Layer, toys: Sequence[Toy], blocks: slice) -> int:
    """Which toy a part of a layer is from, all of it."""
    size = toys[0].descriptor.block_tokens
    part = slice(blocks.start * size, blocks.stop * size)
    found = [
        number
        for number, toy in enumerate(toys)
        if layer.k[part].tobytes() == toy.k[layer.index][part].tobytes()
        and layer.v[part].tobytes() == toy.v[layer.index][part].tobytes()
    ]
    assert len(found) == 1, "a segment is mixed"
    return found[0]
