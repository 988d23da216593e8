"""Media over QUIC Transport, draft 22, as a library of its own: no I/O, nothing about KV caches.

These are the names that an application needs beside `kvcs.quic`, which carries sessions over QUIC;
docs/moqt.md shows both at work. Below lie the octets and the tables that both sides of a session
share (`wire`, `messages`, `parameters`, `data`, `filters`, `requests`), the Objects of a Track
(`track`), what sends them (`sending`) and what receives them (`incoming`), the requests of both
sides (`asking`), and `session`, which joins all of it.
"""

from kvcs.moqt import events
from kvcs.moqt.errors import PublishDoneCode, RequestCode, SessionCode, StreamCode
from kvcs.moqt.filters import LocationFilter, RangeFilter
from kvcs.moqt.limits import Limit, LimitCounters
from kvcs.moqt.names import FullTrackName, GroupOrder, Location, TrackNamespace
from kvcs.moqt.objects import ObjectHeader, ObjectStatus
from kvcs.moqt.parameters import Parameters
from kvcs.moqt.properties import KeyValues, Property
from kvcs.moqt.session import Session
from kvcs.moqt.settings import ALPN, DRAFT, Role, SessionSettings
from kvcs.moqt.track.store import Track
from kvcs.moqt.track.stored import StoreBudget
from kvcs.moqt.uri import MoqtUri, parse_uri

__all__ = [
    "ALPN",
    "DRAFT",
    "FullTrackName",
    "GroupOrder",
    "KeyValues",
    "Limit",
    "LimitCounters",
    "Location",
    "LocationFilter",
    "MoqtUri",
    "ObjectHeader",
    "ObjectStatus",
    "Parameters",
    "Property",
    "PublishDoneCode",
    "RangeFilter",
    "RequestCode",
    "Role",
    "Session",
    "SessionCode",
    "SessionSettings",
    "StoreBudget",
    "StreamCode",
    "Track",
    "TrackNamespace",
    "events",
    "parse_uri",
]
