"""What a path does to packets: delay, loss, order, rate, queue, size, and times without any."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Final

from kvcs.errors import UsageError
from kvcs.testing.network.trace import Trace

SMALLEST_GAP: Final = 1e-6
"""Seconds between two packets that arrive in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """What one direction of a path is like. Times are seconds, sizes octets.

    Raises:
        UsageError: a number cannot be.
    """

    delay: float = 0.005
    """One way."""

    jitter: float = 0.0
    """Longest further delay; it does not change the order."""

    loss: float = 0.0
    """Part of the packets that is lost, 0 to 1."""

    duplicate: float = 0.0
    """Part of the packets that arrives twice."""

    reorder: float = 0.0
    """Part of the packets that is held back, so that later ones overtake it."""

    reorder_by: float = 0.02
    """Longest time that one is held back."""

    rate: float | None = None
    """Octets a second; None is without a limit."""

    queue: int = 256 * 1024
    """Octets that wait for their turn at `rate`; what comes on top is lost."""

    mtu: int = 65_535
    """Largest packet, in octets of UDP payload; larger ones are lost without a word."""

    def __post_init__(self) -> None:
        for name in ("loss", "duplicate", "reorder"):
            if not 0 <= getattr(self, name) <= 1:
                raise UsageError(f"{name} must lie between 0 and 1, not {getattr(self, name)}")
        for name in ("delay", "jitter", "reorder_by", "queue"):
            if not getattr(self, name) >= 0:
                raise UsageError(f"{name} must not be negative, not {getattr(self, name)}")
        if self.rate is not None and not self.rate > 0:
            raise UsageError(f"rate must be more than 0 octets a second, not {self.rate}")
        if self.mtu < 1:
            raise UsageError(f"mtu must be at least 1, not {self.mtu}")


class Link:
    """One direction between two hosts.

    Args:
        name: what the trace calls it.
        conditions: what it is like until `change`.
        random: decides on each packet; one of its own, so that links do not disturb each other.
        trace: told of each packet's fate.
    """

    def __init__(self, name: str, conditions: Conditions, random: Random, trace: Trace) -> None:
        self.name = name
        self.conditions = conditions
        self.carried = 0
        """Packets that arrived or will."""
        self.lost = 0
        """Packets that did not."""
        self._random = random
        self._trace = trace
        self._free_at = 0.0
        self._last_arrival = 0.0
        self._dark_until = 0.0

    def change(self, **changes: Any) -> None:
        """Change conditions from now on: ``link.change(mtu=1200, loss=0.1)``."""
        self.conditions = replace(self.conditions, **changes)

    def blackout(self, seconds: float) -> None:
        """Lose everything that is sent in the next seconds."""
        self._dark_until = max(self._dark_until, asyncio.get_running_loop().time() + seconds)

    def carry(self, size: int, arrive: Callable[[], object]) -> None:
        """Take one packet of ``size`` octets; ``arrive`` is called once for each copy that comes
        through."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        fate, at = self._fate(size, now)
        self._trace.note(now, self.name, size, fate, round(at, 9))
        if fate != "carried":
            self.lost += 1
            return
        self.carried += 1
        loop.call_at(at, arrive)
        if self._happens(self.conditions.duplicate):
            loop.call_at(at + self._random.random() * self.conditions.reorder_by, arrive)

    def _happens(self, probability: float) -> bool:
        return probability > 0 and self._random.random() < probability

    def _fate(self, size: int, now: float) -> tuple[str, float]:
        """What becomes of a packet, and when it arrives."""
        conditions = self.conditions
        if now < self._dark_until:
            return "blackout", 0.0
        if size > conditions.mtu:
            return "too large", 0.0
        leaves = now
        if conditions.rate is not None:
            starts = max(now, self._free_at)
            if (starts - now) * conditions.rate + size > max(conditions.queue, size):
                return "queue full", 0.0
            leaves = self._free_at = starts + size / conditions.rate
        if self._happens(conditions.loss):
            return "lost", 0.0
        at = leaves + conditions.delay
        if conditions.jitter:
            at += self._random.random() * conditions.jitter
        if self._happens(conditions.reorder):
            return "carried", at + self._random.random() * conditions.reorder_by
        self._last_arrival = at = max(at, self._last_arrival + SMALLEST_GAP)
        return "carried", at
