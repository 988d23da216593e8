"""Recorded exchanges of another implementation, decoded whole and cut at every octet."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import pytest

from kvcs.moqt import messages as m
from kvcs.moqt.data import (
    CONTROL_STREAM,
    FetchHeader,
    FetchParser,
    ObjectChunk,
    ObjectEnded,
    ObjectHeader,
    ObjectStarted,
    ObjectStatus,
    RangeMarked,
    StreamHeader,
    SubgroupHeader,
    SubgroupParser,
    read_stream_header,
)
from kvcs.moqt.framing import MessageReader, encode_message
from kvcs.moqt.names import GroupOrder
from kvcs.moqt.parameters import Parameters, ParameterType
from kvcs.moqt.properties import KeyValues, check_object_properties, check_setup_options
from kvcs.moqt.wire import NeedMore, Reader
from tests.unit.moqt.rendering import file_names, load

FILES = file_names("sessions")

SEEDED = ("join-", "fetch-", "unfiltered-", "update-", "late-", "publisher-lost", "goaway-")
"""Files whose payloads can be computed: SHAKE-128 of seed, Group and Object."""


def sessions(file: str) -> Iterator[list[dict[str, Any]]]:
    for session in load(file)["sessions"]:
        yield [entry for entry in session["entries"] if entry["hex"]]


def pieces(octets: bytes, cuts: Iterable[int]) -> list[bytes]:
    edges = [0, *cuts, len(octets)]
    return [octets[a:b] for a, b in pairwise(edges)]


class DataStream:
    """One data stream, fed in pieces."""

    def __init__(self, group_order: GroupOrder) -> None:
        self.group_order = group_order
        self.header: StreamHeader | None = None
        self.items: list[RangeMarked | tuple[ObjectHeader, bytes]] = []
        self.ended = 0
        self._head = b""
        self._parser: SubgroupParser | FetchParser | None = None

    def feed(self, piece: bytes) -> None:
        if self._parser is None:
            self._head += piece
            reader = Reader(self._head)
            try:
                self.header = read_stream_header(reader)
            except NeedMore:
                return
            if isinstance(self.header, FetchHeader):
                self._parser = FetchParser(self.group_order)
            else:
                assert isinstance(self.header, SubgroupHeader)
                self._parser = SubgroupParser(self.header)
            piece = self._head[reader.pos :]
        for item in self._parser.feed(piece):
            match item:
                case ObjectStarted(header):
                    self.items.append((header, b""))
                case ObjectChunk(data):
                    last = self.items[-1]
                    assert isinstance(last, tuple) and not isinstance(last, RangeMarked)
                    self.items[-1] = (last[0], last[1] + data)
                case ObjectEnded():
                    self.ended += 1
                case RangeMarked():
                    self.items.append(item)

    def finish(self) -> None:
        assert self._parser is not None
        self._parser.finish()

    def objects(self) -> list[tuple[ObjectHeader, bytes]]:
        return [item for item in self.items if not isinstance(item, RangeMarked)]


def read_data(octets: bytes, cuts: Iterable[int], group_order: GroupOrder) -> DataStream:
    stream = DataStream(group_order)
    for piece in pieces(octets, cuts):
        stream.feed(piece)
    return stream


def read_messages(octets: bytes, cuts: Iterable[int]) -> list[m.Message]:
    reader = MessageReader()
    messages = [message for piece in pieces(octets, cuts) for message in reader.feed(piece)]
    assert not reader.pending
    return messages


def fill_orders(session: list[dict[str, Any]]) -> dict[int, GroupOrder]:
    """Group Order of each fetch stream a session may have, by Request ID, from its requests."""
    orders: dict[int, GroupOrder] = {}
    for entry in session:
        if entry["kind"] != "request":
            continue
        inherited = GroupOrder.ASCENDING
        for message in read_messages(bytes.fromhex(entry["hex"]), ()):
            if not isinstance(message, m.Fetch | m.Subscribe | m.RequestUpdate):
                continue
            inherited = message.parameters.get(ParameterType.GROUP_ORDER, inherited)
            fill = message.parameters.get(ParameterType.FILL_PARAMETERS, Parameters())
            order = fill.get(ParameterType.GROUP_ORDER, inherited)
            orders[message.request_id] = GroupOrder(order)
    return orders


def data_entries(file: str) -> Iterator[tuple[dict[str, Any], bytes, GroupOrder]]:
    for session in sessions(file):
        orders = fill_orders(session)
        for entry in session:
            if entry["kind"] != "data":
                continue
            octets = bytes.fromhex(entry["hex"])
            header = read_stream_header(Reader(octets))
            order = GroupOrder.ASCENDING
            if isinstance(header, FetchHeader):
                order = orders[header.request_id]
            yield entry, octets, order


@pytest.mark.parametrize("file", FILES)
def test_control_messages_decode_and_encode_to_the_same_octets(file: str) -> None:
    for session in sessions(file):
        for entry in session:
            if entry["kind"] == "data":
                continue
            octets = bytes.fromhex(entry["hex"])
            messages = read_messages(octets, ())
            for message, cut_out in zip(messages, entry["messages"], strict=True):
                assert encode_message(message).hex() == cut_out["hex"]
                name = cut_out["name"].replace("_", "").lower()
                assert type(message).__name__.lower() == name


@pytest.mark.parametrize("file", FILES)
def test_control_streams_begin_with_setup(file: str) -> None:
    for session in sessions(file):
        for entry in session:
            if entry["kind"] == "control":
                octets = bytes.fromhex(entry["hex"])
                assert read_stream_header(Reader(octets)) is CONTROL_STREAM
                first = MessageReader({m.SETUP_TYPE}, {0x10}).feed(octets)[0]
                assert isinstance(first, m.Setup)
                check_setup_options(first.options, entry["direction"] == "client->server")


@pytest.mark.parametrize("file", FILES)
def test_data_streams_decode_to_what_was_published(file: str) -> None:
    stem = file.partition("/")[2]
    seed = f"vec{stem}" if "relay" in stem else "vec"
    compared = 0
    for entry, octets, order in data_entries(file):
        stream = read_data(octets, (), order)
        if entry["end"] == "fin":
            stream.finish()
            assert stream.ended == len(stream.objects())
        for header, payload in stream.objects():
            check_object_properties(KeyValues.decode(header.properties), header.location)
            if header.status is not ObjectStatus.NORMAL:
                assert payload == b""
            elif stem.startswith(SEEDED):
                text = f"{seed}/{header.group_id}/{header.object_id}"
                wanted = hashlib.shake_128(text.encode()).digest(40)
                assert payload == wanted[: len(payload)]
                assert header.payload_length == 40
                assert header.publisher_priority == 64 + header.group_id % 64
                compared += 1
    # The one FETCH that is refused has no Objects.
    assert bool(compared) == (stem.startswith(SEEDED) and stem != "fetch-direct-error")


def unique_streams() -> tuple[set[bytes], set[tuple[bytes, GroupOrder]]]:
    """All streams of all files, each once: control octets, and data octets with their order."""
    control, data = set(), set()
    for file in FILES:
        for session in sessions(file):
            for entry in session:
                if entry["kind"] != "data":
                    control.add(bytes.fromhex(entry["hex"]))
        for _, octets, order in data_entries(file):
            data.add((octets, order))
    return control, data


CONTROL, DATA = unique_streams()


def test_messages_are_the_same_however_a_stream_is_cut() -> None:
    assert len(CONTROL) > 50
    for octets in CONTROL:
        whole = read_messages(octets, ())
        for cut in range(1, len(octets)):
            assert read_messages(octets, (cut,)) == whole
        assert read_messages(octets, range(1, len(octets))) == whole


def test_objects_are_the_same_however_a_stream_is_cut() -> None:
    assert len(DATA) > 50
    for octets, order in DATA:
        whole = read_data(octets, (), order)
        for cuts in (*((cut,) for cut in range(1, len(octets))), range(1, len(octets))):
            cut = read_data(octets, cuts, order)
            assert (cut.header, cut.items, cut.ended) == (whole.header, whole.items, whole.ended)


def test_descending_and_marked_streams_are_among_them() -> None:
    assert any(order is GroupOrder.DESCENDING for _, order in DATA)
    streams = [read_data(octets, (), order) for octets, order in DATA]
    assert any(isinstance(item, RangeMarked) for stream in streams for item in stream.items)
