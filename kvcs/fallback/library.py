"""aiohttp, imported when it is needed."""

from __future__ import annotations

import importlib
import ipaddress
import ssl
from pathlib import Path
from types import ModuleType

from kvcs.errors import FileError, UsageError

LOCAL_NAMES = frozenset({"localhost"})
"""Names of this machine."""


def aiohttp(part: str = "") -> ModuleType:
    """The library, or one of its modules.

    Raises:
        UsageError: it is not installed.
    """
    try:
        return importlib.import_module(f"aiohttp.{part}" if part else "aiohttp")
    except ImportError as exc:
        raise UsageError(
            "retrieval over HTTP needs aiohttp: pip install '.[http]' in kvcs's source folder"
        ) from exc


def is_local(host: str) -> bool:
    """Whether a host is this machine, where nobody listens in between."""
    if host in LOCAL_NAMES:
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def client_context(ca: str | Path | None) -> ssl.SSLContext:
    """TLS of a client, which verifies; against ``ca`` alone where it is given.

    Raises:
        FileError: the file holds no certificates.
    """
    try:
        return ssl.create_default_context(cafile=None if ca is None else str(ca))
    except (OSError, ssl.SSLError) as exc:
        raise FileError(f"{ca}: cannot be used as CA certificates: {exc}") from exc


def server_context(cert: str | Path, key: str | Path) -> ssl.SSLContext:
    """TLS of a server.

    Raises:
        FileError: certificate or key cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as exc:
        raise FileError(f"{cert}, {key}: cannot be used: {exc}") from exc
    return context
