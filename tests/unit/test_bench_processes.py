"""The bench's processes: one tiny transfer of each kind, failures, and what a link does."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvcs.bench.children import Child, ChildFailed, child
from kvcs.bench.groups import churn
from kvcs.bench.needs import needs
from kvcs.bench.plan import Scale
from kvcs.bench.roles.link import Direction
from kvcs.bench.roles.streaming import digest_of, layers_of
from kvcs.bench.transfer import Certificates, Link, Transfer
from kvcs.bench.usage import Meter
from kvcs.bench.workload import KIB, MIB, Workload
from kvcs.cli.certs import make_certificates

pytestmark = pytest.mark.timeout(240)
"""Processes may wait long for their turn on a machine that others use."""

TINY = Workload.of(32 * KIB, 2 * MIB)
SEED = 7


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    make_certificates(tmp_path / "certs", ("127.0.0.1",))
    return Certificates(tmp_path / "certs")


async def test_a_transfer_is_measured_and_verified(certificates: Certificates) -> None:
    found = await Transfer(workload=TINY).run(certificates)
    assert found.octets == 2 * MIB and found.objects == TINY.objects
    assert found.digests_match is True
    assert found.seconds > 0
    assert set(found.processes) == {"sender", "receiver"}
    assert all(each.peak_octets > each.before_octets > MIB for each in found.processes.values())
    assert 0 < found.values["first_layer_ms"] <= found.values["all_layers_ms"]


TRANSFERS = {
    "raw": Transfer(workload=TINY, stack="raw", datagram=1200),
    "stock": Transfer(workload=TINY, stack="stock", datagram=1452),
    "tcp": Transfer(workload=TINY, stack="tcp"),
    "relay": Transfer(workload=TINY, relay=True, consumers=2),
    "late": Transfer(workload=TINY, relay=True, late=True),
    "lent": Transfer(workload=TINY, lend="distinct"),
    "dropped": Transfer(workload=TINY, lend="same", keep=False),
    "signed and sealed": Transfer(workload=TINY, secure="both"),
    "computed": Transfer(workload=TINY, compute_ms=1.0),
    "one stream": Transfer(workload=Workload.of(32 * KIB, 2 * MIB, layers=1, components=1)),
    "link": Transfer(workload=TINY, datagram=1452, link=Link(4, 0.01)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRANSFERS)
async def test_every_kind_of_transfer_runs(certificates: Certificates, name: str) -> None:
    transfer = TRANSFERS[name]
    found = await transfer.run(certificates, SEED)
    assert found.octets == 2 * MIB * transfer.consumers
    verified = transfer.stack == "kvcs"
    assert found.objects == (transfer.workload.objects if verified else 0)
    assert found.digests_match is (True if verified and transfer.keep else None)
    assert ("relay" in found.processes) == transfer.relay
    assert ("all_layers_over_computing" in found.values) == (transfer.compute_ms > 0)


@pytest.mark.slow
async def test_http_runs(certificates: Certificates) -> None:
    pytest.importorskip("aiohttp")
    run = needs(Transfer(workload=TINY, stack="http"), module="aiohttp")
    assert (await run(certificates, 0)).octets == 2 * MIB


@pytest.mark.slow
async def test_another_loop_runs(certificates: Certificates) -> None:
    pytest.importorskip("uvloop")
    found = await Transfer(workload=TINY, loop="uvloop").run(certificates)
    assert found.digests_match is True


@pytest.mark.slow
async def test_redis_runs(certificates: Certificates) -> None:
    pytest.importorskip("redis")
    transfer = Transfer(workload=TINY, stack="redis", late=True)
    if shutil.which("redis-server") is None:
        pytest.skip("there is no redis-server on PATH")
    assert (await transfer.run(certificates, 0)).octets == 2 * MIB


# Failures


async def test_a_process_that_fails_is_told_with_its_complaint() -> None:
    with pytest.raises(ChildFailed, match="no such role"):
        async with child("no such role") as process:
            await process.event("ready")


async def test_a_process_that_says_something_else_is_a_failure() -> None:
    with pytest.raises(ChildFailed, match="in the place of sent"):
        async with child("tcp-sender") as process:
            process.tell(json.dumps({"workload": TINY.to_json(), "seconds": 60.0}))
            await process.event("sent")
    assert process.process.returncode is not None


async def test_a_process_that_dies_in_a_transfer_ends_it(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Mortal(Child):
        def tell(self, word: str) -> None:
            if word == "go" and self.role == "tcp-sender":
                self.process.kill()
            else:
                super().tell(word)

    @asynccontextmanager
    async def mortal(role: str, loop: str) -> AsyncIterator[Child]:
        async with child(role, loop) as process:
            yield Mortal(role, process.process)

    monkeypatch.setattr("kvcs.bench.transfer.child", mortal)
    with pytest.raises(ChildFailed, match="ended early"):
        await Transfer(workload=TINY, stack="tcp").run(certificates)


async def test_a_transfer_that_takes_too_long_says_so(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcs.bench.transfer.START_SECONDS", -10.0)
    with pytest.raises(ChildFailed, match="was not over within"):
        await Transfer(workload=TINY, stack="tcp").run(certificates)


async def test_a_process_ends_with_what_needed_it() -> None:
    with pytest.raises(ZeroDivisionError):
        async with child("consumer") as process:
            raise ZeroDivisionError
    assert process.process.returncode is not None


# Roles


@pytest.mark.parametrize("components", [1, 2])
def test_layers_have_shapes_and_differ(components: int) -> None:
    load = Workload.of(32 * KIB, 32 * KIB * 4 * components, layers=2, components=components)
    copies = [
        [None if array is None else array.tobytes() for array in pair] for pair in layers_of(load)
    ]
    assert len({octets for pair in copies for octets in pair if octets}) == 2 * components
    assert (copies[0][1] is None) == (components == 1)
    assert digest_of(layers_of(load)) == digest_of(list(layers_of(load, "distinct")))
    assert digest_of(layers_of(load)) != digest_of(list(layers_of(load))), "one buffer for all"


def test_a_meter_reads_once() -> None:
    meter = Meter()
    meter.stop()
    first = meter.reading()
    assert first == {**meter.reading(), "peak_octets": first["peak_octets"]}
    assert first["at"] >= first["started_at"]
    assert first["cpu_seconds"] >= 0
    assert first["before_octets"] > MIB


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[socket.socket, Callable[[int], Any]]]:
    """A connected socket to send on, and a way to wait for datagrams at its other end."""
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as there,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as here,
    ):
        there.bind(("127.0.0.1", 0))
        there.setblocking(False)
        here.connect(there.getsockname())
        here.setblocking(False)

        async def arrive(count: int) -> list[bytes]:
            loop = asyncio.get_running_loop()
            async with asyncio.timeout(20):
                return [await loop.sock_recv(there, 100) for _ in range(count)]

        yield here, arrive


async def test_a_link_delays_and_keeps_the_order() -> None:
    async with pair() as (target, arrive):
        direction = Direction(target, 0.02, 0.0, "seed")
        begun = asyncio.get_running_loop().time()
        sent = [bytes([number]) for number in range(50)]
        for data in sent:
            direction.push(data)
        assert await arrive(len(sent)) == sent
        assert asyncio.get_running_loop().time() - begun >= 0.02
        assert direction.dropped == 0


async def test_a_link_drops_by_its_seed() -> None:
    async with pair() as (target, arrive):
        found = []
        for seed in ("one", "one", "two"):
            direction = Direction(target, 0.0, 0.3, seed)
            for number in range(100):
                direction.push(bytes([number]))
            found.append(await arrive(100 - direction.dropped))
        assert found[0] == found[1] != found[2]
        assert 50 < len(found[0]) < 90


# Publications that come and go


@pytest.mark.slow
async def test_the_memory_of_a_relay_is_watched(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(churn, "BATCHES", churn.WARM + 2)
    found = await churn.measure(certificates, small=1, large=0)
    assert (found.octets, found.objects) == (10 * 64 * KIB, 10 * 2)
    assert set(found.processes) == {"sender", "relay"}
    assert abs(found.values[churn.GROWTH]) < 1.0


def test_the_slope_counts_from_where_the_relay_is_warm() -> None:
    rising = [churn.CACHE_OCTETS * number for number in range(churn.WARM)]
    flat = churn.slope_values([*rising, *[5 * MIB] * 12], 100)
    assert flat == {"relay_memory_octets_per_publication": 0.0, churn.GROWTH: 0.0}
    grows = churn.slope_values([*rising, *range(0, 5 * MIB, MIB)], 128)
    assert grows["relay_memory_octets_per_publication"] == pytest.approx(MIB / 128)
    assert grows[churn.GROWTH] == pytest.approx(4 * MIB / churn.CACHE_OCTETS)


def test_more_publications_are_larger_batches() -> None:
    groups = [churn.churn(Scale(publications=count)) for count in (20, 20_000)]
    labels = [group.cases[0].label.rpartition(", ")[2] for group in groups]
    assert labels == ["20 small publications", "20000 small publications"]
