"""Violations on data streams and in datagrams, and Tracks that contradict themselves."""

from __future__ import annotations

import pytest

from kvcs.moqt.parameters import Parameters
from kvcs.moqt.settings import Role
from kvcs.moqt.wire import encode_vi64 as vi
from kvcs.testing.bench import Bench
from kvcs.testing.tracks import NAME
from tests.unit.moqt.violations import (
    FETCH_OK,
    NONE,
    SUBSCRIBE_OK,
    Case,
    Do,
    closes,
    fetched,
    frame,
    malformed,
    params,
    prefixed,
    subscribed,
)

CLIENT = Role.CLIENT
MAX = 2**64 - 1
ALIAS = b"\x09"
X = b"\1x"
"""Payload of one octet, with its length."""


def streams(*octets: bytes, fin: bool = True, before: bytes = SUBSCRIBE_OK) -> Do:
    """Data streams of a subscription with the alias 9."""

    def do(bench: Bench) -> int:
        stream_id = subscribed(bench, before)
        for each in octets:
            bench.uni(each, fin=fin)
        return stream_id

    return do


def subgroup(group: int, *objects: bytes, type_: int = 0x50, priority: bytes = b"\0") -> bytes:
    """A subgroup stream of Subgroup 0."""
    return vi(type_) + ALIAS + vi(group) + priority + b"".join(objects)


def numbered(group: int, number: int, *objects: bytes, type_: int = 0x54) -> bytes:
    """A subgroup stream of the Subgroup ``number``."""
    return vi(type_) + ALIAS + vi(group) + vi(number) + b"\0" + b"".join(objects)


def datagrams(*octets: bytes) -> Do:
    """Datagrams of a subscription with the alias 9."""

    def do(bench: Bench) -> int:
        stream_id = subscribed(bench, SUBSCRIBE_OK)
        for each in octets:
            bench.datagram(each)
        return stream_id

    return do


def fetch_stream(*items: bytes, fin: bool = False) -> Do:
    """The data stream of a FETCH."""

    def do(bench: Bench) -> int:
        stream_id = fetched(bench, FETCH_OK)
        bench.uni(b"\5\0" + b"".join(items), fin=fin)
        return stream_id

    return do


def fetch_end(*octets: bytes) -> Do:
    """A subscription that has 5/0, and a FETCH that says where the Track ends."""

    def do(bench: Bench) -> int:
        stream_id = subscribed(bench, SUBSCRIBE_OK)
        bench.uni(subgroup(5, b"\0" + X), fin=True)
        bench.core.requester.fetch(NAME, Parameters())
        bench.drain()
        bench.data(4, frame(0x18, b"\1", *octets, NONE))
        return stream_id

    return do


FIRST = b"\x1c\0\0\0" + X
"""First Object of a fetch stream: 0/0 of Subgroup 0, priority 0."""


def with_properties(*objects: tuple[int, bytes], group: int = 0) -> bytes:
    """A subgroup stream with Objects of one octet: their IDs' deltas and their Properties."""
    return subgroup(
        group, *(vi(delta) + prefixed(block) + X for delta, block in objects), type_=0x51
    )


def gap(type_: int, size: int) -> bytes:
    return vi(type_) + vi(size)


GROUP_GAP, OBJECT_GAP = 0x3C, 0x3E
END_OF_GROUP = b"\0\3"
END_OF_TRACK = b"\0\4"

CASES = [
    *(
        Case(
            "subgroup-type",
            f"{type_:#x}",
            streams(vi(type_) + b"\x09\0\0\0"),
            closes(0x3),
            role=CLIENT,
        )
        for type_ in (0x16, 0x17, 0x1E, 0x36, 0x7F, 0x08, 0x48, 0x80 | 0x10, 0x110)
    ),
    Case(
        "id-overflow",
        "Object ID of a subgroup",
        streams(subgroup(0, vi(MAX) + X, b"\0" + X)),
        closes(0x3),
        role=CLIENT,
    ),
    Case(
        "id-overflow",
        "Object ID of a fetch",
        fetch_stream(b"\x1c\0" + vi(MAX) + b"\0" + X, b"\0" + X),
        closes(0x3),
        role=CLIENT,
    ),
    Case(
        "id-overflow",
        "Group ID of a fetch",
        fetch_stream(b"\x1c" + vi(MAX) + b"\0\0" + X, b"\x0c\0\0" + X),
        closes(0x3),
        role=CLIENT,
    ),
    Case(
        "id-overflow",
        "Subgroup ID of a fetch",
        fetch_stream(b"\x1f\0" + vi(MAX) + b"\0\0" + X, b"\2" + X),
        closes(0x3),
        role=CLIENT,
    ),
    Case("object-status", "on a stream", streams(subgroup(0, b"\0\0\7")), closes(0x3), role=CLIENT),
    Case("object-status", "1 was one", streams(subgroup(0, b"\0\0\1")), closes(0x3), role=CLIENT),
    Case("object-status", "in a datagram", datagrams(b"\x28\x09\0\0\7"), closes(0x3), role=CLIENT),
    *(
        Case(
            "status-properties",
            f"status {status}",
            streams(subgroup(0, b"\0\2\x78\1\0" + bytes((status,)), type_=0x51)),
            closes(0x3),
            role=CLIENT,
        )
        for status in (3, 4)
    ),
    *(
        Case("datagram-flags", label, datagrams(octets), closes(0x3), role=CLIENT)
        for label, octets in (
            ("bit 4", b"\x18\x09\0\0x"),
            ("STATUS and END_OF_GROUP", b"\x2a\x09\0\0\0"),
            ("no Properties", b"\x09\x09\0\0\0x"),
            ("Properties on a status", b"\x29\x09\0\0\2\x78\1\3"),
            ("octets behind a status", b"\x28\x09\0\0\3x"),
            ("cut in its header", b"\0\x09"),
        )
    ),
    *(
        Case("fetch-flags", label, fetch_stream(octets), closes(0x3), role=CLIENT)
        for label, octets in (
            ("unknown marker", vi(0x80) + b"\0\0"),
            ("marker 0x40C", vi(0x40C) + b"\0\0"),
            ("no Group ID", b"\x14\0\0" + X),
            ("no Object ID", b"\x18\0\0" + X),
            ("prior priority", b"\x0c\0\0" + X),
            ("prior Subgroup", b"\x1d\0\0\0" + X),
            ("prior Subgroup + 1", b"\x1e\0\0\0" + X),
            ("prior priority behind a marker", vi(0x8C) + b"\0\0" + b"\x04\1" + X),
        )
    ),
    *(
        Case("fin-inside", label, streams(octets), closes(0x3), role=CLIENT)
        for label, octets in (
            ("a payload", subgroup(0, b"\0\5abc")),
            ("an Object's header", subgroup(0, b"\0")),
            ("Properties", subgroup(0, b"\0\5\x78", type_=0x51)),
            ("a stream's header", b"\x50\x09"),
        )
    ),
    Case(
        "fin-inside",
        "a fetched Object",
        fetch_stream(FIRST[:-1], fin=True),
        closes(0x3),
        role=CLIENT,
    ),
    # Tracks that contradict themselves
    *(
        Case("malformed", label, do, malformed, role=CLIENT)
        for label, do in {
            "priorities of a Subgroup": streams(
                subgroup(0, b"\0" + X), subgroup(0, b"\1" + X, priority=b"\1"), fin=False
            ),
            "Object behind a Subgroup's FIN": streams(
                subgroup(0, b"\0" + X), subgroup(0, b"\1" + X)
            ),
            "two ends of a Subgroup": streams(
                subgroup(0, b"\0" + X, b"\0" + X), subgroup(0, b"\0" + X)
            ),
            "Object behind End of Group": streams(
                subgroup(0, b"\0" + X, b"\0" + END_OF_GROUP), numbered(0, 1, b"\5" + X)
            ),
            "Object in the place of End of Group": streams(
                subgroup(0, b"\0" + X, b"\0" + END_OF_GROUP), numbered(0, 1, b"\1" + X)
            ),
            "End of Group before an Object": streams(
                numbered(0, 1, b"\5" + X), subgroup(0, b"\3" + END_OF_GROUP)
            ),
            "two Ends of Group": streams(
                numbered(0, 1, b"\5" + END_OF_GROUP), subgroup(0, b"\3" + END_OF_GROUP)
            ),
            "Object behind the END_OF_GROUP bit": streams(
                subgroup(0, b"\0" + X, type_=0x58), numbered(0, 1, b"\1" + X)
            ),
            "Object behind a datagram's END_OF_GROUP": datagrams(
                b"\x0a\x09\0\2x", b"\x08\x09\0\3x"
            ),
            "Object behind End of Track": streams(
                subgroup(3, b"\0" + END_OF_TRACK), subgroup(4, b"\0" + X)
            ),
            "End of Track before an Object": streams(
                subgroup(4, b"\0" + X), subgroup(3, b"\0" + END_OF_TRACK)
            ),
            "two Ends of Track": streams(
                subgroup(3, b"\0" + END_OF_TRACK), subgroup(2, b"\0" + END_OF_TRACK)
            ),
            "FETCH_OK's end before an Object": fetch_end(b"\4\0"),
            "an Object twice on a fetch stream": fetch_stream(FIRST, b"\4\0" + X),
            "IMMUTABLE_PROPERTIES in themselves": streams(with_properties((0, b"\x0b\2\x0b\0"))),
            "IMMUTABLE_PROPERTIES twice": streams(with_properties((0, b"\x0b\0\0\0"))),
            "IMMUTABLE_PROPERTIES that cannot be read": streams(
                with_properties((0, b"\x0b\3\1\5x"))
            ),
            "Mandatory Track Property on an Object": streams(
                with_properties((0, vi(0x4000) + b"\1"))
            ),
            "Mandatory one that is immutable": streams(
                with_properties((0, b"\x0b" + prefixed(vi(0x7FFE) + b"\1")))
            ),
            "Mandatory one in a datagram": datagrams(
                b"\x09\x09\0\0" + prefixed(vi(0x4000) + b"\1") + b"x"
            ),
            "Object gap twice": streams(with_properties((5, gap(OBJECT_GAP, 1) + b"\0\1"))),
            "Group gap twice": streams(with_properties((0, gap(GROUP_GAP, 1) + b"\0\1"), group=5)),
            "Object gap larger than the ID": streams(with_properties((5, gap(OBJECT_GAP, 6)))),
            "Group gap larger than the ID": streams(
                with_properties((0, gap(GROUP_GAP, 6)), group=5)
            ),
            "Object gap over an Object": streams(
                subgroup(0, b"\3" + X),
                numbered(0, 1, b"\5" + prefixed(gap(OBJECT_GAP, 2)) + X, type_=0x55),
            ),
            "Object in an Object gap": streams(
                with_properties((5, gap(OBJECT_GAP, 2))), numbered(0, 1, b"\4" + X)
            ),
            "Group gap over a Group": streams(
                subgroup(3, b"\0" + X), with_properties((0, gap(GROUP_GAP, 2)), group=5)
            ),
            "Object in a Group gap": streams(
                with_properties((0, gap(GROUP_GAP, 2)), group=5), subgroup(4, b"\0" + X)
            ),
            "two Group gaps of one Group": streams(
                with_properties((0, gap(GROUP_GAP, 2)), (0, gap(GROUP_GAP, 1)), group=5)
            ),
            "Track Properties that cannot be read": streams(
                before=frame(0x04, vi(9), NONE, b"\x0b\2\x0b\0")
            ),
        }.items()
    ),
]


@params(CASES)
def test_a_violation_has_its_consequence(case: Case) -> None:
    case.run()


@pytest.mark.parametrize(
    "octets",
    [
        streams(with_properties((5, gap(OBJECT_GAP, 5)))),
        streams(with_properties((0, gap(GROUP_GAP, 5)), group=5)),
        streams(with_properties((5, gap(OBJECT_GAP, 2)), (0, gap(OBJECT_GAP, 0)))),
        streams(
            with_properties((0, gap(GROUP_GAP, 2)), (0, gap(GROUP_GAP, 2)), group=5),
            subgroup(2, b"\0" + X),
        ),
        streams(with_properties((0, b"\x0b" + prefixed(gap(GROUP_GAP, 5))), group=5)),
        streams(with_properties((5, gap(OBJECT_GAP, 2))), with_properties((5, gap(OBJECT_GAP, 2)))),
        streams(subgroup(0, b"\2" + X), numbered(0, 1, b"\5" + X)),
        streams(subgroup(3, b"\0" + END_OF_TRACK), subgroup(2, b"\0" + X)),
        fetch_end(b"\5\0"),
    ],
)
def test_gaps_and_ends_that_fit_what_came_are_fine(octets: Do) -> None:
    bench = Bench(CLIENT)
    octets(bench)
    assert bench.close is None and not bench.stops
