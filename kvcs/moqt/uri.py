"""`moqt://` URIs (MOQT §6.1)."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from kvcs.errors import UsageError

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

    Raises:
        UsageError: it is of another scheme, or has no host, or its port is not a number.
    """
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
    path = f"{parts.path}?{parts.query}" if parts.query else parts.path
    return MoqtUri(
        parts.hostname,
        DEFAULT_PORT if port is None else port,
        path,
        parts.netloc,
        parts.fragment,
    )
