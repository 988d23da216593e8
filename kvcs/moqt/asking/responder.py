"""Requests that the peer makes, and what this endpoint sends for them (MOQT §9)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcs.errors import RequestError, UsageError
from kvcs.moqt import messages
from kvcs.moqt.errors import (
    DoesNotExist,
    RequestCode,
    StreamCode,
)
from kvcs.moqt.events import (
    FetchReceived,
    PublishNamespaceReceived,
    RequestCancelled,
    StateNotified,
    SubscribeNamespaceReceived,
    SubscribeReceived,
    SubscribeTracksReceived,
    TrackStatusReceived,
)
from kvcs.moqt.filters import LocationFilter
from kvcs.moqt.limits import Limit
from kvcs.moqt.load import overloaded
from kvcs.moqt.messages import Message
from kvcs.moqt.names import FullTrackName, TrackNamespace
from kvcs.moqt.parameters import Parameters, ParameterType
from kvcs.moqt.properties import KeyValues
from kvcs.moqt.requests import Kind, Request, State
from kvcs.moqt.sending.deliveries import error_message, largest_object
from kvcs.moqt.sending.delivery import UnknownHandler
from kvcs.moqt.sending.publishing import ForwardHandler, location_filter
from kvcs.moqt.tokens import ResolvedToken
from kvcs.moqt.track.ranges import fetch_end, fetch_span
from kvcs.moqt.track.store import Track

if TYPE_CHECKING:
    from kvcs.moqt.session import Session


class Responder:
    """The answering half of a session; reached as ``session.responder``."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._fetch_requests: set[int] = set()
        """FETCHes that are open, answered or not."""

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
        elif isinstance(message, messages.Publish):
            _refuse_reserved(message.track_namespace)
            self._session.offers.receive(request, message, tokens)
        else:
            prefix = message.track_namespace_prefix
            _refuse_reserved(prefix)
            self._session.asked_prefixes.begin(request)
            if isinstance(message, messages.SubscribeNamespace):
                emit(SubscribeNamespaceReceived(message.request_id, prefix, tokens))
            else:
                parameters = message.parameters
                emit(SubscribeTracksReceived(message.request_id, prefix, parameters, tokens))

    def receive(self, request: Request, message: Message) -> None:
        """A later message of the peer on its own request.

        Raises:
            SessionError: it has no place here.
        """
        if request.state is State.TERMINATED:
            return
        if self._session.updates.take_answer(request, message):
            return
        request.receive(message)
        if isinstance(message, messages.RequestUpdate):
            self._session.updates.receive(request, message)
        elif isinstance(message, messages.PublishDone):
            self._session.offers.publish_done(request, message)
        elif isinstance(message, messages.PublishStateNotify):
            self._session.emit(StateNotified(request.request_id, message.parameters))

    def side_ended(self, request: Request, code: int | None) -> None:
        """The peer ended or stopped a direction of its own request."""
        if request.state is State.DRAINING:
            return  # PUBLISH_DONE is here
        if code is None and not self._owes_publish_done(request):
            return  # FIN: it has nothing more to say, and still wants what it asked for (§6.4.2.2)
        self._session.emit(RequestCancelled(request.request_id, False, code))
        self._session.cancel_request(request, StreamCode.CANCELLED)

    def _owes_publish_done(self, request: Request) -> bool:
        return request.kind is Kind.PUBLISH and not self._session.offers.ended_early(request)

    # Answers

    def accept_subscribe(
        self,
        request_id: int,
        track: Track,
        now: float,
        on_unknown: UnknownHandler | None = None,
        *,
        expires_ms: int | None = None,
        before_forward: ForwardHandler | None = None,
    ) -> None:
        """SUBSCRIBE_OK: deliver a Track from now on, and the fill that was asked for (§9.7).

        The Largest Object is read once, for the subscription's range, its fill and LARGEST_OBJECT:
        together they give each Object exactly once.

        Args:
            request_id: of the SUBSCRIBE.
            track: what is delivered.
            now: the caller's clock, seconds.
            on_unknown: asked for Objects of the past that the Track does not know.
            expires_ms: when this endpoint will end it, in milliseconds; None names no time.
            before_forward: asked before it is resumed; see `ForwardHandler`.
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
        stated = largest_object(largest).replace(expires=expires_ms)
        if not self._reply(request, messages.SubscribeOk(alias, stated, properties)):
            return
        delivery.before_forward = before_forward
        deliveries.follow(delivery)
        fill: Parameters | None = message.parameters.get(ParameterType.FILL_PARAMETERS)
        if fill is not None:
            delivery.start_fill(fill, request_id, largest)
        self._session.updates.take_held(request)
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
        self._session.updates.take_held(request)

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

    def accept(self, request_id: int, *, expires_ms: int | None = None) -> None:
        """REQUEST_OK to a PUBLISH_NAMESPACE, SUBSCRIBE_NAMESPACE or SUBSCRIBE_TRACKS.

        Args:
            request_id: of the request.
            expires_ms: when this endpoint will end it, in milliseconds; None names no time.
        """
        request = self._pending(request_id)
        if request is not None:
            parameters = Parameters.of(expires=expires_ms)
            self._reply(request, messages.RequestOk(parameters, KeyValues()))
            self._session.updates.take_held(request)

    def accept_publish(self, request_id: int, *, expires_ms: int | None = None) -> None:
        """REQUEST_OK to a PUBLISH (§9.8): its Objects are taken from now on, also early ones.

        It is a subscription of ours then: `Requester.update` changes it and `Requester.cancel` ends
        it, as they do for one that we asked for.

        Args:
            request_id: of the PUBLISH.
            expires_ms: when this endpoint will end it, in milliseconds; None names no time.
        """
        request = self._pending(request_id)
        if request is not None:
            self._session.offers.accept(request, expires_ms)
            self._session.updates.take_held(request)

    def accept_update(
        self, request_id: int, update_id: int, *, expires_ms: int | None = None
    ) -> None:
        """Apply an update that was shown as `RequestUpdateReceived`, and REQUEST_OK.

        Args:
            request_id: of the request.
            update_id: of the update.
            expires_ms: when this endpoint will end the request, if that has changed.
        """
        self._session.updates.answer(request_id, update_id, None, expires_ms)

    def refuse_update(self, request_id: int, update_id: int, error: RequestError) -> None:
        """REQUEST_ERROR to such an update; its request ends with it (§9.5)."""
        self._session.updates.answer(request_id, update_id, error)

    def refuse(self, request_id: int, error: RequestError) -> None:
        """REQUEST_ERROR and FIN (§9.4)."""
        request = self._pending(request_id)
        if request is not None:
            if request.kind is Kind.PUBLISH:
                self._session.offers.refused(request)
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
            self._session.cancel_request(request, code)

    def forward_ready(self, request_id: int) -> None:
        """Let a subscription go on whose `ForwardHandler` has put that off; else quiet."""
        self._session.updates.forward_ready(request_id)

    def publish_tracks(
        self,
        request_id: int,
        track: Track,
        on_unknown: UnknownHandler | None = None,
        before_forward: ForwardHandler | None = None,
    ) -> int | None:
        """PUBLISH a Track to a SUBSCRIBE_TRACKS of the peer, with the settings it names (§9.18).

        Where the PUBLISH cannot be made, PUBLISH_SKIPPED says so.

        Returns:
            The Request ID of the PUBLISH; None where the Track is not selected or was skipped.
        """
        return self._session.asked_prefixes.offer(request_id, track, on_unknown, before_forward)

    def publish_skipped(self, request_id: int, name: FullTrackName) -> None:
        """PUBLISH_SKIPPED: a SUBSCRIBE_TRACKS will get no PUBLISH of a Track (§9.19)."""
        self._session.asked_prefixes.skip(request_id, name)

    def notify_state(
        self,
        request_id: int,
        *,
        forward: bool | None = None,
        location_filter: LocationFilter | None = None,
    ) -> None:
        """PUBLISH_STATE_NOTIFY: tell a subscriber what has changed (§9.10); never answered.

        The Largest Object goes along. Quiet where the subscription is not established.

        Args:
            request_id: of the SUBSCRIBE, or of a PUBLISH of ours.
            forward: the Forward State that applies now, if it has changed.
            location_filter: the Location Filter that applies now, if it has changed.
        """
        self._session.deliveries.notify(request_id, forward, location_filter)

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

    def end(self, request: Request) -> None:
        """A request of the peer is over."""
        if request.state is State.TERMINATED:
            return
        request_id = request.request_id
        request.state = State.TERMINATED
        self._session.updates.forget(request_id)
        self._session.offers.forget(request_id)
        self._fetch_requests.discard(request_id)
        self._session.asked_prefixes.forget(request_id)
        self._session.deliveries.forget(request_id)
        self._session.receptions.forget(request_id, StreamCode.CANCELLED)
        self._session.requests.forget(request)


def _refuse_reserved(namespace: TrackNamespace) -> None:
    """Refuse what never reaches the application; other names with a dot are its to judge (§2.4.3).

    We define no Track of `.session`.
    """
    if namespace and namespace[0] in (b".", b".session"):
        raise DoesNotExist("the namespace is reserved")
