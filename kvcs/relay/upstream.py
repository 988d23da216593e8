"""What a relay asks of its upstreams for one Track: subscriptions, and ranges that it lacks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

from kvcs.access.permits import Place
from kvcs.moqt.filters import LocationFilter
from kvcs.moqt.intervals import LocationSet, following
from kvcs.moqt.names import MAX_VI64, GroupOrder, Location
from kvcs.moqt.parameters import Parameters
from kvcs.moqt.sending.delivery import RangeSender
from kvcs.moqt.streams import SubgroupHeader
from kvcs.moqt.track.bridge import Bridge, let_go
from kvcs.moqt.track.store import Track
from kvcs.moqt.track.stored import Group, StoredObject
from kvcs.relay.intake import Bay, Intake, RangeIntake, SubgroupIntake
from kvcs.relay.timers import Callback, Timer
from kvcs.relay.turns import Owner

MAX_RETRIES = 3
"""Times that a FETCH refused for load is repeated after its Retry Interval."""

MAX_STEPS = 1024
"""FETCHes of one Group that one retrieval makes of a session that takes no longer ones."""

MAX_UNKNOWN_RUNS = 256
"""Runs that are told apart of what a retrieval left unknown; beyond them all of it counts so."""


class Ask(Enum):
    """What a downstream request is."""

    SUBSCRIBE = auto()
    FETCH = auto()
    STATUS = auto()
    PUBLISH = auto()
    """A PUBLISH of ours that a SUBSCRIBE_TRACKS is owed."""

    FORWARD = auto()
    """An update that resumes a subscription which is served."""


@dataclass(slots=True, eq=False)
class Waiting:
    """A downstream request that has no answer yet."""

    place: Place
    """Where it came from."""

    ask: Ask
    """What it is."""

    parameters: Parameters
    """Its parameters."""

    patient_until: float = 0.0
    """Until when it waits for a publisher to come, if it asked for that."""

    timer: Timer | None = None
    """Refuses it unless it was answered before."""

    def stop_waiting(self) -> None:
        """It is answered, refused or gone."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


@dataclass(slots=True, eq=False)
class Retrieval:
    """A range that is being got from upstream, for all readers that wait for it.

    A fill that came with the upstream SUBSCRIBE is one too; its end is known with SUBSCRIBE_OK.
    """

    start: Location
    end: Location
    order: GroupOrder
    candidates: list[int]
    """Sessions that were not asked yet."""

    began_at: float
    progress_at: float
    """When something of it came last."""

    owner: Owner = None
    """Whose reader has begun it: the session that its turns count for."""

    place: Place | None = None
    """The FETCH that runs, or the SUBSCRIBE whose fill this is; None while it waits its turn."""

    fill: bool = False
    end_known: bool = False
    """Whether FETCH_OK, or the SUBSCRIBE_OK of a fill, has come."""

    confirmed_end: Location | None = None
    """End Location that it named."""

    stream_done: bool = False
    """Whether the data stream ended with FIN."""

    turn: tuple[int, Callback] | None = None
    """Session and call of a FETCH that waits for its turn there."""

    intake: RangeIntake | None = None
    stream_id: int | None = None
    readers: list[RangeSender] = field(default_factory=list)
    held: dict[int, Group] = field(default_factory=dict)
    """Groups that it brought and that a reader may still have to pass."""

    one_group: bool = False
    """Whether the session that is asked takes FETCHes of one Group alone."""

    cursor: Location | None = None
    """Where its FETCH begins, if not at the start of the range."""

    steps: int = 0
    """FETCHes of one Group that were made."""

    retries: int = 0
    bridge: Bridge | None = None
    """Delivers the range to subscriptions whose source has changed; see `Failover`."""

    partial: StoredObject | None = None
    """An Object of which a part has come, kept for the session that is asked next."""

    objects: int = 0
    octets: int = 0

    def covers(self, location: Location) -> bool:
        """Whether ``location`` lies in the range."""
        return self.start <= location <= self.end

    @property
    def wanted(self) -> bool:
        """Whether somebody waits for it, or may still join it."""
        return not self.readers or self.awaited

    @property
    def awaited(self) -> bool:
        """Whether a reader or subscriptions wait for it."""
        return self.bridge is not None or any(not reader.closed for reader in self.readers)

    def join(self, reader: RangeSender) -> None:
        """Let a reader wait for the range."""
        if all(other is not reader for other in self.readers):
            self.readers.append(reader)

    @property
    def asked(self) -> tuple[Location, Location]:
        """What one FETCH asks for: the range, or as much of it as the session takes at a time."""
        start = self.start if self.cursor is None else self.cursor
        if self.one_group and start.group < self.end.group:
            return start, Location(start.group, MAX_VI64)
        return start, self.end

    def location_filter(self) -> LocationFilter:
        """What is asked for, as a FETCH names it."""
        start, end = self.asked
        return LocationFilter.between(start, end)

    def learnt_end(self) -> Location | None:
        """Up to where a complete stream tells what does not exist; None where it tells nothing."""
        confirmed = self.confirmed_end
        if confirmed is None:
            return None
        _, end = self.asked
        if end.object == MAX_VI64 and confirmed.group >= end.group:
            # A whole Group was asked for: its end is named only as far as it is known.
            return end
        return min(end, confirmed)

    def next_cursor(self, unknown: LocationSet) -> Location | None:
        """Where the next FETCH of one Group begins, after one that is over; None after the last.

        Args:
            unknown: what of the range is not known yet.
        """
        _, end = self.asked
        behind = following(end)
        if not self.one_group or behind is None or self.steps >= MAX_STEPS:
            return None
        return next((max(first, behind) for first, last in unknown.ranges() if last > end), None)

    def close_intake(self, track: Track) -> None:
        """End the data stream that brings the range, if there is one; a partial Object is kept."""
        if self.intake is not None:
            partial = self.intake.part()
            if partial is not None:
                self.let_partial_go(track)
                self.partial = partial
            self.objects += self.intake.objects
            self.octets += self.intake.octets
            self.intake = None

    def let_partial_go(self, track: Track) -> None:
        """Nobody is asked for the rest of an Object."""
        partial, self.partial = self.partial, None
        if partial is not None:
            let_go(track, partial)

    def let_go(self, track: Track, *, all_of_it: bool = False) -> None:
        """Unmark Groups that every reader has passed; they may be evicted like others."""
        for group_id, group in list(self.held.items()):
            last = _last(group)
            if all_of_it or all(reader.has_passed(last) for reader in self.readers):
                del self.held[group_id]
                group.wanted -= 1

    def kept_for(self, reader: RangeSender) -> int:
        """Octets of the Groups that stay because a reader has not passed them."""
        if reader.closed:
            return 0
        return sum(
            group.octets for group in self.held.values() if not reader.has_passed(_last(group))
        )

    def not_brought(self, track: Track) -> LocationSet:
        """What of the range upstream could not tell; what was evicted since is not in it."""
        unknown = self.left_unknown(track)
        for group_id, group in self.held.items():
            if track.groups.get(group_id) is not group:
                unknown.remove(Location(group_id, 0), Location(group_id, MAX_VI64))
        return unknown

    def left_unknown(self, track: Track) -> LocationSet:
        """What of the range is still unknown."""
        unknown = LocationSet()
        start = self.start
        while (run := track.first_unknown(start, self.end)) is not None:
            if len(unknown) >= MAX_UNKNOWN_RUNS:
                unknown.add(start, self.end)
                break
            unknown.add(*run)
            if run[1] >= self.end:
                break
            start = run[1]
            # The run's last Location is unknown, so the search goes on behind it.
            start = (
                Location(start.group, start.object + 1)
                if start.object < MAX_VI64
                else (Location(start.group + 1, 0))
            )
        return unknown


@dataclass(slots=True, eq=False)
class Upstream:
    """One upstream subscription."""

    place: Place
    published: bool = False
    """Whether a PUBLISH has begun it."""

    tried: bool = False
    """Whether others are asked if it is refused: it was not announced by this session."""

    established: bool = False
    forward: bool = True
    """Its Forward State, as far as it is sure that everything comes."""

    wanted: bool = True
    """The Forward State that it is to have."""

    asked: bool = True
    """The Forward State that a REQUEST_UPDATE without answer asks for."""

    update_id: int | None = None
    """That REQUEST_UPDATE."""

    fill: Retrieval | None = None
    """The fill that its SUBSCRIBE asked for, while it runs."""

    before: tuple[Location, Location] | None = None
    """What was published before it was established, and was not here then, for others that are
    followed to bring: behind the first Location, up to the second."""

    streams: dict[int, SubgroupIntake] = field(default_factory=dict)
    """Subgroup streams that are open."""

    @property
    def flowing(self) -> bool:
        """Whether what is published comes here."""
        return self.established and self.forward

    def open_stream(self, bay: Bay, stream_id: int, header: SubgroupHeader) -> Intake:
        """A subgroup stream of the subscription began."""
        intake = self.streams[stream_id] = SubgroupIntake(bay, header)
        return intake

    def part_streams(self) -> list[StoredObject]:
        """The publisher is gone and another one goes on; returns partial Objects, held."""
        streams, self.streams = self.streams, {}
        parted = [intake.part() for intake in streams.values()]
        return [stored for stored in parted if stored is not None]

    def arriving(self) -> Iterator[tuple[int, int, int]]:
        """Stream IDs, Publisher Priorities and octets of the Groups of what arrives."""
        for stream_id, intake in self.streams.items():
            yield stream_id, intake.priority, intake.octets

    def close_streams(self, code: int) -> None:
        """The publisher is gone: what is open ends as it would with a reset."""
        streams, self.streams = self.streams, {}
        for intake in streams.values():
            intake.ended(code)


def _last(group: Group) -> Location:
    """The largest Location of a Group that is stored."""
    return Location(group.group_id, group.object_ids[-1] if group.object_ids else 0)
