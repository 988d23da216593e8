"""Numbers that MOQT assigns to Message Parameters, Setup Options and Properties.

Message types are declared with their messages, stream types with their headers, error codes in
`kvcs.moqt.errors`.
"""

from __future__ import annotations

from enum import IntEnum

__all__ = ["MANDATORY_TRACK_PROPERTIES", "ParameterType", "Property", "SetupOption", "is_grease"]


class ParameterType(IntEnum):
    """Types of Message Parameters (MOQT §9.20); a number alone does not tell the encoding."""

    OBJECT_DELIVERY_TIMEOUT = 0x02
    AUTHORIZATION_TOKEN = 0x03
    RENDEZVOUS_TIMEOUT = 0x04
    SUBGROUP_DELIVERY_TIMEOUT = 0x06
    EXPIRES = 0x08
    LARGEST_OBJECT = 0x09
    FILL_TIMEOUT = 0x0A
    FORWARD = 0x10
    SUBSCRIBER_PRIORITY = 0x20
    LOCATION_FILTER = 0x21
    GROUP_ORDER = 0x22
    FILL_PARAMETERS = 0x23
    SUBGROUP_FILTER = 0x25
    OBJECTID_FILTER = 0x26
    PRIORITY_FILTER = 0x27
    OBJECT_PROPERTY_FILTER = 0x28
    TRACK_PROPERTY_FILTER = 0x29
    NEW_GROUP_REQUEST = 0x32
    TRACK_NAMESPACE_PREFIX = 0x34
    INCLUDE_PROPERTIES = 0x35


class SetupOption(IntEnum):
    """Types of Setup Options (MOQT §9.1); even ones hold an integer, odd ones octets."""

    PATH = 0x01
    AUTHORIZATION_TOKEN = 0x03
    MAX_AUTH_TOKEN_CACHE_SIZE = 0x04
    AUTHORITY = 0x05
    MAX_FILTER_RANGES = 0x06
    MOQT_IMPLEMENTATION = 0x07
    MAX_REQUEST_UPDATES = 0x08


class Property(IntEnum):
    """Types of Track and Object Properties (MOQT §10); even ones hold an integer."""

    OBJECT_DELIVERY_TIMEOUT = 0x02
    MAX_CACHE_DURATION = 0x04
    SUBGROUP_DELIVERY_TIMEOUT = 0x06
    IMMUTABLE_PROPERTIES = 0x0B
    DEFAULT_PUBLISHER_PRIORITY = 0x0E
    DEFAULT_PUBLISHER_GROUP_ORDER = 0x22
    DYNAMIC_GROUPS = 0x30
    PRIOR_GROUP_ID_GAP = 0x3C
    PRIOR_OBJECT_ID_GAP = 0x3E


MANDATORY_TRACK_PROPERTIES = range(0x4000, 0x8000)
"""Property types a receiver has to know before it may process the Track (§10)."""


def is_grease(number: int) -> bool:
    """Whether ``number`` fits the pattern 0x7f * N + 0x9D that is reserved for greasing (§13)."""
    return number >= 0x9D and (number - 0x9D) % 0x7F == 0
