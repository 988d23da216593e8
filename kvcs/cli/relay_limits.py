"""``kvcs relay --limit NAME=VALUE``: every limit of a relay by its name."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import Annotated, Any, TypeVar

import typer

from kvcs.errors import UsageError
from kvcs.moqt.settings import SessionSettings
from kvcs.quic.aioquic_backend import QuicSettings
from kvcs.relay.settings import RelayLimits

_Number = TypeVar("_Number", int, float)
"""A count, or octets; or a rate or seconds."""

LimitOption = Annotated[
    list[str] | None,
    typer.Option(
        "--limit",
        metavar="NAME=VALUE",
        help="A limit of the relay, its sessions or its transport, as docs/limits.md names it, in"
        " octets or seconds: max_lag_seconds=20. May be repeated.",
    ),
]

SESSION = (
    "max_filter_ranges",
    "max_request_updates",
    "max_auth_token_cache_size",
    "max_peer_requests",
    "max_request_octets",
    "max_requests_per_second",
    "request_burst",
    "max_matches_per_second",
    "matches_burst",
    "request_wait",
    "max_tokens",
    "max_concurrent_fetches",
    "max_fills",
    "setup_wait",
    "max_namespaces",
    "max_namespace_octets",
)
"""Fields of `SessionSettings` that are limits."""

QUIC = (
    "idle_timeout",
    "connect_timeout",
    "uni_streams",
    "bidi_streams",
    "send_buffer",
    "send_buffer_limit",
    "receive_window",
    "stream_receive_window",
    "max_handshakes",
    "retry_handshakes",
    "stateless_resets",
)
"""The same of `QuicSettings`."""

RELAY = tuple(each.name for each in fields(RelayLimits) if each.name != "cache_octets")
"""The same of `RelayLimits`; the size of the cache has an option of its own."""

SESSIONS = "max_sessions"
"""The one of `RelaySettings`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the options say, in the form in which a relay takes it."""

    relay: RelayLimits
    session: SessionSettings
    quic: QuicSettings
    max_sessions: int


def read_limits(given: Iterable[str], before: Limits) -> Limits:
    """Apply ``NAME=VALUE`` settings.

    Args:
        given: the settings; of one that comes twice the last one counts.
        before: what holds without them.

    Raises:
        UsageError: a name is not known, or a value does not fit.
    """
    max_sessions = before.max_sessions
    values: dict[str, dict[str, Any]] = {"relay": {}, "session": {}, "quic": {}}
    owners = {
        **dict.fromkeys(RELAY, ("relay", before.relay)),
        **dict.fromkeys(SESSION, ("session", before.session)),
        **dict.fromkeys(QUIC, ("quic", before.quic)),
    }
    for setting in given:
        name, separator, text = setting.partition("=")
        name = name.strip().replace("-", "_")
        if not separator:
            raise UsageError(f"--limit {setting!r} is not NAME=VALUE")
        if name == SESSIONS:
            max_sessions = _number(name, text, before.max_sessions)
        elif name in owners:
            owner, now = owners[name]
            values[owner][name] = _number(name, text, getattr(now, name))
        else:
            near = get_close_matches(name, [*owners, SESSIONS], 3)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise UsageError(f"--limit: there is no limit {name!r}{hint}")
    return Limits(
        relay=replace(before.relay, **values["relay"]),
        session=replace(before.session, **values["session"]),
        quic=replace(before.quic, **values["quic"]),
        max_sessions=max_sessions,
    )


def _number(name: str, text: str, before: _Number) -> _Number:
    """A value of the kind that the limit has: whole where that is a count, and not negative."""
    try:
        value = type(before)(text)
    except ValueError:
        kind = "a whole number" if isinstance(before, int) else "a number"
        raise UsageError(f"--limit {name}: {text!r} is not {kind}") from None
    if not 0 <= value < float("inf"):
        raise UsageError(f"--limit {name} must be 0 or more, not {text}")
    return value
