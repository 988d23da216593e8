"""Which packets of the model were lost, and how many may be under way (after RFC 9002)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from kvcs.testing.network.frames import PACKET_OCTETS, Frame, Hello

FIRST_RTT: Final = 0.1
"""Round trip that is assumed before one was measured, seconds."""

PACKET_THRESHOLD: Final = 3
"""A packet is lost when one sent so many later has arrived."""

MAX_RANGES: Final = 32
"""Ranges of packet numbers that an acknowledgement tells."""

MAX_BACKOFF: Final = 6
"""Doublings of the probe time-out."""

ACK_DELAY: Final = 0.025
"""What a peer may wait before it acknowledges, seconds."""


@dataclass(slots=True)
class Sent:
    """A packet under way."""

    at: float
    size: int
    frames: tuple[Frame, ...]


class Recovery:
    """Follows the packets of one direction: acknowledged, lost, or still under way."""

    def __init__(self) -> None:
        self.under_way: dict[int, Sent] = {}
        """Packets that are neither acknowledged nor lost, by number, ascending."""
        self.octets = 0
        """Their octets."""
        self.window = 10 * PACKET_OCTETS
        """Octets that may be under way."""
        self.lost_packets = 0
        self.rtt: float | None = None
        """Smoothed round trip, seconds."""
        self.smallest_rtt: float | None = None
        self._variation = FIRST_RTT / 2
        self._threshold = float("inf")
        self._reduced_at = 0.0
        self._largest = -1
        self._probes = 0

    def sent(self, number: int, at: float, size: int, frames: tuple[Frame, ...]) -> None:
        """A packet left that wants an acknowledgement."""
        self.under_way[number] = Sent(at, size, frames)
        self.octets += size

    def acknowledged(self, ranges: Iterable[tuple[int, int]], now: float) -> list[Frame]:
        """Take an acknowledgement; returns the frames that arrived."""
        arrived: list[Frame] = []
        for first, last in ranges:
            oldest = next(iter(self.under_way), last + 1)
            newest = next(reversed(self.under_way), -1)
            # What was acknowledged before is passed over: a range may begin with the first packet.
            for number in range(max(first, oldest), min(last, newest) + 1):
                if number not in self.under_way:
                    continue
                packet = self._take(number)
                arrived += packet.frames
                self._probes = 0
                if number > self._largest:
                    self._largest = number
                    self._measure(now - packet.at)
                grown = packet.size
                if self.window >= self._threshold:
                    grown = PACKET_OCTETS * packet.size // self.window
                self.window += grown
        return arrived

    def lost(self, now: float) -> list[Frame]:
        """Packets that must have been lost; returns their frames."""
        wait = self._loss_delay()
        late: list[int] = []
        for number, packet in self.under_way.items():
            if number > self._largest:
                break
            if number <= self._largest - PACKET_THRESHOLD or packet.at + wait <= now:
                late.append(number)
        return [frame for number in late for frame in self._lose(number, now)]

    def probe(self, now: float) -> list[Frame]:
        """Nothing was heard for long: what the oldest packet carried must go again.

        Before it goes what shakes hands: a peer can read nothing else without it.
        """
        self._probes = min(self._probes + 1, MAX_BACKOFF)
        hellos = [
            number
            for number, packet in self.under_way.items()
            if any(isinstance(frame, Hello) for frame in packet.frames)
        ]
        again = hellos or list(self.under_way)[:1]
        return [frame for number in again for frame in self._lose(number, now)]

    def next_timer(self) -> tuple[float, bool] | None:
        """When to look for losses next, or (True) when to probe; None with nothing under way."""
        if not self.under_way:
            return None
        oldest = next(iter(self.under_way))
        if oldest <= self._largest:
            return self.under_way[oldest].at + self._loss_delay(), False
        rtt = FIRST_RTT if self.rtt is None else self.rtt
        wait = rtt + max(4 * self._variation, 0.001) + ACK_DELAY
        latest = next(reversed(self.under_way.values())).at
        return latest + wait * 2**self._probes, True

    def _loss_delay(self) -> float:
        return 9 / 8 * (FIRST_RTT if self.rtt is None else self.rtt) + 0.001

    def _take(self, number: int) -> Sent:
        packet = self.under_way.pop(number)
        self.octets -= packet.size
        return packet

    def _lose(self, number: int, now: float) -> tuple[Frame, ...]:
        packet = self._take(number)
        self.lost_packets += 1
        if packet.at > self._reduced_at:  # once for each round trip
            self._reduced_at = now
            self.window = max(self.window // 2, 2 * PACKET_OCTETS)
            self._threshold = self.window
        return packet.frames

    def _measure(self, sample: float) -> None:
        self.smallest_rtt = min(sample, self.smallest_rtt or sample)
        if self.rtt is None:
            self.rtt, self._variation = sample, sample / 2
        else:
            self._variation = 0.75 * self._variation + 0.25 * abs(self.rtt - sample)
            self.rtt = 0.875 * self.rtt + 0.125 * sample


class Arrivals:
    """Packet numbers that arrived, as ranges."""

    def __init__(self) -> None:
        self._ranges: list[list[int]] = []

    def add(self, number: int) -> bool:
        """Note a packet; False where it came before."""
        for index, one in enumerate(self._ranges):
            first, last = one
            if first <= number <= last:
                return False
            if number == last + 1:
                one[1] = number
                return True
            if number == first - 1:
                one[0] = number
                if index + 1 < len(self._ranges) and self._ranges[index + 1][1] == number - 1:
                    one[0] = self._ranges.pop(index + 1)[0]
                return True
            if number > last:
                self._ranges.insert(index, [number, number])
                del self._ranges[MAX_RANGES:]
                return True
        if len(self._ranges) == MAX_RANGES:
            return False  # older than all that is remembered: surely a copy
        self._ranges.append([number, number])
        return True

    def ranges(self) -> tuple[tuple[int, int], ...]:
        """What arrived, latest first."""
        return tuple((first, last) for first, last in self._ranges)
