"""Finding publications of a prefix and choosing one (KVCS "Discovering Publications")."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvcs.errors import PublicationError, PublicationNotFound, Redirected, RequestError
from kvcs.kv import Prefix, PublicationNamespace
from kvcs.moqt.names import TrackNamespace
from kvcs.observe import get_logger
from kvcs.quic.connection import Connection
from kvcs.quic.namespaces import NamespaceWatch
from kvcs.subscriber.authenticity import Authenticity
from kvcs.subscriber.manifests import ManifestFollower
from kvcs.subscriber.settings import SubscriberSettings

_log = get_logger("kvcs.subscriber")

Follows = Callable[[Connection, TrackNamespace, Redirected], bool]
"""Whether a redirect of a namespace subscription is to be followed."""


@dataclass(frozen=True, slots=True)
class PublicationInfo:
    """A publication that a peer announces."""

    namespace: PublicationNamespace
    """Scope ID, Compatibility ID, Anchor Key and Publication ID."""

    peer: str
    """Who announces it."""


def publications(watch: NamespaceWatch, peer: str) -> list[PublicationInfo]:
    """The announced namespaces that are those of KVCS publications, in order of arrival."""
    found = []
    for namespace in sorted(watch.namespaces, key=watch.namespaces.__getitem__):
        try:
            found.append(PublicationInfo(PublicationNamespace.parse(namespace), peer))
        except PublicationError as exc:
            _log.debug("namespace_is_no_publication", reason=str(exc))
    return found


class Discovery:
    """Looks for publications of one prefix on several sessions and reads their manifests.

    Args:
        sessions: where to look.
        prefix: what is wanted; its own Anchor Key is asked for.
        settings: bounds and waits.
        authenticity: whose manifests count.
        follows: whether a redirect of a session, for a namespace prefix, is to be followed.
    """

    def __init__(
        self,
        sessions: Sequence[Connection],
        prefix: Prefix,
        settings: SubscriberSettings,
        authenticity: Authenticity,
        follows: Follows = lambda *_: False,
    ) -> None:
        self.redirected_by: Connection | None = None
        """The session whose redirect `choose` has raised."""
        self._follows = follows
        self._sessions = sessions
        self._prefix = prefix
        self._settings = settings
        self._authenticity = authenticity
        self._changed = asyncio.Event()
        self._followers: dict[tuple[Connection, TrackNamespace], ManifestFollower] = {}
        self._order: dict[tuple[Connection, TrackNamespace], int] = {}
        self._followed_at: dict[tuple[Connection, TrackNamespace], int] = {}
        """Number of the announcement with which each follower began."""
        self._answered_at: float | None = None
        self._settled_at: float | None = None

    async def choose(self, until: float, deadline: float) -> ManifestFollower:
        """Wait for a publication that can be used, and take the best one.

        The best is a complete one, then the one with most blocks, then the last announced, then
        the lowest Publication ID.

        Args:
            until: when to give up if nothing is announced, in the loop's clock; not before
                discovery has listened for its time after REQUEST_OK.
            deadline: when to give up in any case.

        Returns:
            Its follower, which has a manifest; the caller stops it.

        Raises:
            PublicationNotFound: none was there in time; `absent` tells "nothing was announced"
                from "unknown".
            ConnectionClosed: every session has ended.
            RequestError: every session refused to tell; `Redirected` as soon as one of them names
                another place, and `follows` wants it.
        """
        watches = {
            session: session.namespaces.watch(self._prefix.namespace_prefix())
            for session in self._sessions
        }
        chosen: ManifestFollower | None = None
        try:
            chosen = await self._choose(watches, until, deadline)
            return chosen
        finally:
            for session, watch in watches.items():
                session.namespaces.release(watch)
            for follower in self._followers.values():
                if follower is not chosen:
                    follower.stop()

    async def _choose(
        self, watches: dict[Connection, NamespaceWatch], until: float, deadline: float
    ) -> ManifestFollower:
        loop = asyncio.get_running_loop()
        for watch in watches.values():
            watch.changed = self._changed  # one event for all that may happen
        while True:
            self._changed.clear()
            self._follow_new(watches)
            now = loop.time()
            best, settled = self._best(watches, now)
            if best is not None:
                return best
            for session, watch in watches.items():
                error = watch.error
                if isinstance(error, Redirected) and self._follows(session, watch.prefix, error):
                    self.redirected_by = session
                    raise error
            errors = [watch.error for watch in watches.values() if watch.error is not None]
            if len(errors) == len(watches):
                raise errors[0]
            give_up = self._give_up_at(watches, until, deadline, now)
            if now >= give_up:
                raise self._not_found(watches)
            await self._wait_until(min(settled, give_up))

    def _give_up_at(
        self,
        watches: dict[Connection, NamespaceWatch],
        until: float,
        deadline: float,
        now: float,
    ) -> float:
        answered = all(watch.answered.is_set() for watch in watches.values())
        if self._answered_at is None and answered:
            self._answered_at = now
        reading = any(
            follower.error is None and not follower.ready
            for follower in self._announced(watches).values()
        )
        if reading or self._answered_at is None:
            return deadline
        return min(deadline, max(until, self._answered_at + self._settings.listen))

    async def _wait_until(self, when: float) -> None:
        try:
            async with asyncio.timeout_at(when):
                await self._changed.wait()
        except TimeoutError:
            pass

    def _follow_new(self, watches: dict[Connection, NamespaceWatch]) -> None:
        for session, watch in watches.items():
            for namespace, number in watch.namespaces.items():
                place = (session, namespace)
                self._order[place] = number
                live = sum(1 for each in self._followers.values() if each.error is None)
                if live >= self._settings.max_candidates:
                    continue
                known = self._followers.get(place)
                if known is not None and not (
                    # A publisher that was lost and came back has announced itself anew.
                    isinstance(known.error, RequestError) and number > self._followed_at[place]
                ):
                    continue
                try:
                    PublicationNamespace.parse(namespace)
                except PublicationError:
                    continue
                follower = ManifestFollower(
                    session,
                    namespace,
                    self._prefix,
                    self._settings,
                    self._changed.set,
                    authenticity=self._authenticity,
                )
                self._followers[place] = follower
                self._followed_at[place] = number
                follower.start()

    def _announced(
        self, watches: dict[Connection, NamespaceWatch]
    ) -> dict[tuple[Connection, TrackNamespace], ManifestFollower]:
        """Followers of what is announced still: who has withdrawn may be gone."""
        return {
            (session, namespace): follower
            for (session, namespace), follower in self._followers.items()
            if namespace in watches[session].namespaces
        }

    def _best(
        self, watches: dict[Connection, NamespaceWatch], now: float
    ) -> tuple[ManifestFollower | None, float]:
        """The publication to take now, or when to look again at the latest."""
        usable = {
            place: follower
            for place, follower in self._announced(watches).items()
            if follower.error is None
        }
        ready = [place for place, follower in usable.items() if follower.ready]
        if not ready:
            return None, float("inf")
        if self._settled_at is None:
            self._settled_at = now + self._settings.listen
        if len(ready) < len(usable) and now < self._settled_at:
            return None, self._settled_at

        def rank(place: tuple[Connection, TrackNamespace]) -> tuple[bool, int, int, bytes]:
            manifest = usable[place].manifest
            assert manifest is not None
            return (
                not manifest.complete,
                -usable[place].blocks,
                -self._order[place],
                place[1][-1],
            )

        return usable[min(ready, key=rank)], now

    def _not_found(self, watches: dict[Connection, NamespaceWatch]) -> PublicationNotFound:
        followers = self._announced(watches).values()
        failures = [each.error for each in followers if each.error is not None]
        if failures:
            error = PublicationNotFound(f"no usable publication of the prefix: {failures[-1]}")
            error.__cause__ = failures[-1]
            return error
        silent = [s.peer for s, watch in watches.items() if not watch.answered.is_set()]
        if silent:
            return PublicationNotFound(
                f"unknown whether the prefix is published: {silent[0]} has not answered yet"
            )
        if followers:
            return PublicationNotFound("a publication was announced, but its manifest never came")
        return PublicationNotFound(
            "no publication of the prefix is announced; it is found by equal scope key, descriptor"
            " and whole blocks of tokens, no more and no fewer",
            absent=True,
        )
