"""Answers and updates of a PUBLISH that are more than yes or no (MOQT §9.4, §9.5, §9.8)."""

from __future__ import annotations

import pytest

from kvcs.errors import Redirected, UsageError
from kvcs.moqt import messages as m
from kvcs.moqt.errors import RequestCode, SessionCode
from kvcs.moqt.events import (
    Event,
    RequestRefused,
    RequestUpdateAnswered,
    SubscribeTracksReceived,
    SubscriptionUpdated,
)
from kvcs.moqt.names import FullTrackName, Location
from kvcs.moqt.parameters import Parameters
from kvcs.moqt.properties import KeyValues, SetupOption
from kvcs.moqt.settings import Role, SessionSettings
from kvcs.testing.bench import Bench
from kvcs.testing.pair import SessionPair
from kvcs.testing.residue import residue
from kvcs.testing.tracks import NAME, put_group, track

NONE, BARE = Parameters(), KeyValues()
OK = m.RequestOk(NONE, BARE)
OTHER = FullTrackName(NAME.namespace, b"other")
PAUSED = Parameters.of(forward=0)


# Redirects


@pytest.mark.parametrize(("publisher", "uri"), [("client", "moqt://other:4433"), ("server", "")])
def test_a_publish_may_be_sent_elsewhere(publisher: str, uri: str) -> None:
    pair = SessionPair()
    ours, theirs = pair.client, pair.server
    if publisher == "server":
        ours, theirs = theirs, ours
    source = track()
    request_id = ours.core.requester.publish(source)
    pair.run()
    theirs.core.responder.refuse(request_id, Redirected("there", uri, (b"n",), b"t"))
    pair.run()
    (refused,) = ours.of(RequestRefused)
    assert refused.error.redirect == m.Redirect(uri, (b"n",), b"t")
    assert residue(ours.core, source) == residue(theirs.core) == {}


def test_a_client_that_redirects_a_publish_to_another_session_closes() -> None:
    bench = Bench(Role.SERVER)
    bench.core.requester.publish(track())
    bench.drain()
    redirect = m.Redirect("moqt://other", (b"n",), b"t")
    bench.say(1, m.RequestError(RequestCode.REDIRECT, 0, "", redirect))
    assert bench.close_code == SessionCode.PROTOCOL_VIOLATION


# MAX_REQUEST_UPDATES


def test_updates_of_a_publish_are_limited_in_both_directions() -> None:
    settings = SessionSettings(max_request_updates=2)
    limited = KeyValues.of({SetupOption.MAX_REQUEST_UPDATES: 2})
    bench = Bench(settings=settings, options=limited)
    stream = bench.open(m.Publish(0, *NAME, 7, NONE, BARE))
    bench.core.responder.accept_publish(0)
    requester = bench.core.requester
    for _ in range(2):
        requester.update(0, NONE)
    with pytest.raises(UsageError):
        requester.update(0, NONE)
    bench.drain()
    bench.say(stream, OK)
    requester.update(0, NONE)
    second = bench.open(m.Publish(2, *OTHER, 8, NONE, BARE))
    bench.say(second, m.RequestUpdate(4, NONE), m.RequestUpdate(6, NONE))
    assert bench.close is None
    bench.say(second, m.RequestUpdate(8, NONE))
    assert bench.close_code == SessionCode.TOO_MANY_REQUEST_UPDATES


# A publisher that has to be resumed itself


def test_an_update_waits_until_what_it_resumes_is_there() -> None:
    bench = Bench()
    source, ready = track(), [False]
    stream = bench.open(m.Subscribe(0, *NAME, PAUSED))
    bench.core.responder.accept_subscribe(0, source, 0.0, before_forward=lambda: ready[0])
    bench.drain()
    bench.replies(stream)
    bench.say(stream, m.RequestUpdate(2, Parameters.of(forward=1)), m.RequestUpdate(4, NONE))
    assert bench.replies(stream) == []
    with pytest.raises(UsageError):
        bench.core.responder.accept_update(0, 2)
    put_group(source, 3, 1)
    bench.core.responder.forward_ready(0)
    bench.core.responder.forward_ready(0)
    bench.drain()
    largest = Parameters.of(largest_object=Location(3, 1))
    assert bench.replies(stream) == [m.RequestOk(largest, BARE)] * 2
    assert bench.take(SubscriptionUpdated)[0] == SubscriptionUpdated(0, 2, Parameters.of(forward=1))
    bench.say(stream, m.RequestUpdate(6, PAUSED))
    ready[0] = True
    bench.replies(stream)
    bench.say(stream, m.RequestUpdate(8, Parameters.of(forward=1)))
    assert len(bench.replies(stream)) == 1


def test_a_publish_is_resumed_in_the_same_way_and_its_end_takes_the_wait_along() -> None:
    pair = SessionPair()
    source = track()

    def answer(event: Event) -> None:
        if isinstance(event, SubscribeTracksReceived):
            pair.server.core.responder.accept(event.request_id)

    pair.server.on_event = answer
    asked = pair.client.core.requester.subscribe_tracks(NAME.namespace, PAUSED)
    pair.run()
    offered = pair.server.core.responder.publish_tracks(asked, source, before_forward=lambda: False)
    assert offered is not None
    pair.run()
    pair.client.core.responder.accept_publish(offered)
    pair.client.core.requester.update(offered, Parameters.of(forward=1))
    pair.run()
    assert pair.client.of(RequestUpdateAnswered) == []
    pair.client.core.requester.cancel(offered)
    pair.client.core.requester.cancel(asked)
    pair.run()
    assert residue(pair.server.core, source) == residue(pair.client.core) == {}
