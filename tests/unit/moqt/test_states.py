"""Phases of a session and states of the peer's streams: every state with every input."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from kvcs.moqt import messages as m
from kvcs.moqt.asking import request_streams
from kvcs.moqt.errors import ProtocolViolation, SessionCode
from kvcs.moqt.framing import encode_message
from kvcs.moqt.parameters import Parameters
from kvcs.moqt.properties import KeyValues
from kvcs.moqt.settings import Role
from kvcs.moqt.states import (
    DATA_STREAM,
    REQUEST_STREAM,
    SESSION,
    ControlInput,
    DataStreamInput,
    DataStreamState,
    Phase,
    RequestStreamInput,
    RequestStreamState,
    next_phase,
    next_state,
)
from kvcs.testing.bench import Bench
from kvcs.testing.residue import residue
from kvcs.testing.tracks import NAME

NONE, BARE = Parameters(), KeyValues()
GOAWAY = m.Goaway("", 0)


def judged(bench: Bench, legal: bool) -> None:
    """The session closed for a broken rule exactly where the table lacks the pair."""
    assert bench.core.failure is None
    assert bench.close_code == (None if legal else SessionCode.PROTOCOL_VIOLATION)


# The session


def session_in(phase: Phase) -> Bench:
    bench = Bench(setup=phase is not Phase.AWAITING_SETUP)
    if phase is Phase.GOING_AWAY:
        bench.say(bench.control, GOAWAY)
    elif phase is Phase.CLOSED:
        bench.core.close()
        bench.drain()
    return bench


def end_control(bench: Bench) -> None:
    ours = bench.core.control.ours
    assert ours is not None
    bench.stop(ours)


CONTROL: dict[ControlInput, Callable[[Bench], object]] = {
    ControlInput.SETUP: lambda bench: (
        bench.send_setup() if bench.control < 0 else bench.say(bench.control, m.Setup(BARE))
    ),
    ControlInput.GOAWAY: lambda bench: bench.say(bench.control, GOAWAY),
    ControlInput.OTHER: lambda bench: (
        bench.uni(encode_message(m.RequestOk(NONE, BARE)))
        if bench.control < 0
        else bench.uni(encode_message(m.Setup(BARE)))
    ),
    ControlInput.ENDED: end_control,
}


@pytest.mark.parametrize(("phase", "what"), list(itertools.product(Phase, ControlInput)))
def test_every_phase_with_every_input(phase: Phase, what: ControlInput) -> None:
    after = SESSION.get((phase, what))
    if (phase, what) == (Phase.AWAITING_SETUP, ControlInput.GOAWAY):
        # Its type is that of a subgroup stream, so no control stream begins with it.
        with pytest.raises(ProtocolViolation):
            next_phase(phase, what, "GOAWAY first")
        return
    bench = session_in(phase)
    assert bench.core.control.phase is phase
    CONTROL[what](bench)
    if phase is Phase.CLOSED:
        assert bench.close_code == SessionCode.NO_ERROR
    else:
        judged(bench, after is not None)
    assert bench.core.control.phase is (after or Phase.CLOSED)


@pytest.mark.parametrize("end", ["fin", "reset"])
@pytest.mark.parametrize("phase", [Phase.OPEN, Phase.GOING_AWAY])
def test_the_peers_control_stream_does_not_end(phase: Phase, end: str) -> None:
    bench = session_in(phase)
    if end == "fin":
        bench.data(bench.control, b"", fin=True)
    else:
        bench.reset(bench.control)
    judged(bench, legal=False)


# Data streams

SUBGROUP = b"\x50\x09\0\0"
EARLY = b"\x50\x4d\0\0"
PADDING = bytes.fromhex("f0132b3e28")


def subscribed() -> Bench:
    """A session with a subscription whose alias is 9, and one without an answer."""
    bench = Bench(Role.CLIENT)
    for _ in range(2):
        bench.core.requester.subscribe(NAME, NONE)
    bench.drain()
    bench.say(0, m.SubscribeOk(9, NONE, BARE))
    return bench


def stream_in(bench: Bench, state: DataStreamState, what: DataStreamInput) -> int:
    if state is DataStreamState.HEADER:
        if what is DataStreamInput.FIN:
            return bench.uni(b"")
        return bench.uni(PADDING[:2] if what is DataStreamInput.PADDING else b"\x80")
    octets = {
        DataStreamState.EARLY: EARLY,
        DataStreamState.OPEN: SUBGROUP,
        DataStreamState.DISCARDED: PADDING,
        DataStreamState.ENDED: SUBGROUP,
    }[state]
    return bench.uni(octets, fin=state is DataStreamState.ENDED)


def give_up(bench: Bench, stream_id: int) -> None:
    if bench.core.data_streams.state(stream_id) is DataStreamState.OPEN:
        bench.core.requester.cancel(0)
        bench.drain()
    else:
        bench.advance(2.1)


DATA: dict[DataStreamInput, Callable[[Bench, int], object]] = {
    DataStreamInput.ROUTED: lambda bench, stream: bench.data(stream, SUBGROUP),
    DataStreamInput.UNROUTED: lambda bench, stream: bench.data(stream, EARLY),
    DataStreamInput.REFUSED: lambda bench, stream: bench.data(stream, b"\x05\x63"),
    DataStreamInput.PADDING: lambda bench, stream: bench.data(stream, PADDING[2:]),
    DataStreamInput.BOUND: lambda bench, stream: bench.say(4, m.SubscribeOk(0x4D, NONE, BARE)),
    DataStreamInput.FIN: lambda bench, stream: bench.data(stream, b"", fin=True),
    DataStreamInput.FIN_INSIDE: lambda bench, stream: bench.data(stream, b"\0\5ab", fin=True),
    DataStreamInput.RESET: lambda bench, stream: bench.reset(stream),
    DataStreamInput.GIVEN_UP: give_up,
}
ONLY_WITH_A_HEADER = {
    DataStreamInput.ROUTED,
    DataStreamInput.UNROUTED,
    DataStreamInput.REFUSED,
    DataStreamInput.PADDING,
}


def can_happen(state: DataStreamState, what: DataStreamInput) -> bool:
    """Whether the transport and the code can bring a pair about at all."""
    if what in ONLY_WITH_A_HEADER:
        return state is DataStreamState.HEADER
    if what is DataStreamInput.BOUND:
        return state is DataStreamState.EARLY
    if state is DataStreamState.ENDED:
        return what in (DataStreamInput.RESET, DataStreamInput.GIVEN_UP)
    return True


@pytest.mark.parametrize(
    ("state", "what"), list(itertools.product(DataStreamState, DataStreamInput))
)
def test_every_state_of_a_data_stream_with_every_input(
    state: DataStreamState, what: DataStreamInput
) -> None:
    after = DATA_STREAM.get((state, what))
    if after is None:
        with pytest.raises(ProtocolViolation):
            next_state(state, what)
    else:
        assert next_state(state, what) is after
    if not can_happen(state, what):
        assert after is None
        return
    bench = subscribed()
    stream_id = stream_in(bench, state, what)
    assert bench.core.data_streams.state(stream_id) is state
    if what is DataStreamInput.FIN_INSIDE and state is DataStreamState.HEADER:
        bench.data(stream_id, b"\x50", fin=True)
    else:
        DATA[what](bench, stream_id)
    judged(bench, after is not None)
    if after is not None:
        assert bench.core.data_streams.state(stream_id) is after


@pytest.mark.parametrize("state", [DataStreamState.HEADER, DataStreamState.OPEN])
def test_a_stream_that_ends_inside_what_is_read_closes(state: DataStreamState) -> None:
    assert (state, DataStreamInput.FIN_INSIDE) not in DATA_STREAM


def test_an_early_stream_that_ended_inside_an_object_closes_once_it_is_read() -> None:
    bench = subscribed()
    bench.uni(EARLY + b"\0\5ab", fin=True)
    assert bench.close is None
    bench.say(4, m.SubscribeOk(0x4D, NONE, BARE))
    judged(bench, legal=False)


# Request streams

REQUEST = encode_message(m.TrackStatus(0, *NAME, NONE))
UPDATE = encode_message(m.RequestUpdate(2, NONE))
SUBSCRIBE = encode_message(m.Subscribe(0, *NAME, NONE))


def request_in(state: RequestStreamState) -> tuple[Bench, int]:
    bench = Bench(setup=state is not RequestStreamState.HELD)
    stream_id = bench.bidi()
    if state is RequestStreamState.ENDED:
        bench.reset(stream_id)
        bench.resets.clear()
    elif state is RequestStreamState.REQUEST:
        bench.data(stream_id, SUBSCRIBE)
    else:
        bench.data(stream_id, b"")
    if state is RequestStreamState.GIVEN_UP:
        bench.advance(bench.core.settings.request_wait + 0.1)
    return bench, stream_id


def whole(bench: Bench, stream_id: int) -> None:
    later = bench.core.requests.state(stream_id) is RequestStreamState.REQUEST
    bench.data(stream_id, UPDATE if later else SUBSCRIBE)


def timeout(bench: Bench, stream_id: int) -> None:
    # A server gives up the whole session where SETUP does not come: that is another matter.
    held = bench.core.requests.state(stream_id) is RequestStreamState.HELD
    bench.advance(bench.core.settings.setup_wait - 0.1 if held else 10.1)


STREAM: dict[RequestStreamInput, Callable[[Bench, int], object]] = {
    RequestStreamInput.PART: lambda bench, stream: bench.data(stream, b"\x02"),
    RequestStreamInput.WHOLE: whole,
    RequestStreamInput.FIN: lambda bench, stream: bench.data(stream, b"", fin=True),
    RequestStreamInput.FIN_INSIDE: lambda bench, stream: bench.data(stream, b"\x03\0", fin=True),
    RequestStreamInput.RESET: lambda bench, stream: bench.reset(stream),
    RequestStreamInput.STOP: lambda bench, stream: bench.stop(stream),
    RequestStreamInput.SETUP: lambda bench, stream: bench.send_setup(),
    RequestStreamInput.TIMEOUT: timeout,
}


@pytest.mark.parametrize(
    ("state", "what"), list(itertools.product(RequestStreamState, RequestStreamInput))
)
def test_every_state_of_a_request_stream_with_every_input(
    state: RequestStreamState, what: RequestStreamInput
) -> None:
    after = REQUEST_STREAM.get((state, what))
    octets = (RequestStreamInput.PART, RequestStreamInput.WHOLE, RequestStreamInput.FIN)
    if state is RequestStreamState.ENDED and what in (*octets, RequestStreamInput.FIN_INSIDE):
        assert after is None  # the transport lets nothing come
        return
    bench, stream_id = request_in(state)
    assert bench.core.requests.state(stream_id) is state
    if what is RequestStreamInput.PART and state is RequestStreamState.PARTIAL:
        bench.data(stream_id, SUBSCRIBE[:3])
    else:
        STREAM[what](bench, stream_id)
    judged(bench, after is not None)
    if after is not None:
        assert bench.core.requests.state(stream_id) is after


@pytest.mark.parametrize("whole_first", [True, False])
def test_a_held_stream_that_was_stopped_is_cancelled_once_it_is_read(whole_first: bool) -> None:
    bench = Bench(setup=False)
    stream_id = bench.bidi()
    bench.data(stream_id, SUBSCRIBE if whole_first else SUBSCRIBE[:4])
    bench.stop(stream_id)
    bench.send_setup()
    if not whole_first:
        bench.data(stream_id, SUBSCRIBE[4:])
    assert bench.stops[stream_id] == 0x1
    bench.reset(stream_id)
    assert residue(bench.core) == {}


def test_a_stream_given_up_is_reset_stopped_and_read_over() -> None:
    bench, stream_id = request_in(RequestStreamState.GIVEN_UP)
    assert (bench.resets[stream_id], bench.stops[stream_id]) == (0x1, 0x1)
    bench.data(stream_id, SUBSCRIBE)
    assert not bench.sent[stream_id]
    bench.reset(stream_id)
    assert residue(bench.core) == {}


def test_too_many_streams_that_were_given_up_and_stay_open_close(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(request_streams, "MAX_UNENDED_REQUESTS", 4)
    bench = Bench()
    for _ in range(5):
        bench.data(bench.bidi(), SUBSCRIBE[:4])
    bench.advance(10.1)
    assert bench.close is None and len(bench.stops) == 5
    bench.advance(request_streams.UNENDED_SECONDS + 0.1)
    assert bench.close_code == SessionCode.CONTROL_MESSAGE_TIMEOUT


def test_a_pair_that_the_table_lacks_is_a_violation() -> None:
    with pytest.raises(ProtocolViolation, match="twice"):
        next_phase(Phase.OPEN, ControlInput.SETUP, "twice")
