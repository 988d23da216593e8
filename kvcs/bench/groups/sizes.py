"""Goodput by the size of Objects, and by their number."""

from __future__ import annotations

from itertools import pairwise
from typing import Final

from kvcs.bench.figures import Ratio
from kvcs.bench.plan import Case, Group, Scale
from kvcs.bench.transfer import Transfer
from kvcs.bench.workload import KIB, MIB, Workload, size_name

SIZES: Final = (16 * KIB, 32 * KIB, 64 * KIB, 256 * KIB, MIB)
SHORT_SIZES: Final = (32 * KIB, 256 * KIB)
BASE: Final = 32 * KIB
"""Size of Objects that other groups use."""

COUNTED: Final = 16 * KIB
"""Size of Objects whose number grows."""


def goodput(scale: Scale) -> Group:
    """Verified goodput beside raw QUIC of the same backend and settings."""
    octets = scale.pick(256, 32) * MIB
    cases: list[Case] = []
    ratios: list[Ratio] = []
    for size in SHORT_SIZES if scale.short else SIZES:
        load, name = Workload.of(size, octets), size_name(size)
        raw, direct, relay = (f"{row}_{name}" for row in ("raw", "direct", "relay"))
        cases += [
            Case.of(raw, f"raw QUIC, {name} writes", Transfer(workload=load, stack="raw")),
            Case.of(direct, f"producer to consumer, {name} objects", Transfer(workload=load)),
            Case.of(
                relay, f"through one relay, {name} objects", Transfer(workload=load, relay=True)
            ),
        ]
        ratios += [
            Ratio(f"{direct}_over_raw", direct, raw),
            Ratio(f"{relay}_over_raw", relay, raw),
            Ratio(f"{relay}_over_direct", relay, direct),
            Ratio(f"{direct}_over_stock", direct, "stock"),
            Ratio(f"{raw}_over_stock", raw, "stock"),
            Ratio(f"{direct}_cpu_over_raw", direct, raw, "cpu"),
            Ratio(f"{relay}_cpu_over_raw", relay, raw, "cpu"),
        ]
        if not scale.short and size in (BASE, MIB):
            lent, moved = f"lent_{name}", f"raw_memory_{name}"
            cases += [
                Case.of(
                    moved,
                    f"raw QUIC from memory into memory, {name} writes",
                    Transfer(workload=load, stack="raw", into=True),
                ),
                Case.of(
                    lent,
                    f"arrays lent, received into used memory, {name} objects",
                    Transfer(workload=load, lend="distinct", into=True),
                ),
            ]
            ratios += [
                Ratio(f"{lent}_over_raw", lent, raw),
                Ratio(f"{lent}_over_raw_memory", lent, moved),
            ]
        if size == MIB:
            base = f"direct_{size_name(BASE)}"
            ratios.append(Ratio(f"{base}_over_{direct}", base, direct))
    # One stream, written at once: Objects mean nothing to it.
    load = Workload.of(BASE, scale.pick(32, 16) * MIB)
    cases.append(Case.of("stock", "stock aioquic.asyncio", Transfer(workload=load, stack="stock")))
    return Group("goodput", "goodput by object size, beside raw QUIC", cases, ratios, rounds=4)


def objects(scale: Scale) -> Group:
    """Time for each octet while the number of Objects grows tenfold, and tenfold again."""
    counts = (640, 6400) if scale.short else (640, 6400, 64_000)
    cases = [
        Case.of(
            f"direct_{count}objects",
            f"producer to consumer, {count} objects of {size_name(COUNTED)}",
            # What is lent and let go again keeps memory from growing with the number.
            Transfer(workload=Workload.of(COUNTED, count * COUNTED), lend="same", keep=False),
        )
        for count in counts
    ]
    ratios = [
        Ratio(
            f"direct_{count}objects_over_{less}", f"direct_{count}objects", f"direct_{less}objects"
        )
        for less, count in pairwise(counts)
    ]
    return Group("objects", "goodput as the number of objects grows tenfold", cases, ratios)
