"""PUBLISH through a session, from both sides: every state with every message (MOQT §9.8)."""

from __future__ import annotations

import pytest

from kvcs.moqt import messages as m
from kvcs.moqt.errors import SessionCode
from kvcs.moqt.messages import Message
from kvcs.moqt.names import Location
from kvcs.moqt.parameters import Parameters
from kvcs.moqt.properties import KeyValues
from kvcs.moqt.requests import FROM_REQUESTER, FROM_RESPONDER, Kind, State
from kvcs.moqt.settings import Role
from kvcs.testing.bench import Bench
from kvcs.testing.residue import residue
from kvcs.testing.tracks import NAME, put, track

NONE, BARE = Parameters(), KeyValues()
PREFIX = (b"kvcs-1",)
OK, ERROR = m.RequestOk(NONE, BARE), m.RequestError(0x1, 0, "no", None)
MESSAGES: list[Message] = [
    m.SubscribeOk(0, NONE, BARE),
    m.FetchOk(False, Location(0, 0), NONE, BARE),
    OK,
    ERROR,
    m.PublishDone(0x2, 0, ""),
    m.PublishStateNotify(NONE),
    m.RequestUpdate(2, NONE),
    m.RequestUpdate(1, NONE),
    m.Namespace((b"a",)),
    m.NamespaceDone((b"a",)),
    m.PublishSkipped((b"a",), b"t"),
    m.Publish(4, *NAME, 7, NONE, BARE),
    m.Subscribe(4, *NAME, NONE),
]
names = [f"{type(message).__name__}-{index}" for index, message in enumerate(MESSAGES)]


def judged(bench: Bench, legal: bool, message: Message) -> None:
    assert bench.core.failure is None
    wrong_id = SessionCode.INVALID_REQUEST_ID
    expected = (None,) if legal else (SessionCode.PROTOCOL_VIOLATION, wrong_id)
    assert bench.close_code in expected, (bench.close, message)


@pytest.mark.parametrize("message", MESSAGES, ids=names)
@pytest.mark.parametrize("state", State)
def test_what_the_publisher_may_say(state: State, message: Message) -> None:
    bench = Bench(Role.SERVER)
    stream_id = bench.open(m.Publish(0, *NAME, 7, NONE, BARE))
    if state in (State.ESTABLISHED, State.DRAINING):
        bench.core.responder.accept_publish(0)
        bench.drain()
    if state is State.DRAINING:
        bench.say(stream_id, m.PublishDone(0x2, 5, ""))
    elif state is State.TERMINATED:
        bench.core.responder.revoke(0)
        bench.drain()
    bench.say(stream_id, message)
    legal = (Kind.PUBLISH, state, type(message)) in FROM_REQUESTER or state is State.TERMINATED
    if isinstance(message, m.RequestUpdate) and message.request_id == 1 and legal:
        legal = state is State.TERMINATED and bench.close is None
    judged(bench, legal, message)


@pytest.mark.parametrize("message", MESSAGES, ids=names)
@pytest.mark.parametrize("state", [State.PENDING, State.ESTABLISHED, State.TERMINATED])
def test_what_the_subscriber_may_say(state: State, message: Message) -> None:
    bench, source = Bench(Role.CLIENT), track()
    put(source, 0, 0)
    bench.core.requester.publish(source)
    bench.drain()
    if state is not State.PENDING:
        bench.say(0, OK if state is State.ESTABLISHED else ERROR)
    bench.say(0, message)
    # A refusal resets the stream; what was under way then is read over.
    legal = (Kind.PUBLISH, state, type(message)) in FROM_RESPONDER or state is State.TERMINATED
    if isinstance(message, m.RequestUpdate) and message.request_id == 2:
        legal = False  # a server's are odd
    judged(bench, legal, message)


@pytest.mark.parametrize("accepts", [True, False])
def test_nothing_is_left_of_a_publish(accepts: bool) -> None:
    bench, source = Bench(Role.CLIENT), track()
    put(source, 0, 0)
    bench.core.requester.publish(source)
    bench.drain()
    bench.say(0, OK if accepts else ERROR, fin=not accepts)
    if accepts:
        put(source, 0, 1)
        source.end()
        bench.drain()
        bench.advance(5)
        bench.data(0, b"", fin=True)
    assert bench.close is None
    assert residue(bench.core, source) == {}
