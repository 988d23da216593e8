"""Takes vectors to the codec and back, by the kind of file they are in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvcs.moqt import messages as m
from kvcs.moqt.data import (
    FetchEncoder,
    FetchHeader,
    FetchParser,
    ObjectChunk,
    ObjectDatagram,
    ObjectEnded,
    ObjectHeader,
    ObjectStarted,
    ObjectStatus,
    PaddingDatagram,
    PaddingHeader,
    RangeMarked,
    SubgroupEncoder,
    SubgroupHeader,
    SubgroupParser,
    decode_datagram,
    read_stream_header,
)
from kvcs.moqt.framing import MessageReader, encode_message
from kvcs.moqt.names import GroupOrder
from kvcs.moqt.parameters import PARAMETER_KINDS, ParameterType
from kvcs.moqt.properties import KeyValues
from kvcs.moqt.wire import Reader, encode_vi64
from tests.unit.moqt.rendering import (
    show_datagram,
    show_message,
    show_properties,
    show_subgroup_header,
    show_value,
)


@dataclass
class Stream:
    """A data stream taken apart."""

    header: SubgroupHeader | FetchHeader | PaddingHeader
    items: list[RangeMarked | tuple[ObjectHeader, bytes]]


def parse_stream(octets: bytes, group_order: GroupOrder) -> Stream:
    """Parse a whole data stream that ends with FIN."""
    reader = Reader(octets)
    header = read_stream_header(reader)
    assert isinstance(header, SubgroupHeader | FetchHeader | PaddingHeader)
    stream = Stream(header, [])
    if isinstance(header, PaddingHeader):
        return stream
    parser: FetchParser | SubgroupParser
    if isinstance(header, FetchHeader):
        parser = FetchParser(group_order)
    else:
        parser = SubgroupParser(header)
    payload = bytearray()
    for item in parser.feed(octets[reader.pos :]):
        match item:
            case ObjectStarted(started):
                payload.clear()
                object_header = started
            case ObjectChunk(data):
                payload += data
            case ObjectEnded():
                assert len(payload) == object_header.payload_length
                stream.items.append((object_header, bytes(payload)))
            case RangeMarked():
                stream.items.append(item)
    parser.finish()
    return stream


def only_message(octets: bytes) -> m.Message:
    reader = MessageReader()
    [message] = reader.feed(octets)
    assert not reader.pending
    return message


def order_of(vector: Any) -> GroupOrder:
    return GroupOrder(vector.get("fields", {}).get("group_order", 1))


VALUE_FILES = {"location_filter", "range_filter", "fill_parameters", "token"}


def read_value(octets: bytes, type_: int) -> Any:
    reader = Reader(octets)
    value = PARAMETER_KINDS[ParameterType(type_)].read(reader)
    reader.finish()
    return value


def decode(file: str, vector: Any) -> Any:
    """Decode a vector as what its file holds."""
    octets = bytes.fromhex(vector["hex"])
    kind = file.partition("/")[2]
    if kind == "varint":
        reader = Reader(octets)
        value = reader.vi64()
        reader.finish()
        return value
    if kind in VALUE_FILES and "fields" in vector:
        return read_value(octets, vector["fields"]["parameter_type"])
    if kind == "datagram" or (kind == "padding" and "type" in vector.get("fields", ())):
        return decode_datagram(octets)
    if kind in ("subgroup_stream", "fetch_stream", "padding"):
        return parse_stream(octets, order_of(vector))
    return only_message(octets)


def show_object(kind: str, header: ObjectHeader, payload: bytes) -> dict[str, Any]:
    shown: dict[str, Any] = {"object_id": header.object_id, "payload_hex": payload.hex()}
    if kind == "fetch_stream":
        shown |= {
            "group_id": header.group_id,
            "subgroup_id": header.subgroup_id,
            "publisher_priority": header.publisher_priority,
        }
        assert header.status is ObjectStatus.NORMAL
    return shown


def show(file: str, value: Any) -> dict[str, Any]:
    """Show what `decode` gave under the names of the vector files."""
    kind = file.partition("/")[2]
    if kind in ("varint", *VALUE_FILES):
        return {"value": show_value(value)}
    if isinstance(value, ObjectDatagram):
        return show_datagram(value)
    if isinstance(value, PaddingDatagram | m.Message):
        return show_message(value) if isinstance(value, m.Message) else {}
    items: list[Any] = []
    for item in value.items:
        if isinstance(item, RangeMarked):
            place = {"group_id": item.location.group, "object_id": item.location.object}
            items.append({"end_of_range": int(item.kind), **place})
        else:
            items.append(show_object(kind, *item))
            properties = KeyValues.decode(item[0].properties)
            items[-1]["properties"] = show_properties(properties)
            items[-1]["status"] = int(item[0].status)
            items[-1]["datagram"] = item[0].subgroup_id is None
    if isinstance(value.header, FetchHeader):
        return {"request_id": value.header.request_id, "items": items}
    if isinstance(value.header, SubgroupHeader):
        header = show_subgroup_header(value.header)
        # moqt22 has the header apart, without an ID that only the first Object gives.
        subgroup_id = value.items[0][0].subgroup_id if value.items else value.header.subgroup_id
        return {**header, "header": header, "subgroup_id": subgroup_id, "objects": items}
    return {}


IMPLIED = {"properties": [], "status": 0, "datagram": False}
"""What an object of a vector file leaves out."""

ANNOTATIONS = {
    *("type", "stream_type", "group_order", "length", "minimal", "explicit_zero", "replies_to"),
    *("updates", "message", "parameter_type", "in_subscribe_hex", "in_subscribe_tracks_hex"),
    *("evaluation", "decodes_to_types", "padding_length"),
}
"""Fields that say something about the octets, or repeat them; tested apart where it matters."""


def expected(fields: Any) -> dict[str, Any]:
    """The fields of a vector without annotations, and with what objects leave out."""
    wanted = {key: value for key, value in fields.items() if key not in ANNOTATIONS}
    for key in ("items", "objects"):
        for index, item in enumerate(wanted.get(key, ())):
            if "end_of_range" in item:
                wanted[key][index] = {k: v for k, v in item.items() if k != "meaning"}
            else:
                named = [dict(p) for p in item.get("properties", ())]
                wanted[key][index] = {**IMPLIED, **item, "properties": named}
                if item.get("subgroup_id", 0) is None:
                    wanted[key][index]["datagram"] = True
    return wanted


def encode(value: Any, group_order: GroupOrder, parameter_type: int | None) -> bytes:
    """Encode what `decode` gave."""
    if parameter_type is not None:
        return PARAMETER_KINDS[ParameterType(parameter_type)].write(value)
    if isinstance(value, int):
        return encode_vi64(value)
    if isinstance(value, ObjectDatagram):
        return value.encode()
    if isinstance(value, m.Message):
        return encode_message(value)
    encoder = (
        FetchEncoder(group_order)
        if isinstance(value.header, FetchHeader)
        else SubgroupEncoder(value.header)
    )
    parts = [value.header.encode()]
    for item in value.items:
        if isinstance(item, RangeMarked):
            assert isinstance(encoder, FetchEncoder)
            parts.append(encoder.marker(item.kind, item.location))
        else:
            parts += (encoder.object(item[0]), item[1])
    return b"".join(parts)
