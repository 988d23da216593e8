"""Transfers that need what may not be installed: they are skipped, with the reason."""

from __future__ import annotations

import shutil
from collections.abc import Awaitable, Callable
from importlib.util import find_spec

from kvcs.bench.children import Unavailable
from kvcs.bench.figures import Sample
from kvcs.bench.transfer import Certificates, Transfer

Runner = Callable[[Certificates, int], Awaitable[Sample]]


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
            raise Unavailable(f"{module} is not installed: pip install 'kvcs[{extra}]'")
        if program is not None and shutil.which(program) is None:
            raise Unavailable(f"there is no {program} on PATH")
        return await transfer.run(certificates, seed)

    return run
