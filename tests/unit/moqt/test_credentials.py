"""Tokens of SETUP and of each request (MOQT §8.9, §9.20.2)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvcs.moqt import events
from kvcs.moqt.filters import LocationFilter
from kvcs.moqt.names import FullTrackName
from kvcs.moqt.parameters import Parameters
from kvcs.moqt.settings import SessionSettings
from kvcs.moqt.tokens import ResolvedToken, Token
from kvcs.moqt.track.store import Track
from kvcs.testing.pair import End, SessionPair

NAME = FullTrackName((b"ns",), b"track")
TOKEN = ResolvedToken(1, b"fresh")

REQUESTS: dict[str, tuple[Callable[[End], int], type]] = {
    "SUBSCRIBE": (
        lambda end: end.core.requester.subscribe(NAME, Parameters()),
        events.SubscribeReceived,
    ),
    "FETCH": (
        lambda end: end.core.requester.fetch(
            NAME, Parameters.of(location_filter=LocationFilter.none())
        ),
        events.FetchReceived,
    ),
    "TRACK_STATUS": (
        lambda end: end.core.requester.track_status(NAME),
        events.TrackStatusReceived,
    ),
    "PUBLISH_NAMESPACE": (
        lambda end: end.core.requester.publish_namespace(NAME.namespace),
        events.PublishNamespaceReceived,
    ),
    "SUBSCRIBE_NAMESPACE": (
        lambda end: end.core.requester.subscribe_namespace(NAME.namespace),
        events.SubscribeNamespaceReceived,
    ),
    "SUBSCRIBE_TRACKS": (
        lambda end: end.core.requester.subscribe_tracks(NAME.namespace, Parameters()),
        events.SubscribeTracksReceived,
    ),
    "PUBLISH": (
        lambda end: end.core.requester.publish(Track(NAME, authoritative=True), Parameters()),
        events.PublishReceived,
    ),
}


@pytest.mark.parametrize("kind", list(REQUESTS))
@pytest.mark.parametrize("role", ["client", "server"])
def test_every_request_carries_the_token_from_when_there_is_one(kind: str, role: str) -> None:
    ask, event = REQUESTS[kind]
    for token in (None, TOKEN):
        pair = SessionPair()
        asks, answers = (
            (pair.client, pair.server) if role == "client" else (pair.server, pair.client)
        )
        asks.core.credentials.token = token
        ask(asks)
        pair.run()
        [received] = answers.of(event)
        assert received.tokens == (() if token is None else (TOKEN,))


def test_a_token_that_is_given_stays_alone() -> None:
    pair = SessionPair()
    pair.client.core.credentials.token = TOKEN
    own = Parameters.of(authorization_token=Token.use_value(b"own", 1))
    pair.client.core.requester.publish_namespace((b"ns",), own)
    pair.run()
    [received] = pair.server.of(events.PublishNamespaceReceived)
    assert received.tokens == (ResolvedToken(1, b"own"),)


def test_tokens_of_setup_have_their_type() -> None:
    pair = SessionPair(SessionSettings(tokens=(TOKEN, b"plain")), SessionSettings(tokens=(TOKEN,)))
    [established] = pair.server.of(events.SessionEstablished)
    assert established.tokens == (TOKEN, ResolvedToken(0, b"plain"))
    [established] = pair.client.of(events.SessionEstablished)
    assert established.tokens == (TOKEN,)


def test_no_token_is_shown() -> None:
    settings = SessionSettings(tokens=(ResolvedToken(1, b"secret"), b"secret"))
    assert "secret" not in repr(settings) + repr(Token.use_value(b"secret", 1))
