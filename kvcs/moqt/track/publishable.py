"""What an Original Publisher may publish next: Objects never change, an end stays (MOQT §2.1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvcs.errors import UsageError
from kvcs.moqt.names import MAX_VI64
from kvcs.moqt.objects import ObjectHeader, ObjectStatus
from kvcs.moqt.track.stored import Group, Subgroup

if TYPE_CHECKING:
    from kvcs.moqt.track.store import Track


def check_whole(header: ObjectHeader, parts: Sequence[memoryview]) -> None:
    """Hold what an application gives for one Object to what can be sent: else whoever asks for it
    would pay with the session.

    Raises:
        UsageError: the parts are no octets, or not as many as the header says; or a number of it
            is out of bounds.
    """
    views = (memoryview, bytes, bytearray)
    if isinstance(parts, views) or not all(isinstance(part, views) for part in parts):
        raise UsageError("the payload is a sequence of memoryviews, such as (memoryview(payload),)")
    octets = sum(memoryview(part).nbytes for part in parts)
    if octets != header.payload_length or octets != sum(map(len, parts)):
        raise UsageError(
            f"the parts have {octets} octets, the header says {header.payload_length}; views of"
            " arrays are cast to octets first"
        )
    ids = (header.group_id, header.object_id, header.subgroup_id or 0)
    if not all(isinstance(number, int) and 0 <= number <= MAX_VI64 for number in ids):
        raise UsageError(f"Group, Object and Subgroup ID lie in 0..2**64-1, not {ids}")
    priority = header.publisher_priority
    if priority is not None and not 0 <= priority <= 255:
        raise UsageError(f"Publisher Priority lies in 0..255, not {priority}")


def check_publishable(track: Track, headers: Sequence[ObjectHeader]) -> None:
    """Hold an Object, or several of one Subgroup, against what was published before.

    Raises:
        UsageError: a Location was used, its Group or Track has ended, it is out of the order of
            its Subgroup, or it differs from its Subgroup in priority; or several do not follow
            each other.
    """
    _check(track, headers[0])
    if len(headers) == 1:
        return
    _check_run(headers)
    first, last = headers[0].location, headers[-1].location
    group = track.groups.get(first.group)
    if (track.largest is None or track.largest < first) and (group is None or group.final is None):
        if track.final is None or last <= track.final:
            return  # nothing was ever published there or behind
    for header in headers[1:]:
        _check(track, header)


def _check_run(headers: Sequence[ObjectHeader]) -> None:
    first = headers[0]
    like = (first.group_id, first.subgroup_id, first.publisher_priority, ObjectStatus.NORMAL)
    for object_id, header in enumerate(headers, first.object_id):
        its = (header.group_id, header.subgroup_id, header.publisher_priority, header.status)
        if its != like or header.object_id != object_id:
            raise UsageError(f"{header.location} does not follow the Objects from {first.location}")
        if header.properties and not first.properties:
            raise UsageError(f"{header.location} has Properties, {first.location} has none")


def _check(track: Track, header: ObjectHeader) -> None:
    location = header.location
    if track.get(location) is not None or _was_evicted(track, header):
        raise UsageError(f"{track.name} already has an Object at {location}; Objects never change")
    if track.ended is not None or (track.final is not None and location > track.final):
        raise UsageError(f"{track.name} has ended; nothing can be published at {location}")
    if header.status is ObjectStatus.END_OF_TRACK and location < (track.largest or location):
        raise UsageError(f"{track.name} cannot end at {location}; it has {track.largest}")
    group = track.groups.get(location.group)
    if group is not None:
        _check_group(track, header, group)


def _was_evicted(track: Track, header: ObjectHeader) -> bool:
    location = header.location
    return track.largest is not None and location <= track.largest and location not in track.known


def _check_group(track: Track, header: ObjectHeader, group: Group) -> None:
    location = header.location
    if group.final is not None and location.object > group.final:
        raise UsageError(f"Group {group.group_id} of {track.name} ended at {group.final}")
    if header.status is not ObjectStatus.NORMAL and location.object < group.object_ids[-1]:
        raise UsageError(f"Group {group.group_id} of {track.name} cannot end at {location}")
    subgroup = None if header.subgroup_id is None else group.subgroups.get(header.subgroup_id)
    if subgroup is not None and subgroup.objects:
        _check_subgroup(track, header, subgroup)


def _check_subgroup(track: Track, header: ObjectHeader, subgroup: Subgroup) -> None:
    if subgroup.finished:
        raise UsageError(f"{_place(track, subgroup)} was finished")
    if header.object_id < subgroup.objects[-1].header.object_id:
        raise UsageError(f"{_place(track, subgroup)}: Object {header.object_id} comes too late")
    priority = header.publisher_priority
    if (track.default_priority if priority is None else priority) != subgroup.priority:
        raise UsageError(
            f"{_place(track, subgroup)} has priority {subgroup.priority}, not {priority}"
        )
    if header.properties and not subgroup.has_properties:
        raise UsageError(f"{_place(track, subgroup)} began without Properties")


def _place(track: Track, subgroup: Subgroup) -> str:
    """For a message; the text of a name costs more than all checks of an Object together."""
    return f"Subgroup {subgroup.subgroup_id} of Group {subgroup.group_id} of {track.name}"
