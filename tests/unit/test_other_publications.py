"""Other publications of a prefix are asked in turn: one that says nothing keeps nobody waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

from kvcs.kv import Ledger
from kvcs.moqt.names import FullTrackName, TrackNamespace
from kvcs.recovery import Recovery
from kvcs.subscriber.rivals import Rivals
from tests.builders import QUICK
from tests.unit.kv.toy import Toy, toy_publication
from tests.virtual import virtual

QUIET = 1.0
SETTINGS = replace(QUICK, quiet=QUIET)
OURS, FIRST, SECOND = ((b"prefix", name) for name in (b"ours", b"first", b"second"))
LONGER = toy_publication((3, 2))


class Octets:
    """A receiver that takes octets, which make no whole Object; `None` ends its FETCH."""

    octets = taken = 0

    def take(self, event: int | None, ended: Callable[[str | None], None]) -> None:
        if event is None:
            ended(None)
        else:
            self.octets += event

    def drop(self) -> None:
        """Nothing is on its way."""


class Looking:
    """A retrieval that lacks everything, whose one session leads to two twins of it."""

    is_open, peer = True, "a test"

    def __init__(self, toy: Toy, segments: int = 1) -> None:
        self.ledger = Ledger(toy.descriptor, blocks=sum(toy.blocks))
        for tracks, blocks in list(zip(toy.segments, toy.blocks, strict=True))[:segments]:
            self.ledger.add_segment(tracks, blocks)
        self.deadline_at = asyncio.get_running_loop().time() + 60.0
        self.last_means = None
        self.asked: list[FullTrackName] = []
        self.running: dict[int, Callable[[int | None], None]] = {}
        """Handlers of FETCHes that are under way."""
        self.core = SimpleNamespace(requester=SimpleNamespace(fetch=self._fetched))
        self.connection = self
        self.segments: list[Sequence[int]] = []
        """What was asked for in whole segments."""
        self.replacements = SimpleNamespace(over=self._over, confirm=lambda: None)
        self.recovery = Recovery(cast(Any, self), SETTINGS)

    @property
    def namespaces(self) -> set[TrackNamespace]:
        """Publications that were asked so far."""
        return {name.namespace for name in self.asked}

    def look(self) -> asyncio.Task[None]:
        """Ask all of them."""
        self.asked.clear()
        return asyncio.create_task(self.recovery.from_others(cast(Any, self)))

    def end(self) -> None:
        """All that is under way ends."""
        for take in list(self.running.values()):
            take(None)

    async def twins(self, connection: object) -> list[TrackNamespace]:
        return [FIRST, SECOND]

    def receiver(self, *_: object, **__: object) -> Octets:
        return Octets()

    def handle(self, request_id: int, take: Callable[[int | None], None]) -> None:
        self.running[request_id] = take

    def cancel(self, request_id: int) -> None:
        self.running.pop(request_id, None)

    def _fetched(self, name: FullTrackName, parameters: object) -> int:
        self.asked.append(name)
        return len(self.asked)

    async def _over(self, connection: object, segments: Sequence[int], seconds: float) -> None:
        self.segments.append(segments)


@virtual
async def test_a_twin_that_says_nothing_makes_room_for_the_next() -> None:
    it = Looking(toy_publication())
    look = it.look()
    await asyncio.sleep(0.9 * QUIET)
    assert it.namespaces == {FIRST} and it.running
    await asyncio.sleep(0.2 * QUIET)
    assert it.namespaces == {FIRST, SECOND}
    await asyncio.sleep(2 * QUIET)
    await look
    assert it.segments == [[0]] and not it.running


@virtual
async def test_it_has_more_time_the_next_time() -> None:
    """What needs longer for its first octet is slow, and may be all that there is."""
    it = Looking(toy_publication())
    look = it.look()
    await asyncio.sleep(1.1 * QUIET)
    it.end()
    await look
    look = it.look()
    await asyncio.sleep(1.9 * QUIET)
    assert it.namespaces == {FIRST}
    await asyncio.sleep(0.2 * QUIET)
    assert it.namespaces == {FIRST, SECOND}
    it.end()
    await look


@virtual
async def test_one_of_which_something_comes_is_waited_for() -> None:
    it = Looking(toy_publication())
    look = it.look()
    for _ in range(10):
        await asyncio.sleep(0.9 * QUIET)
        next(iter(it.running.values()))(1)
    assert it.namespaces == {FIRST}
    it.end()
    await asyncio.sleep(0)
    look.cancel()
    await asyncio.wait((look,))
    assert look.cancelled() and not it.running


@virtual
async def test_a_segment_that_was_added_meanwhile_is_not_asked_of_a_twin() -> None:
    """It was compared with the segments of before: the next one may have other tokens."""
    it = Looking(LONGER)
    look = it.look()
    await asyncio.sleep(0.1 * QUIET)
    it.ledger.add_segment(LONGER.segments[1], LONGER.blocks[1])
    while it.namespaces != {FIRST, SECOND}:
        it.end()
        await asyncio.sleep(0.1 * QUIET)
    it.end()
    await look
    assert {name.name for name in it.asked} == {track.name for track in LONGER.segments[0]}
    assert it.segments == [[0, 1]], "whole segments are compared when they are taken"


@virtual
async def test_where_the_first_session_brings_it_no_other_is_watched() -> None:
    watched: list[str] = []

    class Session:
        def __init__(self, name: str) -> None:
            self.name = name
            self.namespaces = self

        def watch(self, prefix: TrackNamespace) -> Any:
            watched.append(self.name)
            return SimpleNamespace(namespaces={OURS: 1, FIRST: 2}, error=None)

        def release(self, watch: Any) -> None:
            watched.remove(self.name)

    async def completes(source: Session) -> None:
        if source.name == "second":
            await asyncio.sleep(0)
        retrieval.is_over = True
        rivals.stop()

    retrieval = SimpleNamespace(
        finder=object(),
        is_over=False,
        namespace=OURS,
        sources=[Session("first"), Session("second")],
        ledger=toy_publication().ledger(),
        deadline_at=asyncio.get_running_loop().time() + 60.0,
        passage=SimpleNamespace(moving=False),
        handed_out=False,
    )
    recovery = SimpleNamespace(from_others=completes)
    rivals = Rivals(cast(Any, retrieval), cast(Any, recovery), SETTINGS)
    rivals.start()
    await asyncio.sleep(5 * QUIET)
    assert retrieval.is_over and watched == []
