"""What gives way where the cache is full of what cannot leave: the lowest priority (MOQT §7).

Groups that were got for a reader stay until it has passed them, and Groups that arrive stay until
they are whole. So a reader that takes nothing loses its stream where others need the room, and so
does an upstream stream of lower priority than what comes in.
"""

from __future__ import annotations

from collections.abc import Callable

from kvcs.moqt.delivery import RangeSender
from kvcs.moqt.errors import StreamCode
from kvcs.relay.directory import Directory
from kvcs.relay.hub import Hub

MAX_GIVEN_UP = 64
"""Streams that give way at once."""

_CODE = StreamCode.EXCESSIVE_LOAD


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
        found: list[tuple[tuple[int, int], int, int, RangeSender]] = []
        for track in self._tracks:
            for reader, kept in track.retriever.pinning():
                if reader.moved_at < since:
                    found.append((reader.key()[:2], kept, len(found), reader))
        found.sort(key=lambda each: each[:3], reverse=True)
        freed = count = 0
        for _, kept, _, reader in found[:MAX_GIVEN_UP]:
            if freed >= octets:
                break
            freed += kept
            count += 1
            reader.host.reset_sender(reader, _CODE)
        self._tell("readers_give_way", octets, count)
        return count > 0

    def preempt(self, octets: int, priority: int) -> bool:
        """Stop what arrives with a lower priority than something new has, the lowest first.

        Args:
            octets: wanted.
            priority: Publisher Priority of what is new.

        Returns:
            Whether there was anything.
        """
        found: list[tuple[int, int, int, Callable[[int], None]]] = []
        for track in self._tracks:
            for lower, kept, stop in track.sources.arriving():
                if lower > priority:
                    found.append((lower, kept, len(found), stop))
        found.sort(key=lambda each: each[:3], reverse=True)
        freed = count = 0
        for _, kept, _, stop in found[:MAX_GIVEN_UP]:
            if freed >= octets:
                break
            freed += kept
            count += 1
            stop(_CODE)
        self._tell("streams_give_way", octets, count)
        return count > 0

    def _tell(self, event: str, octets: int, count: int) -> None:
        if count:
            self._hub.stats.pressure_resets += count
            self._hub.report(event, octets=octets, streams=count)
