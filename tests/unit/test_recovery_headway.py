"""How long recovery goes on: beyond its time only while what was lost keeps coming fast enough."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvcs.kv import DataTrack, Ledger
from kvcs.moqt.intervals import EVERYTHING
from kvcs.recovery import Recovery
from tests.builders import QUICK
from tests.unit.kv.toy import Toy, fill, toy_publication
from tests.virtual import virtual

TOY = toy_publication()
WINDOW = 1.0
"""Seconds that recovery has at first."""

SETTINGS = replace(QUICK, least_recovery=WINDOW, retry_pause=0.02)


class Reader:
    """A retrieval that lacks everything, whose one session answers no FETCH; a test brings what
    comes."""

    def __init__(self, toy: Toy, deadline: float) -> None:
        self.ledger: Ledger = toy.ledger()
        self.deadline_at = asyncio.get_running_loop().time() + deadline
        self.failed_at: float | None = None
        self.fetches = 0
        self.namespace = ()
        self.last_means = None
        self.handlers: list[Callable[[Any], None]] = []
        self.receivers: list[Any] = []
        self._began = asyncio.get_running_loop().time()
        core = SimpleNamespace(requester=SimpleNamespace(fetch=self._fetched))
        self.connection = SimpleNamespace(
            is_open=True, peer="a test", core=core, handle=self._handle, cancel=lambda _: None
        )
        self.sources = [self.connection]
        self.replacements = SimpleNamespace(over=self._none_there, may_still_come=False)
        self.recovery = Recovery(cast(Any, self), SETTINGS)
        self.recovered = asyncio.Event().set

    def _fetched(self, *_: object) -> int:
        self.fetches += 1
        return self.fetches

    def _handle(self, request_id: int, take: Callable[[Any], None]) -> None:
        self.handlers.append(take)

    def receiver(self, *_: object, **__: object) -> Any:
        self.receivers.append(Octets())
        return self.receivers[-1]

    def comes_of_itself(self, track: DataTrack) -> bool:
        return False

    async def _none_there(self, *_: object) -> None:
        """No other publication has a whole segment."""

    async def twins(self, connection: object) -> list[Any]:
        return []

    def recovery_failed(self, reason: str, cause: object = None) -> None:
        assert f"{WINDOW:g} s" in reason
        self.failed_at = asyncio.get_running_loop().time() - self._began
        self.recovery.stop()


class Octets:
    """A receiver that takes octets, which make no whole Object; `None` ends its FETCH."""

    octets = taken = 0

    def take(self, event: int | None, ended: Callable[[str | None], None]) -> None:
        if event is None:
            ended("it ended")
        else:
            self.octets += event

    def drop(self) -> None:
        """Nothing is on its way."""


def objects(toy: Toy) -> Iterator[Any]:
    """Keys of all Objects, earlier layers first."""
    return iter(sorted(toy.objects, key=lambda key: (key[1], key[0])))


async def bring(reader: Reader, every: float, count: int) -> None:
    """One Object after the other."""
    for key in list(objects(TOY))[:count]:
        await asyncio.sleep(every)
        fill(reader.ledger, TOY, key.__eq__)


def reading(deadline: float) -> Reader:
    """A retrieval whose tracks are all lost now."""
    reader = Reader(TOY, deadline)
    for track in reader.ledger.tracks:
        reader.recovery.lost(track, EVERYTHING, "a test")
    return reader


@virtual
async def test_what_keeps_coming_is_waited_for_beyond_the_time_for_recovery() -> None:
    reader = reading(deadline=60.0)
    await bring(reader, every=0.9 * WINDOW, count=24)
    assert reader.ledger.whole and reader.failed_at is None
    reader.recovery.stop()


@virtual
@pytest.mark.parametrize("count", [0, 1, 5, 23])
async def test_it_ends_as_soon_as_nothing_has_come_for_that_time(count: int) -> None:
    reader = reading(deadline=60.0)
    await bring(reader, every=0.4 * WINDOW, count=count)
    await asyncio.sleep(10.0)
    assert reader.failed_at is not None
    # Something came within the window before the last one, and nothing in the last one.
    last = count * 0.4 * WINDOW
    assert last + WINDOW - 0.01 <= reader.failed_at <= last + 2 * WINDOW + 0.01


@virtual
@pytest.mark.parametrize(("deadline", "ends"), [(30.0, False), (7.0, False), (6.5, True)])
async def test_it_ends_early_where_no_likely_rate_would_do_by_the_deadline(
    deadline: float, ends: bool
) -> None:
    # One of 24 came in the first second: at four times that rate the others take 5.75 s.
    reader = reading(deadline)
    fill(reader.ledger, TOY, next(objects(TOY)).__eq__)
    await asyncio.sleep(WINDOW + 0.5)
    assert (reader.failed_at is not None) is ends
    reader.recovery.stop()


@virtual
async def test_another_publication_that_is_still_produced_is_waited_for() -> None:
    reader = reading(deadline=60.0)
    reader.replacements.may_still_come = True
    await asyncio.sleep(20 * WINDOW)
    assert reader.failed_at is None
    reader.replacements.may_still_come = False
    await asyncio.sleep(1.1 * WINDOW)
    assert reader.failed_at is not None


@virtual
async def test_octets_of_an_object_that_takes_longer_than_that_count() -> None:
    reader = reading(deadline=60.0)
    await asyncio.sleep(0.1)
    for _ in range(10):
        reader.handlers[0](1000)
        await asyncio.sleep(0.9 * WINDOW)
    assert reader.failed_at is None
    await asyncio.sleep(2 * WINDOW)
    assert reader.failed_at is not None


@virtual
async def test_octets_of_objects_that_fail_their_checks_do_not_count() -> None:
    reader = reading(deadline=60.0)
    await asyncio.sleep(0.1)
    reader.handlers[0](1000)
    reader.ledger.counters.rejected["digest"] += 1
    await asyncio.sleep(WINDOW)
    assert reader.failed_at == pytest.approx(WINDOW, abs=0.01)


@virtual
async def test_the_time_for_what_was_only_slow_begins_when_it_was_asked_for_in_vain() -> None:
    reader = Reader(TOY, deadline=60.0)
    track = reader.ledger.tracks[0]
    reader.recovery.late(track, EVERYTHING, "a test")
    await asyncio.sleep(5 * WINDOW)
    assert reader.failed_at is None and len(reader.handlers) == 4
    for ended in reader.handlers:
        ended(None)
    await asyncio.sleep(0.99 * WINDOW)
    assert reader.failed_at is None
    await asyncio.sleep(0.1)
    assert reader.failed_at is not None
