"""How much of a prefix a manifest covers, with and without what an index says."""

from __future__ import annotations

import pytest

import kvcs
from kvcs.kv import Manifest
from kvcs.kv.tracks import holder_uri
from kvcs.subscriber.coverage import Coverage
from tests.unit.kv.toy import SCOPE, toy_descriptor, toy_prefix, toy_publication

THEIRS = kvcs.Prefix(SCOPE, toy_descriptor(), [*range(12), *range(100, 112)])
"""The consumer's prompt: 3 blocks as published, then 3 others."""


def manifest(*blocks: int) -> Manifest:
    """A complete manifest of the toy's prefix, in segments of so many blocks."""
    return toy_publication(blocks).writer().manifest()


def holding(blocks: int, further: tuple[bytes, ...] = ()) -> kvcs.Holding:
    """What an index says of a publication of the toy's prefix."""
    named = kvcs.PublicationNamespace.parse(toy_prefix(5).namespace(bytes(16)))
    return kvcs.Holding(holder_uri("moqt://relay", named), blocks, further)


def test_whole_segments_count_without_an_index() -> None:
    coverage = Coverage(toy_prefix(5))
    version = manifest(2, 2)
    entries = coverage.entries(version)
    assert coverage.covered(entries) == 4
    assert not coverage.is_final(version, entries)  # a third segment may come
    longer = manifest(2, 2, 4)
    entries = coverage.entries(longer)
    assert coverage.covered(entries) == 4
    assert coverage.is_final(longer, entries)  # it reaches beyond: no hash says what it holds


def test_keys_of_an_index_confirm_a_segment_that_reaches_beyond() -> None:
    published = toy_prefix(6)
    version = manifest(6)
    assert Coverage(toy_prefix(3)).entries(version) == ()
    further = published.block_keys[3:]
    for prefix in (toy_prefix(3), THEIRS):
        coverage = Coverage(prefix, holding(3, further))
        entries = coverage.entries(version)
        assert (coverage.covered(entries), coverage.believed) == (3, False)
        assert coverage.is_final(version, entries)


@pytest.mark.parametrize("wrong", ["other", "swapped", "few", "claims more"])
def test_keys_of_an_index_that_do_not_fit_confirm_nothing(wrong: str) -> None:
    keys = toy_prefix(6).block_keys
    further, blocks = keys[3:], 3
    if wrong == "other":
        further = (bytes(32), *keys[4:])
    elif wrong == "swapped":
        further = (keys[4], keys[3], keys[5])
    elif wrong == "few":
        further = keys[3:5]
    else:
        blocks, further = 4, keys[4:]  # our fourth block is another than the published one
    coverage = Coverage(THEIRS, holding(blocks, further))
    assert coverage.entries(manifest(6)) == ()
    assert not coverage.believed


def test_the_word_of_an_index_is_believed_and_told() -> None:
    coverage = Coverage(THEIRS, holding(3))
    version = manifest(2, 4)
    entries = coverage.entries(version)
    assert [entry.blocks for entry in entries] == [2, 4]
    assert (coverage.covered(entries), coverage.believed) == (3, True)
    # Whole segments need no word: the hash is looked at.
    coverage = Coverage(THEIRS, holding(3))
    assert coverage.covered(coverage.entries(manifest(2, 1, 4))) == 3
    assert not coverage.believed


def test_an_index_cannot_make_a_prefix_longer() -> None:
    assert Coverage(toy_prefix(2), holding(7)).blocks == 2


def test_a_holding_is_checked() -> None:
    with pytest.raises(kvcs.UsageError, match="holder URI"):
        kvcs.Holding("moqt://relay", 1)
    with pytest.raises(kvcs.UsageError, match="at least 1 block"):
        holding(0)
    with pytest.raises(kvcs.UsageError, match="32 octets"):
        holding(1, (b"short",))
