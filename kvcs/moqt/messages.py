"""The control messages of draft-ietf-moq-transport-22, each declared once (MOQT §9).

Field names are the draft's. Code fields stay plain integers: unknown codes are legal and count as
INTERNAL_ERROR of their space (§13). Checks that need to know the request or who sent the message
are functions at the end; the session calls them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Protocol

from kvcs.moqt.errors import ProtocolViolation, RequestCode
from kvcs.moqt.names import MAX_NAME_OCTETS, Location, TrackNamespace
from kvcs.moqt.parameters import ParameterList, Parameters, Scope, check_scope
from kvcs.moqt.properties import KEY_VALUES, KeyValues
from kvcs.moqt.wire import (
    FLAG,
    LOCATION,
    MAX_MESSAGE_BODY,
    NAMESPACE,
    PREFIXED,
    REASON,
    TYPE_IDS,
    VI64,
    Reader,
    Text,
    message,
)

__all__ = [
    "DRAFT",
    "FOLLOWUPS",
    "MAX_GOAWAY_URI_OCTETS",
    "REQUESTS",
    "SETUP_TYPE",
    "STREAM_COUNT_UNKNOWN",
    "Fetch",
    "FetchOk",
    "Goaway",
    "Message",
    "Namespace",
    "NamespaceDone",
    "Publish",
    "PublishDone",
    "PublishNamespace",
    "PublishSkipped",
    "PublishStateNotify",
    "Redirect",
    "RequestError",
    "RequestOk",
    "RequestUpdate",
    "Setup",
    "Subscribe",
    "SubscribeNamespace",
    "SubscribeOk",
    "SubscribeTracks",
    "TrackStatus",
    "check_fetch_ok",
    "check_goaway",
    "check_request_error",
    "check_request_ok",
    "retry_after_ms",
]

DRAFT = "draft-ietf-moq-transport-22"
"""The draft these messages speak; on native QUIC the ALPN is ``moqt-22``."""

SETUP_TYPE = 0x2F00
"""Type of SETUP, and so the first integer of a control stream."""

MAX_GOAWAY_URI_OCTETS = 8192
"""Octets of New Session URI (§9.2)."""

STREAM_COUNT_UNKNOWN = 2**64 - 1
"""Stream Count of a PUBLISH_DONE whose sender cannot say (§9.9)."""


def _check_name(namespace: TrackNamespace, name: bytes) -> None:
    total = sum(map(len, namespace)) + len(name)
    if total > MAX_NAME_OCTETS:
        raise ProtocolViolation(f"Full Track Name has {total} octets, limit {MAX_NAME_OCTETS}")


class _HasName(Protocol):
    @property
    def track_namespace(self) -> TrackNamespace: ...
    @property
    def track_name(self) -> bytes: ...


class _Named:
    """A message with a Full Track Name, whose parts have a limit in common (§2.4)."""

    __slots__ = ()

    def check(self: _HasName) -> None:
        """Raise `ProtocolViolation` when the name is too long."""
        _check_name(self.track_namespace, self.track_name)


@message(SETUP_TYPE)
@dataclass(frozen=True, slots=True)
class Setup:
    """First message on either control stream (§9.1)."""

    options: Annotated[KeyValues, KEY_VALUES] = field(repr=False)
    """Setup Options; `check_setup_options` holds them to their rules. Tokens are among them, so
    none shows in ``repr``."""


@message(0x10)
@dataclass(frozen=True, slots=True)
class Goaway:
    """Ask to move the session, or one request, elsewhere (§9.2)."""

    new_session_uri: Annotated[str, Text("New Session URI", MAX_GOAWAY_URI_OCTETS)]
    """Where to; empty for the same URI, and always from a client."""

    timeout_ms: Annotated[int, VI64]
    """Milliseconds until the sender gives up waiting; 0 for no deadline."""


# -------------------------------------------------------------------------- subscriptions


@message(0x03)
@dataclass(frozen=True, slots=True)
class Subscribe(_Named):
    """Ask for the Objects of a Track as they are published (§9.6)."""

    request_id: Annotated[int, VI64]
    track_namespace: Annotated[TrackNamespace, NAMESPACE]
    track_name: Annotated[bytes, PREFIXED]
    parameters: Annotated[Parameters, ParameterList(Scope.SUBSCRIBE)]


@message(0x04)
@dataclass(frozen=True, slots=True)
class SubscribeOk:
    """Accept a SUBSCRIBE (§9.7)."""

    track_alias: Annotated[int, VI64]
    """What the data streams of this Track are marked with."""

    parameters: Annotated[Parameters, ParameterList(Scope.SUBSCRIBE_OK)]
    track_properties: Annotated[KeyValues, KEY_VALUES]


@message(0x1D)
@dataclass(frozen=True, slots=True)
class Publish(_Named):
    """Start a subscription from the publisher's side (§9.8)."""

    request_id: Annotated[int, VI64]
    track_namespace: Annotated[TrackNamespace, NAMESPACE]
    track_name: Annotated[bytes, PREFIXED]
    track_alias: Annotated[int, VI64]
    parameters: Annotated[Parameters, ParameterList(Scope.PUBLISH)]
    track_properties: Annotated[KeyValues, KEY_VALUES]


@message(0x0B)
@dataclass(frozen=True, slots=True)
class PublishDone:
    """End a subscription from the publisher's side (§9.9)."""

    status_code: Annotated[int, VI64]
    """A `PublishDoneCode`, or one we do not know."""

    stream_count: Annotated[int, VI64]
    """Data streams opened for the subscription, or `STREAM_COUNT_UNKNOWN`."""

    reason: Annotated[str, REASON]


@message(0x22)
@dataclass(frozen=True, slots=True)
class PublishStateNotify:
    """Tell a subscriber what has changed; never answered (§9.10)."""

    parameters: Annotated[Parameters, ParameterList(Scope.PUBLISH_STATE_NOTIFY)]


# ------------------------------------------------------------------------ fetch and status


@message(0x16)
@dataclass(frozen=True, slots=True)
class Fetch(_Named):
    """Ask for a range of past Objects on one stream (§9.11)."""

    request_id: Annotated[int, VI64]
    track_namespace: Annotated[TrackNamespace, NAMESPACE]
    track_name: Annotated[bytes, PREFIXED]
    parameters: Annotated[Parameters, ParameterList(Scope.FETCH)]


@message(0x18)
@dataclass(frozen=True, slots=True)
class FetchOk:
    """Accept a FETCH (§9.12)."""

    end_of_track: Annotated[bool, FLAG]
    """Whether all is published and ``end_location`` is the last Object."""

    end_location: Annotated[Location, LOCATION]
    """End of the range that is served, inclusive."""

    parameters: Annotated[Parameters, ParameterList(Scope.FETCH_OK)]
    track_properties: Annotated[KeyValues, KEY_VALUES]


@message(0x0D)
@dataclass(frozen=True, slots=True)
class TrackStatus(_Named):
    """Ask about a Track without subscribing to it (§9.13)."""

    request_id: Annotated[int, VI64]
    track_namespace: Annotated[TrackNamespace, NAMESPACE]
    track_name: Annotated[bytes, PREFIXED]
    parameters: Annotated[Parameters, ParameterList(Scope.TRACK_STATUS)]


# ------------------------------------------------------------------------------ namespaces


@message(0x06)
@dataclass(frozen=True, slots=True)
class PublishNamespace:
    """Say that there are Tracks under a prefix (§9.14)."""

    request_id: Annotated[int, VI64]
    track_namespace_prefix: Annotated[TrackNamespace, NAMESPACE]
    parameters: Annotated[Parameters, ParameterList(Scope.PUBLISH_NAMESPACE)]


@message(0x50)
@dataclass(frozen=True, slots=True)
class SubscribeNamespace:
    """Ask for the namespaces under a prefix (§9.15)."""

    request_id: Annotated[int, VI64]
    track_namespace_prefix: Annotated[TrackNamespace, NAMESPACE]
    parameters: Annotated[Parameters, ParameterList(Scope.SUBSCRIBE_NAMESPACE)]


@message(0x08)
@dataclass(frozen=True, slots=True)
class Namespace:
    """A namespace under the prefix of a SUBSCRIBE_NAMESPACE (§9.16)."""

    track_namespace_suffix: Annotated[TrackNamespace, NAMESPACE]
    """Fields behind the prefix; none when they are equal."""


@message(0x0E)
@dataclass(frozen=True, slots=True)
class NamespaceDone:
    """A namespace that was announced is gone (§9.17)."""

    track_namespace_suffix: Annotated[TrackNamespace, NAMESPACE]


@message(0x51)
@dataclass(frozen=True, slots=True)
class SubscribeTracks:
    """Ask for a PUBLISH of every Track under a prefix (§9.18)."""

    request_id: Annotated[int, VI64]
    track_namespace_prefix: Annotated[TrackNamespace, NAMESPACE]
    parameters: Annotated[Parameters, ParameterList(Scope.SUBSCRIBE_TRACKS)]


@message(0x0F)
@dataclass(frozen=True, slots=True)
class PublishSkipped:
    """A Track that SUBSCRIBE_TRACKS matches and that no PUBLISH will offer (§9.19)."""

    track_namespace_suffix: Annotated[TrackNamespace, NAMESPACE]
    track_name: Annotated[bytes, PREFIXED]

    def check(self) -> None:
        """Raise `ProtocolViolation` when the name is too long."""
        _check_name(self.track_namespace_suffix, self.track_name)


# --------------------------------------------------------------------- updates and replies


@message(0x02)
@dataclass(frozen=True, slots=True)
class RequestUpdate:
    """Change a request; what is absent stays as it is (§9.5)."""

    request_id: Annotated[int, VI64]
    """A new one, of the sender's own sequence."""

    parameters: Annotated[Parameters, ParameterList(Scope.REQUEST_UPDATE)]
    """Within the scope of any update; `check_scope` narrows it to the request's."""


@message(0x07)
@dataclass(frozen=True, slots=True)
class RequestOk:
    """Accept a request or an update (§9.3)."""

    parameters: Annotated[Parameters, ParameterList(Scope.REQUEST_OK)]
    """Within the scope of any OK; `check_request_ok` narrows it to the request's."""

    track_properties: Annotated[KeyValues, KEY_VALUES]
    """Empty but in the reply to TRACK_STATUS."""


@dataclass(frozen=True, slots=True)
class Redirect:
    """Where a refused request may be made instead (§9.4)."""

    connect_uri: str
    """Session to use; empty for this one."""

    track_namespace: TrackNamespace
    track_name: bytes

    @classmethod
    def read(cls, reader: Reader) -> Redirect:
        """Read the structure.

        Raises:
            ProtocolViolation: a field is out of bounds.
        """
        value = cls(_CONNECT_URI.read(reader), NAMESPACE.read(reader), PREFIXED.read(reader))
        _check_name(value.track_namespace, value.track_name)
        return value

    def write(self) -> bytes:
        """Encode the structure."""
        return (
            _CONNECT_URI.write(self.connect_uri)
            + NAMESPACE.write(self.track_namespace)
            + PREFIXED.write(self.track_name)
        )


_CONNECT_URI = Text("Connect URI", MAX_MESSAGE_BODY)


class _OptionalRedirect:
    """A Redirect if the message goes on; `RequestError.check` says whether it should."""

    def read(self, reader: Reader) -> Redirect | None:
        return Redirect.read(reader) if reader.remaining else None

    def write(self, value: Redirect | None) -> bytes:
        return b"" if value is None else value.write()


OPTIONAL_REDIRECT = _OptionalRedirect()


@message(0x05)
@dataclass(frozen=True, slots=True)
class RequestError:
    """Refuse a request or an update (§9.4)."""

    error_code: Annotated[int, VI64]
    """A `RequestCode`, or one we do not know."""

    retry_interval: Annotated[int, VI64]
    """Milliseconds to wait before a retry, plus one; 0 for no retry."""

    reason: Annotated[str, REASON]
    redirect: Annotated[Redirect | None, OPTIONAL_REDIRECT] = None
    """Present with REDIRECT, and with it only."""

    def check(self) -> None:
        """Raise `ProtocolViolation` when code and redirect do not go together."""
        if (self.redirect is not None) != (self.error_code == RequestCode.REDIRECT):
            relation = "without" if self.redirect is None else "with"
            raise ProtocolViolation(f"REQUEST_ERROR {self.error_code:#x} {relation} a Redirect")
        if self.redirect is not None:
            _check_name(self.redirect.track_namespace, self.redirect.track_name)


Message = (
    Setup
    | Goaway
    | Subscribe
    | SubscribeOk
    | Publish
    | PublishDone
    | PublishStateNotify
    | Fetch
    | FetchOk
    | TrackStatus
    | PublishNamespace
    | SubscribeNamespace
    | Namespace
    | NamespaceDone
    | SubscribeTracks
    | PublishSkipped
    | RequestUpdate
    | RequestOk
    | RequestError
)
"""Any control message."""

REQUESTS = frozenset(
    TYPE_IDS[cls]
    for cls in (
        Subscribe,
        Publish,
        Fetch,
        TrackStatus,
        PublishNamespace,
        SubscribeNamespace,
        SubscribeTracks,
    )
)
"""Types of the messages a request stream may begin with (§6.4)."""

FOLLOWUPS = frozenset(TYPE_IDS.values()) - REQUESTS - {SETUP_TYPE}
"""Types that may follow, or come back, on a request stream."""


# ------------------------------------------------------------------- checks that need context


def check_goaway(goaway: Goaway, from_client: bool) -> None:
    """Check a GOAWAY against its sender (§9.2).

    Raises:
        ProtocolViolation: a client names a URI.
    """
    if from_client and goaway.new_session_uri:
        raise ProtocolViolation("GOAWAY with a New Session URI from a client")


def check_request_error(error: RequestError, from_client: bool, namespace_request: bool) -> None:
    """Check a REQUEST_ERROR against its sender and request (§9.4).

    Args:
        error: the message.
        from_client: whether a client sent it.
        namespace_request: whether it answers a request for a prefix instead of a Track.

    Raises:
        ProtocolViolation: a client redirects to another URI, or the Redirect of a namespace
            request names a Track.
    """
    redirect = error.redirect
    if redirect is None:
        return
    if from_client and redirect.connect_uri:
        raise ProtocolViolation("Redirect with a Connect URI from a client")
    if namespace_request and redirect.track_name:
        raise ProtocolViolation("Redirect of a namespace request with a Track Name")


def check_request_ok(ok: RequestOk, scope: Scope) -> None:
    """Check a REQUEST_OK against what it answers (§9.3).

    Raises:
        ProtocolViolation: a parameter is out of scope, or there are Track Properties where
            only TRACK_STATUS_OK has them.
    """
    check_scope(ok.parameters, scope)
    if ok.track_properties and scope is not Scope.TRACK_STATUS_OK:
        raise ProtocolViolation(f"Track Properties in {scope}")


def check_fetch_ok(ok: FetchOk, start: Location) -> None:
    """Check a FETCH_OK against the range that was asked for (§9.12).

    Raises:
        ProtocolViolation: it ends before ``start``.
    """
    if ok.end_location < start:
        raise ProtocolViolation(f"FETCH_OK ends at {ok.end_location}, before {start}")


def retry_after_ms(error: RequestError) -> int | None:
    """Milliseconds to wait before the same request may be repeated; None means do not (§9.4)."""
    return error.retry_interval - 1 if error.retry_interval else None
