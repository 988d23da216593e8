"""Stream headers and datagrams (MOQT §6.4.1, §11.2, §11.5)."""

from __future__ import annotations

import pytest

from kvcs.errors import UsageError
from kvcs.moqt.data import (
    CONTROL_STREAM,
    FetchHeader,
    ObjectDatagram,
    ObjectHeader,
    ObjectStatus,
    PaddingDatagram,
    PaddingHeader,
    SubgroupHeader,
    decode_datagram,
    read_stream_header,
)
from kvcs.moqt.errors import ProtocolViolation
from kvcs.moqt.names import Location
from kvcs.moqt.streams import MAX_STREAM_HEADER_OCTETS
from kvcs.moqt.wire import NeedMore, Reader, encode_vi64


def read(octets: bytes) -> object:
    reader = Reader(octets)
    header = read_stream_header(reader)
    reader.finish()
    return header


def test_exactly_the_draft_s_types_begin_a_stream() -> None:
    legal = {
        *(0x05, 0x2F00, 0x132B3E28),
        *(
            base + low
            for base in (0x10, 0x18, 0x30, 0x38, 0x50, 0x58, 0x70, 0x78)
            for low in range(6)
        ),
    }
    tail = bytes(4)
    for type_ in [*range(0x100), 0x2F00, 0x2EFF, 0x132B3E27, 0x132B3E28, 0x132B3E29, 2**64 - 1]:
        reader = Reader(encode_vi64(type_) + tail)
        if type_ in legal:
            read_stream_header(reader)
        else:
            with pytest.raises(ProtocolViolation, match="unknown stream type"):
                read_stream_header(reader)


def test_flags_of_a_subgroup_header() -> None:
    assert read(bytes.fromhex("58020780")) == SubgroupHeader(
        2, 7, 0, 128, end_of_group=True, first_object=True
    )
    assert read(bytes.fromhex("35 02 07 03")) == SubgroupHeader(2, 7, 3, None, has_properties=True)
    assert read(bytes.fromhex("12020780")) == SubgroupHeader(2, 7, None, 128)


@pytest.mark.parametrize(
    "header",
    [
        SubgroupHeader(2**64 - 1, 2**64 - 1, 2**64 - 1, 255),
        SubgroupHeader(1, 2, None, 0),
        FetchHeader(2**64 - 1),
        PaddingHeader(),
    ],
)
def test_a_cut_header_leaves_the_reader_where_it_was(
    header: SubgroupHeader | FetchHeader | PaddingHeader,
) -> None:
    octets = header.encode()
    assert len(octets) <= MAX_STREAM_HEADER_OCTETS
    for size in range(len(octets)):
        reader = Reader(octets[:size])
        with pytest.raises(NeedMore):
            read_stream_header(reader)
        assert reader.pos == 0
    assert read(octets) == header


def test_a_control_stream_keeps_its_first_octets() -> None:
    reader = Reader(b"\xaf\x00\x00\x00")
    assert read_stream_header(reader) is CONTROL_STREAM
    assert reader.remaining == 4


def test_an_unknown_type_needs_no_more_octets() -> None:
    with pytest.raises(ProtocolViolation):
        read_stream_header(Reader(b"\x16"))


@pytest.mark.parametrize("priority", [-1, 256])
def test_priorities_are_octets(priority: int) -> None:
    with pytest.raises(UsageError):
        SubgroupHeader(1, 2, 3, priority).encode()
    with pytest.raises(UsageError):
        ObjectDatagram(1, 2, 3, priority).encode()


# --------------------------------------------------------------------------------- datagrams


def test_a_datagram_has_the_header_of_an_object_without_subgroup() -> None:
    datagram = ObjectDatagram(1, 2, 3, None, b"abc", properties=b"\x02\x01")
    assert datagram.location == Location(2, 3)
    assert datagram.header == ObjectHeader(
        2, 3, None, None, properties=b"\x02\x01", payload_length=3
    )


def test_a_status_of_normal_is_an_empty_object() -> None:
    assert decode_datagram(bytes.fromhex("200102058000")) == ObjectDatagram(1, 2, 5, 128)


@pytest.mark.parametrize(
    "hex_",
    [
        *("", "00", "0001", "000102", "00010205", "0401", "80"),
        "10010205 80",
        "2201020580 03",
        "4001020580",
        "808001020580",
        "010102058000aa",
        "010102058005aa",
        "2101020580023c0203",
        "2001020580 01",
        "2001020580",
        "200102058003aa",
    ],
)
def test_datagrams_that_close_the_session(hex_: str) -> None:
    with pytest.raises(ProtocolViolation):
        decode_datagram(bytes.fromhex(hex_))


@pytest.mark.parametrize(
    "bad",
    [
        ObjectDatagram(1, 2, 3, 4, b"x", ObjectStatus.END_OF_GROUP),
        ObjectDatagram(1, 2, 3, 4, b"", ObjectStatus.END_OF_TRACK, end_of_group=True),
        ObjectDatagram(1, 2, 3, 4, b"", ObjectStatus.END_OF_TRACK, properties=b"\x02\x01"),
        ObjectDatagram(1, 2, 3, 4, properties=bytes(65536)),
    ],
    ids=["payload", "end-of-group", "properties", "long-properties"],
)
def test_datagrams_that_cannot_be_sent(bad: ObjectDatagram) -> None:
    with pytest.raises(UsageError):
        bad.encode()


def test_padding_is_discarded() -> None:
    assert decode_datagram(PaddingDatagram().encode(16)) == PaddingDatagram()
    assert len(PaddingDatagram().encode(16)) == 21
