"""Whatever octets come: our own errors, or a value that is written back as it was read."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvcs.errors import ObjectError, PublicationError, UsageError
from kvcs.kv import (
    DTYPES,
    Descriptor,
    PayloadHeader,
    Prefix,
    PublicationNamespace,
    byte_view,
    holder_uri,
    manifest_json_bytes,
    parse_holder_uri,
    parse_manifest,
    parse_track_name,
)
from tests.unit.kv.toy import SCOPE, toy_descriptor, toy_publication

MANIFEST = toy_publication((1, 1), layers=2).writer().to_json_bytes()

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(st.binary(max_size=80))
def test_header_octets(octets: bytes) -> None:
    try:
        header = PayloadHeader.unpack(octets)
    except ObjectError as exc:
        assert exc.check in ("length", "magic", "version")
    else:
        assert header.pack() == octets[:68]


@given(
    st.builds(
        PayloadHeader,
        component=st.integers(0, 255),
        layer=st.integers(0, 2**32 - 1),
        block=st.integers(0, 2**32 - 1),
        token_start=st.integers(0, 2**64 - 1),
        token_count=st.integers(0, 2**32 - 1),
        codec=st.integers(0, 2**16 - 1),
        data_length=st.integers(0, 2**32 - 1),
        data_digest=st.binary(min_size=32, max_size=32),
        flags=st.integers(0, 2**16 - 1),
        reserved=st.integers(0, 2**16 - 1),
    )
)
def test_header_there_and_back(header: PayloadHeader) -> None:
    assert PayloadHeader.unpack(header.pack()) == header


@given(st.binary(max_size=50) | st.from_regex(rb"(k|v|kv)\.[a-z]{1,33}\.s[0-9]{1,11}"))
def test_track_names(name: bytes) -> None:
    try:
        track = parse_track_name(name)
    except UsageError:
        return
    if track is None:
        assert name.startswith(b"manifest")
    else:
        assert track.name == name


FIELD = st.binary(max_size=40)


@given(st.lists(FIELD, max_size=7).map(tuple))
def test_any_namespace(fields: tuple[bytes, ...]) -> None:
    try:
        assert PublicationNamespace.parse(fields).fields == fields
    except PublicationError:
        pass


@given(*(st.binary(min_size=size, max_size=size) for size in (16, 32, 32, 16)))
def test_holder_uris_there_and_back(scope: bytes, compat: bytes, key: bytes, unique: bytes) -> None:
    namespace = PublicationNamespace(scope, compat, key, unique)
    assert parse_holder_uri(holder_uri("moqt://h:1/p", namespace)) == ("moqt://h:1/p", namespace)


@given(st.text(max_size=60))
def test_any_text_as_holder_uri(text: str) -> None:
    try:
        parse_holder_uri("moqt://h#kvcs:" + text)
    except UsageError:
        pass


@given(st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode()))
@example(MANIFEST)
def test_any_octets_as_manifest_and_as_descriptor(octets: bytes) -> None:
    try:
        manifest = parse_manifest(octets)
    except PublicationError:
        pass
    else:
        assert parse_manifest(manifest_json_bytes(manifest)) == manifest
    try:
        descriptor = Descriptor.parse(octets)
    except UsageError:
        pass
    else:
        assert Descriptor.parse(descriptor.canonical()) == descriptor


@settings(max_examples=300)
@given(st.integers(0, len(MANIFEST) - 1), st.integers(0, 255), st.integers(0, 20))
def test_a_mutated_manifest(at: int, octet: int, dropped: int) -> None:
    octets = MANIFEST[:at] + bytes([octet]) + MANIFEST[at + dropped :]
    try:
        manifest = parse_manifest(octets)
    except PublicationError:
        return
    assert parse_manifest(manifest_json_bytes(manifest)) == manifest


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    if isinstance(value, dict | list):
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            found += _paths(inner, (*path, name))
    return found


def _damaged(path: tuple[Any, ...], replacement: Any) -> bytes:
    document = json.loads(MANIFEST)
    place = document
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = replacement
    return json.dumps(document).encode()


@settings(max_examples=300)
@given(st.sampled_from(_paths(json.loads(MANIFEST))), JSON)
def test_a_manifest_with_any_value_anywhere(path: tuple[Any, ...], replacement: Any) -> None:
    try:
        parse_manifest(_damaged(path, replacement))
    except PublicationError:
        pass


TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)


@given(
    model=TEXT,
    weights=TEXT,
    layers=st.integers(1, 65_535),
    dtype=st.sampled_from(sorted(DTYPES)),
    extra=st.dictionaries(TEXT, TEXT | st.integers(-(2**53) + 1, 2**53 - 1), max_size=5),
)
def test_descriptors_there_and_back_in_any_member_order(**members: Any) -> None:
    descriptor = toy_descriptor(**members)
    assert Descriptor.parse(descriptor.canonical()) == descriptor
    turned = json.dumps(dict(reversed(descriptor.to_json().items())))
    assert Descriptor.parse(turned.encode()).canonical() == descriptor.canonical()


@given(st.lists(st.integers(0, 2**32 - 1), min_size=4, max_size=40), st.data())
def test_a_changed_token_changes_its_key_and_every_later_one(
    tokens: list[int], data: st.DataObject
) -> None:
    changed = list(tokens)
    at = data.draw(st.integers(0, len(tokens) - 1))
    changed[at] = (changed[at] + 1) % 2**32
    before, after = (Prefix(SCOPE, toy_descriptor(), ids).block_keys for ids in (tokens, changed))
    assert before[: at // 4] == after[: at // 4]
    assert not set(before[at // 4 :]) & set(after[at // 4 :])


@given(st.sampled_from(sorted(DTYPES)), st.binary(min_size=64, max_size=64))
def test_arrays_to_octets_and_back_are_exact(name: str, octets: bytes) -> None:
    array = np.frombuffer(octets, DTYPES[name]).reshape(4, 2, -1)
    view = byte_view(array)
    assert bytes(view) == octets
    assert np.shares_memory(np.frombuffer(view, np.uint8), array)
