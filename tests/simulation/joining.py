"""A subscriber of one Track by MOQT alone: Next Object, and a fill from the start."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field

import kvcs
from kvcs.moqt import FullTrackName, Location, ObjectStatus
from kvcs.quic import subscribe


@dataclass
class Joined:
    """What one subscription brought."""

    counts: Counter[Location] = field(default_factory=Counter)
    """How often each Object with a payload came whole."""

    cut_short: bool = False
    """Whether a stream was reset, or a range was marked unknown."""

    failure: str | None = None
    """Why the subscription ended otherwise than with its Track."""


async def join(session: kvcs.Connection, name: FullTrackName, seconds: float) -> Joined:
    """Subscribe to a Track and take all of it, for at most so many seconds.

    Raises:
        RequestError: it was refused.
        TimeoutError: the time is up.
    """
    joined = Joined()
    async with asyncio.timeout(seconds), subscribe(session, name, fill=True) as track:
        try:
            async for item in track:
                if item.header.status is ObjectStatus.NORMAL:
                    joined.counts[item.location] += 1
        except (kvcs.StreamError, kvcs.ConnectionClosed) as exc:
            joined.failure = f"{type(exc).__name__}: {exc}"
        joined.cut_short = track.lost > 0
    return joined
