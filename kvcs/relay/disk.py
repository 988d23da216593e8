"""Groups that the relay's cache had no room for, in files: they survive a restart (MOQT §7.1).

Each file is one Group, written under another name and renamed, so that a crash leaves none half
written. It carries a keyed digest of its head and one of its payloads: nothing of a file is used
before both were checked, and a wrong one is dropped. Reading and writing happen in one thread of
their own, and what waits for it is bounded. A disk that is full or fails costs hits and no more.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import secrets
import stat
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from kvcs.errors import FileError
from kvcs.moqt.errors import ProtocolViolation
from kvcs.moqt.names import FullTrackName, Location
from kvcs.moqt.objects import ObjectHeader, ObjectStatus
from kvcs.moqt.properties import KeyValues, Property, find_property
from kvcs.observe import get_logger
from kvcs.relay.claimed import ClaimedFolder
from kvcs.relay.shelf import ShelvedGroup, ShelvedObject, ShelvedTrack
from kvcs.relay.stats import RelayStats

_log = get_logger("kvcs.relay")

MAGIC = b"kvcsgrp1"
DIGEST_OCTETS = 32
PREFIX_OCTETS = len(MAGIC) + 4 + DIGEST_OCTETS
"""Octets before the head: magic, the head's length, its digest."""

MAX_HEAD_OCTETS = 4 * 2**20
"""Longest head that is read or written: a Group of very many Objects stays in memory alone."""

KEY_FILE, SUFFIX, TEMPORARY = "digest.key", ".group", ".part"

MAX_WAITING_OCTETS = 64 * 2**20
"""Payload octets that wait to be written; Groups beyond are not kept."""

MAX_READS = 64
"""Groups that are being read at a time; what is beyond is asked for upstream."""

PAUSE_SECONDS = 30.0
"""How long nothing is written after the disk has failed."""

FILE_OCTETS = 4096
"""What a file counts at least beside its payload."""


@dataclass(slots=True)
class _Slot:
    """One file."""

    path: Path
    octets: int
    expires: float | None
    """When its oldest Object expires, seconds since 1970."""


class Disk:
    """A `Shelf` of files; see `Disk.open` and `Disk.close`.

    Args:
        folder: where the files are; it is made where it is not there.
        octets: most octets of all files.
        stats: counts what happens.
        clock: the wall clock: times in files have to mean the same after a restart.
        monotonic: the clock of Groups that are put; the loop's is this one.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        octets: int,
        stats: RelayStats,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._limit, self._stats = Path(folder), octets, stats
        self._clock, self._now = clock, monotonic
        self._thread = ThreadPoolExecutor(1, "kvcs-disk")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._claim: ClaimedFolder | None = None
        self._key = b""
        self._slots: OrderedDict[tuple[FullTrackName, int], _Slot] = OrderedDict()
        self._writing: dict[tuple[FullTrackName, int], _Slot] = {}
        """Files that are being written, or wait for it; `forget` takes them out."""
        self._tracks: dict[FullTrackName, tuple[dict[int, int], ShelvedTrack]] = {}
        self._used = self._waiting = self._reads = self._serial = 0
        self._paused_until = 0.0
        self._is_draining = False
        self.on_lost: Callable[[FullTrackName], None] | None = None
        """Called when something of a Track has left."""

    async def open(self) -> None:
        """Read what is there.

        Raises:
            FileError: the folder cannot be made or read, or another relay has it.
        """
        self._loop = asyncio.get_running_loop()
        try:
            found = await self._loop.run_in_executor(self._thread, self._scan)
        except FileError:
            self._release()
            raise
        except OSError as exc:
            self._release()
            raise FileError(f"{exc.filename or self._folder}: {exc.strerror or exc}") from exc
        for _, slot, group in sorted(found, key=lambda each: each[0]):
            self._add(group, slot)
        self._make_room(0)
        _log.info("disk_cache_read", groups=len(self._slots), octets=self._used)

    async def settled(self) -> None:
        """Wait until all that was asked for so far is done."""
        assert self._loop is not None  # it is open
        await self._loop.run_in_executor(self._thread, int)

    def draining(self) -> None:
        """From now on every Group that is put is written: the relay stops, and memory is freed."""
        self._is_draining = True

    async def close(self) -> None:
        """Wait until all that waits is written, and leave the folder to others."""
        await asyncio.to_thread(self._thread.shutdown)
        self._release()

    def _release(self) -> None:
        if self._claim is not None:
            self._claim.release()

    # Shelf

    def names(self) -> Collection[FullTrackName]:
        """Tracks of which something is here."""
        return list(self._tracks)

    def seconds_left(self, name: FullTrackName) -> float | None:
        """Until the first Group of a Track expires; None where none does."""
        slots = [self._slots[name, group_id] for group_id in self.groups(name)]
        expiries = [slot.expires for slot in slots if slot.expires is not None]
        return max(0.0, min(expiries) - self._clock()) if expiries else None

    def put(self, group: ShelvedGroup) -> None:
        """Write a Group in the thread, unless too much waits or the disk has failed."""
        stats, loop = self._stats, self._loop
        key, octets = (group.name, group.group_id), group.octets + FILE_OCTETS
        if (
            loop is None
            or octets > self._limit  # all that is there would go, and it would still not fit
            or (self._waiting + octets > MAX_WAITING_OCTETS and not self._is_draining)
            or self._now() < self._paused_until
            or key in self._slots
            or key in self._writing
        ):
            stats.disk_skipped += 1
            return
        self._make_room(octets)
        if self._used + self._waiting + octets > self._limit:
            stats.disk_skipped += 1
            return
        expires = self._expires(group, self._now())
        self._serial += 1
        name = f"{int(self._clock() * 1e6):020d}-{self._serial:08d}{SUFFIX}"
        slot = self._writing[key] = _Slot(self._folder / name, octets, expires)
        head = self._head(group, self._now())
        self._waiting += octets

        def written(failure: OSError | None) -> None:
            self._waiting -= octets
            wanted = self._writing.get(key) is slot
            if wanted:
                del self._writing[key]
            if failure is None:
                stats.disk_written += 1
                if wanted:
                    self._add(group, slot)
                    self._make_room(0)  # its head may be longer than was reckoned with
                else:
                    self._unlink(slot.path)  # its Track was forgotten meanwhile
                return
            stats.disk_errors += 1
            self._paused_until = self._now() + PAUSE_SECONDS
            _log.warning("disk_cache_not_written", reason=failure.strerror or str(failure))

        def write() -> None:
            try:
                slot.octets = max(octets, self._write(slot.path, head, group))
            except OSError as exc:
                _tell(loop, written, exc)
            else:
                _tell(loop, written, None)

        self._thread.submit(write)

    def groups(self, name: FullTrackName) -> Mapping[int, int]:
        """Groups of a Track whose files are here and have not expired."""
        held = self._tracks.get(name)
        if held is None:
            return {}
        now = self._clock()
        for group_id in list(held[0]):
            slot = self._slots[name, group_id]
            if slot.expires is not None and now > slot.expires:
                self._remove(name, group_id)
        return held[0]

    def track(self, name: FullTrackName) -> ShelvedTrack | None:
        """What was known of a Track when its newest file was written."""
        if not self.groups(name):
            return None
        return self._tracks[name][1]

    def load(
        self, name: FullTrackName, group_id: int, done: Callable[[ShelvedGroup | None], None]
    ) -> bool:
        """Read a Group in the thread; its digests are checked there."""
        loop = self._loop
        if loop is None or self._reads >= MAX_READS or group_id not in self.groups(name):
            return False
        slot = self._slots[name, group_id]
        self._slots.move_to_end((name, group_id))
        self._reads += 1

        def read_it(found: ShelvedGroup | None) -> None:
            self._reads -= 1
            if found is None or (found.name, found.group_id) != (name, group_id):
                self._stats.disk_bad += 1
                self._stats.misses += 1
                if self._slots.get((name, group_id)) is slot:
                    self._remove(name, group_id)
                found = None
            else:
                self._stats.disk_hits += 1
            done(found)

        def read() -> None:
            try:
                found = self._read(slot.path, self._now())
            except (OSError, ValueError, KeyError, TypeError, ProtocolViolation):
                found = None
            _tell(loop, read_it, found)

        self._thread.submit(read)
        return True

    def forget(self, name: FullTrackName) -> None:
        """Remove the files of a Track."""
        held = self._tracks.get(name)
        for group_id in list(held[0]) if held is not None else ():
            self._remove(name, group_id)
        for key in [key for key in self._writing if key[0] == name]:
            del self._writing[key]

    # The index, in the loop's thread

    def _add(self, group: ShelvedGroup, slot: _Slot) -> None:
        key = (group.name, group.group_id)
        if key in self._slots:
            self._remove(*key)
        self._slots[key] = slot
        self._used += slot.octets
        ids = self._tracks[group.name][0] if group.name in self._tracks else {}
        ids[group.group_id] = group.known_to
        self._tracks[group.name] = (ids, group.track)
        self._gauge()

    def _remove(self, name: FullTrackName, group_id: int) -> None:
        slot = self._slots.pop((name, group_id))
        self._used -= slot.octets
        ids = self._tracks[name][0]
        ids.pop(group_id)
        if not ids:
            del self._tracks[name]
        self._gauge()
        self._unlink(slot.path)
        if self.on_lost is not None:
            self.on_lost(name)

    def _unlink(self, path: Path) -> None:
        try:
            self._thread.submit(path.unlink, missing_ok=True)
        except RuntimeError:
            pass  # it is being closed: the next start finds the file, and checks it

    def _make_room(self, octets: int) -> None:
        while self._slots and self._used + self._waiting + octets > self._limit:
            self._remove(*next(iter(self._slots)))

    def _gauge(self) -> None:
        self._stats.disk_groups, self._stats.disk_octets = len(self._slots), self._used

    def _expires(self, group: ShelvedGroup, now: float) -> float | None:
        seconds = find_property(group.track.properties, Property.MAX_CACHE_DURATION)
        if not isinstance(seconds, int):
            return None
        return self._clock() - (now - group.born) + seconds / 1000

    # Files, in the thread

    def _scan(self) -> list[tuple[str, _Slot, ShelvedGroup]]:
        """Index of the folder: heads alone are read; what is not ours to use is removed."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except FileExistsError as exc:
            raise FileError(f"{self._folder}: not a folder") from exc
        self._claim = ClaimedFolder(self._folder)
        self._key = _key(self._folder / KEY_FILE)
        found: list[tuple[str, _Slot, ShelvedGroup]] = []
        now = self._clock()
        for path in list(self._folder.iterdir()):
            if path.suffix not in (TEMPORARY, SUFFIX) or not path.is_file():
                continue  # opening what is no file, a pipe for example, may never end
            if path.suffix == TEMPORARY:
                path.unlink(missing_ok=True)
                continue
            try:
                with path.open("rb") as file:
                    head = self._read_head(file.read(PREFIX_OCTETS), file.read)
                group = _group(head, b"", 0.0)
                expires = head["expires"]
            except (OSError, ValueError, KeyError, TypeError, ProtocolViolation):
                self._stats.disk_bad += 1
                path.unlink(missing_ok=True)
                continue
            if expires is not None and now > expires:
                path.unlink(missing_ok=True)
                continue
            octets = max(group.octets + FILE_OCTETS, path.stat().st_size)
            found.append((path.name, _Slot(path, octets, expires), group))
        return found

    def _digest(self, *parts: bytes | memoryview) -> bytes:
        digest = blake2b(key=self._key, digest_size=DIGEST_OCTETS)
        for part in parts:
            digest.update(part)
        return digest.digest()

    def _head(self, group: ShelvedGroup, now: float) -> dict[str, Any]:
        """The head of a file; times in it are the wall clock's."""
        track, wall = group.track, self._clock() - now
        return {
            "namespace": [field.hex() for field in group.name.namespace],
            "name": group.name.name.hex(),
            "group": group.group_id,
            "known_to": group.known_to,
            "properties": track.properties.write().hex(),
            "largest": track.largest,
            "final": track.final,
            "ended": track.ended,
            "known": track.known,
            "expires": self._expires(group, now),
            "objects": [
                {
                    "id": each.header.object_id,
                    "subgroup": each.header.subgroup_id,
                    "priority": each.header.publisher_priority,
                    "status": int(each.header.status),
                    "properties": each.header.properties.hex(),
                    "octets": each.header.payload_length,
                    "born": each.born + wall,
                }
                for each in group.objects
            ],
        }

    def _write(self, path: Path, head: dict[str, Any], group: ShelvedGroup) -> int:
        """Write a file; returns how long it is."""
        parts = [part for each in group.objects for part in each.parts]
        text = json.dumps({**head, "payloads": self._digest(*parts).hex()}).encode()
        if len(text) > MAX_HEAD_OCTETS:
            raise OSError(f"a head of {len(text)} octets is too long")
        temporary = path.with_suffix(TEMPORARY)
        try:
            with temporary.open("wb") as file:
                file.write(MAGIC + len(text).to_bytes(4, "big") + self._digest(text))
                file.write(text)
                for part in parts:
                    file.write(part)
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        return PREFIX_OCTETS + len(text) + group.octets

    def _read_head(self, prefix: bytes, read: Callable[[int], bytes]) -> dict[str, Any]:
        length = int.from_bytes(prefix[len(MAGIC) : len(MAGIC) + 4], "big")
        if not prefix.startswith(MAGIC) or length > MAX_HEAD_OCTETS:
            raise ValueError("no file of this cache")
        text = read(length)
        if not hmac.compare_digest(prefix[-DIGEST_OCTETS:], self._digest(text)):
            raise ValueError("the head's digest is wrong")
        head: dict[str, Any] = json.loads(text)
        return head

    def _read(self, path: Path, now: float) -> ShelvedGroup:
        with path.open("rb") as file:
            head = self._read_head(file.read(PREFIX_OCTETS), file.read)
            octets = sum(each["octets"] for each in head["objects"])
            payloads = file.read(octets + 1)
        digest = bytes.fromhex(head["payloads"])
        if len(payloads) != octets or not hmac.compare_digest(digest, self._digest(payloads)):
            raise ValueError("the payloads' digest is wrong")
        return _group(head, payloads, now - self._clock())


def _tell(loop: asyncio.AbstractEventLoop, what: Callable[[Any], None], fact: object) -> None:
    """Call ``what`` in the loop, if it still runs."""
    try:
        loop.call_soon_threadsafe(what, fact)
    except RuntimeError:
        pass


def _key(path: Path) -> bytes:
    """The key of a folder's digests; made where there is none."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        key = _own_key(path)
    else:
        with os.fdopen(descriptor, "wb") as file:
            key = secrets.token_bytes(DIGEST_OCTETS)
            file.write(key)
    if len(key) != DIGEST_OCTETS:
        raise FileError(f"{path}: no key of {DIGEST_OCTETS} octets; remove the folder's files")
    return key


def _own_key(path: Path) -> bytes:
    """The key that is there already. Whoever knows it can make files that are served."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        status = os.fstat(file.fileno())
        owned = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
        if not owned or status.st_mode & 0o077:
            raise FileError(
                f"{path}: the key is not this user's alone (mode 0600), so others could make files"
                " of the cache; remove the folder's files"
            )
        return file.read(DIGEST_OCTETS + 1)


def _group(head: dict[str, Any], payloads: bytes, shift: float) -> ShelvedGroup:
    """A Group from its head, whose digest was right, and its payloads."""
    view, at = memoryview(payloads), 0
    objects: list[ShelvedObject] = []
    for each in head["objects"]:
        header = ObjectHeader(
            head["group"],
            each["id"],
            each["subgroup"],
            each["priority"],
            ObjectStatus(each["status"]),
            bytes.fromhex(each["properties"]),
            each["octets"],
        )
        part = view[at : at + each["octets"]]
        at += each["octets"]
        objects.append(ShelvedObject(header, each["born"] + shift, (part,) if part else ()))
    return ShelvedGroup(
        FullTrackName(
            tuple(bytes.fromhex(field) for field in head["namespace"]), bytes.fromhex(head["name"])
        ),
        head["group"],
        head["known_to"],
        ShelvedTrack(
            KeyValues.decode(bytes.fromhex(head["properties"])),
            _location(head["largest"]),
            _location(head["final"]),
            head["ended"],
            tuple((Location(*start), Location(*end)) for start, end in head["known"]),
        ),
        tuple(objects),
    )


def _location(pair: list[int] | None) -> Location | None:
    return None if pair is None else Location(*pair)
