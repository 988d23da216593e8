"""Goodput by streams, consumers, datagram sizes, and on paths that delay and lose datagrams."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from kvcs.bench.figures import Ratio
from kvcs.bench.groups.sizes import BASE
from kvcs.bench.needs import needs
from kvcs.bench.plan import Case, Group, Scale
from kvcs.bench.transfer import Link, Stack, Transfer
from kvcs.bench.workload import MIB, Workload
from kvcs.quic.aioquic_backend.settings import (
    LARGEST_DATAGRAM,
    LARGEST_UNDECLARED,
    SMALLEST_DATAGRAM,
)

STREAMS: Final = (1, 8, 32, 160)
CONSUMERS: Final = (1, 4, 16)
PLAIN_DATAGRAM: Final = 1452
"""UDP payload on Ethernet, below 48 octets of IPv6 and UDP headers."""

BARE: Final[tuple[tuple[str, Stack], ...]] = (("raw", "raw"), ("direct", "kvcs"))
THREE: Final[tuple[tuple[str, Stack], ...]] = (*BARE, ("stock", "stock"))
"""Rows and the stacks that they measure."""

JUMBO_DATAGRAM: Final = 8952
DATAGRAMS: Final = (SMALLEST_DATAGRAM, PLAIN_DATAGRAM, JUMBO_DATAGRAM, LARGEST_DATAGRAM)

LINKS: Final = tuple(Link(rtt, loss) for rtt in (1, 20, 80) for loss in (0.001, 0.01))
SHORT_LINKS: Final = (Link(1, 0.01), Link(20, 0.001))


def streams_load(streams: int, octets: int) -> Workload:
    """A workload of so many streams: layers of K and V, or one joint tensor for a single one."""
    components = 1 if streams == 1 else 2
    return Workload.of(BASE, octets, layers=streams // components, components=components)


def streams(scale: Scale) -> Group:
    """Goodput when the same octets lie on more streams, all of them queued at once."""
    octets = scale.pick(320, 20) * MIB
    cases: list[Case] = []
    ratios: list[Ratio] = []
    for count in (1, 160) if scale.short else STREAMS:
        load, name = streams_load(count, octets), f"{count}streams"
        for row, stack in BARE:
            cases.append(
                Case.of(f"{row}_{name}", f"{row}, {count} streams", _by(stack, workload=load))
            )
        ratios.append(Ratio(f"direct_{name}_over_raw", f"direct_{name}", f"raw_{name}"))
        if count > 1:
            for row in ("raw", "direct"):
                ratios.append(Ratio(f"{row}_{name}_over_1", f"{row}_{name}", f"{row}_1streams"))
    return Group("streams", "goodput by number of live streams", cases, ratios)


def consumers(scale: Scale) -> Group:
    """Goodput of all consumers together, direct and through one relay."""
    load = Workload.of(BASE, scale.pick(16, 4) * MIB)
    cases: list[Case] = []
    ratios: list[Ratio] = []
    for count in (1, 4) if scale.short else CONSUMERS:
        name = f"{count}consumers"
        for row, relay in (("direct", False), ("relay", True)):
            transfer = Transfer(workload=load, relay=relay, consumers=count)
            cases.append(Case.of(f"{row}_{name}", f"{row}, {count} consumer processes", transfer))
            if count > 1:
                ratios.append(Ratio(f"{row}_{name}_over_1", f"{row}_{name}", f"{row}_1consumers"))
        ratios.append(Ratio(f"relay_{name}_over_direct", f"relay_{name}", f"direct_{name}"))
    about = "goodput of all consumers together, direct and through a relay"
    return Group("consumers", about, cases, ratios)


def datagrams(scale: Scale) -> Group:
    """Goodput by datagram size, each beside raw QUIC and the stock library at the same size."""
    cases: list[Case] = []
    ratios: list[Ratio] = []
    for size in (SMALLEST_DATAGRAM, PLAIN_DATAGRAM, LARGEST_DATAGRAM) if scale.short else DATAGRAMS:
        small = size <= PLAIN_DATAGRAM
        octets = (scale.pick(64, 8) if small else scale.pick(256, 16)) * MIB
        load, name = Workload.of(BASE, octets), f"{size}B"
        rows = THREE if size <= LARGEST_UNDECLARED else BARE
        for row, stack in rows:
            transfer = _by(stack, workload=load, datagram=size)
            cases.append(Case.of(f"{row}_{name}", f"{row}, datagrams of {size} octets", transfer))
        ratios += [
            Ratio(f"direct_{name}_over_raw", f"direct_{name}", f"raw_{name}"),
            Ratio(f"direct_{name}_cpu_over_raw", f"direct_{name}", f"raw_{name}", "cpu"),
        ]
        if rows is THREE:
            ratios += [
                Ratio(f"direct_{name}_over_stock", f"direct_{name}", f"stock_{name}"),
                Ratio(f"raw_{name}_over_stock", f"raw_{name}", f"stock_{name}"),
                Ratio(f"direct_{name}_cpu_over_stock", f"direct_{name}", f"stock_{name}", "cpu"),
            ]
    return Group("datagrams", "goodput by datagram size, beside raw and stock", cases, ratios)


def loops(scale: Scale) -> Group:
    """The same transfers on asyncio's event loop and on uvloop's."""
    cases: list[Case] = []
    ratios: list[Ratio] = []
    for size in (PLAIN_DATAGRAM, LARGEST_DATAGRAM):
        octets = (scale.pick(32, 8) if size == PLAIN_DATAGRAM else scale.pick(64, 16)) * MIB
        load = Workload.of(BASE, octets)
        for row, stack in BARE:
            plain, fast = (f"{row}_{size}B_{loop}" for loop in ("asyncio", "uvloop"))
            transfer = _by(stack, workload=load, datagram=size)
            label = f"{row}, datagrams of {size} octets"
            quick = needs(replace(transfer, loop="uvloop"), module="uvloop", extra="uvloop")
            cases += [
                Case.of(plain, f"{label}, asyncio", transfer),
                Case(fast, f"{label}, uvloop", quick),
            ]
            ratios.append(Ratio(f"{row}_{size}B_uvloop_over_asyncio", fast, plain))
    return Group("loops", "goodput on uvloop, beside asyncio's own loop", cases, ratios)


def loss(scale: Scale) -> Group:
    """Goodput on a path that delays datagrams and drops some; relative figures only."""
    cases: list[Case] = []
    ratios: list[Ratio] = []
    for link in SHORT_LINKS if scale.short else LINKS:
        # Enough that some datagrams are lost, and no more than a slow path carries in seconds.
        load = Workload.of(BASE, (2 if link.loss > 0.001 else 4) * MIB)
        name = f"rtt{link.rtt_ms:g}ms_loss{100 * link.loss:g}pct"
        label = f"RTT {link.rtt_ms:g} ms, {100 * link.loss:g} % lost"
        for row, stack in THREE:
            # Paths that lose datagrams are those of plain Ethernet.
            transfer = _by(stack, workload=load, datagram=PLAIN_DATAGRAM, link=link)
            cases.append(Case.of(f"{row}_{name}", f"{row}, {label}", transfer))
        ratios += [
            Ratio(f"direct_{name}_over_raw", f"direct_{name}", f"raw_{name}"),
            Ratio(f"direct_{name}_over_stock", f"direct_{name}", f"stock_{name}"),
        ]
    about = "goodput with loss and delay, relative figures only"
    return Group("loss", about, cases, ratios, rounds=2)


def _by(
    stack: Stack, *, workload: Workload, datagram: int | None = None, link: Link | None = None
) -> Transfer:
    return Transfer(workload=workload, stack=stack, datagram=datagram, link=link)
