"""A group whose end is wrong is never a usable layer: unknown values are not benign."""

from __future__ import annotations

import pytest

import kvcs
from kvcs.moqt.objects import ObjectStatus
from tests.builders import QUICK, same, toy_prefix, toy_publication
from tests.certificates import PemFiles
from tests.loopback.kv_fixtures import joined
from tests.loopback.raw_publication import K0, V0, HandMade, RawPublication

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

END_OF_GROUP = int(ObjectStatus.END_OF_GROUP)


def undefined_status(hand: HandMade) -> None:
    """Status 0x7 in the place of object 2."""
    hand.stream(1, *hand.blocks(1, 0, 1), (2, 0x7))


def early_end(hand: HandMade) -> None:
    """End of Group at 2, where the manifest lists three blocks."""
    hand.stream(1, *hand.blocks(1, 0, 1), (2, END_OF_GROUP))


def object_after_the_end(hand: HandMade) -> None:
    """An object behind End of Group."""
    late = hand.blocks(1, 2)[0][1]
    hand.stream(1, *hand.blocks(1, 0, 1, 2), (3, END_OF_GROUP), (4, late))


@pytest.mark.parametrize(
    ("fault", "error", "session_lives"),
    [
        (undefined_status, kvcs.CacheIncomplete, False),
        (early_end, kvcs.PublicationError, True),
        (object_after_the_end, kvcs.PublicationError, True),
    ],
)
async def test_the_layer_is_never_usable(
    files: PemFiles, fault: object, error: type[kvcs.KvcsError], session_lives: bool
) -> None:
    assert callable(fault)
    raw = RawPublication(toy_publication())
    raw.manifest()  # all digests are listed: the objects themselves are right
    async with raw.serve(files) as server, joined(server, files) as client:
        async with kvcs.Subscriber(client, settings=QUICK).open(toy_prefix()) as cache:
            keys, values = await raw.subscribed(K0), await raw.subscribed(V0)
            for hand in (keys, values):
                hand.stream(0, *hand.blocks(0, 0, 1, 2), (3, END_OF_GROUP))
            assert same(await cache.layer(0), raw.toy)
            fault(keys)
            with pytest.raises(error) as caught:
                await cache.layer(1)
            assert client.is_open is session_lives
            if not session_lives:
                assert isinstance(caught.value.__cause__, kvcs.ConnectionClosed)
                assert caught.value.__cause__.code == 0x3  # PROTOCOL_VIOLATION
            else:
                values.stream(1, *values.blocks(1, 0, 1, 2), (3, END_OF_GROUP))
            with pytest.raises(error):
                await cache.layer(1)
            assert cache.progress.layers_ready <= 1
