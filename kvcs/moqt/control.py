"""The control streams of a session: SETUP first, then only GOAWAY (MOQT §6.3, §9.1, §9.2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcs.errors import RequestError, SessionError, UsageError
from kvcs.moqt import messages
from kvcs.moqt.actions import Send
from kvcs.moqt.errors import ProtocolViolation, RequestCode, SessionCode, StreamCode
from kvcs.moqt.events import GoawayReceived, RequestCancelled, SessionEstablished
from kvcs.moqt.framing import MessageReader, encode_message
from kvcs.moqt.properties import KeyValues, SetupOption, check_setup_options, setup_tokens
from kvcs.moqt.requests import Request, State
from kvcs.moqt.settings import Role, SessionSettings
from kvcs.moqt.states import ControlInput, Phase, next_phase
from kvcs.moqt.tokens import ResolvedToken, Token
from kvcs.moqt.wire import TYPE_IDS

if TYPE_CHECKING:
    from kvcs.moqt.session import Session

_FIRST = frozenset({TYPE_IDS[messages.Setup]})
_LATER = frozenset({TYPE_IDS[messages.Goaway]})
_TOKEN_CODES: dict[int, SessionCode] = {
    RequestCode.MALFORMED_AUTH_TOKEN: SessionCode.MALFORMED_AUTH_TOKEN,
    RequestCode.UNKNOWN_AUTH_TOKEN_ALIAS: SessionCode.UNKNOWN_AUTH_TOKEN_ALIAS,
}
"""Session codes for what is wrong with a token of SETUP (§8.9)."""


def setup_options(role: Role, settings: SessionSettings) -> KeyValues:
    """Setup Options that an endpoint of ``role`` sends (§9.1)."""
    options: list[tuple[int, int | bytes]] = []
    if role is Role.CLIENT and settings.authority:
        options.append((SetupOption.PATH, settings.path.encode()))
        options.append((SetupOption.AUTHORITY, settings.authority.encode()))
    for shown in settings.tokens:
        token = shown if isinstance(shown, ResolvedToken) else ResolvedToken(0, shown)
        value = Token.use_value(token.value, token.token_type).write()
        options.append((SetupOption.AUTHORIZATION_TOKEN, value))
    if settings.max_auth_token_cache_size:
        options.append((SetupOption.MAX_AUTH_TOKEN_CACHE_SIZE, settings.max_auth_token_cache_size))
    options.append((SetupOption.MAX_FILTER_RANGES, settings.max_filter_ranges))
    options.append((SetupOption.MOQT_IMPLEMENTATION, settings.implementation.encode()))
    options.append((SetupOption.MAX_REQUEST_UPDATES, settings.max_request_updates))
    options.extend(settings.further_options)
    return KeyValues.of(options)


class ControlStreams:
    """Our control stream and the peer's.

    Args:
        session: the session that they belong to.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.ours: int | None = None
        """Stream ID of our control stream, once it is open."""
        self.peers: int | None = None
        """Stream ID of the peer's control stream, once it has begun."""
        self.peer_options: KeyValues | None = None
        """Setup Options of the peer, once they are there."""
        self.goaway_sent = False
        self._reader = MessageReader(_FIRST, _LATER)
        self._phase = Phase.AWAITING_SETUP

    @property
    def phase(self) -> Phase:
        """Where the session stands."""
        return Phase.CLOSED if self._session.closed else self._phase

    def open(self, stream_id: int) -> Send:
        """Our control stream begins with SETUP."""
        self.ours = stream_id
        options = setup_options(self._session.role, self._session.settings)
        return Send(stream_id, (encode_message(messages.Setup(options)),))

    def goaway(self, new_session_uri: str, timeout_ms: int) -> Send | None:
        """GOAWAY, once; None where it cannot go out.

        Raises:
            UsageError: a client names a New Session URI.
        """
        if self.goaway_sent or self.ours is None:
            return None
        message = encode_message(self._goaway(new_session_uri, timeout_ms))
        self.goaway_sent = True
        return Send(self.ours, (message,))

    def goaway_request(
        self, request_id: int, new_session_uri: str = "", timeout_ms: int = 0, *, now: float
    ) -> None:
        """Ask the peer to move one request, by a GOAWAY on its stream, once (§9.2).

        When the time is over and the request is still there, its stream is reset with GOING_AWAY.

        Args:
            request_id: a request of either side.
            new_session_uri: where it should go instead; empty for this session; servers only.
            timeout_ms: how long the peer has; 0 names no deadline, and then it is not reset.
            now: the caller's clock, seconds.

        Raises:
            UsageError: there is no such request, it waits for stream credit, so that GOAWAY would
                be the first message of its stream, our direction of it has ended, or a client
                names a New Session URI.
        """
        session = self._session
        request = session.requests.get(request_id)
        if request is None or request.state is State.TERMINATED:
            raise UsageError(f"there is no request {request_id}")
        if request.stream_id < 0:
            raise UsageError(f"request {request_id} has not been sent yet; cancel it instead")
        if request.sending_ended:
            raise UsageError(f"our direction of request {request_id} has ended")
        goaway = self._goaway(new_session_uri, timeout_ms)
        if request.goaway_sent:
            return
        session.tell_time(now)
        session.requests.send(request, goaway)
        request.goaway_sent = True
        if timeout_ms:
            session.at(now + timeout_ms / 1000, lambda _: self._request_expired(request))

    def _request_expired(self, request: Request) -> None:
        """The peer has not moved the request in time."""
        session, request_id = self._session, request.request_id
        if session.requests.get(request_id) is not request or request.state is State.TERMINATED:
            return
        session.emit(RequestCancelled(request_id, request.ours, StreamCode.GOING_AWAY))
        if request.ours:
            session.requester.cancel(request_id, StreamCode.GOING_AWAY)
        else:
            session.responder.revoke(request_id, StreamCode.GOING_AWAY)

    def _goaway(self, new_session_uri: str, timeout_ms: int) -> messages.Goaway:
        if new_session_uri and self._session.role is Role.CLIENT:
            raise UsageError("a client's GOAWAY has no New Session URI")
        return messages.Goaway(new_session_uri, timeout_ms)

    def receive(self, stream_id: int, data: bytes, fin: bool) -> bool:
        """Octets of the peer's control stream.

        Returns:
            Whether they completed the peer's SETUP.

        Raises:
            SessionError: it is a second control stream, or a message breaks a rule, or it ended.
        """
        if self.peers is None:
            self.peers = stream_id
        elif stream_id != self.peers:
            self._step(ControlInput.OTHER, "a second control stream")
        established = False
        for message in self._reader.feed(data):
            if isinstance(message, messages.Goaway):
                self.take_goaway(message)
            else:
                assert isinstance(message, messages.Setup)  # the reader lets nothing else through
                self._take_setup(message)
                established = True
        self._reader.check()
        if fin:
            self.ended("the control stream was closed")
        return established

    def ended(self, how: str) -> None:
        """A control stream ended, which it must not while the session lives (§6.3).

        Raises:
            ProtocolViolation: always; ``how`` says what happened.
        """
        self._step(ControlInput.ENDED, how)

    def _step(self, what: ControlInput, text: str) -> None:
        self._phase = next_phase(self.phase, what, text)

    def _take_setup(self, setup: messages.Setup) -> None:
        session = self._session
        check_setup_options(setup.options, from_client=session.role is Role.SERVER)
        try:
            tokens = session.tokens.process(setup_tokens(setup.options), in_setup=True)
        except RequestError as exc:
            # SETUP has no reply that could refuse it.
            code = _TOKEN_CODES.get(exc.code, SessionCode.UNAUTHORIZED)
            raise SessionError(exc.reason, code) from exc
        self._step(ControlInput.SETUP, "a second SETUP")
        self.peer_options = setup.options
        session.emit(SessionEstablished(setup.options, tokens))

    def take_goaway(self, goaway: messages.Goaway, request: Request | None = None) -> None:
        """A GOAWAY of the peer, for the session or for one request (§9.2).

        Raises:
            ProtocolViolation: it is the second one there, or a client names a New Session URI.
        """
        if request is None:
            self._step(ControlInput.GOAWAY, "a second GOAWAY")
        elif request.goaway_received:
            raise ProtocolViolation("a second GOAWAY")
        else:
            request.goaway_received = True
        if goaway.new_session_uri and self._session.role is Role.SERVER:
            raise ProtocolViolation("a client's GOAWAY has a New Session URI")
        request_id = None
        if request is not None:
            if request.abandoned or request.state is State.TERMINATED:
                return  # it is over: there is nothing to move
            request_id = request.request_id
        self._session.emit(GoawayReceived(request_id, goaway.new_session_uri, goaway.timeout_ms))

    def expired(self, requests_open: bool) -> tuple[int, str]:
        """Session code and reason when the time of our GOAWAY is over (§9.2)."""
        if requests_open:
            return SessionCode.GOAWAY_TIMEOUT, "requests were open when GOAWAY ran out"
        return SessionCode.NO_ERROR, ""
