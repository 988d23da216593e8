"""The session core: octets and the time in, events and actions out (MOQT §6).

`Session` joins the parts and decides in which order they write. What this endpoint asks for is in
`requester`, what the peer asks for in `responder`; both are reached as attributes:

    session.requester.subscribe(...)           session.responder.accept_subscribe(...)

Their streams are in `requests`, the control streams in `control`. What is sent for subscriptions
and fetches is in `deliveries`, what is received for them in `receptions`, on `data_streams`.

No method waits, opens a socket or reads a clock. After each input the shell drains `next_action`
and `next_event`, and calls `receive_timer` when `next_timer` is due.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from typing import TypeVarTuple

from kvcs.errors import SessionError
from kvcs.moqt.actions import (
    Action,
    CloseSession,
    Rank,
    ResetStream,
    Send,
    SendCredit,
    SendDatagram,
    StopSending,
)
from kvcs.moqt.asking.asked_prefixes import AskedPrefixes
from kvcs.moqt.asking.credentials import Credentials
from kvcs.moqt.asking.offers import Offers
from kvcs.moqt.asking.prefixes import WatchedPrefixes
from kvcs.moqt.asking.request_streams import RequestStreams
from kvcs.moqt.asking.requester import Requester
from kvcs.moqt.asking.responder import Responder
from kvcs.moqt.asking.updates import Updates
from kvcs.moqt.control import ControlStreams
from kvcs.moqt.data import ObjectDatagram, decode_datagram
from kvcs.moqt.errors import SessionCode
from kvcs.moqt.events import Event, ObjectsReceived, SessionClosed
from kvcs.moqt.incoming.receiving import DataStreams
from kvcs.moqt.incoming.receptions import Receptions
from kvcs.moqt.limits import Limit, LimitCounters
from kvcs.moqt.load import RequestLoad
from kvcs.moqt.properties import KeyValues
from kvcs.moqt.requests import Request
from kvcs.moqt.sending.deliveries import Deliveries
from kvcs.moqt.sending.delivery import ObjectSender
from kvcs.moqt.sending.scheduler import Scheduler
from kvcs.moqt.settings import Role, SessionSettings
from kvcs.moqt.tokens import TokenCache

_Ts = TypeVarTuple("_Ts")

QUANTUM_OCTETS = 512 * 1024
"""Most payload octets handed over in one action, so that a large Object can be overtaken. Each
action ends inside an Object: half as much takes a producer of small ones a fortieth more processor
time."""


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
        self.now = 0.0
        """The latest time that the shell has told, seconds."""
        self.scheduler = Scheduler()
        self.limits = LimitCounters()
        """How often the peer reached which limit."""
        self.load = RequestLoad(self)
        self.tokens = TokenCache(self.settings.max_auth_token_cache_size)
        self.credentials = Credentials()
        self.control = ControlStreams(self)
        self.requests = RequestStreams(self)
        self.requester = Requester(self)
        self.responder = Responder(self)
        self.deliveries = Deliveries(self)
        self.receptions = Receptions(self)
        self.updates = Updates(self)
        self.offers = Offers(self)
        self.asked_prefixes = AskedPrefixes(self)
        self.watched_prefixes = WatchedPrefixes(self)
        self.data_streams = DataStreams(
            self.receptions, self.settings.early, self.limits, self.settings.shared
        )
        self._on_wake = on_wake
        self._outbox: deque[Action] = deque()
        self._events: deque[Event] = deque()
        self._singles: deque[Event] = deque()
        self._timers: list[tuple[float, int, Callable[[float], None]]] = []
        self._timer_serial = 0
        self._senders: dict[int, ObjectSender] = {}
        self._next_uni = 3 if role is Role.SERVER else 2

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
        self.tell_time(now)
        self.act(self.control.open(self._take_uni()))
        if self.role is Role.SERVER:
            self.at(now + self.settings.setup_wait, self._check_setup)

    def _check_setup(self, now: float) -> None:
        """A client that says nothing does not keep its place."""
        if self.peer_options is None:
            self.limits.reached(Limit.SETUP_SECONDS)
            self.close(SessionCode.CONTROL_MESSAGE_TIMEOUT, "no SETUP in time")

    def receive_stream_data(self, stream_id: int, data: bytes, fin: bool, now: float) -> None:
        """Octets of a stream, in order."""
        # Most of all inputs: `_guard` and `tell_time` without their calls.
        if self.closed:
            return
        if now > self.now:
            self.now = now
        try:
            self._stream_data(stream_id, data, fin)
        except Exception as exc:
            self._input_failed(exc)

    def receive_reset(self, stream_id: int, code: int, now: float) -> None:
        """The peer reset its direction of a stream."""
        self._guard(now, self._reset, stream_id, code)

    def receive_stop_sending(self, stream_id: int, code: int, now: float) -> None:
        """The peer stopped our direction of a stream; the transport has reset it."""
        self._guard(now, self._stopped, stream_id, code)

    def receive_datagram(self, data: bytes, now: float) -> None:
        """One datagram (§11.2)."""

        def take() -> None:
            datagram = decode_datagram(data)
            if isinstance(datagram, ObjectDatagram):
                self.data_streams.receive_datagram(datagram)

        self._guard(now, take)

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

        self._guard(now, run)

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
        self.tell_time(now)
        self.act(action)
        if timeout_ms:
            self.at(now + timeout_ms / 1000, self._goaway_expired)

    def _goaway_expired(self, now: float) -> None:
        self.close(*self.control.expired(bool(self.requests.all())))

    def close(self, code: int = SessionCode.NO_ERROR, reason: str = "") -> None:
        """Close the session; nothing else is sent."""
        if self.closed:
            return
        self._outbox.clear()
        self._outbox.append(CloseSession(code, reason))
        self._end(code, reason, by_peer=False)

    # Outputs

    def next_event(self) -> Event | None:
        """The oldest event that was not taken yet; of a batch, one after the other."""
        while not self._singles:
            event = self.next_batch()
            if not isinstance(event, ObjectsReceived):
                return event
            self._singles.extend(event.singles())
        return self._singles.popleft()

    def has_events(self) -> bool:
        """Whether `next_event` would give one."""
        return bool(self._events or self._singles)

    def next_batch(self) -> Event | None:
        """Like `next_event`, but what one input brought on one stream comes as one event."""
        return self._events.popleft() if self._events else None

    @property
    def idle(self) -> bool:
        """Whether no control message of ours waits to be handed over."""
        return not self._outbox and not self.requests.waiting

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
        `kvcs.moqt.sending.scheduler`, while ``credit`` has room.
        """
        self.tell_time(now)
        if self._outbox:
            return self._outbox.popleft()
        if self.closed:
            return None
        if self.requests.waiting and credit.bidi_streams() > 0:
            return self.requests.open_next()
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
            try:
                action = self._send_from(sender, min(room, QUANTUM_OCTETS), credit, now)
            except Exception as exc:
                self._fail(exc)
                return self._outbox.popleft()
            if action is not None:
                return action
            if self._outbox:
                return self._outbox.popleft()
            if self.requests.waiting and credit.bidi_streams() > 0:
                # What was to be sent asked for more of its Track on this very session.
                return self.requests.open_next()

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

    def act(self, action: Action) -> None:
        """Do ``action`` ahead of all Objects; nothing once the session is over."""
        if not self.closed:
            self._outbox.append(action)
            self.wake()

    def tell_time(self, now: float) -> None:
        """Take over the caller's clock."""
        if now > self.now:
            self.now = now

    def end_request(self, request: Request) -> None:
        """A request is over, on its stream too."""
        if request.ours:
            self.requester.end(request)
        else:
            self.responder.end(request)

    def complete_request(self, request: Request) -> None:
        """A request ended as it should."""
        self.requests.finish(request)
        self.end_request(request)

    def cancel_request(self, request: Request, code: int) -> None:
        """Give a request up: its streams are reset and stopped with ``code`` (§6.4.2.3)."""
        self.requests.abandon(request, code)
        self.receptions.forget(request.request_id, code)
        self.end_request(request)

    def stop_stream(self, stream_id: int, code: int) -> None:
        """STOP_SENDING a data stream."""
        self.act(StopSending(stream_id, code))

    def senders(self) -> list[ObjectSender]:
        """What has a stream of ours open for Objects."""
        return list(self._senders.values())

    def close_sender(self, sender: ObjectSender, code: int | None) -> None:
        """End a sender's stream: with a reset where ``code`` is given."""
        if sender.stream_id is not None:
            self._senders.pop(sender.stream_id, None)
            if code is not None:
                self.act(ResetStream(sender.stream_id, code))
        sender.close()

    # Inner workings: input

    def _guard(self, now: float, step: Callable[[*_Ts], None], *arguments: *_Ts) -> None:
        """Run one input; a broken rule closes the session, and so does a fault of ours."""
        if self.closed:
            return
        self.tell_time(now)
        try:
            step(*arguments)
        except Exception as exc:
            self._input_failed(exc)

    def _input_failed(self, exc: Exception) -> None:
        if not isinstance(exc, SessionError):
            self._fail(exc)
            return
        limit = getattr(exc, "limit", None)
        if limit is not None:
            self.limits.reached(limit)
        self.close(exc.code, exc.reason)

    def _fail(self, exc: Exception) -> None:
        """A fault of ours: the shell logs it, the peer hears no details."""
        self.failure = exc
        self.close(SessionCode.INTERNAL_ERROR, "internal error")

    def _stream_data(self, stream_id: int, data: bytes, fin: bool) -> None:
        if not stream_id & 2:
            self.requests.receive(stream_id, data, fin)
            return
        if stream_id != self.control.peers:
            if self.data_streams.receive(stream_id, data, fin, self.now):
                return
            data = self.data_streams.pop_head(stream_id) + data
        if self.control.receive(stream_id, data, fin):
            self.requests.receive_held()

    def _reset(self, stream_id: int, code: int) -> None:
        if not stream_id & 2:
            self.requests.reset(stream_id, code)
        elif stream_id == self.control.peers:
            self.control.ended("the control stream was reset")
        else:
            self.data_streams.reset(stream_id, code)

    def _stopped(self, stream_id: int, code: int) -> None:
        if not stream_id & 2:
            self.requests.stopped(stream_id, code)
        elif stream_id == self.control.ours:
            self.control.ended("STOP_SENDING for the control stream")
        else:
            sender = self._senders.pop(stream_id, None)
            if sender is not None:
                sender.may_reopen = False
                sender.close()

    # Inner workings: output

    def _take_uni(self) -> int:
        taken = self._next_uni
        self._next_uni += 4
        return taken

    def _send_from(
        self, sender: ObjectSender, room: int, credit: SendCredit, now: float
    ) -> Action | None:
        if sender.stream_id is None:
            if sender.needs_stream and credit.uni_streams() <= 0:
                self.scheduler.park(sender)
                return None
            if sender.needs_stream:
                # The peer may give a new stream a small window, or none before it has begun: what
                # the window does not take would wait below us, in the room of other streams.
                room = min(room, max(1, credit.stream_octets(self._next_uni)))
        else:
            room = min(room, credit.stream_octets(sender.stream_id))
            if room <= 0:
                self.scheduler.block(sender)
                return None
        key = sender.key()  # of what comes now; it may stand elsewhere afterwards
        piece = sender.next_piece(room, now)
        if piece is None:
            if sender.has_more:
                self.scheduler.ready(sender)  # it stands elsewhere in the order now
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
        rank = None
        if key != sender.told:
            sender.told = key
            rank = Rank(sender.family, key, sender.prioritized_by)
        action: Action = Send(sender.stream_id, tuple(piece.data), piece.fin, rank)
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
        self.requester.session_ended()
        self.requests.clear()
        self.data_streams.clear()
        self._senders.clear()
        self._timers.clear()
