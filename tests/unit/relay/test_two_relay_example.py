"""The example of the draft, each message on each hop in its order (KVCS "Relay Considerations").

Relay B has Groups 0 to 4 of an earlier consumer, and follows nothing any more. A consumer asks it
for the Next Object and a fill from 0/0; what lies in B's cache comes from there, the rest over both
relays from the producer, to the End of Track.
"""

from __future__ import annotations

from kvcs.moqt import events
from kvcs.moqt.errors import PublishDoneCode
from kvcs.moqt.events import Event
from kvcs.moqt.filters import LocationFilter
from kvcs.moqt.names import Location
from kvcs.moqt.objects import ObjectStatus
from kvcs.moqt.parameters import Parameters, ParameterType
from kvcs.moqt.streams import FetchHeader, SubgroupHeader
from kvcs.testing.actors import EVERYTHING, PUBLICATION, ConsumerPeer, PublisherPeer, full_name
from kvcs.testing.hub import Hub
from kvcs.testing.tracks import end_track, put_group
from tests.unit.relay.chains import OBJECTS, A, B, locations, named, subscribe_namespace

Hop = tuple[str, str]
Line = tuple[str, Hop]


class Diagram:
    """Messages as the columns of the example have them, noted where they arrive."""

    def __init__(self) -> None:
        self.lines: list[Line] = []

    def note(self, what: str, sender: str, receiver: str) -> None:
        """An arrow."""
        self.lines.append((what, (sender, receiver)))

    def watch(self, events_of: list[Event], sender: str, receiver: str) -> None:
        """Note what arrived in the events of one end of a session, and forget them."""
        for event in events_of:
            text = _text(event)
            if text:
                self.note(text, sender, receiver)
        events_of.clear()


def _text(event: Event) -> str:
    if isinstance(event, events.PublishNamespaceReceived):
        return "PUBLISH_NAMESPACE"
    if isinstance(event, events.NamespaceAnnounced):
        return "NAMESPACE"
    if isinstance(event, events.SubscribeReceived):
        return "SUBSCRIBE"
    if isinstance(event, events.FetchReceived):
        return "FETCH"
    if isinstance(event, events.DataStreamOpened):
        if isinstance(event.header, FetchHeader):
            return "fill stream"
        if isinstance(event.header, SubgroupHeader):
            return f"group {event.header.group_id}"
    return ""


def test_every_message_of_the_example() -> None:
    upper, lower = Hub(relay_id=A), Hub(relay_id=B)
    link = lower.link(upper)
    diagram = Diagram()
    producer = PublisherPeer(upper, None)
    ends = {
        ("producer", "A"): producer.spoke.relay,
        ("A", "producer"): producer.end,
        ("B", "A"): link.relay,
        ("A", "B"): link.peer,
    }

    def look() -> list[Line]:
        """What has arrived since the last look, hop by hop."""
        lower.run()
        for (sender, receiver), end in ends.items():
            diagram.watch(end.events, sender, receiver)
        lines, diagram.lines = diagram.lines, []
        return lines

    # PUBLISH_NAMESPACE of the five fields; B has A tell it of them, as draft 22 of MOQT wants it.
    early = ConsumerPeer(lower)
    subscribe_namespace(early)
    producer.announce(PUBLICATION)
    assert len(PUBLICATION) == 5
    assert look() == [
        ("PUBLISH_NAMESPACE", ("producer", "A")),
        ("NAMESPACE", ("A", "B")),
    ]
    assert named(early) == [PUBLICATION[2:]]

    # Groups 0..4 come to B, and whoever wanted them has left for longer than B lingers.
    track = producer.track(full_name(b"k.raw.s0"))
    for group in range(5):
        put_group(track, group, OBJECTS)
    early.cancel(early.subscribe())
    lower.advance(max(hub.core.limits.upstream_linger for hub in (lower, upper)) * 2 + 1.0)
    look()
    for hub in (upper, lower):
        assert not hub.core._tracks.get(track.name)

    # SUBSCRIBE "k.raw.s0", Next Object + fill from 0/0: consumer, B, A, producer.
    consumer = ConsumerPeer(lower)
    ends["consumer", "B"] = consumer.spoke.relay
    request = consumer.end.core.requester.subscribe(
        track.name,
        Parameters.of(
            location_filter=LocationFilter.next_object(),
            fill_parameters=Parameters.of(location_filter=EVERYTHING),
        ),
    )
    subscribes = look()
    assert sorted(subscribes) == sorted(
        [
            ("SUBSCRIBE", ("consumer", "B")),
            ("SUBSCRIBE", ("B", "A")),
            ("SUBSCRIBE", ("A", "producer")),
        ]
    )
    asked = producer.subscribes[-1]
    assert asked.full_track_name == track.name
    assert asked.parameters.get(ParameterType.LOCATION_FILTER) == LocationFilter.next_object()
    # Only what lies behind the relays' caches is asked of the producer.
    fill = asked.parameters.get(ParameterType.FILL_PARAMETERS)
    behind = LocationFilter.absolute_start(5, 0)
    assert fill is not None and fill.get(ParameterType.LOCATION_FILTER) == behind

    # Fill stream: Groups 0..4 from B's cache.
    accepted = consumer.accepted(request)
    assert accepted is not None
    largest = accepted.reply.parameters.get(ParameterType.LARGEST_OBJECT)
    assert largest == Location(4, OBJECTS)
    opened = consumer.end.of(events.DataStreamOpened)
    assert [type(each.header) for each in opened] == [FetchHeader]
    assert consumer.locations(request) == locations(range(5))
    assert not producer.fetches
    hits = lower.core.stats.hits

    # Group 5 and those that follow: producer, A, B, consumer; nothing else crosses.
    for group in (5, 6):
        put_group(track, group, OBJECTS)
        assert look() == [
            (f"group {group}", ("producer", "A")),
            (f"group {group}", ("A", "B")),
        ]
        assert consumer.locations(request) == locations(range(group + 1))

    # End of Track, over both relays too.
    end_track(track, 7)
    look()
    upper.advance(2.0)
    statuses = [item.header.status for item in consumer.objects(request)]
    assert statuses[-1] is ObjectStatus.END_OF_TRACK
    assert consumer.locations(request) == locations(range(7))
    ended = consumer.done(request)
    assert ended is not None and ended.status == PublishDoneCode.TRACK_ENDED
    assert ended.every_stream_seen
    assert lower.core.stats.hits == hits >= 1 and lower.core.stats.upstream_fetches == 0
