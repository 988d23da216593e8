"""Names, prefixes, and their text form (MOQT §2.4, §8.8)."""

from __future__ import annotations

from typing import Any

import pytest

from kvcs.errors import SessionError, UsageError
from kvcs.moqt.names import (
    FullTrackName,
    Location,
    TrackNamespace,
    check_namespace,
    check_our_track,
    is_prefix,
    name_text,
    namespace_text,
    overlaps,
    parse_name_text,
    parse_namespace_text,
)


def test_locations_compare_by_group_then_object() -> None:
    assert Location(1, 9) < Location(2, 0) < Location(2, 1)
    assert str(Location(2, 1)) == "2/1"


@pytest.mark.parametrize(
    ("prefix", "namespace", "matches", "overlap"),
    [
        ((), (b"a",), True, True),
        ((b"foo",), (b"foo",), True, True),
        ((b"foo",), (b"foo", b"bar"), True, True),
        ((b"foo",), (b"foobar",), False, False),
        ((b"foo", b"bar"), (b"foo",), False, True),
        ((b"kv", b"a"), (b"kv", b"b"), False, False),
    ],
)
def test_prefixes_match_field_by_field(
    prefix: TrackNamespace, namespace: TrackNamespace, matches: bool, overlap: bool
) -> None:
    assert is_prefix(prefix, namespace) is matches
    assert overlaps(prefix, namespace) is overlap
    assert overlaps(namespace, prefix) is overlap


@pytest.mark.parametrize(
    ("namespace", "name"),
    [((), b""), ((b"a",) * 32, b""), ((b"a" * 4000,), b"b" * 96)],
)
def test_names_within_the_limits(namespace: TrackNamespace, name: bytes) -> None:
    check_namespace(namespace, name)


@pytest.mark.parametrize(
    ("namespace", "name"),
    [((b"a",) * 33, b""), ((b"a", b""), b""), ((b"a" * 4000,), b"b" * 97)],
)
def test_names_beyond_the_limits(namespace: TrackNamespace, name: bytes) -> None:
    with pytest.raises(SessionError) as caught:
        check_namespace(namespace, name)
    assert caught.value.code == 0x3


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            FullTrackName((b"example.net", b"team2", b"project_x"), b"report"),
            "example.2enet-team2-project_x--report",
        ),
        (FullTrackName((), b""), "--"),
        (FullTrackName((b"a",), b""), "a--"),
        (FullTrackName((b"\x00-", b"A"), b"\xff"), ".00.2d-A--.ff"),
    ],
)
def test_text_form(name: FullTrackName, text: str) -> None:
    assert name_text(name) == str(name) == text
    assert parse_name_text(text) == name
    assert parse_namespace_text(namespace_text(name.namespace)) == name.namespace


@pytest.mark.parametrize(
    "text",
    [
        "a",
        "a--.2",
        "a--.2E",
        "a--.61",
        "a--\u00e9",
        "a b--c",
        "a----",
        "-a--b",
        "a-b---c",
        "a--.zz",
    ],
)
def test_text_that_is_no_name(text: str) -> None:
    with pytest.raises(UsageError):
        parse_name_text(text)


def test_text_of_a_namespace_has_no_empty_field() -> None:
    for text in ("a--b", "-", "a-"):
        with pytest.raises(UsageError):
            parse_namespace_text(text)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("news", "is a tuple of octet strings"),
        ((b"news",), "is a tuple of octet strings"),
        ((b"news", b"today"), "is a tuple of octet strings"),
        ((("news",), b"today"), "is a tuple of octet strings"),
        (((b"news",), "today"), "is a tuple of octet strings"),
        (((b"a",) * 33, b""), "33 fields, limit 32"),
        (((b"a", b""), b""), "an empty field"),
        (((b"a" * 4096,), b"b"), "4097 octets, limit 4096"),
    ],
)
def test_a_name_of_our_own_that_cannot_be_sent(name: Any, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        check_our_track(name)


def test_a_name_of_our_own_that_can() -> None:
    check_our_track(FullTrackName((b"a",) * 32, b"b" * 4064))
