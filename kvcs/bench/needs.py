"""Transfers that need what may not be installed: they are skipped, with the reason."""

from __future__ import annotations

import re
import shutil
from collections.abc import Awaitable, Callable
from importlib.util import find_spec
from pathlib import Path

from kvcs.bench.children import Unavailable
from kvcs.bench.figures import Sample
from kvcs.bench.transfer import Certificates, Transfer
from kvcs.bench.workload import GIB, KIB

Runner = Callable[[Certificates, int], Awaitable[Sample]]


def needs_memory(transfer: Transfer, octets: int) -> Runner:
    """A transfer whose processes together hold so many octets."""

    async def run(certificates: Certificates, seed: int) -> Sample:
        free = available_octets()
        if free is not None and free < octets:
            raise Unavailable(
                f"it needs {octets / GIB:.1f} GiB of memory, {free / GIB:.1f} are free"
            )
        return await transfer.run(certificates, seed)

    return run


def available_octets() -> int | None:
    """Memory that programs may take without swapping; None where the system does not tell."""
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return None
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", text, re.MULTILINE)
    return None if found is None else int(found[1]) * KIB


def needs(
    transfer: Transfer, *, module: str, program: str | None = None, extra: str = "bench"
) -> Runner:
    """A transfer that needs something which may not be installed.

    Args:
        transfer: what is measured.
        module: a package that its processes import.
        program: a command that they run.
        extra: extra of kvcs that brings the package.
    """

    async def run(certificates: Certificates, seed: int) -> Sample:
        if find_spec(module) is None:
            raise Unavailable(f"{module} is not installed: pip install '.[{extra}]'")
        if program is not None and shutil.which(program) is None:
            raise Unavailable(f"there is no {program} on PATH")
        return await transfer.run(certificates, seed)

    return run
