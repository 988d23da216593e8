"""Who follows a Track: subscriptions and readers, and those that wait for more of it (MOQT §3)."""

from __future__ import annotations

from collections.abc import Callable

from kvcs.moqt.track.stored import TrackListener, Watcher


class Followed:
    """The part of a Track that knows who follows it."""

    def __init__(self) -> None:
        self.listeners: list[TrackListener] = []
        self.readers = 0
        """Fetches and fills that are being delivered."""
        self.on_followed: Callable[[], None] | None = None
        """Called when a subscription begins."""
        self.on_unfollowed: Callable[[], None] | None = None
        """Called when the last listener or reader has left."""
        self._watchers: dict[Watcher, None] = {}

    def watch(self, watcher: Watcher) -> None:
        """Wake ``watcher`` once, when more becomes known of the Track."""
        self._watchers[watcher] = None

    def unwatch(self, watcher: Watcher) -> None:
        """Undo `watch`; quiet where it was woken already."""
        self._watchers.pop(watcher, None)

    def wake(self) -> None:
        """Wake all who wait for the Track."""
        watchers, self._watchers = self._watchers, {}
        for watcher in watchers:
            watcher.wake()

    def leave(self, listener: TrackListener) -> None:
        """A listener no longer follows the Track; quiet when it has left already."""
        if listener in self.listeners:
            self.listeners.remove(listener)
            self._check_followed()

    def reader_left(self) -> None:
        """A fetch or fill that was counted in `readers` is over."""
        self.readers -= 1
        self._check_followed()

    @property
    def followed(self) -> bool:
        """Whether a subscription, fetch or fill is being served from it."""
        return bool(self.listeners) or self.readers > 0

    def _check_followed(self) -> None:
        if not self.followed and self.on_unfollowed is not None:
            self.on_unfollowed()
