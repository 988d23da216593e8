"""Drives one session core over one transport, and lets coroutines wait for its replies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvcs.errors import RequestError, SessionError
from kvcs.moqt import events
from kvcs.moqt.actions import (
    CloseSession,
    Prioritize,
    ResetStream,
    Send,
    SendDatagram,
    StopSending,
)
from kvcs.moqt.errors import SessionCode
from kvcs.moqt.incoming.expected import ObjectSink
from kvcs.moqt.limits import Limit, LimitCounters
from kvcs.moqt.names import TrackNamespace
from kvcs.moqt.session import Session
from kvcs.moqt.settings import Role, SessionSettings
from kvcs.moqt.uri import parse_uri
from kvcs.observe import get_logger
from kvcs.quic.answers import Answerer, Answers, Handler, PeerRequest, UpdateHandler
from kvcs.quic.namespaces import Namespaces
from kvcs.quic.origin import Origin
from kvcs.quic.replies import Replies, Reply
from kvcs.quic.stream_wait import StreamWait
from kvcs.quic.tenure import Tenure
from kvcs.quic.tracks import Tracks
from kvcs.quic.transport import Transport, TransportStats

if TYPE_CHECKING:
    from kvcs.access.guard import Guard
    from kvcs.quic.link import Link

__all__ = ["Answerer", "Connection", "Handler", "PeerRequest", "UpdateHandler"]

_log = get_logger("kvcs.quic")

_FINAL = (
    events.RequestRefused,
    events.SubscriptionEnded,
    events.TrackMalformed,
    events.SessionClosed,
)


class Connection(Tenure):
    """One MOQT session over QUIC; what `kvcs.connect` gives.

    A session that is lost, or that its peer sends away, is over for good; where `connect` was told
    to come back, `link` has the session that follows it, and Publisher and Subscriber go on there.

    Publisher and Subscriber work on it. For MOQT itself there are `core`, whose `requester` and
    `responder` make and answer requests, `handle` and `reply` to follow a request of ours, and
    `answer_with` to answer those of the peer.

    It is a `TransportReceiver`: the backend calls the methods under "What the backend calls".
    """

    def __init__(
        self,
        transport: Transport,
        role: Role,
        settings: SessionSettings | None = None,
        *,
        peer: str = "",
        observer: Callable[[Connection, events.Event], None] | None = None,
        origin: Origin | None = None,
        link: Link | None = None,
    ) -> None:
        super().__init__(link)
        self.transport = transport
        self.peer = peer or transport.peer
        """Whom we talk to, for people: a URI or an address."""
        self.core = Session(role, settings, self._wake)
        self._loop = asyncio.get_running_loop()
        self._observer = observer
        self._handlers: dict[int, Handler] = {}
        self._replies = Replies()
        self._answers = Answers(self)
        self._admitted: Callable[[], None] | None = None
        self._established = asyncio.Event()
        self._transport_gone = asyncio.Event()
        self._pumped = asyncio.Event()
        self.origin = Origin() if origin is None else origin
        """What this process publishes on the session; offered to the peer by `Origin.attach`."""
        self.namespaces = Namespaces(self)
        """Which namespaces the peer announces."""
        self.tracks = Tracks(self)
        """Which Tracks the peer publishes by itself."""
        self._pump_handle: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due: float | None = None
        self._pumping = False
        self._log = _log.bind(peer=self.peer, role=role.value)
        self._stream_wait = StreamWait(self._loop, self._log)
        self.core.limits.on_reached = self._limit_reached

    # What users of the connection call

    @property
    def now(self) -> float:
        """The loop's clock, seconds: what the core wants as ``now``."""
        return self._loop.time()

    @property
    def newest(self) -> Connection:
        """This session, or the one that has replaced it."""
        return self if self.link is None else self.link.current

    @property
    def limits(self) -> LimitCounters:
        """How often the peer reached which of our limits; a limit that never was is 0."""
        return self.core.limits

    async def established(self) -> None:
        """Wait for the peer's SETUP.

        Raises:
            ConnectionClosed: the session ended before.
        """
        await self._established.wait()
        self.check_open()

    def handle(self, request_id: int, handler: Handler, *, sink: ObjectSink | None = None) -> None:
        """Send every event of a request of ours to ``handler``, until it ends or is cancelled.

        Args:
            request_id: the request.
            handler: takes the events.
            sink: takes what streams bring, as far as no event waits; where None, one that was
                given before goes on. It is called while the session takes input: it may use the
                connection, but must not wait for anything.
        """
        self._handlers[request_id] = handler
        if sink is not None and self._observer is None:
            self.core.receptions.sink_to(request_id, sink)

    async def reply(self, request_id: int) -> Reply:
        """Wait for the answer to a request of ours.

        Cancelling this wait cancels the request.

        Raises:
            RequestError: the peer refused it; `code` is the peer's. `Redirected` where it names
                another place. Or it was cancelled meanwhile.
            ConnectionClosed: the session ended.
        """
        self.check_open()
        try:
            return await self._replies.wait(request_id)
        except asyncio.CancelledError:
            self.cancel(request_id)
            raise

    def cancel(self, request_id: int, code: int | None = None) -> None:
        """Cancel a request of ours, or forget one that is over; quiet in every state.

        Args:
            request_id: of the request.
            code: that of the `RequestError` which who waits for the answer gets.
        """
        self._handlers.pop(request_id, None)
        self._replies.cancel(request_id, code)
        if self.is_open:
            self.core.requester.cancel(request_id)

    def answer_with(self, answerer: Answerer) -> None:
        """Ask ``answerer`` for requests of the peer; who took one last is asked first."""
        self._answers.add(answerer)

    def stop_answering(self, answerer: Answerer) -> None:
        """Undo `answer_with`."""
        self._answers.remove(answerer)

    def on_cancelled(self, request_id: int, handler: Handler) -> None:
        """Tell ``handler`` when the peer cancels a request of its own that we accepted."""
        self._answers.on_cancelled(request_id, handler)

    def off_cancelled(self, request_id: int) -> None:
        """Undo `on_cancelled`, for a request that was answered."""
        self._answers.off_cancelled(request_id)

    def on_update(self, request_id: int, handler: UpdateHandler) -> None:
        """Let ``handler`` judge updates of a request of the peer that bring tokens or a prefix.

        Without one, tokens are accepted and another prefix is refused as NOT_SUPPORTED.
        """
        self._answers.on_update(request_id, handler)

    def answer_updates_with(self, handler: UpdateHandler) -> None:
        """Let ``handler`` judge such updates of every request of the peer that nobody follows."""
        self._answers.every_update = handler

    def guard_with(self, guard: Guard, admitted: Callable[[], None]) -> None:
        """Let every request of the peer pass ``guard`` first; called before the peer's SETUP.

        Args:
            guard: decides, by the tokens that the peer shows.
            admitted: called once the session is let in.
        """
        self._answers.guard = guard
        self._admitted = admitted
        self.on_closed(lambda: guard.closed(self))

    def may_hear(self, namespace: TrackNamespace) -> bool:
        """Whether the peer may be told of a namespace that it has not asked for."""
        guard = self._answers.guard
        return guard is None or guard.may_hear(self, namespace)

    def expires_ms(self, request_id: int) -> int | None:
        """Milliseconds after which a request of the peer will be ended; None where nothing does."""
        return self._answers.expires_ms(request_id)

    def end_request(self, request_id: int, error: RequestError) -> None:
        """End a request of the peer that is allowed no longer."""
        self._answers.end(request_id, error)

    def goaway(
        self, new_session_uri: str = "", *, timeout: float = 0.0, request_id: int | None = None
    ) -> None:
        """Tell the peer to move the session, or one request, elsewhere (§9.2).

        Args:
            new_session_uri: a `moqt` URI; empty for the one it has. Servers only.
            timeout: seconds it has to do so; then the session is closed with GOAWAY_TIMEOUT if
                requests are open, or the request's stream is reset. 0 names no deadline.
            request_id: the request; the whole session where None.

        Raises:
            UsageError: the URI is no `moqt` URI, a client names one, or there is no such request.
        """
        if new_session_uri:
            parse_uri(new_session_uri)
        timeout_ms = round(timeout * 1000)
        if request_id is None:
            self.core.goaway(new_session_uri, timeout_ms, now=self.now)
        else:
            self.core.control.goaway_request(request_id, new_session_uri, timeout_ms, now=self.now)

    def stats(self) -> TransportStats:
        """What the transport measures of its path: datagram size, round trip, losses, buffers."""
        return self.transport.stats()

    async def drain(self) -> None:
        """Wait until the peer has acknowledged what was handed over so far, or the session ends."""
        while self.is_open and not (self.core.idle and self.transport.unacknowledged() == 0):
            await self.progressed()

    async def progressed(self) -> None:
        """Wait until the session has taken input or was let send, or is over."""
        self._pumped.clear()
        if self.is_open:
            await self._pumped.wait()

    async def close(self, code: int = SessionCode.NO_ERROR, reason: str = "") -> None:
        """Close the session and wait until the transport is gone, which it always is soon.

        Where a `link` keeps it, or has kept it, the link ends with it: no other session follows.
        """
        if self.link is None or self.link.is_beside(self):
            await self.close_alone(code, reason)
        else:
            await self.link.close(code, reason)

    async def close_alone(self, code: int = SessionCode.NO_ERROR, reason: str = "") -> None:
        """Close this session as `close` does, and let its `link` open the next one."""
        if self.is_open:
            self.core.close(code, reason)
            self._pump()
        await self._transport_gone.wait()

    # What the backend calls

    def connected(self) -> None:
        """The handshake is complete."""
        self.core.receive_connected(self.now)
        self._pump()

    def stream_data(self, stream_id: int, data: bytes, fin: bool) -> None:
        """Octets of a stream; see `TransportReceiver`."""
        core = self.core
        core.receive_stream_data(stream_id, data, fin, self._loop.time())
        if core.has_events():
            self._deliver_events()

    def stream_reset(self, stream_id: int, code: int) -> None:
        """The peer reset a stream."""
        self.core.receive_reset(stream_id, code, self.now)
        self._deliver_events()

    def stop_sending(self, stream_id: int, code: int) -> None:
        """The peer stopped a stream."""
        self.core.receive_stop_sending(stream_id, code, self.now)
        self._deliver_events()

    def datagram(self, data: bytes) -> None:
        """One datagram."""
        self.core.receive_datagram(data, self.now)
        self._deliver_events()

    def batch_received(self) -> None:
        """A batch of input is through, or credit may have grown."""
        self.core.receive_credit()
        self._pump()

    def closed(self, code: int | None, reason: str, by_peer: bool) -> None:
        """The transport is gone."""
        self.core.receive_closed(code, reason, by_peer)
        self._deliver_events()
        self._transport_gone.set()
        for handle in (self._pump_handle, self._timer):
            if handle is not None:
                handle.cancel()
        self._pump_handle = self._timer = None
        self._stream_wait.stop()

    # Inner workings

    def _wake(self) -> None:
        """The core has something to send outside of an input: pump in the next turn of the loop."""
        if self._pump_handle is None and not self._pumping and not self._transport_gone.is_set():
            self._pump_handle = self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        if self._pump_handle is not None:
            self._pump_handle.cancel()
            self._pump_handle = None
        if self._pumping or self._transport_gone.is_set():
            return
        self._pumping = True
        try:
            while True:
                self._perform_actions()
                if not self._deliver_events():
                    break
        finally:
            self._pumping = False
        self.transport.flush()
        if not self._transport_gone.is_set():
            self._stream_wait.look(self.core.scheduler.waiting_for_streams)
        self._arm()
        self._pumped.set()

    def _perform_actions(self) -> None:
        transport, core, now = self.transport, self.core, self.now
        while (action := core.next_action(transport, now)) is not None:
            if type(action) is Send:
                self._send(action)
            elif isinstance(action, Prioritize):
                transport.prioritize(action.request_id, action.subscriber_priority)
            elif isinstance(action, ResetStream):
                transport.reset(action.stream_id, action.code)
            elif isinstance(action, StopSending):
                transport.stop_sending(action.stream_id, action.code)
            elif isinstance(action, SendDatagram):
                transport.send_datagram(action.data)
            elif isinstance(action, CloseSession):
                transport.close(action.code, action.reason)

    def _send(self, action: Send) -> None:
        transport = self.transport
        if action.stream_id & 2:
            self._stream_wait.sent(action.stream_id)
        if action.rank is not None:
            transport.rank(action.stream_id, action.rank)
        transport.send_all(action.stream_id, action.data, action.fin)

    def _arm(self) -> None:
        due = self.core.next_timer()
        if due == self._timer_due and self._timer is not None:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timer_due = due
        if due is not None and not self._transport_gone.is_set():
            self._timer = self._loop.call_at(due, self._timer_fired)

    def _timer_fired(self) -> None:
        self._timer = self._timer_due = None
        self.core.receive_timer(self.now)
        self._pump()

    def _deliver_events(self) -> bool:
        """Give out what the core reports; whether there was anything."""
        any_event = False
        while (event := self.core.next_batch()) is not None:
            any_event = True
            try:
                self._deliver(event)
            except Exception as exc:
                self._fail(exc)
        return any_event

    def _limit_reached(self, limit: Limit) -> None:
        """One line for each limit of a session; the counters tell how often."""
        if self.limits[limit] == 1:
            self._log.warning("limit_reached", limit=limit.value)

    def _fail(self, exc: Exception) -> None:
        self._log.error("handler_failed", exc_info=exc)
        self.core.close(SessionCode.INTERNAL_ERROR, "internal error")

    def _deliver(self, event: events.Event) -> None:
        if self._observer is not None:
            self._observer(self, event)
        if isinstance(event, events.ObjectsReceived):
            # Most of all events: they answer no request and end none.
            handler = self._handlers.get(event.request_id)
            if handler is not None:
                handler(event)
            return
        if isinstance(event, events.SessionClosed):
            self._session_closed(event)
            return
        if isinstance(event, events.SessionEstablished):
            self._session_established(event)
            return
        request_id: int | None = getattr(event, "request_id", None)
        if request_id is None:
            assert isinstance(event, events.GoawayReceived)  # all others belong to a request
            self._log.info(
                "goaway_received", uri=event.new_session_uri, timeout_ms=event.timeout_ms
            )
            self.goaway_received = event
            callbacks, self._on_goaway = self._on_goaway, []
            for callback in callbacks:
                callback()
            return
        if isinstance(event, events.RequestCancelled) and not event.ours:
            self._answers.cancelled(event)
        elif isinstance(event, PeerRequest):
            self._answers.take(event)
            return
        elif isinstance(event, events.RequestUpdateReceived):
            self._answers.take_update(event)
            return
        self._replies.take(request_id, event)
        handler = self._handlers.get(request_id)
        if handler is not None:
            handler(event)
        if isinstance(event, _FINAL) or isinstance(event, events.RequestCancelled):
            self._handlers.pop(request_id, None)

    def _session_established(self, event: events.SessionEstablished) -> None:
        if self._answers.guard is not None:
            try:
                self._answers.guard.opened(self, event.tokens)
            except SessionError as exc:
                self._log.info("session_refused", code=int(exc.code), reason=exc.reason)
                self.core.close(exc.code, exc.reason)
                return
        self._log.debug("session_established")
        self._established.set()
        if self._admitted is not None:
            self._admitted()

    def _session_closed(self, event: events.SessionClosed) -> None:
        self._closed_event = event
        facts = {"code": event.code, "reason": event.reason, "by_peer": event.by_peer}
        if self.core.failure is not None:
            self._log.error("session_failed", exc_info=self.core.failure, **facts)
        elif event.code in (SessionCode.NO_ERROR, None):
            self._log.debug("session_closed", **facts)
        else:
            self._log.warning("session_closed", **facts)
        self._established.set()
        self._pumped.set()
        self._released.set()
        self._replies.fail(self.close_error())
        self._answers.clear()
        handlers, self._handlers = self._handlers, {}
        for handler in handlers.values():
            handler(event)
        callbacks, self._on_closed = self._on_closed, []
        for callback in callbacks:
            callback()
