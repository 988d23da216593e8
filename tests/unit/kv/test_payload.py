"""The payload header, and the octets of the draft's appendix."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvcs.errors import ObjectError, UsageError
from kvcs.kv import (
    HEADER_OCTETS,
    RAW,
    BlockLayout,
    Component,
    DataTrack,
    Payload,
    PayloadHeader,
    build_payload,
    check_digest,
    check_header,
    check_length,
    codec_names,
    lookup,
    register,
)
from kvcs.kv.payload import MAX_DATA_OCTETS, BlockEncoder, HeaderCheck
from kvcs.moqt.names import Location
from tests.unit.kv.toy import DATA_OCTETS, K0, PAYLOAD_OCTETS, V0, toy_descriptor, toy_publication

APPENDIX_HEADER = bytes.fromhex(
    "4b 56 4f 31 01 01 00 00 00 00 00 00 00 00 00 01 00 00 00 00 00 00 00 04 00 00 00 04 00 01 00"
    "00 00 00 00 10 be 45 cb 26 05 bf 36 be bd e6 84 84 1a 28 f0 fd 43 c6 98 50 a3 dc e5 fe db a6"
    "99 28 ee 3a 89 91"
)
"""KVCS "Encoding Examples": a k Object at Group 0, Object 1; Data is 16 octets 0x00 to 0x0f."""


def appendix_header(**changes: Any) -> PayloadHeader:
    """The header of the draft's example, with fields changed."""
    header = PayloadHeader(
        component=1,
        layer=0,
        block=1,
        token_start=4,
        token_count=4,
        codec=1,
        data_length=16,
        data_digest=hashlib.sha256(bytes(range(16))).digest(),
    )
    return dataclasses.replace(header, **changes)


def test_header_of_the_draft_octet_by_octet() -> None:
    assert appendix_header().pack() == APPENDIX_HEADER
    assert len(APPENDIX_HEADER) == HEADER_OCTETS == 68
    assert PayloadHeader.unpack(APPENDIX_HEADER) == appendix_header()


def test_built_object_of_the_drafts_geometry_has_the_examples_header() -> None:
    descriptor = toy_descriptor(kv_heads=1, head_dim=4, dtype="uint8", layers=1)
    section = np.arange(16, dtype=np.uint8).reshape(4, 1, 4)
    payload = build_payload(K0, Location(0, 1), [section], first_block=0, descriptor=descriptor)
    assert payload.parts()[0] == APPENDIX_HEADER
    assert b"".join(payload.data) == bytes(range(16))
    assert payload.octets == 84


def toy_check(header: PayloadHeader, **changes: Any) -> None:
    arguments: dict[str, Any] = {
        "track": K0,
        "location": Location(2, 1),
        "first_block": 5,
        "descriptor": toy_descriptor(),
        "payload_length": PAYLOAD_OCTETS,
    }
    check_header(header, **{**arguments, **changes})


GOOD = PayloadHeader(
    component=1,
    layer=2,
    block=1,
    token_start=24,
    token_count=4,
    codec=1,
    data_length=DATA_OCTETS,
    data_digest=bytes(32),
)


def test_right_header_passes_and_flags_and_reserved_are_ignored() -> None:
    toy_check(GOOD)
    toy_check(dataclasses.replace(GOOD, flags=0xFFFF, reserved=0xFFFF))


@pytest.mark.parametrize(
    ("check", "changes"),
    [
        ("component", {"component": 2}),
        ("component", {"component": 0}),
        ("layer", {"layer": 1}),
        ("block", {"block": 2}),
        ("token_start", {"token_start": 4}),
        ("token_start", {"token_start": 25}),
        ("token_count", {"token_count": 3}),
        ("codec", {"codec": 2}),
        ("length", {"data_length": DATA_OCTETS - 1}),
    ],
)
def test_each_wrong_field_has_a_check_of_its_own(check: str, changes: dict[str, int]) -> None:
    with pytest.raises(ObjectError) as caught:
        toy_check(dataclasses.replace(GOOD, **changes))
    assert caught.value.check == check


@pytest.mark.parametrize(
    ("check", "octets"),
    [
        ("magic", b"KVO2" + APPENDIX_HEADER[4:]),
        ("magic", b"1OVK" + APPENDIX_HEADER[4:]),
        ("version", APPENDIX_HEADER[:4] + b"\x02" + APPENDIX_HEADER[5:]),
        ("version", APPENDIX_HEADER[:4] + b"\x00" + APPENDIX_HEADER[5:]),
        ("length", APPENDIX_HEADER[:67]),
        ("length", b""),
    ],
)
def test_magic_version_and_a_short_header(check: str, octets: bytes) -> None:
    with pytest.raises(ObjectError) as caught:
        PayloadHeader.unpack(octets)
    assert caught.value.check == check


@pytest.mark.parametrize("octets", [0, 67, 68, PAYLOAD_OCTETS - 1, PAYLOAD_OCTETS + 1, 2**40])
def test_a_length_that_cannot_be_right_is_refused_before_any_octet(octets: int) -> None:
    with pytest.raises(ObjectError) as caught:
        check_length(K0, toy_descriptor(), octets)
    assert caught.value.check == "length"
    check_length(K0, toy_descriptor(), PAYLOAD_OCTETS)


def test_a_layer_that_the_model_does_not_have() -> None:
    header = dataclasses.replace(GOOD, layer=4)
    with pytest.raises(ObjectError) as caught:
        toy_check(header, location=Location(4, 1))
    assert caught.value.check == "layer"


def test_digest_is_of_data_only() -> None:
    check_digest(appendix_header(), hashlib.sha256(bytes(range(16))).digest())
    with pytest.raises(ObjectError) as caught:
        check_digest(appendix_header(), hashlib.sha256(APPENDIX_HEADER).digest())
    assert caught.value.check == "digest"


@pytest.mark.parametrize(
    "changes", [{"layer": 2**32}, {"token_start": -1}, {"codec": 2**16}, {"data_digest": b"short"}]
)
def test_a_field_that_does_not_fit_is_refused_in_packing(changes: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        appendix_header(**changes).pack()


def test_k_then_v_has_the_digest_of_the_joint_object() -> None:
    """The layer digest that both encodings protect (KVCS "Object Payload")."""
    apart = toy_publication()
    joint = toy_publication(components=[Component.KV])
    kv = joint.segments[0][0]
    for layer in range(4):
        for block in range(3):
            at = Location(layer, block)
            k_data, v_data = (apart.objects[track, at][HEADER_OCTETS:] for track in (K0, V0))
            layer_digest = hashlib.sha256(k_data + v_data).digest()
            assert joint.digests[kv, at] == layer_digest
            assert joint.objects[kv, at][HEADER_OCTETS:] == k_data + v_data


def build(track: DataTrack = K0, **options: Any) -> Payload:
    location = options.pop("location", Location(0, 0))
    descriptor = options.pop("descriptor", toy_descriptor())
    sections = options.pop("sections", None)
    if sections is None:
        sections = [np.zeros((4, 2, 8), descriptor.numpy_dtype)]
    return build_payload(track, location, sections, first_block=0, descriptor=descriptor, **options)


def test_data_is_a_view_of_the_callers_array() -> None:
    section = np.zeros((4, 2, 8), toy_descriptor().numpy_dtype)
    payload = build(sections=[section])
    section[0, 0, 0] = 1.0
    assert bytes(payload.data[0][:2]) == b"\x80\x3f"


def test_publisher_is_stopped_before_it_sends_what_cannot_be() -> None:
    with pytest.raises(UsageError, match="layer 4 is not"):
        build(location=Location(4, 0))
    with pytest.raises(UsageError, match="cannot exist"):
        build(location=Location(0, 2**32))
    with pytest.raises(UsageError, match="expected 2 arrays, got 1"):
        build(DataTrack.parse("kv.raw.s0"))
    with pytest.raises(UsageError, match=r"k of layer 0: expected shape \[4, 2, 8\]"):
        build(sections=[np.zeros((4, 1, 8), toy_descriptor().numpy_dtype)])
    with pytest.raises(UsageError, match="C-contiguous"):
        build(sections=[np.zeros((2, 4, 8), toy_descriptor().numpy_dtype).transpose(1, 0, 2)])
    with pytest.raises(UsageError, match="above the limit of 64"):
        build(max_data_octets=64)
    with pytest.raises(UsageError, match="codec 'zz' is unknown here; known: raw"):
        build(DataTrack.parse("k.zz.s0"))


class Odd:
    """Promises what raw does, and makes one octet more."""

    name, number, lossless, in_place = "odd", 0xFF01, True, False

    def data_octets(self, layout: BlockLayout) -> int:
        return layout.octets

    def encode(self, sections: Any, layout: BlockLayout) -> list[bytes]:
        return [b"".join(RAW.encode(sections, layout)) + b"\0"]

    def decode(self, data: memoryview, layout: BlockLayout) -> list[memoryview]:
        return [data]


def test_a_codec_that_breaks_its_promise_is_noticed_by_the_publisher(own_codecs: None) -> None:
    register(Odd())
    assert codec_names() == ("raw", "odd")
    with pytest.raises(UsageError, match=r"codec odd made 129 octets .* expected 128"):
        build(DataTrack.parse("k.odd.s0"))


def test_registry_refuses_bad_and_second_names() -> None:
    assert lookup("raw").number == 1
    for changes in ({"name": "raw"}, {"number": 1}, {"name": "Odd"}, {"number": 2**16}):
        codec = Odd()
        for name, value in changes.items():
            setattr(codec, name, value)
        with pytest.raises(UsageError):
            register(codec)
    assert codec_names() == ("raw",)


def outcome(check: Callable[[bytes], object], header: bytes) -> tuple[str, str] | None:
    """Name of the check that failed and the message, or None."""
    try:
        check(header)
    except ObjectError as exc:
        return exc.check, str(exc)
    return None


@pytest.mark.parametrize("position", range(HEADER_OCTETS))
def test_the_quick_check_finds_what_the_thorough_one_finds(position: int) -> None:
    quick = HeaderCheck(K0, 5, toy_descriptor(), MAX_DATA_OCTETS)
    place = (Location(2, 1), PAYLOAD_OCTETS)
    for flipped in (0x00, 0x01, 0x80, 0xFF):
        flippable = bytearray(GOOD.pack())
        flippable[position] ^= flipped
        octets = bytes(flippable)
        thorough = outcome(lambda header: toy_check(PayloadHeader.unpack(header)), octets)
        assert outcome(lambda header: quick.digest(header, *place), octets) == thorough
        if thorough is None:
            assert quick.digest(octets, *place) == octets[-32:]


@pytest.mark.parametrize("component", [Component.K, Component.V, Component.KV])
def test_blocks_are_encoded_in_a_run_as_one_by_one(component: Component) -> None:
    descriptor = toy_descriptor()
    encoder = BlockEncoder(DataTrack(component, "raw", 0), 7, descriptor, MAX_DATA_OCTETS)
    random = np.random.default_rng(5)
    tokens, blocks = descriptor.block_tokens, 4
    arrays = [
        random.integers(0, 256, (blocks, octets), dtype=np.uint8)
        for octets in encoder.layout.section_octets
    ]
    sections = [memoryview(array).cast("B") for array in arrays]
    run = encoder.encode_run(3, range(1, blocks), sections)
    alone = [
        encoder.encode(Location(3, block), [array[block] for array in arrays])
        for block in range(1, blocks)
    ]
    assert [b"".join(each.parts) for each in run] == [b"".join(each.parts) for each in alone]
    assert [each[1:] for each in run] == [each[1:] for each in alone]
    assert PayloadHeader.unpack(run[0].parts[0]).token_start == 8 * tokens


def test_a_run_of_blocks_above_the_limit_is_refused() -> None:
    encoder = BlockEncoder(K0, 0, toy_descriptor(), DATA_OCTETS - 1)
    with pytest.raises(UsageError, match="above the limit"):
        encoder.encode_run(0, range(1), [memoryview(bytes(DATA_OCTETS))])
