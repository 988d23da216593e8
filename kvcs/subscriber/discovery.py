"""Finding publications of a prefix and choosing one (KVCS "Discovering Publications")."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from kvcs.errors import KvcsError, PublicationError, PublicationNotFound, Redirected
from kvcs.kv import Prefix, PublicationNamespace, parse_holder_uri
from kvcs.moqt.names import TrackNamespace
from kvcs.observe import get_logger
from kvcs.observe.logs import described
from kvcs.quic.connection import Connection
from kvcs.quic.namespaces import NamespaceWatch
from kvcs.subscriber.authenticity import Authenticity
from kvcs.subscriber.candidates import Candidates, Place
from kvcs.subscriber.coverage import Holding, Index
from kvcs.subscriber.manifests import ManifestFollower
from kvcs.subscriber.requests import DEFAULT_CHOICE, Choice, are_readable
from kvcs.subscriber.settings import MAX_ANCHORS, SubscriberSettings

_log = get_logger("kvcs.subscriber")

Follows = Callable[[Connection, TrackNamespace, Redirected], bool]
"""Whether a redirect of a namespace subscription is to be followed."""

MAX_NAMED = 64
"""Publications that are taken from one answer of an index."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """What is looked for."""

    prefix: Prefix
    """The consumer's own; its Anchor Key is asked for first."""

    anchors: tuple[int, ...] = ()
    """Blocks of the shorter prefixes that are asked for where nothing has all, longest first."""

    index: Index | None = None
    """Asked for publications beside the peers."""

    least: int = 1
    """Fewest blocks that are of use."""

    choice: Choice = DEFAULT_CHOICE
    """Encodings that are taken; a publication that has none of them comes last."""


def halved(blocks: int, count: int, least: int = 1) -> tuple[int, ...]:
    """The lengths of shorter prefixes to try where nobody says better: half, a quarter, ...

    Args:
        blocks: length of the whole prefix.
        count: how many, `MAX_ANCHORS` at most.
        least: none is shorter.
    """
    found: list[int] = []
    while len(found) < min(count, MAX_ANCHORS) and (blocks := blocks // 2) >= max(1, least):
        found.append(blocks)
    return tuple(found)


class Discovery:
    """Looks for publications of one prefix on several sessions and reads their manifests.

    The whole prefix is asked for first. Where nothing usable is heard in the time that discovery
    listens, shorter ones are, some at a time; the whole prefix is listened for all the while.

    Args:
        sessions: where to look.
        search: what is wanted.
        settings: bounds and waits.
        authenticity: whose manifests count.
        follows: whether a redirect of a session, for a namespace prefix, is to be followed.
    """

    def __init__(
        self,
        sessions: Sequence[Connection],
        search: Search,
        settings: SubscriberSettings,
        authenticity: Authenticity,
        follows: Follows = lambda *_: False,
    ) -> None:
        self.redirected_by: Connection | None = None
        """The session whose redirect `choose` has raised."""
        self._follows = follows
        self._sessions = sessions
        self._search = search
        self._prefix = search.prefix
        self._settings = settings
        self._authenticity = authenticity
        self._changed = asyncio.Event()
        self._candidates: Candidates[ManifestFollower] = Candidates(
            self._follow,
            settings.max_candidates,
            settings.quiet,
            self._prefix.blocks,
            search.least,
            self._suits,
            lambda each: authenticity.rank(each.namespace, each.signed is not None),
        )
        self._watches: list[tuple[Connection, NamespaceWatch]] = []
        """Those of the whole prefix first."""
        self._left = list(search.anchors)
        """Shorter prefixes that were not asked for yet."""
        self._asked_at = 0.0
        self._answered_at: float | None = None
        """When every peer had answered for all that was asked so far."""
        self._settled_at: float | None = None
        self._lookup: asyncio.Task[None] | None = None
        self._index_error: Exception | None = None

    async def choose(self, until: float, deadline: float) -> ManifestFollower:
        """Wait for a publication that can be used, and take the best one.

        The best is one whose encoding may be taken, then one that has let no retrieval down, then
        one whose signature was verified, then a complete one, then the one with most blocks, then
        the last announced, then the lowest Publication ID.

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
        chosen: ManifestFollower | None = None
        try:
            self._ask((self._prefix.blocks,))
            if self._search.index is not None:
                lookup = self._look_up(self._search.index)
                self._lookup = asyncio.get_running_loop().create_task(lookup)
            chosen = await self._choose(until, deadline)
            return chosen
        finally:
            if self._lookup is not None:
                self._lookup.cancel()
            for session, watch in self._watches:
                watch.on_note = None
                session.namespaces.release(watch)
            self._candidates.others_than(chosen)

    async def _choose(self, until: float, deadline: float) -> ManifestFollower:
        loop = asyncio.get_running_loop()
        while True:
            self._changed.clear()
            now = loop.time()
            self._candidates.advance(now)
            heard_at = self._heard_at(now)
            best, look_at = self._best(now, shorter=now >= heard_at)
            if best is not None:
                return best
            self._check_errors()
            if self._left and now >= heard_at:
                # Manifests that never come do not keep us from looking further.
                if not self._candidates.reading or now >= heard_at + self._settings.quiet:
                    self._ask_shorter()
                    continue
                heard_at += self._settings.quiet
            give_up = self._give_up_at(until, deadline)
            if now >= give_up:
                raise self._not_found()
            times = [look_at, give_up, self._candidates.next_retry]
            if heard_at > now:
                times.append(heard_at)
            await self._wait_until(min(times))

    # Asking

    def _ask(self, anchors: Iterable[int]) -> None:
        """Watch prefixes of so many blocks on every session."""
        self._asked_at = asyncio.get_running_loop().time()
        self._answered_at = None
        for blocks in anchors:
            for session in self._sessions:
                watch = session.namespaces.watch(self._prefix.namespace_prefix(blocks))
                self._watches.append((session, watch))
                watch.changed = self._changed  # one event for all that may happen
                noted = partial(self._noted, session)
                for namespace in sorted(watch.namespaces, key=watch.namespaces.__getitem__):
                    noted(namespace, watch.namespaces[namespace])
                watch.on_note = noted

    def _ask_shorter(self) -> None:
        count = self._settings.probes_at_once
        stage, self._left = self._left[:count], self._left[count:]
        _log.info("shorter_prefixes_asked_for", blocks=stage)
        self._ask(stage)

    def _noted(self, session: Connection, namespace: TrackNamespace, number: int | None) -> None:
        if number is None:
            self._candidates.withdrawn((session, namespace))
        else:
            self._candidates.announced((session, namespace))

    async def _look_up(self, index: Index) -> None:
        """Ask the index; what it names becomes a candidate. Its failure is no answer."""
        try:
            async with asyncio.timeout(self._settings.index_timeout):
                found = list(await index.find(self._prefix))
            self._take(found)
        except Exception as exc:
            # Whatever an index of the caller's does, peers are asked all the same.
            _log.warning("index_failed", reason=described(exc))
            self._index_error = exc
        finally:
            self._changed.set()

    def _take(self, found: Iterable[Holding | str]) -> None:
        """Make what an index names candidates. What cannot be one says nothing about the others,
        and nothing about the prefix either."""
        taken = unusable = 0
        for item in found:
            if taken == MAX_NAMED:
                break
            try:
                self._named(item)
                taken += 1
            except Exception as exc:
                unusable += 1
                self._index_error = exc
        if self._index_error is not None:
            reason = described(self._index_error)
            _log.warning("index_items_unusable", items=unusable, reason=reason)

    def _named(self, item: Holding | str) -> None:
        """Make one publication that an index names a candidate on every session.

        Raises:
            UsageError: it is no holder URI; whatever else an item raises that is none of ours.
        """
        holding = item if isinstance(item, Holding) else None
        _, named = parse_holder_uri(item if isinstance(item, str) else item.uri)
        if named[:2] != (self._prefix.scope_id, self._prefix.compat_id):
            _log.warning("index_names_another_cache")
            return
        for session in self._sessions:
            self._candidates.named((session, named.fields), holding)

    def _follow(self, place: Place, holding: Holding | None) -> ManifestFollower:
        session, namespace = place
        return ManifestFollower(
            session,
            namespace,
            self._prefix,
            self._settings,
            self._changed.set,
            authenticity=self._authenticity,
            holding=holding,
        )

    # Deciding

    def _suits(self, follower: ManifestFollower) -> bool:
        manifest = follower.manifest
        if manifest is None:
            return False
        return are_readable(follower.covering(manifest), self._search.choice)

    def _heard_at(self, now: float) -> float:
        """When all that was asked for so far has been listened to; a peer that is silent for long
        is not waited for."""
        answered = all(watch.answered.is_set() for _, watch in self._watches)
        if self._lookup is not None and not self._lookup.done():
            answered = False
        if self._answered_at is None and answered:
            self._answered_at = now
        if self._answered_at is None:
            return self._asked_at + max(self._settings.quiet, self._settings.listen)
        return self._answered_at + self._settings.listen

    def _give_up_at(self, until: float, deadline: float) -> float:
        if self._candidates.reading or self._answered_at is None or self._left:
            return deadline
        return min(deadline, max(until, self._answered_at + self._settings.listen))

    async def _wait_until(self, when: float) -> None:
        try:
            async with asyncio.timeout_at(when):
                await self._changed.wait()
        except TimeoutError:
            pass

    def _best(self, now: float, *, shorter: bool) -> tuple[ManifestFollower | None, float]:
        """The publication to take now, or when to look again at the latest."""
        ready = self._candidates.ready(shorter)
        if not ready:
            return None, float("inf")
        if self._settled_at is None:
            self._settled_at = now + self._settings.listen
        if self._candidates.reading and now < self._settled_at:
            return None, self._settled_at
        return self._candidates.best(ready), now

    def _check_errors(self) -> None:
        """Raise what ends the look-up: a redirect to follow, or that nobody tells."""
        for session, watch in self._watches:
            error = watch.error
            if isinstance(error, Redirected) and self._follows(session, watch.prefix, error):
                self.redirected_by = session
                raise error
        # Who does not tell of the whole prefix does not tell of a shorter one.
        errors = [watch.error for _, watch in self._watches[: len(self._sessions)]]
        refused = [error for error in errors if error is not None]
        looking = self._lookup is not None and not self._lookup.done()
        if len(refused) == len(errors) and not (looking or self._candidates.reading):
            raise refused[0]

    def _not_found(self) -> PublicationNotFound:
        error: KvcsError | None = self._candidates.error
        if error is not None:
            not_found = PublicationNotFound(f"no usable publication of the prefix: {error}")
            not_found.__cause__ = error
            return not_found
        if short := self._candidates.too_short:
            return PublicationNotFound(
                f"a publication covers {short} blocks of the {self._search.least} that are wanted"
            )
        silent = [s.peer for s, watch in self._watches if not watch.answered.is_set()]
        if silent:
            return PublicationNotFound(
                f"unknown whether the prefix is published: {silent[0]} has not answered yet"
            )
        if self._candidates.reading:
            return PublicationNotFound("a publication was announced, but its manifest never came")
        if self._index_error is not None or (self._lookup is not None and not self._lookup.done()):
            return PublicationNotFound("unknown whether the prefix is published: the index failed")
        shorter = ", nor is one of the shorter ones" if self._search.anchors else ""
        return PublicationNotFound(
            f"no publication of the prefix is announced{shorter}; it is found by equal scope key,"
            " descriptor and whole blocks of tokens, no more and no fewer; one with"
            " first_segment_blocks=n is found by anchors=(n,)",
            absent=True,
        )
