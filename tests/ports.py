"""Ports of this machine for tests, whatever runs beside: a closed one, and a free one."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

HOST = "127.0.0.1"


@contextmanager
def closed_port() -> Iterator[int]:
    """A port of this machine that refuses whatever is sent to it, as one that nobody bound does.

    It is held all the while, so that no other process is given it: by a socket that is connected
    to itself, and so takes datagrams of nobody else.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as held:
        held.bind((HOST, 0))
        held.connect(held.getsockname())
        yield int(held.getsockname()[1])


def free_port() -> int:
    """A port that is free now, over UDP and TCP, and stays so.

    Not one that the system gives to sockets that ask for any: another test's would get it before
    the command that is told of it has started.
    """
    while True:
        port = random.randrange(20_000, 30_000)
        with (
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
            socket.socket(socket.AF_INET, socket.SOCK_STREAM) as tcp,
            suppress(OSError),
        ):
            udp.bind((HOST, port))
            tcp.bind((HOST, port))
            return port
