"""Data streams: what parsers and encoders do, and what it costs (MOQT §11.3, §11.4)."""

from __future__ import annotations

import pytest

from kvcs.errors import UsageError
from kvcs.moqt import data
from kvcs.moqt.data import (
    MAX_OBJECT_PROPERTIES,
    FetchEncoder,
    FetchParser,
    Item,
    ObjectChunk,
    ObjectEnded,
    ObjectHeader,
    ObjectStarted,
    ObjectStatus,
    RangeKind,
    RangeMarked,
    SubgroupEncoder,
    SubgroupHeader,
    SubgroupParser,
)
from kvcs.moqt.errors import ProtocolViolation
from kvcs.moqt.names import MAX_VI64, GroupOrder, Location
from kvcs.moqt.wire import encode_vi64

HEADER = SubgroupHeader(track_alias=1, group_id=7, subgroup_id=0, publisher_priority=9)
WITH_PROPERTIES = SubgroupHeader(1, 7, 0, 9, has_properties=True)
MAX = "ff" * 9

FIXED_FIELDS = 5 * 9 + 1 + 2 * 9
"""Octets of the longest item header without its Properties, in the longest forms, and more."""


def subgroup(hex_: str, header: SubgroupHeader = HEADER) -> list[Item]:
    parser = SubgroupParser(header)
    items = parser.feed(bytes.fromhex(hex_))
    parser.finish()
    return items


def fetch(hex_: str, group_order: GroupOrder = GroupOrder.ASCENDING) -> list[Item]:
    parser = FetchParser(group_order)
    items = parser.feed(bytes.fromhex(hex_))
    parser.finish()
    return items


def headers(items: list[Item]) -> list[ObjectHeader]:
    return [item.header for item in items if isinstance(item, ObjectStarted)]


def places(items: list[Item]) -> list[tuple[int, int]]:
    return [
        item.location if isinstance(item, RangeMarked) else item.header.location
        for item in items
        if isinstance(item, RangeMarked | ObjectStarted)
    ]


# ------------------------------------------------------------------------- subgroup streams


def test_an_object_comes_as_started_chunks_and_ended() -> None:
    parser = SubgroupParser(HEADER)
    header = ObjectHeader(7, 5, 0, 9, payload_length=4)
    assert parser.feed(bytes.fromhex("0504abcd")) == [
        ObjectStarted(header),
        ObjectChunk(memoryview(b"\xab\xcd")),
    ]
    assert parser.mid_object
    assert parser.feed(b"") == []
    assert parser.feed(b"\xef") == [ObjectChunk(memoryview(b"\xef"))]
    assert parser.feed(b"\x01\x00\x00") == [
        ObjectChunk(memoryview(b"\x01")),
        ObjectEnded(),
    ]
    with pytest.raises(ProtocolViolation, match="inside the header"):
        parser.finish()
    assert places(parser.feed(b"\x03")) == [(7, 6)]
    parser.finish()


def test_ids_go_on_by_delta_plus_one() -> None:
    assert places(subgroup("00 01aa 00 01aa 03 01aa")) == [(7, 0), (7, 1), (7, 5)]


def test_the_first_object_may_give_the_subgroup_id() -> None:
    header = SubgroupHeader(1, 7, None, 9)
    parser = SubgroupParser(header)
    assert parser.subgroup_id is None
    items = parser.feed(bytes.fromhex("05 01aa 00 01bb"))
    assert [h.subgroup_id for h in headers(items)] == [5, 5]
    assert parser.subgroup_id == 5


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("00", ObjectStatus.NORMAL),
        ("03", ObjectStatus.END_OF_GROUP),
        ("8004", ObjectStatus.END_OF_TRACK),
    ],
)
def test_an_empty_payload_has_a_status(code: str, status: ObjectStatus) -> None:
    assert subgroup(f"0000{code}") == [
        ObjectStarted(ObjectHeader(7, 0, 0, 9, status)),
        ObjectEnded(),
    ]


@pytest.mark.parametrize(
    ("hex_", "header", "match"),
    [
        ("000001", HEADER, "Object Status 0x1"),
        ("00023c010003", WITH_PROPERTIES, "Properties on a END_OF_GROUP"),
        (MAX + "01aa" + "0001bb", HEADER, "Object ID above"),
        ("00" + "c10000", WITH_PROPERTIES, "65536 octets, limit 65535"),
        ("0004ab", HEADER, "3 octets of an Object to come"),
        ("00", HEADER, "inside the header"),
        ("0005", WITH_PROPERTIES, "inside the header"),
    ],
)
def test_subgroup_streams_that_close_the_session(
    hex_: str, header: SubgroupHeader, match: str
) -> None:
    with pytest.raises(ProtocolViolation, match=match):
        subgroup(hex_, header)


def test_a_smaller_limit_of_properties_can_be_set() -> None:
    parser = SubgroupParser(WITH_PROPERTIES, max_properties=3)
    assert headers(parser.feed(bytes.fromhex("0003020102 0000"))) == [
        ObjectHeader(7, 0, 0, 9, properties=bytes.fromhex("020102"))
    ]
    with pytest.raises(ProtocolViolation, match="limit 3"):
        parser.feed(bytes.fromhex("0004"))


# ---------------------------------------------------------------------------- fetch streams


def test_group_deltas_count_in_the_request_s_order() -> None:
    stream = "1c09008001aa 0001bb 0c000001cc 0c020001dd"
    assert places(fetch(stream, GroupOrder.DESCENDING)) == [(9, 0), (9, 1), (8, 0), (5, 0)]
    assert places(fetch(stream)) == [(9, 0), (9, 1), (10, 0), (13, 0)]


def test_object_ids_are_absolute_in_a_new_group_and_deltas_without_one_in_the_same() -> None:
    stream = "1c03028001aa 040401aa 0c000701aa 0801 01aa"
    assert places(fetch(stream)) == [(3, 2), (3, 6), (4, 7), (6, 8)]


def test_subgroups_refer_to_the_prior_object() -> None:
    stream = "1f0007008001aa 0101aa 0201aa 0001aa 0101aa 4001aa 0201aa"
    assert [h.subgroup_id for h in headers(fetch(stream))] == [7, 7, 8, 0, 0, None, 1]


def test_a_datagram_object_ignores_the_subgroup_bits() -> None:
    assert [h.subgroup_id for h in headers(fetch("5f00008001aa 4301aa"))] == [None, None]


def test_priorities_last_until_changed() -> None:
    stream = "1c00000a01aa 0001aa 101401aa 0001aa"
    assert [h.publisher_priority for h in headers(fetch(stream))] == [10, 10, 20, 20]


def test_no_object_on_a_fetch_stream_has_a_status() -> None:
    items = fetch("1c00008000 0001aa")
    assert [h.payload_length for h in headers(items)] == [0, 1]
    assert all(h.status is ObjectStatus.NORMAL for h in headers(items))


def test_properties_of_length_0_are_legal() -> None:
    assert [h.properties for h in headers(fetch("3c0000800001aa 20023c0101bb"))] == [
        b"",
        b"\x3c\x01",
    ]


def test_markers_are_absolute_and_change_the_prior_location_only() -> None:
    stream = "1f01050080 01aa 810c0209 0101bb"
    items = fetch(stream)
    assert places(items) == [(1, 0), (2, 9), (2, 10)]
    assert headers(items)[1] == ObjectHeader(2, 10, 5, 128, payload_length=1)
    assert RangeMarked(RangeKind.UNKNOWN, Location(2, 9)) in items


def test_behind_a_leading_marker_an_object_may_omit_its_group() -> None:
    assert places(fetch("820c050a 14018001aa")) == [(5, 10), (5, 11)]
    assert places(fetch("820c050a 108001aa")) == [(5, 10), (5, 11)]
    assert places(fetch("808c050a 1c00038001aa")) == [(5, 10), (6, 3)]


@pytest.mark.parametrize(
    ("hex_", "match"),
    [
        ("14008001", "no Group ID or no Object ID"),
        ("18008001", "no Group ID or no Object ID"),
        ("0c0000", "prior Publisher Priority"),
        ("1d0000", "prior Subgroup ID"),
        ("1e0000", "prior Subgroup ID"),
        ("820c050a 0401", "prior Publisher Priority"),
        ("820c050a 1501", "prior Subgroup ID"),
        ("8080", "0x80"),
        ("808d", "0x8d"),
        ("8100", "0x100"),
        (f"1c{MAX}008001aa 0c0000", "Group ID"),
        (f"1c00{MAX}8001aa 0001", "Object ID"),
        (f"1c00{MAX}8001aa 040101", "Object ID"),
        (f"820c05{MAX} 108001", "Object ID"),
        (f"1f00{MAX}008001aa 0201", "Subgroup ID"),
        ("3c000080c10000", "limit 65535"),
        ("1c00008004dead", "2 octets of an Object to come"),
        ("1c0000", "inside the header"),
        ("820c05", "inside the header"),
    ],
)
def test_fetch_streams_that_close_the_session(hex_: str, match: str) -> None:
    with pytest.raises(ProtocolViolation, match=match):
        fetch(hex_)


def test_descending_below_group_0_closes_the_session() -> None:
    with pytest.raises(ProtocolViolation, match="Group ID"):
        fetch("1c01008001aa 0c0100", GroupOrder.DESCENDING)


# ---------------------------------------------------------------------------------- encoders


def normal(group_id: int, object_id: int, **fields: object) -> ObjectHeader:
    return ObjectHeader(group_id, object_id, **{"publisher_priority": 9, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "bad",
    [
        normal(8, 3),
        normal(7, 2),
        normal(7, 1),
        normal(7, 3, properties=b"\x02\x01"),
        normal(7, 3, status=ObjectStatus.END_OF_GROUP, payload_length=1),
    ],
)
def test_a_subgroup_encoder_refuses_what_the_stream_cannot_carry(bad: ObjectHeader) -> None:
    encoder = SubgroupEncoder(HEADER)
    encoder.object(normal(7, 2, payload_length=1))
    with pytest.raises(UsageError):
        encoder.object(bad)
    # Nothing changed: the next ID is still counted from 2.
    assert encoder.object(normal(7, 3, payload_length=1)) == b"\x00\x01"


def test_properties_have_the_limit_that_parsers_have() -> None:
    longest = normal(7, 0, properties=bytes(MAX_OBJECT_PROPERTIES))
    parser = SubgroupParser(WITH_PROPERTIES)
    assert headers(parser.feed(SubgroupEncoder(WITH_PROPERTIES).object(longest))) == [
        ObjectHeader(7, 0, 0, 9, properties=bytes(MAX_OBJECT_PROPERTIES))
    ]
    for encoder in (SubgroupEncoder(WITH_PROPERTIES), FetchEncoder(GroupOrder.ASCENDING)):
        with pytest.raises(UsageError, match="limit"):
            encoder.object(normal(7, 0, properties=bytes(MAX_OBJECT_PROPERTIES + 1)))


def test_only_normal_objects_have_properties() -> None:
    encoder = SubgroupEncoder(WITH_PROPERTIES)
    with pytest.raises(UsageError):
        encoder.object(normal(7, 0, status=ObjectStatus.END_OF_GROUP, properties=b"\x02\x01"))


@pytest.mark.parametrize("order", GroupOrder)
def test_a_fetch_encoder_keeps_the_order(order: GroupOrder) -> None:
    encoder = FetchEncoder(order)
    encoder.object(normal(5, 5))
    wrong = 4 if order is GroupOrder.ASCENDING else 6
    for place in (Location(5, 5), Location(5, 4), Location(wrong, 9)):
        with pytest.raises(UsageError, match="cannot follow"):
            encoder.object(normal(*place))
        with pytest.raises(UsageError, match="cannot follow"):
            encoder.marker(RangeKind.UNKNOWN, place)
    encoder.marker(RangeKind.UNKNOWN, Location(5, 9))
    with pytest.raises(UsageError, match="cannot follow"):
        encoder.object(normal(5, 9))


@pytest.mark.parametrize(
    "bad",
    [
        normal(0, 0, publisher_priority=None),
        normal(0, 0, publisher_priority=256),
        normal(0, 0, status=ObjectStatus.END_OF_TRACK),
    ],
)
def test_a_fetch_encoder_refuses_what_the_stream_cannot_carry(bad: ObjectHeader) -> None:
    with pytest.raises(UsageError):
        FetchEncoder(GroupOrder.ASCENDING).object(bad)


def test_nothing_refers_to_the_subgroup_of_a_datagram() -> None:
    encoder = FetchEncoder(GroupOrder.ASCENDING)
    encoder.object(normal(0, 0, subgroup_id=None))
    # Flags 0x03: the Subgroup ID itself, where "prior + 1" would do if a datagram counted as 0.
    assert encoder.object(normal(0, 1, subgroup_id=1)).hex() == "030100"


# -------------------------------------------------------------------------------------- cost


def test_payload_comes_as_views_of_what_was_fed() -> None:
    payload = bytes(range(256)) * 16384
    octets = SubgroupEncoder(HEADER).object(normal(7, 0, payload_length=len(payload))) + payload
    parser = SubgroupParser(HEADER)
    received = 0
    for start in range(0, len(octets), 1200):
        piece = octets[start : start + 1200]
        items = parser.feed(piece)
        assert len(items) <= 3
        for item in items:
            if isinstance(item, ObjectChunk):
                assert item.data.obj is piece
                assert item.data == payload[received : received + len(item.data)]
                received += len(item.data)
        assert parser.buffered == 0
    assert received == len(payload)
    parser.finish()


def test_views_may_be_fed_and_are_sliced() -> None:
    octets = bytes.fromhex("0003aabbcc")
    items = SubgroupParser(HEADER).feed(memoryview(octets))
    assert isinstance(items[1], ObjectChunk)
    assert items[1].data.obj is octets


@pytest.mark.parametrize("step", [1, 7, 1200])
@pytest.mark.parametrize("which", ["subgroup", "fetch"])
def test_a_header_costs_a_bounded_number_of_looks_whatever_the_cut(
    which: str, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = integers = 0
    read_vi64 = data._vi64

    def counting_vi64(*args: object) -> tuple[int, int]:
        nonlocal integers
        integers += 1
        return read_vi64(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(data, "_vi64", counting_vi64)
    base: type[SubgroupParser] | type[FetchParser] = (
        SubgroupParser if which == "subgroup" else FetchParser
    )

    class Counting(base):  # type: ignore[valid-type, misc]
        __slots__ = ()

        def _parse(self, *args: object) -> int:
            nonlocal looks
            looks += 1
            return int(super()._parse(*args))

    encoder = (
        SubgroupEncoder(WITH_PROPERTIES)
        if which == "subgroup"
        else FetchEncoder(GroupOrder.ASCENDING)
    )
    objects = 8
    octets = b""
    for number in range(objects):
        header = normal(
            7,
            2**40 + number * 3,
            properties=bytes(20000),
            payload_length=3000,
            subgroup_id=0 if which == "subgroup" else number * 2**50,
        )
        octets += encoder.object(header) + bytes(3000)
    parser = Counting(WITH_PROPERTIES if which == "subgroup" else GroupOrder.ASCENDING)
    ended = 0
    for start in range(0, len(octets), step):
        items = parser.feed(octets[start : start + step])
        ended += sum(isinstance(item, ObjectEnded) for item in items)
        # Never more than one header is held, and no payload.
        assert parser.buffered <= 20000 + FIXED_FIELDS
    assert ended == objects
    # Each look but the first finds at least one more field whole: 8 fields at most, each with
    # one look for its first octet and one for the rest.
    assert looks <= objects * (1 + 2 * 8)
    assert integers <= looks * 6


def test_a_cut_header_takes_only_its_own_octets() -> None:
    parser = SubgroupParser(HEADER)
    longest = b"\xff" + (2**40).to_bytes(8, "big")
    assert parser.feed(longest[:4]) == []
    assert parser.buffered == 4
    piece = longest[4:] + encode_vi64(5000) + bytes(4000)
    started, chunk = parser.feed(piece)
    assert isinstance(started, ObjectStarted)
    assert isinstance(chunk, ObjectChunk)
    assert chunk.data.obj is piece
    assert len(chunk.data) == 4000
    assert parser.buffered == 0


def test_a_payload_length_of_2_to_the_64_allocates_nothing() -> None:
    parser = SubgroupParser(HEADER)
    items = parser.feed(bytes.fromhex("00" + MAX + "aabb"))
    assert headers(items)[0].payload_length == MAX_VI64
    assert parser.buffered == 0
    with pytest.raises(ProtocolViolation):
        parser.finish()
