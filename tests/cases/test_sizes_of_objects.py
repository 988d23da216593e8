"""Objects of awkward sizes through two relays (case 46)."""

from __future__ import annotations

import numpy as np
import pytest

import kvcs
from kvcs.errors import UsageError
from kvcs.kv import UNPINNED
from tests.certificates import PemFiles
from tests.loopback.test_relay_chain import PATIENT, relaying

KIB = 1024
SIZES = (16 * KIB, 64 * KIB - 1, 64 * KIB, 1024 * KIB, 4096 * KIB)
"""Octets of Data of one Object, K or V of a block."""

HEAD = 32 * KIB
"""head_dim of what has several heads."""


def prefix(octets: int) -> kvcs.Prefix:
    """Two blocks of one layer whose K and V each take ``octets`` octets a block."""
    descriptor = kvcs.Descriptor(
        model="sizes",
        weights=UNPINNED,
        layers=1,
        kv_heads=octets // HEAD if octets % HEAD == 0 else 1,
        head_dim=HEAD if octets % HEAD == 0 else octets,
        dtype="uint8",
        block_tokens=1,
    )
    return kvcs.Prefix(kvcs.Scope(bytes(32)), descriptor, range(2))


@pytest.mark.parametrize("octets", SIZES)
async def test_every_octet_comes_through(
    files: PemFiles, nothing_left_behind: None, octets: int
) -> None:
    wanted = prefix(octets)
    shape = (2, wanted.descriptor.kv_heads, wanted.descriptor.head_dim)
    rng = np.random.default_rng(octets)
    k, v = (rng.integers(0, 256, shape, dtype=np.uint8) for _ in "kv")
    async with relaying(files) as upper, relaying(files, upper.url) as lower:
        async with kvcs.connect(upper.url, ca=files.ca) as session:
            async with kvcs.Publisher(session).publish(wanted) as publication:
                segment = await publication.segment()
                await segment.put(0, k, v)
                segment.finish()
                async with kvcs.connect(lower.url, ca=files.ca) as below:
                    subscriber = kvcs.Subscriber(below, settings=PATIENT)
                    async with subscriber.open(wanted, deadline=40.0) as cache:
                        [layer] = [layer async for layer in cache]
    assert layer.k.tobytes() == k.tobytes() and layer.v.tobytes() == v.tobytes()
    assert (cache.report.objects, cache.report.duplicates) == (4, 0)


async def test_what_is_larger_than_allowed_is_refused_before_it_is_sent(
    files: PemFiles, nothing_left_behind: None
) -> None:
    wanted = prefix(64 * KIB)
    shape = (2, wanted.descriptor.kv_heads, wanted.descriptor.head_dim)
    k, v = (np.zeros(shape, dtype=np.uint8) for _ in "kv")
    settings = kvcs.PublisherSettings(max_data_octets=64 * KIB - 1)
    async with relaying(files) as relay, kvcs.connect(relay.url, ca=files.ca) as session:
        with pytest.raises(UsageError, match="above the limit of 65535"):
            async with kvcs.Publisher(session, settings=settings).publish(wanted) as publication:
                segment = await publication.segment()
                await segment.put(0, k, v)
        assert relay.stats.objects_in == 0
