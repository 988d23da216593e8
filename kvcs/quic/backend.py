"""Which QUIC the endpoints open their connections with: a library, or a network in memory."""

from __future__ import annotations

import os
from contextvars import ContextVar
from typing import Protocol

from kvcs.quic.aioquic_backend import QuicSettings, connect_quic, listen_quic
from kvcs.quic.transport import ReceiverFactory, Transport

Path = str | os.PathLike[str]


class Listener(Protocol):
    """A server's port and its connections."""

    @property
    def host(self) -> str:
        """Address that it is bound to."""

    @property
    def port(self) -> int:
        """UDP port that it is bound to."""

    @property
    def clients_refused(self) -> int:
        """Clients whose certificate did not count, or that had none."""

    @property
    def resets_sent(self) -> int:
        """Packets of connections that are not known here, answered by a stateless reset."""

    @property
    def resets_left_out(self) -> int:
        """Such packets that got no answer, since there were too many."""

    async def close(self, code: int, reason: str) -> None:
        """Close every connection and give the port back; ends soon whatever the peers do."""


class Backend(Protocol):
    """What `connect` and `serve` need of a QUIC library."""

    async def connect(
        self,
        host: str,
        port: int,
        *,
        receiver_factory: ReceiverFactory,
        ca: Path | bytes | None,
        verify: bool,
        cert: Path | None = None,
        key: Path | None = None,
        settings: QuicSettings,
    ) -> Transport:
        """Complete a handshake; the receiver is made and told `connected` before this returns."""

    async def listen(
        self,
        host: str,
        port: int,
        *,
        receiver_factory: ReceiverFactory,
        cert: Path,
        key: Path,
        client_ca: Path | bytes | None = None,
        settings: QuicSettings,
    ) -> Listener:
        """Listen; each connection gets a receiver when its handshake is complete."""


class Aioquic:
    """The default: aioquic on sockets of the operating system."""

    connect = staticmethod(connect_quic)
    listen = staticmethod(listen_quic)


AIOQUIC: Backend = Aioquic()

current_backend: ContextVar[Backend] = ContextVar("kvcs_quic_backend", default=AIOQUIC)
"""The backend of the running task: a virtual network puts its own here."""
