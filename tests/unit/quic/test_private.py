"""One test for each reach into the library: what a release moves shows here, by name."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence

import pytest
from aioquic import tls
from aioquic.buffer import Buffer  # type: ignore[attr-defined]
from aioquic.quic import connection
from aioquic.quic.connection import QuicConnection
from aioquic.quic.recovery import QuicPacketPacer, QuicPacketRecovery
from cryptography import x509

from kvcs.errors import UsageError
from kvcs.quic.aioquic_backend import QuicSettings
from kvcs.quic.aioquic_backend.private import check_version
from kvcs.quic.aioquic_backend.private.authentication import require_certificate
from kvcs.quic.aioquic_backend.private.congestion import WatchingReno
from kvcs.quic.aioquic_backend.private.connection import MAX_PENDING_DATAGRAMS
from kvcs.quic.aioquic_backend.private.packets import BURST_PACKETS, BurstPacer
from tests.unit.quic.pair import Pair, identity

WINDOW = 64 * 1024


def small(
    receive_window: int = WINDOW, stream_receive_window: int = WINDOW, uni_streams: int = 512
) -> QuicSettings:
    """Settings with limits that a test can reach."""
    return QuicSettings(
        datagram_size=1200,
        receive_window=receive_window,
        stream_receive_window=stream_receive_window,
        uni_streams=uni_streams,
    )


@pytest.mark.parametrize("version", ["1.7.0", "1.7.2", "1.7.99"])
def test_known_releases_are_taken(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["1.6.9", "1.8.0", "2.7.0"])
def test_other_releases_are_refused(version: str) -> None:
    with pytest.raises(ImportError, match=r"aioquic 1\.7\.x"):
        check_version(version)


def test_the_library_does_not_print_where_nobody_configured_logging() -> None:
    logger = logging.getLogger("quic")
    assert any(isinstance(handler, logging.NullHandler) for handler in logger.handlers)
    assert 'logging.getLogger("quic")' in inspect.getsource(connection)


def test_streams_are_walked_in_one_place_only() -> None:
    """`Streams.values` gives the streams with a limit to announce: nothing else may ask it."""
    source = inspect.getsource(QuicConnection)
    assert source.count("self._streams.values()") == 1
    assert "_streams.items()" not in source
    assert "in self._streams:" not in source.replace("not in self._streams:", "")
    where = inspect.getsource(QuicConnection._write_application)
    assert "for stream in self._streams.values():\n" in where
    assert "self._write_stream_limits(" in where


def test_the_queue_of_streams_is_set_anew_for_each_packet() -> None:
    source = inspect.getsource(QuicConnection._write_application)
    assert "self._streams_queue = [" in source
    assert "self._streams_queue.extend(sent)" in source
    assert "for stream in self._streams_queue:\n" in source
    assert inspect.getsource(QuicConnection).count("self._streams_queue.append(stream)") == 2
    assert inspect.getsource(QuicConnection).count("self._streams_queue") == 7


def test_a_server_asks_for_certificates_where_it_is_known_to() -> None:
    """What `require_certificate` rests on: where the library looks, and what it leaves to us."""
    source = inspect.getsource(tls.Context)
    assert source.count("self._request_client_certificate") == 3, "set once, looked at twice"
    assert source.count("self._server_handle_certificate(input_buf)") == 1
    assert source.count("self._server_handle_certificate_verify(input_buf)") == 1
    assert "_check_certificate_verify_signature" in inspect.getsource(
        tls.Context._server_handle_certificate_verify
    )
    assert "verify_certificate(" not in inspect.getsource(
        tls.Context._server_handle_certificate_verify
    ), "the library looks at a client's chain itself now"
    # A resumed session would show no certificate: nothing here keeps tickets.
    assert inspect.getsource(QuicConnection).count("if self._session_ticket_fetcher is not") == 1


class Nobody:
    """Lets no client in."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def check(self, certificate: x509.Certificate, chain: Sequence[x509.Certificate], /) -> None:
        self.asked.append(len(chain))
        raise tls.AlertBadCertificate("not you")

    def count(self, alert: tls.Alert, /) -> None:
        self.asked.append(-1)


@pytest.mark.parametrize("certified", [True, False])
def test_a_finished_behind_a_refused_certificate_completes_no_handshake(certified: bool) -> None:
    ca, leaf = identity()
    client = tls.Context(is_client=True, cadata=ca.certificate_pem, server_name="localhost")
    server = tls.Context(is_client=False)
    server.certificate, server.certificate_private_key = leaf.certificate, leaf.key
    if certified:
        client.certificate, client.certificate_private_key = leaf.certificate, leaf.key
    nobody = Nobody()
    require_certificate(server, nobody)

    def step(context: tls.Context, octets: bytes) -> bytes:
        buffers = {epoch: Buffer(capacity=8192) for epoch in tls.Epoch}
        context.handle_message(octets, buffers)
        return b"".join(buffer.data for buffer in buffers.values())

    flight = step(client, step(server, step(client, b"")))
    messages = []
    while flight:
        size = 4 + int.from_bytes(flight[1:4])
        messages.append(flight[:size])
        flight = flight[size:]
    *shown, finished = messages
    assert len(shown) == (2 if certified else 1)
    with pytest.raises(tls.Alert) as caught:
        for message in shown:
            step(server, message)
    wanted = "bad_certificate" if certified else "certificate_required"
    assert caught.value.description.name == wanted
    assert nobody.asked == ([0] if certified else [-1])
    with pytest.raises(tls.AlertUnexpectedMessage):
        step(server, finished)
    assert server.state is not tls.State.SERVER_POST_HANDSHAKE


def test_stream_credit_of_512_is_granted_both_ways() -> None:
    pair = Pair()
    for side in (pair.client, pair.server):
        assert side.transport.uni_streams() == 512
        assert side.transport.bidi_streams() == 512


def test_stream_credit_grows_as_streams_end() -> None:
    pair = Pair(server=small(uni_streams=4))
    assert pair.client.transport.uni_streams() == 4
    for index in range(4):
        pair.client.transport.send(2 + 4 * index, b"x", True)
    assert pair.client.transport.uni_streams() == 0
    pair.client.transport.flush()
    pair.clock.run_until(lambda: pair.client.transport.uni_streams() > 0)


def test_held_octets_count_unsent_and_unacknowledged() -> None:
    pair = Pair()
    quic = pair.client.quic
    pair.client.transport.send(2, b"x" * 1000, False)
    assert quic.held == 1000
    pair.client.transport.flush()
    assert quic.measure() == 0
    assert quic.held == 1000, "sent is not acknowledged"
    pair.clock.run_for(0.1)
    assert quic.held == 0
    assert quic.measure() == 0, "already accounted for"


def test_acknowledged_octets_are_counted_once() -> None:
    pair = Pair()
    total = 0
    measure = pair.client.quic.measure

    def counting() -> int:
        nonlocal total
        acknowledged = measure()
        total += acknowledged
        return acknowledged

    pair.client.quic.measure = counting  # type: ignore[method-assign]
    pair.client.transport.send(2, b"x" * 30_000, True)
    pair.client.transport.flush()
    pair.clock.run_until(lambda: pair.client.quic.held == 0)
    assert total == 30_000


def test_a_reset_frees_what_was_held() -> None:
    pair = Pair()
    pair.client.transport.send(2, b"x" * 500_000, False)
    pair.client.transport.flush()
    pair.client.transport.reset(2, 7)
    assert pair.client.quic.held == 0
    assert pair.client.quic._streams[2].sender._buffer == b""
    pair.client.transport.flush()
    pair.clock.run_until(lambda: ("stream_reset", 2, 7) in pair.server.receiver.calls)
    pair.clock.run_for(0.2)
    assert 2 not in pair.client.quic._streams


def test_stream_credit_is_the_peers_window_less_what_is_held() -> None:
    pair = Pair(server=small(receive_window=10 * WINDOW))
    transport = pair.client.transport
    assert transport.stream_octets(2) == WINDOW, "not opened yet: the initial window"
    transport.send(2, b"x" * 1000, False)
    assert transport.stream_octets(2) == WINDOW - 1000
    transport.send(2, b"", True)
    assert transport.stream_octets(2) == 0, "nothing follows a FIN"
    assert transport.stream_octets(3) == 0, "the peer's stream"


def test_connection_credit_is_shared_by_all_streams() -> None:
    pair = Pair(server=small())
    transport = pair.client.transport
    assert transport.octets() == WINDOW
    transport.send(2, b"x" * 40_000, False)
    assert transport.octets() == WINDOW - 40_000
    transport.send(6, b"x" * (WINDOW - 40_000), False)
    assert transport.octets() == 0


def test_credit_follows_consumption_and_never_doubles() -> None:
    pair = Pair(server=small())
    sent = 0

    def pump() -> None:
        nonlocal sent
        while (room := min(transport.octets(), transport.stream_octets(2))) > 0:
            transport.send(2, bytes(room), False)
            sent += room
        transport.flush()

    transport = pair.client.transport
    pair.client.receiver.on_batch = pump
    pump()
    pair.clock.run_until(lambda: pair.server.receiver.octets >= 20 * WINDOW)
    quic = pair.server.quic
    assert quic._local_max_data.value <= pair.server.receiver.octets + WINDOW
    assert quic._streams[2].max_stream_data_local <= pair.server.receiver.octets + WINDOW


def test_withheld_credit_stops_the_peer_until_it_is_released() -> None:
    pair = Pair(server=small(stream_receive_window=100 * WINDOW))
    client, server = pair.client.transport, pair.server.transport
    held = 0

    def hold(stream_id: int, data: bytes) -> None:
        nonlocal held
        held += len(data)
        server.withhold(len(data))

    def pump() -> None:
        while (room := client.octets()) > 0:
            client.send(2, bytes(room), False)
        client.flush()

    pair.server.receiver.on_data = hold
    pair.client.receiver.on_batch = pump
    pump()
    pair.clock.run_for(5.0)
    assert pair.server.receiver.octets == WINDOW, "one window and no more"
    server.release(held)
    held = 0
    pair.clock.run_until(lambda: pair.server.receiver.octets == 2 * WINDOW)
    with pytest.raises(UsageError, match="cannot release"):
        server.release(held + 1)


def test_octets_that_a_reset_swallowed_are_credited() -> None:
    pair = Pair(server=small(stream_receive_window=2 * WINDOW))
    client = pair.client.transport
    lost = 0

    def drop_some(data: bytes) -> bool:
        nonlocal lost
        lost += len(data) > 1000
        return len(data) > 1000 and lost % 2 == 1  # leaves gaps that are never delivered

    for index in range(40):
        pair.client.drop = drop_some
        client.send(2 + 4 * index, b"x" * 5000, False)
        client.flush()
        pair.clock.run_for(0.006)
        pair.client.drop = lambda data: False
        client.reset(2 + 4 * index, 1)
        client.flush()
        pair.clock.run_for(0.2)
    assert pair.server.receiver.octets < 40 * 5000
    assert client.octets() > WINDOW // 2, "the credit of what was swallowed came back"


def test_lost_credit_is_announced_again() -> None:
    pair = Pair(server=small())
    client = pair.client.transport
    pair.client.quic._loss._cc.congestion_window = 2 * WINDOW  # needs no answer to send it all
    pair.server.drop = lambda data: True
    client.send(2, bytes(WINDOW), False)
    client.flush()
    pair.clock.run_until(lambda: pair.server.receiver.octets == WINDOW)
    pair.clock.run_for(0.01)
    assert (client.stream_octets(2), client.octets()) == (0, 0), "nothing came back"
    pair.server.drop = lambda data: False
    due = WINDOW // 4 * 3
    pair.clock.run_until(lambda: client.stream_octets(2) >= due and client.octets() >= due)


def test_idle_streams_are_parked_and_wake_again() -> None:
    pair = Pair()
    client, server = pair.client.transport, pair.server.transport
    for index in range(100):
        client.send(4 * index, b"ask", False)
    client.flush()
    pair.clock.run_for(0.5)
    assert len(pair.server.receiver.data) == 100
    for side in (pair.client, pair.server):
        assert side.quic._streams_queue == []
        assert len(side.quic._parked) == 100
    server.send(4 * 50, b"answer", True)
    server.flush()
    client.send(4 * 50, b" more", True)
    client.flush()
    pair.clock.run_for(0.5)
    assert pair.client.receiver.data == {200: b"answer"}
    assert pair.server.receiver.data[200] == b"ask more"
    for side in (pair.client, pair.server):
        assert 200 not in side.quic._streams, "both directions ended: discarded"
        assert len(side.quic._streams) == len(side.quic._parked) == 99


def test_finished_streams_leave_nothing_behind() -> None:
    pair = Pair()
    client = pair.client.transport
    opened = 0

    def pump() -> None:
        nonlocal opened
        while opened < 3000 and client.uni_streams() and client.octets():
            client.send(2 + 4 * opened, b"short", True)
            opened += 1
        client.flush()

    pair.client.receiver.on_batch = pump
    pump()
    pair.clock.run_until(lambda: len(pair.server.receiver.finished) == 3000)
    pair.clock.run_for(0.5)
    for side in (pair.client, pair.server):
        quic = side.quic
        assert not quic._streams
        assert not quic._streams_queue
        assert not quic._parked
        assert not quic._known.due
        assert not quic._senders


def test_the_burst_has_a_floor() -> None:
    stock, ours = QuicPacketPacer(max_datagram_size=1200), BurstPacer(max_datagram_size=1200)
    for pacer in (stock, ours):
        pacer.update_rate(congestion_window=100_000_000, smoothed_rtt=0.001)
    assert stock.packet_time is not None
    assert ours.packet_time == stock.packet_time
    assert stock.bucket_max < 2 * BURST_PACKETS * stock.packet_time
    assert ours.bucket_max >= BURST_PACKETS * stock.packet_time
    ours.update_bucket(now=1.0)
    ours.update_rate(congestion_window=100_000_000, smoothed_rtt=0.001)
    for _ in range(BURST_PACKETS):
        assert ours.next_send_time(1.0) is None
        ours.update_after_send(1.0)


def test_the_pacer_in_use_is_ours() -> None:
    assert type(Pair().client.quic._loss._pacer) is BurstPacer


def test_a_datagram_never_blocks_the_queue() -> None:
    pair = Pair()
    client = pair.client.transport
    largest = client.datagram_octets()
    assert 1100 < largest < 1200
    client.send_datagram(b"x" * (largest + 1))
    client.send_datagram(b"x" * largest)
    client.flush()
    pair.clock.run_for(0.1)
    received = [call[1] for call in pair.server.receiver.calls if call[0] == "datagram"]
    assert received == [b"x" * largest]
    assert not pair.client.quic._datagrams_pending


def test_waiting_datagrams_are_bounded() -> None:
    pair = Pair()
    for _ in range(2 * MAX_PENDING_DATAGRAMS):
        pair.client.transport.send_datagram(b"x" * 1000)
    assert len(pair.client.quic._datagrams_pending) == MAX_PENDING_DATAGRAMS


def test_losses_reach_the_congestion_control_that_watches() -> None:
    """The library tells a congestion control of each packet, in these calls."""
    source = inspect.getsource(QuicPacketRecovery)
    assert "self._cc.on_packet_acked(packet=packet, now=now)" in source
    assert "self._cc.on_packets_expired(packets=lost_packets_cc)" in source
    assert "self._cc.on_packets_lost(now=now, packets=lost_packets_cc)" in source
    assert type(Pair().client.quic._loss._cc) is WatchingReno
    acknowledged = inspect.signature(QuicPacketRecovery.on_ack_received)
    assert acknowledged.parameters["ack_rangeset"].kind is inspect.Parameter.KEYWORD_ONLY
    handler = inspect.getsource(QuicConnection._handle_ack_frame)
    assert "self._loss.on_ack_received(\n            ack_rangeset=" in handler
