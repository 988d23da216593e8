"""How a retrieval goes on over another session (MOQT §6.6.1, §9.2; KVCS "Verification and
Recovery").

A retrieval uses one session at a time: its *leg*. When that session is lost, is sent away or sends
the retrieval away, the next leg asks for each track from the first Location that is not there on;
once every track is accepted it takes the place of the old one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Protocol

from kvcs.errors import ConnectionClosed, KvcsError, Redirected, RequestError, UsageError
from kvcs.kv import DataTrack, Ledger, SegmentEntry
from kvcs.moqt.errors import RequestCode
from kvcs.moqt.names import FullTrackName, Location, TrackNamespace
from kvcs.observe import get_logger
from kvcs.quic.chance import new_chance
from kvcs.quic.connection import Connection
from kvcs.quic.reconnect import retry_seconds
from kvcs.recovery import Span
from kvcs.subscriber.manifests import RENDEZVOUS_SECONDS, ManifestFollower
from kvcs.subscriber.reception import Reception, Retrieve
from kvcs.subscriber.requests import may_follow
from kvcs.subscriber.routes import Routes
from kvcs.subscriber.settings import SubscriberSettings

_log = get_logger("kvcs.subscriber")

ANSWER_SECONDS = 10.0
"""How long the answers of a new leg are waited for, before another session is tried."""

MAX_PAUSE_DOUBLINGS = 6
"""The pause between tries doubles up to 64 times the first one."""

MAX_HOPS = 4
"""Redirects that one move follows."""

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
        """An Object was verified."""

    def lost(self, track: DataTrack, span: Span, reason: str) -> None:
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
        self._losses: list[tuple[DataTrack, Span, str]] = []
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
        for loss in losses:
            self._traveller.lost(*loss)

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
        """An Object was verified."""
        self._traveller.verified()

    def lost(self, track: DataTrack, span: Span, reason: str) -> None:
        """Objects are owed again."""
        if self.is_current:
            self._traveller.lost(track, span, reason)
        else:
            self._losses.append((track, span, reason))

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


class Passage:
    """The legs of one retrieval, one after the other.

    Args:
        traveller: the retrieval.
        routes: sessions that it may use.
        follower: has the publication's manifest; over its session goes the first leg.
        settings: waits and limits.
        retrieve: how Objects are asked for.
        selective: whether less than the whole prefix is wanted.
    """

    def __init__(
        self,
        traveller: Traveller,
        routes: Routes,
        follower: ManifestFollower,
        settings: SubscriberSettings,
        *,
        retrieve: Retrieve,
        selective: bool,
    ) -> None:
        self.traveller = traveller
        self.moves = 0
        """Times that the retrieval has gone on over another session."""
        self.lost = False
        """Whether there is no session to go by at this moment."""
        self._routes = routes
        self._settings = settings
        self._retrieve = retrieve
        self._selective = selective
        self._task: asyncio.Task[None] | None = None
        self._next: Leg | None = None
        self._stirred = asyncio.Event()
        self._closed = False
        self._chance = new_chance()
        self.leg = Leg(self, follower.connection, follower)
        """The current one; over, where `lost`."""

    def start(self) -> None:
        """Watch over the sessions from now on; the first one may have changed already."""
        leg = self.leg
        self._routes.on_change(self.look)
        leg.connection.on_goaway(self.look)
        if not leg.connection.is_open:
            self.session_lost(leg, leg.connection.close_error())
        elif leg.follower.error is not None:
            leg.failed(leg.follower.error)
        else:
            self.look()

    @property
    def moving(self) -> bool:
        """Whether all that lacks is being asked for over another session, or anew."""
        return self.lost or self.leg.must_leave

    def reception(self, connection: Connection, leg: Leg) -> Reception:
        """A reception over a session."""
        return Reception(
            connection,
            self.traveller.namespace,
            self.traveller.ledger,
            leg,
            subscriber_priority=self._settings.subscriber_priority,
            retrieve=self._retrieve,
            selective=self._selective,
        )

    def begin(self, tracks: Sequence[DataTrack], entry: SegmentEntry) -> None:
        """Ask for a segment that was added to the ledger, on every leg that can."""
        for leg in (self.leg, self._next):
            if leg is not None and leg.connection.is_open:
                for track in tracks:
                    leg.reception.begin(track, entry)

    def look(self) -> None:
        """A session came, went or is sent away: go on elsewhere if need be."""
        self._stirred.set()
        if self._closed or self._task is not None or self.traveller.is_over:
            return
        connection = self.leg.connection
        if connection.is_usable and not self.leg.must_leave:
            return
        if not self._routes.last and not connection.is_open:
            self.traveller.failed(connection.close_error())
        elif any(each is not connection for each in self._routes.usable):
            self._move("")

    def leave(self, uri: str) -> None:
        """The peer wants the retrieval made at another URI, or anew where it is empty."""
        if self._closed or self._task is not None or self.traveller.is_over:
            return
        self.leg.must_leave = True
        self.traveller.between()
        self._move(uri)

    def may_follow(self, redirect: Redirected, track_name: bytes) -> bool:
        """Whether a redirect keeps to the publication: another has other Objects."""
        name = FullTrackName(self.traveller.namespace, track_name)
        return may_follow(redirect, self.leg.connection, name)

    def session_lost(self, leg: Leg, error: ConnectionClosed) -> None:
        """The session of a leg is over."""
        if leg is not self.leg:
            leg.answered(error)
            return
        if self.lost or self._closed:
            return
        self.lost = True
        leg.close()
        if not self._routes.last:
            self.traveller.failed(error)
            return
        if not self.traveller.is_over:
            _log.info("retrieval_interrupted", peer=leg.connection.peer, reason=str(error))
            self.traveller.between()
            self.look()

    def settled(self) -> None:
        """Nothing more is wanted: no session is needed any more."""
        self._routes.off_change(self.look)
        if self._task is not None:
            self._task.cancel()
            self._task = None
        self.leg.connection.release(self.leg)

    def close(self) -> None:
        """Cancel everything."""
        self._closed = True
        self.settled()
        self.leg.close()

    # Inner workings

    def _move(self, uri: str) -> None:
        self._task = asyncio.get_running_loop().create_task(self._go_on(uri))

    async def _go_on(self, uri: str) -> None:
        """Find a session that serves the retrieval, and go on over it."""
        tries = hops = 0
        try:
            while True:
                self._stirred.clear()
                error: KvcsError | None
                try:
                    error = await self._try(await self._target(uri, tries))
                except (KvcsError, OSError) as exc:
                    if not self._routes.last:
                        raise
                    error = exc if isinstance(exc, KvcsError) else ConnectionClosed(str(exc))
                if error is None:
                    return
                tries += 1
                uri = ""
                if isinstance(error, Redirected) and error.uri and hops < MAX_HOPS:
                    hops += 1
                    uri = error.uri
                    continue
                _log.info("retrieval_not_taken_up", tries=tries, why=str(error))
                await self._pause(tries, error)
        except ConnectionClosed as exc:
            if not self.leg.connection.is_open:
                self.traveller.failed(exc)
        finally:
            if self._task is asyncio.current_task():
                self._task = None
        if not self._closed:
            self.look()

    async def _target(self, uri: str, tries: int) -> Connection:
        """The session to try next.

        Raises:
            ConnectionClosed: none comes any more, or the one that was named was closed.
            ConnectionFailed: the one that was named cannot be opened.
            UsageError: what was named is no `moqt` URI, or there are too many sessions.
        """
        link = self.leg.connection.link
        if uri and link is not None:
            return await link.elsewhere(uri)
        usable = await self._routes.wait()
        others = [each for each in usable if each is not self.leg.connection]
        if not self.leg.must_leave and others:
            usable = others
        return usable[tries % len(usable)]

    async def _try(self, connection: Connection) -> KvcsError | None:
        """Take the retrieval up over a session; None where that has replaced the old one."""
        # The publisher may be on its way there too; where there is another relay, that is tried.
        rendezvous = 0.0 if len(self._routes.usable) > 1 else RENDEZVOUS_SECONDS
        old = self.leg
        follower = old.follower.on_another_session(connection, rendezvous, lambda: None)
        leg = self._next = Leg(self, connection, follower)
        connection.on_goaway(self.look)
        try:
            leg.resume(rendezvous)
            async with asyncio.timeout(ANSWER_SECONDS):
                error = await leg.answer
        except TimeoutError:
            error = RequestError("no answer in time", RequestCode.TIMEOUT)
        except UsageError as exc:
            error = exc
        except BaseException:
            leg.close()
            raise
        finally:
            self._next = None
        if error is not None:
            leg.close()
            return error
        self.leg, self.lost = leg, False
        self.moves += 1
        _log.info("retrieval_taken_up", peer=connection.peer, moves=self.moves)
        old.close()
        self.traveller.moved()
        leg.take_over()
        return None

    async def _pause(self, tries: int, error: KvcsError) -> None:
        """Wait before the next try, or until the sessions have changed."""
        doublings = min(tries - 1, MAX_PAUSE_DOUBLINGS)
        seconds = self._settings.retry_pause * 2**doublings * (1 - 0.5 * self._chance.random())
        if isinstance(error, RequestError) and error.retry_after_ms is not None:
            seconds = max(seconds, retry_seconds(error.retry_after_ms, self._chance))
            await asyncio.sleep(seconds)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stirred.wait()
