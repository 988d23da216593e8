"""Servers in a thread of the test's process, for commands that run in its main thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kvcs.quic.endpoint import Server
from tests.certificates import PemFiles

READY_SECONDS = 90.0
"""Longest wait for a server to listen."""


@contextmanager
def server_in_thread(pem: PemFiles, *, offer: bool = True) -> Iterator[str]:
    """A MOQT server that publishes nothing; gives its URL.

    Args:
        pem: its certificate.
        offer: answer SUBSCRIBE_NAMESPACE, with nothing; otherwise it refuses that too.
    """
    started = threading.Event()
    urls: list[str] = []
    stop: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def serve() -> None:
        server = Server(offer=offer)
        await server.start("127.0.0.1", 0, cert=pem.cert, key=pem.key)
        urls.append(server.url)
        leave = asyncio.Event()
        stop.append((asyncio.get_running_loop(), leave))
        started.set()
        try:
            await leave.wait()
        finally:
            await server.close()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert started.wait(READY_SECONDS)
    try:
        yield urls[0]
    finally:
        loop, leave = stop[0]
        loop.call_soon_threadsafe(leave.set)
        thread.join()
