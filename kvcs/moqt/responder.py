"""Requests that the peer makes, and what this endpoint sends for them (MOQT §9)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvcs.errors import RequestError, UsageError
from kvcs.moqt import messages
from kvcs.moqt.delivery import ObjectSender, RangeSender, UnknownHandler
from kvcs.moqt.errors import (
    DoesNotExist,
    NotSupported,
    PublishDoneCode,
    RequestCode,
    StreamCode,
    TooManyRequestUpdates,
)
from kvcs.moqt.events import (
    FetchReceived,
    PublishNamespaceReceived,
    RequestCancelled,
    SubscribeNamespaceReceived,
    SubscribeReceived,
    TrackStatusReceived,
)
from kvcs.moqt.filters import RangeFilters
from kvcs.moqt.messages import Message
from kvcs.moqt.names import FullTrackName, GroupOrder, Location, TrackNamespace, overlaps
from kvcs.moqt.parameters import Parameters, ParameterType
from kvcs.moqt.properties import KeyValues
from kvcs.moqt.publishing import (
    DEFAULT_SUBSCRIBER_PRIORITY,
    SubscriptionDelivery,
    location_filter,
)
from kvcs.moqt.ranges import fetch_end, fetch_span
from kvcs.moqt.requests import Kind, Request, State
from kvcs.moqt.store import Track
from kvcs.moqt.tokens import ResolvedToken

if TYPE_CHECKING:
    from kvcs.moqt.session import Session

RETRY_LOAD_MS = 1000
"""Retry Interval that goes with EXCESSIVE_LOAD."""


class Responder:
    """The answering half of a session; reached as ``session.responder``."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._subscriptions: dict[int, SubscriptionDelivery] = {}
        self._fetches: dict[int, RangeSender] = {}
        self._fetch_requests: set[int] = set()
        """FETCHes that are open, answered or not."""
        self._namespaces: dict[int, set[TrackNamespace]] = {}
        self._pending_updates: dict[int, list[messages.RequestUpdate]] = {}
        self._peer_requests = 0
        self._next_alias = 0

    # What the peer asks

    def begin(self, request: Request) -> None:
        """The first message of a request stream of the peer."""
        self._peer_requests += 1
        try:
            # A token is registered even by a request that is refused (§8.9).
            tokens = self._tokens(request.parameters)
            if self._peer_requests > self._session.settings.max_peer_requests:
                raise _overloaded("too many open requests")
            if self._session.draining:
                raise RequestError("this session is going away", RequestCode.GOING_AWAY)
            self._dispatch(request, tokens)
        except RequestError as exc:
            self.refuse(request.request_id, exc)

    def _tokens(self, parameters: Parameters) -> tuple[ResolvedToken, ...]:
        return self._session.tokens.process(parameters.all(ParameterType.AUTHORIZATION_TOKEN))

    def _dispatch(self, request: Request, tokens: tuple[ResolvedToken, ...]) -> None:
        message = request.message
        emit = self._session.emit
        if isinstance(message, (messages.Subscribe, messages.Fetch, messages.TrackStatus)):
            name = FullTrackName(message.track_namespace, message.track_name)
            _refuse_reserved(name.namespace)
            self._check_filters(message.parameters)
            if isinstance(message, messages.Subscribe):
                emit(SubscribeReceived(message.request_id, name, message.parameters, tokens))
            elif isinstance(message, messages.Fetch):
                if len(self._fetch_requests) >= self._session.settings.max_concurrent_fetches:
                    raise _overloaded("too many concurrent fetches")
                self._fetch_requests.add(message.request_id)
                emit(FetchReceived(message.request_id, name, message.parameters, tokens))
            else:
                emit(TrackStatusReceived(message.request_id, name, tokens))
        elif isinstance(message, messages.PublishNamespace):
            namespace = message.track_namespace_prefix
            _refuse_reserved(namespace)
            emit(PublishNamespaceReceived(message.request_id, namespace, tokens))
        elif isinstance(message, messages.SubscribeNamespace):
            prefix = message.track_namespace_prefix
            _refuse_reserved(prefix)
            self._check_overlap(request, prefix)
            emit(SubscribeNamespaceReceived(message.request_id, prefix, tokens))
        else:
            raise NotSupported(f"{request.kind.name} is not supported by this endpoint")

    def _check_filters(self, parameters: Parameters, before: RangeFilters | None = None) -> None:
        """Hold the range filters of a message, with those that stay, to our limit (§3.3)."""
        outer = (before or RangeFilters()).replaced_by(parameters.items)
        limit = self._session.settings.max_filter_ranges
        outer.check(limit)
        fill: Parameters | None = parameters.get(ParameterType.FILL_PARAMETERS)
        if fill is not None:
            outer.replaced_by(fill.items).check(limit)

    def _check_overlap(self, request: Request, prefix: TrackNamespace) -> None:
        for other in self._session.requests.all():
            message = other.message
            if (
                other is not request
                and not other.ours
                and other.state is not State.TERMINATED
                and isinstance(message, messages.SubscribeNamespace)
                and overlaps(message.track_namespace_prefix, prefix)
            ):
                raise RequestError(
                    "the prefix overlaps that of another SUBSCRIBE_NAMESPACE",
                    RequestCode.PREFIX_OVERLAP,
                )

    def receive(self, request: Request, message: Message) -> None:
        """A later message of the peer on its own request: REQUEST_UPDATE (§9.5)."""
        if request.state is State.TERMINATED:
            return
        request.receive(message)
        if not isinstance(message, messages.RequestUpdate):
            return
        if request.state is State.PENDING:
            # Answered in order, behind the reply that is still owed.
            request.updates.append(message.request_id)
            limit = self._session.settings.max_request_updates
            if limit and len(request.updates) > limit:
                raise TooManyRequestUpdates(f"more than {limit} REQUEST_UPDATEs without answer")
            self._pending_updates.setdefault(request.request_id, []).append(message)
            return
        self._update(request, message)

    def _update(self, request: Request, update: messages.RequestUpdate) -> None:
        try:
            self._tokens(update.parameters)
            delivery = self._subscriptions.get(request.request_id)
            self._check_filters(update.parameters, None if delivery is None else delivery.filters)
            reply = self._apply(request, update)
        except RequestError as exc:
            self._session.requests.send(request, _error_message(exc))
            self._update_failed(request)
            return
        self._session.requests.send(request, messages.RequestOk(reply, KeyValues()))

    def _apply(self, request: Request, update: messages.RequestUpdate) -> Parameters:
        delivery = self._subscriptions.get(request.request_id)
        if delivery is not None:
            fills = self._session.settings.max_fills
            if ParameterType.FILL_PARAMETERS in update.parameters and delivery.fills >= fills:
                raise _overloaded("too many fills at a time")
            # One snapshot of the Largest Object for filter, fill and reply: the seam is exact.
            largest = delivery.track.largest
            delivery.update(update.parameters, update.request_id, largest)
            return _largest(largest)
        fetch = self._fetches.get(request.request_id)
        if fetch is not None:
            fetch.subscriber_priority = update.parameters.get(
                ParameterType.SUBSCRIBER_PRIORITY, fetch.subscriber_priority
            )
            self.reschedule(fetch)
        elif ParameterType.TRACK_NAMESPACE_PREFIX in update.parameters:
            raise NotSupported("the prefix cannot be changed here; make a new request")
        return Parameters()

    def _update_failed(self, request: Request) -> None:
        self._session.emit(RequestCancelled(request.request_id, False, None))
        if request.kind is Kind.SUBSCRIBE:
            self.end_subscription(
                request.request_id, PublishDoneCode.UPDATE_FAILED, "REQUEST_UPDATE failed"
            )
        elif request.kind is Kind.FETCH:
            sender = self._fetches.get(request.request_id)
            if sender is not None:
                self.reset_sender(sender, StreamCode.CANCELLED)
        else:
            self._session.requests.finish(request)
            self._end(request)

    def side_ended(self, request: Request, code: int | None) -> None:
        """The peer ended or stopped a direction of its own request."""
        if code is None:
            return  # FIN: it has nothing more to say, and still wants what it asked for (§6.4.2.2)
        self._session.emit(RequestCancelled(request.request_id, False, code))
        self._session.requests.abandon(request, StreamCode.CANCELLED)
        self._end(request)

    # Answers

    def accept_subscribe(
        self,
        request_id: int,
        track: Track,
        now: float,
        on_unknown: UnknownHandler | None = None,
    ) -> None:
        """SUBSCRIBE_OK: deliver a Track from now on, and the fill that was asked for (§9.7).

        The Largest Object is read once, for the subscription's range, its fill and LARGEST_OBJECT:
        together they give each Object exactly once.
        """
        self._session.tell_time(now)
        request = self._pending(request_id)
        if request is None:
            return
        message = request.message
        assert isinstance(message, messages.Subscribe)
        largest = track.largest
        alias = self._next_alias
        self._next_alias += 1
        delivery = SubscriptionDelivery(
            self, request_id, track, alias, message.parameters, largest, on_unknown
        )
        properties = track.properties
        if message.parameters.get(ParameterType.INCLUDE_PROPERTIES, 1) == 0:
            properties = KeyValues()
        if not self._reply(request, messages.SubscribeOk(alias, _largest(largest), properties)):
            return
        self._subscriptions[request_id] = delivery
        track.listeners.append(delivery)
        fill: Parameters | None = message.parameters.get(ParameterType.FILL_PARAMETERS)
        if fill is not None:
            delivery.start_fill(fill, request_id, largest)
        self._take_pending_updates(request)
        delivery.check_drained()

    def accept_fetch(
        self,
        request_id: int,
        track: Track,
        now: float,
        on_unknown: UnknownHandler | None = None,
    ) -> None:
        """FETCH_OK and the data stream, or REQUEST_ERROR INVALID_RANGE (§9.11, §9.12)."""
        self._session.tell_time(now)
        request = self._pending(request_id)
        if request is None:
            return
        message = request.message
        assert isinstance(message, messages.Fetch)
        parameters = message.parameters
        try:
            span = fetch_span(track, location_filter(parameters))
        except RequestError as exc:
            self.refuse(request_id, exc)
            return
        end, end_of_track = fetch_end(track, span)
        properties = track.properties
        if parameters.get(ParameterType.INCLUDE_PROPERTIES, 1) == 0:
            properties = KeyValues()
        if not self._reply(request, messages.FetchOk(end_of_track, end, Parameters(), properties)):
            return
        sender = RangeSender(
            self,
            track,
            request_id=request_id,
            span=span,
            group_order=GroupOrder(parameters.get(ParameterType.GROUP_ORDER, 1)),
            filters=RangeFilters.of(parameters.items),
            subscriber_priority=parameters.get(
                ParameterType.SUBSCRIBER_PRIORITY, DEFAULT_SUBSCRIBER_PRIORITY
            ),
            on_unknown=on_unknown,
            fill_timeout_ms=parameters.get(ParameterType.FILL_TIMEOUT),
        )
        self._fetches[request_id] = sender
        sender.on_closed = lambda: self._fetch_closed(request, track)
        self.schedule(sender)
        self._take_pending_updates(request)

    def answer_track_status(self, request_id: int, track: Track) -> None:
        """TRACK_STATUS_OK: the Largest Object and the Track Properties (§9.13)."""
        request = self._pending(request_id)
        if request is None:
            return
        properties = track.properties
        if request.parameters.get(ParameterType.INCLUDE_PROPERTIES, 1) == 0:
            properties = KeyValues()
        reply = messages.RequestOk(_largest(track.largest), properties)
        if self._reply(request, reply, fin=True):
            self._end(request)

    def accept(self, request_id: int) -> None:
        """REQUEST_OK to a PUBLISH_NAMESPACE or SUBSCRIBE_NAMESPACE."""
        request = self._pending(request_id)
        if request is not None:
            self._reply(request, messages.RequestOk(Parameters(), KeyValues()))
            self._take_pending_updates(request)

    def refuse(self, request_id: int, error: RequestError) -> None:
        """REQUEST_ERROR and FIN (§9.4)."""
        request = self._pending(request_id)
        if request is not None:
            self._session.requests.send(request, _error_message(error), fin=True)
            self._end(request)

    def namespace(self, request_id: int, suffix: TrackNamespace) -> None:
        """NAMESPACE to a SUBSCRIBE_NAMESPACE of the peer; once for each suffix (§9.16)."""
        request = self._session.requests.get(request_id)
        if request is None or request.state is not State.ESTABLISHED:
            return
        told = self._namespaces.setdefault(request_id, set())
        if suffix not in told:
            told.add(suffix)
            self._session.requests.send(request, messages.Namespace(suffix))

    def namespace_done(self, request_id: int, suffix: TrackNamespace) -> None:
        """NAMESPACE_DONE, where NAMESPACE was sent before (§9.17)."""
        request = self._session.requests.get(request_id)
        told = self._namespaces.get(request_id)
        if request is None or told is None or suffix not in told:
            return
        told.remove(suffix)
        self._session.requests.send(request, messages.NamespaceDone(suffix))

    def revoke(self, request_id: int, code: int = StreamCode.CANCELLED) -> None:
        """End a request of the peer that was accepted (§6.4.2.3)."""
        request = self._session.requests.get(request_id)
        if request is not None and not request.ours:
            self._session.requests.abandon(request, code)
            self._end(request)

    def end_subscription(self, request_id: int, status: int, reason: str = "") -> None:
        """Reset what is open of a subscription, then PUBLISH_DONE and FIN (§9.9)."""
        request = self._session.requests.get(request_id)
        delivery = self._subscriptions.get(request_id)
        if request is None or delivery is None:
            return
        delivery.end(_STREAM_CODES.get(status, StreamCode.CANCELLED))
        self._session.requests.send(
            request, messages.PublishDone(status, delivery.streams_opened, reason), fin=True
        )
        self._end(request)

    def fail_fetch(self, request_id: int, code: int) -> None:
        """Reset the data stream of a FETCH that was accepted: it cannot be delivered (§9.11)."""
        sender = self._fetches.get(request_id)
        if sender is not None:
            sender.fail(code)

    def session_ended(self) -> None:
        """The session is over: leave every Track."""
        for request in self._session.requests.all():
            if not request.ours:
                self._end(request)

    # SubscriptionHost

    def schedule(self, sendable: ObjectSender) -> None:
        """``sendable`` has something to send."""
        self._session.scheduler.ready(sendable)
        self._session.wake()

    def reschedule(self, sendable: ObjectSender) -> None:
        """The place of ``sendable`` in the order has changed."""
        self._session.scheduler.requeue(sendable)

    def unschedule(self, sendable: ObjectSender) -> None:
        """``sendable`` will send nothing more."""
        self._session.scheduler.remove(sendable)

    def reset_sender(self, sender: ObjectSender, code: int) -> None:
        """Reset the sender's stream, if it is open, and close the sender."""
        self._session.close_sender(sender, code)

    def at(self, when: float, callback: Callable[[float], None]) -> None:
        """Call ``callback`` with the time, at ``when`` or soon after."""
        self._session.at(when, callback)

    def subscription_drained(self, delivery: SubscriptionDelivery) -> None:
        """Everything was sent: PUBLISH_DONE, a little later."""
        due = self._session.now + self._session.settings.done_delay
        delivery.done_due = due

        def done(now: float) -> None:
            track = delivery.track
            if delivery.done_due > due or delivery.ended or track.ended is None:
                return  # what ended meanwhile has set a later time
            if not delivery.open_senders() and not self._is_fetched(track):
                self.end_subscription(delivery.request_id, track.ended, track.ended_reason)

        self._session.at(due, done)

    def subscription_failed(
        self, delivery: SubscriptionDelivery, status: int, reason: str = ""
    ) -> None:
        """The subscription cannot go on."""
        self.end_subscription(delivery.request_id, status, reason)

    # Inner workings

    def _pending(self, request_id: int) -> Request | None:
        request = self._session.requests.get(request_id)
        if request is None:
            return None  # the peer has cancelled it meanwhile
        if request.ours or request.state is not State.PENDING:
            raise UsageError(f"request {request_id} was answered already")
        return request

    def _reply(self, request: Request, message: Message, *, fin: bool = False) -> bool:
        """Accept a request; False where the reply does not fit a message, and it was refused.

        Track Properties that filled the message of a relay's upstream need not fit its own.
        """
        try:
            self._session.requests.send(request, message, fin=fin)
        except UsageError:
            error = RequestError("the Track Properties are too long", RequestCode.INTERNAL_ERROR)
            self.refuse(request.request_id, error)
            return False
        request.state = State.ESTABLISHED
        return True

    def _take_pending_updates(self, request: Request) -> None:
        """Take the updates that came before the reply, now that there is something to update."""
        for update in self._pending_updates.pop(request.request_id, ()):
            request.updates.pop(0)
            if request.state is State.ESTABLISHED:
                self._update(request, update)

    def _is_fetched(self, track: Track) -> bool:
        """Whether the peer still fetches a Track: a relay that fills its cache by FETCH may take
        PUBLISH_DONE of its subscription for the end of both."""
        return any(sender.track is track for sender in self._fetches.values())

    def _fetch_closed(self, request: Request, track: Track) -> None:
        self._fetches.pop(request.request_id, None)
        for delivery in self._subscriptions.values():
            if delivery.track is track:
                delivery.check_drained()
        if request.state is State.ESTABLISHED:
            self._session.requests.finish(request)
            self._end(request)

    def _end(self, request: Request) -> None:
        if request.state is State.TERMINATED:
            return
        request_id = request.request_id
        request.state = State.TERMINATED
        self._peer_requests -= 1
        self._pending_updates.pop(request_id, None)
        self._fetch_requests.discard(request_id)
        self._namespaces.pop(request_id, None)
        delivery = self._subscriptions.pop(request_id, None)
        if delivery is not None:
            delivery.end(StreamCode.CANCELLED)
        sender = self._fetches.pop(request_id, None)
        if sender is not None:
            self.reset_sender(sender, StreamCode.CANCELLED)
        self._session.requests.forget(request)


_STREAM_CODES: dict[int, StreamCode] = {
    PublishDoneCode.INTERNAL_ERROR: StreamCode.INTERNAL_ERROR,
    PublishDoneCode.GOING_AWAY: StreamCode.GOING_AWAY,
    PublishDoneCode.TOO_FAR_BEHIND: StreamCode.TOO_FAR_BEHIND,
    PublishDoneCode.EXPIRED: StreamCode.EXPIRED_AUTH_TOKEN,
    PublishDoneCode.EXCESSIVE_LOAD: StreamCode.EXCESSIVE_LOAD,
    PublishDoneCode.MALFORMED_TRACK: StreamCode.MALFORMED_TRACK,
}
"""Reset code that goes with a PUBLISH_DONE status."""


def _refuse_reserved(namespace: TrackNamespace) -> None:
    """Refuse what never reaches the application; other names with a dot are its to judge (§2.4.3).

    We define no Track of `.session`.
    """
    if namespace and namespace[0] in (b".", b".session"):
        raise DoesNotExist("the namespace is reserved")


def _overloaded(reason: str) -> RequestError:
    return RequestError(reason, RequestCode.EXCESSIVE_LOAD, RETRY_LOAD_MS)


def _largest(largest: Location | None) -> Parameters:
    return Parameters() if largest is None else Parameters.of(largest_object=largest)


def _error_message(error: RequestError) -> messages.RequestError:
    retry = 0 if error.retry_after_ms is None else error.retry_after_ms + 1
    return messages.RequestError(error.code, retry, error.reason, None)
