"""Options that the commands on the network share, and what is made of them."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from math import nan
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from kvcs.cli import files
from kvcs.cli.output import Output
from kvcs.errors import ConnectionClosed, ConnectionFailed, FileError, UsageError
from kvcs.kv import Descriptor, Prefix, Scope
from kvcs.kvfile import KvFile, load_kv_file
from kvcs.quic.aioquic_backend import LARGEST_DATAGRAM, SMALLEST_DATAGRAM, QuicSettings
from kvcs.quic.connection import Connection
from kvcs.quic.endpoint import connect
from kvcs.quic.reconnect import Reconnect
from kvcs.quic.tokens import TokenSource, token_octets
from kvcs.subscriber.settings import MAX_ANCHORS

MAX_TOKEN_FILE_OCTETS = 1 << 27
"""Longest file of token ids that is read."""

MAX_TOKEN_OCTETS = 1 << 16
"""Longest authorization token file."""

TOKEN_VARIABLE = "KVCS_TOKEN"
"""Variable of the environment that may hold an authorization token."""

MAX_SECONDS = 1e9
"""Longest time that an option takes, some thirty years: infinity would not fit a message."""


def seconds(text: str) -> float:
    """Read a time; Typer's own bounds let "nan" pass.

    Raises:
        typer.BadParameter: it is no number, or negative, or endless.
    """
    try:
        value = float(text)
    except ValueError:
        value = nan
    if not 0 <= value <= MAX_SECONDS:
        raise typer.BadParameter(f"{text!r} is not a number of seconds")
    return value


AnyRelaysOption = Annotated[
    list[str] | None,
    typer.Option(
        "--relay",
        metavar="URL",
        help="Relay or publisher, moqt://HOST:PORT; where it is repeated, one that fails is"
        " replaced by another.",
    ),
]
RelayOption = Annotated[
    str, typer.Option("--relay", metavar="URL", help="Relay or publisher, moqt://HOST:PORT.")
]
ScopeKeyOption = Annotated[
    Path,
    typer.Option("--scope-key-file", metavar="FILE", help="Scope key; `kvcs keygen` makes one."),
]
CaOption = Annotated[
    Path | None, typer.Option("--ca", metavar="FILE", help="PEM file of the authorities to trust.")
]
TokenOption = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        metavar="FILE",
        help="Authorization token, base64url; read again before it expires. $KVCS_TOKEN may hold"
        " one instead.",
    ),
]
ClientCertOption = Annotated[
    Path | None,
    typer.Option(
        "--client-cert",
        metavar="FILE",
        help="Certificate chain to show to a peer that asks for one, PEM; needs --client-key.",
    ),
]
ClientKeyOption = Annotated[
    Path | None,
    typer.Option("--client-key", metavar="FILE", help="Private key of --client-cert, PEM."),
]
ClientCaOption = Annotated[
    Path | None,
    typer.Option(
        "--client-ca",
        metavar="FILE",
        help="PEM file of authorities: whoever connects needs a client certificate of one of them.",
    ),
]
IssuersOption = Annotated[
    Path | None,
    typer.Option(
        "--issuers",
        metavar="FILE",
        help="Key ring of the issuers whose tokens count; read again when it changes, or on"
        " SIGHUP.",
    ),
]
AudienceOption = Annotated[
    list[str] | None,
    typer.Option(
        "--audience",
        metavar="NAME",
        help="Name in tokens of who listens here; may be repeated. The host it listens on by"
        " default.",
    ),
]
KeysOption = Annotated[
    Path | None,
    typer.Option(
        "--keys-file", metavar="FILE", help="Producers' public keys, to verify signed manifests."
    ),
]
RequireSignedOption = Annotated[
    bool,
    typer.Option("--require-signed", help="Use nothing that none of --keys-file has signed."),
]
ProtectKeyOption = Annotated[
    Path | None,
    typer.Option(
        "--protect-key-file",
        metavar="FILE",
        help="The scope's protection keys: caches are sealed end to end, and no others are read.",
    ),
]
UntrustedRelaysOption = Annotated[
    bool,
    typer.Option(
        "--untrusted-relays",
        help="Relays may not read caches and are not believed: needs --protect-key-file.",
    ),
]
InsecureOption = Annotated[
    bool,
    typer.Option("--insecure-accept-any-certificate", help="Do not verify the peer. Tests only."),
]
DatagramSizeOption = Annotated[
    int | None,
    typer.Option(
        "--datagram-size",
        min=SMALLEST_DATAGRAM,
        max=LARGEST_DATAGRAM,
        metavar="OCTETS",
        help="UDP payload to send; what the path carries by default.",
    ),
]
LikeOption = Annotated[
    Path | None,
    typer.Option(
        "--like", metavar="FILE", help="KV cache file whose tokens and descriptor name the prefix."
    ),
]
TokensOption = Annotated[
    Path | None,
    typer.Option("--tokens", metavar="FILE", help="Token ids: a JSON array, or integers."),
]
DescriptorOption = Annotated[
    Path | None,
    typer.Option("--descriptor", metavar="FILE", help="Compatibility Descriptor, JSON."),
]
DeadlineOption = Annotated[
    float | None,
    typer.Option(
        "--deadline",
        parser=seconds,
        metavar="SECONDS",
        help="Time to the last layer; 30 or twice the recomputing estimate by default.",
    ),
]
ManifestDeadlineOption = Annotated[
    float | None,
    typer.Option(
        "--deadline", parser=seconds, metavar="SECONDS", help="Time to the manifest; 10 by default."
    ),
]
WaitOption = Annotated[
    float | None,
    typer.Option(
        "--wait",
        parser=seconds,
        metavar="SECONDS",
        help="How long to wait for a publication; up to the deadline.",
    ),
]
ProbeOption = Annotated[
    int | None,
    typer.Option(
        "--probe",
        min=0,
        max=MAX_ANCHORS,
        metavar="N",
        help="How many shorter prefixes to look for where the whole one is not there; 8 by default."
        " With 0 the relay does not learn where prompts part.",
    ),
]
AnchorsOption = Annotated[
    str | None,
    typer.Option(
        "--anchors",
        metavar="N,N",
        help="Lengths of these, in blocks; half the prefix, a quarter and so on by default.",
    ),
]
ReconnectOption = Annotated[
    float,
    typer.Option(
        "--reconnect",
        parser=seconds,
        metavar="SECONDS",
        help="How long a lost session is tried for again; 0 does not.",
    ),
]
RECONNECT_SECONDS = 60.0
"""How long a lost session is tried for again unless told otherwise."""

LinesOption = Annotated[
    bool,
    typer.Option("--lines", help="Print what happens, and the result, as one JSON object a line."),
]


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
    try:
        [token] = token_octets(text)
    except UsageError as exc:
        raise FileError(f"{path}: {exc}") from exc
    return token


def read_text(path: Path, limit: int, *, is_secret: bool = False) -> str:
    """Read a small text file.

    Args:
        path: the file.
        limit: most octets that it may have.
        is_secret: say so where others than its owner can read it.

    Raises:
        FileError: it cannot be read, is not ASCII or UTF-8, or longer than ``limit`` octets.
    """
    try:
        with path.open("rb") as file:
            if is_secret:
                files.note_open_secret(path, file, Output())
            data = file.read(limit + 1)
        if len(data) > limit:
            raise FileError(f"{path}: longer than {limit} octets")
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise FileError(f"{path}: not a text file") from None
    except OSError as exc:
        raise FileError(f"{path}: {exc.strerror or exc}") from exc


def read_prefix(
    output: Output,
    scope_key_file: Path,
    like: Path | None,
    tokens: Path | None,
    descriptor: Path | None,
) -> Prefix:
    """The prefix that ``--like``, or ``--tokens`` and ``--descriptor``, name.

    Raises:
        UsageError: not exactly one of the two ways was used, or a file holds something else.
    """
    scope = files.read_scope(scope_key_file, output)
    if like is not None and tokens is None and descriptor is None:
        return prefix_of(load_kv_file(like, partial=True), scope)
    if like is None and tokens is not None and descriptor is not None:
        try:
            return Prefix(scope, read_descriptor(descriptor), _read_tokens(tokens))
        except FileError:
            raise
        except UsageError as exc:
            raise FileError(f"{tokens}: {exc}") from exc
    raise UsageError("name the prefix with --like FILE, or with --tokens FILE --descriptor FILE")


def prefix_of(file: KvFile, scope: Scope) -> Prefix:
    """The prefix of a KV cache file's whole blocks.

    Raises:
        FileError: it has fewer tokens than one block.
    """
    try:
        return Prefix(scope, file.descriptor, file.token_ids)
    except UsageError as exc:
        raise FileError(f"{file.path}: {exc}") from exc


def read_descriptor(path: Path) -> Descriptor:
    """Read a Compatibility Descriptor.

    Raises:
        FileError: it cannot be read, or is not one.
    """
    try:
        return Descriptor.parse(read_text(path, 1 << 20).encode())
    except FileError:
        raise
    except UsageError as exc:
        raise FileError(f"{path}: {exc}") from exc


def _read_tokens(path: Path) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    words = re.sub(r"[\[\],]", " ", read_text(path, MAX_TOKEN_FILE_OCTETS)).split()
    try:
        return np.array([int(word) for word in words], dtype=np.int64)
    except (ValueError, OverflowError):
        raise FileError(f"{path}: not a list of integers") from None


def parse_anchors(text: str | None) -> tuple[int, ...] | None:
    """Read `--anchors`.

    Raises:
        UsageError: it is no list of numbers.
    """
    if text is None:
        return None
    parts = text.split(",")
    if not all(re.fullmatch(r" *[0-9]{1,10} *", part) for part in parts):
        raise UsageError(f"--anchors: expected numbers of blocks such as 64,128, got {text[:40]!r}")
    return tuple(map(int, parts))


def parse_range(text: str | None, what: str) -> tuple[int, int] | None:
    """A range like ``4-11`` or ``4``, both ends inclusive.

    Raises:
        UsageError: the text is no such range.
    """
    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", text)
    if match is None:
        raise UsageError(f"{what} {text!r} is not a range such as 4-11")
    first = int(match[1])
    last = first if match[2] is None else int(match[2])
    if last < first:
        raise UsageError(f"{what} {text!r} ends before it begins")
    return first, last


def parse_address(text: str, default_port: int) -> tuple[str, int]:
    """HOST:PORT, [HOST]:PORT or HOST.

    Raises:
        UsageError: the text is none of these.
    """
    match = re.fullmatch(r"(?:\[([^\]]+)\]|([^:\[\]]+))(?::(\d{1,5}))?", text)
    if match is None or int(match[3] or 0) > 65535:
        raise UsageError(f"{text!r} is not HOST:PORT")
    return match[1] or match[2], default_port if match[3] is None else int(match[3])
