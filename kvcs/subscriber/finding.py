"""Finding a publication over sessions that come and go, and following its manifest."""

from __future__ import annotations

import asyncio
from asyncio import FIRST_COMPLETED
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from kvcs.errors import (
    ConnectionClosed,
    KvcsError,
    PublicationNotFound,
    Redirected,
    RequestError,
)
from kvcs.kv import Prefix, PublicationNamespace, parse_holder_uri
from kvcs.moqt.errors import RequestCode
from kvcs.observe import get_logger
from kvcs.quic.connection import Connection
from kvcs.subscriber.authenticity import Authenticity
from kvcs.subscriber.coverage import Holding
from kvcs.subscriber.discovery import Discovery, PublicationInfo, Search
from kvcs.subscriber.manifests import ManifestFollower
from kvcs.subscriber.routes import Routes
from kvcs.subscriber.settings import SubscriberSettings

_log = get_logger("kvcs.subscriber")


_Follow = Callable[[Connection], Coroutine[Any, Any, ManifestFollower]]
"""Follows a publication over a session until its manifest is there, or has failed."""


class Finder:
    """Looks for publications on the sessions of one Subscriber.

    Args:
        routes: the sessions.
        settings: bounds and waits.
        authenticity: whose signature counts, and whether one is needed.
    """

    def __init__(
        self, routes: Routes, settings: SubscriberSettings, authenticity: Authenticity
    ) -> None:
        self._routes = routes
        self._settings = settings
        self._authenticity = authenticity

    async def discover(self, search: Search, until: float, deadline: float) -> ManifestFollower:
        """Find the best publication of a prefix; see `Discovery.choose`.

        Sessions that are lost meanwhile are waited for, and those that come are asked too.
        """
        followed: dict[Connection, Connection] = {}
        hops = 0
        while True:
            sessions = await self.sessions(deadline)
            asked = tuple(dict.fromkeys(followed.get(each, each) for each in sessions))
            discovery = Discovery(
                asked, search, self._settings, self._authenticity, follows=may_follow_prefix
            )
            try:
                found = await self._while_same(sessions, discovery, until, deadline)
                if found is not None:
                    return found
            except (ConnectionClosed, RequestError) as exc:
                if isinstance(exc, Redirected):
                    hops += 1
                    await self._redirected(discovery, exc, sessions, followed, hops)
                elif not self._routes.replaced or not _is_passing(exc):
                    raise
                else:
                    await self._routes.changed_from(sessions, deadline)
                _log.info("discovery_begins_again", why=str(exc))

    async def _redirected(
        self,
        discovery: Discovery,
        redirect: Redirected,
        sessions: Sequence[Connection],
        followed: dict[Connection, Connection],
        hops: int,
    ) -> None:
        """Ask at another relay from now on, in place of the session that has redirected us.

        Raises:
            Redirected: that was once too often.
            KvcsError: the other relay cannot be reached.
        """
        session = discovery.redirected_by
        link = None if session is None else session.link
        if session is None or link is None or hops > link.policy.max_hops:
            raise redirect
        other = await link.elsewhere(redirect.uri)
        for each in sessions:
            if followed.get(each, each) is session:
                followed[each] = other

    async def _while_same(
        self, sessions: Sequence[Connection], discovery: Discovery, until: float, deadline: float
    ) -> ManifestFollower | None:
        """Discover for as long as no other session comes; None where one has."""
        choosing = asyncio.get_running_loop().create_task(discovery.choose(until, deadline))

        def look() -> None:
            usable = self._routes.usable
            if usable and usable != sessions and not choosing.done():
                choosing.cancel()

        self._routes.on_change(look)
        try:
            await asyncio.wait((choosing,))
        except asyncio.CancelledError:
            if not choosing.cancel() and choosing.exception() is None:
                choosing.result().stop()  # found in the same instant
            raise
        finally:
            self._routes.off_change(look)
        return None if choosing.cancelled() else choosing.result()

    async def named(
        self,
        prefix: Prefix | None,
        publication: str | PublicationNamespace | PublicationInfo | Holding,
        until: float,
        *,
        look: bool = False,
    ) -> ManifestFollower:
        """Follow one publication that the caller names, on the first session that shows it.

        Raises:
            PublicationNotFound: its manifest did not come in time.
            PublicationError: it cannot be used.
            RequestError: no session has it.
            ConnectionClosed: every session has ended.
        """
        holding = publication if isinstance(publication, Holding) else None
        namespace = namespace_of(publication)
        while True:
            sessions = await self.sessions(until)
            follow = partial(
                self._follow,
                prefix=prefix,
                namespace=namespace,
                until=until,
                look=look,
                holding=holding,
            )
            found = await self._first_of(sessions, follow)
            if isinstance(found, ManifestFollower):
                return found
            if not self._routes.replaced or not _is_passing(found):
                raise found
            await self._routes.changed_from(sessions, until)

    async def _first_of(
        self, sessions: Sequence[Connection], follow: _Follow
    ) -> ManifestFollower | KvcsError:
        """What the first session gives that has the publication, or why none does.

        The next one is asked where one has failed, and where it is silent for a while: a slow relay
        does not keep us from the others.
        """
        left = list(sessions)
        asked: list[asyncio.Task[ManifestFollower]] = []
        error: KvcsError = self._routes.error()
        try:
            while left or asked:
                if left:
                    asked.append(asyncio.get_running_loop().create_task(follow(left.pop(0))))
                patience = self._settings.quiet if left else None
                await asyncio.wait(asked, timeout=patience, return_when=FIRST_COMPLETED)
                for task in [each for each in asked if each.done()]:
                    asked.remove(task)
                    follower = task.result()
                    if follower.error is None:
                        return follower
                    error = follower.error
                    if not isinstance(error, ConnectionClosed | RequestError):
                        # It is there and cannot be used: another session would show the same.
                        return error
            return error
        finally:
            for task in asked:
                task.cancel()
            for each in await asyncio.gather(*asked, return_exceptions=True):
                if isinstance(each, ManifestFollower):
                    each.stop()  # found in the same instant

    async def sessions(self, until: float) -> list[Connection]:
        """Sessions to ask; waits for one if need be.

        Raises:
            ConnectionClosed: none comes any more, or none came in time.
        """
        try:
            async with asyncio.timeout_at(until):
                return await self._routes.wait()
        except TimeoutError:
            lost = self._routes.error()
            if not lost.by_peer:
                raise ConnectionClosed("the session was lost, and none followed in time") from None
            raise ConnectionClosed(
                f"{lost.reason or 'no reason given'}; no session followed in time",
                code=lost.code,
                by_peer=True,
            ) from None

    async def _follow(
        self,
        session: Connection,
        *,
        prefix: Prefix | None,
        namespace: PublicationNamespace,
        until: float,
        look: bool,
        holding: Holding | None,
    ) -> ManifestFollower:
        """Follow one publication on one session until its manifest is there or it has failed."""
        changed = asyncio.Event()
        follower = ManifestFollower(
            session,
            namespace.fields,
            prefix,
            self._settings,
            changed.set,
            authenticity=self._authenticity,
            look=look,
            holding=holding,
        )
        follower.start()
        try:
            async with asyncio.timeout_at(until):
                while not follower.ready and follower.error is None:
                    await changed.wait()
                    changed.clear()
        except TimeoutError:
            follower.stop()
            raise PublicationNotFound("the manifest of the publication never came") from None
        except BaseException:
            follower.stop()
            raise
        if follower.error is not None:
            follower.stop()
        return follower


def namespace_of(
    publication: str | PublicationNamespace | PublicationInfo | Holding,
) -> PublicationNamespace:
    """The publication that a caller names.

    Raises:
        UsageError: it is no holder URI.
    """
    if isinstance(publication, Holding):
        publication = publication.uri
    if isinstance(publication, str):
        _, publication = parse_holder_uri(publication)
    return publication.namespace if isinstance(publication, PublicationInfo) else publication


def _is_passing(error: KvcsError) -> bool:
    """Whether a session ends, or will soon, so that the next one has to be asked."""
    if isinstance(error, RequestError):
        return error.code == RequestCode.GOING_AWAY
    return isinstance(error, ConnectionClosed)


def may_follow_prefix(session: Connection, prefix: tuple[bytes, ...], redirect: Redirected) -> bool:
    """Whether a redirect of a namespace subscription keeps to what was asked."""
    return session.link is not None and bool(redirect.uri) and redirect.namespace == prefix
