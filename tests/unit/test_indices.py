"""Indices in files: what they name of a prefix, and what is wrong with those that are not."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

import kvcs
from kvcs.kv.tracks import holder_uri
from kvcs.subscriber.indices import MAX_ENTRIES, MAX_INDEX_VALUES, index_at, look_up
from tests.unit.kv.toy import SCOPE, toy_descriptor, toy_prefix

OURS = toy_prefix(3)
LONGER = toy_prefix(6)
PARTED = kvcs.Prefix(SCOPE, toy_descriptor(), [*range(8), *range(100, 108)])
"""Two blocks of `OURS`, and two others."""


def uri(prefix: kvcs.Prefix, number: int = 0) -> str:
    """Holder URI of a publication of a prefix."""
    named = kvcs.PublicationNamespace.parse(prefix.namespace(bytes([number] * 16)))
    return holder_uri("moqt://relay.example", named)


def document(*prefixes: kvcs.Prefix) -> bytes:
    """An index of one publication of each prefix."""
    return kvcs.index_json((uri(each, number), each) for number, each in enumerate(prefixes))


def test_publications_are_named_with_the_keys_that_the_consumer_lacks() -> None:
    found = look_up(document(PARTED, LONGER, OURS), OURS)
    assert found == [
        kvcs.Holding(uri(LONGER, 1), 3, LONGER.block_keys[3:]),
        kvcs.Holding(uri(OURS, 2), 3),
        kvcs.Holding(uri(PARTED, 0), 2, PARTED.block_keys[2:]),
    ]


def test_what_shares_nothing_is_not_named() -> None:
    other = kvcs.Prefix(SCOPE, toy_descriptor(), range(50, 62))
    stranger = kvcs.Prefix(kvcs.Scope(key=bytes(32)), toy_descriptor(), range(12))
    assert look_up(document(other, stranger), OURS) == []


def test_without_keys_the_manifest_alone_tells() -> None:
    listed = {"kvcs-index": 1, "publications": [{"uri": uri(LONGER), "note": "ignored"}]}
    assert look_up(json.dumps(listed).encode(), OURS) == [uri(LONGER)]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ([], "kvcs-index"),
        ({"kvcs-index": 2, "publications": []}, "kvcs-index"),
        ({"kvcs-index": 1}, "publications: expected an array"),
        ({"kvcs-index": 1, "publications": [{}] * (MAX_ENTRIES + 1)}, "limit"),
        ({"kvcs-index": 1, "publications": [3]}, r"publications\[0\]"),
        ({"kvcs-index": 1, "publications": [{"uri": "moqt://x"}]}, "holder URI"),
        (
            {"kvcs-index": 1, "publications": [{"uri": uri(OURS), "block_keys": "ab"}]},
            r"publications\[0\].block_keys",
        ),
        (
            {"kvcs-index": 1, "publications": [{"uri": uri(OURS), "block_keys": ["AB" * 32]}]},
            "lower-case hex",
        ),
        (
            {"kvcs-index": 1, "publications": [{"uri": uri(OURS), "block_keys": ["ab"]}]},
            "64 lower-case",
        ),
    ],
)
async def test_what_is_malformed_is_told_with_its_place(
    tmp_path: Path, given: Any, why: str
) -> None:
    path = tmp_path / "index.json"
    path.write_text(json.dumps(given))
    with pytest.raises(kvcs.FileError, match=why) as caught:
        await kvcs.FileIndex(path).find(OURS)
    assert str(path) in str(caught.value)


def test_a_uri_of_another_scope_is_not_written() -> None:
    stranger = kvcs.Prefix(kvcs.Scope(key=bytes(32)), toy_descriptor(), range(12))
    with pytest.raises(kvcs.UsageError, match="scope and descriptor"):
        kvcs.index_json([(uri(stranger), OURS)])


async def test_a_folder_is_all_its_files(tmp_path: Path) -> None:
    index = kvcs.FileIndex(tmp_path)
    assert await index.find(OURS) == []
    (tmp_path / "old.json").write_bytes(document(PARTED))
    (tmp_path / "new.json").write_bytes(document(LONGER))
    (tmp_path / "other.txt").write_text("no index")
    os.utime(tmp_path / "old.json", (1, 1))
    found = await index.find(OURS)
    assert [each.blocks for each in found if isinstance(each, kvcs.Holding)] == [3, 2]
    # It is read anew each time.
    (tmp_path / "new.json").unlink()
    assert [each.blocks for each in await index.find(OURS)] == [2]  # type: ignore[union-attr]


async def test_what_is_no_index_in_a_folder_leaves_the_others(tmp_path: Path) -> None:
    index = kvcs.FileIndex(tmp_path)
    (tmp_path / "broken.json").write_bytes(document(OURS)[:-1])
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "gone.json").symlink_to("nowhere")
    with pytest.raises(kvcs.FileError, match=r"broken\.json: not JSON"):
        await index.find(OURS)
    (tmp_path / "good.json").write_bytes(document(PARTED))
    assert await index.find(OURS) == [kvcs.Holding(uri(PARTED), 2, PARTED.block_keys[2:])]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes with names")
async def test_a_pipe_in_a_folder_is_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.json"
    os.mkfifo(pipe)
    finding = asyncio.create_task(kvcs.FileIndex(tmp_path).find(OURS))
    try:
        async with asyncio.timeout(20):
            assert await asyncio.shield(finding) == []
    finally:
        # Whoever waits for a writer all the same, waits no longer.
        os.close(os.open(pipe, os.O_RDWR | os.O_NONBLOCK))


async def test_a_folder_is_read_up_to_its_limit_the_newest_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, prefix in enumerate((PARTED, OURS, LONGER)):
        path = tmp_path / f"{number}.json"
        path.write_bytes(document(prefix))
        os.utime(path, (number + 1, number + 1))
    two = len(document(OURS)) + len(document(LONGER))
    monkeypatch.setattr("kvcs.subscriber.indices.MAX_FOLDER_OCTETS", two)
    found = await kvcs.FileIndex(tmp_path).find(OURS)
    assert [each.blocks for each in found if isinstance(each, kvcs.Holding)] == [3, 3]


def test_a_document_of_too_many_values_is_refused() -> None:
    octets = b'{"kvcs-index":1,"publications":[],"x":[' + b"0," * MAX_INDEX_VALUES + b"0]}"
    with pytest.raises(kvcs.UsageError, match="values, limit"):
        look_up(octets, OURS)


def test_a_uri_of_no_characters_is_told_in_some() -> None:
    listed = {"kvcs-index": 1, "publications": [{"uri": uri(OURS)[:-2] + ".\ud8000"}]}
    with pytest.raises(kvcs.UsageError, match="hex digits") as caught:
        look_up(json.dumps(listed).encode(), OURS)
    assert str(caught.value).encode()


async def test_a_file_that_is_gone_is_told(tmp_path: Path) -> None:
    with pytest.raises(kvcs.FileError, match="No such file"):
        await kvcs.FileIndex(tmp_path / "gone.json").find(OURS)


def test_where_an_index_is_may_be_said_in_three_ways(tmp_path: Path) -> None:
    assert isinstance(index_at(str(tmp_path)), kvcs.FileIndex)
    assert isinstance(index_at("https://index.example/{scope}/{compat}.json"), kvcs.HttpIndex)
    with pytest.raises(kvcs.FileError, match="https://"):
        index_at(str(tmp_path / "none"))
    for wrong in ("http://index.example/x", "https://a:b@index.example/x", "https://x/?q=1"):
        with pytest.raises(kvcs.UsageError):
            index_at(wrong)
