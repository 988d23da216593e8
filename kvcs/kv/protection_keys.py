"""The protection keys of a scope: which one seals, and which ones open (COSE_KeySets, RFC 9052, 7).

Keys are rotated between publications: one publication is sealed under one key from its first Object
to its last. A newer key is given to consumers first and to producers then; the old one stays in
the rings for as long as caches that were sealed with it are served.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from typing import Any, Final

import cbor2

from kvcs.errors import TrustError, UsageError
from kvcs.kv.protection import MIN_KEY_ID, CipherSuite, ProtectionKey
from kvcs.kv.tracks import SCOPE_ID_OCTETS
from kvcs.trust.cbor import ARRAY, Heads, Octets, head, load, malformed

MAX_PROTECTION_KEYS: Final = 1_024
"""Keys in one ring."""

MAX_PROTECTION_KEY_OCTETS: Final = 512
"""Octets of one COSE_Key."""

MAX_PROTECTION_SET_OCTETS: Final = 1 << 20
"""Octets of one COSE_KeySet of protection keys."""

KEY_ID_OCTETS: Final = 8

_KTY, _KID, _KEY_OPS, _K = 1, 2, 4, -1
_KTY_SYMMETRIC, _OP_DERIVE_KEY = 4, 7
_USE, _SCOPE, _SUITE, _SEND = "kvcs-use", "kvcs-scope", "kvcs-suite", "kvcs-send"
"""Labels of ours in a COSE_Key; RFC 9052 leaves text labels to applications."""

_LABELS: Final = frozenset({_KTY, _KID, _KEY_OPS, _K, _USE, _SCOPE, _SUITE, _SEND})
PROTECTION_USE: Final = "protection"


class ProtectionRing:
    """Protection keys of one scope, by Key ID. It shows no secret: not in `repr`, not in an error.

    It may change while it is used; users see that with their next look-up.

    Args:
        keys: the keys.
        scope_id: the scope that they are for, 16 octets; None leaves that to whoever uses them.

    Raises:
        UsageError: two have one Key ID, there are too many, or the Scope ID has another length.
    """

    def __init__(
        self, keys: Iterable[ProtectionKey] = (), *, scope_id: bytes | None = None
    ) -> None:
        if scope_id is not None and len(scope_id) != SCOPE_ID_OCTETS:
            raise UsageError(f"a Scope ID has {SCOPE_ID_OCTETS} octets, not {len(scope_id)}")
        self.scope_id = scope_id
        """The scope that its keys are for; None where that is not said."""
        self._keys: dict[int, ProtectionKey] = {}
        self._receive_only: set[int] = set()
        for key in keys:
            self.add(key)

    @property
    def current(self) -> ProtectionKey:
        """The key that seals new publications: the newest one that may.

        Raises:
            UsageError: none may.
        """
        sending = [key_id for key_id in self._keys if self.may_send(key_id)]
        if not sending:
            raise UsageError(
                "no key of the ring may seal: each is for receiving only, or there is none;"
                " `kvcs keygen --protection --rotate` adds one"
            )
        return self._keys[max(sending)]

    def get(self, key_id: int) -> ProtectionKey | None:
        """The key of that Key ID."""
        return self._keys.get(key_id)

    def may_send(self, key_id: int) -> bool:
        """Whether a key may seal, too, beside opening."""
        return key_id in self._keys and key_id not in self._receive_only

    def add(self, key: ProtectionKey, *, send: bool = True) -> None:
        """Add a key.

        Args:
            key: the key.
            send: whether it may seal; False keeps it for what it has sealed elsewhere.

        Raises:
            UsageError: there is another of its Key ID, or the ring is full.
        """
        if self._keys.get(key.key_id, key) != key:
            raise UsageError(f"two keys have the Key ID {key.key_id}")
        if key.key_id not in self._keys and len(self._keys) >= MAX_PROTECTION_KEYS:
            raise UsageError(f"a ring holds {MAX_PROTECTION_KEYS} protection keys")
        self._keys[key.key_id] = key
        self.set_send(key.key_id, send)

    def rotate(self, suite: CipherSuite = CipherSuite.AES_128_GCM_SHA256_128) -> ProtectionKey:
        """Add a fresh key, newer than every other: it seals from the next publication on.

        Its Key ID is 2^32 and an epoch that grows by one, from 1 on.

        Raises:
            UsageError: the ring is full.
        """
        key = ProtectionKey(max(self._keys, default=MIN_KEY_ID) + 1, secrets.token_bytes(32), suite)
        self.add(key)
        return key

    def set_send(self, key_id: int, send: bool) -> None:
        """Say whether a key may seal.

        Raises:
            UsageError: there is no such key.
        """
        if key_id not in self._keys:
            raise UsageError(f"the ring has no key with Key ID {key_id}")
        (self._receive_only.discard if send else self._receive_only.add)(key_id)

    def remove(self, key_id: int) -> bool:
        """Take a key out: what it has sealed cannot be read any more. Whether there was one."""
        self._receive_only.discard(key_id)
        return self._keys.pop(key_id, None) is not None

    def check_scope(self, scope_id: bytes) -> None:
        """Check that its keys are for a scope.

        Raises:
            UsageError: they are for another one.
        """
        if self.scope_id not in (None, scope_id):
            raise UsageError(f"the protection keys are for another scope than {scope_id.hex()}")

    def __iter__(self) -> Iterator[ProtectionKey]:
        return iter(sorted(self._keys.values(), key=lambda key: key.key_id))

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key_id: object) -> bool:
        return key_id in self._keys

    def __repr__(self) -> str:
        return f"ProtectionRing({len(self)} keys)"

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise UsageError("protection keys are not pickled: that would copy their secrets")

    def encode(self) -> bytes:
        """The ring as a COSE_KeySet, secrets included: for a file that only its owner reads."""
        return head(ARRAY, len(self)) + b"".join(map(self._encoded, self))

    def _encoded(self, key: ProtectionKey) -> bytes:
        members: dict[int | str, Any] = {
            _KTY: _KTY_SYMMETRIC,
            _KID: key.key_id.to_bytes(KEY_ID_OCTETS, "big"),
            _KEY_OPS: [_OP_DERIVE_KEY],
            _K: key.base_key,
            _USE: PROTECTION_USE,
            _SUITE: int(key.suite),
            _SEND: self.may_send(key.key_id),
        }
        if self.scope_id is not None:
            members[_SCOPE] = self.scope_id
        return cbor2.dumps(members, canonical=True)

    @classmethod
    def decode(cls, data: Octets) -> ProtectionRing:
        """Read a COSE_KeySet of protection keys.

        Raises:
            TrustError: ``structure`` or ``key``: it is none, or a key in it cannot be used. The
                message holds nothing of a key.
        """
        what = "protection keys"
        if len(data) > MAX_PROTECTION_SET_OCTETS:
            raise malformed(f"{what}: {len(data)} octets, limit {MAX_PROTECTION_SET_OCTETS}")
        heads = Heads(data, what)
        major, count = heads.head()
        if major != ARRAY or not 1 <= count <= MAX_PROTECTION_KEYS:
            raise malformed(f"{what}: not an array of 1 to {MAX_PROTECTION_KEYS} keys")
        keys = [_read_key(heads.item(MAX_PROTECTION_KEY_OCTETS)) for _ in range(count)]
        heads.end()
        scopes = {scope_id for _, _, scope_id in keys}
        if len(scopes) > 1:
            raise TrustError(f"{what}: they are of several scopes", check="key")
        try:
            ring = cls(scope_id=scopes.pop())
            for key, send, _ in keys:
                if key.key_id in ring:
                    raise UsageError(f"the Key ID {key.key_id} is there twice")
                ring.add(key, send=send)
        except UsageError as exc:
            raise TrustError(f"{what}: {exc}", check="key") from None
        return ring


def _read_key(octets: memoryview) -> tuple[ProtectionKey, bool, bytes | None]:
    """Key, whether it may seal, and Scope ID."""
    members: Any = load(octets, "key", max_octets=MAX_PROTECTION_KEY_OCTETS)
    if not isinstance(members, dict) or not members.keys() <= _LABELS:
        raise malformed("key: not a map, or one with members that this version does not know")
    if (members.get(_KTY), members.get(_USE)) != (_KTY_SYMMETRIC, PROTECTION_USE):
        raise TrustError("key: not a protection key", check="key")
    kid, base_key, scope_id = members.get(_KID), members.get(_K), members.get(_SCOPE)
    send, operations = members.get(_SEND, True), members.get(_KEY_OPS, [_OP_DERIVE_KEY])
    if (
        type(kid) is not bytes
        or len(kid) != KEY_ID_OCTETS
        or type(base_key) is not bytes
        or not isinstance(scope_id, bytes | None)
        or type(send) is not bool
        or operations != [_OP_DERIVE_KEY]
    ):
        raise TrustError("key: a member of a protection key is not of its kind", check="key")
    try:
        suite = CipherSuite(members.get(_SUITE, 0))
        return ProtectionKey(int.from_bytes(kid, "big"), base_key, suite), send, scope_id
    except (UsageError, ValueError):
        # What the enumeration says may quote what is in the place of a suite.
        raise TrustError(
            "key: not a Key ID of 2^32 or more, 32 octets and a suite that is known", check="key"
        ) from None
