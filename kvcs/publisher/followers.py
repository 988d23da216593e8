"""Who has subscribed to a publication, and who is just about to."""

from __future__ import annotations

import asyncio
from typing import Final

from kvcs.moqt.track.store import Track

GRACE_SECONDS: Final = 1.0
"""Longest wait of a publication that ends for requests that are on their way.

A consumer asks for the data once it has the manifest: a publication that ends in that moment would
refuse what it has just promised.
"""


class Followers:
    """Counts subscriptions to the tracks of one publication.

    Args:
        manifest: its manifest track.
        selection: data tracks that one consumer subscribes to.
    """

    def __init__(self, manifest: Track, selection: int) -> None:
        self._manifest = manifest
        self._selection = selection
        self._readers = 0
        self._requests = 0
        self._changed = asyncio.Event()
        manifest.on_followed = self._manifest_followed

    def watch(self, track: Track) -> None:
        """Count the subscriptions of a data track of segment 0."""
        track.on_followed = self._data_followed

    async def requests_under_way(self, seconds: float) -> None:
        """Wait until whoever follows the manifest has asked for the data, or for the grace.

        Args:
            seconds: longest wait, if that is shorter.
        """
        try:
            async with asyncio.timeout(min(seconds, GRACE_SECONDS)):
                while self._manifest.followed and self._due:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            pass

    @property
    def _due(self) -> bool:
        return self._requests < self._readers * self._selection

    def _manifest_followed(self) -> None:
        self._readers += 1

    def _data_followed(self) -> None:
        self._requests += 1
        self._changed.set()
