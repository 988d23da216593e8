"""Object trees: the objects of some tracks as files, which both sides can read and write.

``tree/TRACK/GROUP.OBJECT`` holds one payload. The peer's publisher serves such a tree, its
subscriber can save one, and what a scenario expects is read from one, so that payloads never
need to travel through JSON.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path

Location = tuple[int, int]
"""Group ID, Object ID."""

Tree = Mapping[str, Mapping[Location, bytes]]
"""Track Name to the payload at each Location."""


def known_payload(track: str, group_id: int, object_id: int, size: int) -> bytes:
    """Return ``size`` octets that differ between any two objects."""
    seed = f"{track} {group_id} {object_id}".encode()
    return hashlib.shake_128(seed).digest(size)


def known_tree(tracks: list[str], *, groups: int, objects: int, size: int) -> Tree:
    """Return ``groups`` x ``objects`` payloads of ``size`` octets for each of ``tracks``."""
    return {
        track: {
            (group_id, object_id): known_payload(track, group_id, object_id, size)
            for group_id in range(groups)
            for object_id in range(objects)
        }
        for track in tracks
    }


def write_tree(directory: Path, tree: Tree) -> None:
    """Write ``tree`` into ``directory``, which is made if needed."""
    for track, payloads in tree.items():
        folder = directory / track
        folder.mkdir(parents=True)
        for (group_id, object_id), payload in payloads.items():
            (folder / f"{group_id}.{object_id}").write_bytes(payload)


def read_tree(directory: Path) -> dict[str, dict[Location, bytes]]:
    """Read back what ``write_tree`` or the peer's subscriber wrote."""
    tree: dict[str, dict[Location, bytes]] = {}
    for folder in sorted(directory.iterdir()):
        payloads = tree.setdefault(folder.name, {})
        for path in folder.iterdir():
            group_id, object_id = path.name.split(".")
            payloads[int(group_id), int(object_id)] = path.read_bytes()
    return tree


def digests(payloads: Mapping[Location, bytes]) -> list[list[object]]:
    """Return ``[group, object, length, sha256]`` of each payload, in order of Location."""
    return [
        [group_id, object_id, len(payload), hashlib.sha256(payload).hexdigest()]
        for (group_id, object_id), payload in sorted(payloads.items())
    ]
