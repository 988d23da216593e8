"""Announcing namespaces on sessions that come and go (MOQT §4, §9.4, §9.14)."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING

from kvcs.errors import KvcsError, Redirected, RequestError
from kvcs.moqt import events
from kvcs.moqt.names import TrackNamespace
from kvcs.observe import get_logger
from kvcs.quic.chance import new_chance
from kvcs.quic.reconnect import Moves, retry_seconds

if TYPE_CHECKING:
    from kvcs.quic.connection import Connection
    from kvcs.quic.origin import Origin

_log = get_logger("kvcs.quic")

MAX_ANNOUNCE_TRIES = 8
"""Times that one namespace is announced on a session that asks for a retry, or sends elsewhere."""


class Announcements:
    """The PUBLISH_NAMESPACEs of one session.

    Args:
        origin: what they announce; a redirect makes it known on another session.
        connection: the session.
    """

    def __init__(self, origin: Origin, connection: Connection) -> None:
        self._origin = origin
        self._connection = connection
        self._chance = new_chance()
        self._requests: dict[TrackNamespace, int] = {}
        self._tasks: dict[asyncio.Task[None], TrackNamespace] = {}
        self._moves: dict[TrackNamespace, Moves] = {}

    def __contains__(self, namespace: TrackNamespace) -> bool:
        """Whether a namespace is announced here, or about to be."""
        return namespace in self._requests

    @property
    def namespaces(self) -> tuple[TrackNamespace, ...]:
        """Namespaces that are announced here, or about to be."""
        return tuple(self._requests)

    async def announce(self, namespace: TrackNamespace, hops: int = 0) -> None:
        """Announce a namespace and wait for the answer; a retry or redirect is followed.

        Args:
            namespace: what to announce.
            hops: redirects that led here.

        Raises:
            RequestError: it was refused; `Redirected` where that cannot be followed.
            ConnectionClosed: the session ended.

        Cancelling withdraws it.
        """
        tries = 0
        while True:
            tries += 1
            request_id = self._request(namespace)
            try:
                await self._connection.reply(request_id)
                return
            except BaseException as exc:
                if self._requests.get(namespace) == request_id:
                    del self._requests[namespace]
                if not isinstance(exc, RequestError) or tries >= MAX_ANNOUNCE_TRIES:
                    raise
                if isinstance(exc, Redirected):
                    await self._follow(namespace, exc, hops)
                    return
                if exc.retry_after_ms is None:
                    raise
                await self._connection.pause(retry_seconds(exc.retry_after_ms, self._chance))

    def offer(self, namespace: TrackNamespace) -> None:
        """Announce a namespace without waiting, if the peer may hear of it.

        A refusal is only logged.
        """
        if not self._connection.may_hear(namespace):
            return
        self._spawn(namespace, self._offer(namespace))

    def withdraw(self, namespace: TrackNamespace, code: int | None = None) -> None:
        """Withdraw a namespace; quiet where it is not announced (§6.4.2.3).

        Args:
            namespace: what to withdraw.
            code: that of the `RequestError` which who waits for the answer gets.
        """
        for task, what in self._tasks.items():
            if what == namespace:
                task.cancel()
        self._moves.pop(namespace, None)
        request_id = self._requests.pop(namespace, None)
        if request_id is not None:
            self._connection.cancel(request_id, code)

    async def answered(self) -> None:
        """Wait until everything that was offered has its answer."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def stop(self) -> list[asyncio.Task[None]]:
        """End what is under way; returns the tasks, which end soon."""
        for task in self._tasks:
            task.cancel()
        return list(self._tasks)

    # Inner workings

    def _request(self, namespace: TrackNamespace) -> int:
        self._connection.check_open()
        request_id = self._connection.core.requester.publish_namespace(namespace)
        self._requests[namespace] = request_id
        self._connection.handle(request_id, lambda event: self._take(namespace, event))
        return request_id

    def _take(self, namespace: TrackNamespace, event: events.Event) -> None:
        if isinstance(event, events.GoawayReceived):
            assert event.request_id is not None  # it concerns this request
            self._spawn(namespace, self._move(namespace, event.request_id, event.new_session_uri))
        elif isinstance(event, events.RequestCancelled):
            _log.warning("namespace_revoked", peer=self._connection.peer, code=event.code)

    async def _offer(self, namespace: TrackNamespace) -> None:
        try:
            await self.announce(namespace)
        except RequestError as exc:
            _log.info("namespace_refused", peer=self._connection.peer, code=exc.code)
        except KvcsError as exc:
            _log.debug("namespace_not_announced", peer=self._connection.peer, why=str(exc))

    async def _follow(self, namespace: TrackNamespace, redirect: Redirected, hops: int) -> None:
        """Announce where a redirect says; the namespace has to stay the same.

        Raises:
            RequestError: the redirect itself where it cannot be followed, or the other's refusal.
        """
        link = self._connection.link
        if link is None or not redirect.uri or redirect.namespace != namespace:
            raise redirect
        if hops >= link.policy.max_hops:
            raise redirect
        try:
            other = await link.elsewhere(redirect.uri)
        except KvcsError as exc:
            raise redirect from exc
        await self._origin.announce_on(other, namespace, hops + 1)

    async def _move(self, namespace: TrackNamespace, request_id: int, uri: str) -> None:
        """The peer wants the announcement made elsewhere, or anew: there first, then not here."""
        moves = self._moves.setdefault(namespace, Moves())
        await asyncio.sleep(moves.pause(asyncio.get_running_loop().time(), self._chance))
        try:
            if uri:
                link = self._connection.link
                if link is None:
                    return
                other = await link.elsewhere(uri)
                await self._origin.announce_on(other, namespace)
                if self._requests.get(namespace) == request_id:
                    del self._requests[namespace]
            else:
                await self.announce(namespace)
        except KvcsError as exc:
            _log.warning("announcement_not_moved", peer=self._connection.peer, why=str(exc))
            return
        self._connection.cancel(request_id)

    def _spawn(self, namespace: TrackNamespace, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = namespace
        task.add_done_callback(lambda done: self._tasks.pop(done, None))
