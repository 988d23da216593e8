"""One session's part in a retrieval, and what the retrieval is to it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from kvcs.errors import ConnectionClosed, KvcsError, Redirected, RequestError
from kvcs.kv import DataTrack, Ledger, SegmentEntry
from kvcs.moqt.errors import RequestCode
from kvcs.moqt.intervals import Span
from kvcs.moqt.names import Location, TrackNamespace
from kvcs.quic.chance import new_chance
from kvcs.quic.connection import Connection
from kvcs.quic.reconnect import retry_seconds
from kvcs.subscriber.manifests import ManifestFollower

if TYPE_CHECKING:
    from kvcs.subscriber.passage import Passage

MAX_RETRIES = 8
"""Requests of one leg that are repeated after the Retry Interval they were refused with."""


class Traveller(Protocol):
    """The retrieval, as its passage sees it."""

    namespace: TrackNamespace

    @property
    def ledger(self) -> Ledger:
        """What is owed and what is verified."""

    @property
    def is_over(self) -> bool:
        """Whether nothing more is wanted."""

    @property
    def manifest_is_final(self) -> bool:
        """Whether no newer manifest is needed."""

    def entry(self, track: DataTrack) -> SegmentEntry:
        """The segment of a track, as the newest manifest has it."""

    def first_missing(self, track: DataTrack) -> Location | None:
        """The first Location of a track that is not there; None where all of it is."""

    def verified(self) -> None:
        """Objects were verified."""

    def lost(self, track: DataTrack, span: Span, reason: str, *, late: bool = False) -> None:
        """What is missing of the span does not come of itself."""

    def dropped(self, track: DataTrack, reason: str) -> None:
        """The peer serves the subscription no longer, though the track goes on."""

    def track_changed(self, track: DataTrack) -> None:
        """Less comes of itself on a track than before."""

    def manifest_ended(self) -> None:
        """No newer manifest comes."""

    def failed(self, error: KvcsError) -> None:
        """The retrieval cannot go on."""

    def between(self) -> None:
        """Its leg brings nothing more that counts, and the next one is not there yet."""

    def moved(self) -> None:
        """Another leg has taken over."""


class Leg:
    """One session's part in a retrieval; a `Taker` of its receivers.

    Args:
        passage: the whole way.
        connection: the session.
        follower: follows the manifest over it.
    """

    def __init__(
        self, passage: Passage, connection: Connection, follower: ManifestFollower
    ) -> None:
        self.connection = connection
        self.follower = follower
        self.reception = passage.reception(connection, self)
        self.must_leave = False
        """Whether the peer wants the retrieval made elsewhere, or anew."""
        self.answer: asyncio.Future[KvcsError | None] = asyncio.get_running_loop().create_future()
        """Whether the peer has accepted everything; an error where it has not."""
        self._passage = passage
        self._traveller = passage.traveller
        self._unanswered = 1
        self._manifest_is_open = False
        self._losses: list[tuple[DataTrack, Span, str, bool]] = []
        self._retries = 0
        self._timers: set[asyncio.TimerHandle] = set()
        self._chance = new_chance()
        follower.notify, follower.adopted = self._follower_changed, True
        connection.hold(self)

    @property
    def is_current(self) -> bool:
        """Whether the retrieval goes by it."""
        return self._passage.leg is self

    def resume(self, rendezvous: float) -> None:
        """Ask for all that lacks; `answer` tells what comes of it.

        Raises:
            UsageError: the session takes no more requests.
        """
        traveller = self._traveller
        tracks = traveller.ledger.tracks
        self._unanswered += len(tracks)
        if not traveller.manifest_is_final:
            self._unanswered += 1
            self._manifest_is_open = True
            self.follower.start()
        for track in tracks:
            self.reception.resume(
                track,
                traveller.entry(track),
                traveller.first_missing(track),
                rendezvous,
                self.answered,
            )
        self.answered(None)

    def answered(self, error: KvcsError | None) -> None:
        """One of its requests was answered."""
        if self.answer.done():
            return
        self._unanswered -= 1
        if error is not None:
            self.answer.set_result(error)
        elif self._unanswered == 0:
            self.answer.set_result(None)

    def take_over(self) -> None:
        """It is the current one now: what it has lost so far counts."""
        losses, self._losses = self._losses, []
        for track, span, reason, late in losses:
            self._traveller.lost(track, span, reason, late=late)

    def close(self) -> None:
        """Cancel its requests, and give up what is on its way."""
        for timer in self._timers:
            timer.cancel()
        self.follower.stop()
        self.reception.cancel()
        self.connection.off_goaway(self._passage.look)
        self.connection.release(self)

    # Taker

    def verified(self) -> None:
        """Objects were verified."""
        self._traveller.verified()

    def lost(self, track: DataTrack, span: Span, reason: str, *, late: bool = False) -> None:
        """Objects are owed again."""
        if self.is_current:
            self._traveller.lost(track, span, reason, late=late)
        else:
            self._losses.append((track, span, reason, late))

    def dropped(self, track: DataTrack, reason: str) -> None:
        """The peer serves a subscription no longer."""
        if self.is_current:
            self._traveller.dropped(track, reason)
        else:
            self.answered(RequestError(reason))

    def sent_away(self, uri: str) -> None:
        """GOAWAY for one of its requests."""
        if self.is_current:
            self._passage.leave(uri)

    def refused(self, track: DataTrack, error: RequestError) -> bool:
        """A subscription was refused; whether another one will be made."""
        if isinstance(error, Redirected):
            followed = self._passage.may_follow(error, track.name)
            if followed:
                self._passage.leave(error.uri)
            return followed
        if error.code == RequestCode.GOING_AWAY:
            self._passage.leave("")
            return True
        if error.retry_after_ms is None or self._retries >= MAX_RETRIES:
            return False
        self._retries += 1
        pause = retry_seconds(error.retry_after_ms, self._chance)
        timer = asyncio.get_running_loop().call_later(pause, self._ask_again, track)
        self._timers.add(timer)
        return True

    def _ask_again(self, track: DataTrack) -> None:
        if self.is_current and self.connection.is_open and not self._traveller.is_over:
            traveller = self._traveller
            self.reception.ask_again(track, traveller.entry(track), traveller.first_missing(track))

    def track_changed(self, track: DataTrack) -> None:
        """Less comes of itself than before."""
        if self.is_current:
            self._traveller.track_changed(track)

    def failed(self, error: KvcsError) -> None:
        """The publication, or the session, cannot be used any more."""
        if isinstance(error, ConnectionClosed):
            self._passage.session_lost(self, error)
        else:
            self._traveller.failed(error)

    # The manifest

    def _follower_changed(self) -> None:
        follower = self.follower
        if follower.sent_away is not None:
            uri, follower.sent_away = follower.sent_away, None
            self.sent_away(uri)
        if self._manifest_is_open and (follower.accepted or follower.error is not None):
            self._manifest_is_open = False
            self.answered(follower.error)
        if not self.is_current:
            return
        if follower.error is not None:
            self.failed(follower.error)
        elif follower.ended:
            self._traveller.manifest_ended()


class Beside:
    """A `Taker` of FETCHes over another session than the leg's: only what they bring counts.

    Args:
        traveller: the retrieval.
    """

    def __init__(self, traveller: Traveller) -> None:
        self._traveller = traveller

    def verified(self) -> None:
        """Objects were verified."""
        self._traveller.verified()

    def lost(self, track: DataTrack, span: Span, reason: str, *, late: bool = False) -> None:
        """It does not have them either: they are owed still."""
        self._traveller.lost(track, span, reason, late=late)

    def dropped(self, track: DataTrack, reason: str) -> None:
        """Nothing is subscribed to over this session."""

    def sent_away(self, uri: str) -> None:
        """One FETCH is not worth a move."""

    def refused(self, track: DataTrack, error: RequestError) -> bool:
        """Nothing is subscribed to over this session."""
        return False

    def track_changed(self, track: DataTrack) -> None:
        """Nothing comes of itself over this session."""

    def failed(self, error: KvcsError) -> None:
        """A contradiction ends the retrieval; the end of this session does not."""
        if not isinstance(error, ConnectionClosed):
            self._traveller.failed(error)
