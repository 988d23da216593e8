"""Delivery timeouts: what is too late is given up, with a reset (MOQT §5.2)."""

from __future__ import annotations

import pytest

from kvcs.moqt.errors import StreamCode
from kvcs.moqt.events import (
    DatagramReceived,
    DataStreamEnded,
    DataStreamOpened,
    Event,
    SubscribeReceived,
    SubscriptionEnded,
)
from kvcs.moqt.objects import ObjectHeader
from kvcs.moqt.parameters import Parameters
from kvcs.moqt.properties import KeyValues, Property
from kvcs.moqt.sending.timeouts import AskedTimeouts, Timeouts
from kvcs.moqt.track.store import Track
from kvcs.testing.pair import SessionPair
from kvcs.testing.residue import residue
from kvcs.testing.tracks import NAME, locations, put, put_group, track

OBJECT, SUBGROUP = Property.OBJECT_DELIVERY_TIMEOUT, Property.SUBGROUP_DELIVERY_TIMEOUT


def served(source: Track, **asked: int) -> SessionPair:
    """A subscription whose publisher has no credit for Objects."""
    pair = SessionPair()

    def answer(event: Event) -> None:
        if isinstance(event, SubscribeReceived):
            pair.server.core.responder.accept_subscribe(event.request_id, source, pair.now)

    pair.server.on_event = answer
    pair.client.core.requester.subscribe(NAME, Parameters.of(**asked))
    pair.run()
    pair.server.credit.object_octets = 0
    return pair


def let_go(pair: SessionPair, after: float) -> None:
    """Credit comes after some time."""
    pair.advance(after)
    pair.server.credit.object_octets = 1 << 40
    pair.run()


# Which value counts


@pytest.mark.parametrize(
    ("asked", "of_track", "of_object", "seconds"),
    [
        (0, None, None, None),
        (500, None, None, 0.5),
        (0, 700, None, 0.7),
        (500, 700, None, 0.5),
        (900, 700, None, 0.7),
        (0, 700, 800, 0.8),
        (600, 700, 800, 0.6),
        (0, 700, 0, None),
        (0, 0, None, None),
    ],
)
@pytest.mark.parametrize("which", [OBJECT, SUBGROUP])
def test_the_smaller_of_the_publishers_and_the_subscribers_value_counts(
    which: Property,
    asked: int,
    of_track: int | None,
    of_object: int | None,
    seconds: float | None,
) -> None:
    properties = KeyValues() if of_track is None else KeyValues.of({which: of_track})
    first = b"" if of_object is None else KeyValues.of({which: of_object}).write()
    source = track(properties=properties)
    source.publish(ObjectHeader(0, 0, 0, 0, properties=first), (), 0.0)
    name = which.name.lower()
    timeouts = (
        AskedTimeouts()
        .updated(Parameters.of(**{name: asked}))
        .updated(Parameters())
        .of(source, source.groups[0].subgroups[0])
    )
    expected = Timeouts(object=seconds) if which is OBJECT else Timeouts(subgroup=seconds)
    assert timeouts == expected
    assert timeouts.datagram == seconds


def test_properties_of_an_object_that_is_not_the_first_do_not_count() -> None:
    source = track()
    late = KeyValues.of({OBJECT: 5}).write()
    source.publish(ObjectHeader(0, 0, 0, 0, properties=b"\x78\x01"), (), 0.0)
    source.publish(ObjectHeader(0, 1, 0, 0, properties=late), (), 0.0)
    subgroup = source.groups[0].subgroups[0]
    assert AskedTimeouts().of(source, subgroup) == Timeouts()
    subgroup.from_start = False
    assert AskedTimeouts().of(source, subgroup) == Timeouts()


def test_a_key_id_among_immutable_properties_is_no_timeout() -> None:
    key_id = 2**32 + 1  # fifty days, if it were one
    inner = KeyValues.of({OBJECT: key_id, SUBGROUP: 700}).write()
    source = track()
    first = KeyValues.of({Property.IMMUTABLE_PROPERTIES: inner}).write()
    source.publish(ObjectHeader(0, 0, 0, 0, properties=first), (), 0.0)
    timeouts = AskedTimeouts().of(source, source.groups[0].subgroups[0])
    assert timeouts == Timeouts(subgroup=0.7)


# What becomes of it


def test_an_object_that_waited_too_long_resets_its_stream() -> None:
    source = track()
    pair = served(source, object_delivery_timeout=500)
    put(source, 0, 0, now=pair.now)
    put(source, 1, 0, now=pair.now + 1.0)
    let_go(pair, 1.0)
    assert locations(pair.client.events) == [(1, 0)]
    put(source, 0, 1, now=pair.now)
    pair.run()
    assert locations(pair.client.events) == [(1, 0)]


def test_an_object_within_its_time_is_sent_whole() -> None:
    source = track()
    pair = served(source, object_delivery_timeout=500)
    put_group(source, 0, 1)
    let_go(pair, 0.5)
    assert locations(pair.client.events) == [(0, 0)]


def test_a_timed_out_stream_that_is_open_is_reset_with_its_code() -> None:
    source = track()
    pair = served(source, object_delivery_timeout=500)
    pair.server.credit.object_octets = 1 << 40
    put(source, 0, 0)
    pair.run()
    pair.server.credit.object_octets = 0
    put(source, 0, 1)
    let_go(pair, 1.0)
    assert locations(pair.client.events) == [(0, 0)]
    assert [event.reset_code for event in pair.client.of(DataStreamEnded)] == [
        StreamCode.DELIVERY_TIMEOUT
    ]


@pytest.mark.parametrize("seconds", [0.5, 12.0])
def test_a_whole_subgroup_is_given_up_after_its_time(seconds: float) -> None:
    source = track()
    pair = served(source, subgroup_delivery_timeout=int(seconds * 1000))
    pair.server.credit.object_octets = 1 << 40
    put(source, 0, 0)
    pair.run()
    pair.server.credit.object_octets = 0
    put_group(source, 1, 1)
    pair.advance(seconds * 3)
    assert pair.client.of(DataStreamEnded) == []  # not whole: no time runs
    put(source, 0, 1, now=pair.now)
    source.finish_subgroup(0, 0)
    pair.advance(seconds - 0.1)
    assert pair.client.of(DataStreamEnded) == []
    pair.advance(0.2)
    assert [event.reset_code for event in pair.client.of(DataStreamEnded)] == [
        StreamCode.DELIVERY_TIMEOUT
    ]
    let_go(pair, 0.0)
    assert locations(pair.client.events) == [(0, 0)]


def test_an_update_sets_the_timeouts_of_what_is_open() -> None:
    source = track()
    pair = served(source)
    put(source, 0, 0)
    update = Parameters.of(object_delivery_timeout=500)
    pair.client.core.requester.update(0, update)
    let_go(pair, 1.0)
    assert pair.client.of(DataStreamOpened) == []


def test_a_datagram_that_is_late_is_dropped() -> None:
    source = track()
    pair = served(source, subgroup_delivery_timeout=500)
    for object_id, born in ((0, 0.0), (1, 0.9)):
        source.take_datagram(ObjectHeader(0, object_id, None, 0, payload_length=1), b"x", born)
    let_go(pair, 1.0)
    got = [event.datagram.object_id for event in pair.client.of(DatagramReceived)]
    assert got == [1]


def test_a_timeout_of_centuries_leaves_nothing_behind() -> None:
    source = track()
    pair = served(source, subgroup_delivery_timeout=2**63)
    put_group(source, 0, 1)
    let_go(pair, 0.0)
    source.end()
    pair.advance(20.0)
    assert len(pair.client.of(SubscriptionEnded)) == 1
    assert pair.server.core.next_timer() is None
    assert residue(pair.server.core, source) == {}
