"""What holds for every data stream and datagram, however it is cut."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvcs.errors import SessionError
from kvcs.moqt.data import (
    CONTROL_STREAM,
    FetchEncoder,
    FetchHeader,
    FetchParser,
    Item,
    ObjectChunk,
    ObjectEnded,
    ObjectHeader,
    ObjectStarted,
    PaddingDatagram,
    PaddingHeader,
    RangeMarked,
    SubgroupEncoder,
    SubgroupHeader,
    SubgroupParser,
    decode_datagram,
    read_stream_header,
)
from kvcs.moqt.names import GroupOrder
from kvcs.moqt.wire import NeedMore, Reader
from tests.property import moqt_strategies as moqt

Parser = SubgroupParser | FetchParser
Joined = list[object]


def join(items: list[Item]) -> Joined:
    """The items, with the chunks of each payload made one."""
    joined: Joined = []
    for item in items:
        if isinstance(item, ObjectChunk):
            before = joined.pop() if isinstance(joined[-1], bytes) else b""
            assert isinstance(before, bytes) and item.data
            joined.append(before + item.data)
        else:
            joined.append(item)
    return joined


def expected(header: ObjectHeader, payload: bytes) -> Joined:
    middle: Joined = [payload] if payload else []
    return [ObjectStarted(header), *middle, ObjectEnded()]


def feed(parser: Parser, pieces: list[bytes]) -> Joined:
    return join([item for piece in pieces for item in parser.feed(piece)])


@given(st.data(), moqt.subgroup_headers)
def test_subgroup_streams_come_out_as_they_went_in(
    data: st.DataObject, header: SubgroupHeader
) -> None:
    reader = Reader(header.encode())
    assert read_stream_header(reader) == header
    reader.finish()
    encoder, wanted, octets = SubgroupEncoder(header), [], b""
    for object_header, payload in data.draw(moqt.subgroup_objects(header)):
        octets += encoder.object(object_header) + payload
        wanted += expected(object_header, payload)
    parser = SubgroupParser(header)
    assert feed(parser, data.draw(moqt.chopped(octets))) == wanted
    assert not parser.mid_object and not parser.buffered
    parser.finish()


@given(st.data(), st.sampled_from(GroupOrder))
def test_fetch_streams_come_out_as_they_went_in(
    data: st.DataObject, group_order: GroupOrder
) -> None:
    encoder, octets = FetchEncoder(group_order), b""
    wanted: Joined = []
    for head, tail in data.draw(moqt.fetch_items(group_order)):
        if isinstance(head, ObjectHeader):
            assert isinstance(tail, bytes)
            octets += encoder.object(head) + tail
            wanted += expected(head, tail)
        else:
            assert not isinstance(tail, bytes)
            octets += encoder.marker(head, tail)
            wanted.append(RangeMarked(head, tail))
    parser = FetchParser(group_order)
    assert feed(parser, data.draw(moqt.chopped(octets))) == wanted
    parser.finish()


@given(
    st.data(),
    moqt.subgroup_headers | st.sampled_from(GroupOrder),
    st.binary(max_size=80) | st.lists(st.integers(0, 8), max_size=80).map(bytes),
)
def test_any_octets_give_the_same_items_however_they_are_cut(
    data: st.DataObject, what: SubgroupHeader | GroupOrder, octets: bytes
) -> None:
    def parse(pieces: list[bytes]) -> tuple[list[Item], object]:
        parser = FetchParser(what) if isinstance(what, GroupOrder) else SubgroupParser(what)
        items: list[Item] = []
        for piece in pieces:
            try:
                items += parser.feed(piece)
            except SessionError as exc:
                return items, exc.code
        return items, (parser.mid_object, parser.buffered)

    whole, outcome = parse([octets])
    cut, cut_outcome = parse(data.draw(moqt.chopped(octets)))
    if isinstance(outcome, tuple):
        assert join(cut) == join(whole)
    else:
        assert not whole  # a violation takes the items of its own piece with it
    assert outcome == cut_outcome


@given(st.binary(max_size=40))
def test_any_octets_give_a_stream_header_need_more_or_a_session_error(octets: bytes) -> None:
    reader = Reader(octets)
    try:
        header = read_stream_header(reader)
    except NeedMore:
        assert reader.pos == 0
        return
    except SessionError:
        return
    if header is CONTROL_STREAM:
        assert reader.pos == 0 and Reader(octets).vi64() == 0x2F00
    else:
        assert isinstance(header, SubgroupHeader | FetchHeader | PaddingHeader)
        again = header.encode()
        assert read_stream_header(Reader(again)) == header


@given(moqt.datagrams())
def test_datagrams_decode_to_themselves(datagram: object) -> None:
    assert decode_datagram(datagram.encode()) == datagram  # type: ignore[attr-defined]


@given(st.binary(max_size=40))
def test_any_datagram_gives_an_object_padding_or_a_session_error(octets: bytes) -> None:
    try:
        datagram = decode_datagram(octets)
    except SessionError:
        return
    if not isinstance(datagram, PaddingDatagram):
        assert decode_datagram(datagram.encode()) == datagram
