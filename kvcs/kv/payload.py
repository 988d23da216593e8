"""The KVCS Object Payload: 68 octets of header, then Data (KVCS "Object Payload")."""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy.typing as npt

from kvcs.errors import ObjectError, UsageError
from kvcs.kv import codecs
from kvcs.kv.arrays import as_host_array
from kvcs.kv.descriptor import Descriptor
from kvcs.kv.strict_json import Octets
from kvcs.kv.tracks import MAX_BLOCK, Component, DataTrack
from kvcs.moqt.names import Location

HEADER_OCTETS: Final = 68
MAGIC: Final = b"KVO1"
VERSION: Final = 1
DIGEST_OCTETS: Final = 32
MAX_DATA_OCTETS: Final = 16 * 2**20
"""Largest Data of one Object, by default."""

_HEADER = struct.Struct(">4sBBHIIQIHHI32s")
_CHECKED = struct.Struct(">4sBB2xIIQIH2xI32s")
"""The same without Flags and Reserved, which are ignored on receipt."""


@dataclass(frozen=True, slots=True)
class PayloadHeader:
    """Header of one Object's payload; big-endian, in the order of the fields."""

    component: int
    """Component number: 1 k, 2 v, 3 kv."""

    layer: int
    """Layer index; equals the Group ID."""

    block: int
    """Block Index within the segment; equals the Object ID."""

    token_start: int
    """Absolute position of the block's first token."""

    token_count: int
    """Tokens in the block; equals the descriptor's block size."""

    codec: int
    """Codec number."""

    data_length: int
    """Octets of Data."""

    data_digest: bytes
    """SHA-256 of Data, 32 octets."""

    flags: int = 0
    """Sent as zero, ignored on receipt."""

    reserved: int = 0
    """Sent as zero, ignored on receipt."""

    def pack(self) -> bytes:
        """Encode to 68 octets.

        Raises:
            UsageError: a field does not fit its width.
        """
        if len(self.data_digest) != DIGEST_OCTETS:
            raise UsageError(f"Data Digest: expected 32 octets, got {len(self.data_digest)}")
        try:
            return _HEADER.pack(
                MAGIC,
                VERSION,
                self.component,
                self.flags,
                self.layer,
                self.block,
                self.token_start,
                self.token_count,
                self.codec,
                self.reserved,
                self.data_length,
                self.data_digest,
            )
        except struct.error as exc:
            raise UsageError(f"payload header does not fit its fields: {exc}") from exc

    @classmethod
    def unpack(cls, data: Octets) -> PayloadHeader:
        """Decode the first 68 octets of a payload; checks Magic and Version only.

        Raises:
            ObjectError: ``length`` if shorter, ``magic``, ``version``.
        """
        if len(data) < HEADER_OCTETS:
            raise ObjectError(f"payload of {len(data)} octets is shorter than 68", check="length")
        magic, version, component, flags, *rest = _HEADER.unpack_from(data)
        if magic != MAGIC:
            raise ObjectError(f"Magic is 0x{magic.hex()}, expected 0x4b564f31", check="magic")
        if version != VERSION:
            raise ObjectError(f"Version is {version}, expected {VERSION}", check="version")
        layer, block, token_start, token_count, codec, reserved, length, digest = rest
        return cls(
            component=component,
            layer=layer,
            block=block,
            token_start=token_start,
            token_count=token_count,
            codec=codec,
            data_length=length,
            data_digest=digest,
            flags=flags,
            reserved=reserved,
        )


def check_length(
    track: DataTrack,
    descriptor: Descriptor,
    payload_length: int,
    max_data_octets: int = MAX_DATA_OCTETS,
) -> None:
    """Check a payload's length before any octet of it is stored.

    Raises:
        ObjectError: ``length``: no room for a header, more Data than the limit, or not the
            length that the codec fixes for this geometry.
        UsageError: the track's codec is unknown, or its component is not this model's.
    """
    octets = payload_length - HEADER_OCTETS
    if not 0 <= octets <= max_data_octets:
        raise ObjectError(
            f"payload of {payload_length} octets, expected {HEADER_OCTETS} to"
            f" {HEADER_OCTETS + max_data_octets}",
            check="length",
        )
    expected = codecs.lookup(track.codec).data_octets(descriptor.layout(track.component))
    if expected is not None and octets != expected:
        raise ObjectError(
            f"payload of {payload_length} octets carries {octets} of Data, but codec"
            f" {track.codec} has {expected} for this geometry",
            check="length",
        )


def check_header(
    header: PayloadHeader,
    *,
    track: DataTrack,
    location: Location,
    first_block: int,
    descriptor: Descriptor,
    payload_length: int,
    max_data_octets: int = MAX_DATA_OCTETS,
) -> None:
    """Check every field but Flags and Reserved; the Data Digest is `check_digest`'s.

    Args:
        header: as unpacked; Magic and Version are checked by that.
        track: component, codec and segment of the Track that carried the Object.
        location: Group ID is the layer, Object ID the block.
        first_block: absolute index of the segment's first block, from the manifest.
        descriptor: the consumer's own.
        payload_length: octets of the whole payload.
        max_data_octets: limit on Data.

    Raises:
        ObjectError: with ``check`` naming the field: component, layer, block, token_start,
            token_count, codec, length.
        UsageError: as `check_length`.
    """
    check_length(track, descriptor, payload_length, max_data_octets)
    start = (first_block + location.object) * descriptor.block_tokens
    expectations = (
        ("component", header.component, track.component.number),
        ("layer", header.layer, location.group),
        ("block", header.block, location.object),
        ("token_start", header.token_start, start),
        ("token_count", header.token_count, descriptor.block_tokens),
        ("codec", header.codec, codecs.lookup(track.codec).number),
        ("length", header.data_length, payload_length - HEADER_OCTETS),
    )
    for check, value, expected in expectations:
        if value != expected:
            raise ObjectError(
                f"{track} {location}: header says {check} {value}, expected {expected}",
                check=check,
            )
    if header.layer >= descriptor.layers:
        raise ObjectError(
            f"{track} {location}: layer {header.layer} of a model with {descriptor.layers} layers",
            check="layer",
        )


def check_digest(header: PayloadHeader, digest: bytes) -> None:
    """Compare the Data Digest with the SHA-256 of the Data that came.

    Raises:
        ObjectError: ``digest``: they differ.
    """
    compare_digests(Location(header.layer, header.block), header.data_digest, digest)


def compare_digests(location: Location, announced: bytes, digest: bytes) -> None:
    """Compare the Data Digest of the Object at a Location with the SHA-256 of the Data that came.

    Raises:
        ObjectError: ``digest``: they differ.
    """
    if not hmac.compare_digest(announced, digest):
        raise ObjectError(
            f"layer {location.group} block {location.object}: SHA-256 of Data is"
            f" {digest.hex()[:16]}..., header says {announced.hex()[:16]}...",
            check="digest",
        )


class HeaderCheck:
    """Checks the headers of one track's Objects, of which all but the digest is known before.

    It accepts what `check_header` accepts; only what differs is taken apart, to name the field.

    Args:
        track: names component, codec and segment.
        first_block: absolute index of the segment's first block.
        descriptor: the consumer's own.
        max_data_octets: limit on Data.
    """

    __slots__ = ("_codec", "_component", "_descriptor", "_first_block", "_max", "_tokens", "_track")

    def __init__(
        self, track: DataTrack, first_block: int, descriptor: Descriptor, max_data_octets: int
    ) -> None:
        self._track = track
        self._first_block = first_block
        self._descriptor = descriptor
        self._max = max_data_octets
        self._component = track.component.number
        self._codec = codecs.lookup(track.codec).number
        self._tokens = descriptor.block_tokens

    def digest(self, octets: Octets, location: Location, payload_length: int) -> bytes:
        """Data Digest of a header that is right.

        Args:
            octets: the header; what follows it is not looked at.
            location: Group ID is the layer, Object ID the block.
            payload_length: octets of the whole payload; `check_length` has passed.

        Raises:
            ObjectError: as `PayloadHeader.unpack` and `check_header`.
        """
        layer, block = location
        fields = _CHECKED.unpack_from(octets)
        digest: bytes = fields[-1]
        if fields != (
            MAGIC,
            VERSION,
            self._component,
            layer,
            block,
            (self._first_block + block) * self._tokens,
            self._tokens,
            self._codec,
            payload_length - HEADER_OCTETS,
            digest,
        ):
            check_header(
                PayloadHeader.unpack(octets),
                track=self._track,
                location=location,
                first_block=self._first_block,
                descriptor=self._descriptor,
                payload_length=payload_length,
                max_data_octets=self._max,
            )
        return digest


@dataclass(frozen=True, slots=True)
class Payload:
    """One Object's payload, ready to send; Data is views that nobody may change until then."""

    header: PayloadHeader
    """The header; its Data Digest is the one to list in the manifest."""

    data: tuple[memoryview, ...]
    """Data in pieces."""

    @property
    def octets(self) -> int:
        """Octets of the whole payload."""
        return HEADER_OCTETS + self.header.data_length

    def parts(self) -> list[memoryview]:
        """The payload in pieces, header first."""
        return [memoryview(self.header.pack()), *self.data]


class EncodedBlock(NamedTuple):
    """One Object's payload as it goes out."""

    parts: tuple[memoryview, ...]
    """The payload in pieces, header first; nobody may change them until they are sent."""

    octets: int
    """Octets of the whole payload."""

    digest: bytes
    """SHA-256 of Data, to be listed in the manifest."""


class BlockEncoder:
    """Encodes the blocks of one track; what they have in common is worked out once.

    Args:
        track: names component, codec and segment.
        first_block: absolute index of the segment's first block.
        descriptor: the geometry.
        max_data_octets: largest Data that is published.
    """

    def __init__(
        self, track: DataTrack, first_block: int, descriptor: Descriptor, max_data_octets: int
    ) -> None:
        self.codec = codecs.lookup(track.codec)
        """Codec of the track."""
        self.layout = descriptor.layout(track.component)
        """Sections of one block."""
        self._component = track.component.number
        self._first_block = first_block
        self._tokens = descriptor.block_tokens
        self._expected = self.codec.data_octets(self.layout)
        self._max = max_data_octets

    def encode(self, location: Location, sections: Sequence[npt.NDArray[Any]]) -> EncodedBlock:
        """Encode and hash one block.

        Args:
            location: Group ID is the layer, Object ID the block.
            sections: one array per section, shaped and typed as the layout says.

        Raises:
            UsageError: the codec's Data has another length than it promises or is beyond the
                limit, or an array is not C-contiguous. Exceptions of the codec itself pass
                through.
        """
        layer, block = location
        pieces = self.codec.encode(sections, self.layout)
        data = tuple([memoryview(piece).cast("B") for piece in pieces])
        length = sum(map(len, data))
        if self._expected is not None and length != self._expected:
            raise UsageError(
                f"codec {self.codec.name} made {length} octets of Data for layer {layer} block"
                f" {block}, expected {self._expected}"
            )
        self._check_limit(length)
        hashed = hashlib.sha256(data[0]) if data else hashlib.sha256()
        for piece in data[1:]:
            hashed.update(piece)
        digest = hashed.digest()
        header = self._header(layer, block, length, digest)
        return EncodedBlock((memoryview(header), *data), HEADER_OCTETS + length, digest)

    def encode_run(
        self, layer: int, blocks: range, sections: Sequence[memoryview]
    ) -> list[EncodedBlock]:
        """Hash blocks that follow each other, of a codec whose Data is the sections themselves.

        Args:
            layer: Group ID.
            blocks: Object IDs, ascending.
            sections: for each section the octets of block 0 and of all behind it.

        Raises:
            UsageError: Data is beyond the limit.
        """
        sizes = self.layout.section_octets
        length = sum(sizes)
        self._check_limit(length)
        sha256, cuts = hashlib.sha256, list(zip(sections, sizes, strict=True))
        encoded = []
        for block in blocks:
            data = [section[block * size : (block + 1) * size] for section, size in cuts]
            hashed = sha256(data[0])
            for piece in data[1:]:
                hashed.update(piece)
            digest = hashed.digest()
            header = memoryview(self._header(layer, block, length, digest))
            encoded.append(EncodedBlock((header, *data), HEADER_OCTETS + length, digest))
        return encoded

    def write_header(self, into: memoryview, layer: int, block: int, digest: bytes) -> None:
        """Write the header of a block whose Data is the sections themselves.

        Args:
            into: 68 octets.
            layer: Group ID.
            block: Object ID.
            digest: SHA-256 of Data.

        Raises:
            UsageError: Data is beyond the limit.
        """
        length = self.layout.octets
        self._check_limit(length)
        into[:] = self._header(layer, block, length, digest)

    def _check_limit(self, length: int) -> None:
        if length > self._max:
            raise UsageError(
                f"Data of {length} octets is above the limit of {self._max}; use smaller blocks"
            )

    def _header(self, layer: int, block: int, length: int, digest: bytes) -> bytes:
        return _HEADER.pack(
            MAGIC,
            VERSION,
            self._component,
            0,
            layer,
            block,
            (self._first_block + block) * self._tokens,
            self._tokens,
            self.codec.number,
            0,
            length,
            digest,
        )


def build_payload(
    track: DataTrack,
    location: Location,
    sections: Sequence[npt.NDArray[Any]],
    *,
    first_block: int,
    descriptor: Descriptor,
    max_data_octets: int = MAX_DATA_OCTETS,
) -> Payload:
    """Encode one block of one layer.

    Args:
        track: names component, codec and segment.
        location: Group ID is the layer, Object ID the block.
        sections: one array per section of the component, each [block_tokens, kv_heads, dim].
        first_block: absolute index of the segment's first block.
        descriptor: the geometry.
        max_data_octets: largest Data that is published.

    Raises:
        UsageError: a partial block, another shape or dtype, a layer or block that does not exist,
            a codec whose Data does not have the length it promises, or Data beyond the limit.
            Exceptions of the codec itself pass through.
    """
    if not 0 <= location.group < descriptor.layers:
        raise UsageError(f"layer {location.group} is not 0..{descriptor.layers - 1}")
    if not 0 <= location.object <= MAX_BLOCK or first_block < 0:
        raise UsageError(f"block {location.object} of first block {first_block} cannot exist")
    layout = descriptor.layout(track.component)
    if len(sections) != len(layout.shapes):
        raise UsageError(
            f"component {track.component}: expected {len(layout.shapes)} arrays, got"
            f" {len(sections)}"
        )
    names = "kv" if track.component is Component.KV else track.component.value
    arrays = [
        as_host_array(section, layout.dtype, tuple(shape), f"{name} of layer {location.group}")
        for name, section, shape in zip(names, sections, layout.shapes, strict=True)
    ]
    encoder = BlockEncoder(track, first_block, descriptor, max_data_octets)
    encoded = encoder.encode(location, arrays)
    return Payload(PayloadHeader.unpack(encoded.parts[0]), encoded.parts[1:])
