"""PUBLISH through the relay: to SUBSCRIBE_TRACKS, and as a source of later SUBSCRIBEs (MOQT §7)."""

from __future__ import annotations

import pytest

from kvcs.errors import RequestError
from kvcs.moqt import events
from kvcs.moqt.errors import PublishDoneCode, RequestCode
from kvcs.moqt.filters import RangeFilter
from kvcs.moqt.names import FullTrackName, Location
from kvcs.moqt.parameters import Parameters
from kvcs.moqt.properties import KeyValues
from kvcs.moqt.settings import SessionSettings
from kvcs.testing.actors import PUBLICATION, SCOPE, ConsumerPeer, PublisherPeer, full_name
from kvcs.testing.hub import Hub
from kvcs.testing.residue import residue
from kvcs.testing.tracks import end_track, put, put_group
from tests.unit.relay.publishing import NAME, TASTE, Listener, Pusher, pair

# To SUBSCRIBE_TRACKS


@pytest.mark.parametrize("first", ["publisher", "listener"])
def test_a_published_track_reaches_who_asked_for_tracks(first: str) -> None:
    hub, pusher = pair()
    listener = Listener(hub)
    if first == "publisher":
        source, _ = pusher.push()
        listener.ask()
    else:
        listener.ask()
        source, _ = pusher.push()
    (published,) = listener.published()
    assert published.full_track_name == NAME
    put_group(source, 0, 2)
    hub.run()
    assert listener.locations() == [(0, 0), (0, 1)]
    end_track(source, 1)
    hub.run()
    hub.advance(2.0)
    done = listener.done(published.request_id)
    assert done is not None
    assert (done.status, done.every_stream_seen) == (PublishDoneCode.TRACK_ENDED, True)


def test_a_published_track_is_told_with_properties_and_largest_object() -> None:
    hub, pusher = pair()
    source = pusher.track(NAME, KeyValues.of({TASTE: 4}))
    put_group(source, 0, 2)
    pusher.push_track(source)
    listener = Listener(hub)
    listener.ask(group_order=2)
    (published,) = listener.published()
    assert published.track_properties == KeyValues.of({TASTE: 4})
    assert published.parameters == Parameters.of(largest_object=Location(0, 2), group_order=2)


@pytest.mark.parametrize(("taste", "told"), [(4, True), (9, False)])
def test_a_track_property_filter_selects(taste: int, told: bool) -> None:
    hub, pusher = pair()
    pusher.push(properties=KeyValues.of({TASTE: taste}))
    listener = Listener(hub)
    listener.ask(track_property_filter=[RangeFilter(0, ((1, 5),), TASTE)])
    assert len(listener.published()) == told


def test_the_publisher_itself_and_other_scopes_are_not_told() -> None:
    hub, pusher = pair()
    pusher.end.core.requester.subscribe_tracks(SCOPE)
    other = Listener(hub)
    other.ask((SCOPE[0], b"T" * 16))
    pusher.push()
    assert pusher.end.of(events.PublishReceived) == []
    assert other.published() == []


def test_a_held_subscribe_is_served_instead_of_a_publish() -> None:
    hub, pusher = pair()
    listener = Listener(hub)
    listener.ask()
    held = listener.subscribe(rendezvous_timeout=5000)
    assert listener.accepted(held) is None
    source, _ = pusher.push()
    assert listener.accepted(held) is not None
    assert listener.published() == []
    put_group(source, 0, 1)
    hub.run()
    assert listener.locations(held) == [(0, 0)]


def test_two_publishers_of_a_track_are_published_once_and_merged() -> None:
    hub, first = pair()
    second = Pusher(hub, namespace=None)
    listener = Listener(hub)
    listener.ask()
    source, _ = first.push()
    copy, _ = second.push()
    assert len(listener.published()) == 1
    put_group(source, 0, 2)
    put_group(copy, 0, 2)
    hub.run()
    assert listener.locations() == [(0, 0), (0, 1)]
    first.vanish()
    put_group(copy, 1, 1)
    hub.run()
    assert listener.locations() == [(0, 0), (0, 1), (1, 0)]
    assert listener.end.of(events.SubscriptionEnded) == []
    second.vanish()
    hub.advance(2.0)
    (done,) = listener.end.of(events.SubscriptionEnded)
    assert done.status == PublishDoneCode.GOING_AWAY


def test_a_refused_publish_is_not_offered_again_but_the_next_publication_is() -> None:
    hub, pusher = pair()
    listener = Listener(hub, takes=False)
    listener.ask()
    source, _ = pusher.push()
    Pusher(hub, namespace=None).push_track(source)
    assert len(listener.published()) == 1
    end_track(source, 0)
    hub.run()
    hub.advance(2.0)
    pusher.push()
    assert len(listener.published()) == 2


def test_what_led_to_a_publish_may_end_and_the_publish_goes_on() -> None:
    hub, pusher = pair()
    listener = Listener(hub)
    asked = listener.ask()
    source, _ = pusher.push()
    listener.cancel(asked)
    pusher.push(full_name(b"v.raw.s0"))
    assert len(listener.published()) == 1
    put_group(source, 0, 1)
    hub.run()
    assert listener.locations() == [(0, 0)]


def test_a_new_prefix_brings_what_lies_below_it() -> None:
    hub, pusher = pair()
    pusher.push(FullTrackName((b"free", b"a"), b"t"))
    pusher.push(FullTrackName((b"free", b"b"), b"t"))
    listener = Listener(hub)
    asked = listener.ask((b"free", b"a"))
    assert len(listener.published()) == 1
    moved = Parameters.of(track_namespace_prefix=(b"free", b"b"))
    listener.end.core.requester.update(asked, moved)
    hub.run()
    _, second = listener.published()
    assert second.full_track_name.namespace == (b"free", b"b")


def test_a_new_prefix_of_a_namespace_subscription_names_everything_anew() -> None:
    hub = Hub()
    publisher = PublisherPeer(hub)
    publisher.announce((b"free", b"b"))
    consumer = ConsumerPeer(hub)
    requester = consumer.end.core.requester
    asked = requester.subscribe_namespace(SCOPE)
    hub.run()
    requester.update(asked, Parameters.of(track_namespace_prefix=(b"free",)))
    hub.run()
    told = consumer.end.of(events.NamespaceAnnounced)
    assert [event.suffix for event in told] == [PUBLICATION[2:], (b"b",)]
    publisher.announce((b"free", b"c"))
    assert consumer.end.of(events.NamespaceAnnounced)[-1].suffix == (b"c",)


def test_too_many_matches_are_refused() -> None:
    hub, pusher = pair(max_namespace_matches=1)
    for track in (b"a", b"b"):
        pusher.push(FullTrackName((b"free",), track))
    listener = Listener(hub)
    assert listener.refused(listener.ask((b"free",))) == RequestCode.NAMESPACE_TOO_LARGE


def test_tracks_that_are_looked_at_in_vain_count_for_who_asks() -> None:
    hub = Hub()
    publisher, reader = PublisherPeer(hub), ConsumerPeer(hub)
    for number in range(5):
        name = full_name(b"%d" % number)
        publisher.track(name)
        reader.subscribe(name)
    limits = SessionSettings(max_matches_per_second=1.0, matches_burst=4)
    asker = ConsumerPeer(hub, None, limits)

    def ask(prefix: tuple[bytes, ...]) -> int:
        request_id = asker.end.core.requester.subscribe_tracks(prefix)
        hub.run()
        return request_id

    first = ask(SCOPE)
    assert asker.refused(first) is None
    asker.cancel(first)
    assert asker.refused(ask(SCOPE)) == RequestCode.EXCESSIVE_LOAD
    hub.advance(3)
    assert asker.refused(ask(SCOPE)) is None


def test_a_session_that_goes_away_is_offered_nothing_new() -> None:
    hub, pusher = pair()
    listener = Listener(hub)
    listener.ask()
    listener.end.core.goaway(now=hub.now)
    hub.run()
    pusher.push()
    assert listener.published() == []


# Ends at every moment

MOMENTS = ["before the relay knows", "before the answer", "established", "in mid object", "done"]


@pytest.mark.parametrize("who", ["publisher cancels", "subscriber cancels", "publisher is lost"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_published_track_that_ends_early_leaves_nothing(moment: str, who: str) -> None:
    hub, pusher = pair(upstream_linger=0.5)
    listener = Listener(hub)
    listener.ask()
    source = pusher.track()
    put_group(source, 0, 1, octets=500)
    request_id = pusher.end.core.requester.publish(source)
    relay_end = listener.spoke.relay
    if moment == "before the answer":
        listener.end.on_event = None
    if moment != "before the relay knows":
        hub.run()
    if moment == "in mid object":
        put(source, 1, 0, octets=500)
        relay_end.credit.object_octets = 100
        while not listener.end.of(events.ObjectChunk):
            assert hub.step()
        relay_end.credit.object_octets = 0
        hub.run()
        assert len(listener.end.of(events.ObjectStarted)) == 1
        assert listener.end.of(events.ObjectEnded) == []
    if moment == "done":
        end_track(source, 1)
        hub.run()
        hub.advance(1.0)
    if who == "publisher cancels":
        pusher.end.core.requester.cancel(request_id)
    elif who == "publisher is lost":
        hub.disconnect(pusher.spoke)
    else:
        for published in listener.published():
            listener.end.core.requester.cancel(published.request_id)
            refusal = RequestError("no", RequestCode.UNINTERESTED)
            if moment == "before the answer":
                listener.end.core.responder.refuse(published.request_id, refusal)
        hub.run()
        pusher.end.core.responder.end_subscription(request_id, PublishDoneCode.TRACK_ENDED)
    relay_end.credit.object_octets = 1 << 40
    hub.run()
    hub.advance(5.0)
    if moment == "before the answer" and who != "subscriber cancels":
        for published in listener.published():
            refusal = RequestError("no", RequestCode.UNINTERESTED)
            listener.end.core.responder.refuse(published.request_id, refusal)
    for interest in list(listener.end.core.requests.all()):
        listener.end.core.requester.cancel(interest.request_id)
    hub.run()
    hub.advance(60.0)
    assert not len(hub.core._tracks)
    assert residue(relay_end.core) == {}
    assert residue(listener.end.core) == {}
    assert residue(pusher.end.core, source) == {}
    if who != "publisher is lost":
        assert residue(pusher.spoke.relay.core) == {}
        assert not pusher.end.core.closed
    assert not listener.end.core.closed
