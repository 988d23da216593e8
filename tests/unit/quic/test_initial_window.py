"""The congestion window when the size of datagrams becomes known (RFC 9002 §7.2)."""

from __future__ import annotations

import pytest

from kvcs.quic.aioquic_backend.private.congestion import WatchingReno, initial_window
from tests.unit.quic.pair import DELAY, Pair


@pytest.mark.parametrize(
    ("size", "octets"),
    [
        (1200, 12_000),
        (1452, 14_520),
        (1500, 14_720),
        (8952, 17_904),
        (9188, 18_376),
        (16_000, 160_000),
    ],
)
def test_the_initial_window_is_ten_datagrams_bounded_on_a_wire(size: int, octets: int) -> None:
    assert initial_window(size) == octets


def test_a_window_that_nothing_narrowed_grows_with_the_size() -> None:
    reno = WatchingReno(max_datagram_size=1200)
    reno.count_in(16_000)
    assert reno.congestion_window == 160_000
    reno.count_in(1200)
    assert reno.congestion_window == 160_000, "a smaller size takes nothing back"


def test_a_window_that_is_larger_stays() -> None:
    reno = WatchingReno(max_datagram_size=1200)
    reno.congestion_window = 10_000_000
    reno.count_in(16_000)
    assert reno.congestion_window == 10_000_000


def test_a_window_that_a_loss_narrowed_stays() -> None:
    reno = WatchingReno(max_datagram_size=1200)
    reno.congestion_window = reno.ssthresh = 6000
    reno.count_in(16_000)
    assert reno.congestion_window == 6000


@pytest.mark.parametrize(("size", "window"), [(16_000, 160_000), (8952, 17_904)])
def test_a_connection_has_it_when_its_probe_arrived(size: int, window: int) -> None:
    pair = Pair(datagram_size=size)
    for side in (pair.client, pair.server):
        assert side.quic.datagram_size == size
        assert window <= side.quic.congestion_window < window + 10 * 1200


def test_the_first_flight_within_a_machine_takes_one_way() -> None:
    pair = Pair(datagram_size=16_000)
    octets = 9 * 15_900
    pair.client.transport.send(2, bytes(octets), False)
    pair.client.transport.flush()
    begun = pair.clock.time()
    pair.clock.run_until(lambda: pair.server.receiver.octets == octets)
    assert pair.clock.time() - begun < 1.5 * DELAY
