"""`Publisher`: offers publications on sessions, within one budget of memory."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from kvcs.contexts import entered_by
from kvcs.errors import ConnectionClosed, UsageError
from kvcs.kv import (
    MAX_DATA_OCTETS,
    RAW,
    ManifestCadence,
    Prefix,
    ProtectionKey,
    ProtectionRing,
    lookup,
)
from kvcs.moqt.track.stored import StoreBudget
from kvcs.observe import get_logger
from kvcs.publisher.encodings import JOINT
from kvcs.publisher.memory import LayerMemory
from kvcs.publisher.publication import Publication
from kvcs.quic.connection import Connection
from kvcs.quic.endpoint import Server
from kvcs.trust import SigningKey

_log = get_logger("kvcs.publisher")

ABORT_SECONDS = 1.0
"""Longest wait for the peers to hear of the end before an exception goes on."""

MAX_PAD_BLOCKS = 1 << 20
"""Largest multiple of blocks that segments are filled up to."""

GIB = 2**30
MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class PublisherSettings:
    """Limits and choices of one Publisher."""

    store_octets: int = 4 * GIB
    """Copies of tensors held in memory by all its publications, bookkeeping included."""

    spill: str | os.PathLike[str] | None = None
    """Folder for copies beyond `store_octets`; without one `put` raises `StoreFull`."""

    retention: float = 3600.0
    """MAX_CACHE_DURATION, seconds: how long relays may keep the Objects. After that time a complete
    publication is withdrawn and its memory is given back."""

    lifetime: float | None = None
    """Seconds that a complete publication is served, where that is another time than `retention`;
    infinity leaves it to its context."""

    cadence: ManifestCadence = field(default_factory=ManifestCadence)
    """When the next manifest version is made."""

    signed_cadence: ManifestCadence = field(default_factory=ManifestCadence.for_signing)
    """The same where manifests are signed: a consumer uses no layer before a version lists it."""

    max_manifest_octets: int = 128 * MIB
    """Largest manifest."""

    max_data_octets: int = MAX_DATA_OCTETS
    """Largest Data of one Object."""

    answer: float = 10.0
    """Seconds that a peer has to answer an announcement."""

    drain: float = 5.0
    """Seconds that a publication which is left waits for its subscribers to get what they asked."""

    random_octets: Callable[[int], bytes] = secrets.token_bytes
    """Source of Publication IDs: so many random octets. Seeded only in simulations; protected
    publications never take theirs from here."""

    def __post_init__(self) -> None:
        if self.store_octets < 1:
            raise UsageError(f"store_octets must be at least 1, not {self.store_octets}")
        if not self.retention > 0:
            raise UsageError(f"retention must be more than 0 s, not {self.retention}")
        if self.lifetime is not None and not self.lifetime > 0:
            raise UsageError(f"lifetime must be more than 0 s, not {self.lifetime}")
        if not self.answer > 0:
            raise UsageError(f"answer must be more than 0 s, not {self.answer}")
        if not self.drain >= 0:
            raise UsageError(f"drain must not be negative, not {self.drain}")


class Publisher:
    """Publishes KV caches on one or more sessions, or through a listening server.

    Where a session is lost or sent away and another one follows it (`kvcs.connect`), publications
    live on: they are announced there under the same Publication ID and served from the same store.

    Args:
        sessions: what `kvcs.connect` or `kvcs.serve` gives; one or more.
        settings: limits and choices.

    Raises:
        UsageError: no session was given, or something else than a session.
    """

    def __init__(
        self, *sessions: Connection | Server, settings: PublisherSettings | None = None
    ) -> None:
        if not sessions:
            raise UsageError("a Publisher needs at least one session or server")
        for session in sessions:
            if not isinstance(session, Connection | Server):
                raise UsageError(
                    "a Publisher takes what `async with kvcs.connect(...) as session` gives, or"
                    f" kvcs.serve, not {type(session).__name__}"
                )
        self.settings = PublisherSettings() if settings is None else settings
        self._sessions = tuple(dict.fromkeys(sessions))
        self._publications: list[Publication] = []
        self._kept: list[Publication] = []
        self._memory = LayerMemory(
            StoreBudget(self.settings.store_octets, self._make_room), self.settings.spill
        )

    @property
    def publications(self) -> tuple[Publication, ...]:
        """Publications that are open, oldest first."""
        return tuple(each for each in self._publications if each.is_open)

    @property
    def held_octets(self) -> int:
        """Octets of memory that copies of tensors take now."""
        return self._memory.budget.used

    @entered_by("async with publisher.publish(...) as publication:")
    async def publish(
        self,
        prefix: Prefix,
        *,
        first_segment_blocks: int | None = None,
        deterministic: bool = False,
        sign: SigningKey | None = None,
        protect: ProtectionRing | ProtectionKey | None = None,
        pad_blocks: int | None = None,
        retention: float | None = None,
        keep: bool = False,
        encodings: Sequence[str] = (RAW.name,),
    ) -> AsyncIterator[Publication]:
        """Announce a publication of ``prefix``; leaving the context ends it.

        Left in good order, it waits for its subscribers as long as `PublisherSettings.drain` says.
        Left by an exception before it is complete, it is aborted and subscribers are told; of the
        exception they get the name of its class, never its text, which may hold what is not theirs
        to read, and of a cancellation that it was one. A complete one ends as in good order, with a
        short wait.

        Args:
            prefix: whose cache is produced.
            first_segment_blocks: blocks of segment 0, which names the publication; all by
                default. Chunked prefill publishes each pass as a segment. Consumers then find it
                by a prefix of these blocks, and of all blocks only if they name the publication.
            deterministic: the promise that any publication of this content has bit-identical
                Objects.
            sign: the producer's key. The manifest is then published as "manifest.cose" alone, each
                version signed, and consumers that have the public key can tell who produced the
                cache (KVCS "Security Considerations").
            protect: keys of the scope. Every Object with a payload, manifests included, is then
                sealed end to end under the newest key that may seal, the same from the first to the
                last; relays store and pass on what they cannot read. `PublisherSettings` counts
                sealed octets.
            pad_blocks: with ``protect``: fill every segment up to a multiple of so many blocks with
                blocks of zeros, so that relays do not see how long the context is (KVCS "Privacy
                Considerations"). Consumers pass over them.
            retention: seconds, in place of `PublisherSettings.retention`.
            keep: leave a complete publication served behind the context, until its retention has
                passed, the budget needs its room or `close` is called. The engine's buffers are its
                own again all the same.
            encodings: codecs to offer every segment in, like ``("raw", "kv.NAME")``: a name stands
                for a k and a v track, with "kv." before it for one joint track. `put` encodes into
                each of them.

        Yields:
            The `Publication`; its `segment()` takes the layers.

        Raises:
            RequestError: every session refused the announcement, or did not answer it in time.
            ConnectionClosed: there is no session any more.
            UsageError: ``first_segment_blocks`` is not among the prefix's, the manifest would be
                too large, or the publication is left before every layer was put; or the protection
                keys are for another scope, or none of them may seal; or there are none, and a
                session's relays are not trusted.
        """
        if retention is None:
            retention = self.settings.retention
        elif not retention > 0:
            raise UsageError(f"retention must be more than 0 s, not {retention}")
        lifetime = self.settings.lifetime
        if sign is not None and not isinstance(sign, SigningKey):
            raise UsageError(
                f"sign takes what kvcs.load_signing_key(path) gives, not {type(sign).__name__}"
            )
        if isinstance(protect, ProtectionRing):
            protect.check_scope(prefix.scope_id)
            protect = protect.current
        if protect is None:
            self._check_trusted()
        if pad_blocks is not None:
            _check_padding(pad_blocks, protect, encodings)
        publication = Publication(
            prefix,
            [session.origin for session in self._sessions],
            self._memory,
            retention=retention,
            lifetime=retention if lifetime is None else lifetime,
            cadence=self.settings.cadence if sign is None else self.settings.signed_cadence,
            max_manifest_octets=self.settings.max_manifest_octets,
            max_data_octets=self.settings.max_data_octets,
            first_segment_blocks=prefix.blocks
            if first_segment_blocks is None
            else first_segment_blocks,
            deterministic=deterministic,
            random_octets=self.settings.random_octets,
            check_sessions=self._check_sessions,
            sign=sign,
            protect=protect,
            pad_blocks=pad_blocks or 0,
            encodings=encodings,
        )
        self._publications.append(publication)
        try:
            waits = [isinstance(session, Connection) for session in self._sessions]
            await publication.announce(waits, self.settings.answer)
            yield publication
            if keep and publication.is_open:
                await publication.finish()
                self._keep(publication)
            else:
                await publication.close(self.settings.drain)
        except BaseException as exc:
            if publication.complete:
                # What failed lies outside of it, a service that is shut down for example; an abort
                # would make relays forget a whole cache.
                await publication.close(ABORT_SECONDS)
            else:
                publication.abort(_why(exc))
            await self._flush()
            raise
        finally:
            if publication not in self._kept:
                publication.release()
                self._publications.remove(publication)

    async def close(self) -> None:
        """End the publications that are kept behind their contexts, as those end that are left."""
        kept, self._kept = self._kept, []
        try:
            await asyncio.gather(*(each.close(self.settings.drain) for each in kept))
        finally:
            for publication in kept:
                publication.on_retired = None
                publication.release()
                self._publications.remove(publication)

    def _keep(self, publication: Publication) -> None:
        def retired() -> None:
            self._kept.remove(publication)
            self._publications.remove(publication)

        self._kept.append(publication)
        publication.on_retired = retired

    def _check_trusted(self) -> None:
        """Check that what is published unprotected may be read where it goes.

        Raises:
            UsageError: the relays of a session are not trusted with it.
        """
        for session in self._sessions:
            if session.relays == "untrusted":
                where = session.url if isinstance(session, Server) else session.peer
                raise UsageError(
                    f'{where}: its relays are "untrusted", and they could read this publication;'
                    " say publish(protect=...) with the scope's protection keys, which"
                    " `kvcs keygen --protection` makes"
                )

    def _check_sessions(self) -> None:
        """Check that there is a session left.

        Raises:
            ConnectionClosed: every one has ended.
        """
        error: ConnectionClosed | None = None
        for session in self._sessions:
            if isinstance(session, Server) or session.lasts:
                return
            error = session.close_error()
        if error is not None:
            raise error

    async def _flush(self) -> None:
        """Let the peers acknowledge what was said, for a short time."""
        try:
            async with asyncio.timeout(ABORT_SECONDS):
                await asyncio.gather(
                    *(
                        each.drain() if isinstance(each, Server) else each.newest.drain()
                        for each in self._sessions
                    )
                )
        except TimeoutError:
            _log.debug("end_not_acknowledged")

    def _make_room(self, octets: int) -> None:
        """Retire complete publications, oldest first, until ``octets`` are free."""
        target = self._memory.budget.used - octets
        for publication in list(self._publications):
            if self._memory.budget.used <= target:
                return
            if publication.complete and publication.held_octets:
                publication.retire()


def _why(error: BaseException) -> str:
    """What subscribers are told of an exception: never its text, which may be secret."""
    if isinstance(error, asyncio.CancelledError):
        return "the producer was cancelled"
    return f"the producer failed ({type(error).__name__})"


def _check_padding(blocks: int, protect: ProtectionKey | None, encodings: Sequence[str]) -> None:
    """Check that padding hides what it is for.

    Raises:
        UsageError: it is not sealed, or its Objects would have another size than real ones.
    """
    if not 1 <= blocks <= MAX_PAD_BLOCKS:
        raise UsageError(f"pad_blocks must lie in 1..{MAX_PAD_BLOCKS}, not {blocks}")
    if protect is None:
        raise UsageError("pad_blocks hides nothing where it is not sealed: say protect=..., too")
    if any(not lookup(each.removeprefix(JOINT)).in_place for each in encodings):
        raise UsageError("pad_blocks is for codec raw: others make zeros shorter than tensors")
