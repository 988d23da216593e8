"""Ends: a Track that has ended, one whose publisher was lost, one that goes on (MOQT §7)."""

from __future__ import annotations

from kvcs.moqt import events
from kvcs.moqt.errors import PublishDoneCode, RequestCode, StreamCode
from kvcs.moqt.filters import LocationFilter
from kvcs.moqt.names import FullTrackName, Location
from kvcs.moqt.parameters import ParameterType
from kvcs.moqt.track.store import Track
from kvcs.testing.actors import PUBLICATION, SCOPE, ConsumerPeer, PublisherPeer, full_name
from kvcs.testing.hub import Hub
from kvcs.testing.tracks import end_track, put, put_group

WHOLE = [Location(g, o) for g in range(3) for o in range(4)]


def produce(track: Track, groups: int = 3) -> None:
    """Groups of four Objects, then End of Track."""
    for group in range(groups):
        put_group(track, group, 4)
    end_track(track, groups)


def status(consumer: ConsumerPeer, request_id: int) -> int | None:
    done = consumer.done(request_id)
    return None if done is None else done.status


def test_end_of_track_reaches_every_consumer() -> None:
    hub = Hub()
    publisher = PublisherPeer(hub)
    track = publisher.track()
    consumers = [ConsumerPeer(hub) for _ in range(2)]
    requests = [consumer.subscribe() for consumer in consumers]
    produce(track)
    hub.advance(2)
    for consumer, request_id in zip(consumers, requests, strict=True):
        assert consumer.locations(request_id) == WHOLE
        done = consumer.done(request_id)
        assert done is not None and done.every_stream_seen
        assert done.status == PublishDoneCode.TRACK_ENDED


def test_a_finished_track_is_served_after_its_publisher_left() -> None:
    hub = Hub()
    publisher = PublisherPeer(hub)
    track = publisher.track()
    first = ConsumerPeer(hub)
    first.subscribe()
    produce(track)
    hub.advance(2)
    publisher.leave()
    for _ in range(3):  # one late joiner after the other
        late = ConsumerPeer(hub)
        request_id = late.subscribe()
        hub.advance(2)
        accepted = late.accepted(request_id)
        assert accepted is not None
        assert accepted.reply.parameters.get(ParameterType.LARGEST_OBJECT) == Location(3, 0)
        assert late.locations(request_id) == WHOLE
        assert late.stream_ends(request_id) == [None]
        assert status(late, request_id) == PublishDoneCode.TRACK_ENDED
    fetch = late.fetch(chosen=LocationFilter.group_end(1, 2, 2))
    assert late.locations(fetch) == [loc for loc in WHOLE if loc >= Location(1, 2)]
    request_id = late.end.core.requester.track_status(full_name())
    hub.run()
    assert late.accepted(request_id) is not None
    stats = hub.core.snapshot()
    assert (stats.upstream_subscriptions, stats.upstream_fetches) == (1, 0)


def test_a_track_joined_at_the_end_of_a_group_is_whole_all_the_same() -> None:
    hub = Hub()
    publisher = PublisherPeer(hub)
    track = publisher.track()
    put_group(track, 0, 4)
    first = ConsumerPeer(hub)
    first.subscribe()  # the Largest Object is the End of Group, which no fill carries
    for group in (1, 2):
        put_group(track, group, 4)
    end_track(track, 3)
    hub.advance(2)
    publisher.vanish()
    late = ConsumerPeer(hub)
    request_id = late.subscribe()
    hub.advance(2)
    assert late.locations(request_id) == WHOLE
    assert status(late, request_id) == PublishDoneCode.TRACK_ENDED
    assert late.markers(request_id) == []


def test_a_track_that_only_publish_done_ends_is_served_for_what_is_known() -> None:
    """A manifest has no End of Track, and only its newest version was asked for."""
    hub = Hub()
    publisher = PublisherPeer(hub)
    manifest = full_name(b"manifest")
    track = publisher.track(manifest)
    for version in range(3):
        put(track, version, 0)
        track.finish_subgroup(version, 0)
    newest = LocationFilter.relative_start(1)
    first = ConsumerPeer(hub)
    asked = first.subscribe(manifest, fill=newest)
    track.end()
    hub.advance(2)
    publisher.leave()
    assert first.locations(asked) == [Location(2, 0)]
    late = ConsumerPeer(hub)
    request_id = late.subscribe(manifest, fill=newest)
    hub.advance(2)
    assert late.locations(request_id) == [Location(2, 0)]
    assert status(late, request_id) == PublishDoneCode.TRACK_ENDED
    # The older versions are not here, and nobody can be asked.
    assert late.refused(late.subscribe(manifest)) == RequestCode.DOES_NOT_EXIST


def test_a_write_once_track_reaches_consecutive_joiners_while_its_publisher_idles() -> None:
    hub = Hub()
    publisher = PublisherPeer(hub)
    track = publisher.track()
    put(track, 0, 0, octets=5000)
    track.finish_subgroup(0, 0)
    for _ in range(3):
        late = ConsumerPeer(hub)
        request_id = late.subscribe()
        assert late.locations(request_id) == [Location(0, 0)]
        assert late.stream_ends(request_id) == [None]
        hub.disconnect(late.spoke)
        hub.advance(3)
    assert track.objects_sent == 1  # from the publisher only once
    hub.advance(60)  # the upstream subscription is given up, the cache stays
    late = ConsumerPeer(hub)
    assert late.locations(late.subscribe()) == [Location(0, 0)]
    assert track.objects_sent == 1
    assert len(publisher.subscribes) == 2


def test_a_joining_fetch_after_the_publisher_has_gone() -> None:
    hub = Hub()
    publisher = PublisherPeer(hub)
    track = publisher.track()
    first = ConsumerPeer(hub)
    first.subscribe()
    produce(track)
    hub.advance(2)
    publisher.vanish()
    late = ConsumerPeer(hub)
    subscription = late.subscribe(fill=None, run=False)
    fetch = late.fetch(run=False)
    hub.advance(2)
    assert late.locations(fetch) == WHOLE
    assert late.locations(subscription) == []
    assert status(late, subscription) == PublishDoneCode.TRACK_ENDED


def test_a_publisher_lost_in_mid_track() -> None:
    hub = Hub()
    publisher = PublisherPeer(hub)
    track = publisher.track()
    consumer, watcher = ConsumerPeer(hub), ConsumerPeer(hub)
    watch = watcher.end.core.requester.subscribe_namespace(SCOPE)
    request_id = consumer.subscribe()
    put_group(track, 0, 4)
    put(track, 1, 0)
    hub.run()
    publisher.vanish()
    hub.advance(2)
    assert status(consumer, request_id) == PublishDoneCode.GOING_AWAY
    # The group that was whole ended with FIN, the open one with a reset.
    assert sorted(map(str, consumer.stream_ends(request_id))) == ["0", "None"]
    assert StreamCode.INTERNAL_ERROR in consumer.stream_ends(request_id)
    withdrawn = watcher.end.of(events.NamespaceWithdrawn)
    assert [(event.request_id, event.suffix) for event in withdrawn] == [(watch, PUBLICATION[2:])]
    late = ConsumerPeer(hub)
    assert late.refused(late.subscribe()) == RequestCode.DOES_NOT_EXIST
    # What was cached whole is still there for who asks for just that.
    fetch = late.fetch(chosen=LocationFilter.absolute_range(0, 0, 0, 3))
    assert late.locations(fetch) == [Location(0, i) for i in range(4)]
    assert late.refused(late.fetch()) == RequestCode.DOES_NOT_EXIST


def test_an_abort_is_passed_on_with_its_reason() -> None:
    hub = Hub()
    publisher = PublisherPeer(hub)
    track = publisher.track()
    consumer = ConsumerPeer(hub)
    request_id = consumer.subscribe()
    put(track, 0, 0)
    hub.run()
    track.end(PublishDoneCode.INTERNAL_ERROR, "prefill failed")
    hub.advance(2)
    done = consumer.done(request_id)
    assert done is not None
    assert (done.status, done.reason) == (PublishDoneCode.INTERNAL_ERROR, "prefill failed")


def test_a_publisher_lost_behind_the_end_of_track_does_no_harm() -> None:
    hub = Hub()
    publisher = PublisherPeer(hub)
    track = publisher.track()
    consumer = ConsumerPeer(hub)
    request_id = consumer.subscribe()
    produce(track)
    hub.run()  # PUBLISH_DONE is still to come
    publisher.vanish()
    hub.advance(2)
    assert consumer.locations(request_id) == WHOLE
    assert status(consumer, request_id) == PublishDoneCode.TRACK_ENDED


def test_a_publisher_that_comes_back_resumes_its_track() -> None:
    hub = Hub()
    publisher = PublisherPeer(hub)
    track = publisher.track()
    consumer = ConsumerPeer(hub)
    request_id = consumer.subscribe()
    put_group(track, 0, 4)
    put(track, 1, 0)
    hub.run()
    publisher.vanish()
    hub.advance(2)
    again = PublisherPeer(hub, None)
    again.tracks[track.name] = track
    again.announce(PUBLICATION)
    for object_id in range(1, 4):
        put(track, 1, object_id)
    resumed = consumer.subscribe()
    hub.run()
    put_group(track, 2, 4)
    end_track(track, 3)
    hub.advance(2)
    assert status(consumer, request_id) == PublishDoneCode.GOING_AWAY
    assert consumer.locations(resumed) == WHOLE
    assert status(consumer, resumed) == PublishDoneCode.TRACK_ENDED


def test_a_publisher_that_begins_anew_at_used_locations_replaces_the_cache() -> None:
    hub = Hub()
    name = FullTrackName((b"free", b"name"), b"track")
    publisher = PublisherPeer(hub, name.namespace)
    old = publisher.track(name)
    first = ConsumerPeer(hub)
    first.subscribe(name)
    produce(old)
    hub.advance(2)
    publisher.leave()
    again = PublisherPeer(hub, name.namespace)
    track = again.track(name)
    consumer = ConsumerPeer(hub)
    request_id = consumer.subscribe(name)
    put_group(track, 0, 1, octets=77)
    hub.advance(1)
    assert consumer.locations(request_id) == [Location(0, 0)]
    assert len(consumer.contents(request_id)[Location(0, 0)]) == 77


def test_a_withdrawn_namespace_leaves_running_subscriptions_alone() -> None:
    hub = Hub()
    publisher = PublisherPeer(hub)
    track = publisher.track()
    consumer, late = ConsumerPeer(hub), ConsumerPeer(hub)
    request_id = consumer.subscribe()
    publisher.withdraw()
    put_group(track, 0, 2)
    hub.run()
    assert consumer.locations(request_id) == [Location(0, 0), Location(0, 1)]
    # The upstream subscription is still Established, so a new one is served from it.
    assert late.locations(late.subscribe()) == [Location(0, 0), Location(0, 1)]
    assert late.refused(late.subscribe(full_name(b"other"))) == RequestCode.DOES_NOT_EXIST
