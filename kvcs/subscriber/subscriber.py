"""`Subscriber`: finds publications of a prefix on one or more sessions and opens one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Hashable, Mapping, Sequence
from typing import get_args

from kvcs.contexts import entered_by
from kvcs.errors import KvcsError, PublicationNotFound, Redirected, UsageError
from kvcs.fallback.guarded import GuardedSource
from kvcs.fallback.source import BlockSource
from kvcs.kv import GivenMemory, Ledger, Manifest, Prefix, ProtectionRing, PublicationNamespace
from kvcs.kv.tracks import APPLICATION, SCOPE_ID_OCTETS
from kvcs.moqt.names import TrackNamespace
from kvcs.quic.connection import Connection
from kvcs.subscriber.authenticity import Authenticity
from kvcs.subscriber.cache import Cache
from kvcs.subscriber.coverage import Holding, Index
from kvcs.subscriber.discovery import PublicationInfo, Search, halved, publications
from kvcs.subscriber.finding import Finder, may_follow_prefix, namespace_of
from kvcs.subscriber.last_means import LastMeans, Recompute
from kvcs.subscriber.manifests import ManifestFollower
from kvcs.subscriber.others import Others
from kvcs.subscriber.protection import Protection
from kvcs.subscriber.reception import Retrieve
from kvcs.subscriber.report import ManifestFacts
from kvcs.subscriber.requests import Choice
from kvcs.subscriber.retrieval import Retrieval
from kvcs.subscriber.routes import Routes
from kvcs.subscriber.settings import MAX_ANCHORS, SubscriberSettings
from kvcs.subscriber.sharing import Sharing
from kvcs.subscriber.without import Elsewhere
from kvcs.trust import KeyRing


class Subscriber:
    """Retrieves KV caches over one or more sessions.

    A retrieval whose session is lost or sent away goes on over another one from the first Object
    that is not there: over the session that follows it (`kvcs.connect`), or one of the others.

    Args:
        sessions: what `kvcs.connect` gives, the preferred one first; none where there is a
            ``fallback``.
        settings: limits and waits.
        keys: public keys of the producers. A publication that is signed is then verified: every
            version of its manifest, and every object against the signed list before it is used.
        require_signed: use nothing that is not signed by one of them (KVCS "Security
            Considerations").
        protection: the scope's protection keys. A publication has to be sealed then: its manifest
            and every object are opened before they are checked, and what does not open is dropped
            and counted. Without them no sealed publication can be read.
        index: asked for publications of a prefix beside the sessions; what it names is asked for
            on the sessions.
        fallback: where publications and blocks are got from when no session has them, for example
            `HttpSource`. What comes from there is checked like what sessions bring.

    Raises:
        UsageError: ``require_signed`` without keys, keys that are not for manifests, neither a
            session nor a fallback, or something else than a session.
    """

    def __init__(
        self,
        *sessions: Connection,
        settings: SubscriberSettings | None = None,
        keys: KeyRing | None = None,
        require_signed: bool = False,
        protection: ProtectionRing | None = None,
        index: Index | None = None,
        fallback: BlockSource | None = None,
    ) -> None:
        if not sessions and fallback is None:
            raise UsageError("say where to look: a session (kvcs.connect), or a fallback")
        self.settings = SubscriberSettings() if settings is None else settings
        self._sessions = sessions
        self._protection = Protection(protection)
        self._authenticity = Authenticity(
            keys, required=require_signed, protection=self._protection
        )
        for session in sessions:
            if not isinstance(session, Connection):
                raise UsageError(
                    "a Subscriber takes what `async with kvcs.connect(...) as session` gives, not"
                    f" {type(session).__name__}"
                )
        self._index = index
        self._sharing = Sharing()
        self._routes = Routes(sessions)
        self._finder = Finder(self._routes, self.settings, self._authenticity)
        self._fallback = None if fallback is None else GuardedSource(fallback)
        self._elsewhere = (
            None
            if self._fallback is None
            else Elsewhere(self._fallback, self.settings, self._authenticity)
        )

    @property
    def refused(self) -> dict[str, int]:
        """Publications refused because no signature showed their producer, by failed check."""
        return dict(self._authenticity.refused)

    @property
    def unopened(self) -> dict[str, int]:
        """Manifest versions that did not open, by failed check; `CacheReport.rejected` has the
        objects."""
        return dict(self._protection.rejected)

    async def list(self, of: Prefix | bytes, *, blocks: int | None = None) -> list[PublicationInfo]:
        """Publications that are announced now. A redirect to another relay is followed.

        Args:
            of: a prefix, or a Scope ID of 16 octets for all publications of a scope.
            blocks: publications of so many blocks of the prefix, in their first segment; all by
                default.

        Raises:
            UsageError: ``of`` is neither.
            PublicationNotFound: no session has answered in time: unknown, not absent.
            RequestError: every session refused to tell; `Redirected` where one that sends elsewhere
                cannot be followed.
            ConnectionClosed: every session has ended.
            ConnectionFailed: the relay that it sends to cannot be reached.
        """
        if not isinstance(of, Prefix) and len(of) != SCOPE_ID_OCTETS:
            raise UsageError(f"a Scope ID has {SCOPE_ID_OCTETS} octets, not {len(of)}")
        prefix = of.namespace_prefix(blocks) if isinstance(of, Prefix) else (APPLICATION, bytes(of))
        until = asyncio.get_running_loop().time() + self.settings.least_deadline
        sessions = await self._finder.sessions(until)
        results = await asyncio.gather(*(self._list(each, prefix) for each in sessions))
        errors = [result for result in results if isinstance(result, Exception)]
        if len(errors) == len(results):
            raise errors[0]
        answers = [result for result in results if not isinstance(result, Exception)]
        # Two sessions may have been sent to the same relay.
        return list(dict.fromkeys(info for answer in answers for info in answer))

    async def _list(
        self, session: Connection, prefix: TrackNamespace
    ) -> Sequence[PublicationInfo] | Exception:
        """What one session announces, or why it does not tell; a redirect is followed."""
        hops = 0
        while True:
            answer = await self._ask_for_list(session, prefix)
            if not isinstance(answer, Redirected):
                return answer
            link = session.link
            if link is None or not may_follow_prefix(session, prefix, answer):
                return answer
            if hops >= link.policy.max_hops:
                return answer
            hops += 1
            try:
                session = await link.elsewhere(answer.uri)
            except KvcsError as exc:
                return exc

    async def _ask_for_list(
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

    @entered_by("async with subscriber.open(...) as cache:")
    async def open(
        self,
        prefix: Prefix,
        *,
        deadline: float | None = None,
        wait: float | None = None,
        layers: tuple[int, int] | None = None,
        blocks: int | None = None,
        publication: str | PublicationNamespace | PublicationInfo | Holding | None = None,
        retrieve: Retrieve = "auto",
        anchors: Sequence[int] | None = None,
        probe: int | None = None,
        recompute: Recompute | None = None,
        codecs: Sequence[str] | None = None,
        lossy: bool = False,
        whole: bool = False,
        into: Mapping[int, tuple[object, object]] | None = None,
    ) -> AsyncIterator[Cache]:
        """Find a publication of ``prefix`` and retrieve it; leaving the context ends it.

        Who opens the same again meanwhile, on this Subscriber, reads the same retrieval; what fails
        there fails for all of them, and the last one who leaves ends it.

        The whole prefix is looked for first, then shorter ones (KVCS "Discovering Publications").
        The manifest is read and held to the prefix before any data track is asked for. The cache
        has as many leading blocks of the prefix as the publication: `Cache.blocks`.

        Args:
            prefix: the consumer's own tokens, descriptor and scope. A publication is found when its
                first segment has just these blocks, or those of one of the ``anchors``; one that
                has others has another name, and only an index or ``publication`` leads to it.
            deadline: seconds from now to the last layer; by default 30 or twice the estimate of
                recomputing, whichever is longer.
            wait: seconds to wait for a publication to appear; up to the deadline by default, 0
                takes only what is announced already. Shorter ones are looked for once nothing has
                been heard of the whole prefix for the time that discovery listens.
            layers: first and last layer, inclusive; all by default.
            blocks: the first so many blocks, no fewer; by default all of the prefix that the
                publication has.
            publication: a holder URI, a namespace, what `list` gave or what an index says: take
                this one, ask for no other. It is asked for on the Subscriber's sessions, whatever
                host a URI names.
            retrieve: "subscribe" follows a publication while it is produced and fills in what was
                published before, each Object exactly once; "fetch" asks for what is there; "auto"
                fetches a selection of complete segments and subscribes otherwise.
            anchors: lengths, in blocks, of the shorter prefixes to look for: where a system prompt
                or a document ends, for example. At most eight; by default half the prefix, a
                quarter, and so on.
            probe: how many of them are looked for; `SubscriberSettings.probe` by default. With 0
                no peer learns where this prompt parts from others.
            recompute: computes what nobody has, a `MissingLayer` at a time, earlier layers first;
                its tensors then count like verified ones. It is called when everything else was
                tried, or has used up the time that recomputing takes.
            codecs: names of codecs to take, the preferred one first; by default "raw", then every
                other one that is registered.
            lossy: take a codec that does not give back every bit, too. `CacheReport.lossless` tells
                whether one was used.
            whole: hand out no layer before all are there. A segment that lacks something can then
                be taken from another publication to the last; else only until the first layer was
                handed out, since Objects of two publications are never mixed in one segment.
            into: K and V of each wanted layer, by its index, to put its tensors into: pinned memory
                or an engine's own, arrays or torch tensors of the descriptor's dtype, [tokens,
                kv_heads, head_dim] and [tokens, kv_heads, v_head_dim] (None for latent attention),
                C-contiguous, with room for the tokens of all the blocks wanted. They are filled
                from their first token. What a layer's memory holds counts only once the layer was
                handed out, and then it is written to no more; nothing is once this context was
                left. Such a retrieval is not shared.

        Yields:
            The `Cache`.

        Raises:
            PublicationNotFound: there was none to use.
            PublicationError: the publication that was named cannot be used: its manifest does not
                fit the prefix, and the message says where.
            UsageError: the selection does not fit the prefix, or an argument is out of bounds; or
                a session's relays are not trusted, and there are no protection keys.
            RequestError: every session refused, or none has the publication that was named.
            ConnectionClosed: the session ended.

        Cancelling ends every request of it; nothing is left behind.
        """
        loop = asyncio.get_running_loop()
        opened_at = loop.time()
        self._protection.check_relays(self._sessions)
        ledger = self._ledger(prefix, layers, blocks)
        if into is not None:
            tokens = ledger.blocks * prefix.descriptor.block_tokens
            ledger.memory = GivenMemory(into, prefix.descriptor, ledger.layers, tokens)
        if retrieve not in get_args(Retrieve):
            known = ", ".join(get_args(Retrieve))
            raise UsageError(f"retrieve must be one of {known}, not {retrieve!r}")
        tokens = prefix.blocks * prefix.descriptor.block_tokens
        seconds = self.settings.deadline(tokens) if deadline is None else deadline
        if not seconds > 0:
            raise UsageError(f"deadline must be more than 0 s, not {seconds}")
        if wait is not None and not wait >= 0:
            raise UsageError(f"wait must not be negative, not {wait}")
        choice = Choice(None if codecs is None else tuple(codecs), lossy)
        choice.names()  # a codec that nobody has registered is refused here
        deadline_at = opened_at + seconds
        wait_until = deadline_at if wait is None else min(deadline_at, opened_at + wait)
        least = 1 if blocks is None else blocks
        tried = self._anchors(prefix, anchors, probe, least)

        async def find() -> ManifestFollower:
            if publication is None:
                search = Search(
                    prefix=prefix, anchors=tried, index=self._index, least=least, choice=choice
                )
                return await self._finder.discover(search, wait_until, deadline_at)
            return await self._finder.named(prefix, publication, deadline_at)

        async def begin() -> Retrieval:
            if self._elsewhere is None:
                follower = await find()
            else:
                follower = await self._elsewhere.instead(
                    find() if self._sessions else None,
                    prefix,
                    (prefix.blocks, *tried),
                    None if publication is None else namespace_of(publication),
                    min(self.settings.recovery(tokens), wait_until - opened_at),
                    deadline_at,
                    choice,
                )
            if blocks is None and follower.coverage is not None:
                ledger.blocks = follower.coverage.blocks
            ledger.signed = follower.signed is not None
            ledger.unsealer = self._protection.unsealer(
                ledger, follower.namespace, self.settings.max_data_octets
            )
            retrieval = Retrieval(
                follower,
                self._routes,
                prefix,
                ledger,
                self.settings,
                retrieve=retrieve,
                opened_at=opened_at,
                deadline_at=deadline_at,
                exact=blocks is not None,
                others=Others(prefix, self.settings, self._authenticity),
                last_means=(
                    None
                    if self._fallback is None and recompute is None
                    else LastMeans(self._fallback, recompute, self.settings)
                ),
                choice=choice,
                whole=whole,
            )
            try:
                retrieval.start()
            except BaseException:
                retrieval.close()
                raise
            return retrieval

        identity = (prefix.scheme.name, prefix.scope_id, prefix.compat_id, prefix.block_keys[-1])
        key: Hashable = (
            *(identity, layers, blocks, publication, retrieve, tried, wait),
            choice,
            recompute,
            whole,
        )
        if into is not None or not self.settings.share:
            key = object()
        async with self._sharing.join(key, begin, deadline_at) as retrieval:
            cache = Cache(retrieval, prefix, deadline_at, seconds)
            try:
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
        self._protection.check_relays(self._sessions)
        seconds = self.settings.least_deadline if deadline is None else deadline
        if not seconds > 0:
            raise UsageError(f"deadline must be more than 0 s, not {seconds}")
        until = asyncio.get_running_loop().time() + seconds
        follower = await self._finder.named(prefix, publication, until, look=look)
        follower.stop()
        return follower

    def _anchors(
        self, prefix: Prefix, anchors: Sequence[int] | None, probe: int | None, least: int
    ) -> tuple[int, ...]:
        """Lengths of the shorter prefixes to look for, longest first.

        Raises:
            UsageError: too many, or one that is not shorter than the prefix.
        """
        count = self.settings.probe if probe is None else probe
        if not 0 <= count <= MAX_ANCHORS:
            raise UsageError(f"probe must lie in 0..{MAX_ANCHORS}, not {count}")
        if anchors is None:
            return halved(prefix.blocks, count, least)
        if len(anchors) > MAX_ANCHORS:
            raise UsageError(f"{len(anchors)} anchors are too many; the limit is {MAX_ANCHORS}")
        wrong = [each for each in anchors if not 1 <= each < prefix.blocks]
        if wrong:
            raise UsageError(
                f"an anchor is shorter than the prefix of {prefix.blocks} blocks and has at least"
                f" one, not {wrong[0]}"
            )
        return tuple(sorted(set(anchors), reverse=True)[:count])

    def _ledger(self, prefix: Prefix, layers: tuple[int, int] | None, blocks: int | None) -> Ledger:
        """What is selected; refused here, before anything is asked for."""
        if blocks is not None and not isinstance(blocks, int):
            raise UsageError(
                f"blocks: how many of the first blocks, an integer, not {type(blocks).__name__}"
            )
        if blocks is not None and blocks > prefix.blocks:
            raise UsageError(f"blocks must be at most the prefix's {prefix.blocks}, not {blocks}")
        return Ledger(
            prefix.descriptor,
            blocks=prefix.blocks if blocks is None else blocks,
            layers=layers,
            max_data_octets=self.settings.max_data_octets,
        )
