"""What is wrong with one upstream is told to whoever asked it, and harms nobody else."""

from __future__ import annotations

from kvcs.moqt.data import SubgroupEncoder, SubgroupHeader
from kvcs.moqt.errors import PublishDoneCode, RequestCode
from kvcs.moqt.filters import LocationFilter
from kvcs.moqt.names import TrackNamespace
from kvcs.moqt.objects import ObjectHeader, ObjectStatus
from kvcs.moqt.track.store import Track
from kvcs.testing.actors import PUBLICATION, ConsumerPeer, PublisherPeer, full_name
from kvcs.testing.hub import Hub
from kvcs.testing.tracks import put_group
from tests.unit.relay import guarded
from tests.unit.relay.chains import OBJECTS, A, B, C, chain, locations, named, subscribe_namespace
from tests.unit.relay.guarded import Guarded

OTHER: TrackNamespace = (*PUBLICATION[:4], b"Q" * 16)
"""A publication that the upstream in question has nothing to do with."""


class LyingUpstream:
    """An upstream that a test plays itself: it accepts, and sends what it likes."""

    def __init__(self, lower: Hub, rank: int = 0) -> None:
        self.upper = Hub(relay_id=C)
        self.link = lower.link(self.upper, rank)
        self.publisher = PublisherPeer(self.upper)

    def write(self, data: bytes, *, fin: bool = False) -> None:
        """Octets arrive at the lower relay on a data stream of their own."""
        self.link.peer.core.receive_stream_data(10_003, data, fin, self.upper.now)
        self.link.peer.drain_events()
        self.upper.run()


def reports(hub: Hub) -> list[str]:
    found = []
    while (report := hub.core.next_report()) is not None:
        found.append(report.event)
    return found


def test_an_upstream_that_sends_another_track_under_an_alias_harms_nobody_else() -> None:
    lower = Hub(relay_id=B)
    liar = LyingUpstream(lower)
    put_group(liar.publisher.track(), 0, OBJECTS)
    honest = PublisherPeer(lower, OTHER)
    put_group(honest.track(full_name(namespace=OTHER)), 0, OBJECTS)
    consumer, neighbour = ConsumerPeer(lower), ConsumerPeer(lower)
    request = consumer.subscribe()
    other = neighbour.subscribe(full_name(namespace=OTHER))
    liar.write(SubgroupHeader(77, 5, 0, 9).encode(), fin=True)  # an alias that it never gave
    lower.advance(5.0)
    assert consumer.locations(request) == locations(range(1))
    assert neighbour.locations(other) == locations(range(1))
    assert not liar.link.lost


def test_octets_of_an_upstream_that_are_no_stream_cost_its_session_alone() -> None:
    lower = Hub(relay_id=B)
    liar = LyingUpstream(lower)
    put_group(liar.publisher.track(), 0, OBJECTS)
    honest = PublisherPeer(lower, OTHER)
    track = honest.track(full_name(namespace=OTHER))
    consumer, neighbour = ConsumerPeer(lower), ConsumerPeer(lower)
    request = consumer.subscribe()
    other = neighbour.subscribe(full_name(namespace=OTHER))
    liar.write(b"\x3f\xff\xff\xff", fin=True)  # no type of stream
    lower.advance(1.0)
    ended = consumer.done(request)
    assert ended is not None and ended.status == PublishDoneCode.GOING_AWAY
    assert "session_ended" in reports(lower)
    put_group(track, 0, OBJECTS)
    lower.run()
    assert neighbour.locations(other) == locations(range(1))
    assert not consumer.spoke.lost and not neighbour.spoke.lost


def test_contradictions_of_an_upstream_end_the_track_and_it_is_not_asked_again() -> None:
    lower = Hub(relay_id=B)
    liar = LyingUpstream(lower)
    put_group(liar.publisher.track(), 0, OBJECTS)
    second = Hub(relay_id=A)
    lower.link(second, 1)
    good = PublisherPeer(second)
    put_group(good.track(), 0, OBJECTS)
    consumer = ConsumerPeer(lower)
    request = consumer.subscribe()
    head = SubgroupHeader(0, 0, 0, 0)
    item = SubgroupEncoder(head).object(ObjectHeader(0, 0, 0, None, ObjectStatus.NORMAL, b"", 8))
    liar.write(head.encode() + item + b"otherone", fin=True)
    lower.run()
    ended = consumer.done(request)
    assert ended is not None and ended.status == PublishDoneCode.MALFORMED_TRACK
    assert "malformed" in reports(lower)
    again = ConsumerPeer(lower)
    fetched = again.fetch(chosen=LocationFilter.group_end(0, 0, 0))
    assert again.locations(fetched) == locations(range(1))
    assert len(good.subscribes) == 1


def test_an_upstream_that_stalls_is_a_refusal_in_time_and_no_harm_to_others() -> None:
    upper, lower = chain()
    stalled = PublisherPeer(upper)
    stalled.silent = True
    honest = PublisherPeer(lower, OTHER)
    put_group(honest.track(full_name(namespace=OTHER)), 0, OBJECTS)
    consumer = ConsumerPeer(lower)
    requests = [consumer.subscribe(), consumer.fetch()]
    other = consumer.subscribe(full_name(namespace=OTHER))
    assert consumer.locations(other) == locations(range(1))
    lower.advance(2 * lower.core.limits.upstream_wait)
    for request in requests:
        assert consumer.refused(request) == RequestCode.TIMEOUT
    lower.advance(60.0)
    assert not any(track.name == full_name() for track in lower.core._tracks)


def test_what_is_asked_without_permission_is_never_asked_upstream() -> None:
    upper, lower = Hub(relay_id=A), Guarded()
    lower.link(upper)
    producer = PublisherPeer(upper)
    put_group(producer.track(), 0, OBJECTS)
    stranger = ConsumerPeer(lower)
    for request in (stranger.subscribe(), stranger.fetch(), subscribe_namespace(stranger)):
        assert stranger.refused(request) == RequestCode.UNAUTHORIZED
    assert not producer.subscribes
    assert not [one for one in upper.spokes[0].relay.core.requests.all() if not one.ours]
    member = guarded.consumer(lower, guarded.token())
    assert member.locations(member.subscribe()) == locations(range(1))
    subscribe_namespace(member)
    assert named(member) == [PUBLICATION[2:]]
    # It is a member's, not a stranger's, from the cache too.
    again = stranger.subscribe()
    assert stranger.refused(again) == RequestCode.UNAUTHORIZED


def two_publishers(lower: Hub) -> tuple[PublisherPeer, PublisherPeer, list[Track]]:
    """The second one takes its time to answer; both have Group 0."""
    one, two = PublisherPeer(lower), PublisherPeer(lower)
    two.silent = True
    tracks = [one.track(), two.track()]
    for track in tracks:
        put_group(track, 0, OBJECTS)
    return one, two, tracks


def answer(publisher: PublisherPeer, track: Track) -> None:
    """Accept the one SUBSCRIBE at last, and from now on what else is asked."""
    publisher.silent = False
    [asked] = publisher.subscribes
    publisher.end.core.responder.accept_subscribe(asked.request_id, track, publisher.hub.now)
    publisher.hub.run()


def goes_on_behind_group_1(lower: Hub, consumer: ConsumerPeer, request: int, track: Track) -> None:
    """The same subscription gets what it missed, and what is published next."""
    lower.run()
    assert consumer.locations(request) == locations(range(2))
    put_group(track, 2, OBJECTS)
    lower.run()
    assert consumer.locations(request) == locations(range(3))
    assert consumer.done(request) is None
    assert lower.core.stats.failovers_failed == 0


def test_what_is_published_between_two_publishers_is_got_from_the_second() -> None:
    lower = Hub(relay_id=B)
    one, two, tracks = two_publishers(lower)
    consumer = ConsumerPeer(lower)
    request = consumer.subscribe()
    assert consumer.accepted(request) is not None
    one.vanish()
    put_group(tracks[1], 1, OBJECTS)
    answer(two, tracks[1])
    goes_on_behind_group_1(lower, consumer, request, tracks[1])


def test_what_a_lost_publisher_was_behind_with_is_got_from_the_other() -> None:
    lower = Hub(relay_id=B)
    one, two, tracks = two_publishers(lower)
    consumer = ConsumerPeer(lower)
    request = consumer.subscribe()
    put_group(tracks[1], 1, OBJECTS)
    answer(two, tracks[1])
    assert consumer.done(request) is None  # the first one brings it, surely
    one.vanish()
    goes_on_behind_group_1(lower, consumer, request, tracks[1])


def test_who_was_behind_and_has_caught_up_is_not_missed() -> None:
    lower = Hub(relay_id=B)
    one, two, tracks = two_publishers(lower)
    consumer = ConsumerPeer(lower)
    request = consumer.subscribe()
    put_group(tracks[1], 1, OBJECTS)
    answer(two, tracks[1])
    put_group(tracks[0], 1, OBJECTS)
    lower.run()
    one.vanish()
    put_group(tracks[1], 2, OBJECTS)
    lower.run()
    assert consumer.done(request) is None
    assert sorted(consumer.locations(request)) == locations(range(3))
