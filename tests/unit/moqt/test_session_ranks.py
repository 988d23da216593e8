"""What a session tells its shell of the order among streams that wait below it (MOQT §5.1)."""

from __future__ import annotations

import pytest

from kvcs.moqt import session as session_module
from kvcs.moqt.actions import Action, Prioritize, Rank, Send
from kvcs.moqt.events import Event, FetchReceived
from kvcs.moqt.filters import LocationFilter
from kvcs.moqt.names import GroupOrder
from kvcs.moqt.parameters import Parameters
from kvcs.moqt.sending.publishing import MOVE_SECONDS
from kvcs.moqt.sending.scheduler import send_key
from kvcs.testing.pair import SessionPair
from kvcs.testing.tracks import NAME, put, put_group, track
from tests.unit.moqt.subscriptions import NONE, serve, served, update


def ranks(pair: SessionPair) -> list[tuple[int, Rank]]:
    """Streams and the ranks that the server's shell was told with their octets, in order."""
    return [
        (action.stream_id, action.rank)
        for action in pair.server.actions
        if isinstance(action, Send) and action.rank is not None
    ]


def rank(
    group: int, *, subscriber: int = 128, publisher: int = 0, fill: bool = False, request: int = 0
) -> Rank:
    key = send_key(
        subscriber_priority=subscriber,
        publisher_priority=publisher,
        group_id=group,
        group_order=GroupOrder.ASCENDING,
        is_fill=fill,
        position=0,
    )
    return Rank(NAME.namespace, key, request)


def prioritized(actions: list[Action]) -> list[Prioritize]:
    return [action for action in actions if isinstance(action, Prioritize)]


def test_a_stream_is_ranked_once_when_it_opens() -> None:
    pair, source, _ = served()
    for object_id in range(3):
        put(source, 4, object_id, octets=10, priority=9)
        pair.run()
    sends = [each for each in pair.server.actions if isinstance(each, Send)]
    (opened,) = {stream_id for stream_id, _ in ranks(pair)}
    assert ranks(pair) == [(opened, rank(4, publisher=9))]
    assert len([each for each in sends if each.stream_id == opened]) == 3


def test_control_and_requests_have_no_rank() -> None:
    pair, source, _ = served()
    put_group(source, 0, 1, octets=10, priority=0)
    pair.run()
    of_objects = {stream_id for stream_id, _ in ranks(pair)}
    others = [
        action
        for action in pair.server.actions + pair.client.actions
        if isinstance(action, Send) and action.stream_id not in of_objects
    ]
    assert len(others) >= 4 and all(action.rank is None for action in others)


def test_an_update_holds_for_what_was_handed_over_and_for_what_follows() -> None:
    pair, source, request_id = served()
    put_group(source, 0, 1, octets=10, priority=0)
    put(source, 1, 0, octets=10, priority=5)
    pair.run()
    assert {each.request_id for _, each in ranks(pair)} == {request_id}
    pair.server.actions.clear()
    update(pair, request_id, subscriber_priority=3)
    assert prioritized(pair.server.actions) == [Prioritize(request_id, 3)]
    pair.server.actions.clear()
    update(pair, request_id, subscriber_priority=3)
    assert prioritized(pair.server.actions) == [], "nothing changed"
    put(source, 1, 1, octets=10, priority=5)
    put(source, 2, 0, octets=10, priority=7)
    pair.run()
    assert [each for _, each in ranks(pair)] == [
        rank(1, subscriber=3, publisher=5, request=request_id),
        rank(2, subscriber=3, publisher=7, request=request_id),
    ]


def test_an_update_comes_before_what_is_sent_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "QUANTUM_OCTETS", 100)
    pair, source, request_id = served()
    put(source, 0, 0, octets=1000, priority=0)
    while not ranks(pair):
        assert pair.step()
    pair.server.actions.clear()
    pair.server.credit.object_octets = 0
    update(pair, request_id, subscriber_priority=200)
    assert prioritized(pair.server.actions) == [Prioritize(request_id, 200)]
    assert ranks(pair) == []
    pair.server.credit.object_octets = 1 << 40
    pair.run()
    assert [each for _, each in ranks(pair)] == [rank(0, subscriber=200, request=request_id)]


def test_a_fetch_is_ranked_group_by_group_and_by_its_update() -> None:
    pair, source = SessionPair(), track()
    for group in range(3):
        put_group(source, group, 2, octets=10, priority=group)

    def answer(event: Event) -> None:
        if isinstance(event, FetchReceived):
            pair.server.core.responder.accept_fetch(event.request_id, source, pair.now)

    pair.server.on_event = answer
    pair.server.credit.object_octets = 0
    request_id = pair.client.core.requester.fetch(NAME, NONE)
    pair.run()
    update(pair, request_id, subscriber_priority=7)
    assert prioritized(pair.server.actions) == [Prioritize(request_id, 7)]
    pair.server.credit.object_octets = 1 << 40
    pair.run()
    assert [each for _, each in ranks(pair)] == [
        rank(group, subscriber=7, publisher=group, fill=True, request=request_id)
        for group in range(3)
    ]
    assert len({stream_id for stream_id, _ in ranks(pair)}) == 1


def test_a_fill_stands_before_what_is_live_of_its_group_and_behind_earlier_ones() -> None:
    pair, source = SessionPair(), track()
    put(source, 5, 0, octets=10, priority=0)
    serve(pair, source)
    join = Parameters.of(
        location_filter=LocationFilter.next_object(),
        fill_parameters=Parameters.of(location_filter=LocationFilter.absolute_start(5, 0)),
    )
    pair.client.core.requester.subscribe(NAME, join)
    pair.server.credit.object_octets = 0
    pair.run()
    put(source, 5, 1, octets=10, priority=0)
    put(source, 6, 0, octets=10, priority=0)
    pair.server.credit.object_octets = 1 << 40
    pair.run()
    told = [each.key for _, each in ranks(pair)]
    assert told == sorted(told)
    assert told == [
        rank(5, fill=True).key,
        rank(5).key,
        rank(6).key,
    ]


def test_two_subscribers_of_one_session_are_ranked_by_their_own_priority() -> None:
    pair, source = SessionPair(), track()
    serve(pair, source)
    asked = {}
    for priority in (9, 3):
        parameters = Parameters.of(subscriber_priority=priority)
        asked[priority] = pair.client.core.requester.subscribe(NAME, parameters)
    pair.run()
    put_group(source, 0, 1, octets=10, priority=0)
    put_group(source, 1, 1, octets=10, priority=0)
    pair.run()
    assert [each for _, each in ranks(pair)] == [
        rank(group, subscriber=priority, request=asked[priority])
        for priority in (3, 9)
        for group in range(2)
    ]


@pytest.mark.parametrize("own", [None, 40])
def test_a_fill_with_a_priority_of_its_own_is_of_no_request_that_changes_it(
    own: int | None,
) -> None:
    pair, source = SessionPair(), track()
    put(source, 5, 0, octets=10, priority=0)
    serve(pair, source)
    of_fill = {} if own is None else {"subscriber_priority": own}
    join = Parameters.of(
        location_filter=LocationFilter.next_object(),
        fill_parameters=Parameters.of(
            location_filter=LocationFilter.absolute_start(5, 0), **of_fill
        ),
    )
    request_id = pair.client.core.requester.subscribe(NAME, join)
    pair.run()
    ((_, told),) = ranks(pair)
    assert told.key.subscriber_priority == (128 if own is None else own)
    assert told.request_id == (request_id if own is None else None)


def test_a_peer_that_changes_its_priority_again_and_again_makes_little_work() -> None:
    pair, source, request_id = served()
    pair.server.credit.object_octets = 0
    groups = 200
    for group in range(groups):
        put_group(source, group, 1, octets=10, priority=0)
    pair.run()
    pair.server.actions.clear()
    began = pair.now
    for priority in range(100):
        update(pair, request_id, subscriber_priority=priority)
    assert pair.now == began
    assert prioritized(pair.server.actions) == [Prioritize(request_id, 0)]
    pair.advance(groups * MOVE_SECONDS)
    assert prioritized(pair.server.actions)[1:] == [Prioritize(request_id, 99)]
    pair.server.credit.object_octets = 1 << 40
    pair.run()
    told = [each for _, each in ranks(pair)]
    assert told == [rank(group, subscriber=99, request=request_id) for group in range(groups)]


def test_streams_that_were_handed_over_whole_count_too() -> None:
    """They wait below the session, where each is put in order anew."""
    pair, source, request_id = served()
    groups = 50
    for group in range(groups):
        put_group(source, group, 1, octets=10, priority=0)
    pair.run()
    pair.server.actions.clear()
    for priority in range(100):
        update(pair, request_id, subscriber_priority=priority)
    assert prioritized(pair.server.actions) == [Prioritize(request_id, 0)]
    pair.advance(groups * MOVE_SECONDS)
    assert prioritized(pair.server.actions)[1:] == [Prioritize(request_id, 99)]
