"""State tables of requests (MOQT §3.1, §6.4): every state with every message, from both sides."""

from __future__ import annotations

import itertools
import time

import pytest

from kvcs.errors import SessionError
from kvcs.moqt import messages as m
from kvcs.moqt.errors import ProtocolViolation, SessionCode
from kvcs.moqt.messages import Message
from kvcs.moqt.names import Location
from kvcs.moqt.parameters import Parameters
from kvcs.moqt.properties import KeyValues
from kvcs.moqt.requests import (
    FROM_REQUESTER,
    FROM_RESPONDER,
    KINDS,
    OK_SCOPES,
    UPDATE_SCOPES,
    Kind,
    Request,
    RequestIds,
    RequestMessage,
    State,
)
from kvcs.moqt.settings import Role
from kvcs.testing.bench import Bench
from kvcs.testing.residue import residue
from kvcs.testing.tracks import NAME, put, track

PREFIX = (b"kvcs-1",)
NONE = Parameters()
BARE = KeyValues()

FIRST: dict[Kind, RequestMessage] = {
    Kind.SUBSCRIBE: m.Subscribe(0, *NAME, NONE),
    Kind.PUBLISH: m.Publish(0, *NAME, 7, NONE, BARE),
    Kind.FETCH: m.Fetch(0, *NAME, NONE),
    Kind.TRACK_STATUS: m.TrackStatus(0, *NAME, NONE),
    Kind.PUBLISH_NAMESPACE: m.PublishNamespace(0, PREFIX, NONE),
    Kind.SUBSCRIBE_NAMESPACE: m.SubscribeNamespace(0, PREFIX, NONE),
    Kind.SUBSCRIBE_TRACKS: m.SubscribeTracks(0, PREFIX, NONE),
}
LATER: list[Message] = [
    m.SubscribeOk(0, NONE, BARE),
    m.FetchOk(False, Location(0, 0), NONE, BARE),
    m.RequestOk(NONE, BARE),
    m.RequestError(0x1, 0, "no", None),
    m.PublishDone(0x2, 0, ""),
    m.PublishStateNotify(NONE),
    m.RequestUpdate(2, NONE),
    m.Namespace((b"a",)),
    m.NamespaceDone((b"a",)),
    m.PublishSkipped((b"a",), b"t"),
]
ALL: list[Message] = [*LATER, *FIRST.values(), m.Setup(BARE)]


def request(kind: Kind, state: State, *, ours: bool) -> Request:
    return Request(0, kind, 0, FIRST[kind], ours=ours, state=state)


@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize(("kind", "state"), list(itertools.product(Kind, State)))
def test_each_message_is_in_the_table_or_a_violation(kind: Kind, state: State, ours: bool) -> None:
    table = FROM_RESPONDER if ours else FROM_REQUESTER
    for message in ALL:
        one = request(kind, state, ours=ours)
        after = table.get((kind, state, type(message)))
        if after is None:
            with pytest.raises(ProtocolViolation):
                one.receive(message)
            assert one.state is state
        else:
            one.receive(message)
            assert one.state is after


@pytest.mark.parametrize("kind", Kind)
def test_a_request_has_one_ok_and_one_error_and_nothing_follows_its_end(kind: Kind) -> None:
    pending = {
        type_: after
        for (k, s, type_), after in FROM_RESPONDER.items()
        if (k, s) == (kind, State.PENDING)
    }
    oks = set(pending) & {m.SubscribeOk, m.FetchOk, m.RequestOk}
    assert len(oks) == 1
    assert pending[m.RequestError] is State.TERMINATED
    for table in (FROM_RESPONDER, FROM_REQUESTER):
        assert not [key for key in table if key[1] in (State.TERMINATED, State.DRAINING)]
        if table is FROM_RESPONDER:
            established = {key[2] for key in table if key[:2] == (kind, State.ESTABLISHED)}
            assert not established & {*oks, m.RequestError}


@pytest.mark.parametrize("kind", Kind)
def test_only_the_publisher_ends_or_describes_a_subscription(kind: Kind) -> None:
    for type_ in (m.PublishDone, m.PublishStateNotify):
        responder = {k[0] for k in FROM_RESPONDER if k[2] is type_}
        requester = {k[0] for k in FROM_REQUESTER if k[2] is type_}
        assert responder == {Kind.SUBSCRIBE}
        assert requester == {Kind.PUBLISH}


def test_every_kind_has_its_first_message_and_its_scopes() -> None:
    assert set(KINDS.values()) == set(Kind)
    assert set(UPDATE_SCOPES) == set(Kind) - {Kind.TRACK_STATUS}
    assert set(OK_SCOPES) == set(Kind) - {Kind.SUBSCRIBE, Kind.FETCH}
    assert request(Kind.FETCH, State.PENDING, ours=True).parameters == NONE


# The same through a session: no state and no input is left out


def serve(kind: Kind, state: State) -> tuple[Bench, int]:
    """A core that answers a request of the peer, which stands in ``state``."""
    bench = Bench(Role.SERVER)
    stream = bench.open(FIRST[kind])
    target = track()
    put(target, 0, 0)
    if state is State.ESTABLISHED:
        # Object data has no credit, so a FETCH stays open.
        bench.credit.object_octets = 0
        responder = bench.core.responder
        if kind is Kind.SUBSCRIBE:
            responder.accept_subscribe(0, target, 0.0)
        elif kind is Kind.FETCH:
            responder.accept_fetch(0, target, 0.0)
        else:
            responder.accept(0)
        bench.drain()
    bench.replies(stream)
    return bench, stream


SERVED = [
    Kind.SUBSCRIBE,
    Kind.FETCH,
    Kind.PUBLISH_NAMESPACE,
    Kind.SUBSCRIBE_NAMESPACE,
    Kind.SUBSCRIBE_TRACKS,
]


@pytest.mark.parametrize("message", [*LATER, *FIRST.values()], ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("state", [State.PENDING, State.ESTABLISHED])
@pytest.mark.parametrize("kind", [*SERVED, Kind.TRACK_STATUS])
def test_responder_takes_updates_and_closes_for_all_else(
    kind: Kind, state: State, message: Message
) -> None:
    if (kind, state) == (Kind.TRACK_STATUS, State.ESTABLISHED):
        state = State.PENDING  # it is over with its answer
    bench, stream = serve(kind, state)
    bench.say(stream, message)
    if isinstance(message, m.RequestUpdate) and kind is not Kind.TRACK_STATUS:
        assert bench.close is None
    else:
        assert bench.close_code == SessionCode.PROTOCOL_VIOLATION
    assert bench.core.failure is None


def ask(kind: Kind) -> tuple[Bench, int]:
    """A core that has made a request; returns the stream of the request."""
    bench = Bench(Role.CLIENT)
    requester = bench.core.requester
    if kind is Kind.SUBSCRIBE:
        requester.subscribe(NAME, NONE)
    elif kind is Kind.FETCH:
        requester.fetch(NAME, NONE)
    elif kind is Kind.TRACK_STATUS:
        requester.track_status(NAME)
    elif kind is Kind.PUBLISH_NAMESPACE:
        requester.publish_namespace(PREFIX)
    elif kind is Kind.SUBSCRIBE_NAMESPACE:
        requester.subscribe_namespace(PREFIX)
    else:
        requester.subscribe_tracks(PREFIX)
    bench.drain()
    return bench, 0


OKS: dict[Kind, Message] = {
    Kind.SUBSCRIBE: m.SubscribeOk(0, NONE, BARE),
    Kind.FETCH: m.FetchOk(False, Location(0, 0), NONE, BARE),
    Kind.TRACK_STATUS: m.RequestOk(NONE, BARE),
    Kind.PUBLISH_NAMESPACE: m.RequestOk(NONE, BARE),
    Kind.SUBSCRIBE_NAMESPACE: m.RequestOk(NONE, BARE),
    Kind.SUBSCRIBE_TRACKS: m.RequestOk(NONE, BARE),
}


@pytest.mark.parametrize("message", [*LATER, *FIRST.values()], ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("kind", OKS)
def test_requester_takes_what_the_table_names_and_closes_for_all_else(
    kind: Kind, state: State, message: Message
) -> None:
    bench, stream = ask(kind)
    if state is State.ESTABLISHED and kind is Kind.TRACK_STATUS:
        return  # it is over with its answer, as the table says
    if state is State.DRAINING:
        if kind is not Kind.SUBSCRIBE:
            return
        bench.say(stream, OKS[kind], m.PublishDone(0x2, 3, ""))
    elif state is State.TERMINATED:
        bench.say(stream, m.RequestError(0x1, 0, "no", None))
    elif state is State.ESTABLISHED:
        bench.say(stream, OKS[kind])
    assert bench.close is None
    bench.say(stream, message)
    legal = (kind, state, type(message)) in FROM_RESPONDER
    if isinstance(message, m.NamespaceDone):
        legal = False  # there was no NAMESPACE before it
    assert (bench.close is None) == legal
    if not legal:
        assert bench.close_code == SessionCode.PROTOCOL_VIOLATION
    assert bench.core.failure is None


@pytest.mark.parametrize("kind", OKS)
def test_what_was_under_way_when_we_cancelled_is_read_over(kind: Kind) -> None:
    bench, stream = ask(kind)
    bench.core.requester.cancel(0)
    bench.drain()
    assert (bench.resets[stream], bench.stops[stream]) == (0x1, 0x1)
    bench.say(stream, OKS[kind], *LATER[4:6])
    assert bench.close is None
    bench.reset(stream)
    assert residue(bench.core) == {}


# Request IDs


def test_request_ids_may_come_out_of_order_but_never_twice() -> None:
    ids = RequestIds()
    assert all(ids.add(number) for number in (2, 0, 5, 1))
    assert not any(ids.add(number) for number in (0, 1, 2, 5))
    assert ids.add(3)
    assert ids.add(4)
    assert not ids.add(3)


def test_request_ids_that_run_ahead_of_a_gap_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RequestIds, "MAX_AHEAD", 4)
    ids = RequestIds()
    assert all(ids.add(number) for number in range(10, 30, 2))
    assert len(ids._ahead) <= 4
    assert not ids.add(3)
    assert ids.add(99)


def test_request_ids_full_of_gaps_stay_cheap() -> None:
    ids = RequestIds()
    started = time.process_time()
    assert all(ids.add(number) for number in range(0, 6 * RequestIds.MAX_AHEAD, 2))
    # A search through all of them for each number would take minutes.
    assert time.process_time() - started < 10
    assert len(ids._ahead) == len(ids._heap) <= RequestIds.MAX_AHEAD


@pytest.mark.parametrize("role", Role)
def test_request_id_of_the_wrong_parity_closes(role: Role) -> None:
    bench = Bench(role)
    wrong = 1 if role is Role.SERVER else 0
    bench.open(m.TrackStatus(wrong, *NAME, NONE))
    assert bench.close_code == SessionCode.INVALID_REQUEST_ID


def test_request_id_that_was_used_closes() -> None:
    bench = Bench()
    bench.open(m.TrackStatus(4, *NAME, NONE))
    bench.open(m.TrackStatus(0, *NAME, NONE))
    assert bench.close is None
    bench.open(m.TrackStatus(4, *NAME, NONE))
    assert bench.close_code == SessionCode.INVALID_REQUEST_ID


@pytest.mark.parametrize(("update_id", "closes"), [(0, True), (3, True), (2, False), (40, False)])
def test_request_update_uses_up_a_request_id(update_id: int, closes: bool) -> None:
    bench, stream = serve(Kind.SUBSCRIBE, State.ESTABLISHED)
    bench.say(stream, m.RequestUpdate(update_id, NONE))
    assert bench.close_code == (SessionCode.INVALID_REQUEST_ID if closes else None)
    if not closes:
        bench.open(m.TrackStatus(update_id, *NAME, NONE))
        assert bench.close_code == SessionCode.INVALID_REQUEST_ID


def test_requests_of_ours_count_by_two_and_an_update_takes_one() -> None:
    bench = Bench(Role.CLIENT)
    requester = bench.core.requester
    assert [requester.track_status(NAME), requester.publish_namespace(PREFIX)] == [0, 2]
    bench.drain()
    bench.say(4, m.RequestOk(NONE, BARE))
    assert requester.update(2, NONE) == 4
    assert requester.fetch(NAME, NONE) == 6


def test_session_errors_are_the_only_ones_that_the_tables_raise() -> None:
    with pytest.raises(SessionError):
        request(Kind.FETCH, State.TERMINATED, ours=True).receive(m.RequestOk(NONE, BARE))
