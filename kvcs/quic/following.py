"""Following Tracks over sessions that come and go (MOQT §6.6.1, §9.2).

A subscription and a watch for Tracks belong to the session that they were made on, and end with it.
What is here makes them anew on the session that follows.

::

    async for item in follow(session, name):          # each Object once, over all sessions
        print(item.location, item.payload)

    async for offered in follow_tracks(session, (b"news",)):
        ...
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Final

from kvcs.errors import ConnectionClosed, Redirected, RequestError, StreamError
from kvcs.moqt.errors import PublishDoneCode
from kvcs.moqt.filters import LocationFilter
from kvcs.moqt.intervals import FIRST, LAST, LocationSet, following
from kvcs.moqt.names import FullTrackName, Location, TrackNamespace
from kvcs.moqt.parameters import Parameters, ParameterType
from kvcs.quic.chance import new_chance
from kvcs.quic.connection import Connection
from kvcs.quic.reconnect import retry_seconds
from kvcs.quic.subscription import MAX_WAITING_OCTETS, ReceivedObject, Subscription, subscribe
from kvcs.quic.tracks import OfferedTrack

MAX_SEEN_RANGES: Final = 65536
"""Disjoint ranges of Locations of one Track that are remembered as received."""

RENDEZVOUS_MS: Final = 5000
"""How long a relay is asked to wait for a publisher that was there a moment ago."""


async def follow(
    session: Connection,
    name: FullTrackName,
    *,
    fill: bool = True,
    max_octets: int = MAX_WAITING_OCTETS,
) -> AsyncIterator[ReceivedObject]:
    """Follow a Track over this session and those that follow it, each Object once.

    On a later session everything from the first Location on that did not come is asked for again,
    and what did come is dropped. A publisher that is not back yet is asked for again, for as long
    as `Reconnect.deadline` says; a session without a link is the only one.

    Args:
        session: what `connect` gives.
        name: the Track.
        fill: whether Objects are wanted that were published before the first subscription.
        max_octets: what may wait to be taken.

    Yields:
        Objects, in the order in which they become whole.

    Raises:
        RequestError: the first subscription was refused, or a later one for too long.
        StreamError: the publisher ended it before the Track, the Track is malformed, Objects wait
            faster than they are taken, or more than `MAX_SEEN_RANGES` ranges came with gaps.
        ConnectionClosed: the session ended, and none follows.

    Close the generator (`contextlib.aclosing`) where it is left half-way: that ends the request.
    """
    seen = LocationSet()
    start = FIRST if fill else None
    tries = _Tries(session)
    while True:
        connection = await _usable(session)
        try:
            async with AsyncExitStack() as stack:
                track = await stack.enter_async_context(
                    subscribe(
                        connection,
                        name,
                        parameters=_parameters(seen, start, again=tries.begun),
                        max_octets=max_octets,
                    )
                )
                if start is None:
                    start = _behind_largest(track)
                tries.succeeded()
                async for item in track:
                    if item.location in seen:
                        continue
                    seen.add(item.location, item.location)
                    if len(seen) > MAX_SEEN_RANGES:
                        raise StreamError(f"more than {MAX_SEEN_RANGES} ranges came with gaps")
                    yield item
                return
        except ConnectionClosed:
            if not session.lasts:
                raise
        except StreamError as exc:
            if exc.code != PublishDoneCode.GOING_AWAY or session.link is None:
                raise
            await tries.pause(exc)
        except RequestError as exc:
            await tries.pause(exc)


async def follow_tracks(
    session: Connection, prefix: TrackNamespace, parameters: Parameters | None = None
) -> AsyncIterator[OfferedTrack]:
    """Be offered the Tracks below a prefix, on this session and those that follow it.

    A later session's peer offers all of them again, each with a subscription of its own.

    Args:
        session: what `connect` gives.
        prefix: of their namespaces.
        parameters: as for `Tracks.watch`.

    Raises:
        UsageError: the prefix overlaps one that is watched on a session.
        RequestError: the peer refused the first request, or a later one for too long.
        ConnectionClosed: the session ended, and none follows.

    Close the generator (`contextlib.aclosing`) where it is left half-way: that ends the request.
    """
    tries = _Tries(session)
    while True:
        connection = await _usable(session)
        try:
            watch = connection.tracks.watch(prefix, parameters)
            try:
                await watch.answered.wait()
                if watch.error is not None:
                    raise watch.error
                tries.succeeded()
                async for offered in watch:
                    yield offered
            finally:
                watch.close()
        except ConnectionClosed:
            if not session.lasts:
                raise
        except RequestError as exc:
            await tries.pause(exc)


class _Tries:
    """When a request that was refused on a later session is made again."""

    def __init__(self, session: Connection) -> None:
        self.begun = False
        """Whether one was accepted before."""
        self._link = session.link
        self._refused = 0
        self._since = 0.0
        self._chance = new_chance()

    def succeeded(self) -> None:
        """The request was accepted."""
        self.begun, self._refused = True, 0

    async def pause(self, error: RequestError | StreamError) -> None:
        """Wait before the next try.

        Raises:
            RequestError, StreamError: there is none: the error itself.
        """
        now = asyncio.get_running_loop().time()
        if not self._refused:
            self._since = now
        if not self.begun or self._link is None or isinstance(error, Redirected):
            raise error
        policy = self._link.policy
        if policy.deadline is not None and now - self._since >= policy.deadline:
            raise error
        self._refused += 1
        seconds = policy.pause(self._refused, self._chance)
        if isinstance(error, RequestError) and error.retry_after_ms is not None:
            seconds = max(seconds, retry_seconds(error.retry_after_ms, self._chance))
        await asyncio.sleep(seconds)


async def _usable(session: Connection) -> Connection:
    """The session to make requests on; waits for it.

    Raises:
        ConnectionClosed: none comes any more.
    """
    if session.link is None:
        session.check_open()
        return session
    return await session.link.session()


def _parameters(seen: LocationSet, start: Location | None, *, again: bool) -> Parameters:
    """Next Object, and a fill from the first Location that did not come."""
    parameters = Parameters.of(location_filter=LocationFilter.next_object())
    missing = seen.first_outside(start, LAST) if start is not None else None
    if missing is not None:
        fill = Parameters.of(location_filter=LocationFilter.absolute_start(*missing[0]))
        parameters = parameters.replace(fill_parameters=fill)
    if again:
        parameters = parameters.replace(rendezvous_timeout=RENDEZVOUS_MS)
    return parameters


def _behind_largest(track: Subscription) -> Location | None:
    """Where the Objects begin that a subscription without a fill brings."""
    reply = track.reply
    largest = None if reply is None else reply.parameters.get(ParameterType.LARGEST_OBJECT)
    return FIRST if largest is None else following(largest)
