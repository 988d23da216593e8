"""A path between two processes that delays datagrams and drops some, by a seed."""

from __future__ import annotations

import asyncio
import random
import socket
from collections import deque
from typing import Any, Final

from kvcs.bench.parent import Parent

LOOPBACK: Final = "127.0.0.1"
BATCH: Final = 64
"""Datagrams that are read from one socket at a time."""

LARGEST: Final = 65_535
BUFFER_OCTETS: Final = 4 << 20
MAX_WAITING: Final = 1 << 16
"""Datagrams on their way in one direction; more are dropped, as a full queue would."""

Address = tuple[str, int]


class Direction:
    """One way of a link: what comes in goes out later, in order.

    Args:
        target: where to; it must be connected, or ``address`` be given.
        delay: seconds that each datagram takes.
        loss: part of the datagrams that are dropped.
        seed: decides which.
    """

    def __init__(self, target: socket.socket, delay: float, loss: float, seed: str) -> None:
        self.address: Address | None = None
        self.dropped = 0
        self._target = target
        self._delay = delay
        self._loss = loss
        self._random = random.Random(seed)
        self._waiting: deque[tuple[float, bytes]] = deque()
        self._loop = asyncio.get_running_loop()

    def push(self, data: bytes) -> None:
        """Take one datagram."""
        if self._random.random() < self._loss or len(self._waiting) >= MAX_WAITING:
            self.dropped += 1
            return
        due = self._loop.time() + self._delay
        self._waiting.append((due, data))
        if len(self._waiting) == 1:
            self._loop.call_at(due, self._release)

    def _release(self) -> None:
        now = self._loop.time()
        while self._waiting and self._waiting[0][0] <= now:
            self._send(self._waiting.popleft()[1])
        if self._waiting:
            self._loop.call_at(self._waiting[0][0], self._release)

    def _send(self, data: bytes) -> None:
        try:
            if self.address is None:
                self._target.send(data)
            else:
                self._target.sendto(data, self.address)
        except (BlockingIOError, ConnectionRefusedError):
            self.dropped += 1  # a full buffer, or a side that has ended already


def _socket() -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.setblocking(False)
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        made.setsockopt(socket.SOL_SOCKET, option, BUFFER_OCTETS)
    return made


async def link(parent: Parent, options: dict[str, Any]) -> None:
    """Stand between the one receiver, who speaks first, and the sender, until told to stop."""
    prefix, _, port = options["url"].rpartition(":")
    loop = asyncio.get_running_loop()
    with _socket() as near, _socket() as far:
        near.bind((LOOPBACK, 0))
        far.connect((LOOPBACK, int(port)))
        delay, loss, seed = options["rtt_ms"] / 2000, options["loss"], options["seed"]
        there = Direction(far, delay, loss, f"there {seed}")
        back = Direction(near, delay, loss, f"back {seed}")

        def from_near() -> None:
            for _ in range(BATCH):
                try:
                    data, back.address = near.recvfrom(LARGEST)
                except BlockingIOError:
                    return
                there.push(data)

        def from_far() -> None:
            for _ in range(BATCH):
                try:
                    data = far.recv(LARGEST)
                except (BlockingIOError, ConnectionRefusedError):
                    return
                back.push(data)

        loop.add_reader(near, from_near)
        loop.add_reader(far, from_far)
        try:
            port_text = f"{prefix}:" if prefix else ""
            parent.ready(f"{port_text}{near.getsockname()[1]}")
            await parent.word("stop")
        finally:
            loop.remove_reader(near)
            loop.remove_reader(far)
