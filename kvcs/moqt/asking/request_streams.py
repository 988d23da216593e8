"""The request streams of a session: one bidirectional stream for each request (MOQT §6.4).

This knows streams, Request IDs and frames; what the messages mean is for `requester` (requests of
ours) and `responder` (those of the peer).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kvcs.errors import SessionError, UsageError
from kvcs.moqt import messages
from kvcs.moqt.actions import ResetStream, Send, StopSending
from kvcs.moqt.errors import InvalidRequestId, ProtocolViolation, SessionCode, StreamCode
from kvcs.moqt.framing import MessageReader, encode_message
from kvcs.moqt.limits import Limit
from kvcs.moqt.messages import Message
from kvcs.moqt.parameters import Parameters, check_scope
from kvcs.moqt.requests import (
    KINDS,
    UPDATE_SCOPES,
    Kind,
    Request,
    RequestIds,
    RequestMessage,
    State,
)
from kvcs.moqt.settings import Role
from kvcs.moqt.states import RequestStreamState
from kvcs.moqt.wire import TYPE_IDS, Octets

if TYPE_CHECKING:
    from kvcs.moqt.session import Session

MAX_HELD_OCTETS = 1 << 20
"""Octets of request streams held while the peer's SETUP is on its way."""

HELD_STREAM_OCTETS = 256
"""What each held stream counts beside its octets."""

MAX_HALF_OPEN_STREAMS = 256
"""Request streams of the peer whose first message is not whole; beyond it the oldest is given
up."""

MAX_PARTIAL_OCTETS = 4 << 20
"""Octets of messages on request streams that are not whole."""

MAX_UNENDED_REQUESTS = 2048
"""Requests that are over, or were given up, while the peer keeps its direction of their streams
open. It may grant and open any number of streams, and has to end what it was stopped on."""

UNENDED_SECONDS = 10.0
"""How long they may be more: many may be cancelled at once, and each takes a round trip."""

MAX_WAITING_REQUESTS = 1024
"""Requests of ours that wait for the peer's stream credit."""

FirstOctets = Callable[[Request], bytes]
"""Makes the first octets of a request of ours whose stream opens now."""

_REQUEST_TYPES = frozenset(TYPE_IDS[cls] for cls in KINDS)


@dataclass(slots=True)
class _Arriving:
    """A stream of the peer whose first message is not whole yet, or waits for SETUP."""

    stream_id: int
    data: bytearray = field(default_factory=bytearray)
    """Octets that were not read yet."""

    fin: bool = False
    stopped: int | None = None
    """Code of a STOP_SENDING that overtook the request, which is cancelled once it is here."""

    since: float = 0.0
    """When its first octets came, or when SETUP came behind them."""

    reader: MessageReader = field(default_factory=lambda: MessageReader(_REQUEST_TYPES))


class RequestStreams:
    """Requests of both sides and their streams.

    Args:
        session: the session that they belong to.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.on_over: Callable[[int], None] | None = None
        """Called with the Request ID when a request of either side is over."""
        self._by_stream: dict[int, Request] = {}
        self._by_id: dict[int, Request] = {}
        self._arriving: dict[int, _Arriving] = {}
        self._waiting: dict[Request, FirstOctets] = {}
        self._unended: set[Request] = set()
        self._given_up: set[int] = set()
        """Streams of the peer that we stopped before they had a whole message."""
        self._counting_unended = False
        self._timing_half_open = False
        self._held_octets = 0
        self._partial_octets = 0
        self._parity = 1 if session.role is Role.SERVER else 0
        self._next_id = self._next_stream = self._parity
        self._peer_ids = RequestIds()
        self._peer_streams = RequestIds()

    def get(self, request_id: int) -> Request | None:
        """A live request by its ID."""
        return self._by_id.get(request_id)

    def all(self) -> list[Request]:
        """Requests of both sides that are not over."""
        return list(self._by_id.values())

    @property
    def waiting(self) -> int:
        """Requests of ours that wait for stream credit."""
        return len(self._waiting)

    # Requests of ours

    @property
    def made(self) -> int:
        """Requests of ours so far."""
        return self._next_id // 2

    def open(
        self, make: Callable[[int], RequestMessage], begin: FirstOctets | None = None
    ) -> Request:
        """Make a request of ours; it goes out as soon as there is stream credit.

        Args:
            make: gives the message for a Request ID.
            begin: gives the octets when there is credit, where they depend on that moment; they
                must not be longer than those of the message.

        Raises:
            UsageError: the session is closed, too many requests wait for credit, or the message
                cannot be encoded.
        """
        if self._session.closed:
            raise UsageError("the session is closed")
        if len(self._waiting) >= MAX_WAITING_REQUESTS:
            raise UsageError(
                f"{MAX_WAITING_REQUESTS} requests wait for the peer's stream credit already"
            )
        message = self._session.credentials.added(make(self._next_id))
        frame = encode_message(message)
        request = Request(self._take_id(), KINDS[type(message)], -1, message, ours=True)
        self._by_id[request.request_id] = request
        self._waiting[request] = (lambda _: frame) if begin is None else begin
        self._session.wake()
        return request

    def open_next(self) -> Send:
        """The first octets of the request that has waited longest; there has to be one."""
        request = next(iter(self._waiting))
        first_octets = self._waiting.pop(request)
        request.stream_id = self._next_stream
        self._next_stream += 4
        self._by_stream[request.stream_id] = request
        return Send(request.stream_id, (first_octets(request),))

    def update(self, request: Request, parameters: Parameters) -> int:
        """REQUEST_UPDATE a request of ours that is established (§9.5); returns its Request ID.

        Raises:
            UsageError: the parameters have no place there, or cannot be encoded.
        """
        scope = UPDATE_SCOPES[request.kind]
        try:
            check_scope(parameters, scope)
        except ProtocolViolation as exc:
            raise UsageError(exc.reason) from None
        self.send(request, messages.RequestUpdate(self._next_id, parameters))
        update_id = self._take_id()
        request.updates.append(update_id)
        return update_id

    def _take_id(self) -> int:
        """The next Request ID of this endpoint (§6.4.2.1)."""
        taken = self._next_id
        self._next_id += 2
        return taken

    # Sending and ending

    def send(self, request: Request, message: Message, *, fin: bool = False) -> None:
        """Send a message on a request's stream; nothing where our direction has ended."""
        if request.sending_ended:
            return
        frame = encode_message(message)
        request.sending_ended = fin
        self._session.act(Send(request.stream_id, (frame,), fin))

    def finish(self, request: Request) -> None:
        """FIN our direction of a request's stream, once."""
        if not request.sending_ended and request.stream_id >= 0:
            request.sending_ended = True
            self._session.act(Send(request.stream_id, (), fin=True))

    def abandon(self, request: Request, code: int) -> None:
        """Reset our direction and stop the peer's, where they are open (§6.4.2.3)."""
        request.abandoned = True
        if request.stream_id < 0:
            self._waiting.pop(request, None)
            return
        if not request.sending_ended:
            request.sending_ended = True
            self._session.act(ResetStream(request.stream_id, code))
        if not request.receiving_ended:
            self._session.act(StopSending(request.stream_id, code))

    def forget(self, request: Request) -> None:
        """Drop a request whose work is done; its stream is read over until it ends."""
        self._by_id.pop(request.request_id, None)
        request.state = State.TERMINATED
        if self.on_over is not None:
            self.on_over(request.request_id)
        if not request.ours:
            self._session.load.leave(request)
            # Its stream may stay open for long; what it asked for need not stay in memory.
            request.message = replace(request.message, parameters=Parameters())
        self._release(request)
        if request.stream_id in self._by_stream:
            self._unended.add(request)
            self._count_unended()

    def clear(self) -> None:
        """The session is over."""
        self._by_id.clear()
        self._by_stream.clear()
        self._arriving.clear()
        self._waiting.clear()
        self._unended.clear()
        self._given_up.clear()
        self._partial_octets = 0

    # Inputs

    def receive(self, stream_id: int, data: bytes, fin: bool) -> None:
        """Octets of a bidirectional stream.

        Raises:
            SessionError: they break a rule.
        """
        request = self._by_stream.get(stream_id)
        if request is not None:
            self._take(request, self._feed(request.reader, data), fin)
        elif stream_id in self._given_up:
            if fin:
                self._given_up.discard(stream_id)
        elif not self._is_ours(stream_id):  # else it belongs to a request that is over
            arriving = self._arrive(stream_id)
            arriving.data += data
            arriving.fin = fin
            if self._session.peer_options is None:
                self._hold(len(data))
            else:
                self._begin(arriving)

    def receive_held(self) -> None:
        """The peer's SETUP is here: take what overtook it (§6.3)."""
        self._held_octets = 0
        for arriving in list(self._arriving.values()):
            arriving.since = self._session.now
            self._begin(arriving)

    def reset(self, stream_id: int, code: int) -> None:
        """The peer reset its direction of a stream."""
        request = self._by_stream.get(stream_id)
        if request is not None:
            request.receiving_ended = True
            self._side_ended(request, code)
        elif not self._is_ours(stream_id):
            # It never said what it wants; there is nothing to end but our direction.
            self._given_up.discard(stream_id)
            arriving = self._arriving.pop(stream_id, None)
            if arriving is not None:
                self._partial_octets -= arriving.reader.buffered
                if self._session.peer_options is None:
                    self._held_octets -= HELD_STREAM_OCTETS + len(arriving.data)
            new = self._peer_streams.add(stream_id >> 2)
            if new or (arriving is not None and arriving.stopped is None):
                self._session.act(ResetStream(stream_id, StreamCode.CANCELLED))

    def stopped(self, stream_id: int, code: int) -> None:
        """The peer stopped our direction of a stream; the transport has reset it."""
        request = self._by_stream.get(stream_id)
        if request is not None:
            request.sending_ended = True
            self._side_ended(request, code)
        elif not self._is_ours(stream_id):
            arriving = self._arriving.get(stream_id)
            if arriving is None and self._peer_streams.add(stream_id >> 2):
                arriving = self._arrive(stream_id)
            if arriving is not None:
                arriving.stopped = code

    def state(self, stream_id: int) -> RequestStreamState:
        """Where a bidirectional stream of the peer stands; ENDED for one that is not known."""
        if stream_id in self._arriving:
            held = self._session.peer_options is None
            return RequestStreamState.HELD if held else RequestStreamState.PARTIAL
        if stream_id in self._given_up:
            return RequestStreamState.GIVEN_UP
        if stream_id in self._by_stream:
            return RequestStreamState.REQUEST
        return RequestStreamState.ENDED

    def check_peer_id(self, request_id: int) -> None:
        """Hold a Request ID of the peer to §6.4.2.1.

        Raises:
            InvalidRequestId: wrong parity, or used before.
        """
        if request_id & 1 == self._parity:
            raise InvalidRequestId(f"Request ID {request_id} has the wrong parity")
        if not self._peer_ids.add(request_id >> 1):
            raise InvalidRequestId(f"Request ID {request_id} was used before")

    # Inner workings

    def _feed(self, reader: MessageReader, data: Octets) -> list[Message]:
        """Feed a stream's reader, within what all of them may hold."""
        before = reader.buffered
        received = reader.feed(data)
        self._partial_octets += reader.buffered - before
        if self._partial_octets > MAX_PARTIAL_OCTETS:
            self._session.limits.reached(Limit.PARTIAL_OCTETS)
            raise SessionError(
                "too many octets of unfinished messages", SessionCode.CONTROL_MESSAGE_TIMEOUT
            )
        return received

    def _count_unended(self) -> None:
        unended = len(self._unended) + len(self._given_up)
        if unended > MAX_UNENDED_REQUESTS and not self._counting_unended:
            self._counting_unended = True
            self._session.at(self._session.now + UNENDED_SECONDS, self._check_unended)

    def _check_unended(self, now: float) -> None:
        self._counting_unended = False
        if len(self._unended) + len(self._given_up) > MAX_UNENDED_REQUESTS:
            self._session.limits.reached(Limit.UNENDED_STREAMS)
            self._session.close(
                SessionCode.CONTROL_MESSAGE_TIMEOUT, "streams of finished requests stay open"
            )

    def _is_ours(self, stream_id: int) -> bool:
        return (stream_id & 1) == self._parity

    def _arrive(self, stream_id: int) -> _Arriving:
        arriving = self._arriving.get(stream_id)
        if arriving is None:
            self._peer_streams.add(stream_id >> 2)
            arriving = self._arriving[stream_id] = _Arriving(stream_id, since=self._session.now)
            if self._session.peer_options is None:
                self._hold(HELD_STREAM_OCTETS)
        return arriving

    def _hold(self, octets: int) -> None:
        self._held_octets += octets
        if self._held_octets > MAX_HELD_OCTETS:
            self._session.limits.reached(Limit.HELD_OCTETS)
            raise ProtocolViolation("too many requests before SETUP")

    def _begin(self, arriving: _Arriving) -> None:
        """Read what has come of a new stream; a whole first message makes it a request."""
        received = self._feed(arriving.reader, arriving.data)
        arriving.data = bytearray()
        if not received:
            if arriving.fin:
                self._ended_without_request(arriving)
            else:
                self._wait_for_rest()
            return
        first = received[0]
        assert isinstance(first, RequestMessage)  # the reader lets nothing else come first
        del self._arriving[arriving.stream_id]
        self.check_peer_id(first.request_id)
        request = Request(
            first.request_id,
            KINDS[type(first)],
            arriving.stream_id,
            first,
            ours=False,
            reader=arriving.reader,
        )
        self._by_id[request.request_id] = request
        self._by_stream[request.stream_id] = request
        self._session.responder.begin(request)
        if arriving.stopped is not None:
            request.sending_ended = True
            self._side_ended(request, arriving.stopped)
        self._take(request, received[1:], arriving.fin)

    def _wait_for_rest(self) -> None:
        """A first message is not whole: see to it that such streams stay few and become whole."""
        if len(self._arriving) > MAX_HALF_OPEN_STREAMS:
            self._give_up(Limit.HALF_OPEN_STREAMS)
        self._time_half_open()

    def _time_half_open(self) -> None:
        if self._arriving and not self._timing_half_open:
            self._timing_half_open = True
            oldest = next(iter(self._arriving.values()))
            due = oldest.since + self._session.settings.request_wait
            self._session.at(due, self._check_half_open)

    def _check_half_open(self, now: float) -> None:
        self._timing_half_open = False
        wait = self._session.settings.request_wait
        while self._arriving and now >= next(iter(self._arriving.values())).since + wait:
            self._give_up(Limit.HALF_OPEN_SECONDS)
        self._time_half_open()

    def _give_up(self, limit: Limit) -> None:
        """Reset and stop the stream that waits longest for the rest of its first message."""
        stream_id, arriving = next(iter(self._arriving.items()))
        del self._arriving[stream_id]
        self._partial_octets -= arriving.reader.buffered
        self._session.limits.reached(limit)
        if arriving.stopped is None:
            self._session.act(ResetStream(stream_id, StreamCode.CANCELLED))
        self._session.act(StopSending(stream_id, StreamCode.CANCELLED))
        self._given_up.add(stream_id)
        self._count_unended()

    def _ended_without_request(self, arriving: _Arriving) -> None:
        if arriving.reader.pending:
            raise ProtocolViolation("a request stream ended inside a message")
        del self._arriving[arriving.stream_id]
        if arriving.stopped is None:
            self._session.act(ResetStream(arriving.stream_id, StreamCode.CANCELLED))

    def _take(self, request: Request, received: list[Message], fin: bool) -> None:
        for message in received:
            if isinstance(message, messages.Goaway):
                self._session.control.take_goaway(message, request)
                continue
            self._check_update(request, message)
            if request.ours:
                self._session.requester.receive(request, message)
            else:
                self._session.responder.receive(request, message)
        request.reader.check()
        if fin:
            if request.reader.pending:
                raise ProtocolViolation("a request stream ended inside a message")
            request.receiving_ended = True
            self._side_ended(request, None)

    def _check_update(self, request: Request, message: Message) -> None:
        if request.ours and request.kind is not Kind.PUBLISH:
            return  # only the subscriber of a PUBLISH may send one here: the table closes
        if isinstance(message, messages.RequestUpdate):
            scope = UPDATE_SCOPES.get(request.kind)
            if scope is None:
                raise ProtocolViolation("REQUEST_UPDATE on a TRACK_STATUS request")
            check_scope(message.parameters, scope)
            self.check_peer_id(message.request_id)

    def _side_ended(self, request: Request, code: int | None) -> None:
        if request.state is not State.TERMINATED:
            half = self._session.requester if request.ours else self._session.responder
            half.side_ended(request, code)
        self._release(request)

    def _release(self, request: Request) -> None:
        """Forget the stream of a finished request once the peer's direction has ended."""
        if request.state is State.TERMINATED and request.receiving_ended:
            if self._by_stream.pop(request.stream_id, None) is not None:
                self._partial_octets -= request.reader.buffered
            self._by_id.pop(request.request_id, None)
            self._unended.discard(request)
