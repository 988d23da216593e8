"""`Subscriber`: finds publications of a prefix on one or more sessions and opens one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvcs.errors import PublicationNotFound, UsageError
from kvcs.kv import Prefix, PublicationNamespace, parse_holder_uri
from kvcs.kv.tracks import APPLICATION
from kvcs.quic.connection import Connection
from kvcs.subscriber.cache import Cache, Retrieve
from kvcs.subscriber.discovery import Discovery, PublicationInfo, publications
from kvcs.subscriber.manifests import ManifestFollower
from kvcs.subscriber.settings import SubscriberSettings


class Subscriber:
    """Retrieves KV caches over one or more sessions.

    Args:
        session: what `kvcs.connect` gives.
        others: further sessions where publications are looked for.
        settings: limits and waits.
    """

    def __init__(
        self,
        session: Connection,
        *others: Connection,
        settings: SubscriberSettings | None = None,
    ) -> None:
        self.settings = SubscriberSettings() if settings is None else settings
        self._sessions = (session, *others)

    async def list(self, of: Prefix | bytes) -> list[PublicationInfo]:
        """Publications that are announced now.

        Args:
            of: a prefix, or a Scope ID of 16 octets for all publications of a scope.

        Raises:
            PublicationNotFound: no session has answered in time: unknown, not absent.
            RequestError: every session refused to tell.
            ConnectionClosed: every session has ended.
        """
        prefix = of.namespace_prefix() if isinstance(of, Prefix) else (APPLICATION, of)
        found: list[PublicationInfo] = []
        errors: list[Exception] = []
        for session in self._sessions:
            watch = session.namespaces.watch(prefix)
            try:
                async with asyncio.timeout(self.settings.least_deadline):
                    await watch.answered.wait()
                if watch.error is None:
                    await self._listen(session)
                    found += publications(watch, session.peer)
                else:
                    errors.append(watch.error)
            except TimeoutError:
                errors.append(PublicationNotFound(f"{session.peer} has not answered in time"))
            finally:
                session.namespaces.release(watch)
        if errors and len(errors) == len(self._sessions):
            raise errors[0]
        return found

    async def _listen(self, session: Connection) -> None:
        """Let the peer's announcements come in for the time that discovery listens."""
        closed = asyncio.Event()
        session.on_closed(closed.set)
        try:
            async with asyncio.timeout(self.settings.listen):
                await closed.wait()
        except TimeoutError:
            pass
        finally:
            session.off_closed(closed.set)

    @asynccontextmanager
    async def open(
        self,
        prefix: Prefix,
        *,
        deadline: float | None = None,
        wait: float | None = None,
        layers: tuple[int, int] | None = None,
        blocks: int | None = None,
        publication: str | PublicationNamespace | None = None,
        retrieve: Retrieve = "auto",
    ) -> AsyncIterator[Cache]:
        """Find a publication of ``prefix`` and retrieve it; leaving the context ends it.

        The manifest is read and held to the prefix before any data track is asked for.

        Args:
            prefix: the consumer's own tokens, descriptor and scope.
            deadline: seconds from now to the last layer; by default 30 or twice the estimate of
                recomputing, whichever is longer.
            wait: seconds to wait for a publication to appear; up to the deadline by default, 0
                takes only what is announced already.
            layers: first and last layer, inclusive; all by default.
            blocks: the first so many blocks; all of the prefix by default.
            publication: a holder URI or namespace: take this one, ask for no other.
            retrieve: "subscribe" follows a publication while it is produced and fills in what was
                published before, each Object exactly once; "fetch" asks for what is there; "auto"
                fetches a selection of complete segments and subscribes otherwise.

        Yields:
            The `Cache`.

        Raises:
            PublicationNotFound: there was none to use.
            PublicationError: the publication that was named cannot be used: its manifest does not
                fit the prefix, and the message says where.
            UsageError: the selection does not fit the prefix.
            ConnectionClosed: the session ended.
        """
        loop = asyncio.get_running_loop()
        opened_at = loop.time()
        tokens = prefix.blocks * prefix.descriptor.block_tokens
        seconds = self.settings.deadline(tokens) if deadline is None else deadline
        if not seconds > 0:
            raise UsageError(f"deadline must be more than 0 s, not {seconds}")
        deadline_at = opened_at + seconds
        wait_until = deadline_at if wait is None else min(deadline_at, opened_at + wait)
        if publication is None:
            discovery = Discovery(self._sessions, prefix, self.settings)
            follower = await discovery.choose(wait_until, deadline_at)
        else:
            follower = await self._named(prefix, publication, deadline_at)
        try:
            cache = Cache(
                follower,
                prefix,
                self.settings,
                layers=layers,
                blocks=blocks,
                retrieve=retrieve,
                opened_at=opened_at,
                deadline_at=deadline_at,
            )
        except BaseException:
            follower.stop()
            raise
        follower.notify = cache.follower_changed
        try:
            cache.start()
            yield cache
        finally:
            cache.close()

    async def _named(
        self, prefix: Prefix, publication: str | PublicationNamespace, until: float
    ) -> ManifestFollower:
        """Follow one publication that the caller names, on the first session."""
        if isinstance(publication, str):
            _, publication = parse_holder_uri(publication)
        changed = asyncio.Event()
        follower = ManifestFollower(
            self._sessions[0], publication.fields, prefix, self.settings, changed.set
        )
        follower.start()
        try:
            async with asyncio.timeout_at(until):
                while follower.manifest is None and follower.error is None:
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
            raise follower.error
        return follower
