"""Requests that this endpoint makes, and what comes of them (MOQT §9)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcs.errors import UsageError
from kvcs.moqt import messages
from kvcs.moqt.errors import (
    MalformedTrack,
    ProtocolViolation,
    RequestCode,
    StreamCode,
    UnsupportedExtension,
)
from kvcs.moqt.events import (
    Event,
    NamespaceAnnounced,
    NamespaceWithdrawn,
    RequestAccepted,
    RequestCancelled,
    RequestRefused,
    RequestUpdateAnswered,
    SubscriptionEnded,
    TrackMalformed,
)
from kvcs.moqt.filters import LocationFilter, LocationFilterType, RangeFilters
from kvcs.moqt.messages import Message
from kvcs.moqt.names import (
    MAX_VI64,
    FullTrackName,
    GroupOrder,
    Location,
    TrackNamespace,
    check_namespace,
    overlaps,
)
from kvcs.moqt.parameters import Parameters, ParameterType, Scope
from kvcs.moqt.properties import (
    KeyValues,
    Property,
    SetupOption,
    check_track_properties,
    find_property,
)
from kvcs.moqt.receiving import Expected
from kvcs.moqt.requests import OK_SCOPES, Kind, Request, State
from kvcs.moqt.settings import Role
from kvcs.moqt.store import DEFAULT_PRIORITY

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
        self._expected: dict[int, Expected] = {}
        self._namespaces: dict[int, set[TrackNamespace]] = {}
        self._done: dict[int, messages.PublishDone] = {}
        self._fetch_finished: set[int] = set()

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
        expected = self._expect(request, name)
        fill: Parameters | None = parameters.get(ParameterType.FILL_PARAMETERS)
        if fill is not None:
            self._expect_fill(request.request_id, expected, fill)
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
        expected = self._expect(request, name)
        self._session.data_streams.expect_stream(request.request_id, expected, expected.group_order)
        return request.request_id

    def track_status(self, name: FullTrackName, parameters: Parameters | None = None) -> int:
        """TRACK_STATUS: what is known of a Track, without a subscription (§9.13)."""
        chosen = parameters or Parameters()
        return self._session.requests.open(
            lambda request_id: messages.TrackStatus(request_id, *name, chosen)
        ).request_id

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
        for request in self._session.requests.all():
            message = request.message
            if (
                request.ours
                and isinstance(message, messages.SubscribeNamespace)
                and overlaps(message.track_namespace_prefix, prefix)
            ):
                raise UsageError("a SUBSCRIBE_NAMESPACE of this session overlaps the prefix")
        chosen = parameters or Parameters()
        request_id = self._session.requests.open(
            lambda request_id: messages.SubscribeNamespace(request_id, prefix, chosen)
        ).request_id
        self._namespaces[request_id] = set()
        return request_id

    def update(self, request_id: int, parameters: Parameters) -> int:
        """REQUEST_UPDATE an established request of ours (§9.5); absent means unchanged.

        Returns:
            The Request ID of the update; a fill that it asks for carries this one.

        Raises:
            UsageError: the request is not established, the peer's MAX_REQUEST_UPDATES are out, or
                it accepts no such range filters.
        """
        request = self._session.requests.get(request_id)
        if request is None or not request.ours or request.state is not State.ESTABLISHED:
            raise UsageError(f"request {request_id} is not established")
        options = self._session.peer_options
        limit = None if options is None else options.integer(SetupOption.MAX_REQUEST_UPDATES)
        if limit and len(request.updates) >= limit:
            raise UsageError(f"{limit} REQUEST_UPDATEs of request {request_id} have no answer yet")
        filtered = self._check_ranges(parameters)
        update_id = self._session.requests.update(request, parameters)
        expected = self._expected.get(request_id)
        if expected is not None:
            expected.filtered = expected.filtered or filtered
            fill: Parameters | None = parameters.get(ParameterType.FILL_PARAMETERS)
            if fill is not None:
                self._expect_fill(update_id, expected, fill)
        return update_id

    def cancel(self, request_id: int, code: int = StreamCode.CANCELLED) -> None:
        """Cancel a request of ours: its streams are stopped, nothing more is reported of it."""
        request = self._session.requests.get(request_id)
        if request is None or not request.ours:
            return
        self._session.requests.abandon(request, code)
        self._end(request, code)

    def stop_stream(self, stream_id: int, code: int = StreamCode.CANCELLED) -> None:
        """Stop one data stream; its request goes on (§11.4.3)."""
        self._session.stop_stream(stream_id, code)

    # What the peer answers

    def receive(self, request: Request, message: Message) -> None:
        """A message of the peer on a request of ours.

        Raises:
            SessionError: it has no place here.
        """
        if request.abandoned:
            return
        if request.updates and isinstance(message, (messages.RequestOk, messages.RequestError)):
            if request.state is State.ESTABLISHED:
                self._update_answered(request, message)
                return
            if request.state is State.TERMINATED:
                request.updates.pop(0)  # a FETCH that was complete before its update was
                return
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
            self._publish_done(request, message)
        elif isinstance(message, messages.Namespace):
            self._announced(request, message.track_namespace_suffix)
        elif isinstance(message, messages.NamespaceDone):
            self._withdrawn(request, message.track_namespace_suffix)

    def side_ended(self, request: Request, code: int | None) -> None:
        """The peer ended or stopped a direction of a request of ours."""
        if request.state is State.DRAINING:
            return
        if code is None and request.kind is Kind.FETCH and request.state is State.ESTABLISHED:
            return  # the data stream tells how it ends
        self._session.requests.abandon(request, StreamCode.CANCELLED)
        for suffix in list(self._namespaces.get(request.request_id, ())):
            self.emit(NamespaceWithdrawn(request.request_id, suffix))
        self.emit(RequestCancelled(request.request_id, True, code))
        self._end(request, StreamCode.CANCELLED)

    def _update_answered(
        self, request: Request, message: messages.RequestOk | messages.RequestError
    ) -> None:
        update_id = request.updates.pop(0)
        if isinstance(message, messages.RequestOk):
            subscription = request.kind is Kind.SUBSCRIBE
            messages.check_request_ok(
                message, Scope.UPDATE_SUBSCRIPTION_OK if subscription else Scope.UPDATE_OTHER_OK
            )
        else:
            self._check_error(request, message)
        self.emit(RequestUpdateAnswered(request.request_id, update_id, message))

    def _refused(self, request: Request, error: messages.RequestError) -> None:
        self._check_error(request, error)
        self.emit(RequestRefused(request.request_id, error))
        self._session.requests.finish(request)
        self._end(request, StreamCode.CANCELLED)

    def _subscribed(self, request: Request, reply: messages.SubscribeOk) -> None:
        if not self._properties_known(request, reply.track_properties):
            return
        self.emit(RequestAccepted(request.request_id, reply))
        expected = self._expected[request.request_id]
        self._note_default_priority(request, reply.track_properties, expected)
        self._session.data_streams.bind(reply.track_alias, expected)

    def _check_error(self, request: Request, error: messages.RequestError) -> None:
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
        if not self._properties_known(request, reply.track_properties):
            return
        self.emit(RequestAccepted(request.request_id, reply))
        if request.request_id in self._fetch_finished:
            self._complete(request)

    def _properties_known(self, request: Request, properties: KeyValues) -> bool:
        """Cancel a request whose Track Properties forbid us to process it (§10)."""
        try:
            check_track_properties(properties)
        except MalformedTrack as exc:
            self._cancel_malformed(request.request_id, exc.reason)
            return False
        except UnsupportedExtension as exc:
            error = messages.RequestError(exc.code, 0, exc.reason, None)
            self.emit(RequestRefused(request.request_id, error))
            self.cancel(request.request_id)
            return False
        return True

    def _accepted(self, request: Request, reply: messages.RequestOk) -> None:
        messages.check_request_ok(reply, OK_SCOPES[request.kind])
        if not self._properties_known(request, reply.track_properties):
            return
        self.emit(RequestAccepted(request.request_id, reply))
        if request.kind is Kind.TRACK_STATUS:
            self._complete(request)

    @staticmethod
    def _note_default_priority(request: Request, properties: KeyValues, expected: Expected) -> None:
        if request.parameters.get(ParameterType.INCLUDE_PROPERTIES, 1):
            value = find_property(properties, Property.DEFAULT_PUBLISHER_PRIORITY)
            expected.rules.default_priority = value if isinstance(value, int) else DEFAULT_PRIORITY

    def _publish_done(self, request: Request, done: messages.PublishDone) -> None:
        self._done[request.request_id] = done
        if not self._check_streams(request):
            self._wait_for_streams(request)

    def _wait_for_streams(self, request: Request, limit: float | None = None) -> None:
        """Let streams come that PUBLISH_DONE has overtaken, until none has for a while."""
        session = self._session
        settings = session.settings
        until = session.now + settings.stream_wait_limit if limit is None else limit

        def expired(now: float) -> None:
            if request.request_id not in self._done:
                return
            quiet = now - session.data_streams.heard_at >= settings.stream_wait
            if self._expected[request.request_id].open_streams or (not quiet and now < until):
                self._wait_for_streams(request, until)
            else:
                self._subscription_ended(request, every_stream_seen=False)

        heard = session.data_streams.heard_at + settings.stream_wait
        session.at(heard if heard > session.now else session.now + settings.stream_wait, expired)

    def _check_streams(self, request: Request) -> bool:
        done = self._done[request.request_id]
        expected = self._expected[request.request_id]
        if done.stream_count == MAX_VI64 or expected.open_streams:
            return False
        if expected.streams_seen < done.stream_count:
            return False
        self._subscription_ended(request, every_stream_seen=True)
        return True

    def _subscription_ended(self, request: Request, *, every_stream_seen: bool) -> None:
        done = self._done.pop(request.request_id)
        self.emit(
            SubscriptionEnded(request.request_id, done.status_code, done.reason, every_stream_seen)
        )
        self._complete(request)

    def _announced(self, request: Request, suffix: TrackNamespace) -> None:
        message = request.message
        assert isinstance(message, messages.SubscribeNamespace)
        check_namespace((*message.track_namespace_prefix, *suffix))
        known = self._namespaces[request.request_id]
        if suffix in known:
            return
        if len(known) >= self._session.settings.max_namespaces:
            error = messages.RequestError(
                RequestCode.NAMESPACE_TOO_LARGE, 0, "too many namespaces", None
            )
            self.emit(RequestRefused(request.request_id, error))
            self.cancel(request.request_id, StreamCode.EXCESSIVE_LOAD)
            return
        known.add(suffix)
        self.emit(NamespaceAnnounced(request.request_id, suffix))

    def _withdrawn(self, request: Request, suffix: TrackNamespace) -> None:
        known = self._namespaces[request.request_id]
        if suffix not in known:
            raise ProtocolViolation("NAMESPACE_DONE without a NAMESPACE")
        known.remove(suffix)
        self.emit(NamespaceWithdrawn(request.request_id, suffix))

    def session_ended(self) -> None:
        """The session is over: nothing is expected any more."""
        for request in self._session.requests.all():
            if request.ours:
                self._end(request, StreamCode.CANCELLED)

    # ReceiverHost

    def emit(self, event: Event) -> None:
        """Report an event."""
        self._session.emit(event)

    def track_malformed(self, expected: Expected, reason: str) -> None:
        """Cancel all that was asked of a malformed Track (§12.1); the session lives."""
        for request_id, other in list(self._expected.items()):
            if other.full_track_name == expected.full_track_name:
                self._cancel_malformed(request_id, reason)

    def _cancel_malformed(self, request_id: int, reason: str) -> None:
        self.emit(TrackMalformed(request_id, reason))
        self.cancel(request_id, StreamCode.MALFORMED_TRACK)

    def stream_ended(self, expected: Expected) -> None:
        """One of a request's data streams ended."""
        request = self._session.requests.get(expected.request_id)
        if request is None:
            return
        if request.kind is Kind.FETCH:
            if request.state is State.ESTABLISHED:
                self._complete(request)
            else:
                self._fetch_finished.add(request.request_id)
        elif request.request_id in self._done:
            self._check_streams(request)

    # Inner workings

    def _prepare(self, parameters: Parameters) -> Parameters:
        self._check_ranges(parameters)
        if ParameterType.GROUP_ORDER not in parameters:
            parameters = parameters.replace(group_order=GroupOrder.ASCENDING)
        return parameters

    def _check_ranges(self, parameters: Parameters) -> bool:
        """Whether there are range filters, which the peer has to accept."""
        filters = RangeFilters.of(parameters.items)
        ranges = filters.range_count
        fill: Parameters | None = parameters.get(ParameterType.FILL_PARAMETERS)
        if fill is not None:
            ranges += RangeFilters.of(fill.items).range_count
        if ranges > self.peer_filter_ranges:
            raise UsageError(
                f"the request has {ranges} filter ranges, the peer accepts"
                f" {self.peer_filter_ranges}; leave them out and drop what is not wanted"
            )
        return bool(filters)

    def _expect(self, request: Request, name: FullTrackName) -> Expected:
        parameters = request.parameters
        expected = self._session.data_streams.expect(
            request.request_id,
            name,
            GroupOrder(parameters.get(ParameterType.GROUP_ORDER)),
            filtered=bool(RangeFilters.of(parameters.items)),
        )
        self._expected[request.request_id] = expected
        return expected

    def _expect_fill(self, request_id: int, expected: Expected, fill: Parameters) -> None:
        """The fill's own Group Order, else that of its subscription (§11.4)."""
        nested = fill.get(ParameterType.GROUP_ORDER)
        order = expected.group_order if nested is None else GroupOrder(nested)
        self._session.data_streams.expect_stream(request_id, expected, order)

    def _complete(self, request: Request) -> None:
        """A request ended as it should."""
        self._session.requests.finish(request)
        self._end(request, StreamCode.CANCELLED)

    def _end(self, request: Request, code: int) -> None:
        request_id = request.request_id
        self._done.pop(request_id, None)
        self._namespaces.pop(request_id, None)
        self._fetch_finished.discard(request_id)
        expected = self._expected.pop(request_id, None)
        if expected is not None:
            self._session.data_streams.forget(expected, code)
        self._session.requests.forget(request)
