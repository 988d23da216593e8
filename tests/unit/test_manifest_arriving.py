"""A manifest on its way in: what it takes before it is there."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from typing import Any, cast

from kvcs.moqt import events
from kvcs.moqt.objects import ObjectHeader
from kvcs.subscriber.authenticity import Authenticity
from kvcs.subscriber.manifests import THREAD_OCTETS, ManifestFollower
from kvcs.subscriber.settings import SubscriberSettings
from tests.builders import toy_prefix, toy_publication

MIB = 2**20


def test_announced_manifests_take_no_memory_before_octets_come() -> None:
    prefix = toy_prefix(1)
    follower = ManifestFollower(
        cast(Any, None),
        prefix.namespace(bytes(16)),
        prefix,
        SubscriberSettings(),
        lambda: None,
        authenticity=Authenticity(),
    )
    header = ObjectHeader(0, 0, 0, 0, payload_length=127 * MIB)
    tracemalloc.start()
    try:
        for group in range(4):
            stream_id = 3 + 4 * group
            started = replace(header, group_id=group)
            follower._take(events.ObjectStarted(0, stream_id, started))
            follower._take(events.ObjectChunk(0, stream_id, memoryview(b"{")))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert follower.error is None
    assert held < MIB


async def test_of_large_versions_that_come_too_fast_the_newest_is_read() -> None:
    prefix = toy_prefix()
    follower = ManifestFollower(
        cast(Any, None),
        prefix.namespace(bytes(16)),
        prefix,
        SubscriberSettings(),
        lambda: None,
        authenticity=Authenticity(),
    )
    follower.use(b"manifest")
    payload = toy_publication().writer().to_json_bytes() + b" " * THREAD_OCTETS
    read: list[int] = []
    inner = follower._parse

    def noting(arriving: Any) -> Any:
        read.append(arriving.group_id)
        return inner(arriving)

    follower._parse = noting  # type: ignore[method-assign]
    for versions in (range(9), range(9, 12)):
        for group in versions:
            where = (0, 3 + 4 * group)
            header = ObjectHeader(group, 0, 0, 0, payload_length=len(payload))
            follower.take(events.ObjectStarted(*where, header))
            follower.take(events.ObjectChunk(*where, memoryview(payload)))
            follower.take(events.ObjectEnded(*where))
        await follower.parsed()
    assert follower.error is None
    assert (follower.newest, follower.versions) == (11, 2)
    assert read == [8, 11]
