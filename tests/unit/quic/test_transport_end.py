"""How a connection of the aioquic backend ends, whoever ends it, and what is told of it."""

from __future__ import annotations

from structlog.testing import capture_logs

from kvcs.quic.aioquic_backend import QuicSettings
from tests.unit.quic.pair import DELAY, Pair, Recorder


def ends(receiver: Recorder) -> list[tuple[object, ...]]:
    """The `closed` calls that a receiver got."""
    return [call for call in receiver.calls if call[0] == "closed"]


def test_close_ends_though_the_peer_is_gone() -> None:
    pair = Pair(client=QuicSettings(datagram_size=1200, close_timeout=0.5))
    pair.client.drop = lambda data: True
    pair.client.transport.close(3, "why not")
    begun = pair.clock.time()
    pair.clock.run_until(lambda: bool(ends(pair.client.receiver)))
    assert pair.clock.time() - begun <= 0.5 + 1e-3
    pair.client.transport.close(4, "twice")
    pair.clock.run_for(5.0)
    assert ends(pair.client.receiver) == [("closed", 3, "why not", False)]


def test_a_lost_close_is_repeated_to_a_peer_that_goes_on() -> None:
    pair = Pair(client=QuicSettings(datagram_size=1200, close_timeout=5.0))
    pair.client.drop = lambda data: True
    pair.client.transport.close(3, "lost once")
    pair.client.drop = lambda data: False
    pair.server.transport.send(3, b"are you there?", False)
    pair.server.transport.flush()
    pair.clock.run_until(lambda: bool(ends(pair.server.receiver)), 1.0)
    assert ends(pair.server.receiver) == [("closed", 3, "lost once", True)]


def test_silence_ends_a_connection() -> None:
    settings = QuicSettings(datagram_size=1200, idle_timeout=4.0, ping_interval=None)
    pair = Pair(client=settings, server=settings)
    pair.clock.run_for(8.0)
    for side in (pair.client, pair.server):
        assert ends(side.receiver) == [
            ("closed", None, "idle timeout: nothing was received for 4 s", False)
        ]


def test_pings_keep_a_silent_connection() -> None:
    settings = QuicSettings(datagram_size=1200, idle_timeout=4.0, ping_interval=1.0)
    pair = Pair(client=settings, server=QuicSettings(ping_interval=None))
    pair.clock.run_for(60.0)
    assert not ends(pair.client.receiver) and not ends(pair.server.receiver)
    before = len(pair.client.sent)
    pair.clock.run_for(20.0)
    assert 18 <= len(pair.client.sent) - before <= 45, "a PING a second and its acknowledgement"


def test_pings_follow_a_peer_with_a_shorter_timeout() -> None:
    pair = Pair(server=QuicSettings(idle_timeout=3.0, ping_interval=None))
    pair.clock.run_for(30.0)
    assert not ends(pair.client.receiver) and not ends(pair.server.receiver)


def test_a_vanished_peer_is_noticed_in_spite_of_pings() -> None:
    settings = QuicSettings(datagram_size=1200, idle_timeout=4.0, ping_interval=1.0)
    pair = Pair(client=settings)
    pair.server.drop = lambda data: True
    pair.clock.run_for(12.0)
    assert ends(pair.client.receiver) == [
        ("closed", None, "idle timeout: nothing was received for 4 s", False)
    ]


def test_a_handshake_that_nobody_answers_is_given_up_without_a_receiver() -> None:
    pair = Pair(connect=False)
    pair.client.drop = lambda data: True
    pair.client.transport.give_up_after(2.0)
    pair.client.transport.connect(pair.server.address)
    pair.clock.run_until(lambda: pair.client.ending is not None, 2.1)
    assert not hasattr(pair.client, "receiver")
    assert pair.client.transport.is_over


def test_a_fault_in_the_receiver_closes_and_tells_the_peer_nothing() -> None:
    pair = Pair()

    def fault(stream_id: int, data: bytes) -> None:
        raise RuntimeError("secret detail")

    pair.server.receiver.on_data = fault
    pair.client.transport.send(2, b"x", True)
    pair.client.transport.flush()
    with capture_logs() as logs:
        pair.clock.run_until(lambda: bool(ends(pair.client.receiver)))
    pair.clock.run_for(1.0)
    assert ends(pair.client.receiver) == [("closed", 1, "internal error", True)]
    assert ends(pair.server.receiver) == [("closed", 1, "internal error", False)]
    assert [entry["event"] for entry in logs if entry["log_level"] == "error"] == [
        "receiver_failed"
    ]


def test_a_fault_while_closing_still_tells_the_owner() -> None:
    pair = Pair()

    def fault(code: int | None, reason: str, by_peer: bool) -> None:
        raise RuntimeError("in closed")

    pair.client.receiver.closed = fault  # type: ignore[method-assign]
    pair.client.transport.close(0, "")
    pair.clock.run_for(2.0)
    assert pair.client.ending is not None
    assert pair.client.transport.is_over


def test_a_peer_that_breaks_flow_control_is_closed_with_a_transport_error() -> None:
    pair = Pair()
    pair.client.quic._remote_max_streams_uni = 600  # pretends that it was granted more
    for index in range(513):
        pair.client.transport.send(2 + 4 * index, b"x", False)
    pair.client.transport.flush()
    pair.clock.run_for(5.0)
    expected = "QUIC error STREAM_LIMIT_ERROR: Too many streams open"
    assert ends(pair.server.receiver) == [("closed", None, expected, False)]
    assert ends(pair.client.receiver) == [("closed", None, expected, True)]


def test_a_close_by_the_peer_is_reported_at_once() -> None:
    pair = Pair()
    pair.server.transport.close(0, "now")
    begun = pair.clock.time()
    pair.clock.run_until(lambda: bool(ends(pair.client.receiver)))
    assert pair.clock.time() - begun < 1.5 * DELAY


def test_an_error_without_a_frame_type_is_no_application_code() -> None:
    pair = Pair()
    # What the library does with a frame whose type it cannot read.
    pair.server.quic.close(error_code=7, frame_type=None, reason_phrase="Malformed frame type")
    pair.server.transport.flush()
    pair.clock.run_for(1.0)
    expected = "QUIC error FRAME_ENCODING_ERROR: Malformed frame type"
    assert ends(pair.client.receiver) == [("closed", None, expected, True)]
    assert ends(pair.server.receiver) == [("closed", None, expected, False)]


def test_a_long_reason_is_cut_and_a_foul_one_cleaned() -> None:
    pair = Pair()
    pair.client.transport.close(1, "a\x1b[31m\nb" + "ü" * 2000)
    pair.clock.run_for(2.0)
    ((_, code, reason, by_peer),) = ends(pair.server.receiver)
    assert (code, by_peer) == (1, True)
    assert isinstance(reason, str) and reason.isprintable()
    assert reason.startswith("a [31m bü") and len(reason.encode()) <= 512


def test_a_connection_that_is_over_takes_every_call_quietly() -> None:
    pair = Pair()
    transport = pair.client.transport
    transport.close(0, "")
    for _ in range(2):
        transport.send(2, b"x", True)
        transport.reset(2, 0)
        transport.stop_sending(0, 0)
        transport.send_datagram(b"x")
        transport.flush()
        transport.close(0, "")
        assert (transport.octets(), transport.stream_octets(2)) == (0, 0)
        assert (transport.uni_streams(), transport.bidi_streams()) == (0, 0)
        assert transport.datagram_octets() == 0
        pair.clock.run_for(2.0)
    assert len(ends(pair.client.receiver)) == 1


def test_a_connection_leaves_no_call_on_the_clock() -> None:
    pair = Pair()
    pair.client.transport.close(0, "")
    pair.clock.run_for(10.0)
    assert not any(call.callback for _, _, call in pair.clock._calls)
