"""PUBLISH_DONE, and the streams that it overtakes (MOQT §9.9)."""

from __future__ import annotations

import pytest

from kvcs.errors import UsageError
from kvcs.moqt import messages as m
from kvcs.moqt.actions import Send
from kvcs.moqt.errors import PublishDoneCode, SessionCode, StreamCode
from kvcs.moqt.events import (
    RequestCancelled,
    SubscriptionEnded,
)
from kvcs.moqt.framing import MessageReader
from kvcs.moqt.names import MAX_VI64
from kvcs.moqt.streams import PaddingHeader
from kvcs.testing.residue import residue
from kvcs.testing.tracks import (
    end_track,
    locations,
    put,
    put_group,
)
from tests.unit.moqt.subscriptions import (
    BARE,
    NONE,
    ends,
    served,
    stream_of,
    subscriber,
)

# PUBLISH_DONE


def test_stream_count_has_every_stream_and_the_end_follows_the_last() -> None:
    pair, source, request_id = served()
    for group in range(3):
        put_group(source, group, 1)
    end_track(source, 3)
    pair.run()
    pair.advance(1.0)
    done = [
        message
        for action in pair.server.actions
        for message in _decoded(action)
        if isinstance(message, m.PublishDone)
    ]
    assert done == [m.PublishDone(0x2, 4, "")]
    assert pair.client.of(SubscriptionEnded) == [SubscriptionEnded(request_id, 0x2, "", True)]


def _decoded(action: object) -> list[m.Message]:
    if isinstance(action, Send) and not action.stream_id & 2:
        return MessageReader().feed(b"".join(action.data))
    return []


@pytest.mark.parametrize("reason", ["", "input too long"])
def test_an_abandoned_track_ends_with_its_status_and_reason_at_once(reason: str) -> None:
    pair, source, request_id = served()
    put(source, 0, 0)
    pair.run()
    source.end(PublishDoneCode.INTERNAL_ERROR, reason, abandoned=True)
    pair.run()
    assert ends(pair) == [StreamCode.INTERNAL_ERROR]
    assert pair.client.of(SubscriptionEnded) == [SubscriptionEnded(request_id, 0x0, reason, True)]


def test_publish_done_that_overtook_streams_waits_for_them() -> None:
    bench = subscriber()
    bench.say(0, m.PublishDone(0x2, 2, ""), fin=True)
    bench.uni(stream_of(0, 0), fin=True)
    bench.advance(1.9)
    assert bench.take(SubscriptionEnded) == []
    bench.uni(stream_of(1, 0), fin=True)
    assert bench.take(SubscriptionEnded) == [SubscriptionEnded(0, 0x2, "", True)]
    assert locations(bench.events) == [(0, 0), (1, 0)]
    assert 0 in bench.fins
    bench.advance(9.0)
    assert bench.take(SubscriptionEnded) == []
    assert residue(bench.core) == {}


def test_publish_done_waits_no_longer_than_streams_are_likely() -> None:
    bench = subscriber()
    bench.say(0, m.PublishDone(0x2, 2, ""), fin=True)
    bench.uni(stream_of(0, 0), fin=True)
    bench.advance(2.1)
    assert bench.take(SubscriptionEnded) == [SubscriptionEnded(0, 0x2, "", False)]
    assert residue(bench.core) == {}


def test_publish_done_waits_for_a_stream_that_is_open() -> None:
    bench = subscriber()
    octets = stream_of(0, 0)
    stream = bench.uni(octets[:-1])
    bench.say(0, m.PublishDone(0x2, 9, ""), fin=True)
    bench.advance(7.0)
    assert bench.take(SubscriptionEnded) == []
    bench.data(stream, octets[-1:], fin=True)
    bench.advance(2.0)
    assert bench.take(SubscriptionEnded) == [SubscriptionEnded(0, 0x2, "", False)]


def test_an_unknown_stream_count_waits_by_time() -> None:
    bench = subscriber()
    bench.say(0, m.PublishDone(0x2, MAX_VI64, ""), fin=True)
    bench.advance(1.9)
    bench.uni(stream_of(0, 0), fin=True)
    bench.advance(1.9)
    assert bench.take(SubscriptionEnded) == []
    bench.advance(0.2)
    assert bench.take(SubscriptionEnded) == [SubscriptionEnded(0, 0x2, "", False)]


def test_publish_done_waits_while_streams_of_others_go_on_and_not_for_ever() -> None:
    bench = subscriber()
    bench.say(0, m.PublishDone(0x2, 1, ""), fin=True)
    padding = bench.uni(PaddingHeader().encode())
    for _ in range(19):
        bench.advance(1.5)
        bench.data(padding, bytes(1))
        assert bench.take(SubscriptionEnded) == []
    for _ in range(3):
        bench.advance(1.5)
        bench.data(padding, bytes(1))
    assert bench.take(SubscriptionEnded) == [SubscriptionEnded(0, 0x2, "", False)]


def test_more_streams_than_the_count_are_forgiven() -> None:
    bench = subscriber()
    for group in range(3):
        bench.uni(stream_of(group, 0), fin=True)
    bench.say(0, m.PublishDone(0x2, 2, ""), fin=True)
    assert bench.take(SubscriptionEnded) == [SubscriptionEnded(0, 0x2, "", True)]


def test_an_unknown_status_of_publish_done_ends_the_subscription_only() -> None:
    bench = subscriber()
    bench.say(0, m.PublishDone(0x11C, 0, "grease"), fin=True)
    assert bench.take(SubscriptionEnded) == [SubscriptionEnded(0, 0x11C, "grease", True)]
    assert bench.close is None


def test_an_ended_subscription_takes_no_update() -> None:
    bench = subscriber()
    bench.say(0, m.PublishDone(0x2, 1, ""))
    with pytest.raises(UsageError):
        bench.core.requester.update(0, NONE)


def test_an_answer_to_an_update_behind_publish_done_closes() -> None:
    bench = subscriber()
    bench.core.requester.update(0, NONE)
    bench.drain()
    bench.say(0, m.PublishDone(0x2, 1, ""), m.RequestOk(NONE, BARE))
    assert bench.close_code == SessionCode.PROTOCOL_VIOLATION


def test_fin_without_publish_done_is_a_failed_subscription() -> None:
    bench = subscriber()
    bench.data(0, b"", fin=True)
    assert bench.take(RequestCancelled) == [RequestCancelled(0, True, None)]
    assert residue(bench.core) == {}


def test_fin_inside_a_message_closes() -> None:
    bench = subscriber(None)
    bench.data(0, b"\x04\x00", fin=True)
    assert bench.close_code == SessionCode.PROTOCOL_VIOLATION
