"""Sealed payloads opened: by Key ID, at the place where they came, or not at all.

The counterpart of `kvcs.kv.protection.Sealer` (KVCS "Security Considerations").
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from cryptography.exceptions import InvalidTag

from kvcs.errors import ObjectError
from kvcs.kv.protection import (
    ENCRYPTED_PROPERTIES,
    KEY_ID_PROPERTY,
    MAX_OBJECT_ID,
    NONCE_OCTETS,
    Octets,
    ProtectionKey,
    TrackAead,
    associated_data,
    derive,
    serialized_name,
)
from kvcs.moqt.names import FullTrackName, Location
from kvcs.moqt.wire import NeedMore, Reader

OBJECT_ID_OCTETS: Final = 4
"""Octets of an Object ID in the associated data and in the nonce."""


class Keys(Protocol):
    """Finds base keys: a dict by Key ID, or a ring."""

    def get(self, key_id: int, /) -> ProtectionKey | None:
        """The key of that Key ID."""


class Opener:
    """Opens the Objects of one track.

    Args:
        keys: the scope's keys by Key ID, current and former ones.
        name: the track.
    """

    def __init__(self, keys: Keys, name: FullTrackName) -> None:
        self._keys = keys
        self._name = serialized_name(name)
        self._derived: dict[int, TrackAead] = {}
        self._known: tuple[bytes, int] = (b"", 0)
        """Immutable properties that were read last, and their Key ID: most often all are alike."""
        self._frame: tuple[int, bytes] = (-1, b"")
        """Octets of the last one that was opened and had but a payload, and what stood before."""
        self.failures = 0
        """Objects that did not open."""

    def open(
        self,
        location: Location,
        priority: int,
        immutable: Octets | None,
        sealed: Octets,
        into: memoryview | None = None,
    ) -> memoryview:
        """Open one payload.

        Args:
            location: where the Object came.
            priority: its effective Publisher Priority.
            immutable: value of its IMMUTABLE_PROPERTIES; None where it has none.
            sealed: the payload as it came.
            into: where it is opened, 16 octets shorter than ``sealed`` and apart from it. New
                memory by default.

        Returns:
            The payload; it lies in ``into`` where that was given.

        Raises:
            ObjectError: ``unprotected``: no Key ID; ``key``: an unknown one; ``seal``: it does not
                open, or what was in it is not framed as it must be. Which of these it was must not
                be shown to the peer.
        """
        try:
            if immutable is None:
                raise ObjectError(
                    "an Object of a protected track is not protected", check="unprotected"
                )
            if immutable != self._known[0] or not len(immutable):
                self._known = (bytes(immutable), read_key_id(immutable))
            key_id = self._known[1]
            if location.object > MAX_OBJECT_ID:
                raise ObjectError(f"Object ID {location.object} does not fit a nonce", check="seal")
            aead = self._derived.get(key_id) or self._derive(key_id)
            associated = associated_data(location, priority, immutable)
            try:
                plain = aead.open(location, sealed, associated, into)
            except (InvalidTag, ValueError, OverflowError):
                raise ObjectError("a sealed Object does not open", check="seal") from None
            octets, prefix = self._frame
            if len(plain) == octets and plain[: len(prefix)] == prefix:
                return plain[len(prefix) :]
            payload, start = _payload(plain)
        except ObjectError:
            self.failures += 1
            raise
        if start + len(payload) == len(plain):
            self._frame = (len(plain), bytes(plain[:start]))
        return payload

    def alike(self, group_id: int, priority: int, immutable: Octets | None) -> Alike | None:
        """What opens Objects of one Group that are sealed and framed as the one opened last.

        Args:
            group_id: their Group.
            priority: their effective Publisher Priority.
            immutable: value of their IMMUTABLE_PROPERTIES.

        Returns:
            None where nothing was opened so far, it had another Key ID or more than a payload, or
            AES-GCM cannot write to a place that it is given.
        """
        known, key_id = self._known
        aead = self._derived.get(key_id)
        open_into = None if aead is None else aead.open_into
        octets, prefix = self._frame
        if aead is None or open_into is None or immutable != known or not prefix:
            return None
        return Alike(
            open_into, aead.salt ^ group_id << 32, group_id, priority, known, octets, prefix
        )

    def _derive(self, key_id: int) -> TrackAead:
        key = self._keys.get(key_id)
        if key is None:
            raise ObjectError(f"no key with Key ID {key_id} is known", check="key")
        made = TrackAead(derive(key.suite, key_id, key.base_key, self._name))
        self._derived[key_id] = made
        return made


class Alike:
    """Opens Objects of one Group that have one Key ID and whose sealed octets are framed alike.

    It tells nobody why one does not open, and counts none: `Opener.open` does both.
    """

    __slots__ = ("_head", "_open_into", "_prefix", "_salted", "_tail", "octets", "start")

    def __init__(
        self,
        open_into: Callable[..., int],
        salted: int,
        group_id: int,
        priority: int,
        immutable: bytes,
        octets: int,
        prefix: bytes,
    ) -> None:
        self._open_into = open_into
        self._salted = salted
        """Nonce of the Group's Object 0."""
        self._head, self._tail = group_id.to_bytes(8), bytes((priority,)) + immutable
        """Associated data, before and behind the Object ID."""
        self._prefix = prefix
        self.octets = octets
        """Octets of what opens: 16 less than are sealed."""
        self.start = len(prefix)
        """Where the payload begins in what was opened."""

    def open(self, object_id: int, sealed: Octets, into: memoryview) -> bool:
        """Open one.

        Args:
            object_id: its Object ID, 32 bits at most.
            sealed: the payload as it came.
            into: `octets` octets apart from it; all of them are written. The payload then lies
                behind the first `start`.

        Returns:
            Whether it opens and is so.
        """
        start, prefix = self.start, self._prefix
        associated = self._head + object_id.to_bytes(OBJECT_ID_OCTETS) + self._tail
        made = (self._salted ^ object_id).to_bytes(NONCE_OCTETS)
        try:
            self._open_into(made, sealed, associated, into)
        except (InvalidTag, ValueError):
            # It is written before the tag is compared, and nobody may see it.
            into[:] = bytes(len(into))
            return False
        return into[:start] == prefix


def read_key_id(immutable: Octets) -> int:
    """Read the one Key ID of an Object's immutable properties.

    Raises:
        ObjectError: ``unprotected``: none, several, or octets that are no properties.
    """
    reader, type_, found = Reader(immutable), 0, []
    try:
        while reader.remaining:
            type_ += reader.vi64()
            if type_ % 2:
                reader.sub(reader.vi64())
            else:
                value = reader.vi64()
                if type_ == KEY_ID_PROPERTY:
                    found.append(value)
    except NeedMore:
        raise ObjectError("immutable properties end too early", check="unprotected") from None
    if len(found) != 1:
        raise ObjectError(f"{len(found)} Key IDs in the place of one", check="unprotected")
    return found[0]


def _payload(plain: memoryview) -> tuple[memoryview, int]:
    """The payload inside opened octets, and where it starts; a list of encrypted properties behind
    it is passed over."""
    reader = Reader(plain)
    try:
        octets = reader.vi64()
        start = reader.pos
        reader.sub(octets)
        if reader.remaining:
            if reader.uint16() != ENCRYPTED_PROPERTIES:
                raise ObjectError("unknown octets behind a sealed payload", check="seal")
            reader.sub(reader.vi64())
    except NeedMore:
        raise ObjectError("a sealed payload is shorter than it says", check="seal") from None
    if reader.remaining:
        raise ObjectError("octets behind the encrypted properties", check="seal")
    return plain[start : start + octets], start
