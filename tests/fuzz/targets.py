"""What is fuzzed: each target takes any octets and raises nothing, unless there is a fault.

A target checks more than that nothing unexpected is raised: what decodes is encoded and decoded
again to the same, and a stream gives the same whole or cut.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvcs.errors import ObjectError, PublicationError, SessionError, UsageError
from kvcs.kv import Descriptor, PayloadHeader, manifest_json_bytes, parse_manifest
from kvcs.moqt.data import (
    FetchHeader,
    FetchParser,
    Item,
    ObjectChunk,
    SubgroupHeader,
    SubgroupParser,
    read_stream_header,
)
from kvcs.moqt.datagrams import ObjectDatagram, decode_datagram
from kvcs.moqt.framing import MessageReader, decode_body, encode_message
from kvcs.moqt.messages import Message
from kvcs.moqt.names import GroupOrder
from kvcs.moqt.parameters import ParameterList, Scope
from kvcs.moqt.wire import NeedMore, Reader
from tests.fuzz.soup import Soup

VECTORS = Path(__file__).resolve().parents[1] / "vectors"

Parsed = tuple[list[object], str]
"""What came of a stream, and the text of the error that ended it."""


def wire(octets: bytes) -> None:
    """Control messages, whole and cut; what decodes is written back."""
    cut = octets[0] if octets else 0

    def read(pieces: list[bytes]) -> Parsed:
        reader = MessageReader()
        found: list[object] = []
        try:
            for piece in pieces:
                found += reader.feed(piece)
            reader.check()
        except SessionError as exc:
            return found, exc.reason
        return found, ""

    body = octets[1:]
    whole = read([body])
    assert whole == read([body[:cut], body[cut:]])
    for message in whole[0]:
        _again(message)  # type: ignore[arg-type]


def _again(message: Message) -> None:
    try:
        frame = encode_message(message)
    except UsageError:
        return  # a reason that was not UTF-8 may have grown beyond its limit
    reader = Reader(frame)
    type_id, length = reader.vi64(), reader.uint16()
    assert len(frame) == reader.pos + length
    assert decode_body(type_id, frame[reader.pos :]) == message


def session(octets: bytes) -> None:
    """A whole session with a peer that does whatever the octets say."""
    Soup(octets).run()


def _items(parser: SubgroupParser | FetchParser, pieces: list[bytes]) -> Parsed:
    found: list[object] = []
    try:
        for piece in pieces:
            _join(found, parser.feed(piece))
        parser.finish()
    except SessionError as exc:
        return [], exc.reason  # a chunk's items are lost with its error, so cuts differ
    return found, ""


def _join(found: list[object], items: list[Item]) -> None:
    for item in items:
        if isinstance(item, ObjectChunk):
            if found and isinstance(found[-1], bytes):
                found[-1] += bytes(item.data)
            else:
                found.append(bytes(item.data))
        else:
            found.append(item)


def subgroup_stream(octets: bytes) -> None:
    """A subgroup stream with its header, whole and cut."""
    cut, reader = octets[0] if octets else 0, Reader(octets[1:])
    try:
        header = read_stream_header(reader)
    except (SessionError, NeedMore):
        return
    if not isinstance(header, SubgroupHeader):
        return
    body = reader.rest()
    whole = _items(SubgroupParser(header), [body])
    assert whole == _items(SubgroupParser(header), [body[:cut], body[cut:]])


def fetch_stream(octets: bytes) -> None:
    """A fetch stream with its header, whole and cut."""
    flags, reader = octets[0] if octets else 0, Reader(octets[1:])
    order = GroupOrder.DESCENDING if flags & 1 else GroupOrder.ASCENDING
    try:
        header = read_stream_header(reader)
    except (SessionError, NeedMore):
        return
    if not isinstance(header, FetchHeader):
        return
    body, cut = reader.rest(), flags >> 1
    assert _items(FetchParser(order), [body]) == _items(
        FetchParser(order), [body[:cut], body[cut:]]
    )


def datagram(octets: bytes) -> None:
    """One datagram; an Object is written back."""
    try:
        found = decode_datagram(octets)
    except SessionError:
        return
    if isinstance(found, ObjectDatagram):
        assert decode_datagram(found.encode()) == found


def parameters(octets: bytes) -> None:
    """Message Parameters of a place, written back."""
    scopes = list(Scope)
    kind = ParameterList(scopes[octets[0] % len(scopes)] if octets else Scope.SUBSCRIBE)
    try:
        found = kind.read(Reader(octets[1:]))
    except (SessionError, NeedMore):
        return
    assert kind.read(Reader(kind.write(found))) == found


def manifest(octets: bytes) -> None:
    """A manifest; one that is good is written back. And a descriptor."""
    try:
        found = parse_manifest(octets)
    except PublicationError:
        pass
    else:
        assert parse_manifest(manifest_json_bytes(found)) == found
    try:
        descriptor = Descriptor.parse(octets)
    except UsageError:
        pass
    else:
        assert Descriptor.parse(descriptor.canonical()) == descriptor


def payload_header(octets: bytes) -> None:
    """The header of a block's payload."""
    try:
        header = PayloadHeader.unpack(octets)
    except ObjectError:
        return
    assert header.pack() == octets[: len(header.pack())]


TARGETS: dict[str, Callable[[bytes], None]] = {
    "wire": wire,
    "session": session,
    "subgroup-stream": subgroup_stream,
    "fetch-stream": fetch_stream,
    "datagram": datagram,
    "parameters": parameters,
    "manifest": manifest,
    "payload-header": payload_header,
}
"""Targets by the name that `scripts/fuzz` takes."""


# ------------------------------------------------------------------------------------ corpus


def _vectors(*names: str) -> Iterator[bytes]:
    """Octets of vector files, good and bad ones."""
    for folder in ("moqt22", "moqt20-compatible"):
        for path in sorted((VECTORS / folder).glob("*.json")):
            if not names or path.stem in names:
                found: Any = json.loads(path.read_text())
                lists = [found] if isinstance(found, list) else found.values()
                for vector in [one for each in lists if isinstance(each, list) for one in each]:
                    if isinstance(vector, dict) and isinstance(vector.get("hex"), str):
                        yield bytes.fromhex(vector["hex"])


def _move(move: int, octets: bytes) -> bytes:
    octets = octets[:4095]
    length = (
        bytes((len(octets),))
        if len(octets) < 0xF0
        else bytes((0xF0 | len(octets) >> 8, len(octets) & 0xFF))
    )
    return bytes((move,)) + length + octets


def _recorded() -> Iterator[bytes]:
    """Recorded sessions as moves of a peer, in both roles."""
    for path in sorted((VECTORS / "sessions").glob("*.json")):
        for recorded in json.loads(path.read_text())["sessions"]:
            for flags in (0b1011, 0b1010):
                moves = [bytes((flags,))]
                for entry in recorded["entries"]:
                    if entry["hex"]:
                        uni = entry["kind"] not in ("request", "bidi")
                        moves.append(_move(1 if uni else 0, bytes.fromhex(entry["hex"])))
                        moves.append(b"\x09\x01")
                yield b"".join(moves)[:16384]


def corpus(target: str) -> list[bytes]:
    """Inputs to begin with, made from the vectors."""
    if target == "wire":
        return [b"\x03" + octets for octets in _vectors()]
    if target == "session":
        return list(_recorded())
    if target == "subgroup-stream":
        return [b"\x09" + octets for octets in _vectors("subgroup_stream", "padding")]
    if target == "fetch-stream":
        return [flags + each for each in _vectors("fetch_stream") for flags in (b"\x08", b"\x09")]
    if target == "datagram":
        return list(_vectors("datagram", "padding"))
    if target == "parameters":
        return [
            bytes((scope,)) + octets[3:][-len(octets) + skip :]
            for scope, octets in enumerate(
                _vectors("subscribe", "fill_parameters", "range_filter", "location_filter", "fetch")
            )
            for skip in (10, 14)
            if scope < 256
        ]
    return _kv_corpus(target)


def _kv_corpus(target: str) -> list[bytes]:
    from tests.unit.kv.toy import toy_descriptor, toy_publication

    if target == "payload-header":
        return [
            PayloadHeader(
                component=1,
                layer=layer,
                block=2,
                token_start=8,
                token_count=4,
                codec=0,
                data_length=128,
                data_digest=bytes(32),
            ).pack()
            for layer in (0, 2**32 - 1)
        ]
    writer = toy_publication((1, 1), layers=2).writer()
    return [writer.to_json_bytes(), toy_descriptor().canonical()]
