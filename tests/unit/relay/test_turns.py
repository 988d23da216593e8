"""One peer's requests do not use up what an upstream takes from the whole relay."""

from __future__ import annotations

import pytest

from kvcs.moqt import events
from kvcs.moqt.errors import RequestCode
from kvcs.moqt.filters import LocationFilter
from kvcs.moqt.names import FullTrackName
from kvcs.relay.settings import RelayLimits
from kvcs.relay.turns import Turns
from kvcs.testing.actors import SCOPE, ConsumerPeer, PublisherPeer, full_name
from kvcs.testing.hub import Hub
from kvcs.testing.tracks import put
from tests.unit.relay.chains import chain
from tests.unit.relay.test_bounded import Stalled, far

OVER = RequestCode.EXCESSIVE_LOAD


def names(count: int) -> list[FullTrackName]:
    return [full_name(b"%d" % number) for number in range(count)]


def test_turns_go_round_and_nobody_takes_more_than_its_share() -> None:
    turns, began = Turns(3, 2), []
    for owner, count in (("a", 5), ("b", 2), ("c", 1)):
        for number in range(count):
            name = f"{owner}{number}"
            turns.take(owner, lambda now, name=name: began.append(name), 0.0)  # type: ignore[misc]
    assert began == ["a0", "a1", "b0"] and len(turns) == 5 and turns.running == 3
    turns.free("a", 0.0)
    turns.free("a", 0.0)
    assert began == ["a0", "a1", "b0", "a2", "b1"]
    turns.free("b", 0.0)
    turns.free("b", 0.0)
    assert began[5:] == ["c0", "a3"]
    for owner in ("a", "a", "c"):
        turns.free(owner, 0.0)
    assert began[7:] == ["a4"]
    turns.free("a", 0.0)
    assert turns.running == len(turns) == 0


def test_one_that_ends_at_once_lets_the_next_begin_without_recursion() -> None:
    turns, began = Turns(1, 1), []

    def start(now: float) -> None:
        began.append(now)
        turns.free("a", now)

    turns.take("b", began.append, 0.0)
    for _ in range(5000):
        turns.take("a", start, 1.0)
    turns.free("b", 2.0)
    assert len(began) == 5001 and turns.running == len(turns) == 0


def test_who_leaves_the_line_is_not_called() -> None:
    turns, began = Turns(1, 1), []
    starts = [lambda now, each=each: began.append(each) for each in range(4)]  # type: ignore[misc]
    for start in starts:
        turns.take("a", start, 0.0)
    turns.leave(starts[1])
    turns.leave(starts[1])
    assert [start for start in turns] == starts[2:]
    turns.leave(starts[2])
    turns.leave(starts[3])
    turns.free("a", 0.0)
    assert began == [0] and len(turns) == 0


def test_fetches_of_one_peer_leave_turns_for_those_of_others() -> None:
    hub = Hub(RelayLimits(max_upstream_fetches=4, max_caused_fetches_per_session=3))
    stalled = Stalled(hub)
    stalled.serve(full_name())
    greedy, beside = ConsumerPeer(hub), ConsumerPeer(hub)
    greedy.subscribe(fill=None)
    for group in range(10):
        greedy.fetch(chosen=far(2 * group))
    assert len(stalled.peer.fetches) == 3
    beside.fetch(chosen=far(101))
    assert len(stalled.peer.fetches) == 4
    # Two peers that wait for the same range wait for one FETCH.
    for peer in (greedy, beside):
        peer.fetch(chosen=far(101))
    assert len(stalled.peer.fetches) == 4


def test_what_waits_for_its_turn_goes_on_elsewhere_when_the_session_is_lost() -> None:
    hub = Hub(RelayLimits(max_upstream_fetches=1, max_caused_fetches_per_session=1))
    silent, other = PublisherPeer(hub), PublisherPeer(hub)
    for peer in (silent, other):
        for name in names(2):
            track = peer.track(name)
            for group in range(2):
                put(track, group, 0)
    reader = ConsumerPeer(hub)
    for name in names(2):
        reader.subscribe(name, fill=None)
    hub.advance(2.0)
    before_that = len(silent.fetches), len(other.fetches)

    def before(event: events.Event) -> None:
        silent.silent = isinstance(event, events.FetchReceived)

    silent.before_answer = before
    asked = [reader.fetch(name, LocationFilter.absolute_range(0, 0, 0, 0)) for name in names(2)]
    assert (len(silent.fetches) - before_that[0], len(other.fetches) - before_that[1]) == (1, 0)
    silent.vanish()
    assert [len(reader.locations(each)) for each in asked] == [1, 1]
    assert len(other.fetches) - before_that[1] == 2


@pytest.mark.parametrize("above", [False, True])
def test_tracks_that_one_session_causes_are_bounded(above: bool) -> None:
    """From a publisher at this relay, or one above it."""
    limits = RelayLimits(max_caused_per_session=3, upstream_linger=5)
    if above:
        upper, hub = chain(limits=limits)
    else:
        upper = hub = Hub(limits)
    origin = PublisherPeer(upper)
    for name in names(9):
        put(origin.track(name), 0, 0)
    greedy, beside = ConsumerPeer(hub), ConsumerPeer(hub)
    asked = [greedy.subscribe(name) for name in names(4)]
    assert [greedy.refused(each) for each in asked] == [None, None, None, OVER]
    assert greedy.refused(greedy.fetch(names(5)[4])) == OVER
    assert hub.core.stats.upstream_share_refused == 2
    # What is here already costs nothing, and others have a share of their own.
    again = greedy.subscribe(names(1)[0])
    assert len(greedy.objects(again)) == 1
    others = [beside.subscribe(name) for name in names(9)[3:6]]
    assert all(len(beside.objects(each)) == 1 for each in others)
    assert len(greedy.objects(greedy.subscribe(names(4)[3]))) == 1
    # Once a Track is not wanted any more, another may be.
    greedy.cancel(asked[0])
    greedy.cancel(again)
    hub.advance(limits.upstream_linger + 2)
    late = greedy.subscribe(names(7)[6])
    assert len(greedy.objects(late)) == 1


def test_who_waits_for_a_publisher_is_counted_when_it_comes() -> None:
    hub = Hub(RelayLimits(max_caused_per_session=2))
    greedy, beside = ConsumerPeer(hub), ConsumerPeer(hub)
    asked = [greedy.subscribe(name, rendezvous_timeout=9000) for name in names(4)]
    shared = beside.subscribe(names(4)[3], rendezvous_timeout=9000)
    assert [greedy.refused(each) for each in asked] == [None] * 4
    origin = PublisherPeer(hub, None)
    for name in names(4):
        put(origin.track(name), 0, 0)
    origin.announce(full_name().namespace)
    assert sorted(str(greedy.refused(each)) for each in asked) == ["9", "9", "None", "None"]
    # The Track that somebody else wants too is got for that one.
    assert len(beside.objects(shared)) == 1


def test_prefixes_of_one_session_are_bounded() -> None:
    hub = Hub(RelayLimits(max_prefixes_per_session=2))
    greedy, beside = ConsumerPeer(hub), ConsumerPeer(hub)
    requester = greedy.end.core.requester
    asked = [requester.subscribe_namespace((*SCOPE, b"C" * 32, b"%032d" % n)) for n in range(2)]
    hub.run()
    asked.append(requester.subscribe_tracks((*SCOPE, b"D" * 32)))
    hub.run()
    refused = {event.request_id for event in greedy.end.of(events.RequestRefused)}
    assert refused == {asked[2]}
    kept = beside.end.core.requester.subscribe_namespace(SCOPE)
    hub.run()
    assert beside.accepted(kept) is not None
    requester.cancel(asked[0])
    hub.run()
    again = requester.subscribe_tracks((*SCOPE, b"D" * 32))
    hub.run()
    assert greedy.accepted(again) is not None
