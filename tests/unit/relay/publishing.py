"""Publishers that PUBLISH and consumers that ask for Tracks, for tests of the relay's core."""

from __future__ import annotations

from kvcs.errors import RequestError
from kvcs.moqt import events
from kvcs.moqt.errors import RequestCode
from kvcs.moqt.names import FullTrackName
from kvcs.moqt.parameters import Parameters
from kvcs.moqt.properties import KeyValues
from kvcs.moqt.track.store import Track
from kvcs.relay.settings import RelayLimits
from kvcs.testing.actors import SCOPE, ConsumerPeer, PublisherPeer, full_name
from kvcs.testing.hub import Hub

NAME = full_name()
TASTE = 0x78


class Pusher(PublisherPeer):
    """Publishes Tracks by PUBLISH, without an announcement where ``namespace`` is None."""

    def push(
        self,
        name: FullTrackName = NAME,
        parameters: Parameters | None = None,
        properties: KeyValues | None = None,
    ) -> tuple[Track, int]:
        """PUBLISH an empty Track; returns it and the Request ID."""
        target = self.track(name, properties)
        return target, self.push_track(target, parameters)

    def push_track(self, target: Track, parameters: Parameters | None = None) -> int:
        request_id = self.end.core.requester.publish(target, parameters)
        self.hub.run()
        return request_id

    def updates(self, request_id: int) -> bool | None:
        """The Forward State that the relay wants of a PUBLISH."""
        delivery = self.end.core.deliveries.subscription(request_id)
        return None if delivery is None else delivery.forward


class Listener(ConsumerPeer):
    """Asks for the Tracks below a prefix and takes what is published, or refuses it."""

    def __init__(self, hub: Hub, *, takes: bool = True) -> None:
        super().__init__(hub)
        self.takes = takes
        self.end.on_event = self._take

    def ask(self, prefix: tuple[bytes, ...] = SCOPE, **parameters: object) -> int:
        """SUBSCRIBE_TRACKS."""
        asked = Parameters.of(**parameters)
        request_id = self.end.core.requester.subscribe_tracks(prefix, asked)
        self.hub.run()
        return request_id

    def published(self) -> list[events.PublishReceived]:
        return self.end.of(events.PublishReceived)

    def _take(self, event: events.Event) -> None:
        if not isinstance(event, events.PublishReceived):
            return
        if self.takes:
            self.end.core.responder.accept_publish(event.request_id)
        else:
            refusal = RequestError("no", RequestCode.UNINTERESTED)
            self.end.core.responder.refuse(event.request_id, refusal)


def pair(**limits: float) -> tuple[Hub, Pusher]:
    hub = Hub(RelayLimits(**limits))  # type: ignore[arg-type]
    return hub, Pusher(hub, namespace=None)
