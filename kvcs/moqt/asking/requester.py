"""Requests that this endpoint makes, and what comes of them (MOQT §9)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcs.errors import UsageError
from kvcs.moqt import messages
from kvcs.moqt.errors import (
    StreamCode,
)
from kvcs.moqt.events import (
    RequestAccepted,
    RequestCancelled,
    RequestRefused,
    StateNotified,
)
from kvcs.moqt.filters import LocationFilter, LocationFilterType, RangeFilters
from kvcs.moqt.messages import Message
from kvcs.moqt.names import (
    FullTrackName,
    GroupOrder,
    Location,
    TrackNamespace,
)
from kvcs.moqt.parameters import Parameters, ParameterType
from kvcs.moqt.properties import (
    SetupOption,
)
from kvcs.moqt.requests import OK_SCOPES, Kind, Request, State
from kvcs.moqt.sending.delivery import UnknownHandler
from kvcs.moqt.settings import Role
from kvcs.moqt.track.store import Track

if TYPE_CHECKING:
    from kvcs.moqt.session import Session


_ABSOLUTE_STARTS = frozenset(
    {
        LocationFilterType.ABSOLUTE_START,
        LocationFilterType.ABSOLUTE_GROUP_END,
        LocationFilterType.ABSOLUTE_RANGE,
    }
)
"""Location Filters whose start does not depend on the Largest Object."""


class Requester:
    """The asking half of a session; reached as ``session.requester``."""

    def __init__(self, session: Session) -> None:
        self._session = session

    # Commands

    @property
    def peer_filter_ranges(self) -> int:
        """MAX_FILTER_RANGES of the peer: range filters that a request of ours may carry (§9.1)."""
        options = self._session.peer_options
        value = None if options is None else options.integer(SetupOption.MAX_FILTER_RANGES)
        return 0 if value is None else value

    def subscribe(self, name: FullTrackName, parameters: Parameters) -> int:
        """SUBSCRIBE to a Track, with a fill where FILL_PARAMETERS says so (§9.6, §3.4).

        GROUP_ORDER is added where it is absent: a fill may come before SUBSCRIBE_OK tells the
        publisher's default, and cannot be read without its order.

        Returns:
            The Request ID.

        Raises:
            UsageError: the peer accepts no such range filters.
        """
        parameters = self._prepare(parameters)
        request = self._session.requests.open(
            lambda request_id: messages.Subscribe(request_id, *name, parameters)
        )
        receptions = self._session.receptions
        expected = receptions.expect(request, name, _order(parameters))
        fill: Parameters | None = parameters.get(ParameterType.FILL_PARAMETERS)
        if fill is not None:
            receptions.expect_fill(request.request_id, expected, fill)
        return request.request_id

    def fetch(self, name: FullTrackName, parameters: Parameters) -> int:
        """FETCH past Objects of a Track (§9.11).

        Returns:
            The Request ID.

        Raises:
            UsageError: the peer accepts no such range filters.
        """
        parameters = self._prepare(parameters)
        request = self._session.requests.open(
            lambda request_id: messages.Fetch(request_id, *name, parameters)
        )
        expected = self._session.receptions.expect(request, name, _order(parameters))
        self._session.data_streams.expect_stream(request.request_id, expected, expected.group_order)
        return request.request_id

    def track_status(self, name: FullTrackName, parameters: Parameters | None = None) -> int:
        """TRACK_STATUS: what is known of a Track, without a subscription (§9.13)."""
        chosen = parameters or Parameters()
        return self._session.requests.open(
            lambda request_id: messages.TrackStatus(request_id, *name, chosen)
        ).request_id

    def publish(
        self,
        track: Track,
        parameters: Parameters | None = None,
        on_unknown: UnknownHandler | None = None,
    ) -> int:
        """PUBLISH a Track (§9.8): deliver it from its next Object on, before the peer has answered.

        The peer may change the subscription as one that it asked for, and refuse it; PUBLISH_DONE
        goes out when the Track has ended.

        Args:
            track: what is published.
            parameters: initial settings, as a SUBSCRIBE would name them, and AUTHORIZATION_TOKENs.
                With FORWARD 0 nothing is sent until the peer sets it to 1. Range filters are
                applied, but a PUBLISH cannot name them: for a peer that has asked for them.
            on_unknown: asked by fills; see `kvcs.moqt.sending.delivery.UnknownHandler`.

        Returns:
            The Request ID.

        Raises:
            UsageError: the session is closed, too many requests wait for the peer's stream credit,
                or the message would be too long.
        """
        return self._session.offers.publish(track, parameters or Parameters(), on_unknown)

    def publish_namespace(
        self, namespace: TrackNamespace, parameters: Parameters | None = None
    ) -> int:
        """PUBLISH_NAMESPACE: we have Tracks under a namespace (§9.14)."""
        chosen = parameters or Parameters()
        return self._session.requests.open(
            lambda request_id: messages.PublishNamespace(request_id, namespace, chosen)
        ).request_id

    def subscribe_namespace(
        self, prefix: TrackNamespace, parameters: Parameters | None = None
    ) -> int:
        """SUBSCRIBE_NAMESPACE: tell of namespaces under a prefix (§9.15).

        Raises:
            UsageError: the prefix overlaps that of another one of ours on this session.
        """
        return self._session.watched_prefixes.subscribe_namespace(
            prefix, parameters or Parameters()
        )

    def subscribe_tracks(self, prefix: TrackNamespace, parameters: Parameters | None = None) -> int:
        """SUBSCRIBE_TRACKS: a PUBLISH of every Track under a prefix, now and later (§9.18).

        Its parameters become the first settings of the subscriptions that come of it.

        Raises:
            UsageError: the prefix overlaps that of another one of ours on this session, or the peer
                accepts no such range filters.
        """
        chosen = parameters or Parameters()
        self._check_ranges(chosen)
        return self._session.watched_prefixes.subscribe_tracks(prefix, chosen)

    def update(self, request_id: int, parameters: Parameters) -> int:
        """REQUEST_UPDATE a request of ours, or a PUBLISH that we accepted (§9.5).

        What is absent stays as it is.

        Returns:
            The Request ID of the update; a fill that it asks for carries this one.

        Raises:
            UsageError: the request is not established, the peer's MAX_REQUEST_UPDATES are out, or
                it accepts no such range filters.
        """
        self._check_ranges(parameters)
        return self._session.updates.send(request_id, parameters)

    def cancel(self, request_id: int, code: int = StreamCode.CANCELLED) -> None:
        """Cancel a request of ours, or a PUBLISH that we accepted (§6.4.2.3).

        Its streams are reset and stopped, and nothing more is reported of it. A subscription of the
        peer that we serve by PUBLISH ends with `Responder.end_subscription` in better order.
        """
        request = self._session.requests.get(request_id)
        if request is not None and (request.ours or request.kind is Kind.PUBLISH):
            self._session.cancel_request(request, code)

    def stop_stream(self, stream_id: int, code: int = StreamCode.CANCELLED) -> None:
        """Stop one data stream; its request goes on, and what still comes of it is read over until
        the peer ends it (§11.4.3)."""
        self._session.data_streams.stop(stream_id, code)

    # What the peer answers

    def receive(self, request: Request, message: Message) -> None:
        """A message of the peer on a request of ours.

        Raises:
            SessionError: it has no place here.
        """
        if request.abandoned or self._session.updates.take_answer(request, message):
            return
        if request.kind is Kind.PUBLISH and request.state is State.TERMINATED:
            return  # PUBLISH_DONE is under way, the peer did not know
        request.receive(message)
        if isinstance(message, messages.RequestError):
            self._refused(request, message)
        elif isinstance(message, messages.SubscribeOk):
            self._subscribed(request, message)
        elif isinstance(message, messages.FetchOk):
            self._fetch_accepted(request, message)
        elif isinstance(message, messages.RequestOk):
            self._accepted(request, message)
        elif isinstance(message, messages.PublishDone):
            self._session.receptions.publish_done(request, message)
        elif isinstance(message, messages.Namespace):
            self._session.watched_prefixes.announced(request, message.track_namespace_suffix)
        elif isinstance(message, messages.NamespaceDone):
            self._session.watched_prefixes.withdrawn(request, message.track_namespace_suffix)
        elif isinstance(message, messages.PublishSkipped):
            self._session.watched_prefixes.skipped(request, message)
        elif isinstance(message, messages.PublishStateNotify):
            self._session.emit(StateNotified(request.request_id, message.parameters))
        elif isinstance(message, messages.RequestUpdate):
            self._session.updates.receive(request, message)

    def side_ended(self, request: Request, code: int | None) -> None:
        """The peer ended or stopped a direction of a request of ours."""
        if request.state is State.DRAINING:
            return
        if code is None and request.state is State.ESTABLISHED:
            if request.kind is Kind.FETCH:
                return  # the data stream tells how it ends
            if request.kind is Kind.PUBLISH:
                return  # the subscriber has nothing more to say, and goes on receiving
        self._session.requests.abandon(request, StreamCode.CANCELLED)
        self._session.watched_prefixes.withdraw_all(request)
        self._session.emit(RequestCancelled(request.request_id, True, code))
        self.end(request, StreamCode.CANCELLED)

    def _refused(self, request: Request, error: messages.RequestError) -> None:
        self.check_error(request, error)
        self._session.emit(RequestRefused(request.request_id, error))
        self._session.requests.finish(request)
        self.end(request, StreamCode.CANCELLED)

    def _subscribed(self, request: Request, reply: messages.SubscribeOk) -> None:
        if not self._session.receptions.properties_known(request, reply.track_properties):
            return
        self._session.emit(RequestAccepted(request.request_id, reply))
        largest: Location | None = reply.parameters.get(ParameterType.LARGEST_OBJECT)
        self._session.receptions.bind(request, reply.track_alias, reply.track_properties, largest)

    def check_error(self, request: Request, error: messages.RequestError) -> None:
        """Hold a REQUEST_ERROR against its sender and request (§9.4).

        Raises:
            ProtocolViolation: its Redirect has no place there.
        """
        messages.check_request_error(
            error,
            from_client=self._session.role is Role.SERVER,
            namespace_request=request.kind
            in (Kind.PUBLISH_NAMESPACE, Kind.SUBSCRIBE_NAMESPACE, Kind.SUBSCRIBE_TRACKS),
        )

    def _fetch_accepted(self, request: Request, reply: messages.FetchOk) -> None:
        asked: LocationFilter | None = request.parameters.get(ParameterType.LOCATION_FILTER)
        if asked is not None and asked.type in _ABSOLUTE_STARTS:
            messages.check_fetch_ok(reply, Location(asked.start_group, asked.start_object))
        if not self._session.receptions.properties_known(request, reply.track_properties):
            return
        self._session.emit(RequestAccepted(request.request_id, reply))
        self._session.receptions.fetch_accepted(request, reply)

    def _accepted(self, request: Request, reply: messages.RequestOk) -> None:
        messages.check_request_ok(reply, OK_SCOPES[request.kind])
        if not self._session.receptions.properties_known(request, reply.track_properties):
            return
        self._session.emit(RequestAccepted(request.request_id, reply))
        if request.kind is Kind.TRACK_STATUS:
            self._session.complete_request(request)

    def session_ended(self) -> None:
        """The session is over: nothing is expected any more."""
        for request in self._session.requests.all():
            if request.ours:
                self.end(request, StreamCode.CANCELLED)

    # Inner workings

    def _prepare(self, parameters: Parameters) -> Parameters:
        self._check_ranges(parameters)
        if ParameterType.GROUP_ORDER not in parameters:
            parameters = parameters.replace(group_order=GroupOrder.ASCENDING)
        return parameters

    def _check_ranges(self, parameters: Parameters) -> None:
        """Refuse more range filters than the peer accepts."""
        ranges = RangeFilters.of(parameters.items).range_count
        fill: Parameters | None = parameters.get(ParameterType.FILL_PARAMETERS)
        if fill is not None:
            ranges += RangeFilters.of(fill.items).range_count
        if ranges > self.peer_filter_ranges:
            raise UsageError(
                f"the request has {ranges} filter ranges, the peer accepts"
                f" {self.peer_filter_ranges}; leave them out and drop what is not wanted"
            )

    def end(self, request: Request, code: int = StreamCode.CANCELLED) -> None:
        """A request of ours is over; its open data streams are stopped with ``code``."""
        request_id = request.request_id
        self._session.watched_prefixes.forget(request_id)
        self._session.updates.forget(request_id)
        self._session.asked_prefixes.begun(request_id)
        self._session.deliveries.forget(request_id)
        self._session.receptions.forget(request_id, code)
        self._session.requests.forget(request)


def _order(parameters: Parameters) -> GroupOrder:
    return GroupOrder(parameters.get(ParameterType.GROUP_ORDER))
