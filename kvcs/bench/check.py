"""The short form for continuous integration: ratios with so much slack that noise passes.

Absolute figures say nothing on a machine that others use, and ratios move there too. A floor is
therefore far from what is reached: only a change that makes something several times as slow, or as
large, falls below it. What fails is measured once more before it counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from kvcs.bench.figures import Ratio, Spread
from kvcs.bench.groups.layers import QUEUED, SHARE
from kvcs.bench.groups.paths import PLAIN_DATAGRAM, streams_load
from kvcs.bench.plan import Case, Group
from kvcs.bench.targets import Target
from kvcs.bench.transfer import Transfer
from kvcs.bench.workload import KIB, MIB, Workload

ROUNDS: Final = 2

OCTETS: Final = 16 * MIB


def floors() -> tuple[Target, ...]:
    """Bounds that only a real change for the worse breaks."""

    def least(name: str, bound: float) -> Target:
        return Target(name, (name,), bound, "check")

    def most(name: str, bound: float) -> Target:
        return Target(name, (name,), bound, "check", at_most=True)

    return (
        least("check_direct_over_raw", 0.25),
        # CPU time moves less than the clock when others use the machine.
        most("check_direct_cpu_over_raw", 6.0),
        least("check_relay_over_direct", 0.12),
        least("check_direct_1452B_over_stock", 0.6),
        least("check_160streams_over_1", 0.3),
        least("check_32KiB_over_1MiB", 0.25),
        least("check_protected_over_plain", 0.35),
        most("check_first_over_all_layers", 0.6),
        most("check_memory_consumer_over_cache", 2.0),
        most("check_memory_copying_over_cache", 2.0),
        most("check_memory_lending_over_cache", 0.9),
    )


def group() -> Group:
    """What is measured for it."""
    load = Workload.of(32 * KIB, OCTETS)
    large = Workload.of(MIB, 64 * MIB)
    many = streams_load(160, 20 * MIB)
    one = streams_load(1, 20 * MIB)
    cases = [
        Case.of("check_raw", "raw QUIC", Transfer(workload=load, stack="raw")),
        Case.of("check_direct", "direct", Transfer(workload=load)),
        Case.of("check_relay", "one relay", Transfer(workload=load, relay=True)),
        Case.of(
            "check_direct_1452B",
            "direct, 1452 octets",
            Transfer(workload=load, datagram=PLAIN_DATAGRAM),
        ),
        Case.of(
            "check_stock_1452B",
            "stock aioquic, 1452 octets",
            Transfer(workload=load, stack="stock", datagram=PLAIN_DATAGRAM),
        ),
        Case.of("check_160streams", "160 streams", Transfer(workload=many)),
        Case.of("check_1stream", "one stream", Transfer(workload=one)),
        Case.of("check_1MiB", "objects of 1 MiB", Transfer(workload=large)),
        Case.of("check_protected", "signed and sealed", Transfer(workload=load, secure="both")),
        Case.of("check_lending", "arrays lent", Transfer(workload=large, lend="distinct")),
        Case.of(f"check_{QUEUED}", "all layers queued", Transfer(workload=load, late=True)),
    ]
    ratios = [
        Ratio("check_direct_over_raw", "check_direct", "check_raw"),
        Ratio("check_direct_cpu_over_raw", "check_direct", "check_raw", "cpu"),
        Ratio("check_relay_over_direct", "check_relay", "check_direct"),
        Ratio("check_direct_1452B_over_stock", "check_direct_1452B", "check_stock_1452B"),
        Ratio("check_160streams_over_1", "check_160streams", "check_1stream"),
        Ratio("check_32KiB_over_1MiB", "check_direct", "check_1MiB"),
        Ratio("check_protected_over_plain", "check_protected", "check_direct"),
        Ratio("check_first_over_all_layers", f"check_{QUEUED}", metric=SHARE),
        Ratio("check_memory_consumer_over_cache", "check_1MiB", metric="memory:receiver"),
        Ratio("check_memory_copying_over_cache", "check_1MiB", metric="memory:sender"),
        Ratio("check_memory_lending_over_cache", "check_lending", metric="memory:sender"),
    ]
    return Group("check", "floors for continuous integration", cases, ratios, rounds=ROUNDS)


def best(spread: Spread, target: Target) -> float:
    """The better end of a spread: what the machine could do when it was left alone."""
    return spread.least if target.at_most else spread.most


def broken(spreads: Mapping[str, Spread]) -> Sequence[str]:
    """Which floors are broken, each as a line that says by what.

    The better round counts: a neighbour on the machine makes a round worse, never better.
    """
    lines = []
    for target in floors():
        spread = target.spread(spreads)
        if spread is None:
            lines.append(f"{target.name} was not measured")
            continue
        value = best(spread, target)
        if value > target.bound if target.at_most else value < target.bound:
            word = "at most" if target.at_most else "at least"
            lines.append(f"{target.name} is {value:.2f}, to be {word} {target.bound:g}")
    return lines
