"""A relay's sessions with its upstreams: kept open, and opened again, for as long as it runs."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from kvcs.errors import KvcsError
from kvcs.moqt.uri import MoqtUri, parse_uri
from kvcs.observe import get_logger
from kvcs.quic.aioquic_backend import QuicSettings
from kvcs.quic.chance import new_chance
from kvcs.quic.connection import Connection
from kvcs.quic.link import Link, Opener
from kvcs.quic.origin import Origin
from kvcs.quic.reconnect import Reconnect
from kvcs.relay.stats import UpstreamStats

_log = get_logger("kvcs.relay")

UPSTREAM_STREAMS = 4096
"""Data streams that an upstream may have open, if the settings allow no more: a publisher that ends
none of its own is to be a part of them, or what others publish would wait for it."""


class NoOrigin(Origin):
    """Offers nothing: requests that an upstream makes are answered by the relay's core."""

    def attach(self, connection: Connection) -> None:
        """Leave a session as it is."""


class Uplink:
    """The way to one upstream.

    Args:
        uri: the upstream's `moqt` URI.
        open_session: opens a session with it.
        policy: pauses between tries; its `deadline` and `initial` do not count here, since a relay
            never gives an upstream up.

    Raises:
        UsageError: it is no `moqt` URI.
    """

    def __init__(self, uri: str, open_session: Opener, policy: Reconnect) -> None:
        self.uri: MoqtUri = parse_uri(uri)
        self._open_session = open_session
        self._policy = replace(policy, deadline=None)
        self._chance = new_chance()
        self._link: Link | None = None
        self._failed = 0
        """Tries to open the first session that failed."""
        self._open: dict[Connection, None] = {}
        """Sessions that are open."""
        self._requests = 0
        """Requests that were made on sessions that are over."""
        self._task: asyncio.Task[None] | None = None

    @property
    def is_open(self) -> bool:
        """Whether there is a session now."""
        return self._link is not None and self._link.current.is_open

    def opened(self, connection: Connection) -> None:
        """A session with it is there: its requests count until it is over, and after."""
        self._open[connection] = None
        connection.on_closed(lambda: self._over(connection))

    def _over(self, connection: Connection) -> None:
        if connection in self._open:
            del self._open[connection]
            self._requests += connection.core.requests.made

    def stats(self, preference: int) -> UpstreamStats:
        """What an operator sees of it.

        Args:
            preference: how many others are asked before it.
        """
        link = self._link
        state = "opening"
        if link is not None and link.current.is_open:
            state = "open" if link.current.is_usable else "leaving"
        return UpstreamStats(
            preference=preference,
            upstream=self.uri.authority,
            state=state,
            sessions=0 if link is None else link.sessions,
            requests=self._requests + sum(each.core.requests.made for each in self._open),
            retries=self._failed + (0 if link is None else link.retries),
        )

    def start(self) -> None:
        """Open a session in the background, and keep one from then on."""
        self._task = asyncio.get_running_loop().create_task(self._begin())

    async def close(self) -> None:
        """Close the session; none comes back."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._link is not None:
            await self._link.close()

    async def _begin(self) -> None:
        """Open the first session; the link opens those that follow."""
        tries, told = 0, ""
        while True:
            link = Link(self._open_session, self.uri, self._policy)
            try:
                await link.start(0.0)
            except KvcsError as exc:
                await link.close()
                tries += 1
                self._failed = tries
                if str(exc) != told:  # once for each reason, however often it is tried
                    told = str(exc)
                    _log.warning("upstream_not_reached", uri=str(self.uri), why=told)
                await asyncio.sleep(self._policy.pause(tries, self._chance))
                continue
            self._link = link
            return


def upstream_quic(quic: QuicSettings) -> QuicSettings:
    """Settings of the transport of sessions with upstreams: data streams for many publishers."""
    return replace(quic, uni_streams=max(quic.uni_streams, UPSTREAM_STREAMS))
