"""Every kind of request, asked by either side, ended by either side at every moment (MOQT §6.4.2).

Nothing of it may be left on either side, and the session goes on.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from kvcs.moqt.errors import PublishDoneCode, StreamCode
from kvcs.moqt.events import (
    Event,
    FetchReceived,
    ObjectChunk,
    ObjectEnded,
    PublishNamespaceReceived,
    PublishReceived,
    SubscribeNamespaceReceived,
    SubscribeReceived,
    SubscribeTracksReceived,
    TrackStatusReceived,
)
from kvcs.moqt.filters import LocationFilter
from kvcs.moqt.parameters import Parameters
from kvcs.moqt.requests import Kind
from kvcs.moqt.settings import Role
from kvcs.testing.pair import SessionPair
from kvcs.testing.residue import residue
from kvcs.testing.tracks import NAME, end_track, put, put_group, track

JOIN = Parameters.of(
    location_filter=LocationFilter.next_object(),
    fill_parameters=Parameters.of(location_filter=LocationFilter.absolute_start(0, 0)),
)
PREFIX = NAME.namespace[:1]
OBJECT_OCTETS = 1000
DELIVERED = (Kind.SUBSCRIBE, Kind.PUBLISH, Kind.FETCH)


class Scene:
    """One request, brought to a moment of its life."""

    def __init__(self, kind: Kind, role: Role, moment: str) -> None:
        self.kind, self.moment = kind, moment
        self.pair = SessionPair()
        ends = (self.pair.client, self.pair.server)
        self.asker, self.other = ends if role is Role.CLIENT else ends[::-1]
        self.publisher = self.asker if kind is Kind.PUBLISH else self.other
        self.source = track()
        put_group(self.source, 0, 2, octets=OBJECT_OCTETS)
        self.other.on_event = self._answer
        self.answers = moment not in ("waiting", "before the answer")
        if moment == "waiting":
            self.asker.credit.bidirectional = 0
        if moment == "in mid object":
            self.publisher.credit.object_octets = 0
        self.request_id = self._ask()
        self.pair.run()
        if moment == "in mid object":
            self._begin_an_object()
        elif moment == "after the end":
            self._finish()
        self.asker.credit.bidirectional = 1

    def _ask(self) -> int:
        requester = self.asker.core.requester
        ask: dict[Kind, Callable[[], int]] = {
            Kind.SUBSCRIBE: lambda: requester.subscribe(NAME, JOIN),
            Kind.PUBLISH: lambda: requester.publish(self.source),
            Kind.FETCH: lambda: requester.fetch(NAME, Parameters()),
            Kind.TRACK_STATUS: lambda: requester.track_status(NAME),
            Kind.PUBLISH_NAMESPACE: lambda: requester.publish_namespace(PREFIX),
            Kind.SUBSCRIBE_NAMESPACE: lambda: requester.subscribe_namespace(PREFIX),
            Kind.SUBSCRIBE_TRACKS: lambda: requester.subscribe_tracks(PREFIX),
        }
        return ask[self.kind]()

    def _answer(self, event: Event) -> None:
        responder = self.other.core.responder
        if not self.answers:
            return
        if isinstance(event, SubscribeReceived):
            responder.accept_subscribe(event.request_id, self.source, self.pair.now)
        elif isinstance(event, FetchReceived):
            responder.accept_fetch(event.request_id, self.source, self.pair.now)
        elif isinstance(event, TrackStatusReceived):
            responder.answer_track_status(event.request_id, self.source)
        elif isinstance(event, PublishReceived):
            responder.accept_publish(event.request_id)
        elif isinstance(
            event, PublishNamespaceReceived | SubscribeNamespaceReceived | SubscribeTracksReceived
        ):
            responder.accept(event.request_id)

    def _begin_an_object(self) -> None:
        if self.kind not in DELIVERED:
            return
        put(self.source, 1, 0, octets=OBJECT_OCTETS)
        receiver = self.other if self.publisher is self.asker else self.asker
        self.publisher.credit.object_octets = OBJECT_OCTETS // 3
        while not receiver.of(ObjectChunk):
            assert self.pair.step()
        self.publisher.credit.object_octets = 0
        self.pair.run()
        assert receiver.of(ObjectEnded) == []

    def _finish(self) -> None:
        """The request ends as it should, but that a stream counted in PUBLISH_DONE is missing."""
        end_track(self.source, 1)
        self.pair.run()
        if self.kind in (Kind.SUBSCRIBE, Kind.PUBLISH):
            delivery = self.publisher.core.deliveries.subscription(self.request_id)
            assert delivery is not None
            delivery.streams_opened += 1
            self.pair.advance(1.0)

    def check_nothing_is_left(self) -> None:
        self.pair.run()
        for end in (self.asker, self.other):
            end.credit.object_octets = 1 << 40
        self.pair.run()
        self.pair.advance(50.0)
        for end in (self.asker, self.other):
            assert not end.core.closed, end.core.failure
            assert residue(end.core, self.source) == {}
        assert self.source.readers == 0


def asker_cancels(scene: Scene) -> None:
    scene.asker.core.requester.cancel(scene.request_id)


def other_cancels(scene: Scene) -> None:
    scene.other.core.responder.revoke(scene.request_id, StreamCode.EXCESSIVE_LOAD)


def publisher_ends(scene: Scene) -> None:
    if scene.kind in (Kind.SUBSCRIBE, Kind.PUBLISH):
        responder = scene.publisher.core.responder
        responder.end_subscription(scene.request_id, PublishDoneCode.GOING_AWAY)
    other_cancels(scene)


def both_at_once(scene: Scene) -> None:
    asker_cancels(scene)
    other_cancels(scene)


def one_after_the_other(scene: Scene) -> None:
    other_cancels(scene)
    scene.pair.run()
    asker_cancels(scene)
    asker_cancels(scene)
    scene.pair.run()
    other_cancels(scene)


MOMENTS = ["waiting", "before the answer", "after the answer", "in mid object", "after the end"]
ENDS = [asker_cancels, other_cancels, publisher_ends, both_at_once, one_after_the_other]


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize(("kind", "moment"), list(itertools.product(Kind, MOMENTS)))
@pytest.mark.parametrize("role", Role)
def test_nothing_is_left(kind: Kind, role: Role, moment: str, end: Callable[[Scene], None]) -> None:
    scene = Scene(kind, role, moment)
    end(scene)
    scene.pair.run()
    end(scene)  # where the other side did not know of it yet, or did already
    scene.check_nothing_is_left()


@pytest.mark.parametrize(("kind", "moment"), list(itertools.product(Kind, MOMENTS)))
@pytest.mark.parametrize("role", Role)
def test_the_end_of_the_session_leaves_nothing(kind: Kind, role: Role, moment: str) -> None:
    scene = Scene(kind, role, moment)
    for end in (scene.asker, scene.other):
        end.core.receive_closed(None, "lost", False)
    assert residue(scene.asker.core) == residue(scene.other.core, scene.source) == {}
    assert scene.source.readers == 0


@pytest.mark.parametrize("steps", range(0, 30, 2))
@pytest.mark.parametrize("end", [asker_cancels, other_cancels])
def test_a_publish_is_cancelled_while_its_publisher_finishes(
    steps: int, end: Callable[[Scene], None]
) -> None:
    scene = Scene(Kind.PUBLISH, Role.CLIENT, "after the answer")
    put_group(scene.source, 1, 2)
    end_track(scene.source, 2)
    for _ in range(steps):
        scene.pair.step()
    end(scene)
    scene.check_nothing_is_left()
