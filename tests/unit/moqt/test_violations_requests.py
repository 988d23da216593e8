"""Violations within requests: IDs, replies, updates, namespaces, Track Aliases, properties."""

from __future__ import annotations

import pytest

from kvcs.moqt.events import SubscribeReceived, SubscriptionEnded
from kvcs.moqt.filters import LocationFilter
from kvcs.moqt.limits import Limit
from kvcs.moqt.names import FullTrackName
from kvcs.moqt.parameters import Parameters
from kvcs.moqt.settings import Role, SessionSettings
from kvcs.moqt.wire import encode_vi64 as vi
from kvcs.testing.bench import Bench
from kvcs.testing.tracks import NAME as FULL_NAME
from kvcs.testing.tracks import put, track
from tests.unit.moqt.violations import (
    FETCH_OK,
    NAME,
    NONE,
    NOTIFY,
    PREFIX,
    REQUEST_OK,
    SUBSCRIBE_OK,
    Case,
    Do,
    announced,
    answer,
    ask,
    asked,
    closes,
    fetch,
    fetched,
    frame,
    namespace,
    params,
    prefixed,
    refuses,
    request_error,
    status_asked,
    subscribe,
    subscribed,
    unsupported,
    update,
    watching,
)

CLIENT = Role.CLIENT
PROPERTIES = b"\x04\x05"
DONE = frame(0x0B, b"\2\0", prefixed(b""))


def requests(*octets: bytes) -> Do:
    """A request stream of the peer for each."""

    def do(bench: Bench) -> int:
        stream_ids = [ask(each)(bench) for each in octets]
        assert stream_ids[-1] is not None
        return stream_ids[-1]

    return do


def served(*octets: bytes) -> Do:
    """A SUBSCRIBE of the peer that was accepted, and what the peer says then."""

    def do(bench: Bench) -> int:
        stream_id = bench.bidi()
        bench.data(stream_id, subscribe())
        bench.core.responder.accept_subscribe(0, track(), bench.now)
        bench.drain()
        bench.replies(stream_id)
        bench.data(stream_id, b"".join(octets))
        return stream_id

    return do


def fetch_of(objects: int, *values: tuple[int, bytes]) -> Do:
    """A FETCH of a Track with so many Objects in Group 0."""

    def do(bench: Bench) -> int:
        source = track()
        for object_id in range(objects):
            put(source, 0, object_id)
        stream_id = bench.bidi()
        bench.data(stream_id, fetch(*values))
        bench.core.responder.accept_fetch(0, source, bench.now)
        bench.drain()
        return stream_id

    return do


def fetch_from(bench: Bench, *replies: bytes) -> int:
    """A FETCH of the session from 5/3."""
    filter_ = LocationFilter.absolute_start(5, 3)
    bench.core.requester.fetch(FULL_NAME, Parameters.of(location_filter=filter_))
    return asked(bench, replies)


def second_track(bench: Bench) -> None:
    """Two Tracks are given the same alias."""
    subscribed(bench, SUBSCRIBE_OK)
    other = FullTrackName((b"kvcs-1", b"test"), b"v.raw.s0")
    bench.core.requester.subscribe(other, Parameters())
    bench.drain()
    bench.data(4, SUBSCRIBE_OK)


def two_updates(bench: Bench) -> None:
    """Each waits behind a reply that the request is still owed."""
    stream_id = bench.bidi()
    bench.data(stream_id, subscribe() + update(request_id=2) + update(request_id=4))


def with_properties(*octets: bytes) -> bytes:
    return frame(0x04, vi(9), NONE, *octets)


CASES = [
    Case("request-id", "odd of a client", ask(subscribe(request_id=1)), closes(0x4)),
    Case("request-id", "even of a server", ask(subscribe(request_id=2)), closes(0x4), role=CLIENT),
    Case("request-id", "twice", requests(subscribe(), fetch()), closes(0x4)),
    Case("request-id", "of an update", served(update(request_id=0)), closes(0x4)),
    Case("request-id", "odd of an update", served(update(request_id=3)), closes(0x4)),
    # Track Properties
    *(
        Case("ok-properties", label, answer(begin, reply), closes(0x3), role=CLIENT)
        for label, begin, reply in (
            ("PUBLISH_NAMESPACE_OK", announced, frame(0x07, NONE, PROPERTIES)),
            ("SUBSCRIBE_NAMESPACE_OK", watching, frame(0x07, NONE, PROPERTIES)),
        )
    ),
    *(
        Case(
            "track-range",
            label,
            answer(subscribed, with_properties(octets)),
            closes(0x3),
            role=CLIENT,
        )
        for label, octets in (
            ("DYNAMIC_GROUPS", b"\x30\2"),
            ("DEFAULT_PUBLISHER_GROUP_ORDER 0", b"\x22\0"),
            ("DEFAULT_PUBLISHER_GROUP_ORDER 3", b"\x22\3"),
            ("within IMMUTABLE_PROPERTIES", b"\x0b\2\x30\2"),
        )
    ),
    Case(
        "mandatory",
        "SUBSCRIBE_OK",
        answer(subscribed, with_properties(vi(0x4000), b"\1")),
        unsupported,
        role=CLIENT,
    ),
    Case(
        "mandatory",
        "FETCH_OK",
        answer(
            fetched,
            FETCH_OK[:1]
            + len(b"\0\x09\x09\0" + vi(0x7FFE) + b"\1").to_bytes(2, "big")
            + b"\0\x09\x09\0"
            + vi(0x7FFE)
            + b"\1",
        ),
        unsupported,
        role=CLIENT,
    ),
    Case(
        "mandatory",
        "within IMMUTABLE_PROPERTIES",
        answer(subscribed, with_properties(b"\x0b" + prefixed(vi(0x4000) + b"\1"))),
        unsupported,
        role=CLIENT,
    ),
    # Updates and notices
    Case(
        "update-side",
        "on TRACK_STATUS",
        ask(frame(0x0D, vi(0), NAME, NONE) + update()),
        closes(0x3),
    ),
    Case(
        "update-side",
        "of a subscription by its publisher",
        answer(subscribed, SUBSCRIBE_OK, update(request_id=1)),
        closes(0x3),
        role=CLIENT,
    ),
    Case(
        "update-side",
        "of a FETCH by its publisher",
        answer(fetched, FETCH_OK, update(request_id=1)),
        closes(0x3),
        role=CLIENT,
    ),
    Case(
        "update-side",
        "of a namespace by who accepted it",
        answer(announced, REQUEST_OK, update(request_id=1)),
        closes(0x3),
        role=CLIENT,
    ),
    Case(
        "update-count",
        "two where one may wait",
        two_updates,
        closes(0x1B),
        settings=SessionSettings(max_request_updates=1),
    ),
    Case("notify-side", "of the subscriber", served(NOTIFY), closes(0x3)),
    Case("notify-side", "on FETCH", answer(fetched, FETCH_OK, NOTIFY), closes(0x3), role=CLIENT),
    Case(
        "notify-side",
        "on PUBLISH_NAMESPACE",
        answer(announced, REQUEST_OK, NOTIFY),
        closes(0x3),
        role=CLIENT,
    ),
    Case(
        "notify-side", "before SUBSCRIBE_OK", answer(subscribed, NOTIFY), closes(0x3), role=CLIENT
    ),
    # Replies
    *(
        Case("first-reply", label, answer(watching, reply), closes(0x3), role=CLIENT)
        for label, reply in (
            ("NAMESPACE", frame(0x08, namespace(b"a"))),
            ("NAMESPACE_DONE", frame(0x0E, namespace(b"a"))),
            ("SUBSCRIBE_OK", SUBSCRIBE_OK),
            ("PUBLISH_SKIPPED", frame(0x0F, namespace(b"a"), prefixed(b"t"))),
        )
    ),
    Case(
        "done-first",
        "never named",
        answer(watching, REQUEST_OK, frame(0x0E, namespace(b"a"))),
        closes(0x3),
        role=CLIENT,
    ),
    Case(
        "done-first",
        "twice",
        answer(
            watching, REQUEST_OK, frame(0x08, namespace(b"a")), frame(0x0E, namespace(b"a")) * 2
        ),
        closes(0x3),
        role=CLIENT,
    ),
    *(
        Case("two-replies", label, answer(begin, *replies), closes(0x3), role=CLIENT)
        for label, begin, replies in (
            ("SUBSCRIBE_OK", subscribed, (SUBSCRIBE_OK, SUBSCRIBE_OK)),
            ("OK and error", subscribed, (SUBSCRIBE_OK, request_error(0))),
            ("errors", subscribed, (request_error(0), request_error(0))),
            ("PUBLISH_DONE", subscribed, (SUBSCRIBE_OK, frame(0x0B, b"\2\5\0"), DONE)),
            ("FETCH_OK", fetched, (FETCH_OK, FETCH_OK)),
            ("TRACK_STATUS_OK", status_asked, (REQUEST_OK, REQUEST_OK)),
            ("PUBLISH_NAMESPACE_OK", announced, (REQUEST_OK, REQUEST_OK)),
            ("OK of another kind", subscribed, (REQUEST_OK,)),
        )
    ),
    Case("track-alias", "of another Track", second_track, closes(0x5), role=CLIENT),
    # Fetch
    Case("fetch-range", "nothing published", fetch_of(0), refuses(0x11)),
    Case("fetch-range", "behind the Largest Object", fetch_of(2, (0x21, b"\2\0\2")), refuses(0x11)),
    Case("fetch-range", "Next Object", fetch_of(2, (0x21, b"\5")), refuses(0x11)),
    Case("fetch-range", "ends before its start", fetch_of(5, (0x21, b"\4\0\3\0\1")), refuses(0x11)),
    Case(
        "fetch-ok-range",
        "object",
        answer(fetch_from, frame(0x18, b"\0\5\2\0")),
        closes(0x3),
        role=CLIENT,
    ),
    Case(
        "fetch-ok-range",
        "group",
        answer(fetch_from, frame(0x18, b"\1\4\x09\0")),
        closes(0x3),
        role=CLIENT,
    ),
    Case(
        "fetch-ok-range",
        "End Of Track 2",
        answer(fetch_from, frame(0x18, b"\2\6\0\0")),
        closes(0x3),
        role=CLIENT,
    ),
]


@params(CASES)
def test_a_violation_has_its_consequence(case: Case) -> None:
    case.run()


ROWS_APART = {"stream-count"}
"""Rows that a test of this file covers by itself."""


def test_stream_count_that_is_too_small_is_tolerated_and_counted() -> None:
    """Publishers forget their fills in it: closing would punish subscribers who lack nothing."""
    bench = Bench(CLIENT)
    subscribed(bench, SUBSCRIBE_OK)
    for group in range(2):
        bench.uni(b"\x50\x09" + vi(group) + b"\0" + b"\0\1x", fin=True)
    bench.data(0, frame(0x0B, b"\2\1", prefixed(b"")))
    assert bench.close is None
    assert [ended.every_stream_seen for ended in bench.take(SubscriptionEnded)] == [True]
    assert bench.core.limits[Limit.STREAM_COUNT] == 1


def test_a_namespace_with_a_dot_alone_or_of_the_session_never_reaches_the_application() -> None:
    for first in (b".", b".session"):
        bench = Bench()
        name = namespace(first, b"a") + prefixed(b"t")
        asked_ = [
            ask(subscribe(name=name))(bench),
            ask(fetch(request_id=2, name=name))(bench),
            ask(frame(0x0D, vi(4), name, NONE))(bench),
            ask(frame(0x06, vi(6), namespace(first), NONE))(bench),
            ask(frame(0x50, vi(8), namespace(first), NONE))(bench),
        ]
        for stream_id in asked_:
            refuses(0x10)(bench, stream_id)
        assert not bench.events[1:]
    bench = Bench()
    ask(subscribe(name=namespace(b".other") + prefixed(b"t")))(bench)
    assert bench.take(SubscribeReceived)


@pytest.mark.parametrize("limit", [0, 3])
def test_updates_within_their_number_are_answered(limit: int) -> None:
    bench = Bench(settings=SessionSettings(max_request_updates=limit))
    stream_id = bench.bidi()
    ids = (2, 4, 6)
    bench.data(stream_id, subscribe() + b"".join(update(request_id=one) for one in ids))
    bench.core.responder.accept_subscribe(0, track(), bench.now)
    bench.drain()
    assert bench.close is None
    assert len(bench.replies(stream_id)) == 4


def test_prefix_octets_are_those_of_the_test_name() -> None:
    assert NAME.startswith(b"\2" + PREFIX[1:])
