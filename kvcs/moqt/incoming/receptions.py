"""What this endpoint receives for subscriptions and fetches, whoever began them (MOQT §3, §11).

A subscription belongs to a SUBSCRIBE of ours or to a PUBLISH of the peer; from here on both are the
same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvcs.moqt import messages
from kvcs.moqt.errors import MalformedTrack, StreamCode, UnsupportedExtension
from kvcs.moqt.events import Event, RequestRefused, SubscriptionEnded, TrackMalformed
from kvcs.moqt.filters import LocationFilter, RangeFilters
from kvcs.moqt.incoming.expected import ObjectSink
from kvcs.moqt.incoming.receiving import Expected
from kvcs.moqt.limits import Limit
from kvcs.moqt.names import MAX_VI64, FullTrackName, GroupOrder, Location
from kvcs.moqt.parameters import Parameters, ParameterType
from kvcs.moqt.properties import (
    KeyValues,
    Property,
    check_track_properties,
    find_property,
)
from kvcs.moqt.requests import Kind, Request, State
from kvcs.moqt.track.stored import DEFAULT_PRIORITY

if TYPE_CHECKING:
    from kvcs.moqt.session import Session


class Receptions:
    """The receiving half of a session; it is the `ReceiverHost` of its data streams.

    Args:
        session: the session that it belongs to.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._expected: dict[int, Expected] = {}
        self._done: dict[int, messages.PublishDone] = {}
        self._fetch_finished: set[int] = set()
        self.has_events: Callable[[], bool] = session.has_events
        """Whether an event waits to be delivered; every datagram asks."""

    # What is expected

    def expect(self, request: Request, name: FullTrackName, order: GroupOrder) -> Expected:
        """Data streams will come for a request."""
        expected = self._session.data_streams.expect(
            request.request_id,
            name,
            order,
            filtered=bool(RangeFilters.of(request.parameters.items)),
        )
        self._expected[request.request_id] = expected
        return expected

    def sink_to(self, request_id: int, sink: ObjectSink | None) -> None:
        """Give the Objects of a request to ``sink``, or report them as events where it is None;
        quiet where the request is over."""
        expected = self._expected.get(request_id)
        if expected is not None:
            expected.sink = sink

    def expect_fill(self, request_id: int, expected: Expected, fill: Parameters) -> None:
        """A fill may come, in its own Group Order, else in that of its subscription (§11.4)."""
        nested = fill.get(ParameterType.GROUP_ORDER)
        order = expected.group_order if nested is None else GroupOrder(nested)
        self._session.data_streams.expect_stream(request_id, expected, order)

    def updated(self, request: Request, update_id: int, parameters: Parameters) -> None:
        """A REQUEST_UPDATE of ours is on its way: range filters and fills that it asks for."""
        expected = self._expected.get(request.request_id)
        if expected is None:
            return
        expected.filtered = expected.filtered or bool(RangeFilters.of(parameters.items))
        if ParameterType.LOCATION_FILTER in parameters:
            # Objects of the old range and of the new one may come.
            expected.updated, expected.span = True, None
        fill: Parameters | None = parameters.get(ParameterType.FILL_PARAMETERS)
        if fill is not None:
            self.expect_fill(update_id, expected, fill)

    def bind(
        self,
        request: Request,
        track_alias: int,
        properties: KeyValues,
        largest: Location | None = None,
    ) -> None:
        """A subscription is established: its streams are known by their Track Alias.

        Args:
            request: the SUBSCRIBE of ours, or PUBLISH of the peer.
            track_alias: its alias.
            properties: Track Properties.
            largest: LARGEST_OBJECT, which a relative Location Filter counts from.

        Raises:
            SessionError: the alias denotes another Track, or an early stream breaks a rule.
        """
        expected = self._expected[request.request_id]
        if not expected.updated:
            chosen = request.parameters.get(ParameterType.LOCATION_FILTER)
            expected.span = (chosen or LocationFilter.none()).for_subscription(largest)
        if request.parameters.get(ParameterType.INCLUDE_PROPERTIES, 1):
            value = find_property(properties, Property.DEFAULT_PUBLISHER_PRIORITY)
            expected.rules.default_priority = value if isinstance(value, int) else DEFAULT_PRIORITY
        self._session.data_streams.bind(track_alias, expected)

    def properties_known(self, request: Request, properties: KeyValues) -> bool:
        """Cancel a request whose Track Properties forbid us to process it (§10)."""
        try:
            check_track_properties(properties)
        except MalformedTrack as exc:
            self._cancel_malformed(request.request_id, exc.reason)
            return False
        except UnsupportedExtension as exc:
            error = messages.RequestError(exc.code, 0, exc.reason, None)
            self.emit(RequestRefused(request.request_id, error))
            self._session.cancel_request(request, StreamCode.CANCELLED)
            return False
        return True

    # Ends

    def publish_done(self, request: Request, done: messages.PublishDone) -> None:
        """PUBLISH_DONE: the subscription is over once its streams are here (§9.9)."""
        self._done[request.request_id] = done
        if self._expected[request.request_id].streams_seen > done.stream_count:
            # We may close for it (§9.9); but some publishers forget their fills in the count.
            self._session.limits.reached(Limit.STREAM_COUNT)
        if not self._check_streams(request):
            self._wait_for_streams(request)

    def fetch_accepted(self, request: Request, reply: messages.FetchOk) -> None:
        """FETCH_OK is here; its data stream may have ended before."""
        expected = self._expected[request.request_id]
        if reply.end_of_track:
            try:
                expected.rules.finish_track(reply.end_location)
            except MalformedTrack as exc:
                self.track_malformed(expected, exc.reason)
                return
        if request.request_id in self._fetch_finished:
            self._session.complete_request(request)

    def forget(self, request_id: int, code: int) -> None:
        """A request is over: its open streams are stopped."""
        self._done.pop(request_id, None)
        self._fetch_finished.discard(request_id)
        expected = self._expected.pop(request_id, None)
        if expected is not None:
            self._session.data_streams.forget(expected, code)

    # ReceiverHost

    def emit(self, event: Event) -> None:
        """Report an event."""
        self._session.emit(event)

    def stop_stream(self, stream_id: int, code: int) -> None:
        """Stop one data stream; its request goes on (§11.4.3)."""
        self._session.stop_stream(stream_id, code)

    def track_malformed(self, expected: Expected, reason: str) -> None:
        """Cancel all that was asked of a malformed Track (§12.1); the session lives."""
        for request_id, other in list(self._expected.items()):
            if other.full_track_name == expected.full_track_name:
                self._cancel_malformed(request_id, reason)

    def stream_ended(self, expected: Expected) -> None:
        """One of a request's data streams ended."""
        request = self._session.requests.get(expected.request_id)
        if request is None:
            return
        if request.kind is Kind.FETCH:
            if request.state is State.ESTABLISHED:
                self._session.complete_request(request)
            else:
                self._fetch_finished.add(request.request_id)
        elif request.request_id in self._done:
            self._check_streams(request)

    # Inner workings

    def _cancel_malformed(self, request_id: int, reason: str) -> None:
        self.emit(TrackMalformed(request_id, reason))
        request = self._session.requests.get(request_id)
        if request is not None:
            self._session.cancel_request(request, StreamCode.MALFORMED_TRACK)

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
        self._session.complete_request(request)
