"""Datagram sizes and figures of a path: probes, paths that shrink, move, lose and recover."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
from aioquic.quic import connection
from aioquic.quic.packet import QuicTransportParameters
from structlog.testing import capture_logs

from kvcs.quic.aioquic_backend import QuicSettings
from kvcs.quic.aioquic_backend.prober import RAISE_INTERVAL
from tests.unit.quic.pair import PLAIN, Pair


@pytest.mark.parametrize("wanted", [1452, 8952, 16_000])
def test_a_larger_datagram_size_is_used_once_a_probe_arrived(wanted: int) -> None:
    pair = Pair(datagram_size=wanted)
    assert pair.client.transport.datagram_size == wanted
    assert pair.server.transport.datagram_size == wanted
    assert max(map(len, pair.client.sent)) == wanted
    pair.client.transport.send(2, b"x" * 100_000, True)
    pair.client.transport.flush()
    pair.clock.run_until(lambda: 2 in pair.server.receiver.finished)
    assert pair.server.receiver.data[2] == b"x" * 100_000
    assert sum(len(data) == wanted for data in pair.client.sent) > 2


def test_a_path_that_drops_probes_keeps_the_largest_size_it_carries() -> None:
    pair = Pair(datagram_size=16_000, connect=False)
    for side in (pair.client, pair.server):
        side.drop = lambda data: len(data) > 1500
    pair.connect()
    window = pair.client.quic._loss.congestion_window
    pair.clock.run_until(lambda: pair.client.transport.datagram_size == 1452)
    assert pair.client.quic._loss.congestion_window >= window, "a lost probe is no congestion"
    pair.clock.run_for(5.0)
    assert pair.client.transport.datagram_size == 1452


def test_a_path_that_drops_all_probes_stays_at_the_smallest_size() -> None:
    pair = Pair(datagram_size=16_000, connect=False)
    for side in (pair.client, pair.server):
        side.drop = lambda data: len(data) > 1200
    pair.connect()
    pair.clock.run_for(10.0)
    assert pair.client.transport.datagram_size == 1200
    assert pair.client.ending is None


@pytest.mark.parametrize("taken", [1200, 1300, 9000])
def test_a_peer_is_sent_no_larger_datagram_than_it_takes(
    monkeypatch: pytest.MonkeyPatch, taken: int
) -> None:
    offering = partial(QuicTransportParameters, max_udp_payload_size=taken)
    monkeypatch.setattr(connection, "QuicTransportParameters", offering)
    pair = Pair(datagram_size=16_000)
    flood(pair, 2, 200_000)
    pair.clock.run_until(lambda: 2 in pair.server.receiver.finished)
    for side in (pair.client, pair.server):
        assert side.transport.datagram_size == taken
        assert max(map(len, side.sent)) == taken


def flood(pair: Pair, stream_id: int, octets: int) -> None:
    """Have the client send so much on a stream, as its credit allows."""
    client, left = pair.client.transport, octets

    def pump() -> None:
        nonlocal left
        while left and (room := min(client.octets(), client.stream_octets(stream_id), left)) > 0:
            left -= room
            client.send(stream_id, bytes(room), not left)
        client.flush()

    pair.client.receiver.on_batch = pump
    pump()


@pytest.mark.parametrize("shrunk", [1500, 1200])
def test_a_path_that_shrinks_in_mid_flow_is_noticed_and_searched_anew(shrunk: int) -> None:
    pair = Pair(datagram_size=16_000)
    assert pair.client.transport.datagram_size == 16_000
    flood(pair, 2, 4_000_000)
    pair.clock.run_until(lambda: pair.server.receiver.octets > 1_000_000)
    for side in (pair.client, pair.server):
        side.drop = lambda data: len(data) > shrunk
    begun = pair.clock.time()
    with capture_logs() as logs:
        pair.clock.run_until(lambda: 2 in pair.server.receiver.finished)
    assert pair.clock.time() - begun < 10.0
    assert pair.server.receiver.octets == 4_000_000
    pair.clock.run_for(5.0)
    assert pair.client.transport.datagram_size == (1452 if shrunk == 1500 else 1200)
    assert pair.client.ending is None and pair.server.ending is None
    [warning] = [entry for entry in logs if entry["log_level"] == "warning"]
    assert warning["event"] == "datagram_size_no_longer_passes"
    assert warning["octets"] == 16_000


@pytest.mark.parametrize("octets", [100, 5000, 4_000_000])
def test_a_peer_that_is_silent_for_a_while_is_no_path_that_shrank(octets: int) -> None:
    pair = Pair(datagram_size=16_000)
    flood(pair, 2, octets)
    pair.clock.run_for(0.004)
    pair.server.stop()
    with capture_logs() as logs:
        pair.clock.run_for(5.0)
        assert octets < 1200 or pair.client.quic.datagram_size == 1200, "a small packet is to tell"
        pair.server.go_on()
        pair.clock.run_until(lambda: 2 in pair.server.receiver.finished)
        pair.clock.run_for(1.0)
    assert pair.client.transport.datagram_size == 16_000
    assert [entry for entry in logs if entry["log_level"] == "warning"] == []
    assert pair.client.transport._prober.size == 16_000


def test_a_silent_peer_that_lost_some_of_the_burst_is_no_path_that_shrank() -> None:
    pair = Pair(datagram_size=8952)
    pair.server.buffer = 40_000
    flood(pair, 2, 2_000_000)
    for _ in range(4):
        pair.clock.run_for(0.3)
        pair.server.stop()
        pair.clock.run_for(2.0)
        pair.server.go_on()
    pair.clock.run_until(lambda: 2 in pair.server.receiver.finished)
    pair.clock.run_for(1.0)
    assert pair.server.overflown > 0
    assert pair.client.transport.datagram_size == 8952


def test_a_path_that_recovers_is_used_to_the_full_again() -> None:
    pair = Pair(datagram_size=8952)
    pair.client.drop = lambda data: len(data) > 1500
    flood(pair, 2, 1_000_000)
    pair.clock.run_until(lambda: 2 in pair.server.receiver.finished)
    assert pair.client.transport.datagram_size == 1452
    pair.client.drop = lambda data: False
    pair.clock.run_until(lambda: pair.client.transport.datagram_size == 8952, 2 * RAISE_INTERVAL)


def test_loss_that_is_not_of_size_keeps_the_size() -> None:
    pair = Pair(datagram_size=16_000)
    rng = random.Random(1)
    pair.client.drop = lambda data: rng.random() < 0.02
    with capture_logs() as logs:
        flood(pair, 2, 8_000_000)
        pair.clock.run_until(lambda: 2 in pair.server.receiver.finished)
    assert pair.client.transport.stats().packets_lost > 5
    assert pair.client.transport.datagram_size == 16_000
    assert "datagram_size_no_longer_passes" not in [entry["event"] for entry in logs]


def test_datagrams_that_no_longer_fit_are_dropped_and_block_nothing() -> None:
    pair = Pair(datagram_size=8952)
    pair.client.transport.send_datagram(bytes(8000))
    pair.client.transport.send_datagram(b"small")
    pair.client.quic.set_datagram_size(1200)
    pair.client.transport.flush()
    pair.clock.run_for(0.1)
    received = [call[1] for call in pair.server.receiver.calls if call[0] == "datagram"]
    assert received == [b"small"]


@pytest.mark.parametrize(("host", "searched"), [("elsewhere", 1200), ("client", 16_000)])
def test_a_new_host_is_a_new_path_and_a_new_port_is_not(host: str, searched: int) -> None:
    pair = Pair(datagram_size=16_000)
    assert pair.server.transport.datagram_size == 16_000
    pair.client.address = (host, 99)
    sizes: list[int] = []
    original = pair.server.quic.datagrams_to_send

    def noting(now: float) -> list[tuple[bytes, Any]]:
        if pair.server.quic.get_peer_address() == (host, 99):
            sizes.append(pair.server.quic.datagram_size)
        return original(now)

    pair.server.quic.datagrams_to_send = noting  # type: ignore[method-assign]
    pair.client.transport.send(2, b"from another address", True)
    pair.client.transport.flush()
    pair.clock.run_for(1.0)
    assert sizes[0] == searched
    assert pair.server.transport.datagram_size == 16_000, "the new path carries it, too"
    assert pair.client.ending is None and pair.server.ending is None


def test_the_figures_of_a_path_are_read() -> None:
    pair = Pair(datagram_size=8952)
    flood(pair, 2, 100_000)
    pair.clock.run_until(lambda: 2 in pair.server.receiver.finished)
    pair.clock.run_for(1.0)
    stats = pair.client.transport.stats()
    assert stats.datagram_size == 8952
    assert stats.rtt is not None and 0.005 < stats.rtt < 0.05
    assert stats.smallest_rtt is not None and 0.01 <= stats.smallest_rtt < 0.02
    assert stats.congestion_window >= 10 * 1200
    assert stats.octets_in_flight == 0
    assert stats.octets_sent == sum(map(len, pair.client.sent)) > 100_000
    assert stats.octets_received == sum(map(len, pair.server.sent))
    assert stats.packets_lost == 0
    assert (stats.receive_buffer, stats.send_buffer) == (4096, 4096)


def test_a_probe_after_silence_is_not_called_lost_too_early() -> None:
    pair = Pair()
    pair.clock.run_for(5.0)
    outcome: list[bool] = []
    pair.client.send(pair.client.quic.probe(1300, pair.clock.time(), outcome.append))
    pair.client.transport.flush()
    pair.clock.run_until(lambda: bool(outcome))
    assert outcome == [True]


def test_facts_of_the_path_are_read() -> None:
    pair = Pair(server=QuicSettings(idle_timeout=12.0))
    assert pair.client.quic.effective_idle_timeout == 12.0
    assert pair.client.transport.smoothed_rtt == pytest.approx(0.01, rel=0.5)
    assert 0.01 <= pair.client.quic.smallest_rtt < 0.02
    assert PLAIN.idle_timeout == 30.0


def test_a_client_heard_from_another_port_is_answered_at_once() -> None:
    pair = Pair(client=QuicSettings(ping_interval=8.0))
    server, arrived = pair.server.transport, pair.client.receiver
    server.send(3, bytes(20_000), False)
    server.flush()
    pair.server.drop = lambda data: True  # to the port that is no longer its own
    server.send(3, bytes(20_000), True)
    server.flush()
    pair.clock.run_for(7.0)
    assert 3 not in arrived.finished
    pair.client.address = ("client", 99)
    pair.server.drop = lambda data: pair.server.quic.get_peer_address() != ("client", 99)
    pair.clock.run_until(lambda: pair.server.quic.get_peer_address() == ("client", 99), 9.0)
    pair.clock.run_until(lambda: 3 in arrived.finished, 0.5)
