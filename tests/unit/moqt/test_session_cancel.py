"""Ending requests early, from each side at each state: nothing is left on either (MOQT §6.4.2)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvcs.moqt import messages as m
from kvcs.moqt.errors import PublishDoneCode, StreamCode
from kvcs.moqt.events import (
    DataStreamOpened,
    Event,
    FetchReceived,
    NamespaceAnnounced,
    ObjectStarted,
    PublishNamespaceReceived,
    RequestCancelled,
    SubscribeNamespaceReceived,
    SubscribeReceived,
    SubscriptionEnded,
    TrackStatusReceived,
)
from kvcs.moqt.filters import LocationFilter
from kvcs.moqt.parameters import Parameters
from kvcs.moqt.requests import Kind
from kvcs.moqt.track.store import Track
from kvcs.testing.bench import Bench
from kvcs.testing.pair import SessionPair
from kvcs.testing.residue import residue
from kvcs.testing.tracks import NAME, end_track, locations, put, put_group, track

NONE = Parameters()
JOIN = Parameters.of(
    location_filter=LocationFilter.next_object(),
    fill_parameters=Parameters.of(location_filter=LocationFilter.absolute_start(0, 0)),
)
PREFIX = (b"kvcs-1",)
KINDS = [
    Kind.SUBSCRIBE,
    Kind.FETCH,
    Kind.TRACK_STATUS,
    Kind.PUBLISH_NAMESPACE,
    Kind.SUBSCRIBE_NAMESPACE,
]
STATES = ["waiting", "sent", "established", "open"]


class Scene:
    """One request of the client, brought to a state, and a Track of the server."""

    def __init__(self, kind: Kind, state: str) -> None:
        self.kind = kind
        self.pair = SessionPair()
        self.source = track()
        put_group(self.source, 0, 2, octets=100)
        put(self.source, 1, 0)
        self.pair.server.on_event = self._answer
        self.answers = state in ("established", "open")
        if state == "waiting":
            self.pair.client.credit.bidirectional = 0
        self.request_id = self._ask()
        self.pair.run()
        if state == "open":
            self._open()
        self.pair.client.credit.bidirectional = 1

    def _ask(self) -> int:
        requester = self.pair.client.core.requester
        if self.kind is Kind.SUBSCRIBE:
            return requester.subscribe(NAME, JOIN)
        if self.kind is Kind.FETCH:
            return requester.fetch(NAME, NONE)
        if self.kind is Kind.TRACK_STATUS:
            return requester.track_status(NAME)
        if self.kind is Kind.PUBLISH_NAMESPACE:
            return requester.publish_namespace(PREFIX)
        return requester.subscribe_namespace(PREFIX)

    def _answer(self, event: Event) -> None:
        responder = self.pair.server.core.responder
        if not self.answers:
            return
        if isinstance(event, (SubscribeReceived, FetchReceived)):
            # No credit: fills and fetches stay open until a test grants it.
            self.pair.server.credit.object_octets = 0
        if isinstance(event, SubscribeReceived):
            responder.accept_subscribe(event.request_id, self.source, self.pair.now)
        elif isinstance(event, FetchReceived):
            responder.accept_fetch(event.request_id, self.source, self.pair.now)
        elif isinstance(event, (PublishNamespaceReceived, SubscribeNamespaceReceived)):
            responder.accept(event.request_id)
        elif isinstance(event, TrackStatusReceived):
            responder.answer_track_status(event.request_id, self.source)

    def _open(self) -> None:
        """Have streams open in both directions of what the request is for."""
        if self.kind is Kind.SUBSCRIBE_NAMESPACE:
            self.pair.server.core.responder.namespace(self.request_id, (b"a",))
            self.pair.run()
            assert len(self.pair.client.of(NamespaceAnnounced)) == 1
        elif self.kind in (Kind.SUBSCRIBE, Kind.FETCH):
            put(self.source, 1, 1)
            self.pair.server.credit.object_octets = 30
            for _ in range(3):
                self.pair.step()
            self.pair.server.credit.object_octets = 0
            assert len(self.pair.client.of(DataStreamOpened)) >= 1

    def check_nothing_is_left(self) -> None:
        self.pair.run()
        self.pair.server.credit.object_octets = 1 << 40
        self.pair.run()
        self.pair.advance(5.0)
        assert residue(self.pair.client.core) == {}
        assert residue(self.pair.server.core, self.source) == {}
        assert not self.pair.client.core.closed
        assert self.source.readers == 0


def client_cancels(scene: Scene) -> None:
    scene.pair.client.core.requester.cancel(scene.request_id)


def server_ends(scene: Scene) -> None:
    responder = scene.pair.server.core.responder
    request = scene.pair.server.core.requests.get(scene.request_id)
    if scene.kind is Kind.SUBSCRIBE and request is not None and scene.answers:
        responder.end_subscription(scene.request_id, PublishDoneCode.GOING_AWAY)
    else:
        responder.revoke(scene.request_id)


def server_resets(scene: Scene) -> None:
    scene.pair.server.core.responder.revoke(scene.request_id, StreamCode.EXCESSIVE_LOAD)


def both_at_once(scene: Scene) -> None:
    client_cancels(scene)
    server_ends(scene)


def twice(scene: Scene) -> None:
    client_cancels(scene)
    client_cancels(scene)
    scene.pair.run()
    client_cancels(scene)
    server_resets(scene)


@pytest.mark.parametrize("end", [client_cancels, server_ends, server_resets, both_at_once, twice])
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("kind", KINDS)
def test_an_early_end_leaves_nothing(kind: Kind, state: str, end: Callable[[Scene], None]) -> None:
    scene = Scene(kind, state)
    end(scene)
    if state == "waiting" and end in (server_ends, server_resets):
        # The server does not know of it yet.
        scene.pair.run()
        end(scene)
    scene.check_nothing_is_left()


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_other_side_hears_of_it(kind: Kind, state: str) -> None:
    scene = Scene(kind, state)
    over = kind is Kind.TRACK_STATUS and scene.answers
    client_cancels(scene)
    scene.pair.run()
    heard = scene.pair.server.of(RequestCancelled)
    if over or state == "waiting":
        assert heard == []
    else:
        assert heard == [RequestCancelled(scene.request_id, False, 0x1)]


@pytest.mark.parametrize("state", ["sent", "established", "open"])
@pytest.mark.parametrize("kind", KINDS)
def test_we_hear_when_the_peer_ends_a_request_of_ours(kind: Kind, state: str) -> None:
    scene = Scene(kind, state)
    if kind is Kind.TRACK_STATUS and scene.answers:
        return  # it is complete
    server_resets(scene)
    scene.pair.run()
    assert scene.pair.client.of(RequestCancelled) == [RequestCancelled(scene.request_id, True, 0x9)]


def test_a_cancelled_request_that_waits_for_credit_is_never_sent() -> None:
    scene = Scene(Kind.SUBSCRIBE, "waiting")
    client_cancels(scene)
    scene.pair.run()
    assert scene.pair.server.of(SubscribeReceived) == []


# FIN is not a cancellation


@pytest.mark.parametrize("kind", KINDS)
def test_fin_behind_the_request_is_no_cancellation(kind: Kind) -> None:
    first: dict[Kind, m.Message] = {
        Kind.SUBSCRIBE: m.Subscribe(0, *NAME, JOIN),
        Kind.FETCH: m.Fetch(0, *NAME, NONE),
        Kind.TRACK_STATUS: m.TrackStatus(0, *NAME, NONE),
        Kind.PUBLISH_NAMESPACE: m.PublishNamespace(0, PREFIX, NONE),
        Kind.SUBSCRIBE_NAMESPACE: m.SubscribeNamespace(0, PREFIX, NONE),
    }
    bench = Bench()
    stream = bench.open(first[kind], fin=True)
    source = track()
    put(source, 0, 0)
    responder = bench.core.responder
    if kind is Kind.SUBSCRIBE:
        responder.accept_subscribe(0, source, 0.0)
    elif kind is Kind.FETCH:
        responder.accept_fetch(0, source, 0.0)
    elif kind is Kind.TRACK_STATUS:
        responder.answer_track_status(0, source)
    else:
        responder.accept(0)
    bench.drain()
    assert bench.take(RequestCancelled) == []
    assert len(bench.replies(stream)) == 1
    if kind in (Kind.SUBSCRIBE, Kind.FETCH):
        assert len(bench.opened) == 3  # control, request, data
    # Once our direction is all there is, STOP_SENDING alone cancels.
    bench.stop(stream)
    assert residue(bench.core, source) == {}


def test_a_stream_that_ends_before_it_asked_for_anything_is_closed() -> None:
    bench = Bench()
    empty = bench.bidi()
    bench.data(empty, b"", fin=True)
    assert bench.resets == {empty: 0x1}
    cut = bench.bidi()
    bench.data(cut, b"\x03\x00")
    bench.reset(cut)
    assert bench.resets[cut] == 0x1
    stopped = bench.bidi()
    bench.data(stopped, b"\x03\x00")
    bench.stop(stopped)
    bench.reset(stopped)
    assert stopped not in bench.resets
    assert bench.close is None
    assert residue(bench.core) == {}


@pytest.mark.parametrize("order", ["stop", "stop reset", "reset stop", "reset"])
def test_a_cancellation_that_overtakes_its_request(order: str) -> None:
    bench = Bench()
    stream = bench.bidi()
    for step in order.split():
        getattr(bench, step)(stream)
    if "reset" not in order:
        bench.say(stream, m.Subscribe(0, *NAME, NONE), fin=True)
        assert bench.take(RequestCancelled) == [RequestCancelled(0, False, 0x1)]
    bench.stop(stream)
    assert residue(bench.core) == {}


def test_a_late_stop_for_a_request_that_is_over_is_nothing() -> None:
    bench = Bench()
    stream = bench.open(m.TrackStatus(0, *NAME, NONE), fin=True)
    bench.core.responder.answer_track_status(0, track())
    bench.drain()
    bench.stop(stream)
    bench.reset(stream)
    assert residue(bench.core) == {}
    assert bench.resets == {}


# Races at the end of streams


def finishing(source: Track) -> None:
    put_group(source, 1, 1)
    put_group(source, 2, 1)
    end_track(source, 3)


@pytest.mark.parametrize("steps", range(24))
def test_cancelling_while_the_publisher_finishes(steps: int) -> None:
    source = track()
    put_group(source, 0, 2)
    pair = SessionPair()

    def answer(event: Event) -> None:
        if isinstance(event, SubscribeReceived):
            pair.server.core.responder.accept_subscribe(event.request_id, source, pair.now)

    pair.server.on_event = answer
    stays = pair.client.core.requester.subscribe(NAME, JOIN)
    goes = pair.client.core.requester.subscribe(NAME, JOIN)
    pair.run()
    finishing(source)
    for _ in range(steps):
        pair.step()
    pair.client.core.requester.cancel(goes)
    pair.run()
    pair.advance(5.0)
    assert [event.request_id for event in pair.client.of(SubscriptionEnded)][-1] == stays
    assert len(locations(pair.client.events, stays)) == 4
    assert pair.client.core.failure is None
    assert pair.server.core.failure is None
    assert residue(pair.client.core) == {}
    assert residue(pair.server.core, source) == {}


@pytest.mark.parametrize("steps", range(0, 24, 3))
def test_stopping_one_stream_while_the_publisher_finishes(steps: int) -> None:
    source = track()
    pair = SessionPair()
    request_id = pair.client.core.requester.subscribe(NAME, NONE)
    pair.run()
    pair.server.core.responder.accept_subscribe(request_id, source, 0.0)
    finishing(source)
    for _ in range(steps):
        pair.step()
    for opened in pair.client.of(DataStreamOpened):
        pair.client.core.requester.stop_stream(opened.stream_id)
    pair.run()
    pair.advance(5.0)
    assert len(pair.client.of(SubscriptionEnded)) == 1
    assert residue(pair.client.core) == {}
    assert residue(pair.server.core, source) == {}


def test_stop_and_reset_of_one_stream_cross() -> None:
    bench = Bench()
    stream = bench.open(m.Subscribe(0, *NAME, NONE))
    source = track()
    bench.core.responder.accept_subscribe(0, source, 0.0)
    put(source, 0, 0)
    bench.drain()
    data = bench.opened[-1]
    bench.core.responder.end_subscription(0, PublishDoneCode.GOING_AWAY)
    bench.core.receive_stop_sending(data, 0x1, 0.0)
    bench.core.receive_reset(stream, 0x1, 0.0)
    bench.core.receive_stop_sending(stream, 0x1, 0.0)
    bench.drain()
    assert bench.resets == {data: StreamCode.GOING_AWAY}
    assert bench.close is None
    assert residue(bench.core, source) == {}


# The end of the session


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_end_of_the_session_leaves_nothing(kind: Kind, state: str) -> None:
    scene = Scene(kind, state)
    for end in (scene.pair.client, scene.pair.server):
        end.core.receive_closed(None, "lost", False)
    assert residue(scene.pair.client.core) == {}
    assert residue(scene.pair.server.core, scene.source) == {}
    assert scene.source.readers == 0


def test_objects_that_were_under_way_are_not_reported_after_the_cancellation() -> None:
    scene = Scene(Kind.SUBSCRIBE, "open")
    client_cancels(scene)
    scene.pair.client.events.clear()
    scene.pair.server.credit.object_octets = 1 << 40
    scene.pair.run()
    assert scene.pair.client.of(ObjectStarted) == []
