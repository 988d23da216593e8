"""This endpoint's own authorization token: shown in SETUP, and renewed before it expires.

A token of SETUP cannot be replaced (MOQT §8.9). So a fresh one goes into every request made after
that, and into a REQUEST_UPDATE of each that is under way.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from kvcs.errors import ConnectionFailed, KvcsError, TrustError, UsageError
from kvcs.moqt.parameters import Parameters
from kvcs.moqt.requests import Kind, State
from kvcs.moqt.tokens import ResolvedToken, Token
from kvcs.observe import get_logger
from kvcs.trust import TOKEN_TYPE, read_claims

if TYPE_CHECKING:
    from kvcs.quic.connection import Connection

_log = get_logger("kvcs.quic")

TokenValue = str | bytes
"""A token: octets, or base64url text."""

TokenSource = TokenValue | Callable[[], TokenValue | Awaitable[TokenValue]]
"""A token, or what gives a fresh one whenever it is called; it may be a coroutine function."""

RENEW_BEFORE = 30.0
"""Seconds before its expiry at which a token is replaced."""

RENEW_SHARE = 0.2
"""The same as a part of what is left of its life, for short-lived ones; the shorter one counts."""

RETRY_SECONDS = 5.0
"""Pause after a source has failed, or gave no later token."""

PENDING_SECONDS = 0.5
"""Pause before requests are looked at again that had no answer yet when a token was replaced."""

PENDING_LOOKS = 120
"""How often they are."""

OUT_OF_BAND = 0
"""Token Type of a format agreed out of band."""

_UPDATED = (
    Kind.SUBSCRIBE,
    Kind.FETCH,
    Kind.PUBLISH,
    Kind.PUBLISH_NAMESPACE,
    Kind.SUBSCRIBE_NAMESPACE,
    Kind.SUBSCRIBE_TRACKS,
)


def token_octets(token: TokenValue | None) -> tuple[bytes, ...]:
    """A token's octets: as they are, or out of base64url text.

    Raises:
        UsageError: the text is not base64url. The message does not repeat it.
    """
    if token is None:
        return ()
    if isinstance(token, bytes):
        return (token,)
    text = token.strip()
    try:
        return (base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True),)
    except (binascii.Error, ValueError):
        raise UsageError("the token is not base64url text") from None


def resolved(token: TokenValue) -> tuple[ResolvedToken, float | None]:
    """A token with its type, and when it expires.

    Returns:
        The token, of type CAT where it is one; and Unix seconds, None where nothing tells.

    Raises:
        UsageError: the text is not base64url, or there is no token.
    """
    given = token_octets(token)
    if len(given) != 1:
        raise UsageError("the function that gives tokens gave none")
    [octets] = given
    try:
        return ResolvedToken(TOKEN_TYPE, octets), read_claims(octets).expires
    except TrustError:
        return ResolvedToken(OUT_OF_BAND, octets), None


class TokenKeeper:
    """Keeps an endpoint's token fresh on its sessions.

    Args:
        source: a token that never changes, or what gives a fresh one.
        clock: Unix seconds; the system's by default.
    """

    def __init__(self, source: TokenSource, clock: Callable[[], float] | None = None) -> None:
        self._source = source
        self._clock = time.time if clock is None else clock
        self._current: ResolvedToken | None = None
        self._expires: float | None = None
        self._connections: dict[Connection, None] = {}
        self._task: asyncio.Task[None] | None = None

    async def start(self, within: float) -> ResolvedToken:
        """Get the first token; from then on it is renewed in time, until `stop`.

        Args:
            within: seconds that the source has.

        Raises:
            UsageError: what the source gives is no token.
            ConnectionFailed: it has failed, or took too long.
        """
        try:
            async with asyncio.timeout(within):
                given = await self._ask()
        except TimeoutError as exc:
            raise ConnectionFailed(f"no token came within {within:g} s") from exc
        except KvcsError:
            raise
        except Exception as exc:
            # What a source says may hold secrets.
            raise ConnectionFailed(f"no token could be had: {type(exc).__name__}") from None
        self._current, self._expires = resolved(given)
        if callable(self._source) and self._expires is not None:
            self._task = asyncio.get_running_loop().create_task(self._keep())
        return self._current

    @property
    def current(self) -> ResolvedToken:
        """The newest token."""
        assert self._current is not None  # `start` has got the first one
        return self._current

    def attach(self, connection: Connection) -> None:
        """Renew the token on a session too, whose SETUP has the current one, until it closes."""
        self._connections[connection] = None
        connection.on_closed(lambda: self._connections.pop(connection, None))

    def stop(self) -> None:
        """Renew it no longer."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _ask(self) -> TokenValue:
        if not callable(self._source):
            return self._source
        given = self._source()
        return await given if inspect.isawaitable(given) else given

    async def _keep(self) -> None:
        while self._expires is not None:
            left = self._expires - self._clock()
            await asyncio.sleep(max(0.0, left - min(RENEW_BEFORE, RENEW_SHARE * left)))
            if not await self._renew():
                await asyncio.sleep(RETRY_SECONDS)

    async def _renew(self) -> bool:
        try:
            token, expires = resolved(await self._ask())
        except Exception as exc:
            # The source is the caller's: whatever it raises, the next try may succeed.
            _log.warning("token_not_renewed", reason=type(exc).__name__)
            return False
        if expires is not None and self._expires is not None and expires <= self._expires:
            _log.warning("token_not_renewed", reason="the source gives no later one")
            return False
        self._current, self._expires = token, expires
        for connection in list(self._connections):
            self._show(connection, token)
        return True

    def _show(self, connection: Connection, token: ResolvedToken) -> None:
        """Bring a fresh token to a session: to what is asked from now on, and what was."""
        connection.core.credentials.token = token
        asked = {
            request.request_id
            for request in connection.core.requests.all()
            if request.ours and request.kind in _UPDATED
        }
        self._update(connection, token, asked, PENDING_LOOKS)

    def _update(
        self, connection: Connection, token: ResolvedToken, asked: set[int], looks: int
    ) -> None:
        """REQUEST_UPDATE what is established; what has no answer yet is looked at again."""
        if not connection.is_open or connection.core.credentials.token is not token:
            return
        pending = set()
        parameters = Parameters.of(
            authorization_token=Token.use_value(token.value, token.token_type)
        )
        for request_id in asked:
            request = connection.core.requests.get(request_id)
            if request is None or request.state is State.TERMINATED:
                continue
            if request.state is State.PENDING:
                pending.add(request_id)
                continue
            try:
                connection.core.requester.update(request_id, parameters)
            except UsageError as exc:
                _log.debug("update_not_sent", reason=str(exc))
        if pending and looks:
            asyncio.get_running_loop().call_later(
                PENDING_SECONDS, self._update, connection, token, pending, looks - 1
            )
