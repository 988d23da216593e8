"""Sessions of a command: with whom, and the tokens that it shows there."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from kvcs.cli.config import TOKEN_VARIABLE
from kvcs.cli.files import read_text
from kvcs.cli.options import RECONNECT_SECONDS
from kvcs.cli.output import Output
from kvcs.errors import ConnectionClosed, ConnectionFailed, FileError, UsageError
from kvcs.filekinds import is_scope_key
from kvcs.quic.aioquic_backend import QuicSettings
from kvcs.quic.connection import Connection
from kvcs.quic.endpoint import connect
from kvcs.quic.reconnect import Reconnect
from kvcs.quic.tokens import TokenSource, token_octets

MAX_TOKEN_OCTETS = 1 << 16
"""Longest authorization token file."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Whom a command connects to, and how."""

    url: str
    ca: Path | None
    token_file: Path | None
    insecure: bool
    within: float | None = None
    """Seconds in which the user wants all to be over; connecting takes no longer."""
    datagram_size: int | None = None
    """Octets of UDP payload to send; None finds what the path carries."""
    reconnect: float = RECONNECT_SECONDS
    """Seconds for which a lost session is tried for again; 0 does not."""
    untrusted: bool = False
    """Whether the relays that it leads to are not trusted."""
    client_cert: Path | None = None
    """Certificate chain that is shown where the peer asks for one."""
    client_key: Path | None = None
    """The key to it."""

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Connection]:
        """Open the session; see `kvcs.connect`.

        Raises:
            UsageError: the URL names more than an endpoint, beside what `kvcs.connect` raises.
        """
        if "#" in self.url:
            raise UsageError(
                f"{self.url!r} names more than an endpoint: leave out what begins with #;"
                " --publication takes a whole holder URI"
            )
        token = token_source(self.token_file)
        quic = QuicSettings(datagram_size=self.datagram_size)
        if self.within:
            quic = replace(quic, connect_timeout=min(self.within, quic.connect_timeout))
        async with connect(
            self.url,
            ca=self.ca,
            token=token,
            verify=not self.insecure,
            client_cert=self.client_cert,
            client_key=self.client_key,
            quic=quic,
            reconnect=Reconnect(deadline=self.reconnect) if self.reconnect else None,
            relays="untrusted" if self.untrusted else "trusted",
        ) as connection:
            yield connection


@asynccontextmanager
async def connect_all(
    peers: Sequence[Peer], *, can_do_without: bool = False
) -> AsyncIterator[list[Connection]]:
    """Open a session with each peer; those that cannot be reached are left out if any can.

    Args:
        peers: where.
        can_do_without: whether it is no failure if none can be reached.

    Raises:
        ConnectionFailed: none can be reached; as for `Peer.connect` with a single one.
    """
    async with AsyncExitStack() as stack:
        opened = await asyncio.gather(
            *(stack.enter_async_context(peer.connect()) for peer in peers), return_exceptions=True
        )
        sessions = [each for each in opened if not isinstance(each, BaseException)]
        failures = [each for each in opened if isinstance(each, BaseException)]
        for failure in failures:
            needed = not (sessions or can_do_without)
            if needed or not isinstance(failure, ConnectionFailed | ConnectionClosed):
                raise failure
            Output().note(f"left out: {failure}")
        yield sessions


def token_source(path: Path | None) -> TokenSource | None:
    """What gives the token of a file, read again whenever a fresh one is needed.

    Without a file it is that of the environment, if there is one: neither shows in the list of
    processes.

    Raises:
        FileError: as `read_token`.
    """
    if path is None:
        return os.environ.get(TOKEN_VARIABLE) or None
    read_token(path)  # what is wrong with it is told now, and once
    return lambda: read_token(path, is_known=True)


def read_token(path: Path, *, is_known: bool = False) -> bytes:
    """Read an authorization token, and say so where others can read it too.

    Args:
        path: the file.
        is_known: say nothing of that: it was said before.

    Raises:
        FileError: the file cannot be read, or is no token; its content is not repeated.
    """
    text = read_text(path, MAX_TOKEN_OCTETS, is_secret=not is_known)
    # It would pass for base64url, and a secret would be shown to the relay.
    if is_scope_key(text.encode()):
        raise FileError(f"{path}: no token; this is a scope key, which --scope-key-file takes")
    try:
        [token] = token_octets(text)
    except UsageError as exc:
        raise FileError(f"{path}: {exc}") from exc
    return token
