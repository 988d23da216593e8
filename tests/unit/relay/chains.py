"""Chains of relays in memory, and what tests ask of them."""

from __future__ import annotations

from kvcs.moqt import events
from kvcs.moqt.names import Location
from kvcs.relay.settings import RelayLimits
from kvcs.testing.actors import SCOPE, ConsumerPeer
from kvcs.testing.hub import Hub

A, B, C = (name * 16 for name in (b"A", b"B", b"C"))
OBJECTS = 3


def chain(*, limits: RelayLimits | None = None) -> tuple[Hub, Hub]:
    """Relay A, and B whose upstream it is."""
    upper, lower = Hub(relay_id=A), Hub(limits, relay_id=B)
    lower.link(upper)
    return upper, lower


def locations(groups: range) -> list[Location]:
    return [Location(group, item) for group in groups for item in range(OBJECTS)]


def subscribe_namespace(consumer: ConsumerPeer, prefix: tuple[bytes, ...] = SCOPE) -> int:
    request_id = consumer.end.core.requester.subscribe_namespace(prefix)
    consumer.hub.run()
    return request_id


def named(consumer: ConsumerPeer) -> list[tuple[bytes, ...]]:
    return [event.suffix for event in consumer.end.of(events.NamespaceAnnounced)]


def withdrawn(consumer: ConsumerPeer) -> list[tuple[bytes, ...]]:
    return [event.suffix for event in consumer.end.of(events.NamespaceWithdrawn)]
