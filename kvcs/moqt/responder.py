"""Requests that the peer makes, and what this endpoint sends for them (MOQT §9)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcs.errors import RequestError, UsageError
from kvcs.moqt import messages
from kvcs.moqt.deliveries import error_message, largest_object
from kvcs.moqt.delivery import UnknownHandler
from kvcs.moqt.errors import (
    DoesNotExist,
    NotSupported,
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
from kvcs.moqt.limits import Limit
from kvcs.moqt.load import overloaded
from kvcs.moqt.messages import Message
from kvcs.moqt.names import FullTrackName, TrackNamespace
from kvcs.moqt.parameters import Parameters, ParameterType
from kvcs.moqt.properties import KeyValues
from kvcs.moqt.publishing import (
    location_filter,
)
from kvcs.moqt.ranges import fetch_end, fetch_span
from kvcs.moqt.requests import Kind, Request, State
from kvcs.moqt.store import Track
from kvcs.moqt.tokens import ResolvedToken

if TYPE_CHECKING:
    from kvcs.moqt.session import Session


class Responder:
    """The answering half of a session; reached as ``session.responder``."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._fetch_requests: set[int] = set()
        """FETCHes that are open, answered or not."""
        self._pending_updates: dict[int, list[messages.RequestUpdate]] = {}

    # What the peer asks

    def begin(self, request: Request) -> None:
        """The first message of a request stream of the peer."""
        load = self._session.load
        load.enter(request)
        try:
            # A token is registered even by a request that is refused (§8.9).
            tokens = self._tokens(request.parameters)
            load.check(request)
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
            self._session.deliveries.check_filters(request.request_id, message.parameters)
            if isinstance(message, messages.Subscribe):
                emit(SubscribeReceived(message.request_id, name, message.parameters, tokens))
            elif isinstance(message, messages.Fetch):
                if len(self._fetch_requests) >= self._session.settings.max_concurrent_fetches:
                    self._session.limits.reached(Limit.CONCURRENT_FETCHES)
                    raise overloaded("too many concurrent fetches")
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
            self._session.asked_prefixes.check_overlap(request, prefix)
            emit(SubscribeNamespaceReceived(message.request_id, prefix, tokens))
        else:
            raise NotSupported(f"{request.kind.name} is not supported by this endpoint")

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
                self._session.limits.reached(Limit.REQUEST_UPDATES)
                raise TooManyRequestUpdates(f"more than {limit} REQUEST_UPDATEs without answer")
            self._pending_updates.setdefault(request.request_id, []).append(message)
            return
        self._update(request, message)

    def _update(self, request: Request, update: messages.RequestUpdate) -> None:
        try:
            self._tokens(update.parameters)
            self._session.load.check_rate()
            self._session.load.check_tokens(update.parameters)
            reply = self._apply(request, update)
        except RequestError as exc:
            self._session.requests.send(request, error_message(exc))
            self._update_failed(request)
            return
        self._session.requests.send(request, messages.RequestOk(reply, KeyValues()))

    def _apply(self, request: Request, update: messages.RequestUpdate) -> Parameters:
        if ParameterType.TRACK_NAMESPACE_PREFIX in update.parameters:
            raise NotSupported("the prefix cannot be changed here; make a new request")
        return self._session.deliveries.update(request, update)

    def _update_failed(self, request: Request) -> None:
        self._session.emit(RequestCancelled(request.request_id, False, None))
        if request.kind in (Kind.SUBSCRIBE, Kind.FETCH):
            self._session.deliveries.update_failed(request)
        else:
            self._session.requests.finish(request)
            self.end(request)

    def side_ended(self, request: Request, code: int | None) -> None:
        """The peer ended or stopped a direction of its own request."""
        if code is None:
            return  # FIN: it has nothing more to say, and still wants what it asked for (§6.4.2.2)
        self._session.emit(RequestCancelled(request.request_id, False, code))
        self._session.requests.abandon(request, StreamCode.CANCELLED)
        self.end(request)

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
        deliveries = self._session.deliveries
        alias = deliveries.take_alias()
        delivery = deliveries.prepare(
            request_id, track, alias, message.parameters, largest, on_unknown
        )
        properties = track.properties
        if message.parameters.get(ParameterType.INCLUDE_PROPERTIES, 1) == 0:
            properties = KeyValues()
        if not self._reply(
            request, messages.SubscribeOk(alias, largest_object(largest), properties)
        ):
            return
        deliveries.follow(delivery)
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
        self._session.deliveries.fetch(request, track, span, on_unknown)
        self._take_pending_updates(request)

    def answer_track_status(self, request_id: int, track: Track) -> None:
        """TRACK_STATUS_OK: the Largest Object and the Track Properties (§9.13)."""
        request = self._pending(request_id)
        if request is None:
            return
        properties = track.properties
        if request.parameters.get(ParameterType.INCLUDE_PROPERTIES, 1) == 0:
            properties = KeyValues()
        reply = messages.RequestOk(largest_object(track.largest), properties)
        if self._reply(request, reply, fin=True):
            self.end(request)

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
            self._session.requests.send(request, error_message(error), fin=True)
            self.end(request)

    def namespace(self, request_id: int, suffix: TrackNamespace) -> None:
        """NAMESPACE to a SUBSCRIBE_NAMESPACE of the peer; once for each suffix (§9.16)."""
        self._session.asked_prefixes.namespace(request_id, suffix)

    def namespace_done(self, request_id: int, suffix: TrackNamespace) -> None:
        """NAMESPACE_DONE, where NAMESPACE was sent before (§9.17)."""
        self._session.asked_prefixes.namespace_done(request_id, suffix)

    def revoke(self, request_id: int, code: int = StreamCode.CANCELLED) -> None:
        """End a request of the peer that was accepted (§6.4.2.3)."""
        request = self._session.requests.get(request_id)
        if request is not None and not request.ours:
            self._session.requests.abandon(request, code)
            self.end(request)

    def end_subscription(self, request_id: int, status: int, reason: str = "") -> None:
        """Reset what is open of a subscription, then PUBLISH_DONE and FIN (§9.9)."""
        self._session.deliveries.end_subscription(request_id, status, reason)

    def fail_fetch(self, request_id: int, code: int) -> None:
        """Reset the data stream of a FETCH that was accepted: it cannot be delivered (§9.11)."""
        self._session.deliveries.fail_fetch(request_id, code)

    def session_ended(self) -> None:
        """The session is over: leave every Track."""
        for request in self._session.requests.all():
            if not request.ours:
                self.end(request)

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

    def end(self, request: Request) -> None:
        """A request of the peer is over."""
        if request.state is State.TERMINATED:
            return
        request_id = request.request_id
        request.state = State.TERMINATED
        self._pending_updates.pop(request_id, None)
        self._fetch_requests.discard(request_id)
        self._session.asked_prefixes.forget(request_id)
        self._session.deliveries.forget(request_id)
        self._session.requests.forget(request)


def _refuse_reserved(namespace: TrackNamespace) -> None:
    """Refuse what never reaches the application; other names with a dot are its to judge (§2.4.3).

    We define no Track of `.session`.
    """
    if namespace and namespace[0] in (b".", b".session"):
        raise DoesNotExist("the namespace is reserved")
