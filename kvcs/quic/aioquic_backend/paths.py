"""What the kernel says of the path to an address, and which datagram sizes that suggests."""

from __future__ import annotations

import ipaddress
import socket
import sys
from typing import Final

from kvcs.observe import get_logger
from kvcs.quic.aioquic_backend.ports import Address
from kvcs.quic.aioquic_backend.segments import LARGEST_SEGMENT
from kvcs.quic.aioquic_backend.settings import (
    HELD_DATAGRAMS,
    LARGEST_DATAGRAM,
    SMALLEST_DATAGRAM,
)
from kvcs.quic.aioquic_backend.udp import make_socket

log = get_logger("kvcs.quic")

COMMON_SIZES: Final = (8952, 1452, 1412, 1372, 1332)
"""UDP payloads of jumbo frames, of plain Ethernet, and of Ethernet below usual tunnels, each less
48 octets of IPv6 and UDP headers."""

_IP_MTU: Final = 14
_IPV6_MTU: Final = 24
"""Linux: the MTU of the route that a socket is connected over."""

_HEADERS: Final = {socket.AF_INET: 28, socket.AF_INET6: 48}
"""Octets of the IP and UDP headers."""


def datagram_sizes(address: Address, pinned: int | None = None) -> tuple[int, ...]:
    """UDP payloads to try on the way to an address, in octets, largest first.

    A route over the loopback interface, which every address of this machine has, carries the
    largest that there is; elsewhere the MTU of the local interface is the most that
    can pass, and what is common on paths is tried below it.

    Args:
        address: of the peer.
        pinned: the one size to use; 1200 tries nothing.
    """
    if pinned is not None:
        return (pinned,) if pinned > SMALLEST_DATAGRAM else ()
    host = _ip(address)
    if host.version == 4:
        address = (str(host), address[1])  # the route of a mapped address is that of IPv4
    family = socket.AF_INET if host.version == 4 else socket.AF_INET6
    mtu = route_mtu(family, address)
    if mtu is not None:
        largest = min(mtu - _HEADERS[family], LARGEST_DATAGRAM)
    else:
        largest = LARGEST_DATAGRAM if host.is_loopback else max(COMMON_SIZES[1:])
    return tuple(
        size
        for size in (largest, *(size for size in COMMON_SIZES if size < largest))
        if size > SMALLEST_DATAGRAM
    )


def largest_to_take(receive_buffer: int) -> int:
    """UDP payload that a socket takes without losing most of a burst, in octets.

    Args:
        receive_buffer: octets that the socket keeps while nothing is read.
    """
    return max(SMALLEST_DATAGRAM, min(receive_buffer // HELD_DATAGRAMS, LARGEST_DATAGRAM))


def small_datagrams(address: Address, pinned: int | None) -> bool:
    """Whether datagrams of ordinary size are to be expected at, or from, an address."""
    if pinned is not None:
        return pinned <= LARGEST_SEGMENT
    return not is_loopback(address)


def is_loopback(address: Address) -> bool:
    """Whether an address stays on this machine."""
    return _ip(address).is_loopback


def _ip(address: Address) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """The host of an address, IPv4 where it is IPv4 mapped into IPv6."""
    ip = ipaddress.ip_address(str(address[0]).partition("%")[0])
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return ip if mapped is None else mapped


def route_mtu(family: int, address: Address) -> int | None:
    """MTU of the route to an address, in octets; None where the kernel does not tell.

    Nothing is sent: connecting a UDP socket only looks the route up.
    """
    if sys.platform != "linux":
        return None
    try:
        sock = make_socket.get()(family, socket.SOCK_DGRAM)
        try:
            sock.connect(address)
            if family == socket.AF_INET6:
                mtu = sock.getsockopt(socket.IPPROTO_IPV6, _IPV6_MTU)
            else:
                mtu = sock.getsockopt(socket.IPPROTO_IP, _IP_MTU)
        finally:
            sock.close()
    except OSError as exc:
        log.debug("route_mtu_unknown", address=str(address[0]), error=str(exc))
        return None
    return mtu or None  # a virtual network has none
