"""What it costs not to have to trust relays: signed manifests, sealed Objects, and both."""

from __future__ import annotations

from typing import Final

from kvcs.bench.figures import Ratio
from kvcs.bench.groups.sizes import BASE
from kvcs.bench.plan import Case, Group, Scale
from kvcs.bench.transfer import Secure, Transfer
from kvcs.bench.workload import MIB, Workload, size_name

KINDS: Final[tuple[tuple[str, Secure, str], ...]] = (
    ("plain", "", "nothing signed, nothing sealed"),
    ("signed", "signed", "signed manifests, layers released once they are listed"),
    ("sealed", "sealed", "sealed objects"),
    ("both", "both", "signed and sealed"),
)
"""Rows, what they say to the processes, and what they say to people."""

OCTETS: Final = 256 * MIB
"""Of each transfer: seconds, so that what else runs on the machine counts less."""

SHORT_OCTETS: Final = 32 * MIB

ROUNDS: Final = 7
"""More than of other groups: what is looked for is a few hundredths."""


def protection(scale: Scale) -> Group:
    """Goodput and CPU time with signing and sealing, as a share of those without.

    Where sender and receiver keep two cores busy, goodput with protection over goodput without is
    at most the reciprocal of what the CPU time grows by, which moves less.
    """
    octets = scale.pick(OCTETS, SHORT_OCTETS)
    cases: list[Case] = []
    ratios: list[Ratio] = []
    for size in (BASE,) if scale.short else (BASE, MIB):
        load, name = Workload.of(size, octets), size_name(size)
        for row, secure, about in KINDS:
            cases.append(
                Case.of(
                    f"{row}_{name}",
                    f"{about}, {name} objects",
                    Transfer(workload=load, secure=secure),
                )
            )
            if secure:
                ratios += [
                    Ratio(f"{row}_{name}_over_plain", f"{row}_{name}", f"plain_{name}"),
                    Ratio(f"{row}_{name}_cpu_over_plain", f"{row}_{name}", f"plain_{name}", "cpu"),
                ]
    about = "goodput with signed manifests and sealed objects"
    return Group("protection", about, cases, ratios, rounds=ROUNDS)
