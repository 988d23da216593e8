"""What one data track's receiver makes of the marks on a fetch or fill stream (MOQT 11.4.1)."""

from __future__ import annotations

from typing import Any, cast

import pytest

from kvcs.kv import DataTrack
from kvcs.moqt import events
from kvcs.moqt.data import FetchHeader
from kvcs.moqt.intervals import FIRST, Span
from kvcs.moqt.names import Location
from kvcs.moqt.objects import RangeKind, RangeMarked
from kvcs.subscriber.receiver import TrackReceiver
from tests.unit.kv.toy import K0, TOY


class Taker:
    """Notes what was lost."""

    def __init__(self) -> None:
        self.lost_spans: list[tuple[DataTrack, Span]] = []

    def lost(self, track: DataTrack, span: Span, reason: str, *, late: bool = False) -> None:
        self.lost_spans.append((track, span))


def marked(*marks: tuple[RangeKind, Location]) -> list[tuple[DataTrack, Span]]:
    """What is lost while the stream that says so is still open."""
    taker = Taker()
    receiver = TrackReceiver(cast(Any, None), TOY.ledger(), K0, cast(Any, taker))
    receiver.take(events.DataStreamOpened(0, 3, FetchHeader(0)))
    receiver.take(events.ObjectsReceived(0, 3, [RangeMarked(*mark) for mark in marks]))
    assert receiver.open_streams == 1
    return taker.lost_spans


@pytest.mark.parametrize("kind", [RangeKind.UNKNOWN, RangeKind.TIMED_OUT])
def test_what_the_peer_does_not_have_is_lost_at_once(kind: RangeKind) -> None:
    first, second = Location(1, 1), Location(2, 2)
    assert marked((kind, first), (kind, second)) == [
        (K0, Span(FIRST, first)),
        (K0, Span(Location(1, 2), second)),
    ]


def test_what_does_not_exist_says_nothing_before_the_stream_has_ended() -> None:
    assert marked((RangeKind.NON_EXISTENT, Location(1, 1))) == []
