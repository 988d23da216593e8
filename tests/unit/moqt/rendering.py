"""Shows decoded values in the form in which the vector files write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvcs.moqt import messages as m
from kvcs.moqt.data import ObjectDatagram, ObjectStatus, SubgroupHeader
from kvcs.moqt.filters import LocationFilter, LocationFilterType, Range, RangeFilter
from kvcs.moqt.names import MAX_VI64, Location
from kvcs.moqt.parameters import Parameters
from kvcs.moqt.properties import KeyValues, Property, SetupOption
from kvcs.moqt.tokens import Token, TokenAliasType
from kvcs.moqt.wire import FIELDS, TYPE_IDS

VECTORS = Path(__file__).resolve().parents[2] / "vectors"


def load(name: str) -> Any:
    """Read one vector file, for example "moqt22/subscribe"."""
    return json.loads((VECTORS / f"{name}.json").read_text())


def file_names(folder: str) -> list[str]:
    """Return the vector files of a folder, as `load` takes them."""
    return sorted(f"{folder}/{path.stem}" for path in (VECTORS / folder).glob("*.json"))


def show_octets(octets: bytes) -> Any:
    """Printable ASCII as text, anything else as hex."""
    if all(0x20 <= octet < 0x7F for octet in octets):
        return octets.decode()
    return {"hex": octets.hex()}


def show_location(location: Location) -> Any:
    return {"group": location.group, "object": location.object}


def show_range(span: Range | None) -> Any:
    """A range; the whole of its last Group as object null."""
    if span is None:
        return None
    end = span.end
    if end is None:
        return {"start": show_location(span.start), "end": None}
    last = None if end.object == MAX_VI64 else end.object
    return {"start": show_location(span.start), "end": {"group": end.group, "object": last}}


def show_token(token: Token) -> Any:
    shown: dict[str, Any] = {
        "alias_type": int(token.alias_type),
        "alias_type_name": token.alias_type.name,
    }
    if token.alias_type is not TokenAliasType.USE_VALUE:
        shown["alias"] = token.alias
    if token.alias_type in (TokenAliasType.REGISTER, TokenAliasType.USE_VALUE):
        shown |= {"token_type": token.token_type, "value_hex": token.value.hex()}
    return shown


def show_location_filter(value: LocationFilter) -> Any:
    shown: dict[str, Any] = {"type": int(value.type), "type_name": value.type.name}
    if value.type not in (LocationFilterType.NONE, LocationFilterType.NEXT_OBJECT):
        shown["start_group"] = value.start_group
    if value.type >= LocationFilterType.ABSOLUTE_START and "start_group" in shown:
        shown["start_object"] = value.start_object
    if value.type in (LocationFilterType.ABSOLUTE_GROUP_END, LocationFilterType.ABSOLUTE_RANGE):
        shown["end_group"] = value.end_group
    if value.type is LocationFilterType.ABSOLUTE_RANGE:
        shown["end_object"] = value.end_object
    return shown


def show_range_filter(value: RangeFilter) -> Any:
    shown: dict[str, Any] = {"set_id": value.set_id, "ranges": [list(r) for r in value.ranges]}
    if value.property_type is not None:
        shown["property_type"] = value.property_type
    return shown


def show_value(value: Any) -> Any:
    """The value of a Message Parameter."""
    match value:
        case int():
            return value
        case Location():
            return show_location(value)
        case LocationFilter():
            return show_location_filter(value)
        case RangeFilter():
            return show_range_filter(value)
        case Token():
            return show_token(value)
        case Parameters():
            return show_parameters(value)
        case tuple():
            return [show_octets(field) for field in value]
    raise AssertionError(f"no way to show {value!r}")


def show_parameters(parameters: Parameters) -> Any:
    return [
        {"type": int(type_), "name": type_.name, "value": show_value(value)}
        for type_, value in parameters.items
    ]


def show_properties(properties: KeyValues) -> Any:
    shown = []
    for type_, value in properties.items:
        entry: dict[str, Any] = {"type": type_}
        if type_ in tuple(Property):
            entry["name"] = Property(type_).name
        if isinstance(value, int):
            entry["value"] = value
        else:
            entry["value_hex"] = value.hex()
        shown.append(entry)
    return shown


def show_options(options: KeyValues) -> Any:
    shown = []
    for type_, value in options.items:
        name = SetupOption(type_).name if type_ in tuple(SetupOption) else "unknown"
        if type_ == SetupOption.AUTHORIZATION_TOKEN:
            assert isinstance(value, bytes)
            decoded: Any = show_token(Token.decode(value))
        elif isinstance(value, int):
            decoded = value
        else:
            decoded = show_octets(value) if name != "unknown" else {"hex": value.hex()}
        shown.append({"type": type_, "name": name, "value": decoded})
    return shown


_SHORT_NAMES = {"parameters": "params"}


def show_message(message: m.Message) -> dict[str, Any]:
    """All fields of a control message under the names of the vector files."""
    shown: dict[str, Any] = {"message_type": TYPE_IDS[type(message)]}
    for name, _ in FIELDS[type(message)]:
        value = getattr(message, name)
        match name:
            case "options":
                value = show_options(value)
            case "parameters":
                value = show_parameters(value)
            case "track_properties":
                value = show_properties(value)
            case "end_location":
                value = show_location(value)
            case "end_of_track":
                value = int(value)
            case "track_name":
                value = show_octets(value)
            case _ if name.startswith("track_namespace"):
                value = [show_octets(field) for field in value]
            case "redirect":
                if value is None:
                    continue
                value = {
                    "connect_uri": value.connect_uri,
                    "track_namespace": [show_octets(field) for field in value.track_namespace],
                    "track_name": show_octets(value.track_name),
                }
        shown[_SHORT_NAMES.get(name, name)] = value
    return shown


def show_subgroup_header(header: SubgroupHeader) -> dict[str, Any]:
    mode = {None: "first_object_id", 0: "zero"}.get(header.subgroup_id, "explicit")
    shown: dict[str, Any] = {
        "track_alias": header.track_alias,
        "group_id": header.group_id,
        "subgroup_id_mode": mode,
        "publisher_priority": header.publisher_priority,
        "properties": header.has_properties,
        "end_of_group": header.end_of_group,
        "first_object": header.first_object,
    }
    if header.subgroup_id is not None:
        shown["subgroup_id"] = header.subgroup_id
    return shown


def show_datagram(datagram: ObjectDatagram) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "track_alias": datagram.track_alias,
        "group_id": datagram.group_id,
        "object_id": datagram.object_id,
        "publisher_priority": datagram.publisher_priority,
    }
    if datagram.status is ObjectStatus.NORMAL:
        shown["payload_hex"] = datagram.payload.hex()
    else:
        shown["status"] = int(datagram.status)
    if datagram.end_of_group:
        shown["end_of_group"] = True
    if datagram.properties:
        shown["properties"] = show_properties(KeyValues.decode(datagram.properties))
    return shown
