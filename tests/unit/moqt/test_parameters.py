"""Message Parameters: encoding, scope and duplicates (MOQT §9.20)."""

from __future__ import annotations

from typing import Any

import pytest

from kvcs.errors import UsageError
from kvcs.moqt.errors import ProtocolViolation
from kvcs.moqt.filters import LocationFilter, RangeFilter
from kvcs.moqt.names import Location
from kvcs.moqt.parameters import (
    PARAMETER_KINDS,
    REPEATABLE,
    SCOPES,
    ParameterList,
    Parameters,
    ParameterType,
    Scope,
    check_scope,
)
from kvcs.moqt.tokens import Token
from kvcs.moqt.wire import Reader

TOKEN = Token.use_value(b"secret")

SOME: dict[str, Any] = {
    "object_delivery_timeout": 5,
    "authorization_token": TOKEN,
    "rendezvous_timeout": 5,
    "subgroup_delivery_timeout": 5,
    "expires": 5,
    "largest_object": Location(1, 2),
    "fill_timeout": 5,
    "forward": 0,
    "subscriber_priority": 200,
    "location_filter": LocationFilter.next_object(),
    "group_order": 2,
    "fill_parameters": Parameters.of(fill_timeout=1),
    "subgroup_filter": RangeFilter(0, ((0, 1),)),
    "objectid_filter": RangeFilter(0, ((0, None),)),
    "priority_filter": RangeFilter(0, ((0, 9),)),
    "object_property_filter": RangeFilter(0, ((0, 1),), 2),
    "track_property_filter": RangeFilter(0, ((0, 1),), 2),
    "new_group_request": 5,
    "track_namespace_prefix": (b"a", b"b"),
    "include_properties": 0,
}
"""A value of every parameter."""


def read(hex_: str, scope: Scope = Scope.SUBSCRIBE) -> Parameters:
    reader = Reader(bytes.fromhex(hex_))
    parameters = ParameterList(scope).read(reader)
    reader.finish()
    return parameters


def test_every_parameter_has_a_name_a_form_and_a_scope() -> None:
    assert set(SOME) == {type_.name.lower() for type_ in ParameterType}
    assert set(PARAMETER_KINDS) == set(ParameterType)
    assert set(SCOPES) == set(Scope)
    assert frozenset().union(*SCOPES.values()) == set(ParameterType)


@pytest.mark.parametrize("scope", Scope)
def test_lists_hold_what_their_scope_allows_and_nothing_else(scope: Scope) -> None:
    kind = ParameterList(scope)
    for name, value in SOME.items():
        type_ = ParameterType[name.upper()]
        alone = Parameters.of(**{name: value})
        # The number of the type, and the value's octets, behind a count of 1.
        octets = b"\x01" + bytes((type_,)) + PARAMETER_KINDS[type_].write(value)
        if type_ in SCOPES[scope]:
            assert kind.write(alone) == octets
            assert kind.read(Reader(octets)) == alone
            check_scope(alone, scope)
        else:
            with pytest.raises(UsageError, match="not allowed"):
                kind.write(alone)
            with pytest.raises(ProtocolViolation, match="not allowed"):
                kind.read(Reader(octets))
            with pytest.raises(ProtocolViolation, match="not allowed"):
                check_scope(alone, scope)


def test_scope_comes_before_the_value() -> None:
    # LARGEST_OBJECT without its value: out of scope, whatever follows.
    with pytest.raises(ProtocolViolation, match="LARGEST_OBJECT is not allowed in SUBSCRIBE"):
        read("0109")


def test_replies_and_updates_of_any_request_are_the_union_of_their_rows() -> None:
    assert SCOPES[Scope.REQUEST_OK] == {ParameterType.EXPIRES, ParameterType.LARGEST_OBJECT}
    assert ParameterType.GROUP_ORDER not in SCOPES[Scope.REQUEST_UPDATE]
    assert ParameterType.TRACK_NAMESPACE_PREFIX in SCOPES[Scope.REQUEST_UPDATE]


@pytest.mark.parametrize("name", SOME)
def test_only_some_types_repeat(name: str) -> None:
    type_ = ParameterType[name.upper()]
    scope = next(scope for scope in Scope if type_ in SCOPES[scope])
    value = PARAMETER_KINDS[type_].write(SOME[name])
    octets = b"\x02" + bytes((type_,)) + value + b"\x00" + value
    if type_ in REPEATABLE:
        twice = Parameters.of(**{name: [SOME[name], SOME[name]]})
        assert ParameterList(scope).read(Reader(octets)) == twice
        assert ParameterList(scope).write(twice) == octets
        assert twice.all(type_) == (SOME[name], SOME[name])
    else:
        with pytest.raises(ProtocolViolation, match="repeats"):
            ParameterList(scope).read(Reader(octets))
        with pytest.raises(UsageError, match="repeats"):
            ParameterList(scope).write(Parameters(((type_, SOME[name]), (type_, SOME[name]))))


def test_types_ascend() -> None:
    backwards = Parameters(((ParameterType.FORWARD, 1), (ParameterType.RENDEZVOUS_TIMEOUT, 1)))
    with pytest.raises(UsageError, match="ascending"):
        ParameterList(Scope.SUBSCRIBE).write(backwards)


@pytest.mark.parametrize("hex_", ["0112", "01ffffffffffffffffff", "020200ffffffffffffffffff00"])
def test_unknown_types_cannot_be_skipped(hex_: str) -> None:
    with pytest.raises(ProtocolViolation, match="not defined"):
        read(hex_)


def test_values_are_looked_up_by_type() -> None:
    parameters = Parameters.of(
        forward=0, authorization_token=[TOKEN, Token.use_alias(1)], group_order=None
    )
    assert parameters.get(ParameterType.FORWARD) == 0
    assert parameters.get(ParameterType.GROUP_ORDER) is None
    assert parameters.get(ParameterType.GROUP_ORDER, 1) == 1
    assert parameters.all(ParameterType.AUTHORIZATION_TOKEN) == (TOKEN, Token.use_alias(1))
    assert ParameterType.FORWARD in parameters
    assert ParameterType.GROUP_ORDER not in parameters
    assert len(parameters) == 3
    assert [type_ for type_, _ in parameters] == [0x03, 0x03, 0x10]


def test_a_list_changes_by_name() -> None:
    before = Parameters.of(forward=0, subscriber_priority=3)
    assert before.replace(forward=1) == Parameters.of(forward=1, subscriber_priority=3)
    assert before.replace(subscriber_priority=None) == Parameters.of(forward=0)
    assert before == Parameters.of(subscriber_priority=3, forward=0)


@pytest.mark.parametrize(
    "bad",
    [
        {"forwards": 1},
        {"forward": 2},
        {"forward": "1"},
        {"group_order": 0},
        {"include_properties": -1},
        {"subscriber_priority": 256},
        {"expires": 2**64},
        {"largest_object": 5},
        {"location_filter": (1, 2)},
        {"fill_parameters": {"fill_timeout": 1}},
        {"fill_parameters": Parameters.of(forward=1)},
        {"authorization_token": b"secret"},
        {"objectid_filter": ((0, 1),)},
        {"object_property_filter": RangeFilter(0, ((0, 1),))},
        {"track_namespace_prefix": (b"",)},
    ],
    ids=str,
)
def test_bad_values_are_refused_when_the_list_is_built(bad: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Parameters.of(**bad)


def test_a_fill_with_ten_parameters_is_read_by_its_count() -> None:
    fill = Parameters.of(objectid_filter=[RangeFilter(i, ((i, i),)) for i in range(12)])
    parameters = Parameters.of(fill_parameters=fill)
    octets = ParameterList(Scope.SUBSCRIBE).write(parameters)
    assert ParameterList(Scope.SUBSCRIBE).read(Reader(octets)) == parameters


@pytest.mark.parametrize(
    ("value", "fill"),
    [
        ("00", Parameters()),
        ("0100", Parameters()),
        ("020a64", Parameters.of(fill_timeout=100)),
        ("03010a64", Parameters.of(fill_timeout=100)),
        ("022100", Parameters.of(location_filter=LocationFilter.none())),
        ("042007 0202", Parameters.of(subscriber_priority=7, group_order=2)),
    ],
)
def test_a_fill_is_read_with_and_without_its_count(value: str, fill: Parameters) -> None:
    assert read("0123" + value.replace(" ", "")) == Parameters.of(fill_parameters=fill)


@pytest.mark.parametrize(
    "value",
    ["03011001", "0101", "020105", "021001", "03010a6400", "040a640a64", "0220ff00", "0180"],
)
def test_a_fill_that_cannot_be_read_either_way_closes_the_session(value: str) -> None:
    with pytest.raises(ProtocolViolation):
        read("0123" + value)


def test_fill_parameters_have_a_delta_chain_of_their_own() -> None:
    # 0x21 inside, and the outer chain goes on from 0x23 to 0x32.
    parameters = read("022303012100" + "0f19")
    assert parameters == Parameters.of(
        fill_parameters=Parameters.of(location_filter=LocationFilter.none()),
        new_group_request=25,
    )
