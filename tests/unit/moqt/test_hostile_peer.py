"""A peer that asks for ever more, says nothing, or takes nothing: the session stays bounded."""

from __future__ import annotations

import pytest

from kvcs.moqt import messages as m
from kvcs.moqt.asking import request_streams
from kvcs.moqt.errors import PublishDoneCode, RequestCode, SessionCode
from kvcs.moqt.events import FetchReceived, SubscribeReceived, TrackStatusReceived
from kvcs.moqt.filters import LocationFilter
from kvcs.moqt.framing import encode_message
from kvcs.moqt.messages import Message
from kvcs.moqt.parameters import Parameters
from kvcs.moqt.properties import KeyValues
from kvcs.moqt.settings import Role, SessionSettings
from kvcs.moqt.track.store import Track
from kvcs.moqt.wire import MAX_MESSAGE_BODY
from kvcs.testing.bench import Bench
from kvcs.testing.residue import residue
from kvcs.testing.tracks import NAME, put

FILL = Parameters.of(fill_parameters=Parameters.of(location_filter=LocationFilter.none()))
LONG = KeyValues.of({0x79: bytes(65000), 0x7B: bytes(MAX_MESSAGE_BODY - 65000 - 13)})
"""Track Properties that fill a SUBSCRIBE_OK without LARGEST_OBJECT to the last octets."""


def filled(properties: KeyValues | None = None) -> Track:
    """A Track with one Object."""
    track = Track(NAME, authoritative=True, properties=properties)
    put(track, 2**40, 0)
    return track


def test_updates_that_pile_up_fills_fail_and_end_the_subscription() -> None:
    bench = Bench(settings=SessionSettings(max_fills=4))
    track = filled()
    stream_id = bench.open(m.Subscribe(0, *NAME, Parameters()))
    (asked,) = bench.take(SubscribeReceived)
    bench.core.responder.accept_subscribe(asked.request_id, track, bench.now)
    bench.drain()
    bench.replies(stream_id)
    bench.credit.unidirectional = 0
    for number in range(4):
        bench.say(stream_id, m.RequestUpdate(2 + 2 * number, FILL))
    assert all(isinstance(reply, m.RequestOk) for reply in bench.replies(stream_id))
    bench.say(stream_id, m.RequestUpdate(20, FILL))
    error, done = bench.replies(stream_id)
    assert isinstance(error, m.RequestError) and error.error_code == RequestCode.EXCESSIVE_LOAD
    assert isinstance(done, m.PublishDone) and done.status_code == PublishDoneCode.UPDATE_FAILED
    assert bench.close is None
    bench.data(stream_id, b"", fin=True)
    assert not residue(bench.core, track)


@pytest.mark.parametrize("ends", [True, False])
def test_a_peer_that_never_ends_streams_of_finished_requests_is_closed(
    ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_streams, "MAX_UNENDED_REQUESTS", 10)
    bench = Bench(Role.CLIENT)
    for number in range(11):
        bench.core.requester.track_status(NAME)
        bench.drain()
        assert bench.close is None
        refusal = m.RequestError(RequestCode.DOES_NOT_EXIST, 0, "", None)
        bench.say(4 * number, refusal, fin=ends)
    bench.advance(request_streams.UNENDED_SECONDS - 0.1)
    assert bench.close is None
    bench.advance(0.2)
    assert bench.close_code == (None if ends else SessionCode.CONTROL_MESSAGE_TIMEOUT)
    assert not residue(bench.core)


def test_a_client_that_says_nothing_loses_its_place() -> None:
    bench = Bench(settings=SessionSettings(setup_wait=3.0), setup=False)
    bench.advance(2.9)
    assert bench.close is None
    bench.advance(0.2)
    assert bench.close_code == SessionCode.CONTROL_MESSAGE_TIMEOUT


def test_a_client_that_sent_its_setup_keeps_it() -> None:
    bench = Bench(settings=SessionSettings(setup_wait=3.0))
    bench.advance(10.0)
    assert bench.close is None


def test_a_client_does_not_count_down_for_its_server() -> None:
    assert Bench(Role.CLIENT, setup=False).core.next_timer() is None


@pytest.mark.parametrize(
    "request_message",
    [
        m.Subscribe(0, *NAME, Parameters()),
        m.Fetch(0, *NAME, Parameters()),
        m.TrackStatus(0, *NAME, Parameters()),
    ],
    ids=lambda message: type(message).__name__,
)
def test_track_properties_that_do_not_fit_the_reply_refuse_the_request(
    request_message: Message,
) -> None:
    assert len(encode_message(m.SubscribeOk(0, Parameters(), LONG))) > MAX_MESSAGE_BODY - 20
    bench, track = Bench(), filled(LONG)
    stream_id = bench.open(request_message)
    responder = bench.core.responder
    for subscribe in bench.take(SubscribeReceived):
        responder.accept_subscribe(subscribe.request_id, track, bench.now)
    for fetch in bench.take(FetchReceived):
        responder.accept_fetch(fetch.request_id, track, bench.now)
    for status in bench.take(TrackStatusReceived):
        responder.answer_track_status(status.request_id, track)
    bench.drain()
    (reply,) = bench.replies(stream_id)
    assert isinstance(reply, m.RequestError) and reply.error_code == RequestCode.INTERNAL_ERROR
    assert stream_id in bench.fins
    assert bench.close is None
    bench.data(stream_id, b"", fin=True)
    assert not residue(bench.core, track)
