# mypy: disable-error-code="import-not-found, import-untyped"
"""The peer as subscriber: prints one JSON line for each object it receives.

Events, one a line: ``connected``; ``namespace`` {suffix}; ``accepted`` {track, largest};
``object`` {track, via, group, subgroup, object, status, priority, length, sha256}, where ``via``
is ``live``, ``fill`` or ``fetch``; ``gap`` {track, kind, group, object}, an End of Range marker;
``refused`` {track, code, reason}, which ends it;
``stream`` {track, group, subgroup, clean, code}, the end of a subgroup stream; ``fill`` or
``fetch`` {track, clean}, the end of that stream; ``done`` {track, status, streams, reason}, a
PUBLISH_DONE; and last ``summary`` {tracks: {name: {objects, duplicates, conflicts}}}.

It ends with 0 when every track has what it waits for, 2 when refused, 3 at its deadline.
"""

import argparse
import asyncio
import hashlib
import sys
from pathlib import Path
from typing import Any

from aiomoqt.messages.params import D20ParamType, LocationFilter, RangeFilter
from aiomoqt.types import GroupOrder, ParamType
from common import EXIT_INCOMPLETE, EXIT_OK, connected, parse_namespace, reply, run, say

MOST_STREAMS = 1 << 32
"""A Stream Count above this says that the publisher does not know it."""


class Track:
    """What one track has brought so far."""

    def __init__(self, name: str, arguments: argparse.Namespace, changed: asyncio.Event) -> None:
        self.name = name
        self.digests: dict[tuple[int, int], str] = {}
        self.duplicates = 0
        self.conflicts = 0
        self.stream_ends = 0
        self.streams_owed: int | None = None
        """Stream Count of PUBLISH_DONE."""

        self.fills_opened = 0
        self.past_ended: bool = arguments.mode == "live"
        """The fill or fetch stream has ended, or there is none."""

        self._mode: str = arguments.mode
        self._count: int | None = arguments.count
        self._save: Path | None = arguments.save
        self._past_via = "fetch" if arguments.mode == "fetch" else "fill"
        self._changed = changed

    def live(self, header: Any, _size: int, _time: int, group_id: int, subgroup_id: int) -> None:
        """Take an object of a subgroup stream or a datagram."""
        self._object("live", header, group_id, subgroup_id)

    def past(self, header: Any, *_: object) -> None:
        """Take an object of a fill or fetch stream."""
        self._object(self._past_via, header, header.group_id, header.subgroup_id)

    def ended_stream(
        self, group_id: int, subgroup_id: int, clean: bool = True, reset_code: int = 0
    ) -> None:
        """Take the end of a subgroup stream."""
        self.stream_ends += 1
        say(
            "stream",
            track=self.name,
            group=group_id,
            subgroup=subgroup_id,
            clean=clean,
            code=int(reset_code),
        )
        self._changed.set()

    def publish_done(self, message: Any) -> None:
        """Take the PUBLISH_DONE of the subscription."""
        self.streams_owed = int(message.stream_count or 0)
        say(
            "done",
            track=self.name,
            status=int(message.status_code),
            streams=message.stream_count,
            reason=str(message.reason),
        )
        self._changed.set()

    async def watch_past(self, session: Any, request_id: int, seconds: float) -> None:
        """Wait for the end of the fill or fetch stream."""
        clean = await session.await_fetch_done(request_id, timeout=seconds)
        say(self._past_via, track=self.name, clean=bool(clean))
        self.past_ended = True
        self._changed.set()

    def satisfied(self) -> bool:
        """Tell whether this track has what the command line asks to wait for."""
        if self._count is not None:
            return len(self.digests) >= self._count
        if self._mode == "fetch":
            return self.past_ended
        if self.streams_owed is None or not self.past_ended:
            return False
        ended = self.stream_ends + self.fills_opened
        return self.streams_owed > MOST_STREAMS or ended >= self.streams_owed

    def _object(self, via: str, header: Any, group_id: int, subgroup_id: int) -> None:
        # The peer reuses the header and may lend the payload: take copies.
        payload = bytes(header.payload or b"")
        location = (group_id, header.object_id)
        status = int(header.status or 0)
        digest = hashlib.sha256(payload).hexdigest()
        say(
            "object",
            track=self.name,
            via=via,
            group=group_id,
            subgroup=subgroup_id,
            object=header.object_id,
            status=status,
            priority=header.publisher_priority,
            length=len(payload),
            sha256=digest,
        )
        if status == 0:
            if location in self.digests:
                self.duplicates += 1
                self.conflicts += self.digests[location] != digest
            self.digests[location] = digest
            if self._save is not None:
                folder = self._save / self.name
                folder.mkdir(parents=True, exist_ok=True)
                (folder / f"{group_id}.{header.object_id}").write_bytes(payload)
        self._changed.set()


async def main(arguments: argparse.Namespace) -> int:
    """Do what the command line says."""
    changed = asyncio.Event()
    tracks = [Track(name, arguments, changed) for name in arguments.track]
    satisfied = False
    watchers: list[asyncio.Task[None]] = []
    async with connected(arguments.url, arguments.ca, {}) as session:
        namespace = await find_namespace(session, arguments)
        by_request: dict[int, Track] = {}
        session.on_fetch_gap = lambda marker, request_id: say(
            "gap",
            track=by_request[request_id].name,
            kind=marker.end_of_range,
            group=marker.group_id,
            object=marker.object_id,
        )
        for track in tracks:
            if arguments.mode == "fetch":
                request_id = await fetch(session, namespace, track, arguments, by_request)
            else:
                request_id = await subscribe(session, namespace, track, arguments, by_request)
            if not track.past_ended:
                watchers.append(
                    asyncio.create_task(track.watch_past(session, request_id, arguments.seconds))
                )
        try:
            async with asyncio.timeout(arguments.seconds):
                while not (satisfied := all(track.satisfied() for track in tracks)):
                    changed.clear()
                    await changed.wait()
        except TimeoutError:
            pass
        for watcher in watchers:
            watcher.cancel()
    say(
        "summary",
        tracks={
            track.name: {
                "objects": len(track.digests),
                "duplicates": track.duplicates,
                "conflicts": track.conflicts,
            }
            for track in tracks
        },
    )
    return int(EXIT_OK if satisfied else EXIT_INCOMPLETE)


async def find_namespace(session: Any, arguments: argparse.Namespace) -> tuple[bytes, ...]:
    """Return the namespace given, or the first one announced below the prefix given."""
    prefix: tuple[bytes, ...] = parse_namespace(arguments.namespace)
    if not arguments.discover:
        return prefix
    await session.subscribe_namespace(prefix, wait_response=True)
    found = await session.await_namespace(timeout=arguments.seconds)
    suffix = tuple(bytes(field) for field in found.namespace_suffix or ())
    say("namespace", suffix=[field.hex() for field in suffix])
    return (*prefix, *suffix)


async def subscribe(
    session: Any,
    namespace: tuple[bytes, ...],
    track: Track,
    arguments: argparse.Namespace,
    by_request: dict[int, Track],
) -> int:
    """SUBSCRIBE from the next object on, with a fill from the start unless the mode is live."""
    start: int = arguments.start_group
    parameters: dict[int, Any] = {}
    if arguments.mode == "join":
        parameters[D20ParamType.FILL_PARAMETERS] = {
            ParamType.LOCATION_FILTER: LocationFilter.absolute(start, 0)
        }
    message = session.subscribe(
        namespace,
        track.name,
        parameters=parameters,
        location_filter=LocationFilter.next_object(),
        on_object=track.live,
        on_done=track.publish_done,
    )
    by_request[message.request_id] = track
    session.register_fetch_object_handler(message.request_id, track.past)
    accepted = await reply(session, message.request_id, track.name)
    session.register_stream_end_handler(accepted.track_alias, track.ended_stream)
    largest = None
    if accepted.largest_group_id is not None:
        largest = (accepted.largest_group_id, accepted.largest_object_id)
        # A fill stream opens only if something lies in its range, and counts as a stream.
        track.fills_opened = int(arguments.mode == "join" and largest >= (start, 0))
    say("accepted", track=track.name, largest=largest)
    return int(message.request_id)


async def fetch(
    session: Any,
    namespace: tuple[bytes, ...],
    track: Track,
    arguments: argparse.Namespace,
    by_request: dict[int, Track],
) -> int:
    """FETCH whole groups, of which ``--objects A-B`` selects Object IDs by a range filter."""
    parameters: dict[int, Any] = {}
    if arguments.objects is not None:
        first, last = (int(part) for part in arguments.objects.split("-"))
        parameters[D20ParamType.OBJECTID_FILTER] = [RangeFilter(ranges=((first, last),))]
    message = session.fetch(
        namespace,
        track.name,
        group_order=GroupOrder.DESCENDING if arguments.descending else GroupOrder.ASCENDING,
        parameters=parameters,
        location_filter=LocationFilter.absolute(arguments.start_group, 0, arguments.end_group),
        on_object=track.past,
    )
    by_request[message.request_id] = track
    accepted = await reply(session, message.request_id, track.name)
    # The peer keeps the End Location as "last object plus one", as older drafts had it.
    end = [accepted.largest_group_id, accepted.largest_object_id - 1]
    say("accepted", track=track.name, end=end, end_of_track=bool(accepted.end_of_track))
    return int(message.request_id)


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--ca", type=Path, required=True)
    parser.add_argument("--namespace", required=True, help="hexadecimal fields joined by /")
    parser.add_argument("--discover", action="store_true", help="the namespace is a prefix")
    parser.add_argument("--track", action="append", required=True)
    parser.add_argument("--mode", choices=("live", "join", "fetch"), default="join")
    parser.add_argument("--start-group", type=int, default=0)
    parser.add_argument("--end-group", type=int, help="fetch: last group; else up to the largest")
    parser.add_argument("--objects", help="fetch: first-last Object ID of each group")
    parser.add_argument("--descending", action="store_true", help="fetch: latest group first")
    parser.add_argument("--count", type=int, help="wait for so many objects, not for the end")
    parser.add_argument("--save", type=Path, help="folder to write the payloads into")
    parser.add_argument("--seconds", type=float, default=20.0)
    return parser.parse_args(argv)


if __name__ == "__main__":
    options = parse_arguments(sys.argv[1:])
    sys.exit(run(lambda: main(options)))
