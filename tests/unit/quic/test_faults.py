"""Faults of peers, kernels and paths: bounded memory, no deadlock, no starvation, right errors.

Two real connections on a virtual clock; what is random is seeded.
"""

from __future__ import annotations

import random

import pytest

from kvcs.quic.aioquic_backend import QuicSettings
from tests.unit.quic.pair import Pair, Side

KIB, MIB = 1024, 1024 * 1024


class Feed:
    """Sends streams of given contents in order, one octet budget for all, as a session would.

    A stream is opened only within the peer's stream credit, and written only within its window, so
    one that is blocked takes nothing of what the others share.
    """

    def __init__(self, side: Side, contents: list[bytes], first: int) -> None:
        self.side = side
        self.contents = {first + 4 * index: content for index, content in enumerate(contents)}
        self.left = {stream_id: memoryview(c) for stream_id, c in self.contents.items()}
        self.opened: set[int] = set()
        self.ended: set[int] = set()
        self.most_held = 0
        self.most_open = 0
        """Streams of ours that the peer has open at once."""
        side.receiver.on_batch = self.pump

    def pump(self) -> None:
        """Send what may go."""
        transport = self.side.transport
        first = min(self.contents)
        theirs = [each for each in self.side.peer.quic._streams if each % 4 == first]
        self.most_open = max(self.most_open, len(theirs))
        self.most_held = max(self.most_held, transport.unacknowledged())
        for stream_id in list(self.left):
            if stream_id not in self.opened and not transport.uni_streams():
                break
            room = min(transport.octets(), transport.stream_octets(stream_id))
            piece = self.left[stream_id][:room]
            if not piece and self.left[stream_id]:
                continue
            self.opened.add(stream_id)
            self.left[stream_id] = self.left[stream_id][len(piece) :]
            last = not self.left[stream_id]
            transport.send(stream_id, piece, last)
            if last:
                del self.left[stream_id]
        self.most_held = max(self.most_held, transport.unacknowledged())
        transport.flush()


def contents(seed: int, count: int, least: int, most: int) -> list[bytes]:
    """Contents of streams, the same for one seed."""
    rng = random.Random(seed)
    return [rng.randbytes(rng.randrange(least, most)) for _ in range(count)]


def carried(pair: Pair, feed: Feed, limit: float = 60.0) -> None:
    """Run until every stream has arrived, and hold it to what was sent."""
    to = feed.side.peer.receiver
    pair.clock.run_until(lambda: len(to.finished) == len(feed.contents), limit)
    assert to.data == feed.contents
    assert pair.client.ending is None and pair.server.ending is None


@pytest.mark.parametrize(("window", "stream_window"), [(2000, 1500), (1500, 1500), (64, 16)])
def test_tiny_windows_are_kept_and_lead_to_the_end(window: int, stream_window: int) -> None:
    octets = 20 * window
    pair = Pair(server=QuicSettings(receive_window=window, stream_receive_window=stream_window))
    feed = Feed(pair.client, contents(1, 5, octets // 8, octets // 4), 2)
    feed.pump()
    carried(pair, feed, 120.0)
    assert feed.most_held <= 2 * window, "credit may come before the acknowledgement"
    assert pair.server.quic._local_max_data.value <= pair.server.receiver.octets + window


@pytest.mark.parametrize("seed", range(3))
def test_four_streams_at_a_time_carry_hundreds(seed: int) -> None:
    pair = Pair(server=QuicSettings(uni_streams=4))
    rng = random.Random(seed)
    pair.client.drop = lambda data: rng.random() < 0.01
    pair.server.drop = lambda data: rng.random() < 0.01
    feed = Feed(pair.client, contents(seed, 300, 1, 2000), 2)
    feed.pump()
    carried(pair, feed, 300.0)
    assert feed.most_open <= 4


@pytest.mark.parametrize("datagram_size", [1200, 16_000])
def test_more_streams_than_credit_under_one_budget_do_not_deadlock(datagram_size: int) -> None:
    """Streams without credit that fill a shared buffer stop those that have it, for ever."""
    pair = Pair(
        client=QuicSettings(send_buffer=64 * KIB, send_buffer_limit=64 * KIB),
        server=QuicSettings(uni_streams=16, stream_receive_window=8 * KIB),
        datagram_size=datagram_size,
    )
    feed = Feed(pair.client, contents(2, 160, 10_000, 20_000), 2)
    feed.pump()
    carried(pair, feed)
    assert feed.most_held <= 64 * KIB
    assert feed.most_open <= 16


def test_a_stream_without_window_starves_no_other() -> None:
    pair = Pair(server=QuicSettings(stream_receive_window=MIB, receive_window=2 * MIB))
    client, server = pair.client, pair.server
    stuck: list[int] = []

    def consume(stream_id: int, octets: int) -> None:
        if stream_id == 2:
            stuck.append(octets)  # read by nobody: no credit for it
            server.quic._consumed += octets
        else:
            original(stream_id, octets)

    original = server.quic.consume
    server.quic.consume = consume  # type: ignore[method-assign]
    feed = Feed(client, [bytes(2 * MIB), *contents(3, 20, 1000, 300_000)], 2)
    feed.pump()
    others = set(feed.contents) - {2}
    pair.clock.run_until(lambda: server.receiver.finished == others)
    pair.clock.run_for(1.0)
    assert sum(stuck) == MIB
    assert client.transport.unacknowledged() == 0, "what is blocked waits above the library"
    for octets in stuck:
        original(2, octets)
        server.quic._consumed -= octets
    server.transport.flush()
    carried(pair, feed)


def test_a_delay_of_seconds_is_only_slow() -> None:
    settings = QuicSettings(connect_timeout=60.0)
    pair = Pair(client=settings, server=settings, connect=False)
    for side in (pair.client, pair.server):
        side.delay = 2.0
    pair.connect()
    feed = Feed(pair.client, contents(4, 8, 100_000, 200_000), 2)
    feed.pump()
    carried(pair, feed, 300.0)
    stats = pair.client.transport.stats()
    assert stats.rtt is not None and 4.0 <= stats.rtt < 4.5


@pytest.mark.parametrize("buffer", [3000, 20_000, 208 * KIB])
@pytest.mark.parametrize("datagram_size", [1200, 8952])
def test_a_kernel_with_a_small_buffer_loses_but_ends(buffer: int, datagram_size: int) -> None:
    pair = Pair(datagram_size=datagram_size)
    pair.server.buffer = buffer
    pair.server.reads_every = 0.002
    feed = Feed(pair.client, contents(5, 4, 100_000, 300_000), 2)
    feed.pump()
    carried(pair, feed, 300.0)
    lost, seen = pair.server.overflown, pair.client.transport.stats().packets_lost
    assert seen <= 2 * lost + 20, "little is called lost that was not"


def test_a_process_that_stops_for_a_minute_costs_bounded_memory_and_goes_on() -> None:
    patient = QuicSettings(idle_timeout=120.0, send_buffer=256 * KIB, send_buffer_limit=256 * KIB)
    pair = Pair(client=patient, server=patient)
    pair.server.buffer = 208 * KIB
    feed = Feed(pair.client, contents(6, 6, 300_000, 400_000), 2)
    feed.pump()
    pair.clock.run_until(lambda: pair.server.receiver.octets > 500_000)
    pair.server.stop()
    got = pair.server.receiver.octets
    pair.clock.run_for(60.0)
    assert pair.server.receiver.octets == got
    assert feed.most_held <= 256 * KIB
    assert pair.server._kept_octets <= 208 * KIB
    pair.server.go_on()
    carried(pair, feed, 120.0)
    assert feed.most_held <= 256 * KIB


def test_a_process_that_stops_for_longer_than_the_idle_timeout_is_given_up() -> None:
    pair = Pair()
    feed = Feed(pair.client, contents(7, 6, 300_000, 400_000), 2)
    feed.pump()
    pair.clock.run_until(lambda: pair.server.receiver.octets > 500_000)
    pair.server.stop()
    pair.clock.run_for(60.0)
    assert pair.client.ending is not None
    assert pair.client.ending.reason == "idle timeout: nothing was received for 30 s"
    pair.server.go_on()
    pair.clock.run_until(lambda: pair.server.ending is not None)
    assert pair.server.ending is not None and pair.server.ending.idle


def test_a_reader_that_stops_for_a_minute_holds_one_window_and_the_session() -> None:
    window, budget = 128 * KIB, 64 * KIB
    pair = Pair(
        client=QuicSettings(send_buffer=budget, send_buffer_limit=budget),
        server=QuicSettings(receive_window=window, stream_receive_window=window),
    )
    server = pair.server.transport
    held = 0

    def hold(stream_id: int, data: bytes) -> None:
        nonlocal held
        held += len(data)
        server.withhold(len(data))

    pair.server.receiver.on_data = hold
    feed = Feed(pair.client, contents(8, 4, 200_000, 300_000), 2)
    feed.pump()
    pair.clock.run_for(60.0)
    assert held == pair.server.receiver.octets == window, "one window, and not an octet more"
    assert pair.server.quic._local_max_data.value == window, "what arrived gives no credit"
    assert feed.most_held <= budget
    assert pair.client.transport.unacknowledged() == 0
    assert pair.client.ending is None and pair.server.ending is None
    pair.server.receiver.on_data = lambda stream_id, data: None
    server.release(held)
    carried(pair, feed)


@pytest.mark.parametrize("seed", range(3))
def test_both_directions_under_every_fault_at_once(seed: int) -> None:
    rng = random.Random(seed)
    settings = QuicSettings(
        receive_window=40_000, stream_receive_window=20_000, uni_streams=4, send_buffer=50_000
    )
    pair = Pair(client=settings, server=settings, datagram_size=8952)
    for side in (pair.client, pair.server):
        side.drop = lambda data: rng.random() < 0.02
        side.delay = rng.uniform(0.001, 0.2)
        side.buffer, side.reads_every = 30_000, 0.003
    feeds = [
        Feed(pair.client, contents(seed, 30, 1, 30_000), 2),
        Feed(pair.server, contents(seed + 9, 30, 1, 30_000), 3),
    ]
    for feed in feeds:
        feed.pump()
    pair.clock.run_for(1.0)
    for side in (pair.client, pair.server):
        side.drop = lambda data: len(data) > 1300 or rng.random() < 0.02
    for feed in feeds:
        carried(pair, feed, 600.0)
        assert feed.most_held <= 50_000
        assert feed.most_open <= 4
