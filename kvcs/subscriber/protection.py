"""What one Subscriber asks of protection: all that it reads is sealed, or nothing is (KVCS
"Security Considerations")."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from typing import Final

from kvcs.errors import NotProtected, ObjectError, UsageError
from kvcs.kv import Ledger
from kvcs.kv.opening import Opener, read_key_id
from kvcs.kv.protection import sealed_octets
from kvcs.kv.protection_keys import ProtectionRing
from kvcs.kv.unsealing import Unsealer
from kvcs.moqt.messages import SubscribeOk
from kvcs.moqt.names import FullTrackName, Location, TrackNamespace
from kvcs.moqt.objects import ObjectHeader
from kvcs.moqt.properties import KeyValues, Property, find_property
from kvcs.moqt.track.stored import DEFAULT_PRIORITY
from kvcs.observe import get_logger
from kvcs.quic.connection import Connection

_log = get_logger("kvcs.subscriber")

KNOWN_PROPERTIES: Final = 16
"""Object Properties whose reading is kept: most often all Objects of a publication are alike."""


def default_priority(reply: SubscribeOk) -> int:
    """Publisher Priority of a Track's Objects whose own is left out."""
    named = find_property(reply.track_properties, Property.DEFAULT_PUBLISHER_PRIORITY)
    return named if isinstance(named, int) else DEFAULT_PRIORITY


def immutable_properties(header: ObjectHeader) -> bytes | None:
    """Value of an Object's IMMUTABLE_PROPERTIES, as it came; None where it has none."""
    return _immutable(header.properties) if header.properties else None


@lru_cache(maxsize=KNOWN_PROPERTIES)
def _immutable(properties: bytes) -> bytes | None:
    return KeyValues.decode(properties).octets(Property.IMMUTABLE_PROPERTIES)


class Protection:
    """Opens what a Subscriber retrieves.

    Args:
        ring: protection keys of the scope. With them, nothing that is not sealed is used; without
            them, nothing that is.
    """

    def __init__(self, ring: ProtectionRing | None = None) -> None:
        self.ring = ring
        """Protection keys of the scope."""
        self.rejected: Counter[str] = Counter()
        """Manifest versions that did not open, by check."""

    def check_relays(self, sessions: Iterable[Connection]) -> None:
        """Check that what is read unprotected may be believed where it comes from.

        Raises:
            UsageError: the relays of a session are not trusted, and there are no keys.
        """
        for session in sessions:
            if self.ring is None and session.relays == "untrusted":
                raise UsageError(
                    f'{session.peer}: its relays are "untrusted", and what comes from them could'
                    " be anything; say Subscriber(protection=...) with the scope's protection keys"
                )

    def unsealer(
        self, ledger: Ledger, namespace: TrackNamespace, max_data_octets: int
    ) -> Unsealer | None:
        """What opens the Objects of a publication's data tracks; None where none is sealed."""
        if self.ring is None:
            return None
        return Unsealer(ledger, self.ring, namespace, max_data_octets=max_data_octets)

    def longest(self, octets: int) -> int:
        """Longest payload of a manifest version of so many octets."""
        return octets if self.ring is None else sealed_octets(octets)

    def open_manifest(
        self, name: FullTrackName, header: ObjectHeader, priority: int, payload: memoryview
    ) -> memoryview:
        """Open a version of a manifest, if it is sealed.

        Args:
            name: the manifest track.
            header: the Object.
            priority: Publisher Priority of Objects of the Track that name none.
            payload: what came.

        Raises:
            NotProtected: it is sealed and there are no keys.
            ObjectError: as `Opener.open`.
        """
        immutable = immutable_properties(header)
        if self.ring is None:
            self._check_plain(immutable)
            return payload
        named = header.publisher_priority
        location = Location(header.group_id, header.object_id)
        opener = Opener(self.ring, name)
        return opener.open(location, priority if named is None else named, immutable, payload)

    def dropped(
        self, header: ObjectHeader, error: ObjectError, *, first: bool
    ) -> NotProtected | None:
        """A version did not open: count it.

        Args:
            header: the Object.
            error: why not.
            first: whether no version has opened so far.

        Returns:
            What tells the user that the keys do not fit the publication; None where it is as if the
            version had not come.
        """
        self.rejected[error.check] += 1
        _log.warning("manifest_rejected", check=error.check, why=str(error))
        if not first or error.check not in ("key", "unprotected"):
            return None
        immutable = immutable_properties(header)
        if error.check == "key" and immutable is not None:
            key_id = read_key_id(immutable)
            return NotProtected(
                f"the publication is sealed under the protection key with Key ID {key_id}, which"
                f" is not among this consumer's {len(self.ring or ())}",
                check="key",
                key_id=key_id,
            )
        return NotProtected(
            "the publication is not protected, and this consumer was given protection keys: it"
            " takes nothing else",
            check="unprotected",
        )

    @staticmethod
    def _check_plain(immutable: bytes | None) -> None:
        if immutable is None:
            return
        try:
            key_id = read_key_id(immutable)
        except ObjectError:
            return  # properties of somebody else's
        raise NotProtected(
            f"the publication is sealed under the protection key with Key ID {key_id}, and this"
            " consumer has no protection keys; pass them as protection (--protect-key-file)",
            check="key",
            key_id=key_id,
        )
