"""Tokens at an endpoint that listens: every request of every session passes here first.

The rules are a relay's (`kvcs.access.policy`): what an outsider is told does not depend on what
there is, what a token has allowed ends with it, and a REQUEST_UPDATE with a fresh one prolongs it.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, Protocol

from kvcs.access.permits import Callback, Permits, Place, Timer
from kvcs.access.policy import Policy, Request
from kvcs.errors import FileError, RequestError, UsageError
from kvcs.keyfiles import RingFile
from kvcs.moqt import events
from kvcs.moqt.errors import RequestCode
from kvcs.moqt.names import TrackNamespace
from kvcs.moqt.session import Session
from kvcs.moqt.settings import SessionSettings
from kvcs.moqt.tokens import ResolvedToken
from kvcs.observe import get_logger, metrics
from kvcs.trust import Action, Asked, Authority, KeyRing, KeyUse, TokenVerifier
from kvcs.trust.tokens import CLOCK_SKEW, MAX_LIFETIME

_log = get_logger("kvcs.access")

Path = str | os.PathLike[str]

WILDCARDS: Final = ("", "0.0.0.0", "::")
"""Addresses of every interface: they name no endpoint."""

TOKEN_CACHE_OCTETS: Final = 16 * 1024
"""Octets of tokens that a peer of a guarded endpoint may register, unless its settings say so."""

ISSUERS_INTERVAL: Final = 5.0
"""Seconds between looks at the issuers' file."""


class Peer(Protocol):
    """A session that a guard looks after."""

    @property
    def core(self) -> Session:
        """The session's core."""

    def end_request(self, request_id: int, error: RequestError) -> None:
        """End a request of the peer that is allowed no longer."""


def check_audience(issuers: Path | None, audience: Sequence[str], host: str) -> None:
    """Check that tokens can be for an endpoint.

    Raises:
        UsageError: it is named and asks for none, or asks for some and has no name.
    """
    if audience and issuers is None:
        raise UsageError("audience needs issuers: without tokens it means nothing")
    if issuers is not None and not audience and host in WILDCARDS:
        raise UsageError(f"who listens on {host!r} needs a name for tokens: audience (--audience)")


def token_policy(
    issuers: KeyRing,
    audience: Sequence[str],
    *,
    skew: float = CLOCK_SKEW,
    max_lifetime: float = MAX_LIFETIME,
) -> Policy:
    """Who may do what, by tokens.

    Args:
        issuers: whose tokens count.
        audience: names of the endpoint: a token has to be for one of them.
        skew: seconds by which an issuer's clock may differ.
        max_lifetime: longest time from a token's issue to its expiry, seconds.
    """
    verifier = TokenVerifier(issuers, tuple(audience), skew=skew, max_lifetime=max_lifetime)
    return Policy(Authority(verifier), time.time)


def remembering(session: SessionSettings) -> SessionSettings:
    """Settings of sessions whose peers may register tokens, to name them by their alias."""
    if session.max_auth_token_cache_size:
        return session
    return replace(session, max_auth_token_cache_size=TOKEN_CACHE_OCTETS)


class Guard:
    """Decides about the requests of all sessions of one listening endpoint.

    Args:
        issuers: COSE_KeySet of the issuers whose tokens count; read again when it has changed.
        audience: names of the endpoint: a token has to be for one of them.

    Raises:
        FileError: the issuers cannot be read.
    """

    def __init__(self, issuers: Path, audience: Sequence[str]) -> None:
        self.unauthorized = 0
        """Requests refused, updates included."""
        self.ended = 0
        """Requests that were ended because they were allowed no longer."""
        self._file = RingFile(issuers, KeyUse.TOKEN)
        self._permits = Permits(
            token_policy(self._file.ring, audience), self._at, self._alive, self._end
        )
        self._peers: dict[int, Peer] = {}
        self._keys: dict[Peer, int] = {}
        self._next_key = 0
        self._watch: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Look at the issuers' file from time to time, until `stop`."""
        self._watch = asyncio.get_running_loop().call_later(ISSUERS_INTERVAL, self._look)

    def stop(self) -> None:
        """Look no more."""
        if self._watch is not None:
            self._watch.cancel()

    def reload(self) -> None:
        """Read the issuers again; what keys that are gone have allowed ends.

        Raises:
            FileError: the file cannot be read, or is no ring of issuers; then it is as it was.
        """
        self._file.reload()
        _log.info("issuers_read", keys=len(self._file.ring))
        self._permits.look_again(asyncio.get_running_loop().time())

    # One session

    def opened(self, peer: Peer, tokens: Sequence[ResolvedToken]) -> None:
        """A session has shown its tokens.

        Raises:
            SessionError: it is to be closed.
        """
        key = self._next_key
        self._next_key += 1
        self._permits.open(key, tokens)
        self._keys[peer], self._peers[key] = key, peer

    def closed(self, peer: Peer) -> None:
        """A session is over; quiet where it was never let in."""
        key = self._keys.pop(peer, None)
        if key is not None:
            del self._peers[key]
            self._permits.close(key)

    def check(self, peer: Peer, request: Request) -> None:
        """Check a request, before anything is done for it.

        Raises:
            RequestError: it is refused.
        """
        place = self._place(peer, request.request_id)
        try:
            self._permits.check(place, request, asyncio.get_running_loop().time())
        except RequestError as exc:
            self._refused(type(request).__name__.removesuffix("Received"), exc)
            raise

    def check_update(self, peer: Peer, update: events.RequestUpdateReceived) -> None:
        """Check a REQUEST_UPDATE; fresh tokens prolong its request.

        Raises:
            RequestError: it is refused, and its request ends.
        """
        place = self._place(peer, update.request_id)
        try:
            self._permits.check_update(place, update, asyncio.get_running_loop().time())
        except RequestError as exc:
            self._refused("RequestUpdate", exc)
            raise

    def forget(self, peer: Peer, request_id: int) -> None:
        """A request is over."""
        key = self._keys.get(peer)
        if key is not None:
            self._permits.forget(Place(key, request_id))

    def expires_ms(self, peer: Peer, request_id: int) -> int | None:
        """Milliseconds after which a request will be ended; None where nothing ends it."""
        key = self._keys.get(peer)
        return None if key is None else self._permits.expires_ms(Place(key, request_id))

    def may_hear(self, peer: Peer, namespace: TrackNamespace) -> bool:
        """Whether a session may be told of a namespace that it has not asked for."""
        key = self._keys.get(peer)
        wanted = Asked(Action.SUBSCRIBE_NAMESPACE, namespace)
        return key is not None and self._permits.may(key, wanted)

    # Inner workings

    def _place(self, peer: Peer, request_id: int) -> Place:
        key = self._keys.get(peer)
        if key is None:
            raise RequestError("the session was not let in", RequestCode.UNAUTHORIZED)
        return Place(key, request_id)

    def _look(self) -> None:
        if self._file.changed():
            try:
                self.reload()
            except FileError as exc:
                _log.error("issuers_not_read", reason=str(exc))
        self.start()

    def _refused(self, request: str, error: RequestError) -> None:
        self.unauthorized += 1
        metrics.requests_unauthorized.add(request=request, code=RequestCode(error.code).name)
        _log.info("unauthorized", request=request, code=int(error.code), reason=error.reason)

    def _at(self, when: float, callback: Callback) -> Timer:
        loop = asyncio.get_running_loop()
        return loop.call_at(when, lambda: callback(loop.time()))

    def _alive(self, place: Place) -> bool:
        peer = self._peers.get(place.session)
        return peer is not None and peer.core.requests.get(place.request_id) is not None

    def _end(self, place: Place, error: RequestError, now: float) -> None:
        self.ended += 1
        _log.info("permit_ended", reason=error.reason)
        self._peers[place.session].end_request(place.request_id, error)
