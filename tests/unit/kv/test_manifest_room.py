"""Whether a segment's lists will fit is known before anything of it is published."""

from __future__ import annotations

import pytest

from kvcs.errors import UsageError
from kvcs.kv import DataTrack, ManifestWriter
from tests.unit.kv.toy import toy_prefix

TRACKS = [DataTrack.parse("k.raw.s0"), DataTrack.parse("v.raw.s0")]
LATER = [DataTrack.parse("k.raw.s1"), DataTrack.parse("v.raw.s1")]


def writer_of(max_octets: int) -> ManifestWriter:
    """A manifest with nothing in it."""
    return ManifestWriter(toy_prefix().compat, layers=4, block_tokens=4, max_octets=max_octets)


def list_all(writer: ManifestWriter, tracks: list[DataTrack], blocks: int) -> None:
    """Every layer of a segment."""
    for track in tracks:
        for _ in range(4):
            writer.add_group(track, [bytes(32)] * blocks)


def test_a_segment_that_is_taken_whole_fits_to_its_end() -> None:
    needed = writer_of(1 << 20)
    needed.add_segment(2, bytes(32), TRACKS)
    needed.add_segment(3, bytes(32), LATER)
    list_all(needed, TRACKS, 2)
    list_all(needed, LATER, 3)
    taken = []
    # From far too small to large enough, the second segment added before the first is listed.
    for limit in range(needed.octets - 900, needed.octets + 20):
        writer = writer_of(limit)
        writer.add_segment(2, bytes(32), TRACKS, whole=True)
        try:
            writer.add_segment(3, bytes(32), LATER, whole=True)
        except UsageError as exc:
            assert "use larger blocks" in str(exc)
        else:
            taken.append(limit)
            list_all(writer, LATER, 3)
        list_all(writer, TRACKS, 2)  # a segment that was refused takes nothing of the others
    assert taken[0] - needed.octets < 8
    assert taken == list(range(taken[0], needed.octets + 20))


def test_a_segment_without_room_is_refused_in_words() -> None:
    writer = writer_of(1000)
    with pytest.raises(UsageError, match="limit 1000; use larger blocks"):
        writer.add_segment(2, bytes(32), TRACKS, whole=True)
    assert writer.blocks == 0
    writer.add_segment(2, bytes(32), TRACKS)  # without the promise it begins all the same
