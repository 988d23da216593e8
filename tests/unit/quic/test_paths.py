"""What the kernel says of a path, and the datagram sizes made of it."""

from __future__ import annotations

import socket
import sys
from typing import cast

import pytest

from kvcs.quic.aioquic_backend import paths
from kvcs.quic.aioquic_backend.paths import COMMON_SIZES, datagram_sizes, route_mtu
from kvcs.quic.aioquic_backend.udp import make_socket

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell the MTU")


def mtu(octets: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the kernel say so."""
    monkeypatch.setattr(paths, "route_mtu", lambda family, address: octets)


@pytest.mark.parametrize(
    "address", [("127.0.0.1", 9), ("::1", 9, 0, 0), ("::ffff:127.0.0.1", 9, 0, 0)]
)
def test_loopback_carries_the_largest(address: tuple[str, int]) -> None:
    assert datagram_sizes(address)[0] == 64_000


@pytest.mark.parametrize(
    ("address", "octets", "largest"),
    [
        (("192.0.2.7", 9), 1500, 1472),
        (("2001:db8::7", 9, 0, 0), 1500, 1452),
        (("::ffff:192.0.2.7", 9, 0, 0), 1500, 1472),
        (("fe80::7%eth0", 9, 0, 2), 1500, 1452),
        (("192.0.2.7", 9), 9000, 8972),
        (("192.0.2.7", 9), 65_536, 64_000),
        (("192.0.2.7", 9), 1400, 1372),
    ],
)
def test_the_route_bounds_what_is_tried(
    address: tuple[str, int], octets: int, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mtu(octets, monkeypatch)
    sizes = datagram_sizes(address)
    assert sizes[0] == largest
    assert list(sizes) == sorted(set(sizes), reverse=True)
    assert set(sizes[1:]) == {size for size in COMMON_SIZES if size < largest}


def test_a_route_that_carries_little_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    mtu(1228, monkeypatch)
    assert datagram_sizes(("192.0.2.7", 9)) == ()


def test_a_kernel_that_does_not_tell_leaves_it_to_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    mtu(None, monkeypatch)
    assert datagram_sizes(("192.0.2.7", 9))[0] == 1452
    assert datagram_sizes(("127.0.0.1", 9))[0] == 64_000


def test_a_pinned_size_is_the_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    mtu(9000, monkeypatch)
    assert datagram_sizes(("192.0.2.7", 9), 1200) == ()
    assert datagram_sizes(("192.0.2.7", 9), 1452) == (1452,)
    assert datagram_sizes(("127.0.0.1", 9), 8952) == (8952,)


@LINUX
def test_the_kernel_tells_the_mtu_of_loopback() -> None:
    octets = route_mtu(socket.AF_INET, ("127.0.0.1", 9))
    assert octets is not None and octets >= 16_028


@LINUX
def test_an_address_without_a_route_has_no_mtu() -> None:
    assert route_mtu(socket.AF_INET6, ("fe80::1", 9, 0, 0)) is None


@LINUX
def test_a_virtual_network_is_asked_and_not_this_machine() -> None:
    asked: list[object] = []

    class Virtual:
        def connect(self, address: object) -> None:
            asked.append(address)

        def getsockopt(self, level: int, option: int) -> int:
            return 0

        def close(self) -> None:
            asked.append("closed")

    token = make_socket.set(lambda family, kind: cast(socket.socket, Virtual()))
    try:
        assert route_mtu(socket.AF_INET, ("127.0.0.1", 9)) is None
        assert datagram_sizes(("10.0.0.1", 9)) == COMMON_SIZES[1:]
    finally:
        make_socket.reset(token)
    assert asked == [("127.0.0.1", 9), "closed", ("10.0.0.1", 9), "closed"]
