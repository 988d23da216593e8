"""Remembers every session that a backend opens, so that a test can look at all of them."""

from __future__ import annotations

from kvcs.quic.aioquic_backend import QuicSettings
from kvcs.quic.backend import Backend, Listener, Path
from kvcs.quic.connection import Connection
from kvcs.quic.transport import ReceiverFactory, Transport, TransportReceiver


class Recording:
    """A backend that notes the sessions of another one.

    Args:
        backend: what opens them.
        sessions: lists in which they are noted.
    """

    def __init__(self, backend: Backend, *sessions: list[Connection]) -> None:
        self._backend = backend
        self._sessions = sessions

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
        """See `Backend`."""
        return await self._backend.connect(
            host,
            port,
            receiver_factory=self._noting(receiver_factory),
            ca=ca,
            verify=verify,
            cert=cert,
            key=key,
            settings=settings,
        )

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
        """See `Backend`."""
        return await self._backend.listen(
            host,
            port,
            receiver_factory=self._noting(receiver_factory),
            cert=cert,
            key=key,
            client_ca=client_ca,
            settings=settings,
        )

    def _noting(self, factory: ReceiverFactory) -> ReceiverFactory:
        def make(transport: Transport) -> TransportReceiver:
            receiver = factory(transport)
            if isinstance(receiver, Connection):
                for sessions in self._sessions:
                    sessions.append(receiver)
            return receiver

        return make
