"""Opening a publication where no session leads to it (KVCS "Operational Considerations": Fallback).

What comes this way passes the same checks as what sessions bring, and is read in the same way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, cast

from kvcs.errors import (
    ConnectionClosed,
    KvcsError,
    PublicationError,
    PublicationNotFound,
    RequestError,
)
from kvcs.fallback.source import BlockSource, SourceFailed
from kvcs.kv import Prefix
from kvcs.kv.tracks import PublicationNamespace
from kvcs.observe import get_logger
from kvcs.quic.connection import Connection
from kvcs.subscriber.authenticity import Authenticity
from kvcs.subscriber.last_means import read_stored
from kvcs.subscriber.manifests import ManifestFollower
from kvcs.subscriber.requests import Choice, are_readable
from kvcs.subscriber.settings import SubscriberSettings

_log = get_logger("kvcs.subscriber")

MAX_MANIFESTS = 8
"""Manifests of one prefix that are read before one is chosen."""


class NoSession:
    """Stands where a retrieval has the session that it began over: it has ended already."""

    peer = "no session"
    link = None
    is_open = is_usable = lasts = False

    def __init__(self, why: str) -> None:
        self._why = why

    def close_error(self) -> ConnectionClosed:
        """Why there is none."""
        return ConnectionClosed(self._why)

    def hold(self, owner: object) -> None:
        """Nothing is held open."""

    def release(self, owner: object) -> None:
        """Nothing was."""

    def cancel(self, request_id: int) -> None:
        """Nothing was asked."""

    def on_goaway(self, callback: Callable[[], None]) -> None:
        """It never says anything."""

    def off_goaway(self, callback: Callable[[], None]) -> None:
        """Undo `on_goaway`."""


class Elsewhere:
    """Finds publications of a prefix in a `BlockSource`.

    Args:
        source: where.
        settings: bounds.
        authenticity: whose manifests count.
    """

    def __init__(
        self, source: BlockSource, settings: SubscriberSettings, authenticity: Authenticity
    ) -> None:
        self._source = source
        self._settings = settings
        self._authenticity = authenticity

    async def instead(
        self,
        over_sessions: Coroutine[Any, Any, ManifestFollower] | None,
        prefix: Prefix,
        blocks: tuple[int, ...],
        named: PublicationNamespace | None,
        patience: float,
        deadline: float,
        choice: Choice,
    ) -> ManifestFollower:
        """What sessions give; or what the source has, where they give nothing in time.

        Args:
            over_sessions: the search on sessions; None where there are none.
            prefix: the consumer's prefix.
            blocks: lengths of the prefixes to look for, the whole one first.
            named: the one publication that is wanted; None for the best.
            patience: seconds that sessions have before the source is asked, too.
            deadline: when the source is waited for no longer, in the loop's clock.
            choice: encodings that are taken.

        Raises:
            KvcsError: what the search on sessions raised, or `PublicationNotFound`.
        """
        loop = asyncio.get_running_loop()
        searching = None if over_sessions is None else loop.create_task(over_sessions)
        finding: asyncio.Task[ManifestFollower] | None = None
        try:
            if searching is not None:
                await asyncio.wait((searching,), timeout=patience)
                if _decides(searching):
                    return searching.result()
            finding = loop.create_task(self._find(prefix, blocks, named, deadline, choice))
            while not finding.done():
                both = [task for task in (searching, finding) if task and not task.done()]
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
                if searching is not None and _decides(searching):
                    return searching.result()
            try:
                return finding.result()
            except KvcsError as exc:
                if searching is None:
                    raise
                _log.info("not_found_elsewhere", why=str(exc))
            return await searching
        finally:
            both = [task for task in (searching, finding) if task is not None]
            undecided = [task for task in both if not task.done()]
            # Both before either is waited for: whoever waits may be cancelled, too.
            for task in both:
                task.cancel()
            await asyncio.wait(both)
            for task in both:
                # Asked for in any case: an error of the one that nobody waits for is no news.
                if not task.cancelled() and task.exception() is None and task in undecided:
                    task.result().stop()

    async def _find(
        self,
        prefix: Prefix,
        blocks: tuple[int, ...],
        named: PublicationNamespace | None,
        deadline: float,
        choice: Choice,
    ) -> ManifestFollower:
        """The best publication there: one whose encoding may be taken, then a complete one, then
        the one with most blocks.

        Raises:
            KvcsError: there is none that can be used.
        """
        best: ManifestFollower | None = None
        error: KvcsError = PublicationNotFound(
            "no publication of the prefix is known where the fallback leads", absent=True
        )
        try:
            async with asyncio.timeout_at(deadline), self._source as source:
                for length in blocks:
                    anchor = prefix.namespace_prefix(length)[-1]
                    where = (prefix.scope_id, prefix.compat_id, anchor)
                    listed = [named] if named else await source.publications(*where)
                    for namespace in listed[:MAX_MANIFESTS]:
                        follower = await self._read(source, prefix, namespace)
                        if follower.error is not None:
                            error = follower.error
                        elif follower.ready and (
                            best is None or _rank(follower, choice) > _rank(best, choice)
                        ):
                            best = follower
                    if best is not None or named is not None:
                        break
        except (SourceFailed, TimeoutError) as exc:
            why = str(exc) or "the fallback has not answered in time"
            error = PublicationNotFound(f"unknown whether the prefix is published: {why}")
            error.__cause__ = exc
        if best is None:
            raise error
        return best

    async def _read(
        self, source: BlockSource, prefix: Prefix, namespace: PublicationNamespace
    ) -> ManifestFollower:
        follower = ManifestFollower(
            cast(Connection, NoSession("no session leads to the publication")),
            namespace.fields,
            prefix,
            self._settings,
            lambda: None,
            authenticity=self._authenticity,
        )
        try:
            longest = self._settings.manifest_limits.octets
            await read_stored(follower, await source.manifest(namespace, longest))
        except SourceFailed as exc:
            follower.error = PublicationNotFound(
                f"the manifest of the publication never came: {exc}"
            )
            follower.error.__cause__ = exc
        except PublicationError as exc:
            follower.error = follower.error or exc
        follower.ended = True
        return follower


def _decides(searching: asyncio.Task[ManifestFollower]) -> bool:
    """Whether a search has ended, and not only because no session knows or lasts."""
    if not searching.done() or searching.cancelled():
        return searching.done()
    passing = ConnectionClosed | PublicationNotFound | RequestError
    return not isinstance(searching.exception(), passing)


def _rank(follower: ManifestFollower, choice: Choice) -> tuple[bool, bool, int]:
    manifest = follower.manifest
    assert manifest is not None  # it is ready
    readable = are_readable(follower.covering(manifest), choice)
    return readable, manifest.complete, follower.blocks
