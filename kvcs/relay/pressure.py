"""What gives way where the cache is full of what cannot leave: the lowest priority (MOQT §7).

Groups that were got for a reader stay until it has passed them, and Groups that arrive stay until
they are whole. So a reader that takes nothing loses its stream where others need the room, and so
does an upstream stream of lower priority than what comes in.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from kvcs.moqt.errors import StreamCode
from kvcs.relay.directory import Directory
from kvcs.relay.hub import Hub

MAX_GIVEN_UP = 64
"""Streams that give way at once."""

Rank = tuple[float, ...]
"""How much a stream counts, in the order of its parts: the lower, the more."""


class Stoppable(NamedTuple):
    """A stream that may give way."""

    rank: Rank
    """The higher, the sooner it does."""

    frees: float
    """Octets that are free without it, about."""

    stop: Callable[[int], object]
    """Ends it with a code."""


def give_up(found: list[Stoppable], octets: float, most: int) -> int:
    """End what counts least with EXCESSIVE_LOAD, until as much is free as is wanted.

    Args:
        found: what may give way; of the same rank what frees more does first, and what was found
            later.
        octets: wanted.
        most: streams that are ended at most.

    Returns:
        How many were.
    """
    found.sort(key=lambda each: each[:2])
    freed, count = 0.0, 0
    for each in found[: -most - 1 : -1]:
        if freed >= octets:
            break
        freed += each.frees
        count += 1
        each.stop(StreamCode.EXCESSIVE_LOAD)
    return count


class Pressure:
    """Makes room in the cache by giving up what keeps it from being made.

    Args:
        hub: the relay's core.
        tracks: those in use.
    """

    def __init__(self, hub: Hub, tracks: Directory) -> None:
        self._hub = hub
        self._tracks = tracks

    def unpin(self, octets: int, now: float) -> bool:
        """Reset readers that have taken nothing for a while, those of the lowest priority first.

        Args:
            octets: wanted; no more readers are reset than keep as much.
            now: the time.

        Returns:
            Whether there were any.
        """
        since = now - self._hub.limits.pinned_seconds
        found = [
            Stoppable(reader.key()[:2], kept, partial(reader.host.reset_sender, reader))
            for track in self._tracks
            for reader, kept in track.retriever.pinning()
            if reader.moved_at < since
        ]
        return self._give_up("readers_give_way", found, octets)

    def preempt(self, octets: int, priority: int) -> bool:
        """Stop what arrives with a lower priority than something new has, the lowest first.

        Args:
            octets: wanted.
            priority: Publisher Priority of what is new.

        Returns:
            Whether there was anything.
        """
        found = [
            Stoppable((lower,), kept, stop)
            for track in self._tracks
            for lower, kept, stop in track.sources.arriving()
            if lower > priority
        ]
        return self._give_up("streams_give_way", found, octets)

    def _give_up(self, event: str, found: list[Stoppable], octets: int) -> bool:
        count = give_up(found, octets, MAX_GIVEN_UP)
        if count:
            self._hub.stats.pressure_resets += count
            self._hub.report(event, octets=octets, streams=count)
        return count > 0
