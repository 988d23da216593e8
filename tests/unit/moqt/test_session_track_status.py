"""TRACK_STATUS from both sides (MOQT §9.13)."""

from __future__ import annotations

import pytest

from kvcs.errors import UsageError
from kvcs.moqt import messages as m
from kvcs.moqt.errors import SessionCode
from kvcs.moqt.events import (
    Event,
    RequestAccepted,
    TrackMalformed,
    TrackStatusReceived,
)
from kvcs.moqt.names import Location
from kvcs.moqt.parameters import Parameters, ParameterType
from kvcs.moqt.properties import KeyValues, Property
from kvcs.moqt.settings import Role
from kvcs.moqt.track.store import Track
from kvcs.testing.bench import Bench
from kvcs.testing.pair import SessionPair
from kvcs.testing.residue import residue
from kvcs.testing.tracks import (
    NAME,
    put_group,
    track,
)

NONE, BARE = Parameters(), KeyValues()


def serve(pair: SessionPair, source: Track) -> None:
    """The server answers TRACK_STATUS."""

    def answer(event: Event) -> None:
        if isinstance(event, TrackStatusReceived):
            pair.server.core.responder.answer_track_status(event.request_id, source)

    pair.server.on_event = answer


@pytest.mark.parametrize("include", [1, 0])
def test_track_status_tells_what_a_subscription_would(include: int) -> None:
    properties = KeyValues.of({0x78: 1})
    source = track(properties=properties)
    put_group(source, 4, 1)
    pair = SessionPair()
    serve(pair, source)
    pair.client.core.requester.track_status(NAME, Parameters.of(include_properties=include))
    pair.run()
    (accepted,) = pair.client.of(RequestAccepted)
    largest = Parameters.of(largest_object=Location(4, 1))
    assert accepted.reply == m.RequestOk(largest, properties if include else BARE)
    assert residue(pair.client.core) == residue(pair.server.core, source) == {}


def test_track_status_of_a_track_without_objects_names_none() -> None:
    pair = SessionPair()
    serve(pair, track())
    pair.client.core.requester.track_status(NAME)
    pair.run()
    (accepted,) = pair.client.of(RequestAccepted)
    assert isinstance(accepted.reply, m.RequestOk)
    assert ParameterType.LARGEST_OBJECT not in accepted.reply.parameters


def test_track_status_takes_no_update() -> None:
    bench = Bench()
    stream = bench.open(m.TrackStatus(0, *NAME, NONE))
    bench.say(stream, m.RequestUpdate(2, NONE))
    assert bench.close_code == SessionCode.PROTOCOL_VIOLATION
    bench = Bench(Role.CLIENT)
    bench.core.requester.track_status(NAME)
    with pytest.raises(UsageError):
        bench.core.requester.update(0, NONE)


@pytest.mark.parametrize(
    "reply",
    [
        m.RequestOk(Parameters.of(expires=3), BARE),
        m.RequestOk(NONE, KeyValues.of({Property.DYNAMIC_GROUPS: 7})),
    ],
)
def test_a_track_status_reply_with_what_it_may_not_hold_closes(reply: m.RequestOk) -> None:
    bench = Bench(Role.CLIENT)
    bench.core.requester.track_status(NAME)
    bench.drain()
    bench.say(0, reply)
    assert bench.close_code == SessionCode.PROTOCOL_VIOLATION


def test_a_track_status_reply_that_cannot_be_read_ends_the_request() -> None:
    bench = Bench(Role.CLIENT)
    bench.core.requester.track_status(NAME)
    bench.drain()
    bench.say(0, m.RequestOk(NONE, KeyValues.of({Property.IMMUTABLE_PROPERTIES: b"\x01"})))
    assert len(bench.take(TrackMalformed)) == 1
    assert bench.close is None
