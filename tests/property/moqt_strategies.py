"""Hypothesis strategies for MOQT, derived from the declarations of `kvcs.moqt`."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from kvcs.moqt import messages as m
from kvcs.moqt.data import ObjectDatagram, ObjectHeader, ObjectStatus, RangeKind, SubgroupHeader
from kvcs.moqt.errors import RequestCode
from kvcs.moqt.filters import (
    LOCATION_FILTER,
    LocationFilter,
    RangeFilter,
    RangeFilterKind,
)
from kvcs.moqt.names import MAX_VI64, GroupOrder, Location
from kvcs.moqt.parameters import (
    PARAMETER_KINDS,
    REPEATABLE,
    SCOPES,
    ParameterList,
    Parameters,
    ParameterType,
    Scope,
)
from kvcs.moqt.properties import KEY_VALUES, KeyValues
from kvcs.moqt.tokens import TOKEN, Token, TokenAliasType
from kvcs.moqt.wire import (
    FIELDS,
    LOCATION,
    MESSAGES,
    NAMESPACE,
    PREFIXED,
    REASON,
    VI64,
    Bounded8,
    Kind,
    Text,
)

vi64 = st.one_of(
    st.integers(0, 300),
    st.integers(0, MAX_VI64),
    st.sampled_from([(1 << 7 * n) - 1 for n in range(1, 9)] + [1 << 7 * n for n in range(1, 9)]),
    st.just(MAX_VI64),
)
octets = st.binary(max_size=40)
namespaces = st.lists(st.binary(min_size=1, max_size=8), max_size=32).map(tuple)
locations = st.builds(Location, vi64, vi64)
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


def _pair(type_: int) -> st.SearchStrategy[tuple[int, int | bytes]]:
    value: st.SearchStrategy[int | bytes] = octets if type_ & 1 else vi64
    return st.tuples(st.just(type_), value)


key_values = st.lists(vi64.flatmap(_pair), max_size=6).map(KeyValues.of)

tokens = st.one_of(
    st.builds(Token.delete, vi64),
    st.builds(Token.use_alias, vi64),
    st.builds(Token, st.just(TokenAliasType.REGISTER), vi64, vi64, octets),
    st.builds(Token, st.just(TokenAliasType.USE_VALUE), st.just(0), vi64, octets),
)


@st.composite
def location_filters(draw: st.DrawFn) -> LocationFilter:
    """Any Location Filter whose last Group fits."""
    start = draw(locations)
    end_group = draw(st.integers(start.group, MAX_VI64))
    return draw(
        st.sampled_from(
            [
                LocationFilter.none(),
                LocationFilter.next_object(),
                LocationFilter.relative_start(start.group),
                LocationFilter.absolute_start(*start),
                LocationFilter.group_end(*start, end_group),
                LocationFilter.absolute_range(*start, end_group, draw(vi64)),
            ]
        )
    )


@st.composite
def range_filters(draw: st.DrawFn, with_property: bool) -> RangeFilter:
    """Any Range Filter that can be encoded, bounds up to 2^64-1."""
    if draw(st.integers(0, 9)) == 0:
        return RangeFilter(None)
    bounds = sorted(draw(st.lists(vi64, max_size=7)))
    ranges: list[tuple[int, int | None]] = [
        (bounds[i], bounds[i + 1]) for i in range(0, len(bounds) - 1, 2)
    ]
    if len(bounds) % 2:
        ranges.append((bounds[-1], None))
    property_type = draw(vi64) if with_property else None
    return RangeFilter(draw(st.integers(0, 255)), tuple(ranges), property_type)


@st.composite
def parameters(draw: st.DrawFn, scope: Scope) -> Parameters:
    """Any parameters that may stand in ``scope``."""
    items: list[tuple[ParameterType, Any]] = []
    for type_ in sorted(SCOPES[scope]):
        most = 3 if type_ in REPEATABLE else 1
        for _ in range(draw(st.integers(0, most))):
            items.append((type_, draw(values(PARAMETER_KINDS[type_]))))
    return Parameters(tuple(items))


def values(kind: Kind) -> st.SearchStrategy[Any]:
    """Values of one field kind."""
    if kind is PARAMETER_KINDS[ParameterType.FILL_PARAMETERS]:
        return parameters(Scope.FILL_PARAMETERS)
    match kind:
        case ParameterList():
            return parameters(kind.scope)
        case RangeFilterKind():
            return range_filters(kind.with_property)
        case Bounded8():
            # FLAG is one, too: True and False are the integers it takes.
            return st.integers(kind.low, kind.high)
        case Text():
            return text
    return {
        id(VI64): vi64,
        id(PREFIXED): octets,
        id(NAMESPACE): namespaces,
        id(LOCATION): locations,
        id(REASON): text,
        id(KEY_VALUES): key_values,
        id(TOKEN): tokens,
        id(LOCATION_FILTER): location_filters(),
        id(m.OPTIONAL_REDIRECT): st.builds(m.Redirect, text, namespaces, octets),
    }[id(kind)]


@st.composite
def messages_of(draw: st.DrawFn, cls: type[Any]) -> Any:
    """Any message of one class."""
    fields = {name: draw(values(kind)) for name, kind in FIELDS[cls]}
    if cls is m.RequestError:
        # The one dependent field of the draft.
        if draw(st.booleans()):
            fields["error_code"] = RequestCode.REDIRECT
        elif fields["error_code"] == RequestCode.REDIRECT:
            fields["error_code"] = RequestCode.TIMEOUT
        if fields["error_code"] != RequestCode.REDIRECT:
            fields["redirect"] = None
    return cls(**fields)


messages = st.sampled_from(sorted(MESSAGES)).flatmap(lambda number: messages_of(MESSAGES[number]))

priorities = st.integers(0, 255)
raw_properties = st.one_of(st.just(b""), st.binary(min_size=1, max_size=200))

subgroup_headers = st.builds(
    SubgroupHeader,
    vi64,
    vi64,
    st.none() | vi64,
    st.none() | priorities,
    st.booleans(),
    st.booleans(),
    st.booleans(),
)


@st.composite
def subgroup_objects(draw: st.DrawFn, header: SubgroupHeader) -> list[tuple[ObjectHeader, bytes]]:
    """Objects that may go on a stream with ``header``, with their payloads."""
    ids = sorted(draw(st.sets(vi64, max_size=6)))
    subgroup_id = header.subgroup_id
    if subgroup_id is None and ids:
        subgroup_id = ids[0]
    objects = []
    for object_id in ids:
        status = draw(st.sampled_from(ObjectStatus))
        normal = status is ObjectStatus.NORMAL
        payload = draw(st.binary(max_size=300)) if normal else b""
        properties = draw(raw_properties) if normal and header.has_properties else b""
        objects.append(
            (
                ObjectHeader(
                    header.group_id,
                    object_id,
                    subgroup_id,
                    header.publisher_priority,
                    status,
                    properties,
                    len(payload),
                ),
                payload,
            )
        )
    return objects


FetchItem = tuple[ObjectHeader, bytes] | tuple[RangeKind, Location]


@st.composite
def fetch_items(draw: st.DrawFn, group_order: GroupOrder) -> list[FetchItem]:
    """Objects and markers that may go on a fetch stream, in order."""
    groups = sorted(draw(st.sets(vi64, max_size=4)), reverse=group_order is GroupOrder.DESCENDING)
    items: list[FetchItem] = []
    for group in groups:
        for object_id in sorted(draw(st.sets(vi64, min_size=1, max_size=4))):
            if draw(st.integers(0, 4)) == 0:
                items.append((draw(st.sampled_from(RangeKind)), Location(group, object_id)))
                continue
            payload = draw(st.binary(max_size=200))
            header = ObjectHeader(
                group,
                object_id,
                draw(st.none() | st.integers(0, 3) | vi64),
                draw(priorities),
                properties=draw(raw_properties),
                payload_length=len(payload),
            )
            items.append((header, payload))
    return items


@st.composite
def datagrams(draw: st.DrawFn) -> ObjectDatagram:
    """Any object datagram."""
    status = draw(st.sampled_from(ObjectStatus))
    normal = status is ObjectStatus.NORMAL
    return ObjectDatagram(
        draw(vi64),
        draw(vi64),
        draw(vi64),
        draw(st.none() | priorities),
        payload=draw(octets) if normal else b"",
        status=status,
        end_of_group=normal and draw(st.booleans()),
        properties=draw(raw_properties) if normal else b"",
    )


@st.composite
def chopped(draw: st.DrawFn, data: bytes) -> list[bytes]:
    """``data`` in pieces; some may be empty."""
    if draw(st.booleans()):
        return [data[i : i + 1] for i in range(len(data))]
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=8)))
    edges = [0, *cuts, len(data)]
    return [data[edges[i] : edges[i + 1]] for i in range(len(edges) - 1)]
