"""Gets what readers of one Track met as unknown from the cache's shelf, if it is there."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from kvcs.moqt.sending.delivery import RangeSender
from kvcs.moqt.track.store import Track
from kvcs.relay.hub import Hub
from kvcs.relay.shelf import ShelvedGroup

if TYPE_CHECKING:
    from kvcs.relay.tracks import RelayTrack


class FromShelf:
    """Groups of one Track that are being read.

    Args:
        hub: the relay's core.
        owner: the Track.
    """

    def __init__(self, hub: Hub, owner: RelayTrack) -> None:
        self._hub = hub
        self._owner = owner
        self._waiting: dict[int, list[RangeSender]] = {}
        self._asked: WeakKeyDictionary[RangeSender, set[int]] = WeakKeyDictionary()
        """Groups that each reader had: what has left again is asked for upstream, for it stays."""

    def ask(self, reader: RangeSender, group_id: int) -> bool:
        """Get a Group for a reader, which is told to ask again once it is there or is not good.

        Returns:
            False where the shelf has it not, or gave it to this reader already.
        """
        shelf = self._hub.cache.shelf
        if shelf is None or group_id in self._asked.get(reader, ()):
            return False
        readers = self._waiting.get(group_id)
        if readers is None:
            track = self._owner.track
            # In this order: the answer may come at once.
            self._waiting[group_id] = readers = []
            if not shelf.load(track.name, group_id, partial(self._came, group_id, track)):
                del self._waiting[group_id]
                return False
        readers.append(reader)
        self._asked.setdefault(reader, set()).add(group_id)
        return True

    def _came(self, group_id: int, track: Track, group: ShelvedGroup | None) -> None:
        def take(now: float) -> None:
            if group is not None:
                self._hub.cache.take_back(track, group)
            for reader in self._waiting.pop(group_id, ()):
                if not reader.closed:
                    reader.ask_again()
            self._owner.check_idle_soon()

        self._hub.soon(take)
