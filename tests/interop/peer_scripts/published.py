# mypy: disable-error-code="import-not-found, import-untyped"
"""A published object tree: what each track has published, and what each subscriber is owed."""

import asyncio
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from aiomoqt.delivery import ObjectHistory
from aiomoqt.messages import SubgroupHeader
from aiomoqt.messages.params import D20ParamType, LocationFilter, RangeFilters, fill_range
from aiomoqt.types import (
    GroupOrder,
    MOQTStreamStopped,
    ObjectStatus,
    ParamType,
    StreamResetCode,
)
from common import unexpected

HISTORY_BYTES = 1 << 32
"""Nothing published is ever forgotten."""

END_OF_TRACK_PRIORITY = 127

Location = tuple[int, int]


def passing(objects: Iterable[Any], filters: RangeFilters) -> Iterator[Any]:
    """Yield the objects of a fetch or fill that pass the request's Range Filters."""
    for item in objects:
        if item.end_of_range is not None or filters.admits(
            item.subgroup_id, item.object_id, item.publisher_priority, None
        ):
            yield item


class Subscription:
    """One subscriber of one track."""

    def __init__(self, session: Any, message: Any, track_alias: int) -> None:
        self.session = session
        self.request_id = message.request_id
        self.track_alias = track_alias
        self.forward = message.forward != 0
        self.filter: LocationFilter = message.location_filter or LocationFilter.none()
        self.ranges = RangeFilters.from_params(message.parameters)
        self.order = message.group_order
        self.range: tuple[Location, Location | None] = ((0, 0), None)
        self.streams: dict[int, tuple[int, SubgroupHeader]] = {}
        """Group ID to the stream open for it."""

        self.stream_count = 0
        self.fills: set[asyncio.Task[None]] = set()
        self.gone = False

    def takes(self, location: Location, priority: int, status: ObjectStatus) -> bool:
        """Tell whether an object published now is for this subscriber."""
        start, end = self.range
        if not self.forward or self.gone or location < start:
            return False
        if end is not None and location > end:
            return False
        # A status is about the group or the track, whatever objects were selected.
        return status is not ObjectStatus.NORMAL or bool(
            self.ranges.admits(0, location[1], priority, None)
        )

    def start_fill(self, message: Any, track: "Track") -> bool:
        """Serve the fill that ``message`` asks for, if any."""
        wanted = (message.parameters or {}).get(D20ParamType.FILL_PARAMETERS)
        if wanted is None or not self.forward:
            return False
        range_ = fill_range(wanted, self.filter, track.largest)
        if range_ is None:
            return False
        order = wanted.get(ParamType.GROUP_ORDER) or self.order or GroupOrder.ASCENDING
        own = RangeFilters.from_params(wanted)
        objects = track.history.fetch(
            *range_, self.session, descending=order == GroupOrder.DESCENDING
        )
        # Written later, but chosen now: what comes after this belongs to the subscription.
        task = asyncio.create_task(
            self._fill(message.request_id, list(passing(objects, own or self.ranges)), order)
        )
        self.fills.add(task)
        self.stream_count += 1
        return True

    async def _fill(self, request_id: int, objects: list[Any], order: int) -> None:
        try:
            await self.session.serve_fetch(request_id, objects, group_order=order)
        except Exception as error:
            unexpected(error)

    async def send(
        self, track: "Track", location: Location, payload: bytes, status: ObjectStatus
    ) -> None:
        """Write one object, on the stream of its group."""
        group_id, object_id = location
        if not self.takes(location, track.priority(group_id), status):
            return
        try:
            if group_id not in self.streams:
                stream_id = await self.session.open_uni_stream()
                self.stream_count += 1
                header = SubgroupHeader(
                    track_alias=self.track_alias,
                    group_id=group_id,
                    subgroup_id=0,
                    publisher_priority=track.priority(group_id),
                    end_of_group=True,
                    first_object=object_id == 0,
                    prof=self.session._profile,
                )
                self.streams[group_id] = (stream_id, header)
                await self.session.stream_write_drain(stream_id, header.serialize().data)
            stream_id, header = self.streams[group_id]
            octets = header.next_object_bytes(payload, None, status, object_id)
            await self.session.stream_write_drain(stream_id, octets)
        except MOQTStreamStopped:
            self.streams.pop(group_id, None)

    def finish_group(self, group_id: int) -> None:
        """End the stream of a group."""
        if group_id in self.streams:
            self.session.stream_fin(self.streams.pop(group_id)[0])

    def reset_streams(self) -> None:
        """Give up what is open: objects that were owed will not come."""
        for stream_id, _ in self.streams.values():
            self.session.stream_reset(stream_id, StreamResetCode.CANCELLED)
        self.streams.clear()


class Track:
    """One track of the tree, and how far it is published."""

    def __init__(self, folder: Path) -> None:
        self.name = folder.name
        self.is_manifest = folder.name.startswith("manifest")
        self.groups: dict[int, list[Path]] = {}
        for path in folder.iterdir():
            self.groups.setdefault(int(path.name.split(".")[0]), []).append(path)
        for paths in self.groups.values():
            paths.sort(key=lambda path: int(path.name.split(".")[1]))
        self.last_group = max(self.groups)
        self.history = ObjectHistory(HISTORY_BYTES)
        self.largest: Location | None = None
        self.subscriptions: list[Subscription] = []

    def priority(self, group_id: int) -> int:
        """Publisher Priority of a group."""
        if self.is_manifest:
            return 0
        layers = self.last_group + 1
        return min(128 * group_id // layers, END_OF_TRACK_PRIORITY)

    async def publish(self, until: Location) -> None:
        """Publish what is not yet published, up to and including ``until``."""
        for group_id in sorted(self.groups):
            paths = self.groups[group_id]
            for path in paths:
                location = (group_id, int(path.name.split(".")[1]))
                if location <= until:
                    await self._object(location, path.read_bytes(), ObjectStatus.NORMAL)
            last = int(paths[-1].name.split(".")[1])
            if (group_id, last) < until:
                if not self.is_manifest:
                    await self._object((group_id, last + 1), b"", ObjectStatus.END_OF_GROUP)
                for subscription in self.subscriptions:
                    subscription.finish_group(group_id)

    async def publish_end(self) -> None:
        """Publish the rest, and the End of Track."""
        end = (self.last_group + 1, 0)
        await self.publish(end)
        if not self.is_manifest:
            await self._object(end, b"", ObjectStatus.END_OF_TRACK)
            for subscription in self.subscriptions:
                subscription.finish_group(end[0])

    async def _object(self, location: Location, payload: bytes, status: ObjectStatus) -> None:
        if self.largest is not None and location <= self.largest:
            return
        self.largest = location
        if status is ObjectStatus.NORMAL:
            group_id, object_id = location
            self.history.add(group_id, object_id, payload, 0, None, self.priority(group_id))
        for subscription in self.subscriptions:
            await subscription.send(self, location, payload, status)
