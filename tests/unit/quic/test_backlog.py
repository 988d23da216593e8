"""Control messages that a peer makes us send and does not take: they pile up to a bound."""

from __future__ import annotations

from kvcs.quic.aioquic_backend import QuicSettings
from kvcs.quic.aioquic_backend.transport import CONTROL_MESSAGE_TIMEOUT
from tests.unit.quic.pair import Pair

OCTETS = 20_000


def pair() -> Pair:
    """A client that lets the server send next to nothing on the streams that it opens."""
    settings = QuicSettings(send_buffer=OCTETS, send_buffer_limit=OCTETS, control_backlog=OCTETS)
    made = Pair(client=QuicSettings(stream_receive_window=1000), server=settings)
    made.client.quic.consume = lambda stream_id, octets: None  # type: ignore[method-assign]
    return made


def test_a_peer_that_does_not_take_its_replies_is_closed() -> None:
    made = pair()
    made.client.transport.send(0, b"many questions", False)
    made.client.transport.flush()
    server = made.server.transport
    made.clock.run_until(lambda: 0 in made.server.receiver.data)
    for _ in range(39):
        server.send(0, bytes(1000), False)
    server.flush()
    made.clock.run_for(1.0)
    assert ("closed", CONTROL_MESSAGE_TIMEOUT) not in [c[:2] for c in made.server.receiver.calls]
    for _ in range(4):
        server.send(0, bytes(1000), False)
    assert server.unacknowledged() <= 2 * OCTETS + 1000
    made.clock.run_for(2.0)
    for side in (made.client, made.server):
        (closed,) = [call for call in side.receiver.calls if call[0] == "closed"]
        assert closed[1] == CONTROL_MESSAGE_TIMEOUT


def test_a_peer_that_takes_its_replies_may_ask_for_any_number() -> None:
    made = Pair(
        server=QuicSettings(
            send_buffer=OCTETS, send_buffer_limit=OCTETS, control_backlog=OCTETS, ping_interval=None
        )
    )
    made.client.transport.send(0, b"many questions", False)
    made.client.transport.flush()
    made.clock.run_until(lambda: 0 in made.server.receiver.data)
    for _ in range(20):
        made.server.transport.send(0, bytes(OCTETS), False)
        made.server.transport.flush()
        made.clock.run_until(lambda: made.server.transport.unacknowledged() == 0)
    assert len(made.client.receiver.data[0]) == 20 * OCTETS
