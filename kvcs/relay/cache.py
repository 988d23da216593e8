"""The relay's cache: every Track, one budget of octets, no I/O (MOQT §7.1).

A Track's Objects are in its `kvcs.moqt.track.store.Track`; this decides which of them leave. Whole
Groups leave, least recently used first, and become unknown, never non-existent. A Group that is
still arriving stays, and so does the newest of a live Track while anything else can go.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from enum import IntEnum
from heapq import heapify, heappop, heappush
from math import inf, nextafter
from typing import Protocol

from kvcs.errors import RequestError, StoreFull
from kvcs.moqt.errors import MalformedTrack, PublishDoneCode, RequestCode
from kvcs.moqt.intervals import FIRST, following
from kvcs.moqt.names import FullTrackName, Location
from kvcs.moqt.track.store import Track
from kvcs.moqt.track.stored import StoreBudget
from kvcs.relay.shelf import Shelf, ShelvedGroup, restore, shelved, take_back
from kvcs.relay.stats import RelayStats

TRACK_OCTETS = 4096
"""What a Track counts in the budget beside its Objects: tables, names, known ranges."""

EVICTION_SHARE = 32
"""At least this part of the budget is freed at a time, so that the search for it pays."""

EXPIRIES_SLACK = 256
"""Expiries of what left already, kept beyond one for each Track, before they are swept out."""

AGES_SLACK = 1024
"""Entries about Objects that left already, before the list of ages is rebuilt."""

RETRY_MS = 1000
"""Retry Interval that goes with EXCESSIVE_LOAD."""


class _Need(IntEnum):
    """How much a Group is needed: the more, the later it leaves."""

    NONE = 0
    NEWEST = 1
    """The newest of a live Track: joiners ask for it."""

    READ = 2
    """Somebody waits for it and has not read it."""


class Ranked(Protocol):
    """Something that comes in."""

    @property
    def priority(self) -> int:
        """Publisher Priority: the lower, the more it counts."""


class Relief(Protocol):
    """Gives up what keeps room from being made; see `kvcs.relay.pressure`."""

    def unpin(self, octets: int, now: float) -> bool:
        """Reset readers that take nothing, until ``octets`` are not kept for any."""

    def preempt(self, octets: int, priority: int) -> bool:
        """Stop what arrives with a lower priority, until it keeps ``octets`` less."""


class CachedTrack:
    """A Track in the cache, with what the relay remembers of it."""

    __slots__ = ("ages", "due", "finished_by", "shelf", "track")

    def __init__(self, track: Track, shelf: Shelf | None = None) -> None:
        self.track = track
        self.shelf = shelf
        self.ages: deque[tuple[float, int, int]] = deque()
        """When each Object's first octet came, with its Group and Object ID; oldest first."""
        self.due: float | None = None
        """When the oldest Object expires, where that is scheduled."""
        self.finished_by: set[int] = set()
        """Sessions that published the Track to its end: they have nothing new to say of it."""

    @property
    def finished(self) -> bool:
        """Whether the Track has come to its end, so that its Largest Object is the last one."""
        track = self.track
        return track.largest is not None and (
            track.final is not None or track.ended == PublishDoneCode.TRACK_ENDED
        )

    @property
    def whole(self) -> bool:
        """Whether the Track has ended and every Object up to its end is here or does not exist."""
        track = self.track
        if not self.finished or track.largest is None:
            return False
        end = track.largest if track.final is None else max(track.final, track.largest)
        return not self.lacks(FIRST, end)

    def lacks(self, start: Location, end: Location) -> bool:
        """Whether a Location in ``start``..``end`` is neither known nor on the shelf."""
        track = self.track
        shelved: Mapping[int, int] = {} if self.shelf is None else self.shelf.groups(track.name)
        while (run := track.first_unknown(start, end)) is not None:
            group_id, object_id = run[0]
            known_to = shelved.get(group_id, -1)
            if known_to < object_id:
                return True
            behind = following(Location(group_id, known_to))
            if behind is None or behind > end:
                break
            start = behind
        return False


class RelayCache:
    """All Tracks of a relay.

    Args:
        octets: budget over all Tracks, bookkeeping included.
        max_tracks: Tracks that are remembered.
        in_use: whether somebody still needs a Track that is given by name; such ones stay.
        stats: counts what leaves.
        let_go: called before Groups are looked for that can leave, to unmark those whose readers
            have passed them.
    """

    def __init__(
        self,
        octets: int,
        max_tracks: int,
        in_use: Callable[[FullTrackName], bool],
        stats: RelayStats,
        let_go: Callable[[], None] | None = None,
    ) -> None:
        self.budget = StoreBudget(octets, self._make_room)
        self._max_tracks = max_tracks
        self._in_use = in_use
        self._let_go = let_go
        self.spare_wanted = False
        """Whether what somebody waits for must stay, whatever is to come in."""
        self.now = 0.0
        """When something came last, in the caller's clock."""
        self.taking: Ranked | None = None
        """The Subgroup from upstream that comes in, while one does."""
        self.on_due: Callable[[], None] | None = None
        """Called when `next_timer` is earlier than it was."""
        self.pressure: Relief | None = None
        """What gives way where nothing can leave."""
        self._stats = stats
        self.shelf: Shelf | None = None
        """Where Groups go that leave to make room."""
        self._entries: OrderedDict[FullTrackName, CachedTrack] = OrderedDict()
        self._expiries: list[tuple[float, int, FullTrackName]] = []
        self._serial = 0
        self._sent_objects = 0
        self._sent_octets = 0

    def __len__(self) -> int:
        """Number of Tracks."""
        return len(self._entries)

    @property
    def groups(self) -> int:
        """Number of Groups, over all Tracks."""
        return sum(len(entry.track.groups) for entry in self._entries.values())

    @property
    def octets(self) -> int:
        """Octets in use, bookkeeping included."""
        return self.budget.used

    @property
    def sent(self) -> tuple[int, int]:
        """Objects and payload octets that were sent from all Tracks, past ones included."""
        tracks = [entry.track for entry in self._entries.values()]
        return (
            self._sent_objects + sum(track.objects_sent for track in tracks),
            self._sent_octets + sum(track.octets_sent for track in tracks),
        )

    def get(self, name: FullTrackName) -> CachedTrack | None:
        """The Track, if it is remembered; counts as a use."""
        entry = self._entries.get(name)
        if entry is not None:
            self._entries.move_to_end(name)
        elif self.shelf is not None and self.shelf.groups(name):
            try:
                return self._add(name)
            except RequestError:
                return None
        return entry

    def open(self, name: FullTrackName) -> CachedTrack:
        """The Track, remembered from now on.

        Raises:
            RequestError: EXCESSIVE_LOAD, when as many Tracks as allowed are in use.
        """
        entry = self.get(name)
        return self._add(name) if entry is None else entry

    def _add(self, name: FullTrackName) -> CachedTrack:
        if len(self._entries) >= self._max_tracks:
            self._drop_unused_track()
        try:
            self.budget.reserve(TRACK_OCTETS)
        except StoreFull:
            raise RequestError("the cache is full", RequestCode.EXCESSIVE_LOAD, RETRY_MS) from None
        entry = CachedTrack(Track(name, authoritative=False, budget=self.budget), self.shelf)
        self._entries[name] = entry
        held = None if self.shelf is None else self.shelf.track(name)
        if held is not None:
            restore(entry.track, held)
        return entry

    def drop(self, name: FullTrackName) -> None:
        """Forget a Track and everything of it; quiet where it is not there."""
        entry = self._entries.pop(name, None)
        if entry is not None:
            track = entry.track
            track.clear()
            self._sent_objects += track.objects_sent
            self._sent_octets += track.octets_sent
            self.budget.release(TRACK_OCTETS)

    def forget(self, name: FullTrackName) -> None:
        """Forget a Track, on the shelf too."""
        if self.shelf is not None:
            self.shelf.forget(name)
        self.drop(name)

    def shelve(self) -> None:
        """Put every Group on the shelf: the relay stops."""
        for entry in self._entries.values():
            for group_id in entry.track.group_ids():
                self._shelve(entry.track, group_id)

    def _shelve(self, track: Track, group_id: int) -> None:
        shelf = self.shelf
        if shelf is not None and group_id not in shelf.groups(track.name):
            group = shelved(track, track.groups[group_id])
            if group is not None:
                shelf.put(group)

    def take_back(self, track: Track, group: ShelvedGroup) -> None:
        """Store a Group that came from the shelf, where its Track is still the one that it was."""
        entry = self._entries.get(group.name)
        if entry is None or entry.track is not track:
            return
        try:
            for location, born in take_back(track, group):
                self.began(entry, location, born)
        except StoreFull:
            pass  # it is asked for upstream, which waits until there is room
        except MalformedTrack:
            # What came meanwhile is another publication's: the file is not asked again.
            if self.shelf is not None:
                self.shelf.forget(group.name)

    def drop_if_empty(self, name: FullTrackName) -> None:
        """Forget a Track of which no Object is left."""
        entry = self._entries.get(name)
        if entry is not None and not entry.track.groups:
            self.drop(name)

    # MAX_CACHE_DURATION

    def began(self, entry: CachedTrack, location: Location, now: float) -> None:
        """Note that an Object's first octet came: its time in the cache begins (§10)."""
        age = (now, *location)
        ages = entry.ages
        if not ages:
            ages.append(age)
            self.schedule(entry)
        elif age < ages[-1]:
            insort(ages, age)  # it was on the shelf meanwhile
            self.schedule(entry)
        else:
            ages.append(age)
        if len(ages) % AGES_SLACK == 0:
            self._prune(entry)

    def began_run(self, entry: CachedTrack, first: Location, count: int, now: float) -> None:
        """As `began`, of Objects of one Group whose IDs follow each other."""
        ages = entry.ages
        group_id, object_id = first
        if not ages or ages[-1] > (now, group_id, object_id):
            for number in range(object_id, object_id + count):
                self.began(entry, Location(group_id, number), now)
            return
        before = len(ages)
        ages.extend([(now, group_id, number) for number in range(object_id, object_id + count)])
        if before // AGES_SLACK != len(ages) // AGES_SLACK:
            self._prune(entry)

    def schedule(self, entry: CachedTrack) -> None:
        """Arrange that a Track's oldest Object expires; again when its Properties changed."""
        seconds = entry.track.cache_seconds
        entry.due = entry.ages[0][0] + seconds if seconds is not None and entry.ages else None
        if entry.due is not None:
            self._serial += 1
            heappush(self._expiries, (entry.due, self._serial, entry.track.name))
            if self.on_due is not None and self._expiries[0][1] == self._serial:
                self.on_due()
            if len(self._expiries) > 2 * len(self._entries) + EXPIRIES_SLACK:
                self._prune_expiries()

    def _prune_expiries(self) -> None:
        """Forget what is no longer due: Tracks that left may have been meant to stay for ever."""
        entries = self._entries
        self._expiries = [
            expiry
            for expiry in self._expiries
            if (entry := entries.get(expiry[2])) is not None and entry.due == expiry[0]
        ]
        heapify(self._expiries)

    def next_timer(self) -> float | None:
        """When the next Object has expired: not at its time, but after it (§10)."""
        return nextafter(self._expiries[0][0], inf) if self._expiries else None

    def receive_timer(self, now: float) -> None:
        """Drop what has expired: its status becomes unknown."""
        while self._expiries and self._expiries[0][0] < now:
            due, _, name = heappop(self._expiries)
            entry = self._entries.get(name)
            if entry is not None and entry.due == due:
                self._expire(entry, now)
                self.schedule(entry)
                if not self._in_use(name):
                    self.drop_if_empty(name)

    def _expire(self, entry: CachedTrack, now: float) -> None:
        track = entry.track
        seconds = track.cache_seconds
        while seconds is not None and entry.ages and now > entry.ages[0][0] + seconds:
            born, group_id, object_id = entry.ages.popleft()
            stored = track.get(Location(group_id, object_id))
            if stored is not None and stored.born == born:
                track.forget(stored)
                self._stats.objects_expired += 1

    @staticmethod
    def _prune(entry: CachedTrack) -> None:
        """Forget the ages of Objects that were evicted, once they are the greater part."""
        track = entry.track
        kept = sum(len(group.object_ids) for group in track.groups.values())
        if len(entry.ages) > 2 * kept + AGES_SLACK:
            entry.ages = deque(
                age for age in entry.ages if track.get(Location(age[1], age[2])) is not None
            )

    # Eviction

    def _make_room(self, octets: int) -> None:
        """Free ``octets`` at least, and a share of the budget where old Groups can go."""
        if self._let_go is not None:
            self._let_go()
        goal = max(octets, self.budget.limit // EVICTION_SHARE)
        freed = 0
        for need in _Need:
            if need is _Need.READ:
                if self.spare_wanted:
                    return
                freed += self._unpin(octets - freed)
            freed += self._drop_groups(need, goal - freed)
            if freed >= octets:
                return
            goal = octets
        relief, taking = self.pressure, self.taking
        if relief is not None and taking is not None:
            if relief.preempt(octets - freed, taking.priority):
                self._drop_groups(_Need.READ, octets - freed)

    def _unpin(self, octets: int) -> int:
        """Let readers that take nothing go; returns the octets that were freed by it."""
        if self.pressure is None or octets <= 0 or not self.pressure.unpin(octets, self.now):
            return 0
        if self._let_go is not None:
            self._let_go()
        return self._drop_groups(_Need.NEWEST, octets)

    def _drop_groups(self, need: _Need, octets: int) -> int:
        """Evict Groups until ``octets`` are free or nothing is left that may go; returns them."""
        freed = 0
        for _, name, group_id in sorted(self._evictable(need)):
            if freed >= octets:
                break
            freed += self._evict(name, group_id)
        return freed

    def _evict(self, name: FullTrackName, group_id: int) -> int:
        entry = self._entries.get(name)
        if entry is None:
            return 0  # it left with its last Group
        self._shelve(entry.track, group_id)
        freed = entry.track.evict_group(group_id)
        self._stats.groups_evicted += 1
        if not entry.track.groups and not self._in_use(name):
            self.drop(name)
            freed += TRACK_OCTETS
        return freed

    def _evictable(self, need: _Need) -> Iterator[tuple[int, FullTrackName, int]]:
        """Groups that nobody needs more than ``need``, with their last use; none that arrives."""
        for name, entry in self._entries.items():
            track = entry.track
            group_ids = track.group_ids()
            live = track.ended is None and self._in_use(name)
            newest = group_ids[-1] if live and group_ids else None
            for group_id in group_ids:
                group = track.groups[group_id]
                if group.wanted:
                    needed = _Need.READ
                else:
                    needed = _Need.NEWEST if group_id == newest else _Need.NONE
                if needed <= need and not group.arriving:
                    yield group.used, name, group_id

    def _drop_unused_track(self) -> None:
        for name in self._entries:
            if not self._in_use(name):
                track = self._entries[name].track
                for group_id in track.group_ids():
                    self._shelve(track, group_id)
                self.drop(name)
                return
        raise RequestError("too many tracks", RequestCode.EXCESSIVE_LOAD, RETRY_MS)
