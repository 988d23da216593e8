"""Streams that wait for credit are reported once for each standstill."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import structlog
from structlog.testing import capture_logs

from kvcs.quic.stream_wait import LONG_SECONDS, StreamWait
from tests.unit.quic.pair import VirtualClock


class Loop:
    """What a `StreamWait` asks of a loop, on a clock that moves when told."""

    def __init__(self) -> None:
        self.clock = VirtualClock()

    def call_later(self, delay: float, callback: Callable[[], object]) -> Any:
        return self.clock.call_at(self.clock.time() + delay, callback)


def watching() -> tuple[StreamWait, VirtualClock]:
    loop = Loop()
    return StreamWait(cast(asyncio.AbstractEventLoop, loop), structlog.get_logger()), loop.clock


def test_a_second_without_a_new_stream_is_reported_once() -> None:
    wait, clock = watching()
    with capture_logs() as logs:
        wait.look(5)
        clock.run_for(LONG_SECONDS / 2)
        wait.look(7)
        clock.run_for(10 * LONG_SECONDS)
        wait.look(7)
        clock.run_for(10 * LONG_SECONDS)
    [warning] = logs
    assert warning == {
        "event": "streams_wait_for_credit",
        "waiting": 7,
        "seconds": LONG_SECONDS,
        "log_level": "warning",
    }


def test_streams_that_open_in_time_are_not_reported() -> None:
    wait, clock = watching()
    with capture_logs() as logs:
        for stream_id in range(3, 83, 4):
            wait.look(5)
            clock.run_for(LONG_SECONDS * 0.9)
            wait.sent(stream_id)
        wait.look(0)
        clock.run_for(10.0)
    assert logs == []


def test_octets_on_streams_that_are_open_already_do_not_count() -> None:
    wait, clock = watching()
    wait.sent(7)
    with capture_logs() as logs:
        wait.look(1)
        clock.run_for(LONG_SECONDS * 0.9)
        wait.sent(3)
        wait.sent(7)
        clock.run_for(LONG_SECONDS * 0.2)
    assert len(logs) == 1


def test_each_standstill_is_reported_and_an_end_is_not() -> None:
    wait, clock = watching()
    with capture_logs() as logs:
        for stream_id in (3, 7):
            wait.look(1)
            clock.run_for(2 * LONG_SECONDS)
            wait.sent(stream_id)
        wait.look(1)
        wait.stop()
        clock.run_for(2 * LONG_SECONDS)
    assert len(logs) == 2
