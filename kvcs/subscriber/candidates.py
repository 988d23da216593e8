"""Publications that may serve a prefix: which manifests are read, and which is the best."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from kvcs.errors import KvcsError, PublicationError, PublicationNotFound, RequestError
from kvcs.kv import Manifest, PublicationNamespace
from kvcs.moqt.names import TrackNamespace
from kvcs.observe import get_logger
from kvcs.quic.connection import Connection
from kvcs.subscriber.coverage import Holding

_log = get_logger("kvcs.subscriber")

Place = tuple[Connection, TrackNamespace]
"""A publication, and the session over which it is asked for."""


class Follower(Protocol):
    """Reads the manifest of one publication; `ManifestFollower` is one."""

    manifest: Manifest | None
    error: KvcsError | None
    blocks: int

    @property
    def ready(self) -> bool:
        """Whether a version has been read that covers blocks of the prefix."""

    @property
    def is_final(self) -> bool:
        """Whether later versions can cover no more of it."""

    def start(self) -> None:
        """Begin."""

    def stop(self) -> None:
        """End."""


F = TypeVar("F", bound=Follower)


class Candidates(Generic[F]):
    """Publications by the order in which they were named, a bounded number of them read at a time.

    The newest are read first. One that fails makes room for the next; where a request for it was
    refused, it is tried once more later, and at once when it is announced anew. One whose manifest
    does not come makes room, too, where others wait: else a few that are announced and say nothing
    would keep every other from being read. What is done for each announcement does not grow with
    their number.

    Args:
        follow: makes a follower, not started.
        limit: manifests read at a time.
        retry_after: seconds until a failed one is tried again, and that a manifest has to come
            where others wait; each time twice as many.
        wanted: blocks of the prefix that would be all.
        least: fewest blocks that are of use.
        suits: whether one that can be taken has what its consumer can read.
        trust: how far one is trusted, 0 most.
    """

    def __init__(
        self,
        follow: Callable[[Place, Holding | None], F],
        limit: int,
        retry_after: float,
        wanted: int,
        least: int,
        suits: Callable[[F], bool] = lambda _: True,
        trust: Callable[[F], int] = lambda _: 0,
    ) -> None:
        self._follow = follow
        self._limit = limit
        self._retry_after = retry_after
        self._wanted = wanted
        self._least = least
        self._suits = suits
        self._trust = trust
        self._serial = 0
        self._order: dict[Place, int] = {}
        """Everything that is announced, or named by an index."""
        self._waiting: OrderedDict[Place, None] = OrderedDict()
        self._followers: dict[Place, F] = {}
        self._overdue_at: dict[Place, float] = {}
        """When each one that is read has to make room for those that wait."""
        self._passed_over: dict[Place, int] = {}
        """How often one had to."""
        self._failed: dict[Place, KvcsError] = {}
        self._retried: set[Place] = set()
        self._retries: deque[tuple[float, Place]] = deque()
        self._holdings: dict[Place, Holding | None] = {}
        """What an index has named, and what it says."""

    def announced(self, place: Place) -> None:
        """A publication is announced, or announced anew."""
        self._serial += 1
        self._order[place] = self._serial
        failed = self._failed.get(place)
        if place in self._followers or (failed is not None and not _may_change(failed)):
            return
        # A publisher that was lost and came back has announced itself anew.
        self._failed.pop(place, None)
        self._waiting.pop(place, None)
        self._waiting[place] = None

    def withdrawn(self, place: Place) -> None:
        """It is announced no longer; what an index names stays."""
        if place in self._holdings:
            return
        self._order.pop(place, None)
        self._waiting.pop(place, None)
        self._failed.pop(place, None)
        self._retried.discard(place)
        self._passed_over.pop(place, None)
        self._overdue_at.pop(place, None)
        follower = self._followers.pop(place, None)
        if follower is not None:
            follower.stop()

    def named(self, place: Place, holding: Holding | None) -> None:
        """An index has named it."""
        known = self._followers.pop(place, None)
        if known is not None:
            known.stop()  # it is held to the manifest alone, and the index says more
        self._holdings[place] = holding
        self._failed.pop(place, None)
        self.announced(place)

    def advance(self, now: float) -> None:
        """Give up those that failed, and begin with others."""
        for place, follower in list(self._followers.items()):
            error = follower.error
            if error is None and follower.is_final and follower.blocks < self._least:
                error = PublicationNotFound(
                    f"a publication covers {follower.blocks} blocks of the {self._least} wanted"
                )
                follower.stop()
            if error is not None:
                self._fail(place, error, now)
        while self._retries and self._retries[0][0] <= now:
            _, place = self._retries.popleft()
            if self._failed.pop(place, None) is not None:
                self._waiting[place] = None
        self._pass_over(now)
        while self._waiting and len(self._followers) < self._limit:
            place, _ = self._waiting.popitem()
            try:
                PublicationNamespace.parse(place[1])
            except PublicationError as exc:
                _log.debug("namespace_is_no_publication", reason=str(exc))
                self._order.pop(place, None)
                continue
            follower = self._follow(place, self._holdings.get(place))
            self._followers[place] = follower
            patience = self._retry_after * 2 ** self._passed_over.get(place, 0)
            self._overdue_at[place] = now + patience
            follower.start()

    def _pass_over(self, now: float) -> None:
        """Let others be read in the place of those whose manifest does not come."""
        room = self._limit - len(self._followers)
        silent = [
            place
            for place, each in self._followers.items()
            if not each.ready and self._overdue_at[place] <= now
        ]
        for place in silent[: max(0, len(self._waiting) - room)]:
            self._followers.pop(place).stop()
            self._passed_over[place] = self._passed_over.get(place, 0) + 1
            self._waiting[place] = None
            self._waiting.move_to_end(place, last=False)

    @property
    def error(self) -> KvcsError | None:
        """Why the last one that failed, and is announced still, cannot be used."""
        return next(reversed(self._failed.values()), None)

    @property
    def reading(self) -> bool:
        """Whether a manifest may still come."""
        return any(each.error is None and not each.ready for each in self._followers.values())

    @property
    def next_retry(self) -> float:
        """When one that failed is tried again, or one makes room; infinity where neither is."""
        times = [self._retries[0][0]] if self._retries else []
        if self._waiting:
            times += [
                self._overdue_at[place] for place, each in self._followers.items() if not each.ready
            ]
        return min(times, default=float("inf"))

    def ready(self, shorter: bool) -> list[Place]:
        """Those that can be taken.

        Args:
            shorter: also those that have fewer blocks than are wanted.
        """
        return [
            place
            for place, each in self._followers.items()
            if each.ready
            and (shorter or each.blocks >= self._wanted)
            and (each.blocks >= self._least or _grows(each))
        ]

    @property
    def too_short(self) -> int:
        """Most blocks of those that are complete and have fewer than are of use; 0 without any."""
        short = [
            each.blocks
            for each in self._followers.values()
            if each.ready and each.blocks < self._least and not _grows(each)
        ]
        return max(short, default=0)

    def best(self, places: list[Place]) -> F:
        """The one to take: one that suits, then one that is trusted more, then a complete one, then
        the one with most blocks, then the last that was announced, then the lowest Publication
        ID."""
        return self._followers[min(places, key=self._rank)]

    def others_than(self, chosen: F | None) -> None:
        """Stop all but the one that was taken."""
        for follower in self._followers.values():
            if follower is not chosen:
                follower.stop()

    def _rank(self, place: Place) -> tuple[bool, int, bool, int, int, bytes]:
        follower = self._followers[place]
        manifest = follower.manifest
        complete = manifest is not None and manifest.complete
        unsuited = not self._suits(follower)
        merits = (unsuited, self._trust(follower), not complete, -follower.blocks)
        return (*merits, -self._order[place], place[1][-1])

    def _fail(self, place: Place, error: KvcsError, now: float) -> None:
        del self._followers[place]
        self._failed[place] = error
        if _may_change(error) and place not in self._retried:
            self._retried.add(place)
            self._retries.append((now + self._retry_after, place))


def _grows(follower: Follower) -> bool:
    """Whether a publication is still produced."""
    return follower.manifest is not None and not follower.manifest.complete


def _may_change(error: KvcsError) -> bool:
    """Whether the same publication may be there the next time."""
    return isinstance(error, RequestError)
