"""Peers of a relay for tests: one that publishes what its Tracks hold, one that consumes."""

from __future__ import annotations

from collections.abc import Callable

from kvcs.errors import RequestError
from kvcs.moqt import events
from kvcs.moqt.errors import DoesNotExist
from kvcs.moqt.filters import LocationFilter
from kvcs.moqt.names import FullTrackName, Location, TrackNamespace
from kvcs.moqt.objects import ObjectStatus
from kvcs.moqt.parameters import Parameters
from kvcs.moqt.properties import KeyValues
from kvcs.moqt.settings import SessionSettings
from kvcs.moqt.track.store import Track
from kvcs.testing.hub import Hub
from kvcs.testing.tracks import Received, objects

EVERYTHING = LocationFilter.absolute_start(0, 0)
"""The fill filter of a KVCS consumer."""

SCOPE = (b"kvcs-1", b"S" * 16)
"""A scope of tests."""

PUBLICATION: TrackNamespace = (*SCOPE, b"C" * 32, b"A" * 32, b"P" * 16)
"""A publication in it."""


def full_name(track: bytes = b"k.raw.s0", namespace: TrackNamespace = PUBLICATION) -> FullTrackName:
    """A Full Track Name of the publication."""
    return FullTrackName(namespace, track)


class PublisherPeer:
    """Announces namespaces and serves Tracks of its own, like an origin."""

    def __init__(
        self,
        hub: Hub,
        namespace: TrackNamespace | None = PUBLICATION,
        settings: SessionSettings | None = None,
    ) -> None:
        self.hub = hub
        self.spoke = hub.connect(settings)
        self.end = self.spoke.peer
        self.tracks: dict[FullTrackName, Track] = {}
        self.subscribes: list[events.SubscribeReceived] = []
        self.fetches: list[events.FetchReceived] = []
        self.refusal: RequestError | None = None
        """What every request is refused with, where it is set."""
        self.silent = False
        """Whether requests get no answer at all."""
        self.before_answer: Callable[[events.Event], None] | None = None
        self.end.on_event = self._answer
        self.announcements: list[int] = []
        if namespace is not None:
            self.announce(namespace)

    def announce(self, namespace: TrackNamespace) -> int:
        """PUBLISH_NAMESPACE; returns its Request ID."""
        request_id = self.end.core.requester.publish_namespace(namespace)
        self.announcements.append(request_id)
        self.hub.run()
        return request_id

    def withdraw(self) -> None:
        """Cancel every announcement."""
        for request_id in self.announcements:
            self.end.core.requester.cancel(request_id)
        self.announcements.clear()
        self.hub.run()

    def track(
        self, name: FullTrackName | None = None, properties: KeyValues | None = None
    ) -> Track:
        """An empty Track that is served from now on."""
        name = full_name() if name is None else name
        self.tracks[name] = Track(name, authoritative=True, properties=properties)
        return self.tracks[name]

    def leave(self) -> None:
        """Close the session in good order."""
        self.end.core.close()
        self.hub.run()

    def vanish(self) -> None:
        """Lose the connection."""
        self.hub.disconnect(self.spoke)
        self.hub.run()

    def _answer(self, event: events.Event) -> None:
        if isinstance(event, events.SubscribeReceived):
            self.subscribes.append(event)
        elif isinstance(event, events.FetchReceived):
            self.fetches.append(event)
        elif not isinstance(event, events.TrackStatusReceived):
            return
        if self.before_answer is not None:
            self.before_answer(event)
        if self.silent:
            return
        responder = self.end.core.responder
        track = self.tracks.get(event.full_track_name)
        if self.refusal is not None or track is None:
            responder.refuse(event.request_id, self.refusal or DoesNotExist("no such track"))
        elif isinstance(event, events.SubscribeReceived):
            responder.accept_subscribe(event.request_id, track, self.hub.now)
        elif isinstance(event, events.FetchReceived):
            responder.accept_fetch(event.request_id, track, self.hub.now)
        else:
            responder.answer_track_status(event.request_id, track)


class ConsumerPeer:
    """Subscribes and fetches, and keeps what it got."""

    def __init__(
        self,
        hub: Hub,
        settings: SessionSettings | None = None,
        server: SessionSettings | None = None,
    ) -> None:
        self.hub = hub
        self.spoke = hub.connect(settings, server)
        self.end = self.spoke.peer

    def subscribe(
        self,
        name: FullTrackName | None = None,
        *,
        fill: LocationFilter | None = EVERYTHING,
        fill_timeout: int | None = None,
        run: bool = True,
        **parameters: int,
    ) -> int:
        """SUBSCRIBE with Next Object, and a fill where ``fill`` says so; returns its ID."""
        asked = Parameters.of(location_filter=LocationFilter.next_object(), **parameters)
        if fill is not None:
            nested = Parameters.of(location_filter=fill)
            if fill_timeout is not None:
                nested = nested.replace(fill_timeout=fill_timeout)
            asked = asked.replace(fill_parameters=nested)
        request_id = self.end.core.requester.subscribe(name or full_name(), asked)
        if run:
            self.hub.run()
        return request_id

    def fetch(
        self,
        name: FullTrackName | None = None,
        chosen: LocationFilter | None = None,
        *,
        run: bool = True,
        **parameters: int,
    ) -> int:
        """FETCH a range; returns its Request ID."""
        asked = Parameters.of(location_filter=chosen or LocationFilter.none(), **parameters)
        request_id = self.end.core.requester.fetch(name or full_name(), asked)
        if run:
            self.hub.run()
        return request_id

    def cancel(self, request_id: int) -> None:
        """Cancel a request."""
        self.end.core.requester.cancel(request_id)
        self.hub.run()

    # What came

    def objects(self, request_id: int | None = None) -> list[Received]:
        """Whole Objects in the order in which they began, statuses included."""
        return [item for item in objects(self.end.events, request_id) if item.whole]

    def locations(self, request_id: int | None = None) -> list[Location]:
        """Locations of the whole Objects with a payload, in order of arrival."""
        return [
            item.header.location
            for item in self.objects(request_id)
            if item.header.status is ObjectStatus.NORMAL
        ]

    def contents(self, request_id: int | None = None) -> dict[Location, bytes]:
        """Payloads by Location."""
        return {
            item.header.location: bytes(item.payload)
            for item in self.objects(request_id)
            if item.header.status is ObjectStatus.NORMAL
        }

    def accepted(self, request_id: int) -> events.RequestAccepted | None:
        """The OK of a request, if it came."""
        found = (event for event in self.end.of(events.RequestAccepted))
        return next((event for event in found if event.request_id == request_id), None)

    def refused(self, request_id: int) -> int | None:
        """The code of REQUEST_ERROR, if it came."""
        for event in self.end.of(events.RequestRefused):
            if event.request_id == request_id:
                return event.error.error_code
        return None

    def done(self, request_id: int) -> events.SubscriptionEnded | None:
        """What PUBLISH_DONE said, if it came."""
        found = (event for event in self.end.of(events.SubscriptionEnded))
        return next((event for event in found if event.request_id == request_id), None)

    def markers(self, request_id: int) -> list[events.RangeMarked]:
        """Markers on a request's fetch or fill stream."""
        found = self.end.of(events.RangeMarked)
        return [event for event in found if event.request_id == request_id]

    def stream_ends(self, request_id: int) -> list[int | None]:
        """Reset codes with which a request's data streams ended, None for FIN."""
        found = self.end.of(events.DataStreamEnded)
        return [event.reset_code for event in found if event.request_id == request_id]
