"""`kvcs relay --status URL`: what a relay does now, as a table that follows it, or as JSON."""

from __future__ import annotations

import asyncio
import http.client
import json
import sys
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvcs.cli.output import Output, octets_text, shown
from kvcs.errors import ConnectionFailed, UsageError

INTERVAL = 1.0
"""Seconds between looks at the relay."""

WITHIN = 10.0
"""Seconds for one answer."""

MAX_STATUS_OCTETS = 16 * 2**20
"""Longest answer that is read."""

MAX_ROWS = 40
"""Peers that are shown, those with most waiting first."""

MAX_SCOPES = 10
"""Scopes that are shown, those of which most is open."""

TOTALS = (
    ("sessions", "sessions"),
    ("tracks", "tracks"),
    ("groups", "groups"),
    ("hits", "hits"),
    ("misses", "misses"),
    ("upstream fetches", "upstream_fetches"),
    ("objects out", "objects_out"),
    ("too far behind", "too_far_behind"),
    ("resets under pressure", "pressure_resets"),
)
"""Labels and members of the relay's counters that are shown as numbers."""


async def show(output: Output, url: str) -> None:
    """Show the relay's status: until interrupted on a terminal, once otherwise.

    Args:
        output: where to.
        url: of the relay's ``--admin``.

    Raises:
        ConnectionFailed: it does not answer.
        UsageError: the URL is no ``http://HOST:PORT``.
    """
    target = _target(url)
    status = await asyncio.to_thread(_read, target)
    if output.as_json:
        output.result(status, [])
    elif not sys.stdout.isatty():
        Console(width=100, soft_wrap=True).print(table(status))
    else:
        with Live(table(status), auto_refresh=False) as live:
            while True:
                await asyncio.sleep(INTERVAL)
                live.update(table(await asyncio.to_thread(_read, target)), refresh=True)


def table(status: dict[str, Any]) -> Group:
    """A relay's status for people.

    Args:
        status: the document of ``/status``.
    """
    stats, peers = status["stats"], status["peers"]
    totals = Table("relay", "ready" if status["ready"] else "not ready")
    for label, member in TOTALS:
        totals.add_row(label, str(stats.get(member, 0)))
    totals.add_row("cache", octets_text(stats["cache_octets"]))
    totals.add_row("queued", octets_text(stats["queued_octets"]))
    each = Table("session", "peer", "seconds", "requests", "serving", "queued", "owed", "rtt ms")
    first = sorted(peers, key=lambda peer: -peer["queued_octets"])[:MAX_ROWS]
    for peer in first:
        each.add_row(
            str(peer["session"]),
            Text(shown(peer["peer"])),
            f"{peer['seconds']:.0f}",
            str(peer["requests"]),
            str(peer["serving"]),
            octets_text(peer["queued_octets"]),
            octets_text(peer.get("lag_octets", 0)),
            "" if peer["rtt"] is None else f"{peer['rtt'] * 1000:.1f}",
        )
    left_out = len(peers) - len(first)
    more = [f"and {left_out} more"] if left_out else []
    upstreams = _upstreams(status.get("upstreams", []))
    return Group(totals, *upstreams, each, *more, *_scopes(status.get("scopes", [])))


def _upstreams(upstreams: list[dict[str, Any]]) -> list[Table]:
    """A table of the upstreams, the best one first; no table without any."""
    if not upstreams:
        return []
    rows = Table("upstream", "state", "preference", "sessions", "requests", "retries")
    for each in upstreams:
        numbers = (str(each[name]) for name in ("preference", "sessions", "requests", "retries"))
        rows.add_row(Text(shown(each["upstream"])), each["state"], *numbers)
    return [rows]


def _scopes(scopes: list[dict[str, Any]]) -> list[Table]:
    """A table of the scopes of which most is open; no table without any."""
    if not scopes:
        return []
    rows = Table("scope", "subscriptions", "fetches", "namespaces", "queued", "refused")
    for scope in scopes[:MAX_SCOPES]:
        rows.add_row(
            *(str(scope[each]) for each in ("scope", "subscriptions", "fetches", "namespaces")),
            octets_text(scope["queued_octets"]),
            str(scope["refused"]),
        )
    return [rows]


def _target(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/"):
        raise UsageError(f"{url!r} is not http://HOST:PORT, where `kvcs relay --admin` listens")
    return f"{parts.scheme}://{parts.netloc}/status"


def _read(target: str) -> dict[str, Any]:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(target, timeout=WITHIN) as answer:
            document = json.loads(answer.read(MAX_STATUS_OCTETS))
    except urllib.error.HTTPError as exc:
        raise ConnectionFailed(f"{target}: answered {exc.code}") from exc
    except urllib.error.URLError as exc:
        why = getattr(exc.reason, "strerror", None) or exc.reason
        raise ConnectionFailed(
            f"{target} cannot be read: {why}; the address is that of the relay's --admin"
        ) from exc
    except (OSError, http.client.HTTPException, ValueError) as exc:
        raise ConnectionFailed(f"{target}: no relay's status: {exc}") from exc
    if not isinstance(document, dict) or not {"ready", "stats", "peers"} <= set(document):
        raise ConnectionFailed(f"{target}: no relay's status")
    return document
