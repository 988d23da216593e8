"""`moqt://` URIs (MOQT §6.1)."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from kvcs.errors import SessionError, UsageError
from kvcs.moqt.properties import KeyValues, SetupOption, check_setup_options

DEFAULT_PORT = 443
"""Port where a `moqt` URI names none."""


@dataclass(frozen=True, slots=True)
class MoqtUri:
    """Where a session goes, and what its SETUP says."""

    host: str
    port: int
    path: str
    """path-abempty with `?query`: the PATH option."""

    authority: str
    """host[:port] as written: the AUTHORITY option."""

    fragment: str = ""
    """Local to the client, never sent."""

    def __str__(self) -> str:
        shown = f"moqt://{self.authority}{self.path}"
        return f"{shown}#{self.fragment}" if self.fragment else shown


def parse_uri(text: str) -> MoqtUri:
    """Read a `moqt` URI.

    The host is what is looked up and held against the certificate: without the brackets of an IPv6
    literal, and with escapes such as ``%25`` before a zone undone. PATH and AUTHORITY go out as
    they are written.

    Raises:
        UsageError: it is of another scheme, has no host or a port that is no number or 0, or holds
            what RFC 3986 does not allow there: a peer would close the session for it.
    """
    if not _is_plain(text):
        # urlsplit would leave some of them out without a word.
        raise UsageError(f"{text!r} is not a URI: it holds a blank or control character")
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as exc:
        raise UsageError(f"{text!r} is not a URI: {exc}") from None
    if parts.scheme != "moqt":
        raise UsageError(f"{text!r} is not a moqt:// URI, for example moqt://relay.example:4433")
    if not parts.hostname:
        raise UsageError(f"{text!r} names no host")
    if parts.username is not None or parts.password is not None:
        raise UsageError("a moqt:// URI holds no user or password; use a token")
    if port == 0:
        raise UsageError(f"{text!r} names port 0, where nobody can listen")
    host = unquote(parts.hostname)
    if not _is_plain(host):
        # A resolver may stop at a NUL, and a terminal obeys what is told of a peer's URI.
        raise UsageError(f"{text!r} is not a URI: its host holds a blank or control character")
    has_query = "?" in text.partition("#")[0]
    path = f"{parts.path}?{parts.query}" if has_query else parts.path
    said = KeyValues.of(
        {SetupOption.PATH: path.encode(), SetupOption.AUTHORITY: parts.netloc.encode()}
    )
    try:
        check_setup_options(said, from_client=True)
    except SessionError as exc:
        raise UsageError(f"{text!r} is not a URI: {exc.reason}") from None
    return MoqtUri(
        host,
        DEFAULT_PORT if port is None else port,
        path,
        parts.netloc,
        parts.fragment,
    )


def _is_plain(text: str) -> bool:
    return not any(character.isspace() or not character.isprintable() for character in text)
