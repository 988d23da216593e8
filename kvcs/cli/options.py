"""Options that the commands on the network share; nothing here works with what they name."""

from __future__ import annotations

import re
from math import nan
from pathlib import Path
from typing import Annotated

import typer

from kvcs.errors import UsageError
from kvcs.quic.aioquic_backend import LARGEST_DATAGRAM, SMALLEST_DATAGRAM

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
    if text.isdecimal():  # else the number would be taken for an address, 0.0.17.81
        raise UsageError(f"{text!r} is not HOST:PORT, such as 127.0.0.1:{text}")
    return match[1] or match[2], default_port if match[3] is None else int(match[3])
