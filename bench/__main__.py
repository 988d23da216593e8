"""The command: ``python -m bench [--short] [--json]``."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.children import run_command
from bench.figures import Samples, document, rate_mb
from bench.machine import facts
from bench.rows import ROWS, Certificates
from bench.tables import report
from bench.workload import KIB, MIB, Workload

OBJECT_SIZES: Final = (32 * KIB, 256 * KIB)
ROUND_SECONDS: Final = 300.0
"""Longest time of one round."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured."""

    rounds: int
    """How often each row runs."""

    octets: int
    """Object data of one transfer."""

    stock_octets: int
    """The same for the stock library, which is slow and steady."""


FULL: Final = Plan(5, 128 * MIB, 32 * MIB)
SHORT: Final = Plan(2, 32 * MIB, 16 * MIB)


def transfers(plan: Plan) -> list[tuple[str, str, Workload]]:
    """Row, size name and workload of each transfer of a round."""
    found = [
        (row, workload.name, workload)
        for workload in (Workload.of(size, plan.octets) for size in OBJECT_SIZES)
        for row in ROWS
        if row != "stock"
    ]
    # One stream, written at once: Objects mean nothing to it.
    return [*found, ("stock", "", Workload.of(OBJECT_SIZES[0], plan.stock_octets))]


def in_turn(items: Sequence[Any], round_number: int) -> list[Any]:
    """The items of a round, which begins with another one each time."""
    start = round_number % len(items)
    return [*items[start:], *items[:start]]


async def measure(plan: Plan, certificates: Certificates) -> Samples:
    """Run every round; says on standard error how far it is.

    Raises:
        ChildFailed: a transfer failed.
        TimeoutError: a round took too long.
    """
    wanted = transfers(plan)
    samples: Samples = {(row, size): [] for row, size, _ in wanted}
    for number in range(plan.rounds):
        async with asyncio.timeout(ROUND_SECONDS):
            for row, size, workload in in_turn(wanted, number):
                sample = await ROWS[row](workload, certificates)
                samples[row, size].append(sample)
                rate = rate_mb([sample]).median
                _say(f"round {number + 1}/{plan.rounds}: {row} {size or '-'}: {rate:.1f} MB/s")
    return samples


async def run(plan: Plan) -> tuple[Samples, dict[str, Any]]:
    """Make certificates, measure, and say on what."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvcs-bench-") as folder:
        certificates = Certificates(Path(folder) / "certs")
        name = ("--name", "127.0.0.1")
        await run_command("kvcs", "certs", "--out", str(certificates.folder), *name)
        samples = await measure(plan, certificates)
    about = {"rounds": plan.rounds, "octets": plan.octets, "stock_octets": plan.stock_octets}
    seconds = round(time.monotonic() - begun)
    return samples, {**facts(), **about, "seconds": seconds}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="Measure kvcs beside raw QUIC of the same backend, on loopback.",
    )
    parser.add_argument("--short", action="store_true", help="a smaller run, about half a minute")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    chosen = parser.parse_args(arguments)
    samples, about = asyncio.run(run(SHORT if chosen.short else FULL))
    print(json.dumps(document(samples, about), indent=2) if chosen.json else report(samples, about))


def _say(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
