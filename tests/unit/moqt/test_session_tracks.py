"""SUBSCRIBE_TRACKS and PUBLISH_SKIPPED from both sides, and changes of prefixes (MOQT §9.18)."""

from __future__ import annotations

import pytest

from kvcs.errors import RequestError, UsageError
from kvcs.moqt import messages as m
from kvcs.moqt.asking.request_streams import MAX_WAITING_REQUESTS
from kvcs.moqt.errors import RequestCode, SessionCode
from kvcs.moqt.events import (
    Event,
    NamespaceAnnounced,
    NamespaceWithdrawn,
    PublishReceived,
    RequestCancelled,
    RequestUpdateAnswered,
    RequestUpdateReceived,
    SubscribeNamespaceReceived,
    SubscribeTracksReceived,
    TrackSkipped,
)
from kvcs.moqt.filters import RangeFilter
from kvcs.moqt.names import FullTrackName, GroupOrder, TrackNamespace
from kvcs.moqt.parameters import Parameters, ParameterType
from kvcs.moqt.properties import KeyValues
from kvcs.moqt.settings import Role, SessionSettings
from kvcs.moqt.tokens import Token
from kvcs.testing.bench import Bench
from kvcs.testing.pair import SessionPair
from kvcs.testing.residue import residue
from kvcs.testing.tracks import NAME, locations, put_group, track

NONE, BARE = Parameters(), KeyValues()
OK = m.RequestOk(NONE, BARE)
PREFIX = NAME.namespace[:1]
TASTE = 0x78
"""A Track Property that filters select by."""


def tasting(low: int, high: int, *, set_id: int = 0) -> RangeFilter:
    return RangeFilter(set_id, ((low, high),), TASTE)


class Scene:
    """The client asks for all Tracks under a prefix; the server accepts, and it accepts those."""

    def __init__(self, parameters: Parameters = NONE, prefix: TrackNamespace = PREFIX) -> None:
        self.pair = SessionPair()
        self.pair.server.on_event = self._serve
        self.pair.client.on_event = self._take
        self.request_id = self.pair.client.core.requester.subscribe_tracks(prefix, parameters)
        self.pair.run()

    def _serve(self, event: Event) -> None:
        responder = self.pair.server.core.responder
        if isinstance(event, SubscribeTracksReceived):
            responder.accept(event.request_id)
        elif isinstance(event, RequestUpdateReceived):
            responder.accept_update(event.request_id, event.update_id)

    def _take(self, event: Event) -> None:
        if isinstance(event, PublishReceived):
            self.pair.client.core.responder.accept_publish(event.request_id)

    def offer(self, name: FullTrackName = NAME, **taste: int) -> int | None:
        """Offer a Track; its properties are those of ``taste``."""
        properties = KeyValues.of({TASTE: taste["taste"]}) if taste else BARE
        self.track = track(name, properties=properties)
        offered = self.pair.server.core.responder.publish_tracks(self.request_id, self.track)
        self.pair.run()
        return offered

    def update(self, **parameters: object) -> m.RequestOk | m.RequestError:
        self.pair.client.core.requester.update(self.request_id, Parameters.of(**parameters))
        self.pair.run()
        return self.pair.client.of(RequestUpdateAnswered)[-1].reply


def test_a_matching_track_is_published_and_its_objects_follow() -> None:
    scene = Scene()
    offered = scene.offer()
    (received,) = scene.pair.client.of(PublishReceived)
    assert (received.request_id, received.full_track_name) == (offered, NAME)
    put_group(scene.track, 0, 2)
    scene.pair.run()
    assert locations(scene.pair.client.events) == [(0, 0), (0, 1)]


def test_the_settings_asked_for_begin_the_subscription_but_no_token() -> None:
    scene = Scene(
        Parameters.of(
            authorization_token=Token.use_value(b"secret"),
            forward=0,
            group_order=GroupOrder.DESCENDING,
            objectid_filter=[RangeFilter(0, ((1, 1),))],
        )
    )
    scene.offer()
    (received,) = scene.pair.client.of(PublishReceived)
    assert received.tokens == ()
    assert received.parameters == Parameters.of(forward=0, group_order=GroupOrder.DESCENDING)
    scene.pair.client.core.requester.update(received.request_id, Parameters.of(forward=1))
    scene.pair.run()
    put_group(scene.track, 0, 3)
    scene.pair.run()
    assert locations(scene.pair.client.events) == [(0, 1)]


def test_a_fin_behind_filtered_objects_makes_no_track_malformed() -> None:
    scene = Scene(Parameters.of(objectid_filter=[RangeFilter(0, ((0, 0),))]))
    scene.offer()
    put_group(scene.track, 0, 3)
    scene.pair.run()
    (received,) = scene.pair.client.of(PublishReceived)
    requester = scene.pair.client.core.requester
    requester.update(received.request_id, Parameters.of(objectid_filter=[RangeFilter(None)]))
    scene.pair.run()
    put_group(scene.track, 1, 2)
    scene.pair.run()
    assert locations(scene.pair.client.events) == [(0, 0), (1, 0), (1, 1)]


@pytest.mark.parametrize(
    ("filters", "taste", "published"),
    [
        ([tasting(1, 5)], 3, True),
        ([tasting(1, 5)], 6, False),
        ([tasting(1, 5), tasting(6, 9, set_id=1)], 6, True),
        ([tasting(1, 5), tasting(7, 9, set_id=1)], 6, False),
    ],
)
def test_a_track_property_filter_selects_tracks(
    filters: list[RangeFilter], taste: int, published: bool
) -> None:
    scene = Scene(Parameters.of(track_property_filter=filters))
    offered = scene.offer(taste=taste)
    assert (offered is not None) == published
    assert len(scene.pair.client.of(PublishReceived)) == published
    assert scene.pair.client.of(TrackSkipped) == [], "it was not matched, and not skipped"


def test_sets_join_track_and_object_filters() -> None:
    asked = Parameters.of(
        track_property_filter=[tasting(1, 5), tasting(6, 9, set_id=1)],
        objectid_filter=[RangeFilter(0, ((0, 0),)), RangeFilter(1, ((1, 1),))],
    )
    scene = Scene(asked)
    scene.offer(taste=7)
    put_group(scene.track, 0, 2)
    scene.pair.run()
    assert locations(scene.pair.client.events) == [(0, 1)]


def test_what_is_not_below_the_prefix_is_not_offered() -> None:
    scene = Scene(prefix=(b"other",))
    assert scene.offer() is None
    scene.pair.server.core.responder.publish_skipped(scene.request_id, NAME)
    scene.pair.run()
    assert scene.pair.client.of(TrackSkipped) == []


def test_a_skipped_track_is_told_with_its_whole_name() -> None:
    scene = Scene()
    scene.pair.server.core.responder.publish_skipped(scene.request_id, NAME)
    scene.pair.run()
    assert scene.pair.client.of(TrackSkipped) == [TrackSkipped(scene.request_id, NAME)]


def test_a_track_that_finds_no_stream_is_skipped() -> None:
    scene = Scene()
    scene.pair.server.credit.bidirectional = 0
    requester = scene.pair.server.core.requester
    for _ in range(MAX_WAITING_REQUESTS):
        requester.track_status(NAME)
    assert scene.offer() is None
    assert scene.pair.client.of(TrackSkipped) == [TrackSkipped(scene.request_id, NAME)]


def test_a_skipped_track_with_a_name_too_long_closes() -> None:
    bench = Bench(Role.CLIENT)
    bench.core.requester.subscribe_tracks((b"a" * 4000,))
    bench.drain()
    bench.say(0, OK, m.PublishSkipped((b"b" * 90,), b"track"))
    assert bench.close is None
    bench.say(0, m.PublishSkipped((b"b" * 90,), b"track12"))
    assert bench.close_code == SessionCode.PROTOCOL_VIOLATION


def test_only_tracks_are_skipped() -> None:
    bench = Bench(Role.CLIENT)
    bench.core.requester.subscribe_namespace(PREFIX)
    bench.drain()
    bench.say(0, OK, m.PublishSkipped((), b"t"))
    assert bench.close_code == SessionCode.PROTOCOL_VIOLATION


def test_what_came_of_it_lives_on_when_the_request_ends() -> None:
    scene = Scene()
    scene.offer()
    scene.pair.client.core.requester.cancel(scene.request_id)
    scene.pair.run()
    assert scene.offer(FullTrackName(NAME.namespace, b"later")) is None
    (received,) = scene.pair.client.of(PublishReceived)
    assert received.full_track_name == NAME
    assert scene.pair.client.of(RequestCancelled) == []


def test_a_publish_that_waits_for_its_stream_ends_with_what_led_to_it() -> None:
    scene = Scene()
    scene.pair.server.credit.bidirectional = 0
    assert scene.offer() is not None
    scene.pair.client.core.requester.cancel(scene.request_id)
    scene.pair.run()
    scene.pair.server.credit.bidirectional = 1
    scene.pair.run()
    assert scene.pair.client.of(PublishReceived) == []
    assert residue(scene.pair.server.core, scene.track) == {}


# Overlap


def test_each_kind_has_prefixes_of_its_own() -> None:
    bench = Bench()
    bench.open(m.SubscribeNamespace(0, PREFIX, NONE))
    bench.open(m.SubscribeTracks(2, PREFIX, NONE))
    assert len(bench.take(SubscribeNamespaceReceived)) == 1
    assert len(bench.take(SubscribeTracksReceived)) == 1
    stream = bench.open(m.SubscribeTracks(4, (*PREFIX, b"below"), NONE))
    (refused,) = bench.replies(stream)
    assert isinstance(refused, m.RequestError)
    assert refused.error_code == RequestCode.PREFIX_OVERLAP


def test_our_own_kinds_do_not_overlap_each_other() -> None:
    requester = Bench(Role.CLIENT).core.requester
    requester.subscribe_namespace(PREFIX)
    requester.subscribe_tracks(PREFIX)
    with pytest.raises(UsageError):
        requester.subscribe_tracks((*PREFIX, b"below"))


@pytest.mark.parametrize("limit", [0, 1])
def test_filters_beyond_what_the_other_side_accepts(limit: int) -> None:
    settings = SessionSettings(max_filter_ranges=limit)
    bench = Bench(settings=settings)
    asked = Parameters.of(track_property_filter=[tasting(1, 2), tasting(4, 5, set_id=1)])
    stream = bench.open(m.SubscribeTracks(0, PREFIX, asked))
    (refused,) = bench.replies(stream)
    assert isinstance(refused, m.RequestError)
    assert refused.error_code == RequestCode.INVALID_FILTER
    pair = SessionPair(server=settings)
    with pytest.raises(UsageError):
        pair.client.core.requester.subscribe_tracks(PREFIX, asked)


# Updates


def test_an_update_changes_what_is_published_later() -> None:
    scene = Scene()
    assert scene.update(forward=0) == OK
    scene.offer()
    (received,) = scene.pair.client.of(PublishReceived)
    assert received.parameters.get(ParameterType.FORWARD) == 0


def test_a_new_prefix_counts_from_its_ok_on() -> None:
    scene = Scene(prefix=(b"elsewhere",))
    assert scene.offer() is None
    assert scene.update(track_namespace_prefix=PREFIX) == OK
    (asked,) = scene.pair.server.of(RequestUpdateReceived)
    assert asked.parameters.get(ParameterType.TRACK_NAMESPACE_PREFIX) == PREFIX
    assert scene.offer() is not None


def test_a_new_prefix_withdraws_what_was_named_below_the_old_one() -> None:
    pair = SessionPair()
    responder = pair.server.core.responder

    def answer(event: Event) -> None:
        if isinstance(event, SubscribeNamespaceReceived):
            responder.accept(event.request_id)
        elif isinstance(event, RequestUpdateReceived):
            responder.accept_update(event.request_id, event.update_id)
            responder.namespace(event.request_id, (b"new",))

    pair.server.on_event = answer
    request_id = pair.client.core.requester.subscribe_namespace((b"old",))
    pair.run()
    for suffix in ((b"a",), (b"b",)):
        responder.namespace(request_id, suffix)
    pair.run()
    before = len(pair.client.events)
    asked = Parameters.of(track_namespace_prefix=(b"new",))
    update_id = pair.client.core.requester.update(request_id, asked)
    pair.run()
    assert pair.client.events[before:] == [
        NamespaceWithdrawn(request_id, (b"a",)),
        NamespaceWithdrawn(request_id, (b"b",)),
        RequestUpdateAnswered(request_id, update_id, OK),
        NamespaceAnnounced(request_id, (b"new",)),
    ]


def test_a_new_prefix_that_overlaps_ends_the_request() -> None:
    pair = SessionPair()

    def answer(event: Event) -> None:
        if isinstance(event, SubscribeNamespaceReceived):
            pair.server.core.responder.accept(event.request_id)

    pair.server.on_event = answer
    requester = pair.client.core.requester
    first = requester.subscribe_namespace((b"a",))
    second = requester.subscribe_namespace((b"b",))
    pair.run()
    overlapping = Parameters.of(track_namespace_prefix=(b"a", b"x"))
    with pytest.raises(UsageError):
        requester.update(second, overlapping)
    # A peer that does not look for itself:
    request = pair.client.core.requests.get(second)
    assert request is not None
    update_id = pair.client.core.requests.update(request, overlapping)
    pair.run()
    (answered,) = pair.client.of(RequestUpdateAnswered)
    assert answered.update_id == update_id
    assert isinstance(answered.reply, m.RequestError)
    assert answered.reply.error_code == RequestCode.PREFIX_OVERLAP
    assert pair.client.of(RequestCancelled) == [RequestCancelled(second, True, None)]
    assert pair.client.core.requests.get(first) is not None


def test_a_prefix_that_is_being_asked_for_is_taken() -> None:
    pair = SessionPair()
    requester = pair.client.core.requester

    def answer(event: Event) -> None:
        if isinstance(event, SubscribeNamespaceReceived):
            pair.server.core.responder.accept(event.request_id)

    pair.server.on_event = answer
    first = requester.subscribe_namespace((b"a",))
    pair.run()
    requester.update(first, Parameters.of(track_namespace_prefix=(b"b",)))
    for prefix in ((b"a",), (b"b",)):
        with pytest.raises(UsageError):
            requester.subscribe_namespace(prefix)


def test_updates_behind_one_that_is_judged_wait_and_are_answered_in_order() -> None:
    settings = SessionSettings(max_request_updates=3)
    bench = Bench(settings=settings)
    stream = bench.open(m.PublishNamespace(0, PREFIX, NONE))
    bench.core.responder.accept(0)
    bench.drain()
    bench.replies(stream)
    token = Parameters.of(authorization_token=Token.use_value(b"fresh"))
    bench.say(stream, m.RequestUpdate(2, token), m.RequestUpdate(4, NONE))
    (asked,) = bench.take(RequestUpdateReceived)
    assert [value.value for value in asked.tokens] == [b"fresh"]
    assert bench.replies(stream) == []
    with pytest.raises(UsageError):
        bench.core.responder.accept_update(0, 4)
    bench.core.responder.accept_update(0, 2)
    bench.drain()
    assert bench.replies(stream) == [OK, OK]
    with pytest.raises(UsageError):
        bench.core.responder.accept_update(0, 2)
    bench.say(
        stream, m.RequestUpdate(6, token), *(m.RequestUpdate(8 + 2 * n, NONE) for n in (0, 1))
    )
    assert bench.close is None
    bench.say(stream, m.RequestUpdate(12, NONE))
    assert bench.close_code == SessionCode.TOO_MANY_REQUEST_UPDATES


def test_a_token_that_is_refused_ends_an_announcement() -> None:
    bench = Bench()
    stream = bench.open(m.PublishNamespace(0, PREFIX, NONE))
    bench.core.responder.accept(0)
    token = Parameters.of(authorization_token=Token.use_value(b"bad"))
    bench.say(stream, m.RequestUpdate(2, token))
    error = RequestError("expired", RequestCode.EXPIRED_AUTH_TOKEN)
    bench.core.responder.refuse_update(0, 2, error)
    bench.core.responder.refuse_update(0, 2, error)
    bench.drain()
    ok, refused = bench.replies(stream)
    assert ok == OK
    assert isinstance(refused, m.RequestError)
    assert stream in bench.fins
    assert bench.take(RequestCancelled) == [RequestCancelled(0, False, None)]
