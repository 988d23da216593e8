"""What data streams from upstream bring, on its way to who takes it (MOQT §7).

By far the most of it comes to an `Inflow`, without an event for each datagram.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from kvcs.errors import StoreFull
from kvcs.moqt.errors import MalformedTrack
from kvcs.moqt.names import Location
from kvcs.moqt.objects import Item, ObjectHeader
from kvcs.moqt.session import Session
from kvcs.relay.hub import Hub
from kvcs.relay.intake import Intake, Run, SubgroupIntake, take_each
from kvcs.relay.upstream import Retrieval, Upstream

if TYPE_CHECKING:
    from kvcs.relay.tracks import RelayTrack

StreamKey = tuple[int, int]
"""Session and stream ID of an upstream data stream."""


T = TypeVar("T")
Step = Callable[[Intake, T, float], None]
"""Gives what came to an intake, with the time."""


class Inflow:
    """Takes what comes on one session for one Track (`kvcs.moqt.incoming.expected.ObjectSink`).

    Args:
        hub: the relay's core.
        track: the Track.
        key: the session's.
        session: tells the time.
    """

    __slots__ = ("_hub", "_key", "_session", "_track")

    def __init__(self, hub: Hub, track: RelayTrack, key: int, session: Session) -> None:
        self._hub = hub
        self._track = track
        self._key = key
        self._session = session

    def take_items(self, stream_id: int, items: list[Item]) -> None:
        """What one input brought on a stream."""
        self._take(stream_id, take_each, items)

    def take_payload(self, stream_id: int, data: bytes) -> None:
        """Octets of the Object that began last on a stream, and not the last ones of it."""
        self._take(stream_id, _take_chunk, data)

    def take_run(
        self,
        stream_id: int,
        like: ObjectHeader,
        first: Location,
        data: bytes | memoryview,
        stop: int,
        lead: int,
        count: int,
    ) -> None:
        """The end of one Object and the next ones of its Subgroup."""
        self._take(stream_id, _take_run, Run(like, first, data, stop, lead, count))

    def _take(self, stream_id: int, step: Step[T], what: T) -> None:
        """Give what came to a stream's intake."""
        hub, now = self._hub, self._session.now
        _take(hub, self._track, (self._key, stream_id), step, what, now)
        hub.run_soon(now)


def take_items(
    hub: Hub, track: RelayTrack, stream: StreamKey, items: list[Item], now: float
) -> None:
    """Take what one input brought on a data stream; nothing where it is not taken any more.

    Args:
        hub: the relay's core.
        track: the Track that it belongs to.
        stream: the stream.
        items: what its parser has yielded.
        now: the time.
    """
    _take(hub, track, stream, take_each, items, now)


def _take(
    hub: Hub, track: RelayTrack, stream: StreamKey, step: Step[T], what: T, now: float
) -> None:
    """Take what came on a data stream; nothing where that is not taken any more."""
    found = track.streams.get(stream)
    if found is None:
        return
    intake, owner = found
    _note(hub, intake, owner, now)
    try:
        step(intake, what, now)
    except MalformedTrack as exc:
        track.malformed(stream[0], exc.reason, now)
    except StoreFull as exc:
        track.too_much(stream, owner, str(exc), now)


def _take_chunk(intake: Intake, data: bytes | memoryview, now: float) -> None:
    intake.chunk(data)


def _take_run(intake: Intake, run: Run, now: float) -> None:
    intake.run(run, now)


def take_end(
    hub: Hub, track: RelayTrack, stream: StreamKey, reset_code: int | None, now: float
) -> None:
    """Take the end of a data stream: FIN where ``reset_code`` is None."""
    intake, owner = track.streams[stream]
    _note(hub, intake, owner, now)
    try:
        track.stream_ended(stream, reset_code, now)
    except MalformedTrack as exc:
        track.malformed(stream[0], exc.reason, now)
    except StoreFull as exc:
        track.too_much(stream, owner, str(exc), now)


def _note(hub: Hub, intake: Intake, owner: Upstream | Retrieval, now: float) -> None:
    """Note what comes, for what may have to leave the cache for it."""
    cache = hub.cache
    cache.now = now
    cache.taking = intake if isinstance(intake, SubgroupIntake) else None
    if isinstance(owner, Retrieval):
        owner.progress_at = now
