"""Memory of a large cache, and cost for each octet as caches grow."""

from __future__ import annotations

from kvcs.bench.figures import Ratio
from kvcs.bench.needs import needs_memory
from kvcs.bench.plan import Case, Group, Scale
from kvcs.bench.transfer import Transfer
from kvcs.bench.workload import GIB, KIB, MIB, Workload, size_name

OBJECT = 256 * KIB

SPARE = GIB
"""What processes need beside the cache."""


def memory(scale: Scale) -> Group:
    """Peak memory less what imports and the engine's arrays took, divided by the cache's size."""
    octets = scale.pick(GIB, 128 * MIB)
    load, name = Workload.of(OBJECT, octets), size_name(octets)
    copying, lending = f"copying_{name}", f"lending_{name}"
    copy, lent = Transfer(workload=load), Transfer(workload=load, lend="distinct")
    # The producer and the consumer each hold the cache.
    needed = 2 * octets + SPARE
    cases = [
        Case(copying, f"{name} cache, arrays copied", needs_memory(copy, needed)),
        Case(lending, f"{name} cache, arrays lent", needs_memory(lent, needed)),
    ]
    ratios = [
        Ratio(f"memory_consumer_{name}_over_cache", copying, metric="memory:receiver"),
        Ratio(f"memory_copying_{name}_over_cache", copying, metric="memory:sender"),
        Ratio(f"memory_lending_{name}_over_cache", lending, metric="memory:sender"),
    ]
    return Group("memory", "peak memory of a cache of 1 GiB by its size", cases, ratios, rounds=2)


def growth(scale: Scale) -> Group:
    """Cost for each 10^9 octets: arrays are lent, and the consumer drops each layer."""
    sizes = (16 * MIB, 256 * MIB) if scale.short else (64 * MIB, GIB, 8 * GIB)
    cases = [
        Case(
            f"growth_{size_name(size)}",
            f"{size_name(size)} cache, arrays lent, layers dropped",
            needs_memory(
                Transfer(workload=Workload.of(OBJECT, size), lend="same", keep=False),
                # One layer's arrays in the producer, and what waits to be dropped in the consumer.
                SPARE + size // 4,
            ),
        )
        for size in sizes
    ]
    base = f"growth_{size_name(sizes[0])}"
    ratios: list[Ratio] = []
    for size in sizes[1:]:
        case = f"growth_{size_name(size)}"
        for metric, word in (("rate", "goodput"), ("cpu:sender", "cpu_sender")):
            name = f"{case}_over_{size_name(sizes[0])}_{word}"
            ratios.append(Ratio(name, case, base, metric))
        ratios.append(
            Ratio(f"{case}_over_{size_name(sizes[0])}_cpu_receiver", case, base, "cpu:receiver")
        )
        ratios.append(Ratio(f"memory_dropping_{case}_over_cache", case, metric="memory:receiver"))
    return Group("growth", "cost for each GB as caches grow to 8 GiB", cases, ratios, rounds=1)
