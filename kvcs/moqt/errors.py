"""MOQT's code spaces, and one narrow error per consequence (MOQT §12, §14).

The same number means different things in each space: one enumeration per space. Codes that are
not listed, grease included, are treated as INTERNAL_ERROR of their space (§13).
"""

from __future__ import annotations

from enum import IntEnum

from kvcs.errors import RequestError, SessionError
from kvcs.moqt.limits import Limit


class SessionCode(IntEnum):
    """Application codes of CONNECTION_CLOSE."""

    NO_ERROR = 0x0
    INTERNAL_ERROR = 0x1
    UNAUTHORIZED = 0x2
    PROTOCOL_VIOLATION = 0x3
    INVALID_REQUEST_ID = 0x4
    DUPLICATE_TRACK_ALIAS = 0x5
    KEY_VALUE_FORMATTING_ERROR = 0x6
    INVALID_PATH = 0x8
    MALFORMED_PATH = 0x9
    GOAWAY_TIMEOUT = 0x10
    CONTROL_MESSAGE_TIMEOUT = 0x11
    DATA_STREAM_TIMEOUT = 0x12
    AUTH_TOKEN_CACHE_OVERFLOW = 0x13
    DUPLICATE_AUTH_TOKEN_ALIAS = 0x14
    VERSION_NEGOTIATION_FAILED = 0x15
    MALFORMED_AUTH_TOKEN = 0x16
    UNKNOWN_AUTH_TOKEN_ALIAS = 0x17
    EXPIRED_AUTH_TOKEN = 0x18
    INVALID_AUTHORITY = 0x19
    MALFORMED_AUTHORITY = 0x1A
    TOO_MANY_REQUEST_UPDATES = 0x1B


class RequestCode(IntEnum):
    """Codes of REQUEST_ERROR."""

    INTERNAL_ERROR = 0x0
    UNAUTHORIZED = 0x1
    TIMEOUT = 0x2
    NOT_SUPPORTED = 0x3
    MALFORMED_AUTH_TOKEN = 0x4
    EXPIRED_AUTH_TOKEN = 0x5
    GOING_AWAY = 0x6
    EXCESSIVE_LOAD = 0x9
    DOES_NOT_EXIST = 0x10
    INVALID_RANGE = 0x11
    MALFORMED_TRACK = 0x12
    UNKNOWN_AUTH_TOKEN_ALIAS = 0x17
    UNINTERESTED = 0x20
    PREFIX_OVERLAP = 0x30
    NAMESPACE_TOO_LARGE = 0x31
    UNSUPPORTED_EXTENSION = 0x33
    REDIRECT = 0x34
    CONFLICTING_FILTERS = 0x35
    INVALID_FILTER = 0x36


class PublishDoneCode(IntEnum):
    """Status codes of PUBLISH_DONE."""

    INTERNAL_ERROR = 0x0
    UNAUTHORIZED = 0x1
    TRACK_ENDED = 0x2
    GOING_AWAY = 0x4
    TOO_FAR_BEHIND = 0x5
    EXPIRED = 0x6
    UPDATE_FAILED = 0x8
    EXCESSIVE_LOAD = 0x9
    MALFORMED_TRACK = 0x12


class StreamCode(IntEnum):
    """Codes of RESET_STREAM and STOP_SENDING."""

    INTERNAL_ERROR = 0x0
    CANCELLED = 0x1
    DELIVERY_TIMEOUT = 0x2
    SESSION_CLOSED = 0x3
    GOING_AWAY = 0x4
    TOO_FAR_BEHIND = 0x5
    UNKNOWN_OBJECT_STATUS = 0x6
    EXPIRED_AUTH_TOKEN = 0x7
    EXCESSIVE_LOAD = 0x9
    MALFORMED_TRACK = 0x12


class ProtocolViolation(SessionError):
    """Most broken rules of the session."""

    code = SessionCode.PROTOCOL_VIOLATION


class PropertiesTooLong(ProtocolViolation):
    """Object Properties beyond what we take."""

    limit = Limit.OBJECT_PROPERTIES


class InvalidRequestId(SessionError):
    """A Request ID of the wrong parity, or used before (§6.4.2.1)."""

    code = SessionCode.INVALID_REQUEST_ID


class DuplicateTrackAlias(SessionError):
    """A Track Alias that already denotes another Track (§3.1.3)."""

    code = SessionCode.DUPLICATE_TRACK_ALIAS


class KeyValueError(SessionError):
    """A Key-Value-Pair or Token that does not have the form its Type fixes (§8.3, §8.9)."""

    code = SessionCode.KEY_VALUE_FORMATTING_ERROR


class TooManyRequestUpdates(SessionError):
    """More unanswered REQUEST_UPDATEs than MAX_REQUEST_UPDATES allows (§9.5)."""

    code = SessionCode.TOO_MANY_REQUEST_UPDATES


class InvalidFilter(RequestError):
    """A range filter that breaks a rule of §3.3; the request is refused."""

    code = RequestCode.INVALID_FILTER


class InvalidRange(RequestError):
    """A FETCH whose range is empty or lies beyond the Largest Object (§9.11)."""

    code = RequestCode.INVALID_RANGE


class DoesNotExist(RequestError):
    """The Track or namespace does not exist here (§9.4)."""

    code = RequestCode.DOES_NOT_EXIST


class NotSupported(RequestError):
    """The request is legal, and this endpoint does not do it (§1.6)."""

    code = RequestCode.NOT_SUPPORTED


class UnsupportedExtension(RequestError):
    """A Mandatory Track Property that we do not know (§10)."""

    code = RequestCode.UNSUPPORTED_EXTENSION


class MalformedTrack(RequestError):
    """The Track breaks a rule of §12.1: its subscriptions and fetches are cancelled."""

    code = RequestCode.MALFORMED_TRACK
