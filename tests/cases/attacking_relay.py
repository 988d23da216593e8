"""A relay that is against its consumers: it has all that a relay has, and changes what it likes.

It holds what a producer published, octet by octet as a relay's cache does, no key, and an endpoint
of ours that serves what it makes of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import kvcs
from kvcs.errors import KvcsError
from kvcs.kv import DataTrack
from kvcs.moqt.events import Event
from kvcs.moqt.names import FullTrackName, Location, TrackNamespace
from kvcs.moqt.objects import ObjectHeader, ObjectStatus
from kvcs.moqt.track.store import Track
from kvcs.quic.connection import Connection
from kvcs.quic.endpoint import RELAY_PORT, Observer, Server, open_connection
from kvcs.testing.network import Network, leftovers
from tests.builders import Toy, put

SETTLED = 60.0
"""Virtual seconds after which nothing may be left of a session."""

Place = tuple[bytes, Location]
"""Track Name and Location."""

IMPATIENT = kvcs.SubscriberSettings(
    least_deadline=10.0,
    least_recovery=0.1,
    listen=0.05,
    stall=0.05,
    quiet=0.2,
    retry_pause=0.02,
)


@dataclass(frozen=True)
class Held:
    """One Object in a relay's cache."""

    header: ObjectHeader
    payload: bytes

    def at(self, location: Location) -> Held:
        """The same, said to be elsewhere."""
        header = replace(self.header, group_id=location.group, object_id=location.object)
        return Held(header, self.payload)

    def with_payload(self, payload: bytes, properties: bytes | None = None) -> Held:
        """Another payload, and other Properties if they are given."""
        changes: dict[str, Any] = {"payload_length": len(payload)}
        if properties is not None:
            changes["properties"] = properties
        return Held(replace(self.header, **changes), payload)


@dataclass
class Publication:
    """All that a relay has of a publication."""

    namespace: TrackNamespace
    objects: dict[Place, Held] = field(default_factory=dict)

    @property
    def manifests(self) -> list[Place]:
        """Versions of the manifest, oldest first."""
        return sorted(place for place in self.objects if place[0].startswith(b"manifest"))


Attack = Callable[[Publication], None]
"""Changes what the relay serves."""


async def published(prefix: kvcs.Prefix, toy: Toy, **options: Any) -> Publication:
    """What a producer publishes, as a relay gets it."""
    server = Server()
    tracks: list[Track] = []
    add_track = server.origin.add_track

    def noting(track: Track) -> None:
        tracks.append(track)
        add_track(track)

    server.origin.add_track = noting  # type: ignore[method-assign]
    async with kvcs.Publisher(server).publish(prefix, **options) as publication:
        await put(await publication.segment(), toy)
        taken = Publication(publication.namespace)
        for track in tracks:
            for group in track.groups.values():
                for stored in group.objects.values():
                    held = Held(stored.header, b"".join(map(bytes, stored.parts)))
                    taken.objects[track.name.name, stored.header.location] = held
    return taken


@asynccontextmanager
async def attacking(
    network: Network,
    publication: Publication,
    *,
    ends: bool = True,
    observer: Observer | None = None,
) -> AsyncIterator[Server]:
    """The relay, serving what it holds now.

    Args:
        network: where.
        publication: what it holds.
        ends: whether it says that no more comes.
        observer: told every event of every session.
    """
    server = Server(observer=observer)
    with network.host("relay"):
        address = network.host("relay").address
        await server.start(address, RELAY_PORT, cert="unused", key="unused")
    for name in sorted({name for name, _ in publication.objects}):
        track = Track(FullTrackName(publication.namespace, name), authoritative=True)
        held = sorted(
            (location, each)
            for (owner, location), each in publication.objects.items()
            if owner == name
        )
        for location, each in held:
            parts = (memoryview(each.payload),) if each.payload else ()
            track.publish(each.header, parts, 0.0, end_of_group=True)
            if each.header.status is not ObjectStatus.NORMAL:
                track.finish_subgroup(location.group, 0)
        if ends:
            track.end()
        server.origin.add_track(track)
    server.origin.offer_namespace(publication.namespace)
    try:
        yield server
    finally:
        await server.close()


@dataclass
class Outcome:
    """What a consumer got of it."""

    layers: dict[int, kvcs.Layer] = field(default_factory=dict)
    errors: list[KvcsError] = field(default_factory=list)
    rejected: dict[str, int] = field(default_factory=dict)
    """Objects and manifest versions that were refused, by check."""

    @property
    def error(self) -> str:
        """What went wrong, all of it."""
        return "; ".join(map(str, self.errors))


async def retrieved(
    publication: Publication,
    prefix: kvcs.Prefix,
    *,
    deadline: float = 5.0,
    **options: Any,
) -> Outcome:
    """What a consumer gets from the relay, over a virtual network."""
    outcome, network = Outcome(), Network(seed=61)
    async with attacking(network, publication):
        with network.host("consumer"):
            session = await open_connection(f"moqt://relay:{RELAY_PORT}")
        subscriber = kvcs.Subscriber(session, settings=IMPATIENT, **options)
        try:
            async with subscriber.open(prefix, deadline=deadline, probe=0) as cache:
                waits = [cache.layer(index) for index in cache.layers]
                for index, got in enumerate(await asyncio.gather(*waits, return_exceptions=True)):
                    if isinstance(got, KvcsError):
                        outcome.errors.append(got)
                    elif isinstance(got, BaseException):
                        raise got
                    else:
                        outcome.layers[index] = got
                try:
                    await cache.complete()
                except KvcsError as exc:
                    outcome.errors.append(exc)
                outcome.rejected = dict(cache.report.rejected)
        except KvcsError as exc:
            outcome.errors.append(exc)
        await session.close()
        for check, count in (*subscriber.unopened.items(), *subscriber.refused.items()):
            outcome.rejected[check] = outcome.rejected.get(check, 0) + count
    await asyncio.sleep(SETTLED)
    assert leftovers(network) == []
    return outcome


WATCHED = 1.5
"""Virtual seconds: less than a consumer waits for what is listed and does not come."""


async def watched(publication: Publication, prefix: kvcs.Prefix, **options: Any) -> list[str]:
    """What the relay sees of a consumer while more is to come: the events of its session."""
    network, seen = Network(seed=61), list[str]()

    def note(connection: Connection, event: Event) -> None:
        seen.append(type(event).__name__)

    async with attacking(network, publication, ends=False, observer=note):
        with network.host("consumer"):
            session = await open_connection(f"moqt://relay:{RELAY_PORT}")
        async with kvcs.Subscriber(session, **options).open(prefix, probe=0):
            await asyncio.sleep(WATCHED)
            events = list(seen)
        await session.close()
    return events


def data(track: DataTrack, layer: int, block: int) -> Place:
    """Place of an Object of a data track."""
    return track.name, Location(layer, block)
