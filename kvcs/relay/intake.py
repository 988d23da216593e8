"""Upstream data streams on their way into a Track, octet by octet (MOQT §7, §11).

An Object is in the store from its first octet on, so readers forward it while it arrives.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from kvcs.errors import StoreFull
from kvcs.moqt.incoming.expected import as_items
from kvcs.moqt.intervals import following, preceding
from kvcs.moqt.names import MAX_VI64, GroupOrder, Location
from kvcs.moqt.objects import (
    Item,
    ObjectChunk,
    ObjectEnded,
    ObjectHeader,
    ObjectStarted,
    RangeKind,
)
from kvcs.moqt.streams import SubgroupHeader
from kvcs.moqt.track.bridge import Bridge, hold
from kvcs.moqt.track.store import Track
from kvcs.moqt.track.stored import DuplicateObject, Group, StoredObject
from kvcs.relay.cache import CachedTrack, RelayCache
from kvcs.relay.stats import RelayStats

Writer = StoredObject | DuplicateObject


class Run(NamedTuple):
    """The last octets of an Object, and Objects behind it: `ObjectSink.take_run`."""

    like: ObjectHeader
    """Header of each of them, but for its place."""

    first: Location
    """Location of the first one."""

    data: bytes | memoryview
    """What came."""

    stop: int
    """The Object on its way ends before this position."""

    lead: int
    """Octets of the header in front of each payload."""

    objects: int
    """How many there are; of the last one not all may be there."""


class Intake(Protocol):
    """One upstream data stream."""

    def started(self, header: ObjectHeader, now: float) -> None:
        """An Object's fields are there."""

    def chunk(self, data: bytes | memoryview) -> None:
        """Payload octets of it."""

    def completed(self) -> None:
        """Its payload is whole."""

    def run(self, run: Run, now: float) -> None:
        """An Object ends, and others that are like it follow."""

    def marked(self, kind: RangeKind, location: Location) -> None:
        """A fetch stream says what became of the Objects up to ``location``."""

    def ended(self, reset_code: int | None) -> None:
        """The stream ended: with FIN where ``reset_code`` is None."""

    def part(self) -> StoredObject | None:
        """The stream is gone, and another source goes on: the Object that lacks a part, held."""


class Bay:
    """What the intakes of one Track share: where Objects go, what is counted and allowed.

    Args:
        cache: holds the Track.
        entry: the Track.
        max_object_octets: largest payload that is taken.
        stats: counts what arrives.
    """

    def __init__(
        self, cache: RelayCache, entry: CachedTrack, max_object_octets: int, stats: RelayStats
    ) -> None:
        self.cache = cache
        self.entry = entry
        self.max_object_octets = max_object_octets
        self.stats = stats

    @property
    def track(self) -> Track:
        """The Track."""
        return self.entry.track

    def too_large(self, header: ObjectHeader) -> bool:
        """Whether an Object is larger than what is carried."""
        return header.payload_length > self.max_object_octets

    def began(self, writer: Writer, header: ObjectHeader, now: float) -> None:
        """Note when an Object that is new here began."""
        if isinstance(writer, StoredObject):
            self.cache.began(self.entry, header.location, now)


class SubgroupIntake:
    """A subgroup stream of an upstream subscription."""

    def __init__(self, bay: Bay, header: SubgroupHeader) -> None:
        self._bay = bay
        self._stats = bay.stats
        self._live = bay.track.open_stream(header)
        self._writer: Writer | None = None
        self._group_id = header.group_id
        self._priority = header.publisher_priority
        self._over = False

    @property
    def priority(self) -> int:
        """Publisher Priority of the Subgroup."""
        own = self._priority
        return self._bay.track.default_priority if own is None else own

    @property
    def octets(self) -> int:
        """Octets of the Group that it keeps in the cache."""
        group = self._bay.track.groups.get(self._group_id)
        return 0 if group is None else group.octets

    def started(self, header: ObjectHeader, now: float) -> None:
        """Begin an Object: it goes to every subscription at once.

        Raises:
            MalformedTrack: it contradicts what is stored.
            StoreFull: it is too large, or the cache has no room.
        """
        bay = self._bay
        if header.payload_length > bay.max_object_octets:
            raise StoreFull(f"an Object of {header.payload_length} octets at {header.location}")
        self._writer = writer = self._live.begin(header, now)
        bay.began(writer, header, now)

    def chunk(self, data: bytes | memoryview) -> None:
        """Take payload octets.

        Raises:
            MalformedTrack: another publisher sent other ones.
            StoreFull: the cache has no room for the rest.
        """
        writer = self._writer
        if writer is not None:
            writer.write(data)
            self._stats.octets_in += len(data)

    def completed(self) -> None:
        """Count an Object."""
        self._stats.objects_in += 1

    def run(self, run: Run, now: float) -> None:
        """Take the end of an Object and what follows it, in one step where that may be.

        The octets are copied: what came as one piece would stay in memory as a whole for any small
        part of it that is still cached.

        Raises:
            MalformedTrack: as for `started` and `chunk`.
            StoreFull: as for `started` and `chunk`.
        """
        like, first, data, stop, lead, count = run
        bay, stats, length, writer = self._bay, self._stats, like.payload_length, self._writer
        step, size = lead + length, len(data)
        ended = (size - stop) // step
        view = memoryview(data)
        if stop and writer is not None:
            writer.write(view[:stop])
            stats.octets_in += stop
        stats.objects_in += 1
        last = None
        if length <= bay.max_object_octets:
            behind = stop + ended * step
            begins = range(stop + lead, behind, step)
            whole = [bytes(view[begin : begin + length]) for begin in begins]
            last = self._live.begin_run(like, first, count, whole, now)
        if last is None:
            take_each(self, as_items(like, first, view[stop:], 0, lead, count)[1:], now)
            return
        bay.cache.began_run(bay.entry, first, count, now)
        stats.objects_in += ended
        stats.octets_in += ended * length
        self._writer = last
        if ended < count:
            last.write(view[behind + lead :])
            stats.octets_in += size - behind - lead

    def marked(self, kind: RangeKind, location: Location) -> None:
        """Subgroup streams carry no markers."""

    def ended(self, reset_code: int | None) -> None:
        """End the Subgroup downstream in the same way: a FIN is never invented (§7)."""
        if self._over:
            return
        self._over = True
        if reset_code is None:
            self._live.finish()
        else:
            self._live.reset(reset_code)

    def part(self) -> StoredObject | None:
        """Leave the Subgroup open; see `Intake.part`."""
        if self._over:
            return None
        self._over = True
        return self._live.part()


def take_each(intake: Intake, items: Iterable[Item], now: float) -> None:
    """Give what a parser yielded to an intake.

    Raises:
        MalformedTrack: as the intake does.
        StoreFull: as the intake does.
    """
    for item in items:
        if isinstance(item, ObjectChunk):
            intake.chunk(item.data)
        elif isinstance(item, ObjectStarted):
            intake.started(item.header, now)
        elif isinstance(item, ObjectEnded):
            intake.completed()
        else:
            intake.marked(item.kind, item.location)


class RangeIntake:
    """A fetch or fill stream: Objects, and from its gaps what does not exist (§3.2.2).

    The requests of a relay carry no range filters, so an unmarked gap means that nothing exists.
    Objects outside of what was asked for, which no publisher may send (§3.3), are passed over:
    who sends them gets them into no cache, and tells nothing by them.

    Args:
        bay: see `Bay`.
        order: order of the Groups.
        start: first Location that was asked for.
        end: last one, inclusive; nothing is learnt outside.
        held: Groups that came, until their readers have passed them; shared with the caller.
        bridge: delivers the range to subscriptions too, whose source has changed.
    """

    def __init__(
        self,
        bay: Bay,
        order: GroupOrder,
        start: Location,
        end: Location,
        held: dict[int, Group],
        bridge: Bridge | None = None,
    ) -> None:
        self._bay = bay
        self._bridge = bridge
        self._held = held
        self._descending = order is GroupOrder.DESCENDING
        self._start = start
        self._end = end
        self._prior: Location | None = None
        self._top: int | None = None
        """First Group of a descending stream: what lies above it is known at the end only."""
        self._writer: Writer | None = None
        self._group: Group | None = None
        self._spare = False
        """Whether Groups that came before this one wait for readers."""
        self.objects = 0
        self.octets = 0

    def started(self, header: ObjectHeader, now: float) -> None:
        """Begin an Object; subscriptions do not get it, readers of the range do.

        Raises:
            MalformedTrack: it contradicts what is stored.
            StoreFull: the cache has no room, but by dropping what readers wait for.
        """
        bay = self._bay
        location = header.location
        if not self._start <= location <= self._end:
            self._writer = None
            return
        if bay.too_large(header):
            self._writer = None  # its status stays unknown, what follows is taken
            bay.stats.too_large += 1
        else:
            # What this stream brought and nobody has read is not dropped for what comes next.
            self._spare = any(group is not self._group for group in self._held.values())
            bay.cache.spare_wanted = self._spare
            try:
                self._writer = bay.track.begin_fetched(header, now)
            finally:
                bay.cache.spare_wanted = False
            bay.began(self._writer, header, now)
            self._hold(bay.track.groups[location.group])
        self._pass(location, inclusive=False)
        self._prior = location
        if self._bridge is not None and self._writer is not None:
            writer = self._writer
            self._bridge.take(writer if isinstance(writer, StoredObject) else writer.stored)

    def chunk(self, data: bytes | memoryview) -> None:
        """Take payload octets.

        Raises:
            MalformedTrack: they differ from what is stored.
            StoreFull: the cache has no room for the rest.
        """
        if self._writer is not None:
            self._bay.cache.spare_wanted = self._spare
            try:
                self._writer.write(data)
            finally:
                self._bay.cache.spare_wanted = False
            self.octets += len(data)
            self._bay.stats.octets_in += len(data)

    def completed(self) -> None:
        """Count an Object."""
        if self._writer is None:
            return  # too large, or not asked for
        self._writer = None
        self.objects += 1
        self._bay.stats.objects_in += 1

    def run(self, run: Run, now: float) -> None:
        """Take the end of an Object and what follows it; see `started` and `chunk`."""
        take_each(self, as_items(*run), now)

    def marked(self, kind: RangeKind, location: Location) -> None:
        """Note a marker: only NON_EXISTENT says something for ever."""
        if kind is RangeKind.NON_EXISTENT:
            self._pass(location, inclusive=True)
        elif self._top is None:
            self._top = MAX_VI64  # the marker covers what lies above it
        self._prior = location

    def ended(self, reset_code: int | None) -> None:
        """Drop a partial Object; what lies behind the last one is learnt by `complete`."""
        if self._writer is not None:
            self._bay.track.abandon(self._writer)
            self._writer = None
        self._hold(None)

    def part(self) -> StoredObject | None:
        """As `ended`, but the partial Object is kept; see `Intake.part`."""
        writer, self._writer = self._writer, None
        held = None if writer is None else hold(self._bay.track, writer)
        self._hold(None)
        return held

    def complete(self, end: Location) -> None:
        """The stream ended with FIN: nothing else exists up to ``end``, both orders alike."""
        if not self._descending:
            self._learn(self._start if self._prior is None else following(self._prior), end)
            return
        if self._prior is None:
            self._learn(self._start, end)
            return
        group_end = Location(self._prior.group, MAX_VI64)
        self._learn(following(self._prior), min(group_end, end))
        if self._prior.group > self._start.group:
            self._learn(self._start, Location(self._prior.group - 1, MAX_VI64))
        if self._top is not None and self._top < end.group:
            self._learn(Location(self._top + 1, 0), end)

    def _hold(self, group: Group | None) -> None:
        """Keep the Group that arrives now in the cache; the one before is kept for its readers."""
        if group is self._group:
            return
        if group is not None:
            group.arriving += 1
            if self._held.get(group.group_id) is not group:
                group.wanted += 1
                self._held[group.group_id] = group
        if self._group is not None:
            self._group.arriving -= 1
            self._bay.track.drop_if_empty(self._group)
        self._group = group

    def _pass(self, location: Location, *, inclusive: bool) -> None:
        """Learn that nothing exists between the item before and ``location``."""
        prior = self._prior
        if not self._descending:
            last = location if inclusive else preceding(location)
            if last is not None:
                self._learn(self._start if prior is None else following(prior), last)
            return
        if self._top is None:
            self._top = location.group
        first = max(self._start, Location(location.group, 0))
        if prior is not None and prior.group >= location.group:
            if prior.group == location.group:
                first = following(prior) or prior
            else:
                self._learn(following(prior), Location(prior.group, MAX_VI64))
                above = Location(location.group + 1, 0)
                self._learn(above, Location(prior.group - 1, MAX_VI64))
        if inclusive:
            self._learn(first, location)
        elif location.object > 0:
            self._learn(first, Location(location.group, location.object - 1))

    def _learn(self, start: Location | None, end: Location) -> None:
        end = min(end, self._end)
        if start is not None and start <= end:
            self._bay.track.learn(max(start, self._start), end)
