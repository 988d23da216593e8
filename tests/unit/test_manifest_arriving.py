"""A manifest on its way in: what it takes before it is there."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from typing import Any, cast

from kvcs.moqt import events
from kvcs.moqt.objects import ObjectHeader
from kvcs.subscriber.authenticity import Authenticity
from kvcs.subscriber.manifests import ManifestFollower
from kvcs.subscriber.settings import SubscriberSettings
from tests.builders import toy_prefix

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
