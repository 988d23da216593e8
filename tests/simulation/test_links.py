"""Links and hosts: each kind of trouble does what it says, and repeats with its seed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvcs.errors import UsageError
from kvcs.testing.network import Conditions, Host, Network, run

PACKETS = 2000


class Ends:
    """Two hosts, and what arrives at the second."""

    def __init__(self, conditions: Conditions, seed: int = 1) -> None:
        self.network = Network(seed, conditions=conditions)
        self.a, self.b = self.network.host("a"), self.network.host("b")
        self.sender = self.a.open(0, lambda: None, self._refused)
        self.receiver = self.b.open(7, self._read)
        self.got: list[tuple[float, Any]] = []
        self.sources: list[tuple[str, int]] = []
        self.refused = 0

    def _read(self) -> None:
        while (item := self.receiver.read()) is not None:
            self.got.append((self.network.now, item[0]))
            self.sources.append(item[1])

    def _refused(self) -> None:
        self.refused += 1

    def send(self, packet: int, size: int = 1000, port: int = 7) -> None:
        self.sender.send(packet, size, (self.b.address, port))

    @property
    def numbers(self) -> list[int]:
        return [number for _, number in self.got]


def exchanged(conditions: Conditions, seed: int = 1, gap: float = 0.001) -> Ends:
    """What comes of sending some packets."""

    async def main() -> Ends:
        ends = Ends(conditions, seed)
        for number in range(PACKETS):
            ends.send(number)
            await asyncio.sleep(gap)
        await asyncio.sleep(60)
        return ends

    return run(main())


def test_a_good_link_delivers_all_in_order_after_its_delay() -> None:
    ends = exchanged(Conditions(delay=0.25))
    assert ends.numbers == list(range(PACKETS))
    assert ends.got[0][0] == pytest.approx(0.25)


def test_jitter_delays_and_keeps_the_order() -> None:
    ends = exchanged(Conditions(delay=0.1, jitter=0.05))
    assert ends.numbers == list(range(PACKETS))
    times = [when - 0.001 * number for when, number in ends.got]
    assert 0.1 < min(times) < 0.12 < 0.14 < max(times) <= 0.151


def test_loss_duplication_and_reordering_have_their_rates() -> None:
    ends = exchanged(Conditions(loss=0.1, duplicate=0.1, reorder=0.2))
    different = set(ends.numbers)
    assert 0.07 < 1 - len(different) / PACKETS < 0.13
    assert 0.07 < len(ends.numbers) / len(different) - 1 < 0.13
    assert ends.numbers != sorted(ends.numbers)


def test_the_same_seed_loses_the_same_packets() -> None:
    rough = Conditions(loss=0.3, reorder=0.2, jitter=0.01)
    assert exchanged(rough, seed=5).got == exchanged(rough, seed=5).got
    assert exchanged(rough, seed=5).got != exchanged(rough, seed=6).got


def test_a_rate_spreads_packets_and_a_full_queue_loses_them() -> None:
    # 1000 octets each millisecond into 500,000 octets a second: half of them find no room.
    ends = exchanged(Conditions(delay=0, rate=500e3, queue=10_000))
    gaps = [later[0] - now[0] for now, later in zip(ends.got, ends.got[1:], strict=False)]
    assert min(gaps) == pytest.approx(0.002)
    assert 0.45 < len(ends.got) / PACKETS < 0.55
    wide = exchanged(Conditions(delay=0, rate=500e3, queue=10**9))
    assert wide.numbers == list(range(PACKETS))


def test_what_is_larger_than_the_path_takes_is_lost_once_it_shrinks() -> None:
    async def main() -> list[int]:
        ends = Ends(Conditions())
        path = ends.network.path("a", "b")
        ends.send(1, size=1500)
        path.change(mtu=1200)
        ends.send(2, size=1500)
        ends.send(3, size=1200)
        await asyncio.sleep(1)
        assert path.there.lost == 1
        return ends.numbers

    assert run(main()) == [1, 3]


def test_a_blackout_loses_everything_for_its_time() -> None:
    async def main() -> list[int]:
        ends = Ends(Conditions())
        ends.network.path("a", "b").blackout(1.0)
        for number in range(4):
            ends.send(number)
            await asyncio.sleep(0.4)
        await asyncio.sleep(1)
        return ends.numbers

    assert run(main()) == [3]


def test_a_host_that_moves_is_seen_elsewhere_and_loses_what_is_on_its_way() -> None:
    async def main() -> None:
        ends = Ends(Conditions(delay=0.1))
        ends.send(1)
        await asyncio.sleep(0.2)
        before = ends.sources[0]
        ends.receiver.send("answer", 100, before)
        ends.a.move()
        ends.send(2)
        await asyncio.sleep(0.2)
        assert ends.sources[1] != before
        assert ends.sender.read() is None  # the answer went to the old address
        ends.receiver.send("answer", 100, ends.sources[1])
        await asyncio.sleep(0.2)
        assert ends.sender.read() == ("answer", (ends.b.address, 7))

    run(main())


def test_a_severed_port_is_dead_and_a_new_one_lives() -> None:
    async def main() -> list[int]:
        ends = Ends(Conditions())
        ends.a.sever()
        ends.send(1)
        ends.sender = ends.a.open(0, lambda: None)
        ends.send(2)
        await asyncio.sleep(1)
        return ends.numbers

    assert run(main()) == [2]


def test_a_busy_process_reads_later_and_a_full_buffer_loses() -> None:
    async def main() -> Ends:
        ends = Ends(Conditions(delay=0))
        ends.b.receive_buffer = 3500
        ends.b.stall(2.0)
        for number in range(5):
            ends.send(number)
            await asyncio.sleep(0.01)
        await asyncio.sleep(3)
        return ends

    ends = run(main())
    assert ends.numbers == [0, 1, 2]
    assert all(when == pytest.approx(2.0) for when, _ in ends.got)


def test_a_slow_reader_takes_its_rate() -> None:
    async def main() -> Ends:
        ends = Ends(Conditions(delay=0))
        ends.b.read_rate = 1000.0
        for number in range(4):
            ends.send(number)
        await asyncio.sleep(10)
        return ends

    assert [round(when) for when, _ in run(main()).got] == [0, 1, 2, 3]


def test_nobody_listens_is_told_and_no_such_address_is_not() -> None:
    async def main() -> int:
        ends = Ends(Conditions(delay=0.1))
        ends.send(1, port=8)
        ends.sender.send(2, 100, ("10.9.9.9", 7))
        await asyncio.sleep(1)
        return ends.refused

    assert run(main()) == 1


def test_a_port_is_taken_once_until_it_is_given_back() -> None:
    async def main() -> None:
        host: Host = Network().host("a")
        first = host.open(443, lambda: None)
        with pytest.raises(OSError, match="in use"):
            host.open(443, lambda: None)
        first.close()
        first.close()
        host.open(443, lambda: None)

    run(main())


@pytest.mark.parametrize(
    "numbers", [{"loss": 1.5}, {"delay": -1.0}, {"rate": 0.0}, {"mtu": 0}, {"reorder": -0.1}]
)
def test_impossible_conditions_are_refused(numbers: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(numbers))):
        Conditions(**numbers)
