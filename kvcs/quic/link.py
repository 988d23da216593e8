"""The way to one relay: a session, and the next one when that is lost or sent away (MOQT §9.2)."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

from kvcs.errors import (
    CertificateError,
    ConnectionClosed,
    ConnectionFailed,
    UsageError,
)
from kvcs.moqt import messages
from kvcs.moqt.errors import SessionCode
from kvcs.moqt.uri import MoqtUri, parse_uri
from kvcs.observe import get_logger
from kvcs.quic.chance import new_chance
from kvcs.quic.connection import Connection
from kvcs.quic.origin import Origin
from kvcs.quic.reconnect import INITIAL_SECONDS, Reconnect

_log = get_logger("kvcs.quic")

TOKEN_REFUSED: Final = (SessionCode.UNAUTHORIZED, SessionCode.MALFORMED_AUTH_TOKEN)
"""Closes of a first session that the next one would meet, too: its token is no good there. One that
has expired may be another by then."""

HOME_AFTER = 2
"""Failed tries at a URI that a GOAWAY named, before it and the client's own take turns."""


class Opener(Protocol):
    """Opens one session, with the same TLS settings and token whatever the URI."""

    def __call__(
        self, uri: MoqtUri, /, *, link: Link, origin: Origin | None
    ) -> Awaitable[Connection]:
        """Open a session of ``link`` and wait for the peer's SETUP.

        Args:
            uri: where to.
            link: what replaces it when it is lost.
            origin: what it offers; nothing where None.
        """


class Link:
    """Keeps a session with a relay while it can; `Connection.link`.

    A lost session is opened again, with pauses that grow and vary by chance. On GOAWAY the next one
    is opened first, at the New Session URI if there is one; what is published is announced there
    before it is withdrawn here, retrievals go on there, and then the old session is closed.

    Args:
        open_session: opens a session.
        uri: the relay's own.
        policy: the numbers.
        chance: where randomness comes from.
    """

    def __init__(
        self,
        open_session: Opener,
        uri: MoqtUri,
        policy: Reconnect,
        chance: random.Random | None = None,
    ) -> None:
        self.policy = policy
        self.origin = Origin(returns=lambda: self.is_open)
        """What is published; offered on every session, one after the other."""
        self.sessions = 0
        """Sessions opened so far, one after the other."""
        self.retries = 0
        """Tries so far that opened none, those for the first session included."""
        self._open_session = open_session
        self._home = uri
        self._uri = uri
        self._chance = new_chance() if chance is None else chance
        self._loop = asyncio.get_running_loop()
        self._current: Connection | None = None
        self._since = 0.0
        self._tries = 0
        self._hops = 0
        self._error: ConnectionClosed | None = None
        self._stirred = asyncio.Event()
        self._listeners: list[Callable[[], None]] = []
        self._task: asyncio.Task[None] | None = None
        self._leaving: dict[asyncio.Task[None], Connection] = {}
        self._elsewhere: dict[Connection, _Place] = {}
        self._elsewhere_lock = asyncio.Lock()

    # Facts

    @property
    def current(self) -> Connection:
        """The newest session; it may be over while the next one is on its way."""
        assert self._current is not None  # `start` has opened the first one
        return self._current

    @property
    def is_open(self) -> bool:
        """Whether there is a session, or one may still come."""
        return self._error is None

    def error(self) -> ConnectionClosed:
        """Why no session comes any more."""
        return ConnectionClosed("the session is open") if self._error is None else self._error

    def is_beside(self, connection: Connection) -> bool:
        """Whether a session was opened by `elsewhere`, beside those that follow each other."""
        return connection in self._elsewhere

    def on_change(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` whenever a session came, went, is sent away, or none will come."""
        self._listeners.append(callback)

    def off_change(self, callback: Callable[[], None]) -> None:
        """Undo `on_change`."""
        if callback in self._listeners:
            self._listeners.remove(callback)

    async def session(self) -> Connection:
        """The session on which new requests may be made; waits for one if need be.

        Raises:
            ConnectionClosed: none comes any more.
        """
        changed = asyncio.Event()
        self.on_change(changed.set)
        try:
            while not self.current.is_usable:
                if self._error is not None:
                    raise self._error
                changed.clear()
                await changed.wait()
            return self.current
        finally:
            self.off_change(changed.set)

    # Life

    async def start(self, initial: float | None = None) -> Connection:
        """Open the first session, and keep one from then on.

        Args:
            initial: seconds for which it is tried for again where nobody listens yet. A peer that
                refuses our token is asked once.

        Raises:
            CertificateError: the peer's certificate does not verify.
            ConnectionFailed: nobody answered in time.
            ConnectionClosed: the peer closed before its SETUP.
            UsageError: a setting cannot be used.
        """
        until = self._loop.time() + (INITIAL_SECONDS if initial is None else initial)
        while True:
            try:
                connection = await self._open_session(self._home, link=self, origin=self.origin)
                break
            except CertificateError:
                raise
            except (ConnectionFailed, ConnectionClosed) as exc:
                self._tries += 1
                self.retries += 1
                left = until - self._loop.time()
                refused = isinstance(exc, ConnectionClosed) and exc.code in TOKEN_REFUSED
                if refused or left <= 0:
                    raise
                _log.debug("connecting_again", uri=str(self._home), why=str(exc))
                # The last try comes when the time is up: pauses double, and would cut it in half.
                await asyncio.sleep(min(self.policy.pause(self._tries, self._chance), left))
        self._tries = 0
        self._take(connection)
        self._task = self._loop.create_task(self._run())
        return connection

    async def close(self, code: int = SessionCode.NO_ERROR, reason: str = "") -> None:
        """Close every session; nothing comes back.

        Args:
            code: session close code that peers get.
            reason: what they are told with it.
        """
        if self._error is None:
            why = reason or "the connection was closed by its user"
            self._end(ConnectionClosed(why, code=code))
        tasks = [*self._leaving, *([] if self._task is None else [self._task])]
        sessions = [*self._leaving.values(), *self._elsewhere]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._current is not None:  # the newest one, which a task may have opened last
            sessions.append(self._current)
        await asyncio.gather(*(each.close_alone(code, reason) for each in sessions))
        await self.origin.close()

    async def elsewhere(self, uri: str) -> Connection:
        """A session with another relay that a redirect names; opened, or used again.

        Args:
            uri: its `moqt` URI; empty for the session of now.

        Raises:
            UsageError: it is no `moqt` URI, or there are `max_elsewhere` such sessions.
            ConnectionFailed: it cannot be opened, or its certificate does not verify.
            ConnectionClosed: it was closed before its SETUP, or the connection has ended.
        """
        if not uri:
            return await self.session()
        target = parse_uri(uri)
        async with self._elsewhere_lock:
            if self._error is not None:
                raise self._error
            place = _place(target)
            if self.current.is_usable and place == _place(self._uri):
                return self.current
            # One that is sent away stays until it is over: its peer may leave that to us.
            self._elsewhere = {each: at for each, at in self._elsewhere.items() if each.is_open}
            for known, at in self._elsewhere.items():
                if at == place and known.is_usable:
                    return known
            if len(self._elsewhere) >= self.policy.max_elsewhere:
                raise UsageError(
                    f"not redirected to {uri}: {len(self._elsewhere)} other sessions are open"
                )
            connection = await self._open_session(target, link=self, origin=None)
            if not self.is_open:  # it was closed meanwhile
                await connection.close_alone()
                raise self.error()
            self._elsewhere[connection] = place
            _log.info("redirected", uri=str(target))
            return connection

    # Inner workings

    def _take(self, connection: Connection) -> None:
        self._current = connection
        self._since = self._loop.time()
        self.sessions += 1
        connection.on_closed(self._stir)
        connection.on_goaway(self._stir)
        self._tell()

    def _stir(self) -> None:
        self._stirred.set()
        self._tell()

    def _end(self, error: ConnectionClosed) -> None:
        """No session comes any more: whoever waits for one is told."""
        self._error = error
        self.origin.nothing_returns()
        self._tell()

    def _tell(self) -> None:
        for callback in list(self._listeners):
            callback()

    async def _run(self) -> None:
        try:
            while True:
                while self.current.is_usable:
                    self._stirred.clear()
                    await self._stirred.wait()
                await self._replace(self.current)
        except ConnectionClosed as exc:
            _log.info("reconnecting_given_up", uri=str(self._home), reason=str(exc))
            self._end(exc)

    async def _replace(self, old: Connection) -> None:
        """Open the session that follows ``old``.

        Raises:
            ConnectionClosed: there was none within the time.
        """
        policy, loop = self.policy, self._loop
        if loop.time() - self._since >= policy.settled:
            self._tries = self._hops = 0
        target = named = self._target(old)
        failures = 0
        lost_at: float | None = None
        why = ""
        while True:
            pause = policy.pause(self._tries, self._chance)
            if not old.is_open:
                lost_at = loop.time() if lost_at is None else lost_at
                if policy.deadline is not None:
                    left = lost_at + policy.deadline - loop.time()
                    if left <= 0:
                        raise _given_up(old.close_error(), policy.deadline, why)
                    pause = min(pause, left)
            await self._pause(pause, old)
            self._tries += 1
            try:
                connection = await self._open_session(target, link=self, origin=self.origin)
            except (ConnectionFailed, ConnectionClosed, UsageError) as exc:
                why = str(exc)
                failures += 1
                self.retries += 1
                _log.info("reconnecting", uri=str(target), tries=self._tries, why=why)
                if failures >= HOME_AFTER:
                    target = self._home if target != self._home else named
                if not old.is_held:
                    await self._close_old(old)
                continue
            break
        _log.info("reconnected", uri=str(target), tries=self._tries)
        self._uri = target
        self._take(connection)
        if old.is_open:
            task = loop.create_task(self._leave(old, connection))
            self._leaving[task] = old
            task.add_done_callback(lambda done: self._leaving.pop(done, None))

    def _target(self, old: Connection) -> MoqtUri:
        """Where the next session goes: a New Session URI counts, if it can be followed (§9.2)."""
        goaway = old.goaway_received
        text = "" if goaway is None else goaway.new_session_uri
        if not text:
            return self._uri
        if self._hops >= self.policy.max_hops:
            _log.warning("goaway_not_followed", uri=text, hops=self._hops)
            return self._home
        try:
            target = parse_uri(text)
        except UsageError as exc:
            _log.warning("goaway_not_followed", why=str(exc))
            return self._home
        self._hops += 1
        return target

    async def _pause(self, seconds: float, old: Connection) -> None:
        """Wait before a try; no longer than a session that was sent away is needed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                if old.is_held:
                    await old.released()
                    if old.is_open:
                        return
                await asyncio.Event().wait()

    async def _leave(self, old: Connection, new: Connection) -> None:
        """Close a session that was sent away once nothing comes over it any more."""
        policy, goaway = self.policy, old.goaway_received
        seconds = policy.leave
        if goaway is not None and goaway.timeout_ms:
            seconds = min(seconds, goaway.timeout_ms / 1000)
        try:
            async with asyncio.timeout(seconds):
                await self.origin.answered(new)
                self.origin.leave(old)
                await old.released()
                await self._unfollowed(old)
        except TimeoutError:
            _log.info("left_in_use", peer=old.peer, seconds=seconds)
        await self._close_old(old)

    async def _unfollowed(self, old: Connection) -> None:
        """Wait for the peer to leave the Tracks that it follows on a session, for a short time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.policy.linger):
                while old.is_open and _is_followed(old):
                    await old.progressed()

    async def _close_old(self, old: Connection) -> None:
        """Close a session, its last octets acknowledged if the peer does that soon."""
        if old.is_open:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.policy.linger):
                    await old.drain()
            await old.close_alone()


def _given_up(lost: ConnectionClosed, seconds: float, why: str) -> ConnectionClosed:
    reason = f"{lost.reason or 'lost'}; no session followed within {seconds:g} s"
    if why:
        reason += f": {why}"
    return ConnectionClosed(reason, code=lost.code, by_peer=lost.by_peer)


def _is_followed(connection: Connection) -> bool:
    """Whether the peer has a SUBSCRIBE or FETCH open."""
    return any(
        not request.ours and isinstance(request.message, messages.Subscribe | messages.Fetch)
        for request in connection.core.requests.all()
    )


_Place = tuple[str, int, str]
"""Host, port and path of a URI."""


def _place(uri: MoqtUri) -> _Place:
    return (uri.host, uri.port, uri.path)
