"""When each layer is there: the first one, all of them, and behind the moment of computing."""

from __future__ import annotations

from kvcs.bench.figures import Ratio
from kvcs.bench.groups.sizes import BASE
from kvcs.bench.plan import Case, Group, Scale
from kvcs.bench.transfer import Transfer
from kvcs.bench.workload import MIB, Workload

SHARE = "first_over_all_layers"
QUEUED = "queued_direct"


def layers(scale: Scale) -> Group:
    """Time to the first and to every verified layer, against the moment it was computed."""
    load = Workload.of(BASE, scale.pick(64, 16) * MIB)
    cases: list[Case] = []
    ratios: list[Ratio] = []
    for row, relay in (("direct", False), ("relay", True)):
        overlapping = f"overlap_{row}"
        cases += [
            Case.of(
                f"queued_{row}",
                f"{row}, the consumer opens when every layer was put",
                Transfer(workload=load, relay=relay, late=True),
            ),
            Case.of(
                f"live_{row}",
                f"{row}, layers put as fast as they are taken",
                Transfer(workload=load, relay=relay),
            ),
            Case.of(
                overlapping,
                f"{row}, {scale.compute_ms:g} ms of computing before each layer",
                Transfer(workload=load, relay=relay, compute_ms=scale.compute_ms),
            ),
        ]
        ratios += [
            Ratio(f"queued_{row}_{SHARE}", f"queued_{row}", metric=SHARE),
            Ratio(f"live_{row}_{SHARE}", f"live_{row}", metric=SHARE),
        ]
        if scale.compute_ms:
            ratios.append(
                Ratio(
                    f"{overlapping}_all_layers_over_computing",
                    overlapping,
                    metric="all_layers_over_computing",
                )
            )
    return Group("layers", "time to the first and to each layer, with overlap", cases, ratios)
