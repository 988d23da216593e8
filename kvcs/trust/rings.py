"""Key rings: whose signatures count, scope by scope (COSE_KeySets, RFC 9052, 7).

A ring may hold several producers or issuers of a scope, and old and new keys beside each other
while they are rotated. Taking a key out revokes it. A ring may change while it is used; users
of it see the change with their next look-up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

from kvcs.errors import TrustError, UsageError
from kvcs.trust.cbor import ARRAY, Heads, Octets, head, load, malformed
from kvcs.trust.keys import KeyUse, PublicKey, SigningKey, read_key

MAX_KEYS: Final = 65_536
"""Keys in one ring."""

MAX_KEY_OCTETS: Final = 2_048
"""Octets of one COSE_Key."""

MAX_KEY_SET_OCTETS: Final = 16 * 2**20
"""Octets of one COSE_KeySet."""


class KeyRing:
    """Public keys of one use, found by key identifier and scope.

    Args:
        keys: the keys.
        use: what they are for.

    Raises:
        UsageError: a key is for another use, two of one scope have one key identifier, or there are
            too many.
    """

    def __init__(self, keys: Iterable[PublicKey] = (), *, use: KeyUse = KeyUse.MANIFEST) -> None:
        self.use = use
        """What its keys are for."""
        self.serial = 0
        """Grows with every change."""
        self._keys: dict[bytes, dict[bytes | None, PublicKey]] = {}
        self.replace(keys)

    def find(self, kid: bytes, scope_id: bytes, now: float) -> PublicKey:
        """The key that may speak for a scope now.

        Args:
            kid: key identifier, as a message names it.
            scope_id: the scope, 16 octets.
            now: Unix seconds.

        Raises:
            TrustError: ``kid``: nobody has such a key; ``scope``: it speaks for other scopes only;
                ``not_yet`` or ``expired``.
        """
        found = self._keys.get(kid)
        if found is None:
            raise TrustError(f"no key {kid.hex()} is known", check="kid")
        key = found.get(scope_id) or found.get(None)
        if key is None:
            raise TrustError(f"the key {kid.hex()} is of another scope", check="scope")
        key.check_time(now)
        return key

    def having(self, kid: bytes) -> tuple[PublicKey, ...]:
        """Every key of that identifier, whatever its scope."""
        return tuple(self._keys.get(kid, {}).values())

    def add(self, key: PublicKey) -> None:
        """Add a key.

        Raises:
            UsageError: it is for another use, the scope has another key of that identifier, or the
                ring is full.
        """
        self._insert(self._keys, key)
        self.serial += 1

    def remove(self, kid: bytes, scope_id: bytes | None = None) -> int:
        """Revoke: take keys out.

        Args:
            kid: their identifier.
            scope_id: only that of this scope; all of them where None.

        Returns:
            How many there were.
        """
        found = self._keys.get(kid, {})
        gone = [scope for scope in found if scope_id is None or scope == scope_id]
        for scope in gone:
            del found[scope]
        if not found:
            self._keys.pop(kid, None)
        if gone:
            self.serial += 1
        return len(gone)

    def replace(self, keys: Iterable[PublicKey]) -> None:
        """Hold these keys and no others: a file was read again.

        Raises:
            UsageError: as the constructor; then the ring stays as it was.
        """
        fresh: dict[bytes, dict[bytes | None, PublicKey]] = {}
        for key in keys:
            self._insert(fresh, key)
        self._keys = fresh
        self.serial += 1

    def _insert(self, keys: dict[bytes, dict[bytes | None, PublicKey]], key: PublicKey) -> None:
        if key.use is not self.use:
            raise UsageError(f"the key {key.kid.hex()} signs {key.use.value}s, not {self.use}s")
        same = keys.get(key.kid, {})
        if key.scope_id in same and same[key.scope_id] != key:
            raise UsageError(f"two keys of one scope are called {key.kid.hex()}")
        if key.scope_id not in same and sum(map(len, keys.values())) >= MAX_KEYS:
            raise UsageError(f"a ring holds {MAX_KEYS} keys")
        keys.setdefault(key.kid, {})[key.scope_id] = key

    def __iter__(self) -> Iterator[PublicKey]:
        for same in self._keys.values():
            yield from same.values()

    def __len__(self) -> int:
        return sum(map(len, self._keys.values()))

    def __contains__(self, key: object) -> bool:
        return isinstance(key, PublicKey) and key in self.having(key.kid)

    def __repr__(self) -> str:
        return f"KeyRing({len(self)} keys, {self.use.value})"

    def encode(self) -> bytes:
        """The ring as a COSE_KeySet."""
        return encode_keys(self)

    @classmethod
    def decode(cls, data: Octets, use: KeyUse = KeyUse.MANIFEST) -> KeyRing:
        """Read a COSE_KeySet of public keys.

        Args:
            data: its octets.
            use: what the keys have to be for.

        Raises:
            TrustError: ``structure`` or ``key``: it is no COSE_KeySet, or a key in it cannot be
                used here.
        """
        keys = read_key_set(data)
        if any(isinstance(key, SigningKey) for key in keys):
            raise TrustError(
                "key set: it has private keys, which are nobody's but their owner's; give out the"
                " public ones",
                check="key",
            )
        try:
            return cls((key for key in keys if isinstance(key, PublicKey)), use=use)
        except UsageError as exc:
            raise TrustError(f"key set: {exc}", check="key") from None


def encode_keys(keys: Iterable[PublicKey | SigningKey]) -> bytes:
    """Keys as a COSE_KeySet; one with signing keys holds secrets."""
    encoded = [key.to_cose() for key in keys]
    return head(ARRAY, len(encoded)) + b"".join(encoded)


def read_key_set(data: Octets) -> list[PublicKey | SigningKey]:
    """Read a COSE_KeySet.

    Raises:
        TrustError: ``structure`` or ``key``: it is none, or a key in it is none.
    """
    what = "key set"
    if len(data) > MAX_KEY_SET_OCTETS:
        raise malformed(f"{what}: {len(data)} octets, limit {MAX_KEY_SET_OCTETS}")
    heads = Heads(data, what)
    major, count = heads.head()
    if major != ARRAY or not 1 <= count <= MAX_KEYS:
        raise malformed(f"{what}: not an array of 1 to {MAX_KEYS} keys")
    keys: list[PublicKey | SigningKey] = []
    for _ in range(count):
        keys.append(_read_one(heads.item(MAX_KEY_OCTETS)))
    heads.end()
    return keys


def read_signing_key(data: Octets) -> SigningKey:
    """Read the one signing key of a COSE_KeySet.

    Raises:
        TrustError: ``structure`` or ``key``: it is no COSE_KeySet of just one private key.
    """
    keys = read_key_set(data)
    if len(keys) != 1 or not isinstance(keys[0], SigningKey):
        raise TrustError("key set: expected one private key and nothing else", check="key")
    return keys[0]


def _read_one(octets: memoryview) -> PublicKey | SigningKey:
    members: Any = load(octets, "key", max_octets=MAX_KEY_OCTETS)
    if not isinstance(members, dict):
        raise malformed("key: not a map")
    return read_key(members)
