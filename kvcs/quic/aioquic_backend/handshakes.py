"""Connections whose handshake is not complete, shared out among those who begin them."""

from __future__ import annotations

from collections import Counter
from ipaddress import IPv6Address, ip_address
from typing import Final

from kvcs.quic.aioquic_backend.ports import Address, Driven

IPV4_PREFIX: Final = 24
"""Bits of an IPv4 address that stand for one site: who has one address has often its neighbours."""

IPV6_PREFIX: Final = 48
"""The same of an IPv6 address: what a site is usually given."""


def site(address: Address) -> str:
    """Where a client is, as far as slots are shared: the network of its IP address.

    Args:
        address: as the socket module gives it; a name that is no IP address stands for itself.
    """
    host = str(address[0]).partition("%")[0]
    try:
        found = ip_address(host)
    except ValueError:
        return host
    if isinstance(found, IPv6Address):
        if found.ipv4_mapped is None:
            return f"6/{int(found) >> (128 - IPV6_PREFIX):x}"
        found = found.ipv4_mapped
    return f"4/{int(found) >> (32 - IPV4_PREFIX):x}"


class Handshakes:
    """Handshakes under way, oldest first.

    Where all slots are taken, a site that has fewer of them than another gets one of that: so none
    keeps the others out, and a site alone may have them all.
    """

    def __init__(self) -> None:
        self._sites: dict[Driven, str] = {}
        self._counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._sites)

    def add(self, connection: Driven, address: Address) -> None:
        """A client at ``address`` has begun one."""
        where = self._sites[connection] = site(address)
        self._counts[where] += 1

    def discard(self, connection: Driven) -> None:
        """It is complete, or over; quiet where it was not under way."""
        where = self._sites.pop(connection, None)
        if where is not None:
            self._counts[where] -= 1
            if not self._counts[where]:
                del self._counts[where]

    def displaced(self, address: Address) -> Driven | None:
        """The handshake that makes room for one from ``address``; None where none has to."""
        if not self._counts:
            return None
        largest, most = self._counts.most_common(1)[0]
        if most <= self._counts[site(address)] + 1:
            return None  # its share is as large as any
        return next(each for each, where in self._sites.items() if where == largest)
