"""An Object whose header is that of the one before it is found by one comparison (MOQT §11).

Each stream is read twice: whole, header by header, and in pieces that each end one Object and begin
the next, where the parser may compare instead.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvcs.moqt.data import FetchParser, SubgroupParser
from kvcs.moqt.errors import MalformedTrack, ProtocolViolation
from kvcs.moqt.incoming.expected import as_items
from kvcs.moqt.incoming.rules import TrackRules
from kvcs.moqt.names import MAX_VI64, GroupOrder, Location
from kvcs.moqt.objects import Item, ObjectChunk, ObjectHeader, ObjectStarted, ObjectStatus
from kvcs.moqt.streams import SubgroupHeader
from kvcs.moqt.wire import encode_vi64

Parser = SubgroupParser | FetchParser
OCTETS, CUT = 6, 2
FIRST = "1c 07 00 05 06"
"""What goes before the first Object of a fetch stream: 7/0, Subgroup 0, priority 5, six octets."""


def plain() -> Parser:
    return SubgroupParser(SubgroupHeader(1, 7, 0, 9))


def with_properties() -> Parser:
    return SubgroupParser(SubgroupHeader(1, 7, 0, 9, has_properties=True))


def first_gives_subgroup() -> Parser:
    return SubgroupParser(SubgroupHeader(1, 7, None, 9))


def ascending() -> Parser:
    return FetchParser(GroupOrder.ASCENDING)


def descending() -> Parser:
    return FetchParser(GroupOrder.DESCENDING)


def heads(*texts: str) -> list[bytes]:
    return [bytes.fromhex(text) for text in texts]


def octets(number: int) -> bytes:
    return bytes(range(number * OCTETS, (number + 1) * OCTETS))


def objects(items: list[Item]) -> list[tuple[ObjectHeader, bytes]]:
    """Headers and payloads, whatever the chunks."""
    found: list[tuple[ObjectHeader, bytes]] = []
    for item in items:
        if isinstance(item, ObjectStarted):
            found.append((item.header, b""))
        elif isinstance(item, ObjectChunk):
            found[-1] = (found[-1][0], found[-1][1] + bytes(item.data))
    return found


def whole(parser: Parser, before: list[bytes]) -> list[tuple[ObjectHeader, bytes]]:
    items = parser.feed(b"".join(head + octets(number) for number, head in enumerate(before)))
    parser.finish()
    return objects(items)


def in_pieces(parser: Parser, before: list[bytes]) -> tuple[list[tuple[ObjectHeader, bytes]], int]:
    """What the pieces give, and how many Objects were found by comparison."""
    items = parser.feed(before[0] + octets(0)[:CUT])
    compared = 0
    for number, head in enumerate(before[1:], 1):
        piece = octets(number - 1)[CUT:] + head + octets(number)[:CUT]
        stop, lead, count = parser.run_like(piece)
        if count:
            compared += count
            last = objects(items)[-1][0]
            assert parser.take_run(count, len(piece)) == len(piece)
            behind = Location(last.group_id, last.object_id + 1)
            items += as_items(last, behind, piece, stop, lead, count)
        else:
            items += parser.feed(piece)
        assert parser.mid_object
    assert parser.pass_over(1)
    items.append(ObjectChunk(memoryview(octets(len(before) - 1)[CUT : CUT + 1])))
    items += parser.feed(octets(len(before) - 1)[CUT + 1 :])
    parser.finish()
    return objects(items), compared


@pytest.mark.parametrize(
    ("make", "before", "compared"),
    [
        (plain, heads(*["00 06"] * 4), 3),
        (plain, heads(*["8000 06"] * 4), 3),  # zero need not be written in the shortest form
        (plain, heads("00 06", "8000 06", "8000 06"), 1),
        (plain, heads(*["01 06"] * 4), 0),  # 7/1, 7/3, 7/5, 7/7
        (plain, heads("05 06", "00 06", "00 06"), 1),
        (plain, heads("00 06", "05 06", "05 06", "00 06", "00 06"), 1),
        (plain, heads("00 06", "00 8006", "00 8006"), 1),
        (first_gives_subgroup, heads("05 06", "00 06", "00 06"), 1),
        (with_properties, heads(*["00 02 3c01 06"] * 3), 2),
        (with_properties, heads("00 02 3c01 06", "00 02 3c02 06", "00 00 06", "00 00 06"), 1),
        (with_properties, heads(*["02 02 3c01 06"] * 3), 0),
        (ascending, heads(FIRST, *["00 06"] * 3), 2),
        (ascending, heads(FIRST, *["01 06"] * 3), 2),  # the Subgroup of the one before
        (ascending, heads(FIRST, *["20 02 3c01 06"] * 3), 2),
        (ascending, heads(FIRST, *["21 02 3c01 06"] * 3), 2),
        (ascending, heads(FIRST, *["02 06"] * 3), 0),  # Subgroups 1, 2, 3
        (ascending, heads(FIRST, *["22 02 3c01 06"] * 3), 0),
        (ascending, heads(FIRST, *["04 02 06"] * 3), 0),  # Objects 2, 4, 6
        (ascending, heads(FIRST, *["05 01 06"] * 3), 0),
        (ascending, heads(FIRST, *["0c 00 00 06"] * 3), 0),  # Groups 8, 9, 10
        (descending, heads(FIRST, *["0c 01 00 06"] * 3), 0),  # Groups 5, 3, 1
        (ascending, heads(FIRST, *["08 00 06"] * 3), 0),
        (descending, heads(FIRST, "0c 01 00 06", "00 06", "00 06", "02 06", "00 06"), 1),
        (ascending, heads(FIRST, "01 06", "808c 07 09 01 06", "01 06"), 1),  # a marker between
    ],
)
def test_what_is_compared_is_what_parsing_gives(
    make: Callable[[], Parser], before: list[bytes], compared: int
) -> None:
    got = in_pieces(make(), before)
    assert got == (whole(make(), before), compared)


@pytest.mark.parametrize(
    "before", [heads(FIRST, *["10 05 06"] * 3), heads(FIRST, *["03 04 06"] * 3)]
)
def test_what_says_the_same_again_is_parsed_or_compared(before: list[bytes]) -> None:
    assert in_pieces(ascending(), before)[0] == whole(ascending(), before)


@pytest.mark.parametrize(
    ("make", "first"),
    [
        (plain, encode_vi64(MAX_VI64 - 1) + b"\x06"),
        (ascending, b"\x1c\x07" + encode_vi64(MAX_VI64 - 1) + b"\x05\x06"),
    ],
)
def test_no_object_is_compared_beyond_the_largest_id(
    make: Callable[[], Parser], first: bytes
) -> None:
    before = [first, b"\x00\x06", b"\x00\x06"]
    assert whole(make(), before[:2])[-1][0].object_id == MAX_VI64
    for read in (whole, in_pieces):
        with pytest.raises(ProtocolViolation, match="Object ID above"):
            read(make(), before)


@pytest.mark.parametrize(
    "piece",
    [
        octets(0)[CUT:-1],  # does not end it
        octets(0)[CUT:] + b"\x00",  # the header is not whole
        octets(0)[CUT:] + b"\x00\x06",  # nothing of the payload
        octets(0)[CUT:] + b"\x00\x07" + octets(1)[:CUT],  # another length
        octets(0)[CUT + 1 :] + b"\x00\x06" + octets(1)[:CUT],  # one octet further on
        b"",
    ],
)
def test_other_pieces_have_to_be_parsed(piece: bytes) -> None:
    parser = plain()
    parser.feed(b"\x00\x06" + octets(0)[:CUT])
    assert not parser.run_like(piece)[2]


REST, HEAD = octets(0)[CUT:], b"\x00\x06"


@pytest.mark.parametrize(
    ("piece", "count", "behind", "mid_object"),
    [
        (REST + HEAD + octets(1)[:1], 1, 0, True),
        (REST + HEAD + octets(1), 1, 0, False),  # ends the next one, too
        (REST + HEAD + octets(1) + b"\x00", 1, 1, True),  # a header that is not whole
        (REST + HEAD + octets(1) + HEAD, 1, 2, True),
        (REST + HEAD + octets(1) + HEAD + octets(2)[:1], 2, 0, True),
        (REST + (HEAD + octets(1)) * 5, 5, 0, False),
        (REST + (HEAD + octets(1)) * 5 + b"\x00\x07" + octets(1), 5, 8, True),
        (REST + HEAD + octets(1) + b"\x01\x06" + octets(2) + HEAD + octets(3), 1, 16, False),
        (REST + HEAD + octets(1) + b"\x00\x00\x03", 1, 3, False),  # a status Object
    ],
)
def test_several_objects_of_one_piece_are_a_run(
    piece: bytes, count: int, behind: int, mid_object: bool
) -> None:
    """What is behind them is parsed, and all gives the same as if everything was."""
    parser, parsed = plain(), plain()
    for one in (parser, parsed):
        items = one.feed(HEAD + octets(0)[:CUT])
    before = objects(items)[0][0]
    stop, lead, found = parser.run_like(piece)
    assert (stop, lead, found) == (len(REST), len(HEAD), count)
    end = parser.take_run(count, len(piece))
    assert end == len(piece) - behind
    items = as_items(before, Location(7, 1), piece[:end], stop, lead, count)
    items += parser.feed(piece[end:])
    assert items == parsed.feed(piece)
    assert parser.mid_object == parsed.mid_object == mid_object
    # What comes next is parsed alike, too.
    assert parser.feed(b"\x06" * 8) == parsed.feed(b"\x06" * 8)


def test_a_run_ends_at_the_largest_id() -> None:
    parser = plain()
    parser.feed(encode_vi64(MAX_VI64 - 3) + b"\x06" + octets(0) + HEAD + octets(1)[:CUT])
    assert parser.run_like(octets(1)[CUT:] + (HEAD + octets(2)) * 5)[2] == 2


def test_not_between_objects_nor_behind_an_empty_one() -> None:
    parser = plain()
    parser.feed(b"\x00\x06" + octets(0))
    assert not parser.run_like(b"\x00\x06" + octets(1)[:CUT])[2]
    parser.feed(bytes.fromhex("00 00 00"))  # NORMAL, without a payload
    assert not parser.run_like(bytes.fromhex("00 00 00"))[2]


# ------------------------------------------------------------------------- the rules of a Track


def header(
    object_id: int,
    *,
    group: int = 0,
    subgroup: int | None = 0,
    priority: int | None = 0,
    status: ObjectStatus = ObjectStatus.NORMAL,
) -> ObjectHeader:
    return ObjectHeader(group, object_id, subgroup, priority, status)


def checked(*headers: ObjectHeader) -> TrackRules:
    track = TrackRules()
    for one in headers:
        track.check_object(one)
    return track


@pytest.mark.parametrize("subgroup", [0, 3, None])
def test_a_like_object_is_held_against_what_follows_as_any_other(subgroup: int | None) -> None:
    track, same = checked(header(0, subgroup=subgroup)), checked(header(0, subgroup=subgroup))
    assert track.take_run(header(0, subgroup=subgroup), 1, 1)
    same.check_object(header(1, subgroup=subgroup))
    assert track.entries == same.entries
    for one in (track, same):
        with pytest.raises(MalformedTrack, match="ends at 1, but Object 1 exists"):
            one.check_object(header(1, subgroup=9, status=ObjectStatus.END_OF_GROUP))
        with pytest.raises(MalformedTrack, match="ends at 0/0, but 0/1 exists"):
            one.finish_track(Location(0, 0))


def ended(track: TrackRules) -> None:
    track.finish_group(0, 1)


def subgroup_ended(track: TrackRules) -> None:
    track.finish_subgroup(0, 0, 1, end_of_group=False)


def track_ends(track: TrackRules) -> None:
    track.finish_track(Location(0, 1))


def end_of_track(track: TrackRules) -> None:
    track.check_object(header(0, group=1, status=ObjectStatus.END_OF_TRACK))


def further(track: TrackRules) -> None:
    track.check_object(header(9, subgroup=1))


@pytest.mark.parametrize("before", [ended, subgroup_ended, track_ends, end_of_track, further])
def test_where_more_is_known_every_check_is_made(before: Callable[[TrackRules], None]) -> None:
    track = checked(header(0), header(1))
    before(track)
    entries = track.entries
    assert not track.take_run(header(1), 2, 2)
    assert track.entries == entries


def test_not_without_its_group_its_subgroup_or_its_priority_nor_out_of_order() -> None:
    track = checked(header(0))
    assert not track.take_run(header(0, group=1), 1, 1)
    assert not track.take_run(header(0, subgroup=1), 1, 1)
    assert not track.take_run(header(0, priority=1), 1, 1)
    assert not track.take_run(header(0, priority=None), 1, 1)
    assert not track.take_run(header(0), 2, 2)
    assert not track.take_run(header(0), 0, 0)
    assert track.take_run(header(0), 1, 1)
    assert not track.take_run(header(0), 1, 1)


@pytest.mark.parametrize("subgroup", [0, None])
def test_a_run_is_held_against_what_follows_as_its_objects_are(subgroup: int | None) -> None:
    track, same = checked(header(0, subgroup=subgroup)), checked(header(0, subgroup=subgroup))
    assert track.take_run(header(0, subgroup=subgroup), 1, 5)
    for object_id in range(1, 6):
        same.check_object(header(object_id, subgroup=subgroup))
    assert track.entries == same.entries and track._last == same._last == Location(0, 5)
    for one in (track, same):
        with pytest.raises(MalformedTrack, match="ends at 5, but Object 5 exists"):
            one.check_object(header(5, subgroup=9, status=ObjectStatus.END_OF_GROUP))
        one.finish_subgroup(0, 3, 5, end_of_group=True)
        with pytest.raises(MalformedTrack, match="beyond its Group's last Object, 5"):
            one.check_object(header(6, subgroup=subgroup))
