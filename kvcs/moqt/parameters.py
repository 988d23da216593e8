"""Message Parameters: their encoding, and where each may appear (MOQT §9.20).

Not the encoding of Setup Options and Properties: here the type alone fixes the value's form, and
an unknown type cannot be skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from kvcs.errors import SessionError, UsageError
from kvcs.moqt.errors import ProtocolViolation
from kvcs.moqt.filters import LOCATION_FILTER, RangeFilterKind
from kvcs.moqt.names import MAX_VI64
from kvcs.moqt.properties import (
    KEY_VALUES,
    KeyValues,
    check_object_properties,
    check_setup_options,
    check_track_properties,
    find_property,
    setup_tokens,
)
from kvcs.moqt.registry import ParameterType, Property, SetupOption
from kvcs.moqt.tokens import TOKEN, Token, TokenAliasType, TokenCache
from kvcs.moqt.wire import (
    LOCATION,
    NAMESPACE,
    UINT8,
    VI64,
    Bounded8,
    Kind,
    NeedMore,
    Reader,
    encode_vi64,
)

__all__ = [
    "KEY_VALUES",
    "PARAMETER_KINDS",
    "REPEATABLE",
    "SCOPES",
    "KeyValues",
    "ParameterList",
    "ParameterType",
    "ParameterValue",
    "Parameters",
    "Property",
    "Scope",
    "SetupOption",
    "Token",
    "TokenAliasType",
    "TokenCache",
    "check_object_properties",
    "check_scope",
    "check_setup_options",
    "check_track_properties",
    "find_property",
    "setup_tokens",
]

_P = ParameterType

REPEATABLE = frozenset(
    {
        _P.AUTHORIZATION_TOKEN,
        _P.SUBGROUP_FILTER,
        _P.OBJECTID_FILTER,
        _P.PRIORITY_FILTER,
        _P.OBJECT_PROPERTY_FILTER,
        _P.TRACK_PROPERTY_FILTER,
    }
)
"""Types that may occur more than once in a message."""


class Scope(StrEnum):
    """Where a list of parameters stands; replies and updates are told apart by their request."""

    SUBSCRIBE = "SUBSCRIBE"
    SUBSCRIBE_OK = "SUBSCRIBE_OK"
    PUBLISH = "PUBLISH"
    PUBLISH_OK = "PUBLISH_OK"
    PUBLISH_STATE_NOTIFY = "PUBLISH_STATE_NOTIFY"
    FETCH = "FETCH"
    FETCH_OK = "FETCH_OK"
    TRACK_STATUS = "TRACK_STATUS"
    TRACK_STATUS_OK = "TRACK_STATUS_OK"
    PUBLISH_NAMESPACE = "PUBLISH_NAMESPACE"
    PUBLISH_NAMESPACE_OK = "PUBLISH_NAMESPACE_OK"
    SUBSCRIBE_NAMESPACE = "SUBSCRIBE_NAMESPACE"
    SUBSCRIBE_NAMESPACE_OK = "SUBSCRIBE_NAMESPACE_OK"
    SUBSCRIBE_TRACKS = "SUBSCRIBE_TRACKS"
    SUBSCRIBE_TRACKS_OK = "SUBSCRIBE_TRACKS_OK"
    UPDATE_SUBSCRIPTION = "REQUEST_UPDATE of a subscription"
    UPDATE_FETCH = "REQUEST_UPDATE of FETCH"
    UPDATE_PUBLISH_NAMESPACE = "REQUEST_UPDATE of PUBLISH_NAMESPACE"
    UPDATE_SUBSCRIBE_NAMESPACE = "REQUEST_UPDATE of SUBSCRIBE_NAMESPACE"
    UPDATE_SUBSCRIBE_TRACKS = "REQUEST_UPDATE of SUBSCRIBE_TRACKS"
    UPDATE_SUBSCRIPTION_OK = "REQUEST_UPDATE_OK of a subscription"
    UPDATE_OTHER_OK = "REQUEST_UPDATE_OK of another request"
    FILL_PARAMETERS = "FILL_PARAMETERS"
    REQUEST_OK = "REQUEST_OK"
    """Any of the OKs above: all that can be said before the request is looked up."""
    REQUEST_UPDATE = "REQUEST_UPDATE"
    """Any of the updates above."""


def _types(*numbers: int) -> frozenset[ParameterType]:
    return frozenset(map(ParameterType, numbers))


_SUBSCRIBE = _types(
    0x02, 0x03, 0x04, 0x06, 0x10, 0x20, 0x21, 0x22, 0x23, 0x25, 0x26, 0x27, 0x28, 0x32, 0x35
)
_EXPIRES = _types(0x08)

SCOPES: dict[Scope, frozenset[ParameterType]] = {
    Scope.SUBSCRIBE: _SUBSCRIBE,
    Scope.SUBSCRIBE_OK: _types(0x08, 0x09),
    Scope.PUBLISH: _types(0x02, 0x03, 0x06, 0x08, 0x09, 0x10, 0x20, 0x21, 0x22),
    Scope.PUBLISH_OK: _EXPIRES,
    Scope.PUBLISH_STATE_NOTIFY: _types(0x09, 0x10, 0x21),
    Scope.FETCH: _types(0x03, 0x0A, 0x20, 0x21, 0x22, 0x25, 0x26, 0x27, 0x28, 0x35),
    Scope.FETCH_OK: frozenset(),
    Scope.TRACK_STATUS: _types(0x03, 0x35),
    Scope.TRACK_STATUS_OK: _types(0x09),
    Scope.PUBLISH_NAMESPACE: _types(0x03),
    Scope.PUBLISH_NAMESPACE_OK: _EXPIRES,
    Scope.SUBSCRIBE_NAMESPACE: _types(0x03),
    Scope.SUBSCRIBE_NAMESPACE_OK: _EXPIRES,
    # The draft lists this scope twice, a short and a long list; we take the long one.
    Scope.SUBSCRIBE_TRACKS: _SUBSCRIBE | _types(0x29),
    Scope.SUBSCRIBE_TRACKS_OK: _EXPIRES,
    Scope.UPDATE_SUBSCRIPTION: _types(
        0x02, 0x03, 0x06, 0x10, 0x20, 0x21, 0x23, 0x25, 0x26, 0x27, 0x28, 0x32
    ),
    Scope.UPDATE_FETCH: _types(0x03, 0x20),
    Scope.UPDATE_PUBLISH_NAMESPACE: _types(0x03),
    Scope.UPDATE_SUBSCRIBE_NAMESPACE: _types(0x03, 0x34),
    # The draft's list lacks 0x25-0x28; but filters that SUBSCRIBE_TRACKS set may need a change.
    Scope.UPDATE_SUBSCRIBE_TRACKS: _types(0x03, 0x10, 0x25, 0x26, 0x27, 0x28, 0x29, 0x34),
    Scope.UPDATE_SUBSCRIPTION_OK: _types(0x08, 0x09),
    Scope.UPDATE_OTHER_OK: _EXPIRES,
    Scope.FILL_PARAMETERS: _types(0x0A, 0x20, 0x21, 0x22, 0x25, 0x26, 0x27, 0x28),
}
SCOPES[Scope.REQUEST_OK] = _types(0x08, 0x09)
SCOPES[Scope.REQUEST_UPDATE] = frozenset().union(
    *(types for scope, types in SCOPES.items() if scope.startswith("REQUEST_UPDATE of"))
)

ParameterValue = Any
"""An int, Location, LocationFilter, RangeFilter, Token, Track Namespace, or nested Parameters;
`PARAMETER_KINDS` says which."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """A list of Message Parameters; what is absent has the draft's default or is unchanged."""

    items: tuple[tuple[ParameterType, ParameterValue], ...] = ()
    """Type and value of each parameter, in ascending order of types."""

    @classmethod
    def of(cls, **values: ParameterValue) -> Parameters:
        """Build a list from the draft's names in lower case; None leaves a parameter out.

        Repeatable parameters (`REPEATABLE`) take one value, or a list of them.

        Raises:
            UsageError: a name is not the draft's, or a value is out of its bounds.
        """
        return cls().replace(**values)

    def replace(self, **values: ParameterValue) -> Parameters:
        """Return a list in which the named parameters are these instead; None removes one.

        Raises:
            UsageError: as in `of`.
        """
        given: dict[ParameterType, tuple[ParameterValue, ...]] = {}
        for name, value in values.items():
            type_ = _BY_NAME.get(name)
            if type_ is None:
                raise UsageError(f"{name!r} is not a Message Parameter")
            many = type_ in REPEATABLE and isinstance(value, list | tuple)
            given[type_] = () if value is None else tuple(value) if many else (value,)
        items = [item for item in self.items if item[0] not in given]
        for type_, each in given.items():
            for value in each:
                _write(type_, value)
                items.append((type_, value))
        return Parameters(tuple(sorted(items, key=_by_type)))

    def get(self, type_: ParameterType, default: ParameterValue = None) -> ParameterValue:
        """Return the first value of ``type_``."""
        for found, value in self.items:
            if found == type_:
                return value
        return default

    def all(self, type_: ParameterType) -> tuple[ParameterValue, ...]:
        """Return every value of ``type_`` in order."""
        return tuple(value for found, value in self.items if found == type_)

    def __contains__(self, type_: ParameterType) -> bool:
        return any(found == type_ for found, _ in self.items)

    def __iter__(self) -> Iterator[tuple[ParameterType, ParameterValue]]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)


def _by_type(item: tuple[ParameterType, ParameterValue]) -> int:
    return item[0]


def check_scope(parameters: Parameters, scope: Scope) -> None:
    """Check that each parameter may stand where it does.

    `decode_body` does this for messages with one scope; REQUEST_OK and REQUEST_UPDATE need it
    again once their request is known.

    Raises:
        ProtocolViolation: one is out of scope.
    """
    allowed = SCOPES[scope]
    for type_, _ in parameters.items:
        if type_ not in allowed:
            raise ProtocolViolation(f"{type_.name} is not allowed in {scope}")


# ----------------------------------------------------------------------------------- encoding


def _read_items(reader: Reader, count: int | None, scope: Scope) -> Parameters:
    """Read ``count`` parameters, or all that are left."""
    allowed = SCOPES[scope]
    items: list[tuple[ParameterType, ParameterValue]] = []
    number = 0
    last = None
    while reader.remaining if count is None else len(items) < count:
        number += reader.vi64()
        if number > MAX_VI64 or number not in _KNOWN:
            raise ProtocolViolation(f"Message Parameter {number:#x} is not defined")
        type_ = ParameterType(number)
        if type_ not in allowed:
            raise ProtocolViolation(f"{type_.name} is not allowed in {scope}")
        if type_ is last and type_ not in REPEATABLE:
            raise ProtocolViolation(f"{type_.name} repeats")
        items.append((type_, PARAMETER_KINDS[type_].read(reader)))
        last = type_
    return Parameters(tuple(items))


def _write_items(parameters: Parameters, scope: Scope) -> bytes:
    allowed = SCOPES[scope]
    parts = [encode_vi64(len(parameters.items))]
    previous: int = 0
    last = None
    for type_, value in parameters.items:
        if type_ not in allowed:
            raise UsageError(f"{type_.name} is not allowed in {scope}")
        if type_ < previous or (type_ is last and type_ not in REPEATABLE):
            raise UsageError(f"{type_.name} repeats, or is not in ascending order")
        parts += (encode_vi64(type_ - previous), _write(type_, value))
        previous = last = type_
    return b"".join(parts)


class ParameterList:
    """Number of Parameters, then the parameters.

    Args:
        scope: where the list stands; what is out of scope is refused before its value is read.
    """

    def __init__(self, scope: Scope) -> None:
        self.scope = scope

    def read(self, reader: Reader) -> Parameters:
        return _read_items(reader, reader.vi64(), self.scope)

    def write(self, value: Parameters) -> bytes:
        return _write_items(value, self.scope)


class _FillParameters:
    """A nested list behind its Length (§9.20.15), with a delta chain of its own.

    Some peers send no Number of Parameters. A value is read that way only when it cannot be read
    with the count and begins with a type a fill may have; an empty value is an empty list.
    """

    def read(self, reader: Reader) -> Parameters:
        block = reader.sub(reader.vi64())
        if not block.remaining:
            return Parameters()
        start = block.pos
        try:
            parameters = ParameterList(Scope.FILL_PARAMETERS).read(block)
            block.finish()
            return parameters
        except (NeedMore, SessionError) as exc:
            block.pos = start
            try:
                if block.vi64() >= ParameterType.FILL_TIMEOUT:
                    block.pos = start
                    return _read_items(block, None, Scope.FILL_PARAMETERS)
            except (NeedMore, SessionError):
                pass
            if isinstance(exc, SessionError):
                raise
            raise ProtocolViolation("FILL_PARAMETERS ends inside a field") from exc

    def write(self, value: Parameters) -> bytes:
        if not isinstance(value, Parameters):
            raise UsageError(f"FILL_PARAMETERS takes Parameters, not {type(value).__name__}")
        octets = _write_items(value, Scope.FILL_PARAMETERS)
        return encode_vi64(len(octets)) + octets


_RANGES = RangeFilterKind(with_property=False)
_PROPERTY_RANGES = RangeFilterKind(with_property=True)

PARAMETER_KINDS: dict[ParameterType, Kind] = {
    _P.OBJECT_DELIVERY_TIMEOUT: VI64,
    _P.AUTHORIZATION_TOKEN: TOKEN,
    _P.RENDEZVOUS_TIMEOUT: VI64,
    _P.SUBGROUP_DELIVERY_TIMEOUT: VI64,
    _P.EXPIRES: VI64,
    _P.LARGEST_OBJECT: LOCATION,
    _P.FILL_TIMEOUT: VI64,
    _P.FORWARD: Bounded8("FORWARD", 0, 1),
    _P.SUBSCRIBER_PRIORITY: UINT8,
    _P.LOCATION_FILTER: LOCATION_FILTER,
    _P.GROUP_ORDER: Bounded8("GROUP_ORDER", 1, 2),
    _P.FILL_PARAMETERS: _FillParameters(),
    _P.SUBGROUP_FILTER: _RANGES,
    _P.OBJECTID_FILTER: _RANGES,
    _P.PRIORITY_FILTER: _RANGES,
    _P.OBJECT_PROPERTY_FILTER: _PROPERTY_RANGES,
    _P.TRACK_PROPERTY_FILTER: _PROPERTY_RANGES,
    _P.NEW_GROUP_REQUEST: VI64,
    _P.TRACK_NAMESPACE_PREFIX: NAMESPACE,
    _P.INCLUDE_PROPERTIES: Bounded8("INCLUDE_PROPERTIES", 0, 1),
}
"""Form of each parameter's value."""

_KNOWN = frozenset(map(int, ParameterType))
_BY_NAME = {type_.name.lower(): type_ for type_ in ParameterType}


def _write(type_: ParameterType, value: ParameterValue) -> bytes:
    try:
        return PARAMETER_KINDS[type_].write(value)
    except (TypeError, ValueError, AttributeError) as exc:
        if isinstance(exc, UsageError):
            raise
        raise UsageError(f"{type_.name} cannot be {value!r}") from exc
