"""Races that real stacks lose: streams and messages in every order, on a network that reorders."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvcs.moqt.events import (
    Event,
    FetchReceived,
    ObjectStarted,
    SubscribeReceived,
    SubscriptionEnded,
    TrackMalformed,
)
from kvcs.moqt.filters import LocationFilter
from kvcs.moqt.names import Location
from kvcs.moqt.objects import ObjectStatus
from kvcs.moqt.parameters import Parameters
from kvcs.moqt.track.store import Track
from kvcs.testing.pair import End
from kvcs.testing.residue import residue
from kvcs.testing.tracks import NAME, locations, put, track
from tests.property.shuffled import ShuffledPair

ALL = Parameters.of(
    location_filter=LocationFilter.next_object(),
    fill_parameters=Parameters.of(location_filter=LocationFilter.none()),
)
"""Every Object once: the fill up to the Largest Object, the subscription behind it."""

RESUME = Parameters.of(
    forward=1, fill_parameters=Parameters.of(location_filter=LocationFilter.absolute_start(0, 0))
)
PAUSE = Parameters.of(forward=0)
GROUPS, OBJECTS = 4, 3

seeds = st.integers(0, 2**32)
pieces = st.sampled_from([1 << 30, 7, 30])


class Run:
    """A publisher on the server, which answers at once, and a subscriber on the client."""

    def __init__(self, seed: int, piece: int) -> None:
        self.pair = ShuffledPair(seed, piece)
        self.source: Track = track()
        self.places = [Location(g, o) for g in range(GROUPS) for o in range(OBJECTS)]
        self._left = list(self.places)
        self.pair.server.on_event = self._serve
        self.pair.run()

    def _serve(self, event: Event) -> None:
        responder, now = self.pair.server.core.responder, self.pair.now
        if isinstance(event, SubscribeReceived):
            responder.accept_subscribe(event.request_id, self.source, now)
        elif isinstance(event, FetchReceived):
            responder.accept_fetch(event.request_id, self.source, now)

    def publish(self) -> bool:
        """The next Object, its Group's end behind the last one; False when all are published."""
        if not self._left:
            if self.source.ended is None:
                self.source.end()
            return False
        place = self._left.pop(0)
        put(self.source, *place, octets=40)
        if place.object == OBJECTS - 1:
            put(self.source, place.group, OBJECTS, status=ObjectStatus.END_OF_GROUP)
            self.source.finish_subgroup(place.group, 0)
        return True

    def mix(self, publish: float = 0.3) -> None:
        """Publish while everything is under way, until all is there."""
        choose = self.pair.random
        while True:
            if choose.random() < publish:
                self.publish()
            elif not self.pair.step() and not self.publish():
                break
        self.pair.advance(60)

    def check(self) -> None:
        for end in (self.pair.client, self.pair.server):
            if end.core.failure is not None:
                raise end.core.failure
            assert not end.core.closed, end.actions[-1]
            assert end.of(TrackMalformed) == []

    def close(self) -> None:
        """Nothing is left of it, on either side."""
        self.check()
        self.pair.advance(60)
        assert residue(self.pair.client.core) == {}
        assert residue(self.pair.server.core, self.source) == {}


@settings(max_examples=120)
@given(seeds, pieces, st.integers(0, 12))
def test_a_fill_and_what_is_live_meet_in_one_place(seed: int, piece: int, before: int) -> None:
    """Data comes before SUBSCRIBE_OK, PUBLISH_DONE before the last streams, in every mixture."""
    run = Run(seed, piece)
    for _ in range(before):
        run.publish()
    request_id = run.pair.client.core.requester.subscribe(NAME, ALL)
    run.mix()
    assert sorted(locations(run.pair.client.events, request_id)) == run.places
    (ended,) = run.pair.client.of(SubscriptionEnded)
    assert ended.every_stream_seen
    run.close()


@settings(max_examples=80)
@given(seeds, pieces)
def test_updates_while_a_fill_runs_lose_nothing(seed: int, piece: int) -> None:
    run = Run(seed, piece)
    for _ in range(5):
        run.publish()
    client = run.pair.client
    request_id = client.core.requester.subscribe(NAME, ALL)
    choose = run.pair.random
    changes = [PAUSE, RESUME, PAUSE, RESUME]
    while changes:
        if choose.random() < 0.2:
            run.publish()
        established = any(getattr(e, "reply", None) is not None for e in client.events)
        if established and choose.random() < 0.2 and run.source.ended is None:
            client.core.requester.update(request_id, changes.pop(0))
        if not run.pair.step() and not run.publish():
            break
    if len(changes) % 2:  # it is paused: what is missing is asked for in the end
        if client.of(SubscriptionEnded):
            return
        client.core.requester.update(request_id, RESUME)
    run.mix()
    run.check()
    if not changes:
        got = set(locations(client.events, request_id))
        assert got == set(run.places), set(run.places) - got
    run.close()


@settings(max_examples=80)
@given(seeds, pieces, st.integers(0, 60), st.booleans())
def test_a_cancellation_at_any_moment_leaves_nothing(
    seed: int, piece: int, steps: int, fetch: bool
) -> None:
    """Also in the middle of an Object, and when the publisher ends at the same moment."""
    run = Run(seed, piece)
    for _ in range(6):
        run.publish()
    requester = run.pair.client.core.requester
    request_id = requester.fetch(NAME, Parameters()) if fetch else requester.subscribe(NAME, ALL)
    for _ in range(steps):
        if run.pair.random.random() < 0.2:
            run.publish()
        run.pair.step()
    requester.cancel(request_id)
    before = len([e for e in run.pair.client.events if isinstance(e, ObjectStarted)])
    run.mix()
    after = len([e for e in run.pair.client.events if isinstance(e, ObjectStarted)])
    assert after == before  # nothing is reported of a request that was cancelled
    run.close()


@settings(max_examples=80)
@given(seeds, pieces, st.integers(1, 8))
@example(seed=0, piece=1 << 30, stops=4)
def test_streams_that_are_stopped_do_not_hold_up_the_end(seed: int, piece: int, stops: int) -> None:
    """A reset may take a stream's header with it: it is counted, and never seen."""
    run = Run(seed, piece)
    client = run.pair.client
    request_id = client.core.requester.subscribe(NAME, ALL)
    choose = run.pair.random
    while run.publish() or run.pair.step():
        opened = [e.stream_id for e in client.events if type(e).__name__ == "DataStreamOpened"]
        if stops and opened and choose.random() < 0.3:
            stops -= 1
            client.core.requester.stop_stream(choose.choice(opened))
        for _ in range(choose.randrange(3)):
            run.pair.step()
    run.mix()
    assert len(client.of(SubscriptionEnded)) == 1
    twice = [at for at, n in Counter(locations(client.events, request_id)).items() if n > 1]
    assert twice == []
    run.close()


@pytest.mark.parametrize("seed", range(6))
def test_a_publisher_that_gives_up_loses_headers_and_the_subscriber_still_ends(seed: int) -> None:
    """The whole subscription is reset while nothing of its streams has arrived."""
    run = Run(seed, 1 << 30)
    for _ in range(7):
        run.publish()
    request_id = run.pair.client.core.requester.subscribe(NAME, ALL)
    while not run.pair.server.of(SubscribeReceived):
        run.pair.step()
    run.pair.collect()
    run.pair.server.core.responder.end_subscription(request_id, 0x5, "too far behind")
    run.pair.advance(60)
    ends: End = run.pair.client
    (ended,) = ends.of(SubscriptionEnded)
    assert ended.status == 0x5
    run.close()
