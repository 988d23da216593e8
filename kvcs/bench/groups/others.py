"""Beside others: another implementation of the transport, and what people use instead."""

from __future__ import annotations

from typing import Final

from kvcs.bench import peer
from kvcs.bench.figures import Ratio
from kvcs.bench.needs import needs
from kvcs.bench.plan import Case, Group, Scale
from kvcs.bench.transfer import Transfer
from kvcs.bench.workload import KIB, MIB, Workload, size_name

PEER_SIZES: Final = (32 * KIB, 256 * KIB)
OTHER_SIZES: Final = (32 * KIB, MIB)


def aiomoqt(scale: Scale) -> Group:
    """Beside aiomoqt's own publisher, relay and subscriber at the same size of Objects."""
    # It sends for some seconds; this takes about as long, so that start-up weighs alike.
    octets = scale.pick(512, 32) * MIB
    seconds = scale.pick(4, 2)
    cases: list[Case] = []
    ratios: list[Ratio] = []
    for size in PEER_SIZES[:1] if scale.short else PEER_SIZES:
        load, name = Workload.of(size, octets), size_name(size)
        for row, relay in (("direct", False), ("relay", True)):
            ours, theirs = f"kvcs_{row}_{name}", f"aiomoqt_{row}_{name}"
            cases += [
                Case.of(ours, f"kvcs, {row}, {name} objects", Transfer(workload=load, relay=relay)),
                Case(
                    theirs,
                    f"aiomoqt, {row}, {name} objects, nothing verified",
                    peer.runner(size, relay=relay, seconds=seconds),
                ),
            ]
            ratios.append(Ratio(f"kvcs_{row}_{name}_over_aiomoqt", ours, theirs))
        ratios.append(
            Ratio(
                f"aiomoqt_relay_{name}_over_direct",
                f"aiomoqt_relay_{name}",
                f"aiomoqt_direct_{name}",
            )
        )
    return Group("aiomoqt", "beside aiomoqt's publisher, relay, subscriber", cases, ratios)


def others(scale: Scale) -> Group:
    """Beside TCP, HTTP and Redis on one machine, which encrypt nothing and verify nothing."""
    octets = scale.pick(128, 64) * MIB
    cases: list[Case] = []
    ratios: list[Ratio] = []
    for size in OTHER_SIZES:
        load, name = Workload.of(size, octets), size_name(size)
        ours = f"beside_{name}"
        cases += [
            Case.of(ours, f"kvcs, {name} objects", Transfer(workload=load)),
            Case.of(f"tcp_{name}", f"TCP, {name} writes", Transfer(workload=load, stack="tcp")),
            Case(
                f"http_{name}",
                f"HTTP/1.1 by aiohttp, {name} bodies, 8 in flight",
                needs(Transfer(workload=load, stack="http"), module="aiohttp"),
            ),
            Case(
                f"redis_{name}",
                f"Redis, GET of {name} values that are there, 8 connections",
                needs(
                    Transfer(workload=load, stack="redis", late=True),
                    module="redis",
                    program="redis-server",
                ),
            ),
        ]
        ratios += [
            Ratio(f"kvcs_{name}_over_{other}", ours, f"{other}_{name}")
            for other in ("tcp", "http", "redis")
        ]
    return Group("others", "beside TCP, HTTP and Redis, for honesty", cases, ratios)
