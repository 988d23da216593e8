"""A move is counted on both sides, in what an application registers with Prometheus."""

from __future__ import annotations

import kvcs
from tests.builders import QUICK, put, toy_prefix, toy_publication
from tests.certificates import PemFiles
from tests.loopback.kv_fixtures import joined, serving


def total(name: str) -> float:
    """One metric, over all its labels; the process's other tests count too."""
    return sum(kvcs.observe.metrics.values()[name].values())


NAMES = (
    "kvcs_objects_published",
    "kvcs_bytes_published",
    "kvcs_objects_verified",
    "kvcs_bytes_received",
    "kvcs_manifest_versions",
    "kvcs_retrieval_seconds",
    "kvcs_first_layer_seconds",
)


async def test_a_move_is_counted_on_both_sides(files: PemFiles) -> None:
    before = {name: total(name) for name in NAMES}
    toy, prefix = toy_publication(), toy_prefix()
    async with serving(files) as server, joined(server, files) as client:
        async with kvcs.Publisher(server).publish(prefix) as publication:
            await put(await publication.segment(), toy)
            async with kvcs.Subscriber(client, settings=QUICK).open(prefix, deadline=30) as cache:
                await cache.complete()
                report = cache.report
    grown = {name: total(name) - before[name] for name in NAMES}
    assert grown["kvcs_objects_published"] == grown["kvcs_objects_verified"] == report.objects > 0
    assert grown["kvcs_bytes_published"] == report.octets
    assert grown["kvcs_bytes_received"] == report.octets
    assert grown["kvcs_manifest_versions"] >= 1
    assert grown["kvcs_retrieval_seconds"] == grown["kvcs_first_layer_seconds"] == 1
