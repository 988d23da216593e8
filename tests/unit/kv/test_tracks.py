"""Track Namespace, Track Names and holder URIs."""

from __future__ import annotations

import pytest

from kvcs.errors import PublicationError, UsageError
from kvcs.kv import (
    MANIFEST,
    MANIFEST_COSE,
    Component,
    DataTrack,
    PublicationNamespace,
    holder_uri,
    parse_holder_uri,
    parse_track_name,
)

SCOPE_ID = bytes.fromhex("6d1c6481cd428737da312c089db3832a")
COMPAT_ID = bytes.fromhex("5ed5c2f238839655d7c4029e12b7f31caf9e7421f4edb4057feee6dab760ee0f")
ANCHOR_KEY = bytes.fromhex("653275884ca44f8945fd4c902611c467394b73656e64c78d8522648cb75aefc1")
PUBLICATION_ID = bytes.fromhex("0123456789abcdef0123456789abcdef")
NAMESPACE = PublicationNamespace(SCOPE_ID, COMPAT_ID, ANCHOR_KEY, PUBLICATION_ID)

APPENDIX_NAMESPACE = bytes.fromhex(
    "05 06 6b 76 63 73 2d 31 10 6d 1c 64 81 cd 42 87 37 da 31 2c 08 9d b3 83 2a 20 5e d5 c2 f2 38"
    "83 96 55 d7 c4 02 9e 12 b7 f3 1c af 9e 74 21 f4 ed b4 05 7f ee e6 da b7 60 ee 0f 20 65 32 75"
    "88 4c a4 4f 89 45 fd 4c 90 26 11 c4 67 39 4b 73 65 6e 64 c7 8d 85 22 64 8c b7 5a ef c1 10 01"
    "23 45 67 89 ab cd ef 01 23 45 67 89 ab cd ef"
)
"""KVCS "Encoding Examples"."""


def test_namespace_of_the_draft_octet_by_octet() -> None:
    # Counts and lengths below 128 are one octet each.
    encoded = bytes([len(NAMESPACE.fields)])
    for field in NAMESPACE.fields:
        encoded += bytes([len(field)]) + field
    assert encoded == APPENDIX_NAMESPACE
    assert len(encoded) == 108


def test_namespace_goes_to_fields_and_back() -> None:
    assert PublicationNamespace.parse(NAMESPACE.fields) == NAMESPACE
    assert [len(field) for field in NAMESPACE.fields] == [6, 16, 32, 32, 16]


@pytest.mark.parametrize("field", range(5))
@pytest.mark.parametrize("change", [b"", b"x", b"longer than any of the five fields is allowed"])
def test_each_field_has_its_one_length(field: int, change: bytes) -> None:
    fields = list(NAMESPACE.fields)
    fields[field] = change
    with pytest.raises(PublicationError):
        PublicationNamespace.parse(tuple(fields))


def test_four_and_six_fields_and_another_application_are_refused() -> None:
    for fields in (
        NAMESPACE.fields[:4],
        (*NAMESPACE.fields, b"x"),
        (b"kvcs-2", *NAMESPACE.fields[1:]),
        (),
    ):
        with pytest.raises(PublicationError):
            PublicationNamespace.parse(fields)


@pytest.mark.parametrize(
    ("name", "track"),
    [
        (b"k.raw.s0", DataTrack(Component.K, "raw", 0)),
        (b"v.raw.s12", DataTrack(Component.V, "raw", 12)),
        (b"kv.zstd-split-3.s4294967295", DataTrack(Component.KV, "zstd-split-3", 2**32 - 1)),
        (b"k." + b"a" * 32 + b".s1", DataTrack(Component.K, "a" * 32, 1)),
        (b"k.-.s1", DataTrack(Component.K, "-", 1)),
    ],
)
def test_data_track_names(name: bytes, track: DataTrack) -> None:
    assert parse_track_name(name) == track
    assert track.name == name
    assert DataTrack.parse(str(track)) == track


@pytest.mark.parametrize(
    "name",
    [
        b"",
        b"k.raw",
        b"k.raw.s",
        b"k.raw.s00",
        b"k.raw.s01",
        b"k.raw.s-1",
        b"k.raw.s+1",
        b"k.raw.s1 ",
        b"k.raw.s1\n",
        b"k.raw.0",
        b"k.raw.S0",
        b"K.raw.s0",
        b"q.raw.s0",
        b"vk.raw.s0",
        b"k.Raw.s0",
        b"k.r_w.s0",
        b"k..s0",
        b"k." + b"a" * 33 + b".s0",
        b"k.raw.s4294967296",
        b"k.raw.s99999999999",
        b"k.raw.s\xd9\xa1",
        b"manifest.",
        b"Manifest",
        b"manifest.cose.s0",
    ],
)
def test_what_is_no_track_name(name: bytes) -> None:
    with pytest.raises(UsageError):
        parse_track_name(name)


def test_manifest_names_are_no_data_tracks() -> None:
    for name in (MANIFEST, MANIFEST_COSE):
        assert parse_track_name(name) is None
        with pytest.raises(UsageError):
            DataTrack.parse(name)
    with pytest.raises(UsageError, match="not ASCII"):
        DataTrack.parse("k.raw.s\u0661")


def test_a_data_track_cannot_be_built_with_a_bad_part() -> None:
    for component, codec, segment in (
        ("k", "raw", 0),
        (Component.K, "RAW", 0),
        (Component.K, "raw", -1),
        (Component.K, "raw", True),
        (Component.K, "raw", 2**32),
    ):
        with pytest.raises(UsageError):
            DataTrack(component, codec, segment)  # type: ignore[arg-type]


def test_component_numbers() -> None:
    assert [component.number for component in Component] == [1, 2, 3]
    assert [Component.from_number(number) for number in range(5)] == [None, *Component, None]


def test_holder_uri_goes_there_and_back() -> None:
    uri = holder_uri("moqt://relay.example:4433/kv", NAMESPACE)
    assert uri.startswith("moqt://relay.example:4433/kv#kvcs:kvcs.2d1-m.1cd.81.cdB.877.da1.2c")
    assert parse_holder_uri(uri) == ("moqt://relay.example:4433/kv", NAMESPACE)


@pytest.mark.parametrize(
    "uri",
    [
        "moqt://relay.example",
        "moqt://relay.example#kvcs:",
        "moqt://relay.example#kvcs:kvcs.2d1",
        "moqt://relay.example#kvcs:KVCS.2D1-x",
        "https://relay.example#kvcs:kvcs.2d1",
        "",
    ],
)
def test_what_is_no_holder_uri(uri: str) -> None:
    with pytest.raises(UsageError):
        parse_holder_uri(uri)


@pytest.mark.parametrize("url", ["https://relay.example", "moqt://relay.example#x", "relay"])
def test_a_holder_uri_needs_a_moqt_url(url: str) -> None:
    with pytest.raises(UsageError):
        holder_uri(url, NAMESPACE)
