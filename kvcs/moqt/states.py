"""States of a session and of the peer's streams, as tables (MOQT §6.3, §6.4).

A pair of state and input that a table lacks breaks the protocol. Requests have tables of their own
in `kvcs.moqt.requests`; what a stream's octets say is for the parsers.
"""

from __future__ import annotations

from enum import Enum, auto

from kvcs.moqt.errors import ProtocolViolation


class Phase(Enum):
    """Where a session stands, by what the peer's control stream has said."""

    AWAITING_SETUP = auto()
    OPEN = auto()
    GOING_AWAY = auto()
    """The peer has sent GOAWAY."""

    CLOSED = auto()


class ControlInput(Enum):
    """What comes on the control stream."""

    SETUP = auto()
    GOAWAY = auto()
    OTHER = auto()
    """Any other message, and a second control stream."""

    ENDED = auto()
    """FIN, reset, or STOP_SENDING for ours."""


SESSION: dict[tuple[Phase, ControlInput], Phase] = {
    (Phase.AWAITING_SETUP, ControlInput.SETUP): Phase.OPEN,
    (Phase.OPEN, ControlInput.GOAWAY): Phase.GOING_AWAY,
    # What was under way when the session closed is read over.
    **{(Phase.CLOSED, what): Phase.CLOSED for what in ControlInput},
}
"""A session's phases; all else closes it."""


class DataStreamState(Enum):
    """Where a unidirectional stream of the peer stands."""

    HEADER = auto()
    """Its header is not whole."""

    EARLY = auto()
    """Its Track Alias is not bound: octets are held."""

    OPEN = auto()
    """It belongs to a request: octets are Objects."""

    DISCARDED = auto()
    """It was stopped, or is padding: octets are read over."""

    ENDED = auto()


class DataStreamInput(Enum):
    """What happens to a unidirectional stream of the peer."""

    ROUTED = auto()
    """Its header is whole, and names a request."""

    UNROUTED = auto()
    """Its header is whole, and names an alias that nothing is bound to."""

    REFUSED = auto()
    """Its header is whole, and names a request that has no such stream: it is stopped."""

    PADDING = auto()
    """Its header says that it is padding."""

    BOUND = auto()
    """The alias that it names was bound to a subscription."""

    FIN = auto()
    """It ends where it may."""

    FIN_INSIDE = auto()
    """It ends inside its header or an Object."""

    RESET = auto()
    GIVEN_UP = auto()
    """We stop it: its request is over, or too much is held."""


_H, _E, _O, _D = (
    DataStreamState.HEADER,
    DataStreamState.EARLY,
    DataStreamState.OPEN,
    DataStreamState.DISCARDED,
)
_ENDED = DataStreamState.ENDED
_I = DataStreamInput

DATA_STREAM: dict[tuple[DataStreamState, DataStreamInput], DataStreamState] = {
    (_H, _I.ROUTED): _O,
    (_H, _I.UNROUTED): _E,
    (_H, _I.REFUSED): _D,
    (_H, _I.PADDING): _D,
    (_H, _I.FIN): _ENDED,
    (_H, _I.RESET): _ENDED,
    (_H, _I.GIVEN_UP): _D,
    (_E, _I.BOUND): _O,
    # Whether it ends inside an Object is known once its Objects are read.
    (_E, _I.FIN): _E,
    (_E, _I.FIN_INSIDE): _E,
    (_E, _I.RESET): _ENDED,
    (_E, _I.GIVEN_UP): _D,
    (_O, _I.FIN): _ENDED,
    (_O, _I.RESET): _ENDED,
    (_O, _I.GIVEN_UP): _D,
    (_D, _I.FIN): _ENDED,
    (_D, _I.FIN_INSIDE): _ENDED,
    (_D, _I.RESET): _ENDED,
    (_D, _I.GIVEN_UP): _D,
    (_ENDED, _I.RESET): _ENDED,
    (_ENDED, _I.GIVEN_UP): _ENDED,
}
"""A data stream's life; FIN_INSIDE of a header or an Object that we read closes the session."""


class RequestStreamState(Enum):
    """Where a bidirectional stream of the peer stands, before and beside its request."""

    HELD = auto()
    """The peer's SETUP is not here: octets are held and not read."""

    PARTIAL = auto()
    """Its first message is not whole."""

    REQUEST = auto()
    """It is a request's; see `kvcs.moqt.requests`."""

    GIVEN_UP = auto()
    """It was stopped before it said what it wants: octets are read over."""

    ENDED = auto()
    """Nothing of it is remembered."""


class RequestStreamInput(Enum):
    """What happens to a bidirectional stream of the peer."""

    PART = auto()
    """Octets that do not complete a message."""

    WHOLE = auto()
    """Octets that complete one."""

    FIN = auto()
    """It ends where it may."""

    FIN_INSIDE = auto()
    """It ends inside a message."""

    RESET = auto()
    STOP = auto()
    """STOP_SENDING of our direction."""

    SETUP = auto()
    """The peer's SETUP comes."""

    TIMEOUT = auto()
    """The first message takes too long, or too many streams lack theirs."""


_S, _R = RequestStreamState, RequestStreamInput

REQUEST_STREAM: dict[tuple[RequestStreamState, RequestStreamInput], RequestStreamState] = {
    **{
        (_S.HELD, what): _S.HELD
        for what in (_R.PART, _R.WHOLE, _R.FIN, _R.FIN_INSIDE, _R.STOP, _R.TIMEOUT)
    },
    (_S.HELD, _R.RESET): _S.ENDED,
    (_S.HELD, _R.SETUP): _S.PARTIAL,
    (_S.PARTIAL, _R.PART): _S.PARTIAL,
    (_S.PARTIAL, _R.WHOLE): _S.REQUEST,
    (_S.PARTIAL, _R.FIN): _S.ENDED,
    (_S.PARTIAL, _R.RESET): _S.ENDED,
    # What it asks for is cancelled once it is known: its Request ID counts as used (§6.4.2.1).
    (_S.PARTIAL, _R.STOP): _S.PARTIAL,
    (_S.PARTIAL, _R.TIMEOUT): _S.GIVEN_UP,
    (_S.REQUEST, _R.PART): _S.REQUEST,
    (_S.REQUEST, _R.WHOLE): _S.REQUEST,
    (_S.REQUEST, _R.FIN): _S.REQUEST,
    (_S.REQUEST, _R.RESET): _S.ENDED,
    # It is cancelled; the peer's direction ends by the STOP_SENDING that goes back.
    (_S.REQUEST, _R.STOP): _S.REQUEST,
    (_S.REQUEST, _R.TIMEOUT): _S.REQUEST,
    (_S.GIVEN_UP, _R.PART): _S.GIVEN_UP,
    (_S.GIVEN_UP, _R.WHOLE): _S.GIVEN_UP,
    (_S.GIVEN_UP, _R.FIN): _S.ENDED,
    (_S.GIVEN_UP, _R.FIN_INSIDE): _S.ENDED,
    (_S.GIVEN_UP, _R.RESET): _S.ENDED,
    (_S.GIVEN_UP, _R.STOP): _S.GIVEN_UP,
    (_S.GIVEN_UP, _R.TIMEOUT): _S.GIVEN_UP,
    (_S.ENDED, _R.RESET): _S.ENDED,
    (_S.ENDED, _R.STOP): _S.ENDED,
    (_S.ENDED, _R.TIMEOUT): _S.ENDED,
}
"""A request stream's life. FIN_INSIDE of what we read closes the session; a second SETUP does, too.

The transport lets no octets and no FIN come on a stream that has ended.
"""


def next_phase(phase: Phase, what: ControlInput, text: str) -> Phase:
    """The phase after an input.

    Raises:
        ProtocolViolation: it has no place there; ``text`` says what came.
    """
    after = SESSION.get((phase, what))
    if after is None:
        raise ProtocolViolation(text)
    return after


def next_state(state: DataStreamState, what: DataStreamInput) -> DataStreamState:
    """The state of a data stream after an input.

    Raises:
        ProtocolViolation: it has no place there.
    """
    after = DATA_STREAM.get((state, what))
    if after is None:
        raise ProtocolViolation(f"{what.name} on a data stream that is {state.name}")
    return after
