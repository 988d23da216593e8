"""Arguments of another kind than the one that is taken: a UsageError says which one it is."""

from __future__ import annotations

from typing import Any

import pytest

import kvcs
from tests.builders import QUICK, toy_prefix
from tests.certificates import PemFiles
from tests.loopback.kv_fixtures import joined, serving

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"layers": 2}, r"layers: expected \(first, last\), both included, not 2"),
        ({"layers": [1, 2, 3]}, r"layers: expected \(first, last\)"),
        ({"layers": "2"}, r"layers: expected \(first, last\)"),
        ({"blocks": (0, 1)}, "blocks: how many of the first blocks, an integer, not tuple"),
        ({"blocks": "3"}, "blocks: how many of the first blocks, an integer, not str"),
    ],
)
async def test_a_selection_of_another_form(
    files: PemFiles, options: dict[str, Any], says: str
) -> None:
    async with serving(files) as server, joined(server, files) as client:
        subscriber = kvcs.Subscriber(client, settings=QUICK)
        with pytest.raises(kvcs.UsageError, match=says):
            async with subscriber.open(toy_prefix(), **options):
                raise AssertionError("it was opened")


async def test_paths_where_keys_are_taken(files: PemFiles) -> None:
    path: Any = "producer.key"
    async with serving(files) as server, joined(server, files) as client:
        with pytest.raises(kvcs.UsageError, match="keys takes what kvcs"):
            kvcs.Subscriber(client, keys=path)
        with pytest.raises(kvcs.UsageError, match="sign takes what kvcs"):
            async with kvcs.Publisher(server).publish(toy_prefix(), sign=path):
                raise AssertionError("it was published")


async def test_a_way_back_and_a_token_that_are_none() -> None:
    seconds: Any = 5
    with pytest.raises(kvcs.UsageError, match=r"reconnect takes kvcs.Reconnect\(...\), or None"):
        async with kvcs.connect("moqt://127.0.0.1:1", reconnect=seconds):
            raise AssertionError("it was connected")

    def nothing() -> Any:
        return None

    with pytest.raises(kvcs.UsageError, match="the function that gives tokens gave none"):
        async with kvcs.connect("moqt://127.0.0.1:1", token=nothing, reconnect=None):
            raise AssertionError("it was connected")
