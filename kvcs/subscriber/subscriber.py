"""`Subscriber`: finds publications of a prefix on one or more sessions and opens one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import get_args

from kvcs.errors import (
    PublicationNotFound,
    UsageError,
)
from kvcs.kv import Ledger, Manifest, Prefix, PublicationNamespace
from kvcs.kv.tracks import APPLICATION, SCOPE_ID_OCTETS
from kvcs.moqt.names import TrackNamespace
from kvcs.quic.connection import Connection
from kvcs.subscriber.authenticity import Authenticity
from kvcs.subscriber.cache import Cache, Retrieve
from kvcs.subscriber.discovery import PublicationInfo, publications
from kvcs.subscriber.finding import Finder
from kvcs.subscriber.manifests import ManifestFollower
from kvcs.subscriber.report import ManifestFacts
from kvcs.subscriber.routes import Routes
from kvcs.subscriber.settings import SubscriberSettings
from kvcs.trust import KeyRing


class Subscriber:
    """Retrieves KV caches over one or more sessions.

    A retrieval whose session is lost or sent away goes on over another one from the first Object
    that is not there: over the session that follows it (`kvcs.connect`), or one of the others.

    Args:
        session: what `kvcs.connect` gives.
        others: further sessions where publications are looked for.
        settings: limits and waits.
        keys: public keys of the producers. A publication that is signed is then verified: every
            version of its manifest, and every object against the signed list before it is used.
        require_signed: use nothing that is not signed by one of them (KVCS "Security
            Considerations").

    Raises:
        UsageError: ``require_signed`` without keys, or keys that are not for manifests.
    """

    def __init__(
        self,
        session: Connection,
        *others: Connection,
        settings: SubscriberSettings | None = None,
        keys: KeyRing | None = None,
        require_signed: bool = False,
    ) -> None:
        self.settings = SubscriberSettings() if settings is None else settings
        self._authenticity = Authenticity(keys, required=require_signed)
        self._routes = Routes((session, *others))
        self._finder = Finder(self._routes, self.settings, self._authenticity)

    @property
    def refused(self) -> dict[str, int]:
        """Publications refused because no signature showed their producer, by failed check."""
        return dict(self._authenticity.refused)

    async def list(self, of: Prefix | bytes) -> list[PublicationInfo]:
        """Publications that are announced now.

        Args:
            of: a prefix, or a Scope ID of 16 octets for all publications of a scope.

        Raises:
            UsageError: ``of`` is neither.
            PublicationNotFound: no session has answered in time: unknown, not absent.
            RequestError: every session refused to tell.
            ConnectionClosed: every session has ended.
        """
        if not isinstance(of, Prefix) and len(of) != SCOPE_ID_OCTETS:
            raise UsageError(f"a Scope ID has {SCOPE_ID_OCTETS} octets, not {len(of)}")
        prefix = of.namespace_prefix() if isinstance(of, Prefix) else (APPLICATION, bytes(of))
        until = asyncio.get_running_loop().time() + self.settings.least_deadline
        sessions = await self._finder.sessions(until)
        results = await asyncio.gather(*(self._list(each, prefix) for each in sessions))
        errors = [result for result in results if isinstance(result, Exception)]
        if len(errors) == len(results):
            raise errors[0]
        answers = [result for result in results if not isinstance(result, Exception)]
        return [info for answer in answers for info in answer]

    async def _list(
        self, session: Connection, prefix: TrackNamespace
    ) -> Sequence[PublicationInfo] | Exception:
        """What one session announces, or why it does not tell."""
        watch = session.namespaces.watch(prefix)
        try:
            async with asyncio.timeout(self.settings.least_deadline):
                await watch.answered.wait()
            if watch.error is None:
                await self._listen(session)
            if watch.error is not None:
                return watch.error
            return publications(watch, session.peer)
        except TimeoutError:
            return PublicationNotFound(
                f"unknown what is published: {session.peer} has not answered in time"
            )
        finally:
            session.namespaces.release(watch)

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
        publication: str | PublicationNamespace | PublicationInfo | None = None,
        retrieve: Retrieve = "auto",
    ) -> AsyncIterator[Cache]:
        """Find a publication of ``prefix`` and retrieve it; leaving the context ends it.

        The manifest is read and held to the prefix before any data track is asked for.

        Args:
            prefix: the consumer's own tokens, descriptor and scope. A publication is found when its
                first segment has just these blocks; one that has more or fewer has another name.
            deadline: seconds from now to the last layer; by default 30 or twice the estimate of
                recomputing, whichever is longer.
            wait: seconds to wait for a publication to appear; up to the deadline by default, 0
                takes only what is announced already.
            layers: first and last layer, inclusive; all by default.
            blocks: the first so many blocks; all of the prefix by default.
            publication: a holder URI, a namespace, or what `list` gave: take this one, ask for no
                other. It is asked for on the Subscriber's sessions, whatever host a URI names.
            retrieve: "subscribe" follows a publication while it is produced and fills in what was
                published before, each Object exactly once; "fetch" asks for what is there; "auto"
                fetches a selection of complete segments and subscribes otherwise.

        Yields:
            The `Cache`.

        Raises:
            PublicationNotFound: there was none to use.
            PublicationError: the publication that was named cannot be used: its manifest does not
                fit the prefix, and the message says where.
            UsageError: the selection does not fit the prefix, or an argument is out of bounds.
            RequestError: every session refused, or none has the publication that was named.
            ConnectionClosed: the session ended.

        Cancelling ends every request of it; nothing is left behind.
        """
        loop = asyncio.get_running_loop()
        opened_at = loop.time()
        ledger = self._ledger(prefix, layers, blocks)
        if retrieve not in get_args(Retrieve):
            known = ", ".join(get_args(Retrieve))
            raise UsageError(f"retrieve must be one of {known}, not {retrieve!r}")
        tokens = prefix.blocks * prefix.descriptor.block_tokens
        seconds = self.settings.deadline(tokens) if deadline is None else deadline
        if not seconds > 0:
            raise UsageError(f"deadline must be more than 0 s, not {seconds}")
        if wait is not None and not wait >= 0:
            raise UsageError(f"wait must not be negative, not {wait}")
        deadline_at = opened_at + seconds
        wait_until = deadline_at if wait is None else min(deadline_at, opened_at + wait)
        if publication is None:
            follower = await self._finder.discover(prefix, wait_until, deadline_at)
        else:
            follower = await self._finder.named(prefix, publication, deadline_at)
        ledger.signed = follower.signed is not None
        cache = Cache(
            follower,
            self._routes,
            prefix,
            ledger,
            self.settings,
            retrieve=retrieve,
            opened_at=opened_at,
            deadline_at=deadline_at,
        )
        try:
            cache.start()
            yield cache
        finally:
            cache.close()

    async def manifest(
        self,
        publication: str | PublicationNamespace | PublicationInfo,
        prefix: Prefix | None = None,
        *,
        deadline: float | None = None,
    ) -> Manifest:
        """Read the newest manifest of one publication that has segments, and nothing else of it.

        Args:
            publication: a holder URI, a namespace, or what `list` gave. It is asked for on the
                Subscriber's sessions, whatever host a URI names.
            prefix: hold the manifest to this prefix, as `open` does. Without one nothing is
                checked but the manifest's own form: use it to look, not to decide.
            deadline: seconds to wait; 30 by default.

        Raises:
            PublicationNotFound: it did not come in time.
            PublicationError: it is malformed, was aborted, or does not fit the prefix; or, as
                `NotAuthentic`, its signature does not count, or it has none and needs one.
            RequestError: no session has the publication.
            ConnectionClosed: the session ended.
            UsageError: an argument is out of bounds.
        """
        follower = await self._manifest(publication, prefix, deadline, look=False)
        assert follower.manifest is not None  # it is ready
        return follower.manifest

    async def look_at(
        self,
        publication: str | PublicationNamespace | PublicationInfo,
        prefix: Prefix | None = None,
        *,
        deadline: float | None = None,
    ) -> ManifestFacts:
        """Read a manifest as `manifest` does, and say how it is signed.

        A signature that does not count is told here instead of refused: look, do not decide.

        Args:
            publication: as in `manifest`.
            prefix: as in `manifest`.
            deadline: as in `manifest`.

        Raises:
            KvcsError: as `manifest`; of signatures only that it is no signed manifest at all.
        """
        follower = await self._manifest(publication, prefix, deadline, look=True)
        assert follower.manifest is not None  # it is ready
        signed = follower.signed
        return ManifestFacts(
            follower.manifest,
            None if signed is None else signed.kid,
            None if signed is None else signed.key,
            follower.doubt,
        )

    async def _manifest(
        self,
        publication: str | PublicationNamespace | PublicationInfo,
        prefix: Prefix | None,
        deadline: float | None,
        *,
        look: bool,
    ) -> ManifestFollower:
        """Follow one publication until its manifest is there, and no longer."""
        seconds = self.settings.least_deadline if deadline is None else deadline
        if not seconds > 0:
            raise UsageError(f"deadline must be more than 0 s, not {seconds}")
        until = asyncio.get_running_loop().time() + seconds
        follower = await self._finder.named(prefix, publication, until, look=look)
        follower.stop()
        return follower

    def _ledger(self, prefix: Prefix, layers: tuple[int, int] | None, blocks: int | None) -> Ledger:
        """What is selected; refused here, before anything is asked for."""
        if blocks is not None and blocks > prefix.blocks:
            raise UsageError(f"blocks must be at most the prefix's {prefix.blocks}, not {blocks}")
        return Ledger(
            prefix.descriptor,
            blocks=prefix.blocks if blocks is None else blocks,
            layers=layers,
            max_data_octets=self.settings.max_data_octets,
        )
