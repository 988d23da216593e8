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

from kvcs.errors import ConnectionClosed, KvcsError, Redirected, RequestError, UsageError
from kvcs.kv import DataTrack, SegmentEntry
from kvcs.moqt.errors import RequestCode
from kvcs.moqt.names import FullTrackName
from kvcs.observe import get_logger
from kvcs.quic.chance import new_chance
from kvcs.quic.connection import Connection
from kvcs.quic.reconnect import Moves, retry_seconds
from kvcs.subscriber.leg import Beside, Leg, Traveller
from kvcs.subscriber.manifests import RENDEZVOUS_SECONDS, ManifestFollower
from kvcs.subscriber.patience import Patience
from kvcs.subscriber.receiver import TrackReceiver
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
        self._sent_away = Moves()
        self._why = ""
        """Why nobody serves the retrieval, where that is so."""
        self._patience = Patience(settings.patience, self._given_up)
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

    @property
    def sources(self) -> list[Connection]:
        """Sessions that may have what lacks; that of the current leg is the first."""
        connection = self.leg.connection
        return [connection, *(each for each in self._routes.usable if each is not connection)]

    def receiver(
        self, track: DataTrack, connection: Connection, *, beside: bool = False
    ) -> TrackReceiver:
        """Receiver of a data track for a FETCH over the current session, or beside it."""
        if connection is self.leg.connection and not beside:
            return self.leg.reception.receiver(track)
        return TrackReceiver(connection, self.traveller.ledger, track, Beside(self.traveller))

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
        self._interrupted("the peer sent the retrieval away: its publisher may be gone")
        now = asyncio.get_running_loop().time()
        self._move(uri, self._sent_away.pause(now, self._chance))

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
            self._interrupted(str(error))
            self.look()

    def settled(self) -> None:
        """Nothing more is wanted: no session is needed any more."""
        self._patience.stop()
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

    def _interrupted(self, why: str) -> None:
        """Nobody serves the retrieval until the next leg does."""
        self._why = why
        self._patience.interrupted(self.traveller.ledger.counters.verified)
        self.traveller.between()

    def _given_up(self) -> None:
        seconds = self._settings.patience
        self.traveller.failed(
            ConnectionClosed(f"{self._why}; nobody served it again within {seconds:g} s")
        )

    def _move(self, uri: str, pause: float = 0.0) -> None:
        self._task = asyncio.get_running_loop().create_task(self._go_on(uri, pause))

    async def _go_on(self, uri: str, pause: float) -> None:
        """Find a session that serves the retrieval, after a pause, and go on over it."""
        tries = hops = 0
        try:
            await asyncio.sleep(pause)
            while True:
                self._stirred.clear()
                error: KvcsError | None
                try:
                    error = await self._try(await self._target(uri, tries), self._answers_in(tries))
                except KvcsError as exc:
                    if not self._routes.last:
                        raise self._routes.error() from exc
                    error = exc
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

    def _answers_in(self, tries: int) -> float:
        """Seconds that a session's answers have: few where there is another one to be tried, so
        that a slow one does not eat the deadline."""
        if len(self._routes.usable) < 2:
            return ANSWER_SECONDS
        doubled = self._settings.quiet * 2 ** min(tries, MAX_PAUSE_DOUBLINGS)
        return float(min(ANSWER_SECONDS, doubled))

    async def _try(self, connection: Connection, patience: float) -> KvcsError | None:
        """Take the retrieval up over a session; None where that has replaced the old one."""
        # The publisher may be on its way there too; where there is another relay, that is tried.
        rendezvous = 0.0 if len(self._routes.usable) > 1 else RENDEZVOUS_SECONDS
        old = self.leg
        follower = old.follower.on_another_session(connection, rendezvous, lambda: None)
        leg = self._next = Leg(self, connection, follower)
        connection.on_goaway(self.look)
        try:
            leg.resume(rendezvous)
            async with asyncio.timeout(patience):
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
        self._patience.resumed()
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
