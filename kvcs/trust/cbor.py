"""CBOR as signed structures need it: definite, in shortest form, bounded before it is decoded.

cbor2 gives the values. What it would let pass is refused before it sees an octet: indefinite
lengths, longer heads than necessary, tags, which it would turn into dates, sets, regular
expressions and other objects, and octets behind the item.
"""

from __future__ import annotations

from typing import Any, Final

import cbor2

from kvcs.errors import TrustError

Octets = bytes | bytearray | memoryview
"""Anything that holds unsigned bytes."""

MAX_DEPTH: Final = 8
"""Deepest nesting of arrays and maps."""

UNSIGNED, NEGATIVE, BYTES, TEXT, ARRAY, MAP, TAG, SIMPLE = range(8)
"""Major types (RFC 8949, 3.1)."""

_LONG_HEADS: Final = {24: 1, 25: 2, 26: 4, 27: 8}
"""Octets of the argument behind a head with this additional information."""

_PLAIN_SIMPLE: Final = (20, 21, 22)
"""false, true and null."""


def malformed(message: str) -> TrustError:
    """The error for octets that do not have the form they should."""
    return TrustError(message, check="structure")


class Heads:
    """Reads the heads of CBOR items one after the other.

    Args:
        data: the octets; they are not copied.
        what: what they are, for messages.
    """

    def __init__(self, data: Octets, what: str) -> None:
        self.data = memoryview(data)
        self.at = 0
        """Index of the next octet."""
        self._what = what

    def head(self) -> tuple[int, int]:
        """Read one head.

        Returns:
            Major type and argument. Of floats the argument is their octets.

        Raises:
            TrustError: ``structure``: the octets end, a length is indefinite, or the head is longer
                than it needs to be.
        """
        first = self._take(1)[0]
        major, info = first >> 5, first & 31
        if info < 24:
            return major, info
        if info not in _LONG_HEADS:
            raise malformed(f"{self._what}: an indefinite or reserved length")
        size = _LONG_HEADS[info]
        argument = int.from_bytes(self._take(size), "big")
        if major == SIMPLE:
            if info == 24:
                raise malformed(f"{self._what}: an unknown simple value")
        elif argument < (24 if size == 1 else 1 << (4 * size)):
            raise malformed(f"{self._what}: a head that is not in its shortest form")
        return major, argument

    def string(self, major: int, limit: int) -> memoryview:
        """Read a string of octets or characters, as a view of its octets.

        Raises:
            TrustError: ``structure``: another item is there, or it has more than ``limit`` octets.
        """
        found, length = self.head()
        if found != major:
            raise malformed(f"{self._what}: an item of major type {found}, expected {major}")
        if length > limit:
            raise malformed(f"{self._what}: a string of {length} octets, limit {limit}")
        return self._take(length)

    def skip(self, depth: int = 0) -> None:
        """Read over one item of integers, strings, arrays, maps, booleans, null and floats.

        Raises:
            TrustError: ``structure``: it holds something else, or is nested too deeply.
        """
        if depth > MAX_DEPTH:
            raise malformed(f"{self._what}: nested more than {MAX_DEPTH} deep")
        start = self.at
        major, argument = self.head()
        if major in (BYTES, TEXT):
            self._take(argument)
        elif major == ARRAY:
            self._check_count(argument)
            for _ in range(argument):
                self.skip(depth + 1)
        elif major == MAP:
            self._check_count(argument)
            for _ in range(argument):
                if self.data[self.at : self.at + 1].tobytes()[:1] >= b"\x80":
                    raise malformed(f"{self._what}: a map key that is no integer and no string")
                self.skip(depth + 1)
                self.skip(depth + 1)
        elif major == TAG:
            raise malformed(f"{self._what}: a tag inside")
        elif major == SIMPLE and self.at - start == 1 and argument not in _PLAIN_SIMPLE:
            raise malformed(f"{self._what}: an unknown simple value")

    def item(self, limit: int) -> memoryview:
        """Read over one item as `skip` does, and give its octets.

        Raises:
            TrustError: ``structure``: as `skip`, or it has more than ``limit`` octets.
        """
        inner = Heads(self.data[self.at : self.at + limit], self._what)
        inner.skip()
        return self._take(inner.at)

    def end(self) -> None:
        """Check that nothing follows.

        Raises:
            TrustError: ``structure``: octets do.
        """
        if self.at != len(self.data):
            raise malformed(f"{self._what}: {len(self.data) - self.at} octets behind its end")

    def _check_count(self, count: int) -> None:
        if count > len(self.data) - self.at:
            raise malformed(f"{self._what}: ends inside an item")

    def _take(self, count: int) -> memoryview:
        taken = self.data[self.at : self.at + count]
        if len(taken) != count:
            raise malformed(f"{self._what}: ends inside an item")
        self.at += count
        return taken


def load(data: Octets, what: str, *, max_octets: int, deterministic: bool = False) -> Any:
    """Decode one item and nothing else.

    Args:
        data: its octets.
        what: what it is, for messages.
        max_octets: longest text that is looked at.
        deterministic: also refuse map keys in another order than the deterministic one.

    Returns:
        Integers, strings, lists, dicts, booleans, None and floats.

    Raises:
        TrustError: ``structure``: it is too long, not such an item, or a map has a key twice.
    """
    octets = bytes(data)
    if len(octets) > max_octets:
        raise malformed(f"{what}: {len(octets)} octets, limit {max_octets}")
    heads = Heads(octets, what)
    heads.skip()
    heads.end()
    try:
        value = cbor2.loads(
            octets, max_depth=MAX_DEPTH + 2, allow_indefinite=False, allow_duplicate_keys=False
        )
        again = cbor2.dumps(value, canonical=True) if deterministic else octets
    except (cbor2.CBORError, ValueError, TypeError, OverflowError):
        # What was wrong would quote the octets.
        raise malformed(f"{what}: not well-formed, or a key appears twice") from None
    if again != octets:
        raise malformed(f"{what}: not in deterministic form")
    return value


def head(major: int, argument: int) -> bytes:
    """Encode one head, in its shortest form."""
    if argument < 24:
        return bytes([major << 5 | argument])
    for info, size in _LONG_HEADS.items():
        if argument < 1 << (8 * size):
            return bytes([major << 5 | info]) + argument.to_bytes(size, "big")
    raise ValueError("no CBOR item is that long")
