"""Manifest versions that were on their way and did not arrive: they are fetched."""

from __future__ import annotations

import asyncio
from typing import Protocol

from kvcs.errors import UsageError
from kvcs.moqt import events
from kvcs.moqt.data import SubgroupHeader
from kvcs.moqt.filters import LocationFilter
from kvcs.moqt.messages import SubscribeOk
from kvcs.moqt.names import FullTrackName, GroupOrder
from kvcs.moqt.parameters import Parameters, ParameterType
from kvcs.observe import get_logger
from kvcs.quic.connection import Connection
from kvcs.subscriber.settings import SubscriberSettings

_log = get_logger("kvcs.subscriber")

MAX_PAUSE_DOUBLINGS = 5
"""The pause before a try doubles up to 32 times the first one."""


class Versions(Protocol):
    """Who follows the manifest track."""

    connection: Connection

    @property
    def full_track_name(self) -> FullTrackName:
        """The track that was found."""

    @property
    def newest(self) -> int:
        """Group of the newest version that was read; -1 before the first."""

    @property
    def wants_more(self) -> bool:
        """Whether it goes on."""

    def take(self, event: events.Event) -> None:
        """One event of a request of the track."""

    async def parsed(self) -> None:
        """Wait until what has arrived was read."""


class LostVersions:
    """Notices versions whose stream ended without them, and fetches the newest of those.

    A relay that loses its publisher ends a fill with a marker, and a stream with a reset. No newer
    version need ever follow: that of a complete publication is the last.

    Args:
        versions: who follows the track.
        settings: pauses and priority.
    """

    def __init__(self, versions: Versions, settings: SubscriberSettings) -> None:
        self.fetches = 0
        """FETCHes made so far."""
        self._versions = versions
        self._settings = settings
        self._largest = -1
        self._streams: dict[int, int] = {}
        self._lost = -1
        self._task: asyncio.Task[None] | None = None

    def note(self, event: events.Event) -> None:
        """One event of the subscription, after the follower has taken it."""
        if isinstance(event, events.RequestAccepted):
            if isinstance(event.reply, SubscribeOk):
                largest = event.reply.parameters.get(ParameterType.LARGEST_OBJECT)
                self._largest = -1 if largest is None else largest.group
        elif isinstance(event, events.DataStreamOpened):
            header = event.header
            if isinstance(header, SubgroupHeader):
                self._streams[event.stream_id] = header.group_id
            else:  # the fill
                self._streams[event.stream_id] = self._largest
        elif isinstance(event, events.DataStreamEnded):
            group_id = self._streams.pop(event.stream_id, -1)
            if group_id > max(self._versions.newest, self._lost) and self._versions.wants_more:
                self._lost = group_id
                if self._task is None:
                    self._task = asyncio.get_running_loop().create_task(self._run())

    def stop(self) -> None:
        """Fetch nothing any more."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _run(self) -> None:
        versions, tries = self._versions, 0
        while True:
            await versions.parsed()
            if self._lost <= versions.newest or not versions.wants_more:
                break
            doublings = min(tries, MAX_PAUSE_DOUBLINGS)
            await asyncio.sleep(self._settings.retry_pause * 2**doublings)
            tries += 1
            if self._lost > versions.newest:
                _log.info("manifest_version_lost", group=self._lost, tries=tries)
                await self._fetch(self._lost)
        self._task = None

    async def _fetch(self, group_id: int) -> None:
        """Ask for one version; returns when its stream has ended or there is none."""
        connection = self._versions.connection
        if not connection.is_open:
            return
        parameters = Parameters.of(
            subscriber_priority=self._settings.subscriber_priority,
            group_order=GroupOrder.ASCENDING,
            location_filter=LocationFilter.group_end(group_id, 0, group_id),
        )
        try:
            request_id = connection.core.requester.fetch(self._versions.full_track_name, parameters)
        except UsageError as exc:
            _log.warning("manifest_fetch_not_made", reason=str(exc))
            return
        self.fetches += 1
        over = asyncio.Event()

        def take(event: events.Event) -> None:
            if isinstance(event, _ENDS):
                over.set()
            if isinstance(event, events.ObjectsReceived | events.DataStreamEnded):
                self._versions.take(event)

        connection.handle(request_id, take)
        try:
            await over.wait()
        finally:
            connection.cancel(request_id)


_ENDS = (
    events.DataStreamEnded,
    events.RequestCancelled,
    events.RequestRefused,
    events.SessionClosed,
    events.TrackMalformed,
)
"""What ends a FETCH."""
