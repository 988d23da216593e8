"""The session core: octets and the time in, events and actions out (MOQT §6).

`Session` owns the streams and the order in which they are written. What this endpoint asks for is
in `requester`, what the peer asks for in `responder`; both are reached as attributes:

    session.requester.subscribe(...)           session.responder.accept_subscribe(...)

No method waits, opens a socket or reads a clock. After each input the shell drains `next_action`
and `next_event`, and calls `receive_timer` when `next_timer` is due.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush

from kvcs.errors import SessionError, UsageError
from kvcs.moqt import messages
from kvcs.moqt.actions import (
    Action,
    CloseSession,
    ResetStream,
    Send,
    SendCredit,
    SendDatagram,
    StopSending,
)
from kvcs.moqt.control import ControlStreams
from kvcs.moqt.data import ObjectDatagram, decode_datagram
from kvcs.moqt.delivery import ObjectSender
from kvcs.moqt.errors import InvalidRequestId, ProtocolViolation, SessionCode, StreamCode
from kvcs.moqt.events import Event, SessionClosed
from kvcs.moqt.messages import Message
from kvcs.moqt.parameters import check_scope
from kvcs.moqt.properties import KeyValues
from kvcs.moqt.receiving import DataStreams
from kvcs.moqt.requester import Requester
from kvcs.moqt.requests import KINDS, UPDATE_SCOPES, Kind, Request, RequestIds, State
from kvcs.moqt.responder import Responder
from kvcs.moqt.scheduler import Scheduler
from kvcs.moqt.settings import Role, SessionSettings
from kvcs.moqt.tokens import TokenCache
from kvcs.moqt.wire import TYPE_IDS, MessageReader, encode_message

QUANTUM_OCTETS = 256 * 1024
"""Most payload octets handed over in one action, so that a large Object can be overtaken."""

MAX_HELD_OCTETS = 1 << 20
"""Octets of request streams held while the peer's SETUP is on its way."""

MAX_WAITING_REQUESTS = 1024
"""Requests of ours that wait for the peer's stream credit."""

_REQUEST_TYPES = frozenset(TYPE_IDS[cls] for cls in KINDS)


class Session:
    """One MOQT session without its I/O.

    Args:
        role: which side opened the connection.
        settings: see `SessionSettings`.
        on_wake: called when something became ready to be sent outside of an input or command, for
            example because a Track of this session got an Object; the shell then pumps.
    """

    def __init__(
        self,
        role: Role,
        settings: SessionSettings | None = None,
        on_wake: Callable[[], None] | None = None,
    ) -> None:
        self.role = role
        self.settings = SessionSettings() if settings is None else settings
        self.failure: BaseException | None = None
        """What went wrong inside, when the session closed with INTERNAL_ERROR."""
        self.closed = False
        self.scheduler = Scheduler()
        self.tokens = TokenCache(self.settings.max_auth_token_cache_size)
        self.control = ControlStreams(self)
        self.requester = Requester(self)
        self.responder = Responder(self)
        self.data_streams = DataStreams(self.requester, self.settings.early)
        self._on_wake = on_wake
        self._outbox: deque[Action] = deque()
        self._events: deque[Event] = deque()
        self._timers: list[tuple[float, int, Callable[[float], None]]] = []
        self._timer_serial = 0
        self._by_stream: dict[int, Request] = {}
        self._by_id: dict[int, Request] = {}
        self._waiting: deque[Request] = deque()
        self._senders: dict[int, ObjectSender] = {}
        self._held: list[tuple[int, bytes, bool]] = []
        self._held_octets = 0
        server = role is Role.SERVER
        self._next_request_id = 1 if server else 0
        self._next_bidi = 1 if server else 0
        self._next_uni = 3 if server else 2
        self._peer_ids = RequestIds()

    @property
    def peer_options(self) -> KeyValues | None:
        """Setup Options of the peer, once they are there."""
        return self.control.peer_options

    @property
    def draining(self) -> bool:
        """Whether a GOAWAY was sent: new requests of the peer are refused."""
        return self.control.goaway_sent

    # Inputs

    def receive_connected(self, now: float) -> None:
        """The transport is ready: our control stream and SETUP go out (§6.3)."""
        self._outbox.append(self.control.open(self._take_uni()))

    def receive_stream_data(self, stream_id: int, data: bytes, fin: bool, now: float) -> None:
        """Octets of a stream, in order."""
        self._guard(lambda: self._stream_data(stream_id, data, fin, now))

    def receive_reset(self, stream_id: int, code: int, now: float) -> None:
        """The peer reset its direction of a stream."""
        self._guard(lambda: self._reset(stream_id, code, now))

    def receive_stop_sending(self, stream_id: int, code: int, now: float) -> None:
        """The peer stopped our direction of a stream; the transport has reset it."""
        self._guard(lambda: self._stopped(stream_id, code, now))

    def receive_datagram(self, data: bytes, now: float) -> None:
        """One datagram (§11.2)."""

        def take() -> None:
            datagram = decode_datagram(data)
            if isinstance(datagram, ObjectDatagram):
                self.data_streams.receive_datagram(datagram)

        self._guard(take)

    def receive_credit(self) -> None:
        """Flow control or stream credit may have grown."""
        self.scheduler.unblock()

    def receive_timer(self, now: float) -> None:
        """`next_timer` is due."""

        def run() -> None:
            self.data_streams.receive_timer(now)
            while self._timers and self._timers[0][0] <= now:
                _, _, callback = heappop(self._timers)
                callback(now)

        self._guard(run)

    def receive_closed(self, code: int | None, reason: str, by_peer: bool) -> None:
        """The transport is gone."""
        if not self.closed:
            self._end(code, reason, by_peer)

    # Commands that concern the whole session

    def goaway(self, new_session_uri: str = "", timeout_ms: int = 0, *, now: float) -> None:
        """Announce that the session will close (§9.2); new requests of the peer are refused.

        Args:
            new_session_uri: where to go instead; servers only.
            timeout_ms: after it the session is closed with GOAWAY_TIMEOUT if requests are open.
            now: the caller's clock, seconds.
        """
        if self.closed:
            return
        action = self.control.goaway(new_session_uri, timeout_ms)
        if action is None:
            return
        self._outbox.append(action)
        if timeout_ms:
            self.at(now + timeout_ms / 1000, self._goaway_expired)
        self.wake()

    def _goaway_expired(self, now: float) -> None:
        self.close(*self.control.expired(bool(self._by_id)))

    def close(self, code: int = SessionCode.NO_ERROR, reason: str = "") -> None:
        """Close the session; nothing else is sent."""
        if self.closed:
            return
        self._outbox.clear()
        self._outbox.append(CloseSession(code, reason))
        self._end(code, reason, by_peer=False)

    # Outputs

    def next_event(self) -> Event | None:
        """The oldest event that was not taken yet."""
        return self._events.popleft() if self._events else None

    @property
    def idle(self) -> bool:
        """Whether no control message of ours waits to be handed over."""
        return not self._outbox and not self._waiting

    def next_timer(self) -> float | None:
        """When `receive_timer` wants to be called, in the caller's clock."""
        if self.closed:
            return None
        early = self.data_streams.next_timer()
        if not self._timers:
            return early
        return self._timers[0][0] if early is None else min(early, self._timers[0][0])

    def next_action(self, credit: SendCredit, now: float) -> Action | None:
        """What the shell should do next; None when there is nothing, or no credit for it.

        Control and request streams go first and always; Objects go in the order of
        `kvcs.moqt.scheduler`, while ``credit`` has room.
        """
        if self._outbox:
            return self._outbox.popleft()
        if self.closed:
            return None
        if self._waiting and credit.bidi_streams() > 0:
            return self._open_request(self._waiting.popleft())
        if credit.uni_streams() > 0:
            self.scheduler.unpark()
        while True:
            room = credit.octets()
            if room <= 0:
                return None
            sender = self.scheduler.pick()
            if sender is None:
                return None
            assert isinstance(sender, ObjectSender)
            action = self._send_from(sender, min(room, QUANTUM_OCTETS), credit, now)
            if action is not None:
                return action
            if self._outbox:
                return self._outbox.popleft()

    # For the halves

    def emit(self, event: Event) -> None:
        """Report an event."""
        self._events.append(event)

    def wake(self) -> None:
        """Something became ready to be sent."""
        if self._on_wake is not None and not self.closed:
            self._on_wake()

    def at(self, when: float, callback: Callable[[float], None]) -> None:
        """Call ``callback`` with the time, at ``when`` or soon after."""
        self._timer_serial += 1
        heappush(self._timers, (when, self._timer_serial, callback))
        self.wake()

    def take_request_id(self) -> int:
        """The next Request ID of this endpoint (§6.4.2.1)."""
        taken = self._next_request_id
        self._next_request_id += 2
        return taken

    def open_request(self, kind: Kind, request_id: int, message: Message) -> Request:
        """Make a request of ours; it goes out as soon as there is stream credit.

        Raises:
            UsageError: the session is closed, or too many requests wait for credit.
        """
        if self.closed:
            raise UsageError("the session is closed")
        if len(self._waiting) >= MAX_WAITING_REQUESTS:
            raise UsageError(
                f"{MAX_WAITING_REQUESTS} requests wait for the peer's stream credit already"
            )
        request = Request(request_id, kind, -1, message, ours=True)
        self._by_id[request_id] = request
        self._waiting.append(request)
        self.wake()
        return request

    def send(self, request: Request, message: Message, *, fin: bool = False) -> None:
        """Send a message on a request's stream."""
        if request.sending_ended:
            return
        if request.stream_id < 0:
            raise UsageError("the request has no stream yet")
        request.sending_ended = fin
        self._outbox.append(Send(request.stream_id, (encode_message(message),), fin))
        self.wake()

    def finish(self, request: Request) -> None:
        """FIN our direction of a request's stream, once."""
        if not request.sending_ended and request.stream_id >= 0:
            request.sending_ended = True
            self._outbox.append(Send(request.stream_id, (), fin=True))
            self.wake()

    def abandon(self, request: Request, code: int) -> None:
        """Reset our direction and stop the peer's, where they are open (§6.4.2.3)."""
        if request.stream_id < 0:
            if request in self._waiting:
                self._waiting.remove(request)
            return
        if not request.sending_ended:
            request.sending_ended = True
            self._outbox.append(ResetStream(request.stream_id, code))
        if not request.receiving_ended:
            self._outbox.append(StopSending(request.stream_id, code))
        self.wake()

    def stop_stream(self, stream_id: int, code: int) -> None:
        """STOP_SENDING a data stream."""
        self._outbox.append(StopSending(stream_id, code))
        self.wake()

    def request(self, request_id: int) -> Request | None:
        """A live request by its ID."""
        return self._by_id.get(request_id)

    def open_requests(self) -> list[Request]:
        """Requests of both sides that are not over."""
        return list(self._by_id.values())

    def forget(self, request: Request) -> None:
        """Drop a request whose work is done; its stream is read over until it ends."""
        self._by_id.pop(request.request_id, None)
        request.state = State.TERMINATED
        self._release(request)

    def close_sender(self, sender: ObjectSender, code: int | None) -> None:
        """End a sender's stream: with a reset where ``code`` is given."""
        if sender.stream_id is not None:
            self._senders.pop(sender.stream_id, None)
            if code is not None:
                self._outbox.append(ResetStream(sender.stream_id, code))
                self.wake()
        sender.close()

    # Inner workings: input

    def _guard(self, step: Callable[[], None]) -> None:
        """Run one input; a broken rule closes the session, and so does a fault of ours."""
        if self.closed:
            return
        try:
            step()
        except SessionError as exc:
            self.close(exc.code, exc.reason)
        except Exception as exc:
            self.failure = exc
            self.close(SessionCode.INTERNAL_ERROR, "internal error")

    def _stream_data(self, stream_id: int, data: bytes, fin: bool, now: float) -> None:
        if stream_id & 2:
            self._uni_data(stream_id, data, fin, now)
            return
        request = self._by_stream.get(stream_id)
        if request is None:
            if self._is_ours(stream_id):
                return  # a request that is over
            if self.peer_options is None:
                self._hold(stream_id, data, fin)
                return
            request = self._accept_stream(stream_id)
        self._request_data(request, data, fin, now)

    def _is_ours(self, stream_id: int) -> bool:
        return (stream_id & 1) == (1 if self.role is Role.SERVER else 0)

    def _hold(self, stream_id: int, data: bytes, fin: bool) -> None:
        """Keep a request that overtook the peer's SETUP (§6.3)."""
        self._held_octets += len(data)
        if self._held_octets > MAX_HELD_OCTETS:
            raise ProtocolViolation("too many requests before SETUP")
        self._held.append((stream_id, data, fin))

    def _uni_data(self, stream_id: int, data: bytes, fin: bool, now: float) -> None:
        if stream_id != self.control.peers:
            if self.data_streams.receive(stream_id, data, fin, now):
                return
            data = self.data_streams.pop_head(stream_id) + data
        if self.control.receive(stream_id, data, fin):
            held, self._held = self._held, []
            for held_id, held_data, held_fin in held:
                self._stream_data(held_id, held_data, held_fin, now)

    def _accept_stream(self, stream_id: int) -> Request:
        # The kind is known with the first message; until then this only reads.
        request = Request(-1, Kind.SUBSCRIBE, stream_id, messages.RequestUpdate, ours=False)  # type: ignore[arg-type]
        request.reader = MessageReader(_REQUEST_TYPES)
        self._by_stream[stream_id] = request
        return request

    def _request_data(self, request: Request, data: bytes, fin: bool, now: float) -> None:
        for message in request.reader.feed(data):
            if request.request_id < 0:
                self._begin_request(request, message, now)
            elif isinstance(message, messages.Goaway):
                self.control.take_goaway(message, request)
            elif request.ours:
                self.requester.receive(request, message, now)
            else:
                self._check_update(request, message)
                self.responder.receive(request, message, now)
        if fin:
            if request.reader.pending:
                raise ProtocolViolation("a request stream ended inside a message")
            request.receiving_ended = True
            self._request_side_ended(request, None, now)

    def _begin_request(self, request: Request, message: Message, now: float) -> None:
        request.kind = KINDS[type(message)]
        request.message = message
        request.request_id = message.request_id  # type: ignore[union-attr]
        self.check_peer_id(request.request_id)
        self._by_id[request.request_id] = request
        self.responder.begin(request, now)

    def _check_update(self, request: Request, message: Message) -> None:
        if isinstance(message, messages.RequestUpdate):
            scope = UPDATE_SCOPES.get(request.kind)
            if scope is None:
                raise ProtocolViolation("REQUEST_UPDATE on a TRACK_STATUS request")
            check_scope(message.parameters, scope)
            self.check_peer_id(message.request_id)

    def check_peer_id(self, request_id: int) -> None:
        """Hold a Request ID of the peer to §6.4.2.1.

        Raises:
            InvalidRequestId: wrong parity, or used before.
        """
        expected = 0 if self.role is Role.SERVER else 1
        if request_id & 1 != expected:
            raise InvalidRequestId(f"Request ID {request_id} has the wrong parity")
        if not self._peer_ids.add(request_id >> 1):
            raise InvalidRequestId(f"Request ID {request_id} was used before")

    def _reset(self, stream_id: int, code: int, now: float) -> None:
        if stream_id & 2:
            if stream_id == self.control.peers:
                raise ProtocolViolation("the control stream was reset")
            self.data_streams.reset(stream_id, code)
            return
        request = self._by_stream.get(stream_id)
        if request is None:
            self._held = [held for held in self._held if held[0] != stream_id]
            return
        request.receiving_ended = True
        self._request_side_ended(request, code, now)

    def _stopped(self, stream_id: int, code: int, now: float) -> None:
        if stream_id & 2:
            if stream_id == self.control.ours:
                raise ProtocolViolation("STOP_SENDING for the control stream")
            sender = self._senders.pop(stream_id, None)
            if sender is not None:
                sender.close()
            return
        request = self._by_stream.get(stream_id)
        if request is not None:
            request.sending_ended = True
            self._request_side_ended(request, code, now)

    def _request_side_ended(self, request: Request, code: int | None, now: float) -> None:
        if request.request_id < 0:
            # It never said what it wants; there is nothing to end but the stream.
            self.abandon(request, StreamCode.CANCELLED)
            self._by_stream.pop(request.stream_id, None)
            return
        if request.state is not State.TERMINATED:
            half = self.requester if request.ours else self.responder
            half.side_ended(request, code, now)
        self._release(request)

    def _release(self, request: Request) -> None:
        """Forget the stream of a finished request once the peer's direction has ended."""
        if request.state is State.TERMINATED and request.receiving_ended:
            self._by_stream.pop(request.stream_id, None)
            self._by_id.pop(request.request_id, None)

    # Inner workings: output

    def _take_uni(self) -> int:
        taken = self._next_uni
        self._next_uni += 4
        return taken

    def _open_request(self, request: Request) -> Send:
        request.stream_id = self._next_bidi
        self._next_bidi += 4
        self._by_stream[request.stream_id] = request
        return Send(request.stream_id, (encode_message(request.message),), request.sending_ended)

    def _send_from(
        self, sender: ObjectSender, room: int, credit: SendCredit, now: float
    ) -> Action | None:
        if sender.closed:
            return None
        if sender.stream_id is None:
            if credit.uni_streams() <= 0:
                self.scheduler.park(sender)
                return None
        else:
            room = min(room, credit.stream_octets(sender.stream_id))
            if room <= 0:
                self.scheduler.block(sender)
                return None
        piece = sender.next_piece(room, now)
        if piece is None:
            return None
        if piece.datagram is not None:
            sender.close()
            return SendDatagram(piece.datagram)
        if not piece.data and sender.stream_id is None:
            sender.close()  # it ended before it had anything to send
            return None
        ended = piece.fin or piece.reset is not None
        if sender.stream_id is None:
            sender.stream_id = self._take_uni()
            self._senders[sender.stream_id] = sender
            if sender.on_opened is not None:
                sender.on_opened()
        action: Action = Send(sender.stream_id, tuple(piece.data), piece.fin)
        if piece.reset is not None:
            reset = ResetStream(sender.stream_id, piece.reset)
            if piece.data:
                self._outbox.append(reset)
            else:
                action = reset
        if ended:
            self._senders.pop(sender.stream_id, None)
            sender.close()
        elif sender.has_more:
            self.scheduler.ready(sender)
        return action

    def _end(self, code: int | None, reason: str, by_peer: bool) -> None:
        self.closed = True
        self._events.append(SessionClosed(code, reason, by_peer))
        self.responder.session_ended()
        self._by_id.clear()
        self._by_stream.clear()
        self._waiting.clear()
        self._senders.clear()
        self._timers.clear()
        self._held.clear()
