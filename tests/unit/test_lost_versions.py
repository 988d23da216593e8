"""Manifest versions that did not arrive are asked for again, until they are there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvcs.errors import UsageError
from kvcs.moqt import FullTrackName, Location, Parameters, events
from kvcs.moqt.data import FetchHeader, SubgroupHeader
from kvcs.moqt.filters import LocationFilter
from kvcs.moqt.messages import SubscribeOk
from kvcs.moqt.parameters import ParameterType
from kvcs.moqt.properties import KeyValues
from kvcs.quic import Connection
from kvcs.subscriber.lost_versions import LostVersions
from kvcs.subscriber.settings import SubscriberSettings
from kvcs.testing.network import run

NAME = FullTrackName((b"publication",), b"manifest")
FILL, LIVE = 7, 11
"""Stream IDs."""


class Follower:
    """Follows a track whose FETCHes are answered by the test."""

    full_track_name = NAME
    wants_more = True

    def __init__(self) -> None:
        self.newest = -1
        self.asked: list[tuple[float, Any]] = []
        self.handlers: dict[int, Callable[[events.Event], None]] = {}
        self.taken: list[events.Event] = []
        self.refusal: Exception | None = None
        requester = SimpleNamespace(fetch=self._fetch)
        self.connection = cast(
            Connection,
            SimpleNamespace(
                is_open=True,
                core=SimpleNamespace(requester=requester),
                handle=self.handlers.__setitem__,
                cancel=lambda request_id: self.handlers.pop(request_id, None),
            ),
        )
        settings = SubscriberSettings(retry_pause=1.0)
        self.lost = LostVersions(self, settings)
        self.started = asyncio.get_running_loop().time()

    def _fetch(self, name: FullTrackName, parameters: Parameters) -> int:
        if self.refusal is not None:
            raise self.refusal
        assert name == NAME
        now = asyncio.get_running_loop().time() - self.started
        self.asked.append((now, parameters.get(ParameterType.LOCATION_FILTER)))
        return len(self.asked)

    def take(self, event: events.Event) -> None:
        self.taken.append(event)

    async def parsed(self) -> None:
        """Nothing is read in threads."""

    def subscribed(self, largest: int | None) -> None:
        parameters = Parameters()
        if largest is not None:
            parameters = Parameters.of(largest_object=Location(largest, 0))
        reply = SubscribeOk(0, parameters, KeyValues())
        self.lost.note(events.RequestAccepted(0, reply))

    def fill(self, *, whole: int = -1, reset: int | None = None) -> None:
        """A fill that begins and ends; ``whole`` is the version that it brings."""
        self.lost.note(events.DataStreamOpened(0, FILL, FetchHeader(0)))
        self.newest = max(self.newest, whole)
        self.lost.note(events.DataStreamEnded(0, FILL, reset))

    def live(self, group_id: int, *, whole: bool, reset: int | None = None) -> None:
        """A subgroup stream that begins and ends."""
        self.lost.note(events.DataStreamOpened(0, LIVE, SubgroupHeader(0, group_id, 0)))
        if whole:
            self.newest = max(self.newest, group_id)
        self.lost.note(events.DataStreamEnded(0, LIVE, reset))

    def answer(self, *, newest: int | None = None) -> None:
        """The last FETCH ends, and brings a version or does not."""
        if newest is not None:
            self.newest = newest
        request_id = len(self.asked)
        self.handlers[request_id](events.DataStreamEnded(request_id, 99, None))


def only(group_id: int) -> LocationFilter:
    return LocationFilter.group_end(group_id, 0, group_id)


@pytest.mark.parametrize("reset", [None, 0x1])
def test_a_fill_that_left_the_version_out_is_followed_by_fetches_until_it_is_there(
    reset: int | None,
) -> None:
    async def main() -> None:
        follower = Follower()
        follower.subscribed(largest=3)
        follower.fill(reset=reset)
        await asyncio.sleep(1.5)
        assert follower.asked == [(1.0, only(3))]
        follower.answer()
        await asyncio.sleep(3)
        assert follower.asked == [(1.0, only(3)), (3.5, only(3))]
        follower.answer(newest=3)
        await asyncio.sleep(100)
        assert follower.lost.fetches == 2
        assert not follower.handlers

    run(main())


def test_a_live_version_that_was_cut_off_is_fetched() -> None:
    async def main() -> None:
        follower = Follower()
        follower.subscribed(largest=None)
        follower.live(0, whole=True)
        follower.live(1, whole=False, reset=0x5)
        await asyncio.sleep(1.5)
        assert [location for _, location in follower.asked] == [only(1)]
        follower.lost.stop()
        await asyncio.sleep(0)

    run(main())


def test_a_newer_version_makes_up_for_a_lost_one() -> None:
    async def main() -> None:
        follower = Follower()
        follower.subscribed(largest=4)
        follower.fill()
        follower.live(5, whole=True)
        await asyncio.sleep(100)
        assert follower.asked == []

    run(main())


def test_what_came_whole_is_not_asked_for() -> None:
    async def main() -> None:
        follower = Follower()
        follower.subscribed(largest=4)
        follower.fill(whole=4)
        follower.live(5, whole=True)
        await asyncio.sleep(100)
        assert follower.asked == []

    run(main())


def test_nothing_is_asked_once_the_follower_has_failed_or_stopped() -> None:
    async def main() -> None:
        follower = Follower()
        follower.subscribed(largest=4)
        follower.wants_more = False
        follower.fill()
        follower.wants_more = True
        follower.fill()
        follower.lost.stop()
        await asyncio.sleep(100)
        assert follower.asked == []

    run(main())


def test_a_fetch_that_cannot_be_made_is_tried_again() -> None:
    async def main() -> None:
        follower = Follower()
        follower.subscribed(largest=4)
        follower.refusal = UsageError("too many requests")
        follower.fill()
        await asyncio.sleep(1.5)
        follower.refusal = None
        await asyncio.sleep(3)
        assert [location for _, location in follower.asked] == [only(4)]
        follower.answer(newest=4)
        await asyncio.sleep(100)

    run(main())
